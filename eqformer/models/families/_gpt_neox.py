"""GPT-NeoX (Black et al. 2022) with Pythia (Biderman et al. 2023), StarCoder2 (Lozhkov et al. 2024), Jais 2 (2025).

Their norms are `LayerNorm`s with biases, and their feed-forward layers have no gates. GPT-NeoX rotates a part of each
head, and its attention and feed-forward layer read the same input.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, LayerNorm, ParallelResidual, Residual, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Fraction, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, OLDER_DECODER_CLASSIFIER
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, LAYER, leaf_paths, PRE_NORMS, QKV, SIZES, WIDTH
from ._decoder import attention, decoder, mlp, part_rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """The config of a GPT-NeoX."""

    rotary_fraction: Fraction = 0.25
    """The fraction of a head's channels that is rotated."""
    parallel: bool = True
    """Whether attention and feed-forward layer read the same input."""
    bias: bool = True
    """Whether the attention's four projections have biases."""
    activation: str = "gelu"
    eps: NotNegative = 1e-5
    max_seq: Length = 2048

    def __post_init__(self):
        if self.kv_heads != self.heads or self.head_dim is not None or self.embed % self.heads:
            raise ValueError(
                f"GPTNeoXConfig(embed={self.embed}, heads={self.heads}, kv_heads={self.kv_heads}, "
                f"head_dim={self.head_dim}): a published GPT-NeoX has as many key heads as query heads, and "
                "embed / heads channels in each head; give kv_heads=heads, head_dim=None, and heads that divide embed."
            )


