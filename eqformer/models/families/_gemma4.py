"""The text models of Gemma 4 (Gemma team 2026), which have wider heads in layers without a window.

Some models have experts beside each dense layer. In others, the last layers read the keys and values of earlier layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry, Expect, Fields
from .._config_types import Attributes, Index, Length, NotNegative, OptionalSize, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family, MultimodalModel
from .._layer_attributes import all_but_every, layers_of, Windows
from .._rotary_attributes import ProportionalRotaryByType
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, FOUR_NORMS, gated_weights, head_norm_weights, LAYER
from ._decoder import activation_of, attention, causal_mask, decoder, gated_mlp, layer_windows, norm, rotary_of
from ._mixtures import mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """The config of a Gemma 4; `head_dim` and `kv_heads` apply to layers with a window."""

    window_layers: tuple[Index, ...]
    """The indices of the layers that see a `window`; all other layers see whole rows."""
    window: Length = 512
    """The number of tokens that the layers of `window_layers` see."""
    head_dim: Size = 256
    activation: str = "gelu_tanh"
    global_head_dim: Size = 512
    """Channels of a head in layers without a window."""
    global_kv_heads: Size
    """The number of key heads in layers without a window."""
    keys_as_values: bool = False
    """Whether layers without a window have no map to values, and use the outputs of the key map as values."""
    theta: Positive = 1_000_000.0
    scaling: nn.RotaryScaling | None = nn.ProportionalScaling(0.25)
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    logit_softcap: Positive | None = None
    """The softcap of the logits."""
    bias: bool = False
    """Whether the attention's projections have biases."""
    experts: OptionalSize = 0
    """The number of experts of a layer, beside its dense feed-forward layer; 0: no experts."""
    top_k: Size = 1
    """The number of experts that each token chooses."""
    expert_mlp: Size = 1
    """Hidden features of an expert."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    reading_layers: OptionalSize = 0
    """The number of layers at the end that have no keys and values of their own. Such a layer reads the keys and values
    of the last earlier layer of its kind, with or without a window, that computes them."""
    widens_reading: bool = False
    """Whether the layers that read keys and values have twice as many hidden features."""
    input_mlp: OptionalSize = 0
    """Channels of the vector that each layer gets for each token; 0: layers get no such vectors."""
    input_vocab: Size = 262_144
    """The number of ids that have vectors for each layer."""
    tied: bool = True
    max_seq: Length = 262_144


class Kind(NamedTuple):
    """A kind of layer."""

    window: int | None
    """The layer's window; None: the layer sees whole rows."""
    shares: str | None = None
    """The name by which the layer shares its keys and values with later layers; None: it does not share them."""
    reads: str | None = None
    """The name of the keys and values that the layer reads from an earlier layer; None: it computes its own."""


def kinds_of(config: Gemma4Config) -> list[Kind]:
    """Return the kind of each layer; raises a `ValueError` if layers would read keys that no earlier layer has."""
    windows, count = layer_windows(config), config.layers - config.reading_layers
    names = ["global" if window is None else "window" for window in windows]
    if missing := {*names[count:]} - {*names[:count]}:
        raise ValueError(
            f"Gemma4Config(layers={config.layers}, reading_layers={config.reading_layers}): later layers would read "
            f"keys of {' and '.join(sorted(missing))} layers, but none of the first {max(count, 0)} layers is such a "
            "layer; give fewer reading_layers."
        )
    last = {name: layer for layer, name in enumerate(names[:count])} if config.reading_layers else {}
    kinds = [
        Kind(window, shares=name if last.get(name) == layer and name in names[count:] else None)
        for layer, (window, name) in enumerate(zip(windows[:count], names[:count]))
    ]
    return kinds + [Kind(window, reads=name) for window, name in zip(windows[count:], names[count:])]


def unread(config: Any) -> tuple[str, ...]:
    """Return prefixes of published arrays that are not read: key and value maps of layers that read earlier layers'
    keys."""
    layers = range(config.layers - config.reading_layers, config.layers)
    return tuple(f"model.layers.{layer}.self_attn.{part}_" for layer in layers for part in "kv")


class GlobalWindows(Windows):
    """`Windows`, by default of all layers but every sixth; the last layer never has a window."""

    def __init__(self):
        super().__init__(512, lambda _, layers: all_but_every(6, layers))

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        fields, last = super().read(published), layers_of(published) - 1
        return fields | {"window_layers": tuple(layer for layer in fields["window_layers"] if layer != last)}


