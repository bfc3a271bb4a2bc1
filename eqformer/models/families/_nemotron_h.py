"""Nemotron-H, Nemotron Nano 2 and 3 (NVIDIA 2025): each layer is a Mamba-2, an attention, or a feed-forward layer."""

import dataclasses
import math

import jax
from jaxtyping import Array, Key

from ...nn import Block, GateNorm, Layer, Linear, Mamba2Mixer, MLP, MoE, Residual, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Nullable
from .._config_types import Attributes, LayerCount, NotNegative, Number, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._weight_rules import Rule
from ._common import attention_weights, KeyHeads
from ._decoder import activation_of, attention, damping, decoder, norm
from ._mamba2 import beside_mamba, mamba2, mamba_weights, NetSizes, STEP_LIMITS, StepLimits
from ._mixtures import mixture, sigmoid_router


# The letter of each kind of layer, by the kind's name in newer and in older configurations.
KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}


class LayerKinds(Entry):
    """The kind of each layer, as a list of names or, in most published configurations, as a pattern of letters."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `pattern` and `layers`; refuse unknown names."""
        names, pattern = published.listed("layers_block_type", str), published.text("hybrid_override_pattern", "ME*-")
        if names is not None:
            if unknown := [name for name in names if name not in KINDS]:
                published.refuse(f"layers_block_type={names}: {unknown} are none of {', '.join(KINDS)}.")
            pattern = "".join(KINDS[name] for name in names)
        return {"pattern": pattern, "layers": published.read("num_hidden_layers", LayerCount, len(pattern))}

    def write(self, config: "NemotronHConfig") -> Attributes:
        """Return the pattern."""
        return {"hybrid_override_pattern": config.pattern, "num_hidden_layers": config.layers}


class LeastStep(Entry):
    """`time_step_min`, the lower bound of a Mamba-2's time step; there is no upper bound.

    Transformers applies the lower bound to whole rows, but not to tokens that are decoded one by one. Here the bound is
    applied in both cases, so that both give the same logits. Transformers does not read `time_step_limit`; NVIDIA's own
    code does.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `step_limits`; refuse limits that transformers and NVIDIA's own code read differently."""
        limits = StepLimits().read(published)["step_limits"]
        if limits != (0.0, math.inf):
            published.refuse(f"time_step_limit={limits}: transformers does not read it; state only time_step_min.")
        return {"step_limits": (published.read("time_step_min", NotNegative, 0.001), math.inf)}

    def write(self, config: "NemotronHConfig") -> Attributes:
        """Return the attribute; raises a `ValueError` for an upper bound, which no configuration can state."""
        min_step, max_step = config.step_limits
        if max_step != math.inf:
            raise ValueError(
                f"save(config=NemotronHConfig(step_limits={config.step_limits})): published configurations cannot "
                "state an upper bound; give math.inf as the second limit."
            )
        return {"time_step_min": min_step}


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
    Attribute("normalize", "norm_topk_prob", True),
    *(
        Activation("relu2", "mlp_hidden_act"),
        Activation("silu", "mamba_hidden_act", "net_activation"),
        Attribute("mlp_bias", "mlp_bias", False),
    ),
    *(Expect("attention_bias", False), Expect("mamba_proj_bias", False), Expect("n_shared_experts", 1)),
    *(Nullable("expert_latent", "moe_latent_size", None), Expect("sliding_window", None, written=False)),
    # Settings of initialization and of running the model, attributes of predictors (multi-token prediction), and
    # attributes that transformers never reads.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(NetSizes, DecoderConfig):
    """The config of a Nemotron-H; its attention has no rotary positions."""

    pattern: str
    """A letter for each layer: M for a Mamba-2, * for attention, - for a feed-forward layer, and E for experts."""
    expert_mlp: Size = 7688
    """Hidden features of an expert."""
    expert_latent: Size | None = None
    """Channels of the experts' inputs; None: as many as in the residual stream."""
    shared_mlp: Size = 7688
    """Hidden features of the shared expert, the dense layer beside the experts."""
    experts: Size = 8
    """The number of experts of a layer."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    groups: Size = 1
    """The number of groups of experts."""
    kept_groups: Size = 1
    """The number of groups from which a token's experts are chosen."""
    scale: Number = 1.0
    """A factor of the experts' weights."""
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    activation: str = "relu_squared"
    net_activation: str = "silu"
    """The activation after the convolutions of a Mamba-2: a name of `nn.ACTIVATIONS`."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases; experts have no biases."""
    eps: NotNegative = 1e-5
    step_limits: STEP_LIMITS = (0.001, math.inf)

    def __post_init__(self):
        if len(self.pattern) != self.layers or set(self.pattern) - {*KINDS.values()}:
            raise ValueError(
                f"NemotronHConfig(layers={self.layers}, pattern={self.pattern!r}): the pattern has one of the letters "
                f"M, *, - and E for each layer; this one has {len(self.pattern)} letters."
            )

    @property
    def balance(self) -> float:
        """The weight of `LoadBalance`: 0, because the router's bias balances experts."""
        return 0.0


