"""Tensor parallelism: attention and feed-forward layers run on a slice of their heads or hidden features.

The split is Megatron-LM's (arXiv:1909.08053). Maps that read the residual stream hold a slice of their outputs (column
parallelism), maps that write to the stream hold a slice of their inputs (row parallelism), and each layer needs one
all-reduce. With the `sequence` stream (arXiv:2205.05198), the stream between the layers is split over tokens, and each
layer needs an all-gather before it and a reduce-scatter after it.
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
"""Dims that are split over `tensor` if the residual stream has all features of a token."""


class TensorParallelLayer(nn.Module):
    """Wrapper of a layer that runs on this device's slice of its heads or hidden features.

    All maps that read the layer's input share one gather, and their products are computed before the layer runs
    (`PrecomputedMap`). The product of a map with another array is computed when the layer calls the map. The bias of an
    output map is added once, after the reduction. If there are fewer key heads than devices (`shares_kv_heads`), the
    key heads are replicated, and each device uses the key head of its query heads. In serving, `kv_row_shards` devices
    may share each key head. Each of these devices then attends for some of the batch rows, with all query heads of the
    key head.
    """

    inner: PyTree
    stream: ResidualStream = eqx.field(static=True)
    shares_kv_heads: bool = eqx.field(static=True, default=False)
    kv_row_shards: int = eqx.field(static=True, default=1)

    def __call__(self, x: Float[Array, "*batch seq embed"], *args: PyTree) -> PyTree:
        """Return the layer's result; `x` is this device's part of the stream."""
        inner = self._local()
        products = self._multiply_input(x, _input_maps(inner))
        output_maps: list[nn.LinearWrapper]
        output_maps = [RowParallelMap(linear, self.stream) for linear in stream_maps(inner, "outputs")]
        if self.kv_row_shards > 1:
            tokens, cache = args
            output_maps = [RowsToHeadsMap(linear, self.kv_row_shards) for linear in output_maps]
            args = jax.tree.map(functools.partial(take_attended_rows, kv_row_shards=self.kv_row_shards), tokens), cache
        mixer = type(inner).__name__ if isinstance(inner, nn.Mixer) else None
        context = LayerContext(self.stream, self.kv_row_shards, mixer)
        precomputed = [
            PrecomputedMap(linear, context.select_rows(linear, y), x, context)
            for linear, y in zip(_input_maps(inner), products)
        ]
        return eqx.tree_at(_input_and_output_maps, inner, (*precomputed, *output_maps))(x, *args)

    def _multiply_input(self, x: Float[Array, "*batch seq embed"], linears: list[nn.LinearMap]) -> list[Array]:
        """Return the products of all maps with the gathered input."""
        if self.stream.overlap == "none":  # One gather for all maps, so their gradients are reduced once.
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
        """Return the layer with this device's key head, if the key heads are replicated."""
        return take_kv_head(self.inner) if self.shares_kv_heads else self.inner


class TensorParallelMixer(nn.Mixer):
    """Wrapper of a mixer that runs on this device's heads, with a cache of these heads."""

    inner: TensorParallelLayer

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the mixer's results for `x`, this device's part of the stream; `tokens` describes unsplit rows."""
        if self.inner.stream.splits_tokens and tokens is None and cache is None:
            # The mixer's default would number the tokens of `x`, but the mixer reads the gathered tokens.
            tokens = nn.positions_like((*x.shape[:-2], x.shape[-2] * jax.lax.axis_size(TENSOR)))
        return self.inner(x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache for this device's heads."""
        return self.inner._local().init_cache(batch, capacity, dtype)


