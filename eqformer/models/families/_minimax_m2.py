"""MiniMax-M2 (MiniMax 2025): norms of queries and keys over all heads, and experts chosen by sigmoids.

Half of each head's channels are rotated.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Fields, Ignore
from .._config_types import Fraction, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, head_norm_weights, LAYER, OF_HEADS, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, head_norms, part_rotary, pre_norm_block
from ._mixtures import mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """The config of a MiniMax-M2; `mlp` is the width of an expert."""

    experts: Size = 256
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    head_dim: Size = 128
    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    theta: Positive = 5_000_000.0
    jitter: NotNegative = 0.0
    """The largest relative change of the router's input while training."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 196_608


def build_minimax_m2(config: MiniMaxM2Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a MiniMax-M2 with random weights."""
    rotary = part_rotary(config)

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        router_key, experts_key = jax.random.split(feed_forward_key)
        mixer = attention(config, rotary=rotary, **head_norms(config, all_heads=True), key=mixer_key)
        feed_forward = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            balance_normalize=True,
            score="sigmoid",
            normalize=True,
            balanced=True,
            jitter=config.jitter,
            router=router_key,
            experts=experts_key,
        )
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, key=key)


class _Rotated(RotaryFraction):
    """The rotated fraction of a head; published configurations state the number of rotated channels instead."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary_fraction`; an attribute that states the fraction takes precedence."""
        channels, head_dim = published.read("rotary_dim", Size, None), published.read("head_dim", Size, 128)
        return RotaryFraction(self.default if channels is None else channels / head_dim).read(published)


_PRESETS = {
    "minimax-m2-byte-500k": MiniMaxM2Config(
        256, 64, 4, 4, 2, 32, experts=12, top_k=4, head_dim=16, theta=1e4, tied=True
    ),
    "minimax-m2": MiniMaxM2Config(200_064, 3072, 62, 48, 8, 1536),
}

_MIXTURE, _EXPERTS = f"{LAYER}block_sparse_moe.", "feed_forward.layer.experts.mlps"
MINIMAX_M2 = Family(
    "minimax_m2",
    MiniMaxM2Config,
    build_minimax_m2,
    _PRESETS,
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    (
        *decoder_attributes(RotaryPositions(5_000_000.0), head_dim=128, kv_heads=8, max_seq=196_608),
        _Rotated(1.0),
        Count("experts", ("num_experts", "num_local_experts"), 256, written=("num_local_experts",)),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Attribute("jitter", "router_jitter_noise", 0.0),
        Activation(),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("qk_norm_type", "per_layer", written=False),
        Expect("use_qk_norm", True, written=False),
        Expect("use_routing_bias", True, written=False),
        Expect("shared_intermediate_size", 0, written=False),
        # Attributes of an earlier model with linear attention, and of predictors that are not published.
        Ignore("attn_type_list", "mlp_intermediate_size", "shared_moe_mode", "layernorm_mlp_beta"),
        Ignore("layernorm_full_attention_beta", "layernorm_linear_attention_beta"),
        Ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
    (
        *(*EDGES, *ATTENTION, *head_norm_weights(OF_HEADS), *PRE_NORMS),
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{_MIXTURE}e_score_correction_bias", "feed_forward.layer.router.selection_bias"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
