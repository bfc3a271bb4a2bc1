"""Laguna (Poolside 2026): attention with softplus gates, numbers of heads that differ by layer, and a shared expert."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, RotaryScaling, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields
from .._config_types import Attributes, Fraction, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import all_but_every, layers_of, Windows
from .._rotary_attributes import PartRotaryByType
from .._weight_rules import Rule
from ._common import decoder_attributes, gated_weights, INTO_HEADS, LAYER, LLAMA_WEIGHTS
from ._decoder import (
    attention,
    damping,
    decoder,
    gated_mlp,
    head_norms,
    layer_windows,
    local_part_rotary,
    part_rotary,
    pre_norm_block,
)
from ._mixtures import DenseLayersConfig, LayerMixtures, MIXTURE, mixture, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagunaConfig(DenseLayersConfig):
    """The config of a Laguna; `mlp` is the width of a dense layer."""

    layer_heads: tuple[Size, ...] = ()
    """The query heads of each layer; empty: all layers have `heads`."""
    by_heads: bool = True
    """Whether each head has one gate for all its channels; otherwise each channel has a gate."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 512
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 128
    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    theta: Positive = 500_000.0
    local_rotary_fraction: Fraction = 1.0
    """The fraction of a head's channels that is rotated, in layers with a window."""
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    expert_mlp: Size = 512
    """Hidden features of an expert."""
    shared_mlp: Size = 512
    """Hidden features of the shared expert."""
    experts: Size = 256
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    scale: Number = 1.0
    """A factor of the experts' weights; without it, a token's weights add up to 1."""
    first_dense: Index = 1
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 131_072


def build_laguna(config: LagunaConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Laguna with random weights."""
    rotary, local_rotary = part_rotary(config), local_part_rotary(config)

    def block(kind: tuple[int | None, bool, int], key: Key[Array, ""]) -> Block:
        window, is_mixture, heads = kind
        mixer_key, gate_key, router_key, experts_key, shared_key = jax.random.split(key, 5)
        mixer = attention(
            config,
            window=window,
            heads=heads,
            bias=config.bias,
            output_std=damping(config) * (heads * config.head_dim) ** -0.5,
            rotary=rotary if window is None else local_rotary,
            **head_norms(config),
            key=mixer_key,
        ).with_gate(by_heads=config.by_heads, activation="softplus", key=gate_key)
        if not is_mixture:
            return pre_norm_block(config, mixer, gated_mlp(config, key=experts_key))
        feed_forward = mixture(
            config,
            functools.partial(small_expert, config),
            shared=gated_mlp(config, mlp=config.shared_mlp, key=shared_key),
            balance_normalize=True,
            score="sigmoid",
            normalize=True,
            scale=config.scale,
            balanced=True,
            router=router_key,
            experts=experts_key,
        )
        return pre_norm_block(config, mixer, feed_forward)

    kinds = zip(layer_windows(config), config.mixtures, _heads_of(config), strict=True)
    return decoder(config, block, list(kinds), key=key)


def _heads_of(config: LagunaConfig) -> tuple[int, ...]:
    """Return the query heads of each layer; raises a `ValueError` if the config's list has another length."""
    heads = config.layer_heads or (config.heads,) * config.layers
    if len(heads) != config.layers:
        raise ValueError(
            f"LagunaConfig(layers={config.layers}, layer_heads={config.layer_heads}): give the number of heads of each "
            "layer, or an empty tuple."
        )
    return heads


class _LayerHeads(Entry):
    """The query heads of each layer; by default all layers have `num_attention_heads`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `layer_heads`; refuse a list of another length."""
        name = "num_attention_heads_per_layer"
        heads, layers = published.listed(name, Size), layers_of(published)
        if heads is not None and len(heads) != layers:
            published.refuse(f"{name}={heads} must have a number of heads for each of the model's {layers} layers.")
        is_uniform = heads is None or {*heads} == {published.read("num_attention_heads", Size)}
        return {"layer_heads": () if heads is None or is_uniform else tuple(heads)}

    def write(self, config: LagunaConfig) -> Attributes:
        """Return the list."""
        return {"num_attention_heads_per_layer": list(_heads_of(config))}


class _Gating(Entry):
    """The attribute `gating`: `"per-head"` or true for a gate per head, `"per-element"` for a gate per channel."""

    _by_heads = {True: "per-head", False: "per-element"}

    def read(self, published: PublishedConfig) -> Fields:
        """Return `by_heads`; refuse other values."""
        published.expect("gating", True, "per-element", "per-head")
        return {"by_heads": published.take("gating", True) in (True, "per-head")}

    def write(self, config: LagunaConfig) -> Attributes:
        """Return the attribute."""
        return {"gating": self._by_heads[config.by_heads]}


_PRESETS = {
    "laguna-byte-500k": LagunaConfig(
        *(256, 64, 4, 4, 2, 128),
        expert_mlp=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        head_dim=16,
        layer_heads=(6, 6, 6, 4),
        window=64,
        window_layers=all_but_every(4, 4),
        theta=10_000.0,
        tied=True,
    ),
    "laguna-xs.2": LagunaConfig(100_352, 2048, 40, 48, 8, 8192),
}

_GATE = "mixer.layer.gate"
LAGUNA = Family(
    "laguna",
    LagunaConfig,
    build_laguna,
    _PRESETS,
    "LagunaForCausalLM",
    "laguna",
    (
        *decoder_attributes(PartRotaryByType((5e5, 1e4), (0.5, 1.0)), head_dim=128, kv_heads=8, max_seq=131_072),
        Windows(512, lambda published, layers: ()),
        *(_LayerHeads(), _Gating(), LayerMixtures()),
        Attribute("bias", "attention_bias", False),
        Count("expert_mlp", "moe_intermediate_size", 512),
        Count("shared_mlp", "shared_expert_intermediate_size", 512),
        Count("experts", ("num_experts", "num_local_experts"), 256),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("scale", "moe_routed_scaling_factor", 1.0),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation(),
        Expect("moe_apply_router_weight_on_input", False),
        Expect("moe_router_logit_softcapping", 0.0),
        Expect("norm_topk_prob", True, written=False),
        Expect("partial_rotary_factor", 0.5, written=False),
    ),
    (
        *(*LLAMA_WEIGHTS, *MIXTURE),
        # A gate per channel has two output dims, `heads` and `head_dim`, and a gate per head has only `heads`.
        Rule(f"{LAYER}self_attn.g_proj.weight", f"{_GATE}.weight", lacks=f"{_GATE}.outputs.1"),
        Rule(f"{LAYER}self_attn.g_proj.weight", f"{_GATE}.weight", INTO_HEADS, needs=f"{_GATE}.outputs.1"),
        Rule(f"{LAYER}mlp.experts.e_score_correction_bias", "feed_forward.layer.router.selection_bias"),
        *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_expert."),
    ),
)
