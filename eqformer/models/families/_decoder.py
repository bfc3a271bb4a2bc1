"""Builders that most decoders share: attention with rotary positions, gated layers, norms, blocks and stacks."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Key

from ...nn import (
    ACTIVATIONS,
    Attention,
    Block,
    causal,
    DynamicScaling,
    Embedding,
    FeedForward,
    GatedMLP,
    Layer,
    Linear,
    Mixer,
    Norm,
    Residual,
    RMSNorm,
    Rotary,
    Routed,
    sliding_window,
    Stack,
    Transformer,
    YarnScaling,
)
from .._family import DecoderConfig
from ._pattern import stacks_of


FeedForwardLayer = FeedForward | Routed


@runtime_checkable
class Sizes(Protocol):
    """Fields of a config that all builders here read; `DecoderConfig` has them, and other classes may."""

    @property
    def vocab(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...


@runtime_checkable
class WithMLP(Sizes, Protocol):
    """Fields of a config with feed-forward layers."""

    @property
    def mlp(self) -> int: ...
    @property
    def activation(self) -> str: ...


def damping(config: Sizes) -> float:
    """Return the factor of the standard deviation with which maps into the residual stream are initialized.

    Each of the `2 * layers` additions to the stream starts smaller, so that their sum does not grow with depth.
    """
    return (2 * config.layers) ** -0.5


def norm(config: Sizes, dims: str = "embed", **options: Any) -> RMSNorm:
    """Return an `RMSNorm` over dims of the config's sizes; `options` are further arguments, which take precedence."""
    sizes = {name: getattr(config, "head_size" if name == "head_dim" else name) for name in dims.split()}
    arguments: dict[str, Any] = {"eps": config.eps} | sizes
    return RMSNorm(dims, **arguments | options)


def head_norms(config: DecoderConfig, *, all_heads: bool = False, **options: Any) -> dict[str, Any]:
    """Return an `Attention`'s norms of queries and keys, of each head or over `all_heads`; `options` are the norms'."""
    dims = ("heads head_dim", "kv_heads head_dim") if all_heads else ("head_dim", "head_dim")
    return {name: norm(config, norm_dims, **options) for name, norm_dims in zip(("query_norm", "key_norm"), dims)}


