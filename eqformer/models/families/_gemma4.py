"""Gemma 4, its text models (Gemma team 2026): wide global heads, experts beside a dense layer, or shared keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ...nn import (
    Block,
    causal,
    CrossLayerAttention,
    ParallelResidual,
    PerLayerGate,
    PerLayerInputs,
    ProportionalScaling,
    Residual,
    RMSNorm,
    RotaryScaling,
    Scores,
    sliding_window,
    StreamScale,
    Sublayer,
    Transformer,
)
from .._attributes import Activation, Attribute, Attributes, Entry, Expect, Fields
from .._config_types import Index, Length, NotNegative, OptionalSize, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import all_but_every, layers_of, Windows
from .._rotary_attributes import ProportionalRotaryByType
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, FOUR_NORMS, gated_weights, head_norm_weights, LAYER
from ._decoder import activation_of, attention, decoder, gated_mlp, norm, rotary_of
from ._mixtures import mixture
from ._pattern import layer_windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The config of a Gemma 4; `head_dim` and `kv_heads` are those of layers with a window."""

    window_layers: tuple[Index, ...]
    """The numbers of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 512
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 256
    activation: str = "gelu_tanh"
    global_head_dim: Size = 512
    """Channels of a head in layers without a window."""
    global_kv_heads: Size
    """Heads of keys and values in layers without a window."""
    keys_as_values: bool = False
    """Whether values are keys in layers without a window."""
    theta: Positive = 1_000_000.0
    scaling: RotaryScaling | None = ProportionalScaling(0.25)
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: none."""
    logit_softcap: Positive | None = None
    """The softcap of the logits."""
    bias: bool = False
    """Whether the attention's projections have biases."""
    experts: OptionalSize = 0
    """Experts of a layer, beside its dense one; 0: none."""
    top_k: Size = 1
    """The number of experts that each token chooses."""
    expert_mlp: Size = 1
    """Hidden features of an expert."""
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""
    reading_layers: OptionalSize = 0
    """The number of last layers that read keys and values: those of the last earlier layer of their kind."""
    widens_reading: bool = False
    """Whether the layers that read keys and values have twice as many hidden features."""
    input_mlp: OptionalSize = 0
    """Channels of the vector that each layer has of each token; 0: there are no such vectors."""
    input_vocab: Size = 262_144
    """The number of ids that have vectors for each layer."""
    tied: bool = True
    max_seq: Length = 262_144


class Kind(NamedTuple):
    """A kind of layer: its window, and the names under which it shares or reads keys and values."""

    window: int | None
    shares: str | None = None
    reads: str | None = None


def kinds_of(config: Gemma4Config) -> list[Kind]:
    """Return the kind of each layer; raises a `ValueError` where layers would read keys that no earlier layer has."""
    windows, count = layer_windows(config), config.layers - config.reading_layers
    names = ["global" if window is None else "window" for window in windows]
    if missing := {*names[count:]} - {*names[:count]}:
        raise ValueError(
            f"Gemma4Config(layers={config.layers}, reading_layers={config.reading_layers}): later layers read keys of "
            f"{' and '.join(sorted(missing))} ones, and the first {max(count, 0)} have none; let fewer read."
        )
    last = {name: layer for layer, name in enumerate(names[:count])} if config.reading_layers else {}
    kinds = [
        Kind(window, shares=name if last.get(name) == layer and name in names[count:] else None)
        for layer, (window, name) in enumerate(zip(windows[:count], names[:count]))
    ]
    return kinds + [Kind(window, reads=name) for window, name in zip(windows[count:], names[count:])]


def unread(config: Any) -> tuple[str, ...]:
    """Return prefixes of published arrays that nothing reads: key and value maps of layers that read others' keys."""
    layers = range(config.layers - config.reading_layers, config.layers)
    return tuple(f"model.layers.{layer}.self_attn.{part}_" for layer in layers for part in "kv")


class GlobalWindows(Windows):
    """`Windows` of all layers but each sixth and the last."""

    def __init__(self):
        super().__init__(512, lambda _, layers: all_but_every(6, layers))

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        fields, last = super().read(published), layers_of(published) - 1
        return fields | {"window_layers": tuple(layer for layer in fields["window_layers"] if layer != last)}


