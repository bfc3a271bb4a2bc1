"""gpt-oss (OpenAI 2025, arXiv:2508.10925): sinks, biases everywhere, clamped experts, windows in every second layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import Block, GatedMLP, RotaryScaling, Scores, Transformer, YarnScaling
from .._attributes import Attribute, Count, Expect, Ignore, Unpublished
from .._config_types import Index, Length, NotNegative, Positive, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import all_but_every, Period, Windows
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, layer_windows, pre_norm_block
from ._mixtures import mixture, stacked_mixture_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOSSConfig(DecoderConfig):
    """The config of a gpt-oss; `mlp` is the width of an expert."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 128
    """The number of tokens that the layers of `window_layers` see."""
    experts: Size = 32
    """The number of experts of a layer."""
    top_k: Size = 4
    """The number of experts that each token chooses."""
    limit: Positive = 7.0
    """The bound of the outputs of an expert's maps `gate` and `up`."""
    head_dim: Size = 64
    activation: str = "quick_gelu"
    theta: Positive = 150_000.0
    scaling: RotaryScaling | None = YarnScaling(32.0, 4096, truncate=False)
    eps: NotNegative = 1e-5
    bias: bool = True
    """Whether the attention's four projections have biases."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 131_072


def build_gpt_oss(config: GPTOSSConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a gpt-oss with random weights."""

    def expert(key: Key[Array, ""]) -> GatedMLP:
        return gated_mlp(config, bias=True, limit=config.limit, offset=1.0, key=key)

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        router_key, experts_key = jax.random.split(feed_forward_key)
        feed_forward = mixture(config, expert, normalize=True, bias=True, router=router_key, experts=experts_key)
        sinks = jnp.zeros(config.heads, jnp.float32)
        mixer = attention(config, window=window, bias=config.bias, scores=Scores(sinks=sinks), key=mixer_key)
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, layer_windows(config), key=key)


_PRESETS = {
    "gpt-oss-byte-500k": GPTOSSConfig(
        *(256, 64, 4, 4, 2, 32),
        window_layers=(0, 2),
        window=64,
        experts=12,
        head_dim=16,
        theta=1e4,
        scaling=None,
        tied=True,
    ),
    "gpt-oss-20b": GPTOSSConfig(201_088, 2880, 24, 64, 8, 2880, window_layers=all_but_every(2, 24), balance=0.9),
    "gpt-oss-120b": GPTOSSConfig(
        201_088, 2880, 36, 64, 8, 2880, window_layers=all_but_every(2, 36), experts=128, balance=0.9
    ),
}

# Paths of the experts' maps, which GGUF files store one by one.
_EXPERTS = "feed_forward.layer.experts.mlps"
_SEPARATE_EXPERTS = (
    *(
        dataclasses.replace(rule, variant=True)
        for rule in gated_weights(_EXPERTS, prefix=f"{LAYER}mlp.experts.{{expert}}.")
    ),
    Rule(f"{LAYER}mlp.experts.gate_proj_bias", f"{_EXPERTS}.gate.bias", variant=True),
    Rule(f"{LAYER}mlp.experts.up_proj_bias", f"{_EXPERTS}.up.bias", variant=True),
)
GPT_OSS = Family(
    "gpt_oss",
    GPTOSSConfig,
    build_gpt_oss,
    _PRESETS,
    "GptOssForCausalLM",
    "gpt_oss",
    (
        *decoder_attributes(RotaryPositions(150_000.0, required=True), head_dim=64, kv_heads=8, max_seq=131_072),
        Windows(128, Period(2, but=True)),
        Count("experts", "num_local_experts", 128),
        Count("top_k", "num_experts_per_tok", 4),
        Attribute("limit", "swiglu_limit", 7.0),
        Attribute("bias", "attention_bias", True),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Expect("hidden_act", "silu"),
        Unpublished("activation", "quick_gelu", "experts always have quick_gelu"),
        Expect("swiglu_alpha", 1.702, written=False),
        Ignore("experts_per_token", "initial_context_length"),  # repeat other attributes
    ),
    (
        *(*EDGES, *ATTENTION, *PRE_NORMS),
        Rule(f"{LAYER}self_attn.sinks", "mixer.layer.scores.sinks"),
        *stacked_mixture_weights(interleaved=True),
        *_SEPARATE_EXPERTS,
    ),
)