def build_gpt_neox(config: GPTNeoXConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a GPT-NeoX with random weights."""
    rotary = part_rotary(config)

    def block(key: Key[Array, ""]) -> Block | ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = Residual(attention(config, bias=config.bias, rotary=rotary, key=mixer_key), _norm(config))
        feed_forward = Residual(mlp(config, config.mlp, bias=True, key=feed_forward_key), _norm(config))
        return ParallelResidual((mixer, feed_forward)) if config.parallel else Block(mixer, feed_forward)

    return decoder(config, block, final_norm=_norm(config), key=key)


def _norm(config: DecoderConfig) -> LayerNorm:
    return LayerNorm("embed", embed=config.embed, eps=config.eps)


_BOTH = ("weight", "bias")


def _mlp_weights(prefix: str, names: tuple[str, str]) -> tuple[Rule, ...]:
    """Return the rules for the two maps of a feed-forward layer without gates."""
    maps = zip(names, ("up", "down"), strict=True)
    return tuple(
        Rule(f"{prefix}{name}.{leaf}", f"feed_forward.layer.{path}.{leaf}") for name, path in maps for leaf in _BOTH
    )


class _UnstatedKeyHeads(Entry):
    """The number of key heads, which no attribute states: it equals the number of query heads."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `kv_heads`."""
        return {"kv_heads": published.read("num_attention_heads", Size)}

    def write(self, config: GPTNeoXConfig) -> Attributes:
        """Return no attribute."""
        return {}


class _RepeatedRotary(Entry):
    """Newer names of the attributes for rotary positions, which transformers also writes since release 4.45."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse a newer attribute whose value differs from the older attribute's value."""
        published.expect("rope_theta", published.take("rotary_emb_base", 10_000.0))
        published.expect("partial_rotary_factor", published.take("rotary_pct", 0.25))
        return {}

    def write(self, config: GPTNeoXConfig) -> Attributes:
        """Return no attribute."""
        return {}


def _gpt_neox(embed: int, layers: int, heads: int, vocab: int = 50_304) -> GPTNeoXConfig:
    return GPTNeoXConfig(vocab, embed, layers, heads, heads, 4 * embed)


_GPT_NEOX_PRESETS = {
    "gpt-neox-byte-500k": GPTNeoXConfig(256, 96, 4, 6, 6, 384, tied=True),
    "pythia-70m": _gpt_neox(512, 6, 8),
    "pythia-160m": _gpt_neox(768, 12, 12),
    "pythia-410m": _gpt_neox(1024, 24, 16),
    "pythia-1b": _gpt_neox(2048, 16, 8),
    "pythia-1.4b": _gpt_neox(2048, 24, 16),
    "pythia-2.8b": _gpt_neox(2560, 32, 32),
    "pythia-6.9b": _gpt_neox(4096, 32, 32, 50_432),
    "pythia-12b": _gpt_neox(5120, 36, 40, 50_688),
    "gpt-neox-20b": dataclasses.replace(_gpt_neox(6144, 44, 64, 50_432), activation="gelu_tanh"),
}

_NEOX = "gpt_neox.layers.{layer}."
_SUBLAYERS = (("input_layernorm", "mixer"), ("post_attention_layernorm", "feed_forward"))
GPT_NEOX = Family(
    "gpt_neox",
    GPTNeoXConfig,
    build_gpt_neox,
    _GPT_NEOX_PRESETS,
    "GPTNeoXForCausalLM",
    "gpt_neox",
    (
        *(*SIZES, WIDTH, _UnstatedKeyHeads()),
        # `_RepeatedRotary` is before `RotaryPositions`, because `RotaryPositions` adds the contents of
        # `rope_parameters` to the attributes.
        _RepeatedRotary(),
        RotaryPositions(older="rotary_emb_base"),
        RotaryFraction(0.25, published="rotary_pct"),
        Attribute("parallel", "use_parallel_residual", True),
        Attribute("bias", "attention_bias", True),
        Activation("gelu"),
        Attribute("eps", "layer_norm_eps", 1e-5),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("max_seq", "max_position_embeddings", 2048),
        Ignore("classifier_dropout"),
        Ignore("attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size"),  # in the first configurations
    ),
    (
        Rule("gpt_neox.embed_in.weight", "embedding.weight"),
        *(Rule(f"gpt_neox.final_layer_norm.{leaf}", f"norm.{leaf}") for leaf in _BOTH),
        Rule("embed_out.weight", "head.weight"),
        *(Rule(f"{_NEOX}{name}.{leaf}", f"{path}.norm.{leaf}") for name, path in _SUBLAYERS for leaf in _BOTH),
        Rule(
            f"{_NEOX}attention.query_key_value.weight",
            leaf_paths(QKV, "weight"),
            "(heads dim) embed -> heads dim embed",
            groups="heads",
        ),
        Rule(
            f"{_NEOX}attention.query_key_value.bias",
            leaf_paths(QKV, "bias"),
            "(heads dim) -> heads dim",
            groups="heads",
        ),
        Rule(f"{_NEOX}attention.dense.weight", "mixer.layer.output.weight", "embed (heads dim) -> embed heads dim"),
        Rule(f"{_NEOX}attention.dense.bias", "mixer.layer.output.bias"),
        *_mlp_weights(f"{_NEOX}mlp.", ("dense_h_to_4h", "dense_4h_to_h")),
    ),
    ignored_suffixes=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    classifier=OLDER_DECODER_CLASSIFIER,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarCoder2Config(DecoderConfig):
    """The config of a StarCoder2."""

    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    bias: bool = True
    """Whether the maps of attention and feed-forward layers have biases."""
    activation: str = "gelu_tanh"
    eps: NotNegative = 1e-5
    tied: bool = True
    theta: Positive = 1_000_000.0
    max_seq: Length = 16_384


def build_starcoder2(config: StarCoder2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a StarCoder2 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=config.window, bias=config.bias, key=mixer_key)
        feed_forward = mlp(config, config.mlp, bias=config.bias, key=feed_forward_key)
        return Block(Residual(mixer, _norm(config)), Residual(feed_forward, _norm(config)))

    return decoder(config, block, final_norm=_norm(config), key=key)


_STARCODER2_PRESETS = {
    "starcoder2-byte-500k": StarCoder2Config(256, 96, 4, 6, 2, 384, theta=1e4),
    "starcoder2-3b": StarCoder2Config(49_152, 3072, 30, 24, 2, 12_288, window=4096, theta=999_999.4420358813),
    "starcoder2-7b": StarCoder2Config(49_152, 4608, 32, 36, 4, 18_432, window=4096),
    "starcoder2-15b": StarCoder2Config(49_152, 6144, 40, 48, 4, 24_576, window=4096, theta=100_000.0, tied=False),
}

_NORM_BIASES = tuple(Rule(f"{LAYER}{name}.bias", f"{path}.norm.bias") for name, path in _SUBLAYERS)
STARCODER2 = Family(
    "starcoder2",
    StarCoder2Config,
    build_starcoder2,
    _STARCODER2_PRESETS,
    "Starcoder2ForCausalLM",
    "starcoder2",
    (
        *decoder_attributes(kv_heads=2, eps="norm_epsilon", tied=True, max_seq=4096),
        Attribute("window", "sliding_window", None),
        Attribute("bias", "use_bias", True),
        Activation("gelu_pytorch_tanh"),
        # The publisher's own program reads these attributes. All models of this family have these values.
        Expect("norm_type", "layer_norm", written=False),
        Expect("mlp_type", "default", written=False),
        Ignore("residual_dropout", "embedding_dropout"),
        Ignore("activation_function", "layer_norm_epsilon"),  # `hidden_act` and `norm_epsilon` are read instead.
        Ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
    (
        *(*EDGES, Rule("model.norm.bias", "norm.bias"), *ATTENTION, *PRE_NORMS, *_NORM_BIASES),
        *_mlp_weights(f"{LAYER}mlp.", ("c_fc", "c_proj")),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jais2Config(DecoderConfig):
    """The config of a Jais 2."""

    bias: bool = True
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = True
    """Whether feed-forward layers have biases."""
    activation: str = "relu_squared"
    eps: NotNegative = 1e-5
    max_seq: Length = 8192


def build_jais2(config: Jais2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Jais 2 with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, key=mixer_key)
        feed_forward = mlp(config, config.mlp, bias=config.mlp_bias, key=feed_forward_key)
        return Block(Residual(mixer, _norm(config)), Residual(feed_forward, _norm(config)))

    return decoder(config, block, final_norm=_norm(config), key=key)


_JAIS2_PRESETS = {
    "jais-2-byte-500k": Jais2Config(256, 96, 4, 6, 6, 384, tied=True),
    "jais-2-8b": Jais2Config(150_272, 3328, 32, 26, 26, 26_624),
}

JAIS2 = Family(
    "jais2",
    Jais2Config,
    build_jais2,
    _JAIS2_PRESETS,
    "Jais2ForCausalLM",
    "jais2",
    (
        *decoder_attributes(eps="layer_norm_eps", max_seq=8192),
        Attribute("bias", "attention_bias", True),
        Attribute("mlp_bias", "mlp_bias", True),
        Activation("relu2"),
    ),
    (
        *(*EDGES, Rule("model.norm.bias", "norm.bias"), *ATTENTION, *PRE_NORMS, *_NORM_BIASES),
        *_mlp_weights(f"{LAYER}mlp.", ("up_proj", "down_proj")),
    ),
)
