"""Gemma 4, its text models (Gemma team 2026): wide global heads whose values are keys, experts beside a dense layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import Beside, Block, gelu_tanh, ProportionalScaling, Residual, RMSNorm, Rotary, RotaryScaling, Transformer
from .._attributes import Attribute, Expect, Ignore
from .._family import DecoderConfig, Family
from .._rotary_attributes import PositionsByType
from .._towers import Tower
from ._common import decoder_attributes
from ._decoder import attention, decoder, gated_mlp, norm
from ._gemma4_attributes import GEMMA4_WEIGHTS, GlobalHeads, GlobalWindows, MaybeExperts, NoTables
from ._mixtures import mixture
from ._pattern import windows_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The config of a Gemma 4; `head_dim` and `kv_heads` are those of layers with a window."""

    window_layers: tuple[int, ...]
    """The numbers of the layers that see a `window`; the others see everything."""
    window: int = 512
    """The tokens that the layers of `window_layers` see."""
    head_dim: int = 256
    global_head_dim: int = 512
    """Channels of a head in the other layers."""
    global_kv_heads: int
    """Heads of keys and values there."""
    keys_as_values: bool = False
    """Whether values are keys there."""
    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = ProportionalScaling(0.25)
    local_theta: float = 10_000.0
    """The base of rotary positions in the layers of `window_layers`, which have no `scaling`."""
    logit_softcap: float | None = None
    """The bound of logits."""
    bias: bool = False
    """Whether the attention's projections have biases."""
    experts: int = 0
    """Experts of a layer, beside its dense one; 0: none."""
    top_k: int = 1
    """Experts of a token."""
    expert_mlp: int = 1
    """Hidden features of an expert."""
    balance: float = 0.001
    """The weight of `LoadBalance`, over the batch."""
    tied: bool = True
    max_seq: int = 262_144


def build_gemma4(config: Gemma4Config, *, key: Key[Array, ""]) -> Transformer:
    """A Gemma 4 with random weights."""
    gelu: dict[str, Any] = {"activation": gelu_tanh, "output_std": None}

    def mixer(window: int | None, key: Key[Array, ""]) -> Residual:
        size, heads = config.head_size, config.kv_heads
        rotary = Rotary(size, config.local_theta)
        if window is None:
            size, heads = config.global_head_dim, config.global_kv_heads
            rotary = Rotary(size, config.theta, scaling=config.scaling)
        own = lambda **options: RMSNorm("head_dim", head_dim=size, eps=config.eps, **options)
        options: dict[str, Any] = {"head_dim": size, "kv_heads": heads, "rotary": rotary, "scale": 1.0}
        options |= {"query_norm": own(), "key_norm": own(), "value_norm": own(scale=False), "bias": config.bias}
        options["keys_as_values"] = config.keys_as_values and window is None
        attended = attention(config, window=window, output_std=None, **options, key=key)
        return Residual(attended, norm(config), output_norm=norm(config))

    def fed(key: Key[Array, ""]) -> Residual:
        router, experts, dense = jax.random.split(key, 3)
        gated = Residual(gated_mlp(config, **gelu, key=dense), norm(config), output_norm=norm(config))
        if not config.experts:
            return gated
        expert = lambda key: gated_mlp(config, mlp=config.expert_mlp, **gelu, key=key)
        options: dict[str, Any] = {"norm": norm(config), "logit_scale": config.embed**-0.5, "scales_experts": True}
        options |= {"normalise": True, "expert_norm": norm(config)}
        mixed = mixture(config, expert, **options, router=router, experts=experts)
        return Residual(Beside(gated, Residual(mixed, output_norm=norm(config))), output_norm=norm(config))

    def block(window: int | None, key: Key[Array, ""]) -> Block:
        first, second = jax.random.split(key)
        return Block(mixer(window, first), fed(second), jnp.ones((), jnp.float32))

    ends: dict[str, Any] = {"embedding_scale": config.embed**0.5, "logit_softcap": config.logit_softcap}
    return decoder(config, block, windows_of(config), **ends, key=key)


_BYTE: dict[str, Any] = {"window": 64, "window_layers": (0, 1, 2), "head_dim": 16, "global_head_dim": 32}
_BYTE |= {"global_kv_heads": 1, "keys_as_values": True, "theta": 1e5, "max_seq": 512, "bias": True}
_PRESETS = {
    "gemma4-byte-500k": Gemma4Config(256, 64, 4, 4, 2, 128, **_BYTE, experts=12, top_k=4, expert_mlp=16),
}

GEMMA4 = Family(
    "gemma4",
    Gemma4Config,
    build_gemma4,
    _PRESETS,
    "Gemma4ForCausalLM",
    "gemma4_text",
    (
        *decoder_attributes(PositionsByType(), head_dim=256, kv_heads=4, tied=True),
        *(GlobalWindows(), GlobalHeads(), MaybeExperts()),
        Attribute("logit_softcap", "final_logit_softcapping", None, lambda cap: None if cap is None else float(cap)),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Expect("hidden_activation", "gelu_pytorch_tanh"),
        Expect("use_bidirectional_attention", None, "vision", written=False),  # "vision" is of images' tokens
        NoTables(),
        Ignore("use_double_wide_mlp", "vocab_size_per_layer_input"),  # which the smallest models have alone
    ),
    GEMMA4_WEIGHTS,
    towers=(Tower("gemma4"),),
)