def build_nemotron_h(config: NemotronHConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Nemotron-H with random weights."""

    def mlp(width: int, key: Key[Array, ""], *, embed: int = config.embed, bias: bool = config.mlp_bias) -> MLP:
        output_std = damping(config) * width**-0.5
        return MLP(embed=embed, mlp=width, activation=activation_of(config), bias=bias, output_std=output_std, key=key)

    def latent(to: Key[Array, ""], back: Key[Array, ""]) -> tuple[Linear, Linear] | None:
        if config.expert_latent is None:
            return None
        embed, latent, bias = config.embed, config.expert_latent, config.mlp_bias
        return (
            Linear("embed -> latent", embed=embed, latent=latent, bias=bias, key=to),
            Linear("latent -> embed", embed=embed, latent=latent, bias=bias, key=back),
        )

    def routed(key: Key[Array, ""]) -> MoE:
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        return mixture(
            config,
            lambda key: mlp(config.expert_mlp, key, embed=config.expert_latent or config.embed, bias=False),
            shared=mlp(config.shared_mlp, shared_key),
            latent=latent(*jax.random.split(jax.random.fold_in(key, 3))),
            router=router_key,
            experts=experts_key,
            **sigmoid_router(config),
        )

    def recurrent(key: Key[Array, ""]) -> Mamba2Mixer:
        return mamba2(
            config,
            activation=activation_of(config, "net_activation"),
            gate_norm=GateNorm(config.eps),
            output_std=damping(config) * config.net_width**-0.5,
            key=key,
        )

    def layer(kind: str, key: Key[Array, ""]) -> Layer:
        match kind:
            case "M":
                return Block(Residual(recurrent(key), norm(config)))
            case "*":
                return Block(Residual(attention(config, rotary=None, key=key), norm(config)))
            case "-":
                return Residual(mlp(config.mlp, key), norm(config))
            case _:
                return Residual(routed(key), norm(config))

    return decoder(config, layer, tuple(config.pattern), key=key)


_PRESETS = {
    "nemotron-h-byte-500k": NemotronHConfig(
        *(256, 64, 6, 4, 2, 256),
        pattern="MEM*M-",
        head_dim=16,
        net_heads=8,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        experts=12,
        top_k=4,
        expert_mlp=32,
        expert_latent=32,
        shared_mlp=64,
        mlp_bias=True,
        tied=True,
    ),
    "nemotron-h-8b": NemotronHConfig(
        *(131_072, 4096, 52, 32, 8, 21_504),
        pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
        head_dim=128,
        net_heads=128,
        net_kv_heads=8,
    ),
    "nemotron-3-nano-30b-a3b": NemotronHConfig(
        *(131_072, 2688, 52, 32, 2, 1856),
        head_dim=128,
        net_heads=64,
        net_kv_heads=8,
        experts=128,
        top_k=6,
        scale=2.5,
        expert_mlp=1856,
        shared_mlp=3712,
        pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
    ),
}

NEMOTRON_H = Family(
    "nemotron_h",
    NemotronHConfig,
    build_nemotron_h,
    _PRESETS,
    "NemotronHForCausalLM",
    "nemotron_h",
    ATTRIBUTES,
    WEIGHTS,
    ignored_prefixes=("mtp.",),  # predictors (multi-token prediction)
)
