"""What every device of the axis `tensor` runs whole: layers that name nothing to split, and routers."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ... import nn
from .._axes import TENSOR
from ..state._gather import gather_module
from ._residual_stream import ResidualStream
from ._tensor import is_split


class ReplicatedMixer(nn.Mixer):
    """A mixer whose `facts()` name no heads to split: every device runs the whole of it, on all tokens and features."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The mixer's own call; `x` is what this device holds of the stream, `tokens` are whole rows'."""
        y, cache = self.inner.whole(self.stream.whole("maps from the stream", x), tokens, cache)
        return counted_once(self.stream, y), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The mixer's own empty cache."""
        return self.inner.whole.init_cache(batch, capacity, dtype)


class ReplicatedLayer(nn.Module):
    """A layer for each token by itself that names nothing to split: every device runs the whole of it."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """The layer's own call, on all features of the tokens that this device holds."""
        if self.stream.splits_tokens:
            return self.inner.whole(x)
        return counted_once(self.stream, self.inner.whole(self.stream.whole("maps from the stream", x)))


class Sliced(eqx.Module):
    """A module that every device runs whole, though the layout may split its arrays by the names of their dims.

    `dims` has the dim, counted from the end, along which each of them is a slice over `tensor`, or None.
    """

    inner: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)

    @property
    def is_split(self) -> bool:
        """Whether any array is."""
        return any(dim is not None for dim in self.dims)

    @property
    def whole(self) -> PyTree:
        """The module with its arrays put together."""
        return gather_module(self.inner, self.dims)


def counted_once(stream: ResidualStream, y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Of an output that all devices have computed, not to be summed: each its part, or the first device's for all."""
    if not stream.is_whole:
        return stream.own(y)
    first = jnp.where(jax.lax.axis_index(TENSOR) == 0, y, jnp.zeros_like(y))
    return checkpoint_name(stream.summed("maps to the stream", first), "product")


def is_plain(layer: object) -> bool:
    """Whether what stands in the place of a layer follows no contract of layers."""
    return layer is not None and not isinstance(layer, nn.Mixer | nn.FeedForward | nn.Routed)


# Where layers stand that may follow no contract.
PLACES: tuple[tuple[type, Callable[[Any], Any], str], ...] = (
    (nn.MoE, lambda moe: moe.shared, "shared"),
    (nn.Residual, lambda residual: residual.layer, "layer"),
)


def plain_layers(model: PyTree) -> list[tuple[str, Any]]:
    """What stands in a model in the place of a layer and follows no contract of layers, with its path."""
    found = []
    for kind, layer_of, name in PLACES:
        found += [(f"{path}.{name}", layer_of(module)) for path, module in nn.named_modules(model, kind)]
    return [(path, layer) for path, layer in found if is_plain(layer)]


def replicated_layers(model: PyTree) -> list[tuple[str, Any]]:
    """A model's layers that name nothing to split, with their paths: every device of `tensor` runs the whole."""
    layers = nn.named_modules(model, (nn.Mixer, nn.FeedForward, nn.Experts))
    found = [(path, one) for path, one in layers if not (is_split(one) or isinstance(one, nn.Experts))]
    return found + [(path, one) for path, one in plain_layers(model) if any(map(nn.has_shape, jax.tree.leaves(one)))]
