"""How Falcon-H1 is published."""

import dataclasses
from typing import Any

from .._attributes import Activation, Attribute, Entry, Expect, Ignore
from .._config import PublishedConfig
from .._kinds import Number
from .._weights import Rule
from ._common import attention_weights, decoder_attributes, gated_weights, LAYER
from ._state_spaces import mamba_weights, STATED_MAMBA_ATTRIBUTES


@dataclasses.dataclass(frozen=True)
class Scales(Entry):
    """A list of multipliers, each of something of its own; ones where it is missing or null."""

    name: str
    published: str
    count: int

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The multipliers; refuse a list of another length, and what is no number."""
        said = published.listed(self.published, Number)
        scales = [1.0] * self.count if said is None else said
        if len(scales) != self.count:
            published.refuse(f"{self.published}={said}: it must be a list of {self.count} numbers.")
        return {self.name: tuple(scales)}

    def write(self, config: Any) -> dict[str, Any]:
        """The list."""
        return {self.published: list(getattr(config, self.name))}


_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention_input_scale": "attention_in_multiplier",
    "key_scale": "key_multiplier",
    "attention_scale": "attention_out_multiplier",
    "net_input_scale": "ssm_in_multiplier",
    "net_scale": "ssm_out_multiplier",
    "logit_scale": "lm_head_multiplier",
}
ATTRIBUTES: tuple[Entry, ...] = (
    *decoder_attributes(kv_heads=8, max_seq=8192),
    *STATED_MAMBA_ATTRIBUTES,
    *(Attribute(name, published, 1.0) for name, published in _SCALES.items()),
    Scales("net_scales", "ssm_multipliers", 5),
    Scales("mlp_scales", "mlp_multipliers", 2),
    Attribute("net_norm", "mamba_rms_norm", False),
    Attribute("norm_first", "mamba_norm_before_gate", True),
    Attribute("bias", "attention_bias", False),
    Attribute("output_bias", "projectors_bias", False),
    Attribute("mlp_bias", "mlp_bias", False),
    Activation(),
    Expect("mamba_use_mlp", True, written=False),
    # How it runs, and what transformers never reads.
    Ignore("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices"),
    Ignore("layers_block_type", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
)
WEIGHTS = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.final_layernorm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule(f"{LAYER}input_layernorm.weight", "mixer.norm.weight"),
    *attention_weights(path="mixer.mixers.0.layer"),
    *mamba_weights(f"{LAYER}mamba.", "mixer.mixers.1.layer."),
    Rule(f"{LAYER}pre_ff_layernorm.weight", "feed_forward.norm.weight"),
    *gated_weights(prefix=f"{LAYER}feed_forward.", bias=True),
)
