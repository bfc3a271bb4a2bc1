"""The residual stream between layers over the axis `tensor`: a device's part of it, gathers, and what splits with it.

Norms, dropout and learned positions of a split stream are here too.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._mesh import TENSOR
from .._shard_map import own_part
from ._collective_matmul import Overlap


SplitLayer = nn.Mixer | nn.FeedForward | nn.PerLayerInputs
StreamKind = Literal["replicated", "sequence", "feature"]  # values of `Plan(residual=)` and of the command line


@dataclasses.dataclass(frozen=True)
class ResidualStream(abc.ABC):
    """A residual stream of one kind, between layers that are split over the axis `tensor`.

    Its methods gather and reduce it around layers, and split layers, norms, dropout, positions and the embedding for
    it. `dim` is the dim of an activation (`*batch seq embed`) that is split, None if the stream is replicated;
    `split_dims` are the names of all dims of activations that are split inside layers. `overlap` says how its gathers
    and scatters overlap with products, see `all_gather_matmul`.
    """

    overlap: Overlap = "none"

    dim: ClassVar[int | None]
    split_dims: ClassVar[tuple[str, ...]]

    @property
    def is_whole(self) -> bool:
        """Whether each device has all tokens with all features."""
        return self.dim is None

    @property
    def splits_tokens(self) -> bool:
        """Whether each device has some of the tokens."""
        return self.dim == -2

    @property
    def splits_features(self) -> bool:
        """Whether each device has some of the features."""
        return self.dim == -1

    def gather(self, name: str, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return all tokens and features; the gradient is summed, and scattered if the stream is split."""
        return send.sum_gradients(name, x, TENSOR) if self.dim is None else send.all_gather(name, x, TENSOR, self.dim)

    def reduce(self, name: str, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return this device's part of the sum of all devices' `y`: the sum, or its slice if the stream is split."""
        return send.psum(name, y, TENSOR) if self.dim is None else send.psum_scatter(name, y, TENSOR, self.dim)

    def take_local(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return this device's part of a replicated array."""
        return x if self.dim is None else own_part(x, TENSOR, self.dim)

    def split_norm(self, norm: nn.Norm) -> PyTree:
        """Return the norm, or a `SplitNorm` if a dim that it averages over is split."""
        # Decided by the names of its dims, since a norm need not have an array with a spec. Key heads that devices
        # share are each on equally many devices, so that the mean of the devices' means is the mean there too.
        return SplitNorm(norm, TENSOR) if set(norm.reduced) & set(self.split_dims) else norm

    def split_stream_weights(self, weights: nn.StreamMap) -> PyTree:
        """Return the weights of several streams, as `SplitStreamWeights` if a device has some of the features."""
        return SplitStreamWeights(weights) if self.splits_features else weights

    @property
    @abc.abstractmethod
    def routed(self) -> "ResidualStream":
        """The stream with all features of a token that routers and experts read: this stream, or split over tokens."""

    @abc.abstractmethod
    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert from this stream to `routed`."""

    @abc.abstractmethod
    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert from `routed` to this stream."""

    @abc.abstractmethod
    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, sharers: int = 1
    ) -> eqx.Module:
        """Return a mixer, feed-forward layer or `PerLayerInputs` on a slice of its arrays.

        `shapes`, `specs` and `names` are those of the unsplit layer's arrays. `sharers` devices have the same key head
        of a mixer, and attend for some of the rows each.
        """

    @abc.abstractmethod
    def split_dropout(self, dropout: nn.RandomMask) -> eqx.Module:
        """Return dropout of this device's part, with its part of the mask that one device would sample."""

    @abc.abstractmethod
    def split_positions(self, positions: nn.PositionEmbedding) -> eqx.Module:
        """Return learned positions of this device's part."""

    @abc.abstractmethod
    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Return the lookup of this device's part; `local_table()` has the rows of its ids, out of `total`."""


_MEAN_NAMES = {"means": "norm means", "squares": "norm mean squares"}


class SplitNorm(nn.Module):
    """A norm over dims of which this device holds a slice; the averages are taken over one mesh axis or several.

    Slices are equal, so the mean of the devices' means is the mean.
    """

    inner: nn.Norm
    axis: str | tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize the trailing dims of the unsplit array, of which `x` is a slice."""

        def mean(y: Array, what: str) -> Array:
            local_mean, name = self.inner.mean(y, what), _MEAN_NAMES[what]
            return send.sum_gradients(name, send.pmean(name, local_mean, self.axis), self.axis)

        return self.inner.normalize(x, mean)


class SplitStreamWeights(nn.Module):
    """Weights of a token's streams, of which this device has some features; the sums are taken over all devices."""

    inner: nn.StreamMap

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return the weights of each use, from this device's features of all streams."""

        def add(sums: Array) -> Array:
            return send.sum_gradients("stream weights", send.psum("stream weights", sums, TENSOR), TENSOR)

        return self.inner.project(x, add, jax.lax.axis_size(TENSOR))


class TokensDropout(nn.Module):
    """Dropout of this device's tokens, with their keys out of all tokens' keys."""

    inner: nn.RandomMask

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch full_seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop channels of this device's tokens."""
        return self.inner(x, None if keys is None else own_part(keys, TENSOR, -1))


class FeatureDropout(nn.Module):
    """Dropout of this device's features, by its slice of the mask of all features."""

    inner: nn.RandomMask

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop this device's channels of each token."""
        if keys is None or not self.inner.is_active:
            return x
        mask = self.inner.draw_mask(keys, x.shape[-1] * jax.lax.axis_size(TENSOR))
        return self.inner.apply_mask(x, own_part(mask, TENSOR, -1))


class TokensPositions(nn.Module):
    """Learned positions of this device's tokens."""

    inner: nn.PositionEmbedding

    def __call__(self, positions: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vectors of this device's tokens."""
        return self.inner(own_part(positions, TENSOR, -1))
