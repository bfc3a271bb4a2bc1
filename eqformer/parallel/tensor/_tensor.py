"""Tensor parallelism: attention and feed-forward layers run on a slice of their heads or hidden features.

Megatron-LM's division (arXiv:1909.08053): maps out of the residual stream hold a slice of their outputs, maps back
into it a slice of their inputs, so that one reduction a layer is left. With the `sequence` stream (arXiv:2205.05198)
the stream between the layers is split over tokens, and the reduction becomes a gather before and a scatter after.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from ._collective_matmul import all_gather_matmul, matmul_reduce_scatter
from ._residual_stream import ResidualStream, Sublayer, TokensDropout, TokensPositions
from ._vocabulary import SplitEmbedding


HEAD_DIMS = ("heads", "kv_heads", "mlp")  # which are split where the stream between layers keeps its features whole


class TensorParallelLayer(nn.Module):
    """A layer run on this device's slice of its heads or features, between a residual stream of whole features.

    All maps that read the layer's input share one gather; while the layer runs, their results stand in their places,
    and a map that is given anything else is computed where it is called. The bias of the map back into the stream is
    added once, after the reduction. If there are fewer key heads than devices, they
    are held whole, and each device reads the one that its query heads share. With `sharers`, in serving, that many
    devices have the same key head and attend with all its query heads to some of the rows each.
    """

    inner: PyTree
    stream: ResidualStream = eqx.field(static=True)
    shares_kv_heads: bool = eqx.field(static=True, default=False)
    sharers: int = eqx.field(static=True, default=1)

    def __call__(self, x: Float[Array, "*batch seq embed"], *rest: PyTree) -> PyTree:
        """The layer's own call; `x` is what this device holds of the stream."""
        inner = self._local()
        both = lambda m: (*_reading(m), *stream_maps(m, "outputs"))
        given = self._read(x, _reading(inner))
        rows: list[nn.LinearWrapper] = [Row(linear, self.stream) for linear in stream_maps(inner, "outputs")]
        if self.sharers > 1:
            tokens, cache = rest
            rows = [RowOfAll(row, self.sharers) for row in rows]
            rest = jax.tree.map(lambda x: own_rows(x, self.sharers), tokens), cache
        kind = type(inner).__name__ if isinstance(inner, nn.Mixer) else None
        reads = Reads(self.stream, self.sharers, kind)
        given = [Given(one, reads.rows(one, y), x, reads) for one, y in zip(_reading(inner), given)]
        return eqx.tree_at(both, inner, (*given, *rows))(x, *rest)

    def _read(self, x: Float[Array, "*batch seq embed"], linears: list[nn.LinearMap]) -> list[Array]:
        if self.stream.overlap == "none":  # the gradient is summed over the axis here, once for all maps
            x = self.stream.whole("maps from the stream", x)
            return [linear.product(x) for linear in linears]
        weights = tuple(linear.flat_matrix(x.dtype) for linear in linears)
        how: Any = {"overlap": self.stream.overlap, "products": tuple(linear.products for linear in linears)}
        products = all_gather_matmul(x, weights, TENSOR, name="maps from the stream", **how)
        products = [checkpoint_name(y, "product") for y in products]
        shaped = lambda linear, y: y.reshape(*y.shape[:-1], *linear.output_shape)
        return [shaped(linear, y) for linear, y in zip(linears, products)]

    def _local(self) -> PyTree:
        return own_kv_head(self.inner) if self.shares_kv_heads else self.inner


class TensorParallelMixer(nn.Mixer):
    """A mixer that `TensorParallelLayer` runs on this device's heads, with the cache of those."""

    inner: TensorParallelLayer

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The mixer's own call; `x` as for `TensorParallelLayer`, `tokens` are whole rows'."""
        if self.inner.stream.splits_tokens and tokens is None and cache is None:
            # Without `tokens` the mixer would number the tokens of `x`, but it is given those of all devices.
            tokens = nn.positions_like((*x.shape[:-2], x.shape[-2] * jax.lax.axis_size(TENSOR)))
        return self.inner(x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for this device's heads."""
        return self.inner._local().init_cache(batch, capacity, dtype)


