"""Gemma 4, its text models (Gemma team 2026): wide global heads, experts beside a dense layer, or shared keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import (
    Beside,
    Block,
    causal,
    CrossLayerAttention,
    GatedInput,
    LayerInputs,
    Residual,
    RMSNorm,
    sliding_window,
    Transformer,
)
from .._attributes import Activation, Attribute, Expect
from .._family import Family
from .._rotary_attributes import PositionsByType
from .._towers import Tower
from ._common import decoder_attributes
from ._decoder import attention, bend, decoder, gated_mlp, norm, rotary_of
from ._gemma4_attributes import GEMMA4_WEIGHTS, GlobalHeads, GlobalWindows, LayerVectors, MaybeExperts
from ._gemma4_config import Gemma4Config, Kind, kinds_of, unread
from ._gemma4_presets import PRESETS
from ._mixtures import mixture


def build_gemma4(config: Gemma4Config, *, key: Key[Array, ""]) -> Transformer:
    """A Gemma 4 with random weights."""
    gelu: dict[str, Any] = {"output_std": None}

    def mixer(kind: Kind, key: Key[Array, ""]) -> Residual:
        window, leaves, reads = kind
        size, heads = config.head_size, config.kv_heads
        rotary = rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling)
        if window is None:
            size, heads = config.global_head_dim, config.global_kv_heads
            rotary = rotary_of(config, size, "global_head_dim", scaling=config.scaling)
        own = lambda **options: RMSNorm("head_dim", head_dim=size, eps=config.eps, **options)
        options: dict[str, Any] = {"head_dim": size, "kv_heads": heads, "rotary": rotary, "scale": 1.0}
        options |= {"query_norm": own(), "bias": config.bias}
        if reads:
            mask = causal() if window is None else sliding_window(window)
            attended = CrossLayerAttention(embed=config.embed, heads=config.heads, mask=mask, **options, key=key)
        else:
            options |= {"key_norm": own(), "value_norm": own(scale=False)}
            options["keys_as_values"] = config.keys_as_values and window is None
            attended = attention(config, window=window, output_std=None, **options, key=key)
        return Residual(attended, norm(config), output_norm=norm(config), leaves=leaves, reads=reads)

    def fed(is_wide: bool, key: Key[Array, ""]) -> Residual:
        router, experts, dense = jax.random.split(key, 3)
        layer = gated_mlp(config, mlp=config.mlp * (2 if is_wide else 1), **gelu, key=dense)
        gated = Residual(layer, norm(config), output_norm=norm(config))
        if not config.experts:
            return gated
        expert = lambda key: gated_mlp(config, mlp=config.expert_mlp, **gelu, key=key)
        options: dict[str, Any] = {"norm": norm(config), "logit_scale": config.embed**-0.5, "scales_experts": True}
        options |= {"normalise": True, "expert_norm": norm(config)}
        mixed = mixture(config, expert, **options, router=router, experts=experts)
        return Residual(Beside(gated, Residual(mixed, output_norm=norm(config))), output_norm=norm(config))

    def block(kind: Kind, key: Key[Array, ""]) -> Block:
        first, second, third = jax.random.split(key, 3)
        given = None
        if config.input_mlp:
            given = GatedInput(embed=config.embed, mlp=config.input_mlp, activation=bend(config), key=third)
            given = Residual(given, output_norm=norm(config))
        is_wide = config.widens_reading and kind.reads is not None
        return Block(mixer(kind, first), fed(is_wide, second), jnp.ones((), jnp.float32), given)

    layers, inputs = jax.random.split(key)
    ends: dict[str, Any] = {"embedding_scale": config.embed**0.5, "logit_softcap": config.logit_softcap}
    model = decoder(config, block, kinds_of(config), **ends, key=layers)
    if not config.input_mlp:
        return model
    sizes = {"vocab": config.input_vocab, "embed": config.embed, "depth": config.layers, "mlp": config.input_mlp}
    return dataclasses.replace(model, layer_inputs=LayerInputs(**sizes, eps=config.eps, key=inputs))


GEMMA4 = Family(
    "gemma4",
    Gemma4Config,
    build_gemma4,
    PRESETS,
    "Gemma4ForCausalLM",
    "gemma4_text",
    (
        *decoder_attributes(PositionsByType(), head_dim=256, kv_heads=4, tied=True, max_seq=131_072),
        *(GlobalWindows(), GlobalHeads(), MaybeExperts()),
        Attribute("logit_softcap", "final_logit_softcapping", None),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation("gelu_pytorch_tanh", "hidden_activation"),
        Expect("use_bidirectional_attention", None, "vision", written=False),  # "vision" is of images' tokens
        LayerVectors(),
        Attribute("reading_layers", "num_kv_shared_layers", 0),
        Attribute("widens_reading", "use_double_wide_mlp", False),
    ),
    GEMMA4_WEIGHTS,
    unread=unread,
    towers=(Tower("gemma4"),),
)
