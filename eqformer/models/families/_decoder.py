"""What most decoders are built of: attention with rotary positions, gated layers, norms around both, stacks of them."""

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


Fed = FeedForward | Routed


@runtime_checkable
class Sizes(Protocol):
    """What is read of every config here: of a `DecoderConfig`, or of another class with these fields."""

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
    """The same, with the width of feed-forward layers."""

    @property
    def mlp(self) -> int: ...
    @property
    def activation(self) -> str: ...


def damping(config: Sizes) -> float:
    """What multiplies the deviation of maps back into the residual stream.

    Each of the `2 * layers` additions to it starts smaller, so that their sum does not grow with depth.
    """
    return (2 * config.layers) ** -0.5


def norm(config: Sizes, dims: str = "embed", **options: Any) -> RMSNorm:
    """An `RMSNorm` over dims of the config's sizes; `options` are its own, and come first."""
    sizes = {name: getattr(config, "head_size" if name == "head_dim" else name) for name in dims.split()}
    given: dict[str, Any] = {"eps": config.eps} | sizes
    return RMSNorm(dims, **given | options)


def head_norms(config: DecoderConfig, *, all_heads: bool = False, **options: Any) -> dict[str, Any]:
    """An `Attention`'s norms of queries and keys, of each head or over `all_heads`; `options` are `RMSNorm`'s."""
    dims = ("heads head_dim", "kv_heads head_dim") if all_heads else ("head_dim", "head_dim")
    return {name: norm(config, its, **options) for name, its in zip(("query_norm", "key_norm"), dims)}


def attention(config: DecoderConfig, *, window: int | None = None, key: Key[Array, ""], **options: Any) -> Attention:
    """Causal attention with rotary positions, of the config's heads; `options` are `Attention`'s, and come first."""
    size = config.head_size
    given: dict[str, Any] = {
        "output_std": damping(config) * (config.heads * size) ** -0.5,
        "mask": causal() if window is None else sliding_window(window),
    }
    given |= {} if "rotary" in options else {"rotary": rotary_of(config, size, scaling=config.scaling)}
    given |= {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": size}
    return Attention(embed=config.embed, **given | options, key=key)


def rotary_of(
    config: Any, channels: int, name: str = "head_dim", *, theta: float | None = None, **options: Any
) -> Rotary:
    """The rotary positions of channels that the config's field `name` counts, by its base or `theta`.

    `options` are `Rotary`'s. Raises a `ValueError`, which names the field, for an odd number.
    """
    if channels % 2:
        raise ValueError(
            f"{type(config).__name__}({name}={channels}): channels turn in pairs; take an even {name}, and a "
            "configuration that says one."
        )
    return Rotary(channels, config.theta if theta is None else theta, **options)


def part_rotary(config: Any, **options: Any) -> Rotary:
    """The rotary positions of a part of each head's channels; `options` are `Rotary`'s.

    Of an odd number of channels the frequencies are counted by it, and the last turns with the one behind it, as in
    transformers. Raises a `ValueError` where there is none behind it, or a scaling that has no such pairs.
    """
    found, scaling = int(config.head_size * config.rotary_fraction), config.scaling
    channels = found + found % 2
    if not 0 < channels <= config.head_size or (found % 2 and isinstance(scaling, DynamicScaling | YarnScaling)):
        raise ValueError(
            f"{type(config).__name__}(head_dim={config.head_size}, rotary_fraction={config.rotary_fraction}, "
            f"scaling={scaling}): {found} channels would turn, and they turn in pairs; give a partial_rotary_factor "
            "that leaves an even number."
        )
    return Rotary(channels, config.theta ** (channels / found), scaling=scaling, **options)


def bend(config: Any, name: str = "activation") -> Callable[[Array], Array]:
    """The activation that a config names; raises a `ValueError` that lists the names there are."""
    if (said := getattr(config, name)) not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{type(config).__name__}({name}={said!r}): no such activation; take one of {known}.")
    return ACTIVATIONS[said]


def gated_mlp(config: WithMLP, *, mlp: int | None = None, key: Key[Array, ""], **options: Any) -> GatedMLP:
    """A `GatedMLP` as wide as the config says, or `mlp`; `options` are its own, and come first."""
    width = config.mlp if mlp is None else mlp
    given: dict[str, Any] = {"output_std": damping(config) * max(width, 1) ** -0.5, "activation": bend(config)}
    return GatedMLP(embed=config.embed, mlp=width, **given | options, key=key)


def pre_norm_block(
    config: Sizes, mixer: Mixer, feed_forward: Fed, *, residual_scale: float | None = None, **options: Any
) -> Block:
    """Both sublayers with a norm before (Llama); `options` are the norms'."""
    sublayer = lambda layer: Residual(layer, norm(config, **options), scale=residual_scale)
    return Block(sublayer(mixer), sublayer(feed_forward))


def post_norm_block(config: Sizes, mixer: Mixer, feed_forward: Fed) -> Block:
    """Both sublayers with a norm of what they give (OLMo 2)."""
    sublayer = lambda layer: Residual(layer, output_norm=norm(config))
    return Block(sublayer(mixer), sublayer(feed_forward))


def four_norm_block(config: Sizes, mixer: Mixer, feed_forward: Fed, **options: Any) -> Block:
    """Both sublayers with norms before and after (Gemma 2); `options` are the norms'."""
    sublayer = lambda layer: Residual(layer, norm(config, **options), output_norm=norm(config, **options))
    return Block(sublayer(mixer), sublayer(feed_forward))


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
    """Layers of these kinds between a table and a norm and a head.

    Args:
        config: A `DecoderConfig`, or one with its fields.
        block: `block(kind, key)`, which builds a layer.
        kinds: The kind of each layer; None: all are alike, of kind None.
        final_norm: The norm before the head; None: the family's usual one.
        embedding_scale: What looked-up vectors are multiplied by.
        logit_scale: What logits are multiplied by.
        logit_softcap: What bounds them afterwards.
        key: For the weights.
    """
    embedding, stacks, head = jax.random.split(key, 3)
    if kinds is None:
        made: tuple[Stack, ...] = (Stack(lambda key: block(None, key), config.layers, key=stacks),)
    else:
        made = stacks_of(block, kinds, key=stacks)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=config.embed, scale=embedding_scale, key=embedding),
        stacks=made,
        norm=norm(config) if final_norm is None else final_norm,
        head=None if config.tied else Linear("embed -> vocab", embed=config.embed, vocab=config.vocab, key=head),
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
