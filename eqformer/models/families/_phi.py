"""Phi-3, Phi-4 and Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219).

Phi-3 and Phi-4 are a Llama with joined projections and LongRoPE. Phi-3.5-MoE is a Mixtral with `LayerNorm`s, biases and
SparseMixer's routing.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Count, Expect, Fields, Ignore
from .._config_types import Attributes, Fraction, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._rotary_scaling import either_rotary_parameters, WithRotary
from .._weight_rules import Rule
from ._common import (
    ATTENTION,
    decoder_attributes,
    EDGES,
    gated_weights,
    INTO_HEADS,
    JOINED_GATED,
    LAYER,
    LOGIT_BIAS,
    OUT_OF_HEADS,
    PRE_NORMS,
    weight_and_bias,
)
from ._decoder import attention, decoder, gated_mlp, part_rotary, pre_norm_block


def _scaling(short: str, long: str) -> nn.LongRopeScaling:
    numbers = (tuple(map(float, text.split())) for text in (short, long))
    return nn.LongRopeScaling(*numbers, original_length=4096, factor=32.0)


PHI3_MINI = _scaling(
    """
    1.1 1.1 1.1 1.3000000000000003 1.3500000000000003 1.3500000000000003 1.4000000000000004 1.5500000000000005
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
    2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.0500000000000007
    2.0500000000000007 2.0500000000000007 2.0500000000000007 2.0500000000000007 2.0500000000000007
    2.1000000000000005 2.1000000000000005 2.1500000000000004 2.25 2.25 2.25 2.25 2.25 2.3999999999999995
    2.4499999999999993 2.499999999999999 2.6999999999999984 2.6999999999999984 2.7499999999999982
    2.799999999999998 2.8999999999999977 3.049999999999997
    """,
    """
    1.0700000524520874 1.1200000047683716 1.149999976158142 1.4199999570846558 1.5699999332427979
    1.7999999523162842 2.129999876022339 2.129999876022339 3.009999990463257 5.910000324249268 6.950000286102295
    9.070000648498535 9.930000305175781 10.710000038146973 11.130000114440918 14.609999656677246
    15.409998893737793 19.809999465942383 37.279998779296875 38.279998779296875 38.599998474121094
    40.12000274658203 46.20000457763672 50.940006256103516 53.66000747680664 54.9373893737793 56.89738845825195
    57.28738784790039 59.98738479614258 60.86738586425781 60.887386322021484 61.71739196777344 62.91739273071289
    62.957393646240234 63.41739273071289 63.8173942565918 63.83739471435547 63.897396087646484 63.93739700317383
    64.06739807128906 64.11434936523438 64.12435150146484 64.15435028076172 64.19435119628906 64.24435424804688
    64.57435607910156 64.69000244140625 64.76000213623047
    """,
)
PHI35_MINI = _scaling(
    """
    1.0 1.0199999809265137 1.0299999713897705 1.0299999713897705 1.0499999523162842 1.0499999523162842
    1.0499999523162842 1.0499999523162842 1.0499999523162842 1.0699999332427979 1.0999999046325684
    1.1099998950958252 1.1599998474121094 1.1599998474121094 1.1699998378753662 1.2899998426437378
    1.339999794960022 1.679999828338623 1.7899998426437378 1.8199998140335083 1.8499997854232788
    1.8799997568130493 1.9099997282028198 1.9399996995925903 1.9899996519088745 2.0199997425079346
    2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346 2.0199997425079346
    2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914
    2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0299997329711914 2.0799996852874756
    2.0899996757507324 2.189999580383301 2.2199995517730713 2.5899994373321533 2.729999542236328
    2.749999523162842 2.8399994373321533
    """,
    """
    1.0800000429153442 1.1100000143051147 1.1399999856948853 1.340000033378601 1.5899999141693115
    1.600000023841858 1.6200000047683716 2.620000123977661 3.2300000190734863 3.2300000190734863
    4.789999961853027 7.400000095367432 7.700000286102295 9.09000015258789 12.199999809265137 17.670000076293945
    24.46000099182129 28.57000160217285 30.420001983642578 30.840002059936523 32.590003967285156
    32.93000411987305 42.320003509521484 44.96000289916992 50.340003967285156 50.45000457763672
    57.55000305175781 57.93000411987305 58.21000289916992 60.1400032043457 62.61000442504883 62.62000274658203
    62.71000289916992 63.1400032043457 63.1400032043457 63.77000427246094 63.93000411987305 63.96000289916992
    63.970001220703125 64.02999877929688 64.06999969482422 64.08000183105469 64.12000274658203 64.41000366210938
    64.4800033569336 64.51000213623047 64.52999877929688 64.83999633789062
    """,
)
PHI4_MINI = _scaling(
    """
    1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
    """,
    """
    1.0 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 2.446418898
    2.735880826 3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 5.351743533 5.984965424 6.693110555
    7.485043894 8.370679318 9.36110372 10.4687158 11.70738129 13.09260651 14.64173252 16.37415215 18.31155283
    20.47818807 22.90118105 25.61086418 28.64115884 32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71
    32.93 32.97 33.28 33.49 33.5 44.16 47.77
    """,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """The config of a Phi-3."""

    rotary_fraction: Fraction = 1.0
    """The fraction of a head's channels that is rotated."""
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    eps: NotNegative = 1e-5
    max_seq: Length = 4096


