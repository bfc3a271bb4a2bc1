"""nanochat (Karpathy 2025): norms without weights, also of rotated queries and keys, squared ReLUs, capped logits."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, MLP, Residual, RMSNorm, RotaryThenNorm, Transformer
from .._attributes import Activation, Attribute, Nullable
from .._config_types import Length, Positive
from .._family import DecoderConfig, Family
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, LAYER
from ._decoder import activation_of, attention, damping, decoder, norm, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """The config of a nanochat."""

    activation: str = "relu_squared"
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_softcap: Positive | None = 15.0
    """The bound of logits, `cap * tanh(logits / cap)`; None: no bound."""
    max_seq: Length = 2048


def build_nanochat(config: NanoChatConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a nanochat with random weights."""

    def unweighted_norm(dims: str = "embed") -> RMSNorm:
        return norm(config, dims, scale=False)

    rotary = RotaryThenNorm(
        unweighted_norm("head_dim"),
        unweighted_norm("head_dim"),
        rotary_of(config, config.head_size, scaling=config.scaling, reverse=True),
    )

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mlp = MLP(
            embed=config.embed,
            mlp=config.mlp,
            activation=activation_of(config),
            output_std=damping(config) * config.mlp**-0.5,
            key=feed_forward,
        )
        attended = attention(config, bias=config.bias, rotary=rotary, key=mixer)
        return Block(Residual(attended, unweighted_norm()), Residual(mlp, unweighted_norm()))

    return decoder(
        config,
        block,
        embedding_norm=unweighted_norm(),
        final_norm=unweighted_norm(),
        logit_softcap=config.logit_softcap,
        key=key,
    )


_PRESETS = {
    "nanochat-byte-500k": NanoChatConfig(256, 96, 4, 6, 6, 384),
    "nanochat-d20": NanoChatConfig(65_536, 1280, 20, 10, 10, 5120),
    "nanochat-d32": NanoChatConfig(65_536, 2048, 32, 16, 16, 8192),
}

NANOCHAT = Family(
    "nanochat",
    NanoChatConfig,
    build_nanochat,
    _PRESETS,
    "NanoChatForCausalLM",
    "nanochat",
    (
        *decoder_attributes(),
        Attribute("bias", "attention_bias", False),
        Nullable("logit_softcap", "final_logit_softcapping", 15.0),
        Activation("relu2"),
    ),
    (
        *(*EDGES, *ATTENTION),
        Rule(f"{LAYER}mlp.fc1.weight", "feed_forward.layer.up.weight"),
        Rule(f"{LAYER}mlp.fc2.weight", "feed_forward.layer.down.weight"),
    ),
)