class GlobalHeads(Entry):
    """The size and number of key heads in layers without a window, stated once or layer by layer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `global_head_dim`, `global_kv_heads` and `keys_as_values`; refuse layers that differ otherwise."""
        size, shared = published.read("global_head_dim", Size, 512), published.flag("attention_k_eq_v", False)
        kv_heads = published.read("num_key_value_heads", Size, 4)
        heads = published.read("num_global_key_value_heads", Size, kv_heads) if shared else kv_heads
        if by_layer := published.nested("per_layer_config"):
            windows = GlobalWindows().read(published)["window_layers"]
            global_layers = [str(layer) for layer in range(layers_of(published)) if layer not in windows]
            stated = next(iter(by_layer.values()))
            known = isinstance(stated, dict) and not {*stated} - {"head_dim", "num_key_value_heads"}
            listed = {str(layer).lstrip("0") or "0" for layer in by_layer}
            is_alike = all(attributes == stated for attributes in by_layer.values())
            if not known or listed != {*global_layers} or not is_alike:
                published.refuse(
                    f"per_layer_config={by_layer}: layers {global_layers}, without a window, must be alike."
                )
            within = PublishedConfig(stated, f"{published.source}: per_layer_config")
            size = within.read("head_dim", Size, published.read("head_dim", Size, 256))
            heads = within.read("num_key_value_heads", Size, kv_heads)
        return {"global_head_dim": size, "global_kv_heads": heads, "keys_as_values": shared}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return the attributes for all layers at once, as they are published, where transformers reads them so."""
        attributes = {"global_head_dim": config.global_head_dim, "attention_k_eq_v": config.keys_as_values}
        if config.keys_as_values:
            return attributes | {"num_global_key_value_heads": config.global_kv_heads}
        alike = {"head_dim": config.global_head_dim, "num_key_value_heads": config.global_kv_heads}
        layers = {str(layer): alike for layer in range(config.layers) if layer not in config.window_layers}
        return attributes | ({} if config.global_kv_heads == config.kv_heads else {"per_layer_config": layers})


class LayerVectors(Entry):
    """A vector of each token for each layer (E2B, E4B); 0 channels stand for no vectors."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `input_mlp` and, where there are vectors, `input_vocab`."""
        channels, ids = published.read(*_CHANNELS), published.read(*_IDS)
        return {"input_mlp": channels, "input_vocab": ids} if channels else {}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return the channels and, where there are vectors, the number of ids."""
        return {_CHANNELS[0]: config.input_mlp} | ({_IDS[0]: config.input_vocab} if config.input_mlp else {})


_CHANNELS, _IDS = ("hidden_size_per_layer_input", OptionalSize, 256), ("vocab_size_per_layer_input", Size, 262_144)


@dataclasses.dataclass(frozen=True)
class MaybeExperts(Entry):
    """Experts beside the dense layers, if they are switched on."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `experts`, `top_k` and `expert_mlp`."""
        names = {"experts": "num_experts", "top_k": "top_k_experts", "expert_mlp": "moe_intermediate_size"}
        if published.flag("enable_moe_block", False):
            return {field: published.read(attribute, Size) for field, attribute in names.items()}
        for attribute in names.values():
            published.take(attribute, None)
        return {}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return the switch, and what it switches on."""
        if not config.experts:
            return {"enable_moe_block": False}
        attributes = {
            "num_experts": config.experts,
            "top_k_experts": config.top_k,
            "moe_intermediate_size": config.expert_mlp,
        }
        return {"enable_moe_block": True} | attributes


_DENSE, _MIXED = "feed_forward.branches.0", "feed_forward.branches.1"
_ROUTER, _EXPERTS = f"{_MIXED}.layer.router", f"{_MIXED}.layer.experts.mlps"
GEMMA4_WEIGHTS = (
    *(*EDGES, *ATTENTION, *head_norm_weights(), *FOUR_NORMS, *gated_weights()),
    # The last sublayer, behind a per-layer gate or without one.
    Rule(f"{LAYER}layer_scalar", "sublayers.2.factor", "1 -> "),
    Rule(f"{LAYER}layer_scalar", "sublayers.3.factor", "1 -> "),
    Rule(f"{LAYER}pre_feedforward_layernorm.weight", f"{_DENSE}.norm.weight"),
    Rule(f"{LAYER}post_feedforward_layernorm_1.weight", f"{_DENSE}.output_norm.weight"),
    Rule(f"{LAYER}pre_feedforward_layernorm_2.weight", f"{_MIXED}.layer.expert_norm.weight"),
    Rule(f"{LAYER}post_feedforward_layernorm_2.weight", f"{_MIXED}.output_norm.weight"),
    Rule(f"{LAYER}router.scale", f"{_ROUTER}.norm.weight"),
    Rule(f"{LAYER}router.proj.weight", f"{_ROUTER}.linear.weight"),
    Rule(f"{LAYER}router.per_expert_scale", f"{_ROUTER}.expert_scale"),
    Rule(f"{LAYER}experts.gate_up_proj", (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"), axis=1),
    Rule(f"{LAYER}experts.down_proj", f"{_EXPERTS}.down.weight"),
    *gated_weights(f"{_DENSE}.layer"),
    Rule(
        "model.embed_tokens_per_layer.weight",
        "layer_inputs.embedding.weight",
        "ids (groups mlp) -> ids (mlp groups)",
        groups="layers",
    ),
    Rule(
        "model.per_layer_model_projection.weight",
        "layer_inputs.project.weight",
        "(depth mlp) embed -> mlp depth embed",
    ),
    Rule("model.per_layer_projection_norm.weight", "layer_inputs.norm.weight"),
    Rule(f"{LAYER}per_layer_input_gate.weight", "sublayers.2.layer.gate.weight"),
    Rule(f"{LAYER}per_layer_projection.weight", "sublayers.2.layer.down.weight"),
    Rule(f"{LAYER}post_per_layer_input_norm.weight", "sublayers.2.output_norm.weight"),
)


def _gemma4(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, period: int, **more: Any) -> Gemma4Config:
    fields: dict[str, Any] = {"window_layers": all_but_every(period, layers), "logit_softcap": 30.0}
    return Gemma4Config(262_144, embed, layers, heads, kv_heads, mlp, **fields | more)


_BYTE: dict[str, Any] = {"window": 64, "window_layers": (0, 1, 2), "head_dim": 16, "global_head_dim": 32}
_BYTE |= {"global_kv_heads": 1, "keys_as_values": True, "theta": 1e5, "max_seq": 512, "bias": True}
_TABLES: dict[str, Any] = {"reading_layers": 4, "widens_reading": True, "input_mlp": 8, "input_vocab": 256}
_TABLES |= _BYTE | {"window_layers": (0, 2, 4, 6), "keys_as_values": False}
_SMALL: dict[str, Any] = {"input_mlp": 256, "max_seq": 131_072}
_LARGE: dict[str, Any] = {"keys_as_values": True, "window": 1024}
_EXPERT_SIZES: dict[str, Any] = {"experts": 128, "top_k": 8, "expert_mlp": 704}
PRESETS: Mapping[str, Gemma4Config] = {
    "gemma4-byte-500k": Gemma4Config(256, 64, 4, 4, 2, 128, **_BYTE, experts=12, top_k=4, expert_mlp=16),
    "gemma4-e-byte-400k": Gemma4Config(256, 64, 8, 4, 1, 96, **_TABLES),
    "gemma4-e2b": _gemma4(1536, 35, 8, 1, 6144, 5, global_kv_heads=1, reading_layers=20, widens_reading=True, **_SMALL),
    "gemma4-e4b": _gemma4(2560, 42, 8, 2, 10_240, 6, global_kv_heads=2, reading_layers=18, **_SMALL),
    "gemma4-26b-a4b": _gemma4(2816, 30, 16, 8, 2112, 6, global_kv_heads=2, **_LARGE, **_EXPERT_SIZES),
    "gemma4-31b": _gemma4(5376, 60, 32, 16, 21_504, 6, global_kv_heads=4, **_LARGE),
}


def build_gemma4(config: Gemma4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Gemma 4 with random weights."""

    def mixer(kind: Kind, key: Key[Array, ""]) -> Residual:
        window, shares, reads = kind
        size, heads = config.head_size, config.kv_heads
        rotary = rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling)
        if window is None:
            size, heads = config.global_head_dim, config.global_kv_heads
            rotary = rotary_of(config, size, "global_head_dim", scaling=config.scaling)
        head_norm = lambda **options: RMSNorm("head_dim", head_dim=size, eps=config.eps, **options)
        options: dict[str, Any] = {"head_dim": size, "kv_heads": heads, "rotary": rotary, "scores": Scores(1.0)}
        options |= {"query_norm": head_norm(), "bias": config.bias}
        if reads:
            mask = causal() if window is None else sliding_window(window)
            attended = CrossLayerAttention(embed=config.embed, heads=config.heads, mask=mask, **options, key=key)
        else:
            options |= {"key_norm": head_norm(), "value_norm": head_norm(scale=False)}
            attended = attention(config, window=window, output_std=None, **options, key=key)
            if config.keys_as_values and window is None:
                attended = eqx.tree_at(lambda attention: attention.value, attended, None)
        return Residual(attended, norm(config), output_norm=norm(config), shares=shares, reads=reads)

    def feed_forward(is_wide: bool, key: Key[Array, ""]) -> Sublayer:
        router, experts, dense = jax.random.split(key, 3)
        layer = gated_mlp(config, mlp=config.mlp * (2 if is_wide else 1), output_std=None, key=dense)
        gated = Residual(layer, norm(config), output_norm=norm(config))
        if not config.experts:
            return gated
        expert = lambda key: gated_mlp(config, mlp=config.expert_mlp, output_std=None, key=key)
        options: dict[str, Any] = {"norm": norm(config), "logit_scale": config.embed**-0.5, "scales_experts": True}
        options |= {"normalise": True, "expert_norm": norm(config)}
        mixed = mixture(config, expert, **options, router=router, experts=experts)
        routed = Residual(mixed, output_norm=norm(config))
        return ParallelResidual((gated, routed), output_norm=norm(config))

    def block(kind: Kind, key: Key[Array, ""]) -> Block:
        first, second, third = jax.random.split(key, 3)
        is_wide = config.widens_reading and kind.reads is not None
        sublayers: list[Sublayer] = [mixer(kind, first), feed_forward(is_wide, second)]
        if config.input_mlp:
            gate = PerLayerGate(embed=config.embed, mlp=config.input_mlp, activation=activation_of(config), key=third)
            sublayers.append(Residual(gate, output_norm=norm(config), reads="layer_input"))
        return Block(*sublayers, StreamScale(jnp.ones((), jnp.float32)))

    layers, inputs = jax.random.split(key)
    ends: dict[str, Any] = {"embedding_scale": config.embed**0.5, "logit_softcap": config.logit_softcap}
    model = decoder(config, block, kinds_of(config), **ends, key=layers)
    if not config.input_mlp:
        return model
    sizes = {"vocab": config.input_vocab, "embed": config.embed, "depth": config.layers, "mlp": config.input_mlp}
    return dataclasses.replace(model, layer_inputs=PerLayerInputs(**sizes, eps=config.eps, key=inputs))


GEMMA4 = Family(
    "gemma4",
    Gemma4Config,
    build_gemma4,
    PRESETS,
    "Gemma4ForCausalLM",
    "gemma4_text",
    (
        *decoder_attributes(ProportionalRotaryByType(), head_dim=256, kv_heads=4, tied=True, max_seq=131_072),
        *(GlobalWindows(), GlobalHeads(), MaybeExperts()),
        Attribute("logit_softcap", "final_logit_softcapping", None),
        Attribute("bias", "attention_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation("gelu_pytorch_tanh", "hidden_activation"),
        Expect("use_bidirectional_attention", None, "vision", written=False),  # "vision" concerns images alone
        LayerVectors(),
        Attribute("reading_layers", "num_kv_shared_layers", 0),
        Attribute("widens_reading", "use_double_wide_mlp", False),
    ),
    GEMMA4_WEIGHTS,
    unread=unread,
    multimodal=(MultimodalModel("gemma4"),),
)
