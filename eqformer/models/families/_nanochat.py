"""nanochat (Karpathy 2025) and the decoder of the speedruns, which adds value embeddings and skips to its layers.

nanochat has norms without weights, also of rotated queries and keys, squared ReLUs, and capped logits. Sources of the
speedruns: modded-nanogpt (github.com/KellerJordan/modded-nanogpt, 2024-05 to 2026-07), and nanochat
(github.com/karpathy/nanochat, dev/LOG.md), which tested modded-nanogpt's changes at depths 12 to 26 and kept value
embeddings and skips.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Nullable
from .._config_types import Length, Positive
from .._family import DecoderConfig, Family
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, LAYER
from ._decoder import activation_of, attention, causal_mask, damping, decoder, norm, rotary_of, stacks_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """The config of a nanochat."""

    activation: str = "relu_squared"
    bias: bool = False
    """Whether the attention's four projections have biases."""
    logit_softcap: Positive | None = 15.0
    """The bound of logits, `cap * tanh(logits / cap)`; None: no bound."""
    max_seq: Length = 2048


def build_nanochat(config: NanoChatConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a nanochat with random weights."""

    def unweighted_norm(dims: str = "embed") -> nn.RMSNorm:
        return norm(config, dims, scale=False)

    rotary = nn.RotaryThenNorm(
        unweighted_norm("head_dim"),
        unweighted_norm("head_dim"),
        rotary_of(config, config.head_size, scaling=config.scaling, reverse=True),
    )

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mlp = nn.MLP(
            embed=config.embed,
            mlp=config.mlp,
            activation=activation_of(config),
            output_std=damping(config) * config.mlp**-0.5,
            key=feed_forward_key,
        )
        mixer = attention(config, bias=config.bias, rotary=rotary, key=mixer_key)
        return nn.Block(nn.Residual(mixer, unweighted_norm()), nn.Residual(mlp, unweighted_norm()))

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedrunConfig(DecoderConfig):
    """The config of a speedrun model."""

    activation: str = "relu_squared"
    window: Length | None = None
    """The number of tokens that layers with a window see: three of four layers, but never the last layer. None: all
    layers see whole rows."""
    value_embeddings: bool = True
    """Whether every second layer, counted back from the last, adds a vector from a table by token ids to its values."""
    skips: bool = True
    """Whether each layer begins with a weighted sum of the stream and the embedded tokens."""
    logit_softcap: Positive | None = 15.0
    """The bound of logits, `cap * tanh(logits / cap)`; None: no bound."""


def build_speedrun(config: SpeedrunConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a speedrun model with nanochat's initial weights: maps back into the stream begin at zero."""
    if config.embed % config.heads or config.head_size % 2:
        raise ValueError(
            f"SpeedrunConfig(embed={config.embed}, heads={config.heads}, head_dim={config.head_dim}): channels of a "
            "head are rotated in pairs; take an even head_dim, or a number of heads that divides embed evenly."
        )

    def unweighted_norm(dims: str = "embed") -> nn.RMSNorm:
        return norm(config, dims, scale=False)

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> nn.Block:
        has_window, has_values = kind
        mixer_key, mlp_key = jax.random.split(key)
        window = config.window if has_window else None
        rotary = nn.RotaryThenNorm(
            unweighted_norm("head_dim"), unweighted_norm("head_dim"), rotary_of(config, config.head_size)
        )
        mixer: nn.Attention
        if has_values:
            mixer = nn.ValueEmbeddedAttention(
                vocab=config.vocab,
                embed=config.embed,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_size,
                output_std=0.0,
                rotary=rotary,
                mask=causal_mask(window),
                key=mixer_key,
            )
        else:
            mixer = attention(config, window=window, output_std=0.0, rotary=rotary, key=mixer_key)
        mlp = nn.MLP(embed=config.embed, mlp=config.mlp, activation=activation_of(config), output_std=0.0, key=mlp_key)
        skip = (nn.EmbeddingSkip(1.0, 0.1),) if config.skips else ()
        return nn.Block(*skip, nn.Residual(mixer, unweighted_norm()), nn.Residual(mlp, unweighted_norm()))

    embedding_key, layer_key, head_key = jax.random.split(key, 3)
    vocab, embed = config.vocab, config.embed
    head = None if config.tied else nn.Linear("embed -> vocab", vocab=vocab, embed=embed, std=0.001, key=head_key)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=vocab, embed=embed, std=1.0, key=embedding_key),
        stacks=stacks_of(block, _kinds(config), key=layer_key),
        embedding_norm=unweighted_norm(),
        norm=unweighted_norm(),
        head=head,
        logit_softcap=config.logit_softcap,
    )


def _kinds(config: SpeedrunConfig) -> list[tuple[bool, bool]]:
    """Return for each layer whether it has a short window, and whether it has a table of values."""
    last = config.layers - 1
    return [
        (
            config.window is not None and layer % 4 != 3 and layer != last,
            config.value_embeddings and layer % 2 == last % 2,
        )
        for layer in range(config.layers)
    ]


_SPEEDRUN_PRESETS = {"speedrun-byte-500k": SpeedrunConfig(256, 96, 4, 6, 6, 384, window=128)}

SPEEDRUN = Family("speedrun", SpeedrunConfig, build_speedrun, _SPEEDRUN_PRESETS)
