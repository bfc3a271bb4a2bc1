"""The architectures of GGUF files that are read: their families, and their names of numbers and arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


_MAPS = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": published for name, published in _MAPS.items()},
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A `general.architecture`: its family's `model_type`, and how its files differ from folders."""

    model_type: str
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of a layer's arrays, beyond `LAYER`, with a place for an expert's number."""
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Published names of numbers that not all architectures have; they may be missing."""
    unsaid: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """Attributes that files leave out, computed from those that they have."""
    interleaved: bool = False
    """Whether the channels of queries and keys that turn together are neighbours."""
    raised: bool = False
    """Whether 1 is added to norms' scales."""


def _experts(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    maps = {f"ffn_{name}_exps": f"{prefix}experts.{{}}.{published}" for name, published in names.items()}
    return {"ffn_gate_inp": f"{prefix}gate"} | maps


def _gemma_scores(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the divisor of scores, as llama.cpp does, which knows Gemma 2 27B and Gemma 3 27B by their layers."""
    is_largest = config["num_hidden_layers"] in (46, 62)
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}


_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {f"{name}_logit_softcapping": f"{name}_logit_softcapping" for name in ("attn", "final")}
_LOCAL = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
_CHOICE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _experts("mlp.", {name: f"{name}_proj" for name in _MAPS}),
        {**_CHOICE, "expert_feed_forward_length": "moe_intermediate_size"},
        lambda config: {"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", raised=True),
    "gemma2": Architecture("gemma2", _FOUR_NORMS, {**_WINDOW, **_SOFTCAPS}, _gemma_scores, raised=True),
    "gemma3": Architecture("gemma3_text", _FOUR_NORMS, {**_WINDOW, **_SOFTCAPS, **_LOCAL}, _gemma_scores, raised=True),
    "phi3": Architecture("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _WINDOW),
}
# GGUF calls Mixtral "llama" too; a file with expert_count > 0 is Mixtral.
MIXTRAL = Architecture(
    "mixtral",
    _experts("block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    interleaved=True,
)
