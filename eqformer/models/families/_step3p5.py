"""Step 3.5 and the text model of Step 3.7 (StepFun 2026): a gate for each head, and bounds of hidden features.

Layers with a window have another number of heads than other layers. Some layers clip the activated gates, and the
outputs of `up`.
"""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Fraction, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import layers_of, NullableWindows
from .._rotary_attributes import PartRotaryByType
from .._rotary_scaling import FULL, SLIDING, TYPES
from .._weight_rules import Rule
from ._common import decoder_attributes, gated_weights, LAYER, LLAMA_WEIGHTS
from ._decoder import (
    attention,
    damping,
    decoder,
    gated_mlp,
    head_norms,
    layer_windows,
    local_part_rotary,
    norm,
    part_rotary,
    pre_norm_block,
)
from ._mixtures import DenseLayersConfig, FUSED, LayerMixtures, mixture, SELECTION_BIAS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step3p5Config(DenseLayersConfig):
    """The config of a Step 3.5; `mlp` is the width of a dense layer."""

    local_heads: Size = 64
    """The number of query heads of layers with a window."""
    query_scalar: Positive = 128.0
    """Scores are multiplied by `query_scalar ** -0.5`."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    mlp_bias: bool = False
    """Whether dense layers and shared experts have biases; experts have no biases."""
    window_layers: tuple[Index, ...] = ()
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length | None = None
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 128
    rotary_fraction: Fraction = 1.0
    """The fraction of a head's channels that is rotated."""
    local_rotary_fraction: Fraction = 1.0
    """The fraction of a head's channels that is rotated, in layers with a window."""
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    expert_mlp: Size = 1280
    """Hidden features of an expert."""
    shared_mlp: Size = 1280
    """Hidden features of the shared expert."""
    experts: Size = 288
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    scale: Number = 1.0
    """A factor of the experts' weights; without it, a token's weights add up to 1."""
    first_dense: Index = 3
    limits: tuple[NotNegative, ...] = ()
    """For each layer, the bound of the two factors of an expert's hidden features: the activated output of `gate` and
    the output of `up`; 0: no bound. An empty tuple: no layer has a bound."""
    shared_limits: tuple[NotNegative, ...] = ()
    """For each layer, the bound of hidden features in the dense layer or the shared expert, like `limits`."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    eps: NotNegative = 1e-5
    max_seq: Length = 128_000


class _StepLayer(NamedTuple):
    """A kind of layer."""

    window: int | None
    """The layer's window; None: the layer sees whole rows."""
    is_mixture: bool
    """Whether the layer has experts."""
    limit: float
    """The bound in experts; 0: no bound."""
    shared_limit: float
    """The bound in the dense layer or the shared expert; 0: no bound."""