def own_kv_head(module: PyTree) -> PyTree:
    """The mixer with the one key head that this device's other heads share, out of all that it holds.

    Where there are fewer key heads than devices, so that each key head serves the heads of several.
    """
    kv_heads = size_of(module, "kv_heads")
    assert kv_heads is not None
    first = jax.lax.axis_index(TENSOR) * kv_heads // jax.lax.axis_size(TENSOR)
    leaves, structure = jax.tree.flatten(module)
    names = [str(name).split() for name in jax.tree.leaves(nn.dims(module))]
    own = [
        jax.lax.dynamic_slice_in_dim(leaf, first, 1, name.index("kv_heads")) if "kv_heads" in name else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, own)


def is_split(module: object) -> bool:
    """Whether a module is a layer that runs on a slice of its heads or hidden features.

    One whose slices the stream meets in an array of its own, that belongs to no map, is run whole.
    """
    if isinstance(module, nn.FeedForward):
        back = _maps(module, "outputs")
        splits = bool(back) and all(set(linear.inputs) & set(HEAD_DIMS) for linear in back)
    else:
        splits = isinstance(module, nn.Mixer) and module.facts().splits_heads
    return splits and not _meets_stream_alone(module)


def _meets_stream_alone(layer: PyTree) -> bool:
    """Whether an array that belongs to no map is between the stream and slices."""
    bare = jax.tree.map(lambda node: () if nn.is_map(node) else node, layer, is_leaf=nn.is_map)
    return any("embed" in names and names & set(HEAD_DIMS) for names in jax.tree.leaves(nn.field_dim_names(bare)))


def size_of(module: PyTree, dim: str) -> int | None:
    """The size of a dim of a layer's maps, or None where it has no such dim."""
    return next((linear.sizes[dim] for linear in nn.linear_maps(module) if dim in linear.sizes), None)


def stream_maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """The maps out of the residual stream (`side="inputs"`) or back into it (`"outputs"`)."""
    return [linear for linear in nn.linear_maps(module) if getattr(linear, side) == ("embed",)]


def token_maps(module: PyTree) -> list[nn.LinearMap]:
    """Of a feed-forward layer the maps out of the stream to no slice, for the tokens that a device holds."""
    if not isinstance(module, nn.FeedForward):
        return []
    return [linear for linear in _maps(module, "inputs") if linear.outputs[0] not in HEAD_DIMS]


def _maps(module: PyTree, side: str) -> list[nn.LinearMap]:
    """As `stream_maps`, with maps that are made of maps as one."""
    is_map = lambda node: isinstance(node, nn.LinearMap)
    return [m for m in jax.tree.leaves(module, is_leaf=is_map) if is_map(m) and getattr(m, side) == ("embed",)]


def _reading(module: PyTree) -> list[nn.LinearMap]:
    """The maps that read the stream together, of all tokens."""
    alone = set(map(id, nn.linear_maps(token_maps(module))))
    return [linear for linear in stream_maps(module, "inputs") if id(linear) not in alone]


def shares_kv_heads(shapes: PyTree) -> bool:
    """Whether a mixer's key heads are held whole while its other heads are split."""
    kv_heads = size_of(shapes, "kv_heads")
    return kv_heads is not None and kv_heads % jax.lax.axis_size(TENSOR) != 0