# Wrappers of a layer's maps during a call.


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Fields of a layer that its wrapped maps need."""

    stream: ResidualStream
    kv_row_shards: int
    mixer: str | None
    """Name of the mixer's class for errors; None for other layers."""

    def select_rows(self, linear: nn.LinearMap, y: Array) -> Array:
        """Return the rows of a map's product for which this device attends.

        Devices that share a key head all have the keys and values of this head for all rows. Before the call, each
        device has some of the head's query heads for all rows. The result has all of the head's query heads for some
        rows.
        """
        if self.kv_row_shards == 1:
            return y
        if "kv_heads" in linear.outputs:
            return take_attended_rows(y, self.kv_row_shards)
        return send.all_to_all("heads to rows", y, TENSOR, 0, -2, groups=_sharing_groups(self.kv_row_shards))

    def multiply_derived(self, linear: nn.LinearMap, x: Float[Array, "*batch seq embed"]) -> Array:
        """Return the product of a map with an array that the layer computed from its input, such as a norm's output."""
        if self.stream.splits_tokens and self.mixer:
            spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
            raise ValueError(
                f"Plan(residual='sequence') over tensor={jax.lax.axis_size(TENSOR)}: the map {spec!r} of {self.mixer} "
                "reads an array that the mixer computed from its input, and a device has only some tokens of this "
                "array; let the map read the input itself, or use residual='replicated' or 'feature'."
            )
        return self.select_rows(linear, linear.product(self.stream.gather("column-parallel input", x)))


class PrecomputedMap(nn.LinearWrapper):
    """Wrapper of a map whose product with the layer's input is already computed."""

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
    """Wrapper of a map to the stream whose inputs are split over devices (row parallelism)."""

    stream: ResidualStream = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the sum of all devices' products, or this device's part of the sum if the stream is split."""
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
        y = checkpoint_name(y, "product")  # If a remat policy saves `y`, recomputation needs no second reduction.
        # The remat policy `full` saves arrays named "own tokens", which would otherwise be sent again.
        return checkpoint_name(y, "own tokens") if self.stream.splits_tokens else y


class RowsToHeadsMap(nn.LinearWrapper):
    """Wrapper of a map to the stream; an all-to-all first turns all heads of some rows into some heads of all rows."""

    kv_row_shards: int = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the inner map's product for all rows."""
        x = send.all_to_all("rows to heads", x, TENSOR, -2, 0, groups=_sharing_groups(self.kv_row_shards))
        return self.inner.product(x, dtype)


def _sharing_groups(kv_row_shards: int) -> list[list[int]]:
    """Return the groups of neighboring devices that share a key head."""
    devices = range(jax.lax.axis_size(TENSOR))
    return [list(devices[first : first + kv_row_shards]) for first in devices[::kv_row_shards]]


def take_attended_rows(x: Array, kv_row_shards: int) -> Array:
    """Return the batch rows for which this device attends; the devices that share a key head split the rows."""
    size = x.shape[0] // kv_row_shards
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) % kv_row_shards * size, size)


# Which layers and maps are split.


def take_kv_head(module: PyTree) -> PyTree:
    """Return the mixer with only one of its replicated key heads, the key head of this device's query heads.

    There are fewer key heads than devices, so each key head serves the query heads of several devices.
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
    """Return whether a module is a layer that can run on a slice of its heads or hidden features.

    A layer cannot run on a slice if an array outside of its linear maps has both the dim `embed` and a split dim.
    """
    if isinstance(module, nn.FeedForward):
        output_maps = _unwrapped_maps(module, "outputs")
        splits = bool(output_maps) and all(set(linear.inputs) & set(HEAD_DIMS) for linear in output_maps)
    else:
        splits = isinstance(module, nn.Mixer) and module.facts().splits_heads
    return splits and not _has_unmapped_array(module)


def _has_unmapped_array(layer: PyTree) -> bool:
    """Return whether an array outside of the maps has both the dim `embed` and a split dim."""
    without_maps = nn.map_linears(lambda _: None, layer)
    dim_names = jax.tree.leaves(nn.field_dim_names(without_maps))
    return any("embed" in names and names & set(HEAD_DIMS) for names in dim_names)


def dim_size(module: PyTree, dim: str) -> int | None:
    """Return the size of a dim of a layer's maps, or None if no map has the dim."""
    return next((linear.sizes[dim] for linear in nn.linear_maps(module) if dim in linear.sizes), None)


def stream_maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """Return the maps that read the residual stream (`side="inputs"`) or write to it (`side="outputs"`)."""
    return [linear for linear in nn.linear_maps(module) if getattr(linear, side) == ("embed",)]


def token_maps(module: PyTree) -> list[nn.LinearMap]:
    """Return the maps of a feed-forward layer that read the stream and whose outputs are not split.

    These maps run on this device's tokens, without a gather. Other layers have no such maps.
    """
    if not isinstance(module, nn.FeedForward):
        return []
    return [linear for linear in _unwrapped_maps(module, "inputs") if linear.outputs[0] not in HEAD_DIMS]


