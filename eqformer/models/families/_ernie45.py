"""ERNIE 4.5 (Baidu 2025): a Llama whose neighboring channels are rotated together; some models have experts."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, MoE, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Index, Length, NotNegative, OptionalSize, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import layers_of
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, LOGIT_BIAS, PRE_NORMS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, pre_norm_block, rotary_of
from ._mixtures import MIXTURE, mixture, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45Config(DecoderConfig):
    """The config of a dense ERNIE 4.5."""

    theta: Positive = 500_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether all maps of attention and feed-forward layers have biases."""
    tied: bool = True
    max_seq: Length = 131_072


def build_ernie45(config: Ernie45Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense ERNIE 4.5 with random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, rotary=rotary, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.bias, key=feed_forward_key))

    return decoder(config, block, key=key)


_PRESETS = {
    "ernie4.5-byte-500k": Ernie45Config(256, 96, 4, 6, 2, 256, head_dim=16, theta=1e4, bias=True),
    "ernie4.5-0.3b": Ernie45Config(103_424, 1024, 18, 16, 2, 3072, head_dim=128),
}

ERNIE45 = Family(
    "ernie4_5",
    Ernie45Config,
    build_ernie45,
    _PRESETS,
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    (
        *decoder_attributes(RotaryPositions(500_000.0), kv_heads=2, tied=True, max_seq=131_072),
        StatedHeadSize(128),
        Attribute("bias", "use_bias", False),
        Activation(),
    ),
    (*EDGES, *ATTENTION, *PRE_NORMS, *gated_weights(bias=True)),
)


class _LastMixture(Entry):
    """The last layer that may have experts; -1, or a missing attribute, means the model's last layer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `moe_last`."""
        last = published.count("moe_layer_end_index", -1, minimum=-1)
        return {"moe_last": layers_of(published) - 1 if last == -1 else last}

    def write(self, config: "Ernie45MoEConfig") -> Attributes:
        """Return the attribute."""
        return {"moe_layer_end_index": config.moe_last}


_MOE_ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(RotaryPositions(500_000.0), kv_heads=4, tied=True, max_seq=131_072),
    Attribute("bias", "use_bias", False),
    Count("expert_mlp", "moe_intermediate_size", 1536),
    # If a configuration has both names, transformers uses the first name.
    Count("experts", ("num_experts", "moe_num_experts"), 64, written=("moe_num_experts",)),
    Count("top_k", ("num_experts_per_tok", "moe_k"), 6, written=("moe_k",)),
    Attribute("shared", "moe_num_shared_experts", 2),
    Attribute("moe_first", "moe_layer_start_index", 1),
    Count("moe_every", "moe_layer_interval", 1),
    _LastMixture(),
    Attribute("balance", "router_aux_loss_coef", 0.001),
    Activation(),
    Expect("moe_norm_min", 1e-12),
    Expect("moe_gate", "topk", written=False),
    Ignore("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),  # settings of training
)
_BIAS = "feed_forward.layer.router.selection_bias"
_MOE_WEIGHTS = (
    *(
        *EDGES,
        *LOGIT_BIAS,
        *ATTENTION,
        *PRE_NORMS,
        *gated_weights(bias=True),
        *MIXTURE,
    ),
    *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_experts.", bias=True),
    Rule(f"{LAYER}mlp.moe_statics.e_score_correction_bias", _BIAS, "1 experts -> experts"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ernie45MoEConfig(DecoderConfig):
    """The config of an ERNIE 4.5 with experts; `mlp` is the width of a dense layer."""

    expert_mlp: Size
    """Hidden features of an expert."""
    moe_last: Index
    """The last layer that may have experts."""
    moe_first: Index = 1
    """The first layer that may have experts."""
    moe_every: Size = 1
    """Every `moe_every`-th layer has experts, if it is in the range from `moe_first` to `moe_last`."""
    experts: Size = 64
    """The number of experts of a layer."""
    top_k: Size = 6
    """The number of experts that each token chooses."""
    shared: OptionalSize = 2
    """The number of shared experts."""
    theta: Positive = 500_000.0
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the maps of attention and feed-forward layers and the head have biases; experts have no biases."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    tied: bool = True
    max_seq: Length = 131_072

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        allowed = range(self.moe_first, self.moe_last + 1)
        return tuple(layer in allowed and (layer + 1) % self.moe_every == 0 for layer in range(self.layers))


def build_ernie45_moe(config: Ernie45MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an ERNIE 4.5 with experts and random weights."""
    rotary = rotary_of(config, config.head_size, interleaved=True, scaling=config.scaling)

    def build_mixture(key: Key[Array, ""]) -> MoE:
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        width = config.shared * config.expert_mlp
        return mixture(
            config,
            functools.partial(small_expert, config),
            shared=gated_mlp(config, mlp=width, bias=config.bias, key=shared_key) if width else None,
            normalize=True,
            balanced=True,
            router=router_key,
            experts=experts_key,
        )

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, rotary=rotary, key=mixer_key)
        if is_mixture:
            return pre_norm_block(config, mixer, build_mixture(feed_forward_key))
        return pre_norm_block(config, mixer, gated_mlp(config, bias=config.bias, key=feed_forward_key))

    return decoder(config, block, config.kinds, logit_bias=config.bias, key=key)


_MOE_PRESETS = {
    "ernie4.5-moe-byte-500k": Ernie45MoEConfig(
        *(256, 64, 4, 4, 2, 128), expert_mlp=32, moe_last=3, experts=12, top_k=4, theta=1e4, bias=True, tied=False
    ),
    "ernie4.5-21b-a3b": Ernie45MoEConfig(103_424, 2560, 28, 20, 4, 12_288, expert_mlp=1536, moe_last=27),
    "ernie4.5-300b-a47b": Ernie45MoEConfig(
        *(103_424, 8192, 54, 64, 8, 28_672), expert_mlp=3584, moe_first=3, moe_last=53, top_k=8, shared=0, tied=False
    ),
}

ERNIE45_MOE = Family(
    "ernie4_5_moe",
    Ernie45MoEConfig,
    build_ernie45_moe,
    _MOE_PRESETS,
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    _MOE_ATTRIBUTES,
    _MOE_WEIGHTS,
    ignored_prefixes=("model.mtp_",),
)