class _WholeFeatures(ResidualStream):
    """What streams of whole features have in common: layers are split by their heads and hidden features."""

    split_dims: ClassVar[tuple[str, ...]] = HEAD_DIMS

    @property
    def routed(self) -> ResidualStream:
        """Itself."""
        return self

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """As it is."""
        return x

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """As it is."""
        return y

    def layer(self, module: Sublayer, shapes: PyTree, specs: PyTree, names: PyTree) -> eqx.Module:
        """The layer inside `TensorParallelLayer`."""
        is_norm = lambda node: isinstance(node, nn.Norm)
        split = lambda node: self.norm(node) if is_norm(node) else node
        tensor = TensorParallelLayer(jax.tree.map(split, module, is_leaf=is_norm), self, shares_kv_heads(shapes))
        return TensorParallelMixer(tensor) if isinstance(module, nn.Mixer) else tensor

    def embedding(
        self, embedding: nn.Embedding, own_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """The lookup in the rows of this device's ids."""
        return SplitEmbedding(own_table(), embedding.scale, total, self)


class ReplicatedStream(_WholeFeatures):
    """Each device has all of the stream."""

    dim: ClassVar[int | None] = None

    def dropout(self, dropout: nn.Dropout) -> nn.Dropout:
        """Dropout itself."""
        return dropout

    def positions(self, positions: nn.LearnedPositions) -> nn.LearnedPositions:
        """The positions themselves."""
        return positions


class SequenceStream(_WholeFeatures):
    """Each device has some of the tokens."""

    dim: ClassVar[int | None] = -2

    def dropout(self, dropout: nn.Dropout) -> TokensDropout:
        """By its tokens' keys."""
        return TokensDropout(dropout)

    def positions(self, positions: nn.LearnedPositions) -> TokensPositions:
        """Those of its tokens."""
        return TokensPositions(positions)


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a layer's maps out of the stream find their products; `mixer` is the name of its class, if it is one."""

    stream: ResidualStream
    sharers: int
    mixer: str | None

    def rows(self, linear: nn.LinearMap, y: Array) -> Array:
        """Of a map's product what this device goes on with: all of it, or some rows where key heads are shared."""
        if self.sharers == 1:
            return y
        if "kv_heads" in linear.outputs:
            return own_rows(y, self.sharers)
        return send.all_to_all("heads to rows", y, TENSOR, 0, -2, groups=_sharing(self.sharers))

    def of_another(self, linear: nn.LinearMap, x: Float[Array, "*batch seq embed"]) -> Array:
        """The product of a map with what the layer has made of its input, such as what a norm gives."""
        if self.stream.splits_tokens and self.mixer:
            spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
            raise ValueError(
                f"Plan(residual='sequence') over tensor={jax.lax.axis_size(TENSOR)}: the map {spec!r} of {self.mixer} "
                "reads what the mixer has made of its input, of which a device has some tokens and no others to make "
                "it of; let the map read the input itself, or take residual='replicated' or 'feature'."
            )
        return self.rows(linear, linear.product(self.stream.whole("maps from the stream", x)))


class Given(nn.LinearWrapper):
    """Stands for a map whose product with the layer's input, `given`, is known."""

    value: Float[Array, "..."]
    given: Float[Array, "..."]
    reads: Reads = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """What is known, of the layer's input; of anything else what `reads` finds."""
        y = self.value if x is self.given else self.reads.of_another(self.inner, x)
        return y if dtype is None else y.astype(dtype)

    def of_other(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The map's own."""
        return self.inner(x)


class Row(nn.LinearWrapper):
    """A map back into the stream, of which this device holds a slice of the inputs."""

    stream: ResidualStream = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """What this device holds of the sum of all devices' products."""
        if self.stream.overlap == "none":
            y = self.stream.summed("maps to the stream", self.inner.product(x, dtype))
        else:
            flat = x.reshape(*x.shape[: x.ndim - len(self.inputs)], -1)
            weight = self.inner.flat_matrix(x.dtype)
            how: Any = {"overlap": self.stream.overlap, "products": self.products, "name": "maps to the stream"}
            y = matmul_reduce_scatter(flat, weight, TENSOR, scatter="seq", **how)
        y = checkpoint_name(y, "product")  # for remat policies that keep it, so that it is not reduced again
        return checkpoint_name(y, "own tokens") if self.stream.splits_tokens else y


class RowOfAll(nn.LinearWrapper):
    """A map back into the stream of some rows' heads, which are exchanged for the heads of all rows."""

    sharers: int = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The inner map's, of all rows."""
        x = send.all_to_all("rows to heads", x, TENSOR, -2, 0, groups=_sharing(self.sharers))
        return self.inner.product(x, dtype)


def _sharing(sharers: int) -> list[list[int]]:
    """The devices that share each key head: they stand beside each other."""
    devices = range(jax.lax.axis_size(TENSOR))
    return [list(devices[first : first + sharers]) for first in devices[::sharers]]


def own_rows(x: Array, sharers: int) -> Array:
    """Of an array of all rows those that this device attends for, among those that share its key head."""
    size = x.shape[0] // sharers
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) % sharers * size, size)
