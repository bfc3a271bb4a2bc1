"""How ERNIE 4.5's mixtures are published."""

from typing import Any

from .._attributes import Activation, Attribute, Count, Entry, Expect, Ignore
from .._config import PublishedConfig
from .._layer_attributes import layers_of
from .._rotary_attributes import RotaryPositions
from .._weights import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, PRE_NORMS
from ._mixtures import MIXTURE


class _LastMixture(Entry):
    """The last layer that may have experts; where it is -1 or missing, the last of all."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`moe_last`."""
        last = published.count("moe_layer_end_index", -1, least=-1)
        return {"moe_last": layers_of(published) - 1 if last == -1 else last}

    def write(self, config: Any) -> dict[str, Any]:
        """Its attribute."""
        return {"moe_layer_end_index": config.moe_last}


ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(RotaryPositions(500_000.0), kv_heads=4, tied=True, max_seq=131_072),
    Attribute("bias", "use_bias", False),
    Count("expert_mlp", "moe_intermediate_size", 1536),
    # Of two names transformers reads the second last, so that it counts.
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
    Ignore("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),  # of training
)
_BIAS = "feed_forward.layer.router.selection_bias"
WEIGHTS = (
    *(
        *EDGES,
        Rule("lm_head.bias", "head.bias"),
        Rule("lm_head.bias", "logit_bias"),
        *ATTENTION,
        *PRE_NORMS,
        *gated_weights(bias=True),
        *MIXTURE,
    ),
    *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_experts.", bias=True),
    Rule(f"{LAYER}mlp.moe_statics.e_score_correction_bias", _BIAS, "1 experts -> experts"),
)