def build_step3p5(config: Step3p5Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Step 3.5 with random weights; raises a `ValueError` if bounds are not given for all layers."""
    rotary, local_rotary = part_rotary(config), local_part_rotary(config)

    def gated(width: int, limit: float, bias: bool, key: Key[Array, ""]) -> nn.GatedMLP:
        if not limit:
            return gated_mlp(config, mlp=width, bias=bias, key=key)
        activation = nn.BoundedActivation(nn.ACTIVATIONS[config.activation], limit)
        return gated_mlp(config, mlp=width, bias=bias, activation=activation, up_limit=limit, key=key)

    def block(kind: _StepLayer, key: Key[Array, ""]) -> nn.Block:
        mixer_key, gate_key, router_key, experts_key, shared_key = jax.random.split(key, 5)
        heads = config.heads if kind.window is None else config.local_heads
        mixer = attention(
            config,
            window=kind.window,
            heads=heads,
            bias=config.bias,
            output_std=damping(config) * (heads * config.head_dim) ** -0.5,
            rotary=rotary if kind.window is None else local_rotary,
            scores=nn.Scores(config.query_scalar**-0.5),
            **head_norms(config, offset=1.0),
            key=mixer_key,
        ).with_gate(by_heads=True, key=gate_key)
        if not kind.is_mixture:
            layer = gated(config.mlp, kind.shared_limit, config.mlp_bias, experts_key)
            return pre_norm_block(config, mixer, layer, offset=1.0)
        feed_forward = mixture(
            config,
            lambda key: gated(config.expert_mlp, kind.limit, False, key),
            shared=gated(config.shared_mlp, kind.shared_limit, config.mlp_bias, shared_key),
            balance_normalize=True,
            score="sigmoid",
            normalize=True,
            scale=config.scale,
            balanced=True,
            router=router_key,
            experts=experts_key,
        )
        return pre_norm_block(config, mixer, feed_forward, offset=1.0)

    return decoder(config, block, _kinds(config), final_norm=norm(config, offset=1.0), key=key)


def _kinds(config: Step3p5Config) -> list[_StepLayer]:
    """Return the kind of each layer; layers without experts ignore `limits`, so that equal layers have equal kinds."""
    none = (0.0,) * config.layers
    limits, shared_limits = config.limits or none, config.shared_limits or none
    if {len(limits), len(shared_limits)} != {config.layers}:
        raise ValueError(
            f"Step3p5Config(layers={config.layers}, limits={limits}, shared_limits={shared_limits}): give the bound of "
            "each layer, or an empty tuple."
        )
    layers = zip(layer_windows(config), config.mixtures, limits, shared_limits, strict=True)
    return [
        _StepLayer(window, is_mixture, limit if is_mixture else 0.0, shared)
        for window, is_mixture, limit, shared in layers
    ]


_LIMITS = {"limits": "swiglu_limits", "shared_limits": "swiglu_limits_shared"}
_PADDED = ("layer_types", "mlp_layer_types", *_LIMITS.values(), "rope_theta", "partial_rotary_factors")
_MOST_PREDICTORS = 16  # Folders have at most this many layers for multi-token prediction, after the model's layers.
_LOCAL_HEADS, _DENSE_BY_DEFAULT = "num_sliding_attention_heads", 3


class _OlderAttributes(Entry):
    """Replace the publishers' attributes by transformers' attributes, which other entries of the table then read.

    In the publishers' lists with an item for each layer, items after the model's last layer are for the layers of
    multi-token prediction; these items are dropped.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field."""
        layers = layers_of(published)
        self._drop_predictors(published, layers)
        types = published.listed("layer_types", str)
        if types is None:
            published.add("layer_types", types := [FULL] * layers)
        self._read_mixtures(published, layers)
        self._read_local_sizes(published)
        self._read_rotary(published, types)
        return {}

    def write(self, config: object) -> Attributes:
        """Return no attribute."""
        return {}

    def _drop_predictors(self, published: PublishedConfig, layers: int) -> None:
        predictors = published.count("num_nextn_predict_layers", 0, 0)
        for name in _PADDED if predictors else ():
            values = published.take(name, None)
            if isinstance(values, list) and len(values) == layers + predictors:
                published.add(name, values[:layers])

    def _read_mixtures(self, published: PublishedConfig, layers: int) -> None:
        """Replace `moe_layers_enum`, the indices of the layers with experts."""
        listed = published.take("moe_layers_enum", None)
        if published.take("mlp_layer_types", None) is not None:
            return
        mixtures = range(_DENSE_BY_DEFAULT, layers)
        if listed is not None:
            items = listed.split(",") if isinstance(listed, str) else listed
            if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items):
                published.refuse(f"moe_layers_enum={listed!r}: it must list indices of layers.")
            mixtures = [int(item) for item in items]
        published.add("mlp_layer_types", ["sparse" if layer in mixtures else "dense" for layer in range(layers)])

    def _read_local_sizes(self, published: PublishedConfig) -> None:
        """Replace `attention_other_setting`, the sizes of layers with a window; only the query heads may differ."""
        sizes = published.nested("attention_other_setting")
        heads = published.checked(
            "attention_other_setting.num_attention_heads", sizes.pop("num_attention_heads", 1), Size
        )
        head_dim = published.count("head_dim", 128)
        groups = published.count("num_attention_groups", published.count("num_key_value_heads", 8))
        known = {"attention_type": SLIDING, "num_attention_groups": groups}
        known |= {"num_key_value_heads": groups, "head_dim": head_dim, "true_head_dim": head_dim}
        if unlike := {name: value for name, value in sizes.items() if known.get(name, ...) != value}:
            published.refuse(
                f"attention_other_setting: {unlike} is not supported; only num_attention_heads may differ."
            )
        if sizes and published.take(_LOCAL_HEADS, None) is None:
            published.add(_LOCAL_HEADS, heads)

    def _read_rotary(self, published: PublishedConfig, types: list[str]) -> None:
        """Replace the base and the rotated part of each layer by a base and a part for each type of layer in use."""
        theta, parts = published.take("rope_theta", None), published.take("partial_rotary_factors", None)
        scaling, stated = published.nested("rope_scaling"), published.nested("rope_parameters")
        published.add("rope_theta", None)
        if stated:
            published.add("rope_parameters", {name: stated[name] for name in stated if name not in {*TYPES} - {*types}})
            return
        by_type: dict[str, Attributes] = {}
        for layer_type in dict.fromkeys(types):
            base = self._of_type(published, "rope_theta", theta, types, layer_type)
            part = self._of_type(published, "partial_rotary_factors", parts, types, layer_type)
            parameters = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}
            by_type[layer_type] = parameters | (scaling if layer_type == FULL else {})
        published.add("rope_parameters", by_type)

    def _of_type(
        self, published: PublishedConfig, name: str, values: object, types: list[str], layer_type: str
    ) -> object:
        """Return the value for layers of a type, from one value or from a list by layers; refuse differing values."""
        if not isinstance(values, list):
            return values
        if len(values) != len(types):
            published.refuse(f"{name}={values} must have a value for each of the model's {len(types)} layers.")
        first, *later = [value for value, name in zip(values, types, strict=True) if name == layer_type]
        if any(value != first for value in later):
            published.refuse(f"{name}={values}: all layers of the type {layer_type} must have the same value.")
        return first


class _LocalHeads(Entry):
    """The query heads of layers with a window, which transformers repeats in `per_layer_config`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `local_heads`; refuse a `per_layer_config` that states other numbers of heads."""
        heads = published.count("num_attention_heads")
        local, by_layer = published.count(_LOCAL_HEADS, heads), published.nested("per_layer_config")
        for layer, layer_type in enumerate(published.listed("layer_types", str) or () if by_layer else ()):
            expected = local if layer_type == SLIDING else heads
            stated = by_layer.pop(str(layer), {})
            if ({"num_attention_heads": heads} | stated) != {"num_attention_heads": expected}:
                published.refuse(
                    f"per_layer_config: layer {layer} has {stated}, but with {_LOCAL_HEADS}={local} it must have "
                    f"num_attention_heads={expected} and no other attribute."
                )
        if by_layer:
            published.refuse(f"per_layer_config={by_layer}: there are no such layers.")
        return {"local_heads": local}

    def write(self, config: Step3p5Config) -> Attributes:
        """Return the attribute."""
        return {_LOCAL_HEADS: config.local_heads}


class _QueryScalar(Attribute):
    """The number whose root divides attention scores; by default the channels of a head."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `query_scalar`."""
        (name,) = self.published_names
        return {self.name: published.read(name, Positive, published.count("head_dim", 128))}


class _HiddenBounds(Entry):
    """The bounds of hidden features of each layer; null and 0 mean no bound."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `limits` and `shared_limits`; refuse lists of another length."""
        fields, layers = Fields(), layers_of(published)
        for field, name in _LIMITS.items():
            values = published.listed(name, NotNegative | None, empty=True)
            if values is not None and len(values) != layers:
                published.refuse(f"{name}={values} must have a bound for each of the model's {layers} layers.")
            fields[field] = tuple(value or 0.0 for value in values or ()) if any(values or ()) else ()
        return fields

    def write(self, config: Step3p5Config) -> Attributes:
        """Return both lists, which are null without bounds."""
        return {name: list(getattr(config, field)) or None for field, name in _LIMITS.items()}


class _UsedRotary(PartRotaryByType):
    """Rotary positions by type of layer, which are written only for the types of layer that the model has."""

    def write(self, config: Step3p5Config) -> Attributes:
        """Return the parameters of the types of layer that the model has."""
        attributes = super().write(config)
        types = {SLIDING if layer in config.window_layers else FULL for layer in range(config.layers)}
        parameters = attributes["rope_parameters"]
        used = {name: value for name, value in parameters.items() if name not in {*TYPES} - types}
        return attributes | {"rope_parameters": used}


_LAST_BOUNDED = (0.0,) * 43
_PRESETS = {
    "step3p5-byte-500k": Step3p5Config(
        *(256, 64, 4, 4, 2, 128),
        expert_mlp=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        head_dim=16,
        query_scalar=16.0,
        local_heads=6,
        window=64,
        window_layers=(1, 2, 3),
        rotary_fraction=0.5,
        first_dense=1,
        shared_limits=(0.0, 0.0, 0.0, 16.0),
        tied=True,
    ),
    "step-3.7-flash": Step3p5Config(
        *(128_896, 4096, 45, 64, 8, 11_264),
        local_heads=96,
        window=512,
        window_layers=tuple(layer for layer in range(45) if layer % 4),
        rotary_fraction=0.5,
        theta=5_000_000.0,
        scale=3.0,
        limits=(*_LAST_BOUNDED, 7.0, 7.0),
        shared_limits=(*_LAST_BOUNDED, 16.0, 16.0),
        max_seq=262_144,
    ),
}

_SHARED, _EXPERTS = "feed_forward.layer.shared", "feed_forward.layer.experts.mlps"
# The publishers' names of arrays, in folders of Step 3.5 and of the multimodal Step 3.7.
_PUBLISHED = (
    Rule(f"{LAYER}moe.gate.weight", "feed_forward.layer.router.linear.weight"),
    Rule(f"{LAYER}moe.router_bias", "feed_forward.layer.router.selection_bias"),
    *gated_weights(_EXPERTS, prefix=f"{LAYER}moe."),
    *gated_weights(_SHARED, prefix=f"{LAYER}share_expert.", bias=True),
)
STEP3P5 = Family(
    "step3p5",
    Step3p5Config,
    build_step3p5,
    _PRESETS,
    "Step3p5ForCausalLM",
    "step3p5",
    (
        _OlderAttributes(),
        *decoder_attributes(_UsedRotary((1e4, 1e4), (1.0, 1.0)), head_dim=128, max_seq=128_000),
        Count("kv_heads", ("num_attention_groups", "num_key_value_heads"), 8, written=("num_key_value_heads",)),
        Attribute("eps", "rms_norm_eps", 1e-5),
        NullableWindows(None, lambda published, layers: ()),
        *(_LocalHeads(), _QueryScalar("query_scalar", "query_pre_attn_scalar"), LayerMixtures(), _HiddenBounds()),
        Attribute("bias", "attention_bias", False),
        Attribute("mlp_bias", "mlp_bias", False),
        Count("expert_mlp", "moe_intermediate_size", 1280),
        Count("shared_mlp", ("share_expert_dims", "share_expert_dim"), 1280, written=("share_expert_dim",)),
        Count(
            "experts", ("moe_num_experts", "n_routed_experts", "num_local_experts"), 288, written=("n_routed_experts",)
        ),
        Count("top_k", ("moe_top_k", "num_experts_per_tok"), 8, written=("num_experts_per_tok",)),
        Attribute("scale", "moe_router_scaling_factor", 1.0),
        Unpublished("activation", "silu", "all layers use silu"),
        Expect("hidden_act", "silu", "swigluoai"),
        Unpublished("balance", 0.001, "transformers has no balance loss"),
        Expect("gating", True, "per-head", written=False),
        Expect("use_bidirectional_attention", False, written=False),
        Ignore(
            "mtp_layer_types", "mtp_mlp_layer_types"
        ),  # attributes of layers for multi-token prediction, which are not read
        # The publishers' own program reads these attributes. All models of this family have these values.
        Expect("yarn_only_types", [FULL], written=False),
        Expect("use_head_wise_attn_gate", True, written=False),
        Expect("use_moe_router_bias", True, written=False),
        Expect("moe_router_activation", "sigmoid", written=False),
        Expect("norm_expert_weight", True, written=False),
        Expect("zero_centered", True, written=False),
        Expect("use_qk_norm", True, written=False),
        Expect("att_impl_type", "GQA", written=False),
        Expect("use_moe", True, written=False),
        Expect("sink", False, written=False),
        Expect("need_fp32_gate", True, False, written=False),
    ),
    (
        *(*LLAMA_WEIGHTS, SELECTION_BIAS),
        Rule(f"{LAYER}self_attn.g_proj.weight", "mixer.layer.gate.weight"),
        Rule(f"{LAYER}mlp.gate.weight", "feed_forward.layer.router.linear.weight"),
        *(dataclasses.replace(rule, variant=False) for rule in FUSED),
        *gated_weights(_SHARED, prefix=f"{LAYER}mlp.shared_experts.", bias=True),
        *(dataclasses.replace(rule, variant=True) for rule in _PUBLISHED),
    ),
    unread=lambda config: tuple(f"model.layers.{config.layers + n}." for n in range(_MOST_PREDICTORS)),
    multimodal=(MultimodalModel("step3p7"),),
)
