"""Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219): a Mixtral with `LayerNorm`s, biases and SparseMixer's routing."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Count, Expect, Fields, Ignore
from .._config_types import Attributes, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import either_rotary_parameters, WithRotary
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, LOGIT_BIAS, weight_and_bias
from ._decoder import attention, decoder, gated_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhiMoEConfig(DecoderConfig):
    """The config of a Phi-3.5-MoE; `mlp` is the width of an expert."""

    experts: Size = 16
    """The number of experts of a layer, of which each token takes two."""
    tolerance: NotNegative = 0.01
    """Half the relative distance from the best logit of the router within which experts share the weight."""
    window: Length | None = None
    """The number of tokens that each token sees; None: all tokens before it."""
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_bias: bool = False
    """Whether the logits have a bias."""
    theta: Positive = 1_000_000.0
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""
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
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, window=config.window, bias=config.bias, key=mixer)
        return nn.Block(nn.Residual(attended, norm()), nn.Residual(mixture(feed_forward), norm()))

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
        """Return the older attributes; raises a `ValueError` for a scaling other than LongRoPE with a magnitude."""
        attributes = super().write(config)
        if config.scaling is None:
            return attributes
        stated = attributes["rope_scaling"]
        if stated["rope_type"] != "longrope" or _UNREAD not in stated:
            raise ValueError(
                f"save(config={type(config).__name__}(scaling={config.scaling})): published configurations state "
                "LongRoPE with a magnitude; give nn.LongRopeScaling(magnitude=...), or no scaling."
            )
        stated = stated | dict.fromkeys(_MAGNITUDES, stated[_UNREAD])
        return attributes | {"rope_scaling": {name: value for name, value in stated.items() if name != _UNREAD}}


_UNREAD = "attention_factor"  # The magnitudes are read in its place.
_PRESETS = {
    "phimoe-byte-500k": PhiMoEConfig(256, 64, 4, 4, 2, 64, experts=8, theta=1e4, bias=True, logit_bias=True, tied=True),
    # Without the published divisors of LongRoPE, which do not change the number of parameters.
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
    _PRESETS,
    "PhimoeForCausalLM",
    "phimoe",
    (
        *decoder_attributes(_LongRotary(1_000_000.0, skipped=(*_MAGNITUDES, _UNREAD)), kv_heads=8, max_seq=131_072),
        Count("experts", ("num_local_experts", "num_experts"), 16, minimum=2),
        Expect("num_experts_per_tok", 2),
        Attribute("tolerance", "router_jitter_noise", 0.01),
        Attribute("window", "sliding_window", None),
        Attribute("bias", "attention_bias", False),
        Attribute("logit_bias", "lm_head_bias", False),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Activation(),
        Ignore("input_jitter_noise", "hidden_dropout"),  # of training
    ),
    (
        *(*EDGES, Rule("model.norm.bias", "norm.bias"), *LOGIT_BIAS, *ATTENTION),
        *weight_and_bias(f"{LAYER}input_layernorm", "mixer.norm"),
        *weight_and_bias(f"{LAYER}post_attention_layernorm", "feed_forward.norm"),
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
