"""How a Nemotron-H is published: its attributes, and the names of its arrays."""

import math
from typing import Any

from .._attributes import Activation, Attribute, Count, Entry, Expect, Ignore, Nullable
from .._config import PublishedConfig
from .._kinds import LayerCount, NotNegative
from .._weights import Rule
from ._common import attention_weights, KeyHeads
from ._state_spaces import beside_mamba, mamba_weights, StepLimits


# Names of layers, those of older configurations too, and their letters in a pattern.
KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}


class LayerKinds(Entry):
    """The kind of each layer, as a list of names or, in most published configurations, as a pattern of letters."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`pattern` and `layers`; refuse names that are none, and another number of layers."""
        names, pattern = published.listed("layers_block_type", str), published.text("hybrid_override_pattern", "ME*-")
        if names is not None:
            if unknown := [name for name in names if name not in KINDS]:
                published.refuse(f"layers_block_type={names}: {unknown} are none of {', '.join(KINDS)}.")
            pattern = "".join(KINDS[name] for name in names)
        return {"pattern": pattern, "layers": published.read("num_hidden_layers", LayerCount, len(pattern))}

    def write(self, config: Any) -> dict[str, Any]:
        """The pattern."""
        return {"hybrid_override_pattern": config.pattern, "num_hidden_layers": config.layers}


class LeastStep(Entry):
    """`time_step_min`, the least step; there is no greatest one.

    Transformers applies the least step to whole rows, but not to tokens that it decodes one by one; here it is applied
    to both, so that both give the same logits. It does not read `time_step_limit`, which NVIDIA's own code does.
    """

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Return `step_limits`; refuse limits that transformers and NVIDIA's own code read unlike."""
        limits = StepLimits().read(published)["step_limits"]
        if limits != (0.0, math.inf):
            published.refuse(f"time_step_limit={limits}: transformers does not read it; say time_step_min alone.")
        return {"step_limits": (published.read("time_step_min", NotNegative, 0.001), math.inf)}

    def write(self, config: Any) -> dict[str, Any]:
        """Return the attribute; raises a `ValueError` for a greatest step, which no configuration says."""
        least, most = config.step_limits
        if most != math.inf:
            raise ValueError(
                f"save(config=NemotronHConfig(step_limits={config.step_limits})): published configurations have no "
                "greatest step; give math.inf."
            )
        return {"time_step_min": least}


ATTRIBUTES: tuple[Entry, ...] = (
    *(Count("vocab", "vocab_size"), Count("embed", "hidden_size"), Count("heads", "num_attention_heads", 32)),
    *(KeyHeads(8), Count("mlp", "intermediate_size", 21_504), LayerKinds()),
    Attribute("head_dim", ("head_dim", "attention_head_dim"), 128),
    Attribute("eps", "layer_norm_epsilon", 1e-5),
    Attribute("tied", "tie_word_embeddings", False),
    Attribute("max_seq", "max_position_embeddings", 4096),
    Count("net_heads", "mamba_num_heads", 128),
    Count("net_v_dim", "mamba_head_dim", 64),
    Count("net_kv_heads", "n_groups", 8),
    Count("net_head_dim", "ssm_state_size", 128),
    Count("taps", "conv_kernel", 4),
    Attribute("net_bias", "use_bias", False),
    Attribute("conv_bias", "use_conv_bias", True),
    LeastStep(),
    Count("experts", "n_routed_experts", 8),
    Count("top_k", "num_experts_per_tok", 2),
    Count("expert_mlp", "moe_intermediate_size", 7688),
    Count("shared_mlp", "moe_shared_expert_intermediate_size", 7688),
    Count("groups", "n_group", 1),
    Count("kept_groups", "topk_group", 1),
    Attribute("scale", "routed_scaling_factor", 1.0),
    Attribute("normalise", "norm_topk_prob", True),
    *(
        Activation("relu2", "mlp_hidden_act"),
        Activation("silu", "mamba_hidden_act", "net_activation"),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    *(Expect("attention_bias", False), Expect("mamba_proj_bias", False), Expect("n_shared_experts", 1)),
    *(Nullable("expert_latent", "moe_latent_size", None), Expect("sliding_window", None, written=False)),
    # How weights are drawn, what is run how, further predictors, and what transformers never reads.
    Ignore("time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
    Ignore("chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    Ignore("num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type", "norm_eps"),
    Ignore("mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor"),
)

_LAYER = "backbone.layers.{layer}."
_MIXED = f"{_LAYER}mixer."
_MLP = [(name, leaf) for name in ("up", "down") for leaf in ("weight", "bias")]
WEIGHTS = (
    Rule("backbone.embeddings.weight", "embedding.weight"),
    Rule("backbone.norm_f.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule(f"{_LAYER}norm.weight", "mixer.norm.weight"),
    Rule(f"{_LAYER}norm.weight", "norm.weight"),
    *beside_mamba(attention_weights(prefix=_MIXED)),
    *mamba_weights(_MIXED),
    *(Rule(f"{_MIXED}{name}_proj.{leaf}", f"layer.{name}.{leaf}") for name, leaf in _MLP),
    Rule(f"{_MIXED}gate.weight", "layer.router.linear.weight"),
    Rule(f"{_MIXED}gate.e_score_correction_bias", "layer.router.selection_bias"),
    Rule(f"{_MIXED}experts.{{expert}}.up_proj.weight", "layer.experts.mlps.up.weight"),
    Rule(f"{_MIXED}experts.{{expert}}.down_proj.weight", "layer.experts.mlps.down.weight"),
    *(Rule(f"{_MIXED}fc1_latent_proj.{leaf}", f"layer.to_latent.{leaf}") for leaf in ("weight", "bias")),
    *(Rule(f"{_MIXED}fc2_latent_proj.{leaf}", f"layer.from_latent.{leaf}") for leaf in ("weight", "bias")),
    *(Rule(f"{_MIXED}shared_experts.{name}_proj.{leaf}", f"layer.shared.{name}.{leaf}") for name, leaf in _MLP),
)
