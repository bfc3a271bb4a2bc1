"""Ling 3 (inclusionAI 2026): delta nets whose decays have a bound, and latent attention with a gate for each head."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import LatentAttention, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Nullable, Unpublished
from .._config_types import Attributes, Index, Length, Number, Positive, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import every, LayerTypes, Period
from .._rotary_attributes import RotaryPositions, RotaryWithTemperature
from .._weight_rules import Rule
from ._common import LAYER, SIZES, WIDTH
from ._deepseek import EqualKeyHeads, latent_attention, LATENT_BYTE, LATENT_WEIGHTS
from ._kimi_linear import build_latent_nets, LatentNetConfig
from ._mixtures import LayerMixtures


@dataclasses.dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(LatentNetConfig):
    """The config of a Ling 3."""

    lowest_log_decay: Number | None = -5.0
    """The lower bound of the logarithms of a delta net's decays, a negative number; None: no bound."""
    experts: Size = 512
    first_dense: Index = 2
    theta: Positive = 6_000_000.0
    max_seq: Length = 262_144


def build_bailing_hybrid(config: BailingHybridConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Ling 3 with random weights."""

    def attention(key: Key[Array, ""]) -> LatentAttention:
        attention_key, gate_key = jax.random.split(key)
        layer = latent_attention(config, interleaved=True, key=attention_key)
        return layer.with_gate(by_heads=True, key=gate_key)

    return build_latent_nets(config, attention, rank=0, lowest_log_decay=config.lowest_log_decay, key=key)


class _DeltaNetSizes(Entry):
    """The heads of a delta net, their channels, and the number of tokens that its convolutions read.

    Transformers writes attributes `linear_...` for these sizes. If such an attribute is missing, the publishers'
    attribute for the same size is read.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return the three fields."""
        heads, head_dim = published.count("num_attention_heads"), published.count("head_dim", 128)
        taps = published.count("short_conv_kernel_size", 4)
        return {
            "net_heads": published.count("linear_num_heads", heads),
            "net_head_dim": published.count("linear_head_dim", head_dim),
            "taps": published.count("linear_conv_kernel_dim", taps),
        }

    def write(self, config: BailingHybridConfig) -> Attributes:
        """Return the attributes of transformers."""
        sizes = {"linear_num_heads": config.net_heads, "linear_head_dim": config.net_head_dim}
        return sizes | {"linear_conv_kernel_dim": config.taps}


class _MaxSeq(Attribute):
    """The length of the longest rows; it is also added under the usual name, `max_position_embeddings`.

    Other entries read the usual name.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `max_seq`."""
        fields = super().read(published)
        published.add("max_position_embeddings", fields[self.name])
        return fields


class _DecayBound(Entry):
    """The lower bound of the logarithms of decays; there is no bound if `kda_safe_gate` is false."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `lowest_log_decay`; refuse a bound that is not negative."""
        bound, is_bounded = published.read("kda_lower_bound", Number, -5.0), published.flag("kda_safe_gate", True)
        if not bound < 0:
            published.refuse(
                f"kda_lower_bound={bound}: it must be negative, because it bounds the logarithms of decays, and the "
                "state would grow with a decay above 1."
            )
        return {"lowest_log_decay": bound if is_bounded else None}

    def write(self, config: BailingHybridConfig) -> Attributes:
        """Return both attributes."""
        bound = config.lowest_log_decay
        return {"kda_safe_gate": bound is not None, "kda_lower_bound": -5.0 if bound is None else bound}


_PRESETS = {
    "ling3-byte-500k": BailingHybridConfig(
        **LATENT_BYTE,
        attention_layers=(3,),
        net_heads=4,
        net_head_dim=16,
        experts=12,
        top_k=4,
        first_dense=1,
        groups=4,
        kept_groups=2,
        theta=1e4,
    ),
    "ling3-flash": BailingHybridConfig(
        157_184, 2560, layers=42, heads=32, mlp=6144, expert_mlp=768, attention_layers=every(6, 42)
    ),
}

# Prefixes of published names, and of paths in a layer.
_ATTENTION, _MIXER, _FEED_FORWARD = f"{LAYER}attention.", "mixer.layer.", "feed_forward.layer."
_INTO, _TAPS = "(heads dim) inputs -> heads dim inputs", "(heads dim) 1 taps -> heads dim taps"
_QKV = (("q", "query"), ("k", "key"), ("v", "value"))
_IS_NET = f"{_MIXER}log_rate"  # a leaf that only delta nets have
_OF_NETS = (
    *(Rule(f"{_ATTENTION}{name}_proj.weight", f"{_MIXER}{leaf}.weight", _INTO) for name, leaf in _QKV),
    *(Rule(f"{_ATTENTION}{name}_conv1d.weight", f"{_MIXER}{leaf}_conv.weight", _TAPS) for name, leaf in _QKV),
    Rule(f"{_ATTENTION}b_proj.weight", f"{_MIXER}rate.weight"),
    Rule(f"{_ATTENTION}f_proj.weight", f"{_MIXER}decay_up.weight", _INTO),
    Rule(f"{_ATTENTION}g_proj.weight", f"{_MIXER}gate_up.weight", _INTO),
    Rule(f"{_ATTENTION}A_log", _IS_NET),
    Rule(f"{_ATTENTION}dt_bias", f"{_MIXER}decay_bias", "(heads dim) -> heads dim"),
    Rule(f"{_ATTENTION}o_norm.weight", f"{_MIXER}norm.weight"),
    Rule(f"{_ATTENTION}dense.weight", f"{_MIXER}output.weight", "embed (heads dim) -> embed heads dim"),
)
_RENAMED = (("model.embed_tokens.", "model.word_embeddings."), (".self_attn.", ".attention."), (".o_proj.", ".dense."))


def _rename(rule: Rule) -> Rule:
    """Return a rule of DeepSeek's table with Ling's name; the output map's rule does not apply to delta nets."""
    name = rule.name
    for deepseek_name, ling_name in _RENAMED:
        name = name.replace(deepseek_name, ling_name)
    is_output_map = name.startswith(f"{_ATTENTION}dense.")
    return dataclasses.replace(rule, name=name, lacks=_IS_NET if is_output_map else rule.lacks)


BAILING_HYBRID = Family(
    "bailing_hybrid",
    BailingHybridConfig,
    build_bailing_hybrid,
    _PRESETS,
    "BailingHybridForCausalLM",
    "bailing_hybrid",
    (
        # `_MaxSeq` is before `RotaryPositions`, because `RotaryPositions` reads the attribute that `_MaxSeq` adds.
        _MaxSeq("max_seq", ("model_max_length", "max_position_embeddings"), 262_144),
        *(
            *SIZES,
            WIDTH,
            EqualKeyHeads(),
            RotaryWithTemperature(RotaryPositions(6_000_000.0)),
            _DeltaNetSizes(),
            _DecayBound(),
        ),
        *(Attribute("first_dense", "first_k_dense_replace", 2), LayerMixtures()),
        LayerTypes("attention_layers", ("full_attention", "linear_attention"), Period(6, ("layer_group_size",))),
        Count("expert_mlp", "moe_intermediate_size", 768),
        Count("experts", ("num_experts", "num_local_experts"), 512),
        Count("top_k", ("num_experts_per_token", "num_experts_per_tok"), 8),
        Count("shared", ("num_shared_experts", "n_shared_experts"), 1, minimum=0),
        Count("groups", ("num_expert_group", "n_group"), 8),
        Count("kept_groups", "topk_group", 4),
        Attribute("scale", "routed_scaling_factor", 2.5),
        Attribute("normalize", ("moe_renormalize", "norm_topk_prob"), True),
        Unpublished("balance", 0.0001, "no attribute states the weight of a balance loss"),
        *(Count("latent", "kv_lora_rank", 512), Nullable("q_latent", "q_lora_rank", None)),
        Count("head_dim", "qk_nope_head_dim", 128),
        Count("rope_dim", "qk_rope_head_dim", 64),
        Count("v_dim", "v_head_dim", 128),
        Attribute("eps", "rms_norm_eps", 1e-6),
        *(Unpublished("tied", False, "transformers never ties the head"), Expect("tie_word_embeddings", False)),
        *(Activation(), Attribute("bias", "attention_bias", False)),
        # Settings of predictors (multi-token prediction), and a sum of other sizes.
        Ignore("num_mtp_layers", "num_nextn_predict_layers", "mtp_loss_scaling_factor", "qk_head_dim"),
    ),
    (
        *(dataclasses.replace(rule, needs=_IS_NET) for rule in _OF_NETS),
        *map(_rename, LATENT_WEIGHTS),
        Rule(f"{_ATTENTION}g_proj.weight", f"{_MIXER}gate.weight", lacks=_IS_NET),
        Rule(f"{LAYER}mlp.gate.expert_bias", f"{_FEED_FORWARD}router.selection_bias"),
    ),
)