def attention(config: DecoderConfig, *, window: int | None = None, key: Key[Array, ""], **options: Any) -> Attention:
    """Return causal attention with rotary positions; `options` are arguments of `Attention`, which take precedence."""
    size = config.head_size
    arguments: dict[str, Any] = {
        "output_std": damping(config) * (config.heads * size) ** -0.5,
        "mask": causal() if window is None else sliding_window(window),
    }
    arguments |= {} if "rotary" in options else {"rotary": rotary_of(config, size, scaling=config.scaling)}
    arguments |= {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": size}
    return Attention(embed=config.embed, **arguments | options, key=key)


def rotary_of(
    config: Any, channels: int, name: str = "head_dim", *, theta: float | None = None, **options: Any
) -> Rotary:
    """Return rotary positions of `channels`, the config's field `name`, with the config's base or `theta`.

    `options` are arguments of `Rotary`. Raises a `ValueError` that names the field for an odd number of channels.
    """
    if channels % 2:
        raise ValueError(
            f"{type(config).__name__}({name}={channels}): channels turn in pairs; take an even {name}, and a "
            "configuration that says one."
        )
    return Rotary(channels, config.theta if theta is None else theta, **options)


def part_rotary(config: Any, **options: Any) -> Rotary:
    """Return rotary positions of a part of each head's channels; `options` are arguments of `Rotary`.

    If the part has an odd number of channels, frequencies are computed from that number, and its last channel is
    rotated together with the next channel of the head, as in transformers. Raises a `ValueError` if there is no next
    channel, or for a scaling that does not support such a pair.
    """
    stated, scaling = int(config.head_size * config.rotary_fraction), config.scaling
    channels = stated + stated % 2
    if not 0 < channels <= config.head_size or (stated % 2 and isinstance(scaling, DynamicScaling | YarnScaling)):
        raise ValueError(
            f"{type(config).__name__}(head_dim={config.head_size}, rotary_fraction={config.rotary_fraction}, "
            f"scaling={scaling}): {stated} channels would be rotated, but channels are rotated in pairs; give a "
            "partial_rotary_factor with an even number of channels."
        )
    return Rotary(channels, config.theta ** (channels / stated), scaling=scaling, **options)


def activation_of(config: Any, name: str = "activation") -> Callable[[Array], Array]:
    """Return the activation that a config names; raises a `ValueError` that lists the known names for another one."""
    if (activation := getattr(config, name)) not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{type(config).__name__}({name}={activation!r}): no such activation; take one of {known}.")
    return ACTIVATIONS[activation]


def gated_mlp(config: WithMLP, *, mlp: int | None = None, key: Key[Array, ""], **options: Any) -> GatedMLP:
    """Return a `GatedMLP` of the config's width or `mlp`; `options` are further arguments, which take precedence."""
    width = config.mlp if mlp is None else mlp
    arguments: dict[str, Any] = {
        "output_std": damping(config) * max(width, 1) ** -0.5,
        "activation": activation_of(config),
    }
    return GatedMLP(embed=config.embed, mlp=width, **arguments | options, key=key)


def pre_norm_block(
    config: Sizes, mixer: Mixer, feed_forward: FeedForwardLayer, *, residual_scale: float | None = None, **options: Any
) -> Block:
    """Return a block with a norm before each sublayer (Llama); `options` are the norms' arguments."""
    sublayer = lambda layer: Residual(layer, norm(config, **options), scale=residual_scale)
    return Block(sublayer(mixer), sublayer(feed_forward))


def post_norm_block(config: Sizes, mixer: Mixer, feed_forward: FeedForwardLayer) -> Block:
    """Return a block with a norm after each sublayer (OLMo 2)."""
    sublayer = lambda layer: Residual(layer, output_norm=norm(config))
    return Block(sublayer(mixer), sublayer(feed_forward))


def four_norm_block(
    config: Sizes, mixer: Mixer, feed_forward: FeedForwardLayer, *, reads: str | None = None, **options: Any
) -> Block:
    """Return a block with norms before and after each sublayer (Gemma 2).

    `reads` names one more input of the mixer, as in `Residual`; `options` are the norms' arguments.
    """

    def sublayer(layer: Mixer | FeedForwardLayer, reads: str | None = None) -> Residual:
        return Residual(layer, norm(config, **options), output_norm=norm(config, **options), reads=reads)

    return Block(sublayer(mixer, reads), sublayer(feed_forward))


def decoder(
    config: Sizes,
    block: Callable[[Any, Key[Array, ""]], Layer],
    kinds: Sequence[Hashable] | None = None,
    *,
    final_norm: Norm | Callable[[Array], Array] | None = None,
    embedding_scale: float | None = None,
    logit_scale: float | None = None,
    logit_softcap: float | None = None,
    key: Key[Array, ""],
) -> Transformer:
    """Return a decoder: a table of embeddings, layers of these kinds, a norm and a head.

    Args:
        config: A `DecoderConfig`, or a config with its fields.
        block: A function `block(kind, key)` that builds a layer.
        kinds: The kind of each layer; None: all are alike, of kind None.
        final_norm: The norm before the head; None: an `RMSNorm` of the config's.
        embedding_scale: A factor of the embeddings.
        logit_scale: A factor of the logits.
        logit_softcap: A bound of the scaled logits.
        key: The key of the weights.
    """
    embedding_key, layer_key, head_key = jax.random.split(key, 3)
    if kinds is None:
        stacks: tuple[Stack, ...] = (Stack(lambda key: block(None, key), config.layers, key=layer_key),)
    else:
        stacks = stacks_of(block, kinds, key=layer_key)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=config.embed, scale=embedding_scale, key=embedding_key),
        stacks=stacks,
        norm=norm(config) if final_norm is None else final_norm,
        head=None if config.tied else Linear("embed -> vocab", embed=config.embed, vocab=config.vocab, key=head_key),
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