class GlobalHeads(Entry):
    """The size and number of key heads in layers without a window, stated once or layer by layer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `global_head_dim`, `global_kv_heads` and `keys_as_values`.

        Refuse a `per_layer_config` unless its layers are exactly the layers without a window, with equal attributes.
        """
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
                    f"per_layer_config={by_layer}: its layers must be {global_layers}, the layers without a window; "
                    "all of them must have the same head_dim and num_key_value_heads, and no other attributes."
                )
            within = PublishedConfig(stated, f"{published.source}: per_layer_config")
            size = within.read("head_dim", Size, published.read("head_dim", Size, 256))
            heads = within.read("num_key_value_heads", Size, kv_heads)
        return {"global_head_dim": size, "global_kv_heads": heads, "keys_as_values": shared}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return the attributes; `per_layer_config` only if no other attribute can state the number of key heads."""
        attributes = {"global_head_dim": config.global_head_dim, "attention_k_eq_v": config.keys_as_values}
        if config.keys_as_values:
            return attributes | {"num_global_key_value_heads": config.global_kv_heads}
        alike = {"head_dim": config.global_head_dim, "num_key_value_heads": config.global_kv_heads}
        layers = {str(layer): alike for layer in range(config.layers) if layer not in config.window_layers}
        return attributes | ({} if config.global_kv_heads == config.kv_heads else {"per_layer_config": layers})


class LayerVectors(Entry):
    """A vector of each token for each layer (E2B, E4B); 0 channels mean no vectors."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `input_mlp` and, if there are vectors, `input_vocab`."""
        channels, ids = published.read(*_CHANNELS), published.read(*_IDS)
        return {"input_mlp": channels, "input_vocab": ids} if channels else {}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return the channels and, if there are vectors, the number of ids."""
        return {_CHANNELS[0]: config.input_mlp} | ({_IDS[0]: config.input_vocab} if config.input_mlp else {})


_CHANNELS, _IDS = ("hidden_size_per_layer_input", OptionalSize, 256), ("vocab_size_per_layer_input", Size, 262_144)


@dataclasses.dataclass(frozen=True)
class MaybeExperts(Entry):
    """Experts beside the dense layers, if `enable_moe_block` is true."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `experts`, `top_k` and `expert_mlp`."""
        names = {"experts": "num_experts", "top_k": "top_k_experts", "expert_mlp": "moe_intermediate_size"}
        if published.flag("enable_moe_block", False):
            return {field: published.read(attribute, Size) for field, attribute in names.items()}
        for attribute in names.values():
            published.take(attribute, None)
        return {}

    def write(self, config: Gemma4Config) -> Attributes:
        """Return `enable_moe_block` and, if it is true, the numbers of experts."""
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
    # The factor is the last sublayer, which is number 3 if there is a per-layer gate, and otherwise number 2.
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
    # GGUF files have separate arrays for each expert.
    Rule(
        f"{LAYER}experts.{{expert}}.gate_up_proj.weight",
        (f"{_EXPERTS}.gate.weight", f"{_EXPERTS}.up.weight"),
        variant=True,
    ),
    Rule(f"{LAYER}experts.{{expert}}.down_proj.weight", f"{_EXPERTS}.down.weight", variant=True),
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


def _gemma4(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, period: int = 6) -> Gemma4Config:
    return Gemma4Config(
        *(262_144, embed, layers, heads, kv_heads, mlp),
        window_layers=all_but_every(period, layers),
        global_kv_heads=kv_heads,
        logit_softcap=30.0,
    )


PRESETS: Mapping[str, Gemma4Config] = {
    "gemma4-byte-500k": Gemma4Config(
        *(256, 64, 4, 4, 2, 128),
        window=64,
        window_layers=(0, 1, 2),
        head_dim=16,
        global_head_dim=32,
        global_kv_heads=1,
        keys_as_values=True,
        theta=1e5,
        bias=True,
        experts=12,
        top_k=4,
        expert_mlp=16,
        max_seq=512,
    ),
    "gemma4-e-byte-400k": Gemma4Config(
        *(256, 64, 8, 4, 1, 96),
        window=64,
        window_layers=(0, 2, 4, 6),
        head_dim=16,
        global_head_dim=32,
        global_kv_heads=1,
        theta=1e5,
        bias=True,
        reading_layers=4,
        widens_reading=True,
        input_mlp=8,
        input_vocab=256,
        max_seq=512,
    ),
    "gemma4-e2b": dataclasses.replace(
        _gemma4(1536, 35, 8, 1, 6144, period=5),
        reading_layers=20,
        widens_reading=True,
        input_mlp=256,
        max_seq=131_072,
    ),
    "gemma4-e4b": dataclasses.replace(
        _gemma4(2560, 42, 8, 2, 10_240), reading_layers=18, input_mlp=256, max_seq=131_072
    ),
    "gemma4-26b-a4b": dataclasses.replace(
        _gemma4(2816, 30, 16, 8, 2112),
        global_kv_heads=2,
        keys_as_values=True,
        window=1024,
        experts=128,
        top_k=8,
        expert_mlp=704,
    ),
    "gemma4-31b": dataclasses.replace(
        _gemma4(5376, 60, 32, 16, 21_504), global_kv_heads=4, keys_as_values=True, window=1024
    ),
}