def _unwrapped_maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """Return the maps of `stream_maps`; a map that consists of several maps is listed once, as a whole."""
    return [linear for linear in nn.modules(module, nn.LinearMap) if getattr(linear, side) == ("embed",)]


def _input_maps(module: PyTree) -> list[nn.LinearMap]:
    """Return the maps that read the gathered stream together."""
    on_local_tokens = set(map(id, nn.linear_maps(token_maps(module))))
    return [linear for linear in stream_maps(module, "inputs") if id(linear) not in on_local_tokens]


def _input_and_output_maps(module: PyTree) -> tuple[nn.LinearMap, ...]:
    """Return the maps that a `TensorParallelLayer` replaces."""
    return (*_input_maps(module), *stream_maps(module, "outputs"))


def shares_kv_heads(shapes: PyTree) -> bool:
    """Return whether a mixer's key heads are replicated while its query heads are split."""
    kv_heads = dim_size(shapes, "kv_heads")
    return kv_heads is not None and kv_heads % jax.lax.axis_size(TENSOR) != 0


# Layers that every device runs in full.


class ReplicatedMixer(nn.Mixer):
    """Wrapper of a mixer whose `facts()` declare no heads: every device runs the mixer on all tokens and features."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the mixer's results for `x`, this device's part of the stream; `tokens` describes unsplit rows."""
        y, cache = self.inner.whole(self.stream.gather("column-parallel input", x), tokens, cache)
        return count_once(self.stream, y), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the mixer's empty cache."""
        return self.inner.whole.init_cache(batch, capacity, dtype)


class ReplicatedLayer(nn.Module):
    """Wrapper of a layer that reads one token at a time and has no dim to split: every device runs it in full."""

    inner: "Sliced"
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the layer's output for this device's part of the stream."""
        if self.stream.splits_tokens:
            return self.inner.whole(x)
        return count_once(self.stream, self.inner.whole(self.stream.gather("column-parallel input", x)))


class Sliced(eqx.Module):
    """Wrapper of a module that every device runs in full, with arrays that the layout may have split over `tensor`.

    `dims` has, for each array, the dim along which it is split, counted from the end, or None.
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
    """Return this device's part of an output that all devices have computed identically.

    Gradients of the output must not be summed over devices. So for a replicated stream, the first device sends its
    output to all devices, and only the first device gets a gradient.
    """
    if not stream.is_whole:
        return stream.take_local(y)
    first = jnp.where(jax.lax.axis_index(TENSOR) == 0, y, jnp.zeros_like(y))
    return checkpoint_name(stream.reduce("row-parallel output", first), "product")


def is_plain(layer: object) -> bool:
    """Return whether a layer, for example a user's module, belongs to none of the `nn` classes of layers."""
    return layer is not None and not isinstance(layer, nn.Mixer | nn.FeedForward | nn.Routed)


LAYER_FIELDS: tuple[tuple[type[nn.Module], str], ...] = ((nn.ExpertMixture, "shared"), (nn.Residual, "layer"))
"""Classes of modules with a field for a layer, and the name of the field; the layer may be plain (`is_plain`)."""


def plain_layers(model: PyTree) -> list[tuple[str, PyTree]]:
    """Return the plain layers of a model (`is_plain`), with their paths."""
    layers = []
    for kind, field in LAYER_FIELDS:
        layers += [(f"{path}.{field}", getattr(module, field)) for path, module in nn.named_modules(model, kind)]
    return [(path, layer) for path, layer in layers if is_plain(layer)]


def replicated_layers(model: PyTree) -> list[tuple[str, PyTree]]:
    """Return the layers that every device of `tensor` runs in full, with their paths in the model."""
    layers = nn.named_modules(model, (nn.Mixer, nn.FeedForward, nn.Experts))
    unsplit = [(path, layer) for path, layer in layers if not isinstance(layer, nn.Experts) and not is_split(layer)]
    plain = [(path, layer) for path, layer in plain_layers(model) if any(map(nn.has_shape, jax.tree.leaves(layer)))]
    return unsplit + plain
