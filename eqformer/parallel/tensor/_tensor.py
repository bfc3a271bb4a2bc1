"""Tensor parallelism: attention and feed-forward layers run on a slice of their heads or hidden features.

Megatron-LM's division (arXiv:1909.08053): maps out of the residual stream hold a slice of their outputs, maps back
into it a slice of their inputs, so that one reduction per layer remains. With the `sequence` stream (arXiv:2205.05198)
the stream between the layers is split over tokens, and the reduction becomes a gather before and a scatter after.
"""

import dataclasses
import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ... import nn
from .. import _collectives as send
from .._fully_sharded import gather_module
from .._mesh import TENSOR
from ._collective_matmul import all_gather_matmul, matmul_reduce_scatter
from ._residual_stream import ResidualStream


HEAD_DIMS = ("heads", "kv_heads", "mlp")
"""The dims that are split if the stream between layers has all features of a token."""


class TensorParallelLayer(nn.Module):
    """A layer run on this device's slice of its heads or features, between a residual stream with all features.

    All maps that read the layer's input share one gather, and are computed before the layer runs (`PrecomputedMap`). A
    map that the layer calls on another array is computed when it is called. The bias of the map back into the stream is
    added once, after the reduction. If there are fewer key heads than devices, the key heads are replicated, and each
    device reads the one that its query heads share. With `sharers`, in serving, that many devices have the same key
    head and attend with all its query heads to some of the rows each.
    """

    inner: PyTree
    stream: ResidualStream = eqx.field(static=True)
    shares_kv_heads: bool = eqx.field(static=True, default=False)
    sharers: int = eqx.field(static=True, default=1)

    def __call__(self, x: Float[Array, "*batch seq embed"], *args: PyTree) -> PyTree:
        """Call the layer; `x` is this device's part of the stream."""
        inner = self._local()
        products = self._multiply_input(x, _input_maps(inner))
        output_maps: list[nn.LinearWrapper]
        output_maps = [RowParallelMap(linear, self.stream) for linear in stream_maps(inner, "outputs")]
        if self.sharers > 1:
            tokens, cache = args
            output_maps = [RowsToHeadsMap(linear, self.sharers) for linear in output_maps]
            args = jax.tree.map(functools.partial(take_attended_rows, sharers=self.sharers), tokens), cache
        mixer = type(inner).__name__ if isinstance(inner, nn.Mixer) else None
        context = LayerContext(self.stream, self.sharers, mixer)
        precomputed = [
            PrecomputedMap(linear, context.select_rows(linear, y), x, context)
            for linear, y in zip(_input_maps(inner), products)
        ]
        return eqx.tree_at(_input_and_output_maps, inner, (*precomputed, *output_maps))(x, *args)

    def _multiply_input(self, x: Float[Array, "*batch seq embed"], linears: list[nn.LinearMap]) -> list[Array]:
        """Return the products of all maps with the gathered input."""
        if self.stream.overlap == "none":  # The gradient is summed over the axis here, once for all maps.
            x = self.stream.gather("column-parallel input", x)
            return [linear.product(x) for linear in linears]
        weights = tuple(linear.flat_matrix(x.dtype) for linear in linears)
        precisions = tuple(linear.products for linear in linears)
        products = all_gather_matmul(
            x, weights, TENSOR, name="column-parallel input", overlap=self.stream.overlap, products=precisions
        )
        products = [checkpoint_name(y, "product") for y in products]
        return [y.reshape(*y.shape[:-1], *linear.output_shape) for linear, y in zip(linears, products)]

    def _local(self) -> PyTree:
        return take_kv_head(self.inner) if self.shares_kv_heads else self.inner


class TensorParallelMixer(nn.Mixer):
    """A mixer that `TensorParallelLayer` runs on this device's heads, with the cache of these heads."""

    inner: TensorParallelLayer

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Call the mixer; `x` is as for `TensorParallelLayer`, `tokens` are those of unsplit rows."""
        if self.inner.stream.splits_tokens and tokens is None and cache is None:
            # Without `tokens` the mixer would number the tokens of `x`, but its input is gathered from all devices.
            tokens = nn.positions_like((*x.shape[:-2], x.shape[-2] * jax.lax.axis_size(TENSOR)))
        return self.inner(x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache for this device's heads."""
        return self.inner._local().init_cache(batch, capacity, dtype)