def _attention(config: Gemma4Config, kind: Kind, key: Key[Array, ""]) -> nn.Attention | nn.CrossLayerAttention:
    """Return the attention of a layer, which computes its keys and values or reads them from an earlier layer."""
    if kind.window is None:
        size, kv_heads = config.global_head_dim, config.global_kv_heads
        rotary = rotary_of(config, size, "global_head_dim", scaling=config.scaling)
    else:
        size, kv_heads = config.head_size, config.kv_heads
        rotary = rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling)

    def head_norm(scale: bool = True) -> nn.RMSNorm:
        return nn.RMSNorm("head_dim", head_dim=size, eps=config.eps, scale=scale)

    if kind.reads:
        return nn.CrossLayerAttention(
            embed=config.embed,
            heads=config.heads,
            head_dim=size,
            kv_heads=kv_heads,
            bias=config.bias,
            query_norm=head_norm(),
            rotary=rotary,
            scores=nn.Scores(1.0),
            mask=causal_mask(kind.window),
            key=key,
        )
    mixer = attention(
        config,
        window=kind.window,
        head_dim=size,
        kv_heads=kv_heads,
        bias=config.bias,
        output_std=None,
        query_norm=head_norm(),
        key_norm=head_norm(),
        value_norm=head_norm(scale=False),
        rotary=rotary,
        scores=nn.Scores(1.0),
        key=key,
    )
    if config.keys_as_values and kind.window is None:
        return eqx.tree_at(lambda attention: attention.value, mixer, None)
    return mixer


def _feed_forward(config: Gemma4Config, kind: Kind, key: Key[Array, ""]) -> nn.Sublayer:
    """Return a gated layer with norms or, in a config with experts, the gated layer beside a mixture."""
    router_key, experts_key, dense_key = jax.random.split(key, 3)
    width = config.mlp * (2 if config.widens_reading and kind.reads else 1)
    layer = gated_mlp(config, mlp=width, output_std=None, key=dense_key)
    gated = nn.Residual(layer, norm(config), output_norm=norm(config))
    if not config.experts:
        return gated
    feed_forward = mixture(
        config,
        lambda key: gated_mlp(config, mlp=config.expert_mlp, output_std=None, key=key),
        expert_norm=norm(config),
        norm=norm(config),
        normalize=True,
        logit_scale=config.embed**-0.5,
        scales_experts=True,
        router=router_key,
        experts=experts_key,
    )
    routed = nn.Residual(feed_forward, output_norm=norm(config))
    return nn.ParallelResidual((gated, routed), output_norm=norm(config))


def build_gemma4(config: Gemma4Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Gemma 4 with random weights."""

    def block(kind: Kind, key: Key[Array, ""]) -> nn.Block:
        attention_key, feed_forward_key, gate_key = jax.random.split(key, 3)
        mixer = nn.Residual(
            _attention(config, kind, attention_key),
            norm(config),
            output_norm=norm(config),
            shares=kind.shares,
            reads=kind.reads,
        )
        sublayers: list[nn.Sublayer] = [mixer, _feed_forward(config, kind, feed_forward_key)]
        if config.input_mlp:
            gate = nn.PerLayerGate(
                embed=config.embed, mlp=config.input_mlp, activation=activation_of(config), key=gate_key
            )
            sublayers.append(nn.Residual(gate, output_norm=norm(config), reads="layer_input"))
        return nn.Block(*sublayers, nn.StreamScale(jnp.ones((), jnp.float32)))

    layers_key, inputs_key = jax.random.split(key)
    model = decoder(
        config,
        block,
        kinds_of(config),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
        key=layers_key,
    )
    if not config.input_mlp:
        return model
    layer_inputs = nn.PerLayerInputs(
        vocab=config.input_vocab,
        embed=config.embed,
        depth=config.layers,
        mlp=config.input_mlp,
        eps=config.eps,
        key=inputs_key,
    )
    return dataclasses.replace(model, layer_inputs=layer_inputs)


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
