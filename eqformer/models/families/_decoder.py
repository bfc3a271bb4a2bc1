"""Builders that most decoders share: attention with rotary positions, gated layers, norms, blocks and stacks.

Layers of several kinds are divided into runs of a repeated pattern, with a stack for each run.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Literal, overload, Protocol, runtime_checkable, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from .._family import DecoderConfig
from .._rotary_attributes import WithLocalRotaryFraction, WithRotaryFraction


FeedForwardLayer = nn.FeedForward | nn.Routed


@runtime_checkable
class DecoderSizes(Protocol):
    """Fields of a config that all builders here read; `DecoderConfig` has them, and other classes may have them."""

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
class WithMLP(DecoderSizes, Protocol):
    """Fields of a config with feed-forward layers."""

    @property
    def mlp(self) -> int: ...
    @property
    def activation(self) -> str: ...


@runtime_checkable
class WithTheta(Protocol):
    """The field of a config with rotary positions of one base."""

    @property
    def theta(self) -> float: ...


@runtime_checkable
class WithPartRotary(WithRotaryFraction, Protocol):
    """Fields of a config with rotary positions in a part of each head's channels."""

    @property
    def head_size(self) -> int: ...


@runtime_checkable
class WithLocalPartRotary(WithLocalRotaryFraction, Protocol):
    """Fields of a config in which layers with and without a window rotate different parts of each head's channels."""

    @property
    def head_size(self) -> int: ...


class _HeadNorms(TypedDict):
    """Arguments of `nn.Attention` for the norms of queries and keys."""

    query_norm: nn.Norm
    key_norm: nn.Norm


class _AttentionSizes(TypedDict):
    """Arguments of `nn.Attention` for its sizes, and for the weights of its output map."""

    embed: int
    heads: int
    head_dim: int
    kv_heads: int
    output_std: float


class _AttentionOptions(TypedDict, total=False):
    """Arguments of `nn.Attention` that a family may choose; `attention` computes the others from the config."""

    heads: int
    head_dim: int | tuple[int, int]
    kv_heads: int | None
    bias: bool
    output_bias: bool | None
    output_std: float | None
    query_norm: nn.Norm | None
    key_norm: nn.Norm | None
    value_norm: nn.Norm | None
    rotary: nn.PositionEncoding | None
    gate: bool | Literal["heads"]
    scores: nn.Scores | None
    mask: nn.Mask | None


class _GatedMLPOptions(TypedDict, total=False):
    """Arguments of `nn.GatedMLP` that a family may choose; `gated_mlp` computes the others from the config."""

    activation: Callable[[Array], Array]
    bias: bool
    limit: float | None
    up_limit: float | None
    up_softcap: float | None
    offset: float
    output_std: float | None


class DecoderEnds(TypedDict, total=False):
    """Arguments of `decoder` for the parts before and after the layers."""

    embedding_norm: nn.Norm | None
    """A norm of the embeddings; by default none."""
    dropout: nn.RandomMask | None
    """Dropout of the embeddings; by default none."""
    final_norm: nn.Norm | Callable[[Array], Array]
    """The norm before the head; by default an `RMSNorm` of the config's `eps`."""
    embedding_scale: float | None
    """A factor of the embeddings."""
    expand: nn.StreamExpansion | None
    """A module that makes several residual streams of the embeddings; by default there is one stream."""
    logit_scale: float | None
    """A factor of the logits."""
    logit_softcap: float | None
    """The softcap of the logits."""
    logit_bias: bool
    """Whether the logits have a bias."""


LayerKind = TypeVar("LayerKind", bound=Hashable)
_LONGEST_PERIOD = 128  # layers; without a bound, a thousand layers take seconds to divide into runs


@dataclasses.dataclass(frozen=True)
class Together(Generic[LayerKind]):
    """Kinds of consecutive layers that stay in one block, because later layers read a value that the first shares."""

    kinds: tuple[LayerKind, ...]


@dataclasses.dataclass(frozen=True)
class Run(Generic[LayerKind]):
    """A run of layers that begins at layer `first`: a pattern of kinds, repeated `periods` times."""

    kinds: tuple[LayerKind, ...]
    periods: int
    first: int


def runs(kinds: tuple[LayerKind, ...]) -> tuple[Run[LayerKind], ...]:
    """Divide the layers into runs with the fewest traced blocks and, among such divisions, with the fewest runs.

    For example, 26 layers in which every sixth layer differs have two runs: four periods of six layers, then two
    periods of one layer.
    """
    # `_divide` is cached, and a cache treats the kinds True and 1 as equal, so kinds are passed as numbers.
    number_of: dict[Hashable, int] = {}
    divisions = _divide(tuple(number_of.setdefault(kind, len(number_of)) for kind in kinds))
    return tuple(Run(kinds[first : first + size], periods, first) for first, size, periods in divisions)