# Maps while a layer runs on its slice.


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """The stream, sharers of key heads and mixer of a layer, for its maps; `mixer` is its class's name, or None."""

    stream: ResidualStream
    sharers: int
    mixer: str | None

    def select_rows(self, linear: nn.LinearMap, y: Array) -> Array:
        """Return the rows of a map's product that this device uses: all, or some rows if key heads are shared."""
        if self.sharers == 1:
            return y
        if "kv_heads" in linear.outputs:
            return take_attended_rows(y, self.sharers)
        return send.all_to_all("heads to rows", y, TENSOR, 0, -2, groups=_sharing_groups(self.sharers))

    def multiply_derived(self, linear: nn.LinearMap, x: Float[Array, "*batch seq embed"]) -> Array:
        """Return the product of a map with an array that the layer computed from its input, such as a norm's output."""
        if self.stream.splits_tokens and self.mixer:
            spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
            raise ValueError(
                f"Plan(residual='sequence') over tensor={jax.lax.axis_size(TENSOR)}: the map {spec!r} of {self.mixer} "
                "reads an array that the mixer computed from its input, and a device has only some tokens of that "
                "input; let the map read the input itself, or take residual='replicated' or 'feature'."
            )
        return self.select_rows(linear, linear.product(self.stream.gather("column-parallel input", x)))


class PrecomputedMap(nn.LinearWrapper):
    """A map whose product with the layer's input is already computed."""

    value: Float[Array, "..."]
    layer_input: Float[Array, "..."]
    context: LayerContext = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the computed product if `x` is the layer's input, and otherwise `LayerContext.multiply_derived`."""
        y = self.value if x is self.layer_input else self.context.multiply_derived(self.inner, x)
        return y if dtype is None else y.astype(dtype)

    def of_other(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the inner map's result."""
        return self.inner(x)


class RowParallelMap(nn.LinearWrapper):
    """A map back into the stream, of which this device holds a slice of the inputs (Megatron-LM's row parallelism)."""

    stream: ResidualStream = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return this device's part of the sum of all devices' products."""
        if self.stream.overlap == "none":
            y = self.stream.reduce("row-parallel output", self.inner.product(x, dtype))
        else:
            rows = x.reshape(*x.shape[: x.ndim - len(self.inputs)], -1)
            y = matmul_reduce_scatter(
                rows,
                self.inner.flat_matrix(x.dtype),
                TENSOR,
                scatter="seq",
                overlap=self.stream.overlap,
                products=self.products,
                name="row-parallel output",
            )
        y = checkpoint_name(y, "product")  # for remat policies that save it, so that it is not reduced again
        return checkpoint_name(y, "own tokens") if self.stream.splits_tokens else y


class RowsToHeadsMap(nn.LinearWrapper):
    """A map back into the stream whose input, all heads of some rows, is exchanged for some heads of all rows."""

    sharers: int = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the inner map's product for all rows."""
        x = send.all_to_all("rows to heads", x, TENSOR, -2, 0, groups=_sharing_groups(self.sharers))
        return self.inner.product(x, dtype)


def _sharing_groups(sharers: int) -> list[list[int]]:
    """Return the groups of neighbouring devices that share a key head."""
    devices = range(jax.lax.axis_size(TENSOR))
    return [list(devices[first : first + sharers]) for first in devices[::sharers]]


def take_attended_rows(x: Array, sharers: int) -> Array:
    """Return the rows that this device attends for, among the devices that share its key head."""
    size = x.shape[0] // sharers
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) % sharers * size, size)


# Which layers and maps are split.


def take_kv_head(module: PyTree) -> PyTree:
    """Return the mixer with only the key head that this device's query heads share, out of replicated key heads.

    For fewer key heads than devices, so that each key head serves the query heads of several devices.
    """
    kv_heads = dim_size(module, "kv_heads")
    assert kv_heads is not None
    first = jax.lax.axis_index(TENSOR) * kv_heads // jax.lax.axis_size(TENSOR)
    leaves, structure = jax.tree.flatten(module)
    names = [str(name).split() for name in jax.tree.leaves(nn.dims(module))]
    local_leaves = [
        jax.lax.dynamic_slice_in_dim(leaf, first, 1, name.index("kv_heads")) if "kv_heads" in name else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, local_leaves)


