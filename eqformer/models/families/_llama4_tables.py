"""How the text models of Llama 4 are published."""

from .._attributes import Activation, Attribute, Count, Entry, Nullable, Switched
from .._layer_attributes import LayerTypes, ListedLayers, NoRotaryLayers, Period
from .._rotary_attributes import RotaryPositions
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, PRE_NORMS
from ._mixtures import stacked_mixture_weights


ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(RotaryPositions(500_000.0), head_dim=128, kv_heads=8, max_seq=131_072),
    Attribute("dense_mlp", "intermediate_size_mlp", 16_384),
    Count("experts", "num_local_experts", 16),
    Count("top_k", "num_experts_per_tok", 1),
    Attribute("qk_norm", "use_qk_norm", True),
    Attribute("balance", "router_aux_loss_coef", 0.001),
    Attribute("bias", "attention_bias", False),
    Attribute("temperature_every", "floor_scale", 8192),
    Switched(Attribute("temperature", "attn_scale", 0.1), "attn_temperature_tuning"),
    Nullable("chunk", "attention_chunk_size", 8192),
    ListedLayers("moe_layers", "moe_layers", Period(1, ("interleave_moe_layer_step",))),
    NoRotaryLayers(empty=True),
    LayerTypes("full_layers", ("full_attention", "chunked_attention"), NoRotaryLayers(empty=True), empty=True),
    Activation(),
)
_FED = f"{LAYER}feed_forward."
WEIGHTS = (
    *(*EDGES, *ATTENTION, *PRE_NORMS),
    *gated_weights(prefix=_FED),
    *gated_weights("feed_forward.layer.shared", prefix=f"{_FED}shared_expert."),
    *stacked_mixture_weights(_FED, interleaved=False),
)
