"""DeepSeek-V2 (arXiv:2405.04434), and the configs, blocks and tables that it shares with its successors.

Layers have latent attention, and many small experts beside shared experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from ...nn import Transformer, YarnScaling
from .. import _config_types as config_types
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, NotNegative, Number, OptionalSize, PublishedConfig, Size
from .._family import Family, ModelConfig
from .._rotary_attributes import RotaryWithTemperature
from .._weight_rules import Rule
from ._common import EDGES, GATED, KeyHeads, LAYER, PRE_NORMS, SIZES, WIDTH
from ._decoder import damping, decoder, gated_mlp, norm, rotary_of, Together
from ._mixtures import FIRST_DENSE, MIXTURE, mixture_beside_shared, SHARED, SHARED_ATTRIBUTES


LATENT_BYTE: dict[str, Any] = {
    **{"vocab": 256, "embed": 64, "layers": 4, "heads": 4, "mlp": 128, "expert_mlp": 32},
    **{"latent": 32, "head_dim": 16, "rope_dim": 8, "v_dim": 16},
}
"""The sizes that the families' presets of small byte models have in common."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(ModelConfig):
    """Base class of the configs of decoders with latent attention, with or without experts."""

    layers: config_types.LayerCount
    """The number of layers."""
    heads: config_types.Size
    """The number of heads."""
    mlp: config_types.Size
    """Hidden features of a dense layer."""
    q_latent: config_types.Size | None
    """Channels of the queries' latent; None: queries have no latent."""
    latent: config_types.Size = 512
    """Channels of the latent of keys and values."""
    head_dim: config_types.Size = 128
    """Channels of a head's key that are not rotated."""
    rope_dim: config_types.Size = 64
    """Channels of the rotated key."""
    v_dim: config_types.Size = 128
    """Channels of a head's value."""
    theta: config_types.Positive = 10_000.0
    """The base of rotary positions."""
    scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions; None: no scaling."""
    temperature: config_types.Number = 0.0
    """The `mscale_all_dim` of a scaling (usually YaRN), which makes attention scores grow with the scaling's factor; 0:
    scores do not grow."""
    activation: str = "silu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    bias: bool = False
    """Whether the maps to latents, and the attention's output, have biases."""
    eps: config_types.NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    max_seq: config_types.Length = 163_840
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(LatentAttentionConfig):
    """Base class of the configs of DeepSeek-V2, DeepSeek-V3 and their successors."""

    expert_mlp: config_types.Size
    """Hidden features of an expert."""
    experts: config_types.Size
    """The number of experts of a layer."""
    top_k: config_types.Size
    """The number of experts that each token chooses."""
    shared: config_types.OptionalSize
    """The number of shared experts."""
    first_dense: config_types.Index
    """The number of layers before the first layer with experts."""
    dense_layers: tuple[config_types.Index, ...] = ()
    """The indices of later layers without experts."""
    groups: config_types.Size
    """The number of groups of experts."""
    kept_groups: config_types.Size
    """The number of groups from which a token's experts are chosen."""
    scale: config_types.Number
    """A factor of the experts' weights."""
    balance: config_types.NotNegative
    """The weight of the loss `LoadBalance`, which is computed for each row."""

    @property
    def mixtures(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(n >= self.first_dense and n not in self.dense_layers for n in range(self.layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidLatentConfig(LatentConfig):
    """Base class of configs whose experts are chosen by biased sigmoids (DeepSeek-V3 and V3.2)."""

    experts: config_types.Size = 256
    top_k: config_types.Size = 8
    shared: config_types.OptionalSize = 1
    first_dense: config_types.Index = 3
    groups: config_types.Size = 8
    kept_groups: config_types.Size = 4
    scale: config_types.Number = 2.5
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    balance: config_types.NotNegative = 0.0001


class LatentKind(NamedTuple):
    """A kind of layer."""

    is_mixture: bool
    """Whether the layer has experts."""
    shares: str | None = None
    """The name by which the layer shares its selected keys with later layers; None: it does not share them."""
    reads: str | None = None
    """The name of the selected keys that the layer reads from an earlier layer; None: it reads none."""


def build_latent(
    config: LatentConfig,
    mixture: Callable[[Key[Array, ""]], nn.MoE],
    *,
    interleaved: bool,
    temperature: nn.LogTemperature | None = None,
    indexer: Callable[[Key[Array, ""]], nn.Indexer] | None = None,
    kinds: Sequence[LatentKind | Together[LatentKind]] | None = None,
    mixture_norms: bool = False,
    key: Key[Array, ""],
) -> nn.Transformer:
    """Return a decoder with latent attention, and with gated layers or mixtures.

    Args:
        config: The config.
        mixture: A function `mixture(key)` that builds a mixture.
        interleaved: Whether neighboring channels are rotated together.
        temperature: The growth of scores with positions; None: scores do not grow.
        indexer: A function `indexer(key)` that builds the indexer of a layer, unless the layer reads the keys that an
            earlier layer selected; None: no layer has an indexer.
        kinds: The kinds of the layers; None: dense layers and mixtures as in the config, which share no selected keys.
        mixture_norms: Whether there are norms after mixtures (A.X K1).
        key: The key of the weights.
    """

    def block(kind: LatentKind, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = latent_attention(
            config,
            interleaved=interleaved,
            temperature=temperature,
            indexer=None if indexer is None or kind.reads else indexer(jax.random.fold_in(mixer_key, 0)),
            key=mixer_key,
        )
        layer = mixture(feed_forward_key) if kind.is_mixture else gated_mlp(config, key=feed_forward_key)
        output_norm = norm(config) if mixture_norms and kind.is_mixture else None
        return nn.Block(
            nn.Residual(attention, norm(config), shares=kind.shares, reads=kind.reads),
            nn.Residual(layer, norm(config), output_norm=output_norm),
        )

    return decoder(config, block, kinds or [LatentKind(is_mixture) for is_mixture in config.mixtures], key=key)


def latent_attention(
    config: LatentAttentionConfig,
    *,
    interleaved: bool = False,
    temperature: nn.LogTemperature | None = None,
    indexer: nn.Indexer | None = None,
    sinks: bool = False,
    key: Key[Array, ""],
) -> nn.LatentAttention:
    """Return latent attention of the config's sizes.

    With `config.temperature`, attention scores grow with the scaling's factor.

    Args:
        config: The config.
        interleaved: Whether neighboring channels are rotated together.
        temperature: The growth of scores with positions; None: scores do not grow.
        indexer: The indexer; None: each query sees all keys.
        sinks: Whether each head has a sink.
        key: The key of the weights.
    """
    scaling = config.scaling
    return nn.LatentAttention(
        embed=config.embed,
        heads=config.heads,
        head_dim=config.head_dim,
        latent=config.latent,
        q_latent=config.q_latent,
        v_dim=config.v_dim,
        latent_norm=nn.RMSNorm("latent", latent=config.latent),
        query_latent_norm=None if config.q_latent is None else nn.RMSNorm("q_latent", q_latent=config.q_latent),
        rotary=rotary_of(config, config.rope_dim, "rope_dim", interleaved=interleaved, scaling=scaling),
        indexer=indexer,
        bias="latents" if config.bias else False,
        output_std=damping(config) * (config.heads * config.v_dim) ** -0.5,
        scores=nn.Scores(
            score_scale(config),
            temperature,
            sinks=jnp.zeros(config.heads, jnp.float32) if sinks else None,
        ),
        key=key,
    )


def score_scale(config: LatentAttentionConfig) -> float:
    """Return the factor of attention scores, which `config.temperature` makes grow with the scaling's factor."""
    scaling, growth = config.scaling, 1.0
    if config.temperature and isinstance(scaling, _WITH_FACTOR):
        growth = nn.yarn_magnitude(scaling.factor, config.temperature) ** 2
    return growth * (config.head_dim + config.rope_dim) ** -0.5


_WITH_FACTOR = nn.LinearScaling | nn.DynamicScaling | nn.Llama3Scaling | nn.YarnScaling | nn.LongRopeScaling
_FIRST_DENSE = (FIRST_DENSE, Unpublished("dense_layers", (), "only the first layers can be dense"))


def latent_attributes(
    positions: Entry = RotaryWithTemperature(),
    mixtures: tuple[Entry, ...] = _FIRST_DENSE,
    activation: tuple[Entry, ...] = (Activation(),),
    *,
    max_seq: int,
) -> tuple[Entry, ...]:
    """Return the entries of a `LatentConfig`.

    Args:
        positions: The entry of rotary positions.
        mixtures: The entries of dense layers.
        activation: The entries of the activation.
        max_seq: Transformers' default for the length of the longest rows.
    """
    return (
        *latent_attention_attributes(positions, activation, max_seq=max_seq),
        *(*SHARED_ATTRIBUTES, *mixtures),
        Expect("moe_layer_freq", 1),
        Ignore("aux_loss_alpha", "seq_aux", "ep_size"),  # settings of training
    )


def latent_attention_attributes(
    positions: Entry = RotaryWithTemperature(),
    activation: tuple[Entry, ...] = (Activation(),),
    *,
    value_size: Entry = Count("v_dim", "v_head_dim"),
    tied: bool = False,
    max_seq: int,
) -> tuple[Entry, ...]:
    """Return the entries of a `LatentAttentionConfig`.

    Args:
        positions: The entry of rotary positions.
        activation: The entries of the activation.
        value_size: The entry of the channels of a head's value.
        tied: Transformers' default for whether the head is tied to the table.
        max_seq: Transformers' default for the length of the longest rows.
    """
    return (
        *(*SIZES, WIDTH, EqualKeyHeads(), positions),
        Count("latent", "kv_lora_rank"),
        Attribute("q_latent", "q_lora_rank"),
        Count("head_dim", "qk_nope_head_dim"),
        Count("rope_dim", "qk_rope_head_dim"),
        value_size,
        Attribute("eps", "rms_norm_eps"),
        Attribute("tied", "tie_word_embeddings", tied),
        Attribute("max_seq", "max_position_embeddings", max_seq),
        *activation,
        Attribute("bias", "attention_bias", False),
        Ignore("head_dim", "qk_head_dim"),  # sums of other sizes
    )


class EqualKeyHeads(Entry):
    """The attribute for key heads; latent attention has as many as query heads, and configs have no field for them."""

    def read(self, published: config_types.PublishedConfig) -> Fields:
        """Return no field; refuse another number."""
        heads, kv_heads = published.count("num_attention_heads"), KeyHeads().read(published)["kv_heads"]
        if kv_heads != heads:
            published.refuse(
                f"num_key_value_heads={kv_heads}: latent attention has as many key heads as query heads, {heads}."
            )
        return {}

    def write(self, config: LatentAttentionConfig) -> config_types.Attributes:
        """Return the attribute."""
        return {"num_key_value_heads": config.heads}


_ATTENTION, _INTO = f"{LAYER}self_attn.", "(heads width) inputs -> heads width inputs"
_QUERIES = ("mixer.layer.query.weight", "mixer.layer.query_rope.weight")
DENSE_LATENT_WEIGHTS = (
    *(*EDGES, *PRE_NORMS, *GATED),
    Rule(f"{_ATTENTION}kv_a_proj_with_mqa.weight", ("mixer.layer.latent_down.weight", "mixer.layer.key_rope.weight")),
    Rule(f"{_ATTENTION}kv_a_proj_with_mqa.bias", ("mixer.layer.latent_down.bias", "mixer.layer.key_rope.bias")),
    Rule(f"{_ATTENTION}kv_a_layernorm.weight", "mixer.layer.latent_norm.weight"),
    Rule(
        f"{_ATTENTION}kv_b_proj.weight",
        ("mixer.layer.key_up.weight", "mixer.layer.value_up.weight"),
        _INTO,
        groups="heads",
    ),
    # GGUF files have two arrays for each head: one for the keys, transposed, and one for the values.
    Rule(
        f"{_ATTENTION}k_b_proj.{{expert}}.weight",
        "mixer.layer.key_up.weight",
        "inputs width -> width inputs",
        variant=True,
    ),
    Rule(f"{_ATTENTION}v_b_proj.{{expert}}.weight", "mixer.layer.value_up.weight", variant=True),
    Rule(f"{_ATTENTION}o_proj.weight", "mixer.layer.output.weight", "embed (heads width) -> embed heads width"),
    Rule(f"{_ATTENTION}o_proj.bias", "mixer.layer.output.bias"),
    Rule(f"{_ATTENTION}q_proj.weight", _QUERIES, _INTO, groups="heads", lacks="mixer.layer.query_down"),
    Rule(f"{_ATTENTION}q_a_proj.weight", "mixer.layer.query_down.weight"),
    Rule(f"{_ATTENTION}q_a_proj.bias", "mixer.layer.query_down.bias"),
    Rule(f"{_ATTENTION}q_a_layernorm.weight", "mixer.layer.query_latent_norm.weight"),
    Rule(f"{_ATTENTION}q_b_proj.weight", _QUERIES, _INTO, groups="heads", needs="mixer.layer.query_down"),
)
LATENT_WEIGHTS = (*DENSE_LATENT_WEIGHTS, *MIXTURE, *SHARED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(LatentConfig):
    """The config of a DeepSeek-V2."""

    experts: Size = 64
    top_k: Size = 6
    shared: OptionalSize = 2
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.0
    balance: NotNegative = 0.001


def build_deepseek_v2(config: DeepSeekV2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a DeepSeek-V2 with random weights."""
    mixture = functools.partial(mixture_beside_shared, config)
    return build_latent(config, mixture, interleaved=True, key=key)


class _Method(Entry):
    """The attribute `topk_method`: a token chooses among all experts (greedy), or only in its best groups."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return one group if the method is greedy, even if `n_group` and `topk_group` state groups; else no field."""
        published.expect("topk_method", "greedy", "group_limited_greedy")
        is_greedy = published.text("topk_method", "greedy") == "greedy"
        return {"groups": 1, "kept_groups": 1} if is_greedy else {}

    def write(self, config: DeepSeekV2Config) -> Attributes:
        """Return the method's name."""
        return {"topk_method": "greedy" if config.groups == 1 else "group_limited_greedy"}


_YARN = YarnScaling(40.0, 4096, magnitude=1.0)
_PRESETS = {
    "deepseek-v2-byte-500k": DeepSeekV2Config(**LATENT_BYTE, q_latent=None, experts=16, top_k=4, tied=True),
    "deepseek-v2-lite": DeepSeekV2Config(
        vocab=102_400,
        embed=2048,
        layers=27,
        heads=16,
        mlp=10_944,
        expert_mlp=1408,
        q_latent=None,
        scaling=_YARN,
        temperature=0.707,
    ),
    "deepseek-v2": DeepSeekV2Config(
        vocab=102_400,
        embed=5120,
        layers=60,
        heads=128,
        mlp=12_288,
        expert_mlp=1536,
        q_latent=1536,
        experts=160,
        groups=8,
        kept_groups=3,
        scale=16.0,
        scaling=_YARN,
        temperature=0.707,
    ),
}

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    DeepSeekV2Config,
    build_deepseek_v2,
    _PRESETS,
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    (
        *latent_attributes(max_seq=2048),
        _Method(),
        Attribute("balance", ("router_aux_loss_coef", "aux_loss_alpha"), 0.001, written=("aux_loss_alpha",)),
        Expect("scoring_func", "softmax"),
        Expect("norm_topk_prob", False),
        Expect("mlp_bias", False),
    ),
    LATENT_WEIGHTS,
)