def is_split(module: object) -> bool:
    """Return whether a module is a layer that runs on a slice of its heads or hidden features.

    A layer with an array of its own, not a map's, between the stream and the slices is run in full.
    """
    if isinstance(module, nn.FeedForward):
        output_maps = _unwrapped_maps(module, "outputs")
        splits = bool(output_maps) and all(set(linear.inputs) & set(HEAD_DIMS) for linear in output_maps)
    else:
        splits = isinstance(module, nn.Mixer) and module.facts().splits_heads
    return splits and not _has_unmapped_array(module)


def _has_unmapped_array(layer: PyTree) -> bool:
    """Return whether an array that belongs to no map is between the stream and slices."""
    without_maps = nn.map_linears(lambda _: None, layer)
    dim_names = jax.tree.leaves(nn.field_dim_names(without_maps))
    return any("embed" in names and names & set(HEAD_DIMS) for names in dim_names)


def dim_size(module: PyTree, dim: str) -> int | None:
    """Return the size of a dim of a layer's maps, or None if no map has the dim."""
    return next((linear.sizes[dim] for linear in nn.linear_maps(module) if dim in linear.sizes), None)


def stream_maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """Return the maps out of the residual stream (`side="inputs"`) or back into it (`"outputs"`)."""
    return [linear for linear in nn.linear_maps(module) if getattr(linear, side) == ("embed",)]


def token_maps(module: PyTree) -> list[nn.LinearMap]:
    """Return a feed-forward layer's maps out of the stream whose outputs are not split; they run on local tokens."""
    if not isinstance(module, nn.FeedForward):
        return []
    return [linear for linear in _unwrapped_maps(module, "inputs") if linear.outputs[0] not in HEAD_DIMS]


def _unwrapped_maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """Return the maps of `stream_maps`, but a map that is made of maps as a single map."""
    return [linear for linear in nn.modules(module, nn.LinearMap) if getattr(linear, side) == ("embed",)]


def _input_maps(module: PyTree) -> list[nn.LinearMap]:
    """Return the maps that read the gathered stream together."""
    on_local_tokens = set(map(id, nn.linear_maps(token_maps(module))))
    return [linear for linear in stream_maps(module, "inputs") if id(linear) not in on_local_tokens]


def _input_and_output_maps(module: PyTree) -> tuple[nn.LinearMap, ...]:
    return (*_input_maps(module), *stream_maps(module, "outputs"))


def shares_kv_heads(shapes: PyTree) -> bool:
    """Return whether a mixer's key heads are replicated while its query heads are split."""
    kv_heads = dim_size(shapes, "kv_heads")
    return kv_heads is not None and kv_heads % jax.lax.axis_size(TENSOR) != 0


# Layers that every device runs in full.


class ReplicatedMixer(nn.Mixer):
    """A mixer whose `facts()` name no heads to split: every device runs it in full, on all tokens and features."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Call the mixer; `x` is this device's part of the stream, `tokens` are those of unsplit rows."""
        y, cache = self.inner.whole(self.stream.gather("column-parallel input", x), tokens, cache)
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
        return count_once(self.stream, self.inner.whole(self.stream.gather("column-parallel input", x)))


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
    return checkpoint_name(stream.reduce("row-parallel output", first), "product")


def is_plain(layer: object) -> bool:
    """Return whether a module in the position of a layer follows no contract of layers."""
    return layer is not None and not isinstance(layer, nn.Mixer | nn.FeedForward | nn.Routed)


LAYER_FIELDS: tuple[tuple[type[nn.Module], str], ...] = ((nn.ExpertMixture, "shared"), (nn.Residual, "layer"))
"""Fields of modules whose layer may follow no contract."""


def plain_layers(model: PyTree) -> list[tuple[str, PyTree]]:
    """Return the modules of a model in the position of a layer that follow no contract of layers, with their paths."""
    layers = []
    for kind, field in LAYER_FIELDS:
        layers += [(f"{path}.{field}", getattr(module, field)) for path, module in nn.named_modules(model, kind)]
    return [(path, layer) for path, layer in layers if is_plain(layer)]


def replicated_layers(model: PyTree) -> list[tuple[str, PyTree]]:
    """Return a model's layers that name no dim to split, with paths: every device of `tensor` runs them in full."""
    layers = nn.named_modules(model, (nn.Mixer, nn.FeedForward, nn.Experts))
    unsplit = [(path, layer) for path, layer in layers if not isinstance(layer, nn.Experts) and not is_split(layer)]
    plain = [(path, layer) for path, layer in plain_layers(model) if any(map(nn.has_shape, jax.tree.leaves(layer)))]
    return unsplit + plain