def build_phi3(config: Phi3Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Phi-3 with random weights."""

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        rotary = part_rotary(config)
        mixer = attention(config, window=config.window, rotary=rotary, key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


_PRESETS = {
    "phi3-byte-500k": Phi3Config(256, 96, 4, 6, 2, 256, window=64),
    "phi3-mini-4k": Phi3Config(32_064, 3072, 32, 32, 32, 8192, window=2047),
    "phi3-mini-128k": Phi3Config(32_064, 3072, 32, 32, 32, 8192, scaling=PHI3_MINI, window=262_144, max_seq=131_072),
    "phi3.5-mini": Phi3Config(32_064, 3072, 32, 32, 32, 8192, scaling=PHI35_MINI, window=262_144, max_seq=131_072),
    "phi3-medium-4k": Phi3Config(32_064, 5120, 40, 40, 10, 17_920, window=2047),
    "phi4": Phi3Config(100_352, 5120, 40, 40, 10, 17_920, theta=250_000.0, max_seq=16_384),
    "phi4-mini": Phi3Config(
        200_064,
        3072,
        32,
        24,
        8,
        8192,
        rotary_fraction=0.75,
        scaling=PHI4_MINI,
        window=262_144,
        tied=True,
        max_seq=131_072,
    ),  # fmt: skip
}

_ORIGINAL = "original_max_position_embeddings"
_WITH_ORIGINAL = nn.LongRopeScaling, nn.YarnScaling, nn.Llama3Scaling


class RotaryWithOriginalLength(RotaryPositions):
    """Rotary positions whose original length is an attribute of its own (Phi-3)."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`; refuse a scaling whose original length differs from the attribute."""
        fields = super().read(published)
        # If the attribute is missing, transformers takes 4096, not the length of the longest rows.
        original, scaling = published.read(_ORIGINAL, Size, 4096), fields["scaling"]
        if isinstance(scaling, _WITH_ORIGINAL) and scaling.original_length != original:
            published.refuse(f"original_max_position_embeddings={original}, but rope_scaling has {scaling}.")
        return fields

    def write(self, config: WithRotary) -> Attributes:
        """Return `rope_theta` and `rope_scaling`, and the original length."""
        scaling = config.scaling
        original = {_ORIGINAL: scaling.original_length} if isinstance(scaling, _WITH_ORIGINAL) else {}
        return super().write(config) | original


_ATTENTION = (
    Rule(
        f"{LAYER}self_attn.qkv_proj.weight",
        ("mixer.layer.query.weight", "mixer.layer.key.weight", "mixer.layer.value.weight"),
        INTO_HEADS,
    ),
    Rule(f"{LAYER}self_attn.o_proj.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
)
PHI3 = Family(
    "phi3",
    Phi3Config,
    build_phi3,
    _PRESETS,
    "Phi3ForCausalLM",
    "phi3",
    (
        *decoder_attributes(RotaryWithOriginalLength(), max_seq=4096),
        RotaryFraction(),
        Attribute("window", "sliding_window", None),
        Activation(),
        Expect("full_attn_mod", 1, written=False),
        Expect("interpolate_factor", 1, written=False),
    ),
    (*EDGES, *_ATTENTION, *JOINED_GATED, *PRE_NORMS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhiMoEConfig(DecoderConfig):
    """The config of a Phi-3.5-MoE; `mlp` is the width of an expert."""

    experts: Size = 16
    """The number of experts of a layer; each token takes two."""
    tolerance: NotNegative = 0.01
    """Experts share a softmax if their logit is near the best logit: within `2 * tolerance`, relatively."""
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_bias: bool = False
    """Whether the logits have a bias."""
    theta: Positive = 1_000_000.0
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_phimoe(config: PhiMoEConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Phi-3.5-MoE with random weights."""
    norm = lambda: nn.LayerNorm("embed", embed=config.embed, eps=config.eps)

    def mixture(key: Key[Array, ""]) -> nn.MoE:
        router_key, expert_key = jax.random.split(key)
        router = nn.SparseMixerRouter(
            embed=config.embed, experts=config.experts, tolerance=config.tolerance, key=router_key
        )
        experts = nn.Experts(lambda key: gated_mlp(config, key=key), config.experts, key=expert_key)
        losses = (nn.LoadBalance(config.balance, "batch"),) if config.balance else ()
        return nn.MoE(router, experts, dispatch=nn.Dropless(), losses=losses)

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, window=config.window, bias=config.bias, key=mixer_key)
        return nn.Block(nn.Residual(mixer, norm()), nn.Residual(mixture(feed_forward_key), norm()))

    return decoder(config, block, final_norm=norm(), logit_bias=config.logit_bias, key=key)


_MAGNITUDES = ("short_mscale", "long_mscale")


class _LongRotary(RotaryPositions):
    """Rotary positions without a scaling, or with LongRoPE, whose magnitude is stated for short and for long rows."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`; refuse other scalings, and magnitudes that differ or are missing."""
        fields, parameters = super().read(published), either_rotary_parameters(published)
        if (scaling := fields["scaling"]) is None:
            return fields
        magnitudes = [parameters.get(name) for name in _MAGNITUDES]
        if (rope_type := parameters.get("rope_type")) != "longrope":
            published.refuse(f"rope_type={rope_type!r}: it must be 'default' or 'longrope'.")
        if None in magnitudes or magnitudes[0] != magnitudes[1]:
            published.refuse(
                f"short_mscale={magnitudes[0]}, long_mscale={magnitudes[1]}: both must be stated, and be equal."
            )
        return fields | {"scaling": dataclasses.replace(scaling, magnitude=magnitudes[0])}

    def write(self, config: WithRotary) -> Attributes:
        """Return `rope_theta` and `rope_scaling`; raises a `ValueError` unless the scaling is LongRoPE with a
        magnitude."""
        attributes = super().write(config)
        if config.scaling is None:
            return attributes
        stated = attributes["rope_scaling"]
        if stated["rope_type"] != "longrope" or _MAGNITUDE not in stated:
            raise ValueError(
                f"save(config={type(config).__name__}(scaling={config.scaling})): published configurations state "
                "LongRoPE with a magnitude; give nn.LongRopeScaling(magnitude=...), or no scaling."
            )
        stated = stated | dict.fromkeys(_MAGNITUDES, stated[_MAGNITUDE])
        return attributes | {"rope_scaling": {name: value for name, value in stated.items() if name != _MAGNITUDE}}


_MAGNITUDE = "attention_factor"  # The attributes of `_MAGNITUDES` are read instead.
_MOE_PRESETS = {
    "phimoe-byte-500k": PhiMoEConfig(256, 64, 4, 4, 2, 64, experts=8, theta=1e4, bias=True, logit_bias=True, tied=True),
    # This preset leaves out the published divisors of LongRoPE; they do not change the number of parameters.
    "phi-3.5-moe": PhiMoEConfig(
        32_064,
        4096,
        32,
        32,
        8,
        6400,
        bias=True,
        logit_bias=True,
        theta=10_000.0,
        window=131_072,
        balance=0.0,
    ),
}

_MIXTURE, _EXPERTS = f"{LAYER}block_sparse_moe.", "feed_forward.layer.experts.mlps"
PHIMOE = Family(
    "phimoe",
    PhiMoEConfig,
    build_phimoe,
    _MOE_PRESETS,
    "PhimoeForCausalLM",
    "phimoe",
    (
        *decoder_attributes(_LongRotary(1_000_000.0, skipped=(*_MAGNITUDES, _MAGNITUDE)), kv_heads=8, max_seq=131_072),
        Count("experts", ("num_local_experts", "num_experts"), 16, minimum=2),
        Expect("num_experts_per_tok", 2),
        Attribute("tolerance", "router_jitter_noise", 0.01),
        Attribute("window", "sliding_window", None),
        Attribute("bias", "attention_bias", False),
        Attribute("logit_bias", "lm_head_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation(),
        Ignore("input_jitter_noise", "hidden_dropout"),  # settings of training
    ),
    (
        *(*EDGES, Rule("model.norm.bias", "norm.bias"), *LOGIT_BIAS, *ATTENTION),
        *weight_and_bias(f"{LAYER}input_layernorm", "mixer.norm"),
        *weight_and_bias(f"{LAYER}post_attention_layernorm", "feed_forward.norm"),
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
