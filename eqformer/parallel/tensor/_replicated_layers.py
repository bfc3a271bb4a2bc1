"""Layers that every device of the axis `tensor` runs in full: layers that name no dim to split, and routers."""

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
    """A mixer whose `facts()` name no heads to split: every device runs it in full, on all tokens and features."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Call the mixer; `x` is this device's part of the stream, `tokens` are those of unsplit rows."""
        y, cache = self.inner.whole(self.stream.gather("maps from the stream", x), tokens, cache)
        return count_once(self.stream, y), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the mixer's empty cache."""
        return self.inner.whole.init_cache(batch, capacity, dtype)


class ReplicatedLayer(nn.Module):
    """A layer on single tokens that names no dim to split: every device runs it in full."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Call the layer on all features of this device's tokens."""
        if self.stream.splits_tokens:
            return self.inner.whole(x)
        return count_once(self.stream, self.inner.whole(self.stream.gather("maps from the stream", x)))


class Sliced(eqx.Module):
    """A module that every device runs in full, although the layout may split its arrays by the names of their dims.

    `dims` has for each array the dim, counted from the end, along which the array is a slice over `tensor`, or None.
    """

    inner: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)

    def __call__(self, *args: PyTree) -> PyTree:
        """Call the module with gathered arrays."""
        return self.whole(*args)

    @property
    def is_split(self) -> bool:
        """Whether any array is a slice."""
        return any(dim is not None for dim in self.dims)

    @property
    def whole(self) -> PyTree:
        """The module with gathered arrays."""
        return gather_module(self.inner, self.dims)


def count_once(stream: ResidualStream, y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return this device's part of an output that all devices have computed, without summing it over devices.

    For a replicated stream, the first device's output is sent to all devices.
    """
    if not stream.is_whole:
        return stream.take_local(y)
    first = jnp.where(jax.lax.axis_index(TENSOR) == 0, y, jnp.zeros_like(y))
    return checkpoint_name(stream.reduce("maps to the stream", first), "product")


def is_plain(layer: object) -> bool:
    """Return whether a module in the position of a layer follows no contract of layers."""
    return layer is not None and not isinstance(layer, nn.Mixer | nn.FeedForward | nn.Routed)


PLACES: tuple[tuple[type, Callable[[Any], Any], str], ...] = (
    (nn.ExpertMixture, lambda mixture: mixture.shared, "shared"),
    (nn.Residual, lambda residual: residual.layer, "layer"),
)
"""Positions of layers that may follow no contract: the module, its layer, and the layer's name."""


def plain_layers(model: PyTree) -> list[tuple[str, Any]]:
    """Return the modules of a model in the position of a layer that follow no contract of layers, with their paths."""
    layers = []
    for kind, layer_of, name in PLACES:
        layers += [(f"{path}.{name}", layer_of(module)) for path, module in nn.named_modules(model, kind)]
    return [(path, layer) for path, layer in layers if is_plain(layer)]


def replicated_layers(model: PyTree) -> list[tuple[str, Any]]:
    """Return a model's layers that name no dim to split, with paths: every device of `tensor` runs them in full."""
    layers = nn.named_modules(model, (nn.Mixer, nn.FeedForward, nn.Experts))
    is_layer = lambda module: isinstance(module, nn.Mixer | nn.FeedForward)
    unsplit = [(path, layer) for path, layer in layers if is_layer(layer) and not is_split(layer)]
    plain = [(path, layer) for path, layer in plain_layers(model) if any(map(nn.has_shape, jax.tree.leaves(layer)))]
    return unsplit + plain