@functools.cache
def _divide(kind_numbers: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return each run as its first layer, the number of layers of a period, and the number of periods."""
    # `best[first]` is the best division of the layers from `first` on: traced blocks, number of runs, and the runs.
    best: dict[int, tuple[int, int, tuple[tuple[int, int, int], ...]]] = {len(kind_numbers): (0, 0, ())}
    for first in reversed(range(len(kind_numbers))):
        divisions = []
        longest = min(len(kind_numbers) - first, _LONGEST_PERIOD)
        # If several divisions are equally good, `min` takes the first one, which has the longest first period.
        for size in reversed(range(1, longest + 1)):
            period, end, periods = kind_numbers[first : first + size], first, 0
            while kind_numbers[end : end + size] == period:
                end, periods = end + size, periods + 1
                traced, run_count, later_runs = best[end]
                divisions.append((traced + size, run_count + 1, ((first, size, periods), *later_runs)))
        best[first] = min(divisions, key=lambda division: division[:2])
    return best[0][2]


def stacks_of(
    block: Callable[[LayerKind, Key[Array, ""]], nn.Layer],
    kinds: Sequence[LayerKind | Together[LayerKind]],
    *,
    key: Key[Array, ""],
) -> tuple[nn.Stack, ...]:
    """Return stacks of `block(kind, key)` for these kinds of layers; kinds that are `Together` stay in one block."""
    layer_runs = runs(tuple(kinds))
    keys = jax.random.split(key, len(layer_runs))
    return tuple(
        nn.Stack(functools.partial(_period, block, run.kinds), run.periods, key=key)
        for run, key in zip(layer_runs, keys, strict=True)
    )


def _period(
    block: Callable[[LayerKind, Key[Array, ""]], nn.Layer],
    kinds: tuple[LayerKind | Together[LayerKind], ...],
    key: Key[Array, ""],
) -> nn.Layer:
    """Return one period of a run: a layer, or a `SuperBlock` of several layers."""
    layer_kinds: list[LayerKind] = []
    for kind in kinds:
        layer_kinds += kind.kinds if isinstance(kind, Together) else (kind,)
    if len(layer_kinds) == 1:
        return block(layer_kinds[0], key)
    keys = jax.random.split(key, len(layer_kinds))
    return nn.SuperBlock(tuple(block(kind, key) for kind, key in zip(layer_kinds, keys, strict=True)))


@runtime_checkable
class Windowed(Protocol):
    """Fields of a config in which some layers have a sliding window."""

    @property
    def layers(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def window_layers(self) -> tuple[int, ...]: ...


def layer_windows(config: Windowed) -> list[int | None]:
    """Return the window of each layer: the config's `window` in its `window_layers`, None in other layers."""
    return [config.window if layer in config.window_layers else None for layer in range(config.layers)]


def damping(config: DecoderSizes) -> float:
    """Return the factor on the initial standard deviation of weights that write to the residual stream.

    With it, the sum of the `2 * layers` additions to the stream does not grow with depth.
    """
    return (2 * config.layers) ** -0.5


def norm(
    config: DecoderSizes, dims: str = "embed", *, eps: float | None = None, offset: float = 0.0, scale: bool = True
) -> nn.RMSNorm:
    """Return an `RMSNorm` over `dims`, whose sizes the config's fields state; `eps` is the config's by default."""
    sizes = {name: getattr(config, "head_size" if name == "head_dim" else name) for name in dims.split()}
    return nn.RMSNorm(dims, eps=config.eps if eps is None else eps, offset=offset, scale=scale, shift=False, **sizes)


def head_norms(
    config: DecoderConfig, *, all_heads: bool = False, offset: float = 0.0, scale: bool = True
) -> _HeadNorms:
    """Return an `Attention`'s norms of queries and keys, over the channels of each head or of `all_heads` together."""
    query_dims, key_dims = ("heads head_dim", "kv_heads head_dim") if all_heads else ("head_dim", "head_dim")
    return {
        "query_norm": norm(config, query_dims, offset=offset, scale=scale),
        "key_norm": norm(config, key_dims, offset=offset, scale=scale),
    }


def head_layer_norm(config: DecoderConfig, heads: str) -> nn.LayerNorm:
    """Return a `LayerNorm` of the channels of a head, with a scale for each of the config's `"heads"` or
    `"kv_heads"`."""
    sizes = {heads: getattr(config, heads), "head_dim": config.head_size}
    return nn.LayerNorm(f"{heads} head_dim", over="head_dim", bias=False, eps=config.eps, **sizes)


def attention_sizes(config: DecoderConfig) -> _AttentionSizes:
    """Return an `Attention`'s sizes, and the standard deviation of the weights that write to the residual stream."""
    heads, size = config.heads, config.head_size
    return {
        "embed": config.embed,
        "heads": heads,
        "head_dim": size,
        "kv_heads": config.kv_heads,
        "output_std": damping(config) * (heads * size) ** -0.5,
    }


def attention(
    config: DecoderConfig,
    *,
    window: int | None = None,
    key: Key[Array, ""],
    **options: Unpack[_AttentionOptions],
) -> nn.Attention:
    """Return causal attention with rotary positions; `options` replace arguments that the config gives."""
    if "rotary" not in options:
        options["rotary"] = rotary_of(config, config.head_size, scaling=config.scaling)
    return nn.Attention(**{**attention_sizes(config), "mask": causal_mask(window), **options}, key=key)


def causal_mask(window: int | None) -> nn.Mask:
    """Return a causal mask; with a `window`, each token sees itself and the `window - 1` tokens before it."""
    return nn.causal() if window is None else nn.sliding_window(window)


def rotary_of(
    config: WithTheta,
    channels: int,
    name: str = "head_dim",
    *,
    theta: float | None = None,
    interleaved: bool = False,
    scaling: nn.RotaryScaling | None = None,
    reverse: bool = False,
) -> nn.Rotary:
    """Return rotary positions; raises a `ValueError` for an odd number of channels.

    Args:
        config: The config.
        channels: The number of channels that are rotated.
        name: The config's field that has this number; the error names this field.
        theta: The base; None: `config.theta`.
        interleaved: Whether neighboring channels are rotated together.
        scaling: The scaling of the frequencies; None: no scaling.
        reverse: Whether the angles are negated.
    """
    if channels % 2:
        raise ValueError(
            f"{type(config).__name__}({name}={channels}): channels are rotated in pairs; take an even {name}."
        )
    return nn.Rotary(channels, config.theta if theta is None else theta, interleaved, scaling, reverse)


def part_rotary(config: WithPartRotary, *, interleaved: bool = False) -> nn.Rotary:
    """Return rotary positions of a part of each head's channels.

    If the part has an odd number of channels, frequencies are computed from that number, and its last channel is
    rotated together with the next channel of the head, as in transformers. Raises a `ValueError` if there is no next
    channel, or for a scaling that does not support such a pair.
    """
    return _rotate_part(config, config.rotary_fraction, config.theta, config.scaling, interleaved)


def local_part_rotary(config: WithLocalPartRotary) -> nn.Rotary:
    """Return the `part_rotary` of layers with a window, by the config's `local_` fields."""
    return _rotate_part(config, config.local_rotary_fraction, config.local_theta, config.local_scaling, False, "local_")


def _rotate_part(
    config: WithPartRotary | WithLocalPartRotary,
    fraction: float,
    theta: float,
    scaling: nn.RotaryScaling | None,
    interleaved: bool,
    prefix: str = "",
) -> nn.Rotary:
    stated = int(config.head_size * fraction)
    channels = stated + stated % 2
    if not 0 < channels <= config.head_size or (stated % 2 and isinstance(scaling, nn.DynamicScaling | nn.YarnScaling)):
        raise ValueError(
            f"{type(config).__name__}(head_dim={config.head_size}, {prefix}rotary_fraction={fraction}, "
            f"{prefix}scaling={scaling}): {stated} channels would be rotated, but this config can rotate "
            f"channels only in pairs, at most head_dim in all; give another {prefix}rotary_fraction "
            "(partial_rotary_factor)."
        )
    return nn.Rotary(channels, theta ** (channels / stated), interleaved, scaling)


def activation_of(config: object, name: str = "activation") -> Callable[[Array], Array]:
    """Return the activation that a config names; raises a `ValueError` with the known names for an unknown name."""
    if (activation := getattr(config, name)) not in nn.ACTIVATIONS:
        known = ", ".join(map(repr, nn.ACTIVATIONS))
        raise ValueError(f"{type(config).__name__}({name}={activation!r}): no such activation; take one of {known}.")
    return nn.ACTIVATIONS[activation]


def gated_mlp(
    config: WithMLP, *, mlp: int | None = None, key: Key[Array, ""], **options: Unpack[_GatedMLPOptions]
) -> nn.GatedMLP:
    """Return a `GatedMLP` of the config's width or `mlp`; `options` replace other arguments."""
    width = config.mlp if mlp is None else mlp
    arguments: _GatedMLPOptions = {
        "output_std": damping(config) * max(width, 1) ** -0.5,
        "activation": activation_of(config),
    }
    return nn.GatedMLP(embed=config.embed, mlp=width, **(arguments | options), key=key)


def mlp(config: DecoderSizes, width: int, *, bias: bool, key: Key[Array, ""]) -> nn.MLP:
    """Return an `MLP` of `width` features and the config's activation; `bias` says whether its maps have biases."""
    options = {"activation": activation_of(config), "output_std": damping(config) * width**-0.5}
    return nn.MLP(embed=config.embed, mlp=width, bias=bias, **options, key=key)


def pre_norm_block(
    config: DecoderSizes,
    mixer: nn.Mixer,
    feed_forward: FeedForwardLayer,
    *,
    residual_scale: float | None = None,
    offset: float = 0.0,
) -> nn.Block:
    """Return a block with a norm before each sublayer (Llama); `offset` is added to the norms' scales."""
    return nn.Block(
        nn.Residual(mixer, norm(config, offset=offset), scale=residual_scale),
        nn.Residual(feed_forward, norm(config, offset=offset), scale=residual_scale),
    )


def post_norm_block(config: DecoderSizes, mixer: nn.Mixer, feed_forward: FeedForwardLayer) -> nn.Block:
    """Return a block with a norm after each sublayer (OLMo 2)."""
    return nn.Block(
        nn.Residual(mixer, output_norm=norm(config)),
        nn.Residual(feed_forward, output_norm=norm(config)),
    )


def four_norm_block(
    config: DecoderSizes,
    mixer: nn.Mixer,
    feed_forward: FeedForwardLayer,
    *,
    reads: str | None = None,
    offset: float = 0.0,
) -> nn.Block:
    """Return a block with norms before and after each sublayer (Gemma 2).

    `reads` names one more input of the mixer, as in `Residual`; `offset` is added to the norms' scales.
    """

    def sublayer(layer: nn.Mixer | FeedForwardLayer, reads: str | None = None) -> nn.Residual:
        before, after = norm(config, offset=offset), norm(config, offset=offset)
        return nn.Residual(layer, before, output_norm=after, reads=reads)

    return nn.Block(sublayer(mixer, reads), sublayer(feed_forward))


@overload
def decoder(
    config: DecoderSizes,
    block: Callable[[Key[Array, ""]], nn.Layer],
    *,
    key: Key[Array, ""],
    **ends: Unpack[DecoderEnds],
) -> nn.Transformer:
    """Return a decoder whose layers are all alike."""
    ...


@overload
def decoder(
    config: DecoderSizes,
    block: Callable[[LayerKind, Key[Array, ""]], nn.Layer],
    kinds: Sequence[LayerKind | Together[LayerKind]],
    *,
    key: Key[Array, ""],
    **ends: Unpack[DecoderEnds],
) -> nn.Transformer:
    """Return a decoder with a kind for each layer."""
    ...


def decoder(
    config: DecoderSizes,
    block: Callable[..., nn.Layer],
    kinds: Sequence[LayerKind | Together[LayerKind]] | None = None,
    *,
    key: Key[Array, ""],
    **ends: Unpack[DecoderEnds],
) -> nn.Transformer:
    """Return a decoder: a table of embeddings, layers of these kinds, a norm and a head.

    Args:
        config: A `DecoderConfig`, or a config with its fields.
        block: A function that builds a layer: `block(key)` or, with `kinds`, `block(kind, key)`.
        kinds: The kind of each layer; None: all layers are alike.
        key: The key of the weights.
        **ends: The parts before and after the layers, as `DecoderEnds` describes them.
    """
    embedding_key, layer_key, head_key = jax.random.split(key, 3)
    if kinds is None:
        stacks: tuple[nn.Stack, ...] = (nn.Stack(block, config.layers, key=layer_key),)
    else:
        stacks = stacks_of(block, kinds, key=layer_key)
    embed, vocab, bias = config.embed, config.vocab, ends.get("logit_bias", False)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=vocab, embed=embed, scale=ends.get("embedding_scale"), key=embedding_key),
        stacks=stacks,
        embedding_norm=ends.get("embedding_norm"),
        dropout=ends.get("dropout"),
        norm=ends["final_norm"] if "final_norm" in ends else norm(config),
        head=None if config.tied else nn.Linear("embed -> vocab", embed=embed, vocab=vocab, bias=bias, key=head_key),
        logit_bias=jnp.zeros(vocab, jnp.float32) if bias and config.tied else None,
        logit_scale=ends.get("logit_scale"),
        logit_softcap=ends.get("logit_softcap"),
        expand=ends.get("expand"),
    )
