"""How Gemma 4's configurations say heads, windows and experts, and what its arrays are called."""

import dataclasses
from typing import Any

from .._attributes import Entry
from .._config import PublishedConfig
from .._kinds import OptionalSize, Size
from .._layer_attributes import all_but_every, layers_of, Windows
from .._weights import Rule
from ._common import ATTENTION, EDGES, FOUR_NORMS, gated_weights, head_norm_weights, LAYER


class GlobalWindows(Windows):
    """`Windows` of all layers but each sixth, and never of the last."""

    def __init__(self):
        super().__init__(512, lambda _, layers: all_but_every(6, layers))

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both fields."""
        found, last = super().read(published), layers_of(published) - 1
        return found | {"window_layers": tuple(layer for layer in found["window_layers"] if layer != last)}


class GlobalHeads(Entry):
    """Size and number of the key heads of layers without a window, said at once or layer by layer."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`global_head_dim`, `global_kv_heads` and `keys_as_values`; refuse layers that differ otherwise."""
        size, shared = published.read("global_head_dim", Size, 512), published.flag("attention_k_eq_v", False)
        own = published.read("num_key_value_heads", Size, 4)
        heads = published.read("num_global_key_value_heads", Size, own) if shared else own
        if by_layer := published.nested("per_layer_config"):
            windows = GlobalWindows().read(published)["window_layers"]
            others = [str(layer) for layer in range(layers_of(published)) if layer not in windows]
            said = next(iter(by_layer.values()))
            known = isinstance(said, dict) and not {*said} - {"head_dim", "num_key_value_heads"}
            listed = {str(layer).lstrip("0") or "0" for layer in by_layer}
            if not known or listed != {*others} or any(its != said for its in by_layer.values()):
                published.refuse(f"per_layer_config={by_layer}: layers {others}, without a window, must be alike.")
            within = PublishedConfig(said, f"{published.source}: per_layer_config")
            size = within.read("head_dim", Size, published.read("head_dim", Size, 256))
            heads = within.read("num_key_value_heads", Size, own)
        return {"global_head_dim": size, "global_kv_heads": heads, "keys_as_values": shared}

    def write(self, config: Any) -> dict[str, Any]:
        """For all layers at once, as it is published, where transformers reads it so."""
        said = {"global_head_dim": config.global_head_dim, "attention_k_eq_v": config.keys_as_values}
        if config.keys_as_values:
            return said | {"num_global_key_value_heads": config.global_kv_heads}
        alike = {"head_dim": config.global_head_dim, "num_key_value_heads": config.global_kv_heads}
        layers = {str(layer): alike for layer in range(config.layers) if layer not in config.window_layers}
        return said | ({} if config.global_kv_heads == config.kv_heads else {"per_layer_config": layers})


class LayerVectors(Entry):
    """A vector of each token for each layer (E2B, E4B), of channels that are 0 where there is none."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`input_mlp` and, where there are vectors, `input_vocab`."""
        channels, ids = published.read(*_CHANNELS), published.read(*_IDS)
        return {"input_mlp": channels, "input_vocab": ids} if channels else {}

    def write(self, config: Any) -> dict[str, Any]:
        """Channels and, where there are vectors, ids."""
        return {_CHANNELS[0]: config.input_mlp} | ({_IDS[0]: config.input_vocab} if config.input_mlp else {})


_CHANNELS, _IDS = ("hidden_size_per_layer_input", OptionalSize, 256), ("vocab_size_per_layer_input", Size, 262_144)


@dataclasses.dataclass(frozen=True)
class MaybeExperts(Entry):
    """Experts beside the dense layers, where they are switched on."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`experts`, `top_k` and `expert_mlp`."""
        names = {"experts": "num_experts", "top_k": "top_k_experts", "expert_mlp": "moe_intermediate_size"}
        if published.flag("enable_moe_block", False):
            return {own: published.read(its, Size) for own, its in names.items()}
        for its in names.values():
            published.take(its, None)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """The switch, and what it switches on."""
        if not config.experts:
            return {"enable_moe_block": False}
        said = {
            "num_experts": config.experts,
            "top_k_experts": config.top_k,
            "moe_intermediate_size": config.expert_mlp,
        }
        return {"enable_moe_block": True} | said


_DENSE, _MIXED = "feed_forward.layer.dense", "feed_forward.layer.routed"
_ROUTER, _EXPERTS = f"{_MIXED}.layer.router", f"{_MIXED}.layer.experts.mlps"
GEMMA4_WEIGHTS = (
    *(*EDGES, *ATTENTION, *head_norm_weights(), *FOUR_NORMS, *gated_weights()),
    Rule(f"{LAYER}layer_scalar", "scalar", "1 -> "),
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
    Rule(f"{LAYER}per_layer_input_gate.weight", "gated_input.layer.gate.weight"),
    Rule(f"{LAYER}per_layer_projection.weight", "gated_input.layer.down.weight"),
    Rule(f"{LAYER}post_per_layer_input_norm.weight", "gated_input.output_norm.weight"),
)
