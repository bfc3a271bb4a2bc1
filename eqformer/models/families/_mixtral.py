"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Mistral whose feed-forward layers are mixtures of gated experts."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Capacity, Dropless, Transformer
from .._attributes import Activation, Attribute, Count, Unpublished
from .._config_types import Length, NotNegative, Positive, Size
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, gated_weights, LAYER, PRE_NORMS
from ._decoder import attention, decoder, gated_mlp, pre_norm_block
from ._mixtures import mixture


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """The config of a Mixtral; `mlp` is one expert's."""

    experts: Size = 8
    """The number of experts of a layer."""
    top_k: Size = 2
    """The number of experts that each token chooses."""
    theta: Positive = 1_000_000.0
    eps: NotNegative = 1e-5
    window: Length | None = None
    """The tokens that every layer sees; None: all."""
    balance: NotNegative = 0.02
    """The weight of `LoadBalance`, over the batch."""
    capacity: Positive | None = None
    """The experts' slots, as a multiple of the slots that even loads need; None: no token is dropped."""
    jitter: NotNegative = 0.0
    """The largest relative change of the router's input while training."""


def build_mixtral(config: MixtralConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Mixtral with random weights."""
    dispatch = Dropless() if config.capacity is None else Capacity(config.capacity)

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        router, experts = jax.random.split(feed_forward)
        mixed = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            dispatch=dispatch,
            normalise=True,
            jitter=config.jitter,
            router=router,
            experts=experts,
        )
        return pre_norm_block(config, attention(config, window=config.window, key=mixer), mixed)

    return decoder(config, block, key=key)


_PRESETS = {
    # Each token uses two of eight experts of half the width, so that as many parameters compute as in llama-byte-1m.
    "mixtral-byte-3m": MixtralConfig(
        vocab=256, embed=128, layers=4, heads=8, kv_heads=4, mlp=192, theta=10_000.0, tied=True
    ),
    "mixtral-byte-500k": MixtralConfig(
        vocab=256, embed=64, layers=4, heads=4, kv_heads=2, mlp=64, theta=10_000.0, tied=True
    ),
    "mixtral-8x7b": MixtralConfig(vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336),
    "mixtral-8x22b": MixtralConfig(
        vocab=32_768, embed=6144, layers=56, heads=48, kv_heads=8, mlp=16_384, max_seq=65_536
    ),
}

_MIXTURE, _EXPERTS = f"{LAYER}block_sparse_moe.", "feed_forward.layer.experts.mlps"
MIXTRAL = Family(
    "mixtral",
    MixtralConfig,
    build_mixtral,
    _PRESETS,
    "MixtralForCausalLM",
    "mixtral",
    (
        *decoder_attributes(RotaryPositions(1e6), kv_heads=8, max_seq=131_072),
        Count("experts", "num_local_experts", 8),
        Count("top_k", "num_experts_per_tok", 2),
        Attribute("window", "sliding_window", None),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Attribute("jitter", "router_jitter_noise", 0.0),
        Unpublished("capacity", None, "without one no token is dropped"),
        Activation(),
    ),
    (
        *(*EDGES, *ATTENTION, *PRE_NORMS),
        Rule(f"{_MIXTURE}gate.weight", "feed_forward.layer.router.linear.weight"),
        *gated_weights(_EXPERTS, prefix=f"{_MIXTURE}experts.{{expert}}.", names=("w1", "w3", "w2")),
    ),
)
