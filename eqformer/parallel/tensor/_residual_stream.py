"""Interface of residual streams over the axis `tensor`, and norms, dropout and positions on a part of a stream."""

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
from .._shard_map import take_local_slice
from ._collective_matmul import Overlap


SplitLayer = nn.Mixer | nn.FeedForward | nn.PerLayerInputs
StreamKind = Literal["replicated", "sequence", "feature"]
"""Values of `Plan(residual=)` and of the flag of the command line."""


@dataclasses.dataclass(frozen=True)
class ResidualStream(abc.ABC):
    """Kind of the residual stream: how its activations `*batch seq embed` are split over the axis `tensor`.

    The methods gather and reduce the stream around layers, and wrap layers, norms, dropout, positions and the embedding
    to run on this device's part.
    """

    overlap: Overlap = "none"
    """How gathers and reduce-scatters of the stream overlap with matrix products; see `all_gather_matmul`."""

    dim: ClassVar[int | None]
    """Index of the dim of the stream that is split, None if the stream is replicated."""
    split_dims: ClassVar[tuple[str, ...]]
    """Names of all dims of activations that are split inside layers."""

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
        """Return all tokens with all features; the gradient is summed over devices, and scattered if `dim` is set."""
        return send.sum_gradients(name, x, TENSOR) if self.dim is None else send.all_gather(name, x, TENSOR, self.dim)

    def reduce(self, name: str, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return the sum of all devices' `y`, or this device's slice of the sum if the stream is split."""
        return send.psum(name, y, TENSOR) if self.dim is None else send.psum_scatter(name, y, TENSOR, self.dim)

    def take_local(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return this device's part of a replicated array."""
        return x if self.dim is None else take_local_slice(x, TENSOR, self.dim)

    def split_norm(self, norm: nn.Norm) -> PyTree:
        """Return the norm, or a `SplitNorm` if a dim over which the norm averages is split."""
        # Decide by the names of the dims, because a norm need not have an array with a spec. The mean of the devices'
        # means is also right if devices share key heads, because every key head is on the same number of devices.
        return SplitNorm(norm, TENSOR) if set(norm.reduced) & set(self.split_dims) else norm

    def split_stream_weights(self, weights: nn.StreamMap) -> PyTree:
        """Return the weights, wrapped in `SplitStreamWeights` if features are split."""
        return SplitStreamWeights(weights) if self.splits_features else weights

    @property
    @abc.abstractmethod
    def routed(self) -> "ResidualStream":
        """Stream that routers and experts read, with all features of a token: this stream, or a `SequenceStream`."""

    @abc.abstractmethod
    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert from this stream to `routed`."""

    @abc.abstractmethod
    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert from `routed` to this stream."""

    @abc.abstractmethod
    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, kv_row_shards: int = 1
    ) -> eqx.Module:
        """Wrap a layer, which holds slices of its arrays, to run on this device's part of the stream.

        `shapes`, `specs` and `names` describe the arrays of the unsplit layer. `kv_row_shards` devices share each key
        head of a mixer, and each device attends for some of the batch rows.
        """

    @abc.abstractmethod
    def split_dropout(self, dropout: nn.RandomMask) -> eqx.Module:
        """Wrap dropout to apply this device's part of the mask that a single device would sample."""

    @abc.abstractmethod
    def split_positions(self, positions: nn.PositionEmbedding) -> eqx.Module:
        """Wrap learned positions to return this device's part."""

    @abc.abstractmethod
    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Wrap an embedding to return this device's part.

        `local_table()` returns the rows of this device's ids; the full table has `total` rows.
        """


_MEAN_NAMES = {"means": "norm means", "squares": "norm mean squares"}


class SplitNorm(nn.Module):
    """Wrapper of a norm over dims that one or several mesh axes split.

    All devices have slices of equal size, so the mean over the dims is the mean of the devices' means.
    """

    inner: nn.Norm
    axis: str | tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return this device's slice of the norm of an array; `x` is this device's slice of the array."""

        def mean(y: Array, kind: str) -> Array:
            local_mean, name = self.inner.mean(y, kind), _MEAN_NAMES[kind]
            return send.sum_gradients(name, send.pmean(name, local_mean, self.axis), self.axis)

        return self.inner.normalize(x, mean)


class SplitStreamWeights(nn.Module):
    """Wrapper of a `StreamMap` for split features; its sums over features are taken over all devices."""

    inner: nn.StreamMap

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return the results of the map for this device's features of several streams."""

        def add(sums: Array) -> Array:
            return send.sum_gradients("stream weights", send.psum("stream weights", sums, TENSOR), TENSOR)

        return self.inner.project(x, add, jax.lax.axis_size(TENSOR))


class TokensDropout(nn.Module):
    """Wrapper of dropout for this device's tokens; the caller passes the random keys of all tokens."""

    inner: nn.RandomMask

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch full_seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Return `x` with some channels of each token dropped."""
        return self.inner(x, None if keys is None else take_local_slice(keys, TENSOR, -1))


class FeatureDropout(nn.Module):
    """Wrapper of dropout for this device's features; it draws the mask of all features and uses a slice."""

    inner: nn.RandomMask

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Return `x` with some of this device's channels of each token dropped."""
        if keys is None or not self.inner.is_active:
            return x
        mask = self.inner.draw_mask(keys, x.shape[-1] * jax.lax.axis_size(TENSOR))
        return self.inner.apply_mask(x, take_local_slice(mask, TENSOR, -1))


class TokensPositions(nn.Module):
    """Wrapper of learned positions for this device's tokens; the caller passes the positions of all tokens."""

    inner: nn.PositionEmbedding

    def __call__(self, positions: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Return the vectors of this device's tokens."""
        return self.inner(take_local_slice(positions, TENSOR, -1))
