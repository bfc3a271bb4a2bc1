"""The residual stream between layers over the axis `tensor`: what a device holds of it, and how it gets the rest."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from .._shard_map import own_part
from ._collective_matmul import Overlap


Sublayer = nn.Mixer | nn.FeedForward | nn.PerLayerInputs
StreamKind = Literal["replicated", "sequence", "feature"]  # values of `Plan(residual=)` and of the command line


@dataclasses.dataclass(frozen=True)
class ResidualStream(abc.ABC):
    """A residual stream of one kind, between layers that are split over the axis `tensor`.

    Its methods gather and reduce it around layers, and wrap layers, norms, dropout, positions and the embedding for it.
    `dim` is the dim of an activation (`*batch seq embed`) that is split, None where each device has the whole;
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

    def whole(self, name: str, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """All tokens and features on each device; the gradient is summed, and scattered if the stream is split."""
        return send.vary(name, x, TENSOR) if self.dim is None else send.all_gather(name, x, TENSOR, self.dim)

    def summed(self, name: str, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """What this device holds of the sum of all devices' `y`: all of it, or its slice."""
        return send.psum(name, y, TENSOR) if self.dim is None else send.psum_scatter(name, y, TENSOR, self.dim)

    def own(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """What this device holds of an array that every device has whole."""
        return x if self.dim is None else own_part(x, TENSOR, self.dim)

    def norm(self, norm: nn.Norm) -> PyTree:
        """The norm, or a `SplitNorm` where a dim that it averages over is split."""
        # Decided by the names of its dims, since a norm need not have an array with a spec. Key heads that devices
        # share are each on equally many devices, so that the mean of the devices' means is the mean there too.
        return SplitNorm(norm, TENSOR) if set(norm.reduced) & set(self.split_dims) else norm

    @property
    @abc.abstractmethod
    def routed(self) -> "ResidualStream":
        """The stream of whole features that routers and experts read: itself, or by tokens where features are split."""

    @abc.abstractmethod
    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """From this stream to `routed`."""

    @abc.abstractmethod
    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """From `routed` to this stream."""

    @abc.abstractmethod
    def layer(self, module: Sublayer, shapes: PyTree, specs: PyTree, names: PyTree) -> eqx.Module:
        """A mixer, feed-forward layer or `PerLayerInputs` on a slice; `shapes`, `specs` and `names` are the whole's."""

    @abc.abstractmethod
    def dropout(self, dropout: nn.Dropout) -> eqx.Module:
        """Dropout of what this device holds, with its part of the mask that one device would draw."""

    @abc.abstractmethod
    def positions(self, positions: nn.LearnedPositions) -> eqx.Module:
        """Learned positions of what this device holds."""

    @abc.abstractmethod
    def embedding(
        self, embedding: nn.Embedding, own_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """The lookup of what this device holds; `own_table()` has the rows of its ids, of `total` in all."""


_NAMES = {"means": "means of split norms", "squares": "squares of split norms"}


class SplitNorm(nn.Module):
    """A norm over dims of which this device holds a slice: the averages are taken over `axis`, one or several.

    Slices are equal, so the mean of the devices' means is the mean.
    """

    inner: nn.Norm
    axis: str | tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of the whole, of which `x` is a slice."""

        def mean(y: Array, what: str) -> Array:
            own, name = self.inner.mean(y, what), _NAMES[what]
            return send.vary(name, send.pmean(name, own, self.axis), self.axis)

        return self.inner.normalised(x, mean)


class TokensDropout(nn.Module):
    """Dropout of this device's tokens, with their own keys out of all tokens' keys."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch full_seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop channels of this device's tokens."""
        return self.inner(x, None if keys is None else own_part(keys, TENSOR, -1))


class FeatureDropout(nn.Module):
    """Dropout of this device's features: its slice of the mask of all features."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop this device's channels of each token."""
        if keys is None or self.inner.rate == 0:
            return x
        whole = self.inner.mask(keys, x.shape[-1] * jax.lax.axis_size(TENSOR))
        return self.inner.masked(x, own_part(whole, TENSOR, -1))


class TokensPositions(nn.Module):
    """Learned positions of this device's tokens."""

    inner: nn.LearnedPositions

    def __call__(self, positions: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vectors of this device's tokens."""
        return self.inner(own_part(positions, TENSOR, -1))
