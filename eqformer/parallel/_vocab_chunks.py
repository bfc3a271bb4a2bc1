"""Vocabulary tables that are split over `fsdp` and gathered in chunks: no device holds a full table or its gradient."""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._shapes import ArrayOrShape
from . import _collectives as send
from ._fully_sharded import gather, has_wider_grad
from ._mesh import FSDP, TorusSteps
from ._placement import narrower_dtype
from ._shard_map import vary_like


CHUNK_BYTES = 2**27
"""Bytes of the float32 gradient of a chunk."""
WHOLE_HEAD_BYTES = 2**30
"""Bytes of a head's float32 gradient up to which logits are not chunked, because chunks need one more matmul."""
WHOLE_TIED_BYTES = 2**32
"""Bytes of a tied table's float32 gradient up to which the table is not chunked.

The limit is higher than for an untied head, because chunks are gathered and scattered twice: for lookups and for
logits.
"""

LookupSettings = tuple[int, str, int, TorusSteps]
"""Fields `dim`, `gather_dtype`, `rows` and `steps` of a `ShardedTable`."""


class ShardedTable(nn.Module):
    """Vocabulary table that is split over `fsdp`, and gathered in chunks.

    `slice` is this device's slice along `dim`. If `value` is set, `value` is the slice instead, and `slice` is the
    gradient proxy of `value`. A chunk consists of `rows` rows of every device's slice. Chunks are gathered in
    `gather_dtype`, in the given `steps`. Their gradients are summed over tokens and devices in float32 at least.
    """

    slice: Float[Array, "some_vocab some_embed"]
    value: Float[Array, "some_vocab some_embed"] | None
    dim: int = eqx.field(static=True)
    gather_dtype: str = eqx.field(static=True)
    rows: int = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True)

    def lookup_rows(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return a vector for each id, NaN for an id outside of the table."""
        value = None if self.value is None else vary_like(self.value, self.slice)
        settings = (self.dim, self.gather_dtype, self.rows, self.steps)
        return _look_up(settings, value, self.slice, ids)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the arguments of `gather_chunk` for all chunks, with a dim of chunks in front.

        The gradient is taken with respect to the first argument.
        """
        chunks = _split_rows(self.slice, self.rows)
        values = None if self.value is None else _split_rows(self.value, self.rows)
        return chunks, (jnp.arange(len(chunks)), values)

    def gather_chunk(
        self, chunk: Array, chunk_index_and_value: tuple[Array, Array | None]
    ) -> tuple[Array, Int[Array, "part"]]:
        """Return the rows of a chunk, in float32 at least, and the id of each row, -1 for padding of the last chunk."""
        chunk_index, value = chunk_index_and_value
        wide = str(nn.at_least_float32(chunk.dtype))
        rows = gather(chunk, self.dim, self.gather_dtype, value, self.steps, wide)
        index = jnp.arange(len(rows))
        slice_rows, device = len(self.slice), index // self.rows
        row_of_slice = chunk_index * self.rows + index % self.rows
        return rows, jnp.where(row_of_slice < slice_rows, device * slice_rows + row_of_slice, -1)


class ChunkedEmbedding(nn.Module):
    """Wrapper of an embedding that looks up vectors chunk by chunk, so that no device gathers the full table."""

    inner: nn.EmbeddingTable
    table: ShardedTable

    @property
    def weight(self) -> PyTree:  # an array, or the leaf that `tree_at` puts in its place
        """The full table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "..."]:
        """Return a vector for each id."""
        return self.inner.transform(self.table.lookup_rows(ids))

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return logits from the full table."""
        return nn.unembed(x, self.weight)


class ChunkedTiedEmbedding(nn.ChunkedUnembedding):
    """Wrapper of an embedding with a tied head: lookups and logits are computed chunk by chunk."""

    inner: ChunkedEmbedding
    table: ShardedTable

    @property
    def weight(self) -> PyTree:  # an array, or the leaf that `tree_at` puts in its place
        """The full table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return a vector for each id."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return logits from the full table."""
        return self.inner.unembed(x)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the table's chunks."""
        return self.table.parts()

    def of_part(self, trained: PyTree, constants: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """Return the embedding with the rows of a chunk, and their ids."""
        return _replace_weight(self.inner, *self.table.gather_chunk(trained, constants))


class ChunkedHead(nn.ChunkedUnembedding, nn.LinearWrapper):
    """Wrapper of an output head that computes logits chunk by chunk."""

    inner: nn.DenseMap
    table: ShardedTable

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return logits from the full table."""
        return self.inner.product(x, dtype)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the table's chunks."""
        return self.table.parts()

    def of_part(self, trained: PyTree, constants: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """Return the head with the rows of a chunk, and their ids."""
        return _replace_weight(self.inner, *self.table.gather_chunk(trained, constants))


def _replace_weight(module: PyTree, rows: Array, ids: Array) -> tuple[nn.Module, Array]:
    return eqx.tree_at(lambda m: m.weight, module, rows), ids


def _look_up_forward(settings: LookupSettings, value: Array | None, table: Array, ids: Array) -> Array:
    dim, gather_dtype, rows, steps = settings
    values = table if value is None else value
    chunk_of_id, row_of_id = _locate_ids(values, dim, rows, ids)
    width = values.shape[1] * (jax.lax.axis_size(FSDP) if dim == 1 else 1)

    def look_up_in_chunk(x: Array, chunk_index_and_rows: tuple[Array, Array]) -> tuple[Array, None]:
        chunk_index, chunk = chunk_index_and_rows
        gathered = send.all_gather("weights over fsdp", chunk.astype(gather_dtype), FSDP, dim, steps=steps.gather)
        is_in_chunk = chunk_of_id == chunk_index
        vectors = gathered[jnp.where(is_in_chunk, row_of_id, 0)].astype(x.dtype)
        return jnp.where(is_in_chunk[..., None], vectors, x), None

    initial = vary_like(jnp.full((*ids.shape, width), jnp.nan, values.dtype), values, ids)
    chunks = _split_rows(values, rows)
    return jax.lax.scan(look_up_in_chunk, initial, (jnp.arange(len(chunks)), chunks))[0]


def _look_up_with_residuals(
    settings: LookupSettings, value: Array | None, table: Array, ids: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _look_up_forward(settings, value, table, ids), (table, ids)


def _look_up_backward(
    settings: LookupSettings, residuals: tuple[Array, Array], gradient: Array
) -> tuple[None, Array, None]:
    dim, _, rows, steps = settings
    table, ids = residuals
    chunk_of_id, row_of_id = _locate_ids(table, dim, rows, ids)
    count = rows * (jax.lax.axis_size(FSDP) if dim == 0 else 1)
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))

    def scatter_chunk(chunk_index: Array) -> Array:
        # For ids of other chunks, the row `count` is out of bounds, so that their gradients are dropped.
        row = jnp.where(chunk_of_id == chunk_index, row_of_id, count)
        zeros = vary_like(jnp.zeros((count, wide.shape[-1]), wide.dtype), wide, ids)
        partial_sum = zeros.at[row].add(wide, mode="drop")
        return send.psum_scatter("gradients over fsdp", partial_sum, FSDP, dim, steps=steps.scatter)

    chunks = jax.lax.map(scatter_chunk, jnp.arange(-(-len(table) // rows)))
    return None, chunks.reshape(-1, chunks.shape[-1])[: len(table)].astype(table.dtype), None


_look_up = jax.custom_vjp(_look_up_forward, nondiff_argnums=(0,))
_look_up.defvjp(_look_up_with_residuals, _look_up_backward)


def _split_rows(table: Array, rows: int) -> Float[Array, "chunks rows some_embed"]:
    """Split a device's slice into chunks of `rows` rows; the last chunk is padded with zeros."""
    padding = -len(table) % rows
    return (jnp.pad(table, [(0, padding), (0, 0)]) if padding else table).reshape(-1, rows, table.shape[1])


def _locate_ids(table: Array, dim: int, rows: int, ids: Array) -> tuple[Array, Array]:
    """Return for each id the index of its chunk (-1 if the id is outside of the table), and its row in this chunk.

    The row is counted in the gathered chunk, which has the rows of the first device, then the rows of the second, and
    so on.
    """
    slice_rows = len(table)
    # If devices hold slices of features (`dim` is 1), each has all rows, and `device` is 0 for all ids of the table.
    device, row_of_slice = ids // slice_rows, ids % slice_rows
    is_in_table = (ids >= 0) & (device < (jax.lax.axis_size(FSDP) if dim == 0 else 1))
    return jnp.where(is_in_table, row_of_slice // rows, -1), device * rows + row_of_slice % rows


class ChunkedTables(NamedTuple):
    """Uses of a model's vocabulary tables, and whether each is chunked."""

    ids: bool
    """Lookup of token embeddings."""
    logits: bool
    """Logits, from the head or from a tied table."""
    inputs: bool
    """Lookup of per-layer inputs."""


def chunked_tables(model: nn.LanguageModel) -> ChunkedTables:
    """Return which uses of tables to chunk if `fsdp` splits the tables; `model` may consist of shapes."""
    size, head = model.embedding.weight.size * 4, model.head  # bytes of the float32 gradient
    layer_inputs = model.parts.layer_inputs
    inputs = layer_inputs is not None and layer_inputs.embedding.weight.size * 4 > CHUNK_BYTES
    if model.parts.logit_bias is not None:  # A chunk of the logits would need its own chunk of the bias.
        return ChunkedTables(head is not None and size > CHUNK_BYTES, False, inputs)
    if head is None:
        return ChunkedTables(size > WHOLE_TIED_BYTES, size > WHOLE_TIED_BYTES, inputs)
    weight = _chunkable_weight(head)
    return ChunkedTables(size > CHUNK_BYTES, weight is not None and weight.size * 4 > WHOLE_HEAD_BYTES, inputs)


def _chunkable_weight(head: nn.LinearMap) -> ArrayOrShape | None:
    """Return the head's weight if logits of some ids can be computed from the rows of these ids alone, else None."""
    if not isinstance(head, nn.DenseMap) or head.products.operand_bits is not None or head.bias is not None:
        return None
    return head.weight


def round_to_tiles(rows: int, width: int) -> int:
    """Round the rows of a chunk up to whole tiles of TPUs, if there are at least 16 tiles of rows.

    A tile has 16 rows of 16 bits. If a tile had rows of two devices, XLA would copy the tile before sending rows. If
    `width` is no multiple of 128, XLA stores the table by columns, in tiles of 128 rows. A reduce-scatter of partial
    tiles would then send each device the full sum, and the device would keep a slice.
    """
    tile = 16 if width % 128 == 0 else 128
    return rows + -rows % tile if rows >= 16 * tile else rows


def with_chunked_tables(
    model: nn.LanguageModel,
    shards: nn.LanguageModel,
    parameters: PyTree,
    leaves: PyTree,
    shapes: nn.LanguageModel,
    steps: TorusSteps,
    *,
    has_tiles: bool,
) -> nn.LanguageModel:
    """Wrap embedding, head and per-layer inputs to use their tables in chunks, where `chunked_tables` says so.

    Args:
        model: The model with gathered arrays.
        shards: The model with this device's slices of the arrays.
        parameters: The arrays that receive gradients: slices, or gradient proxies for slices.
        leaves: The plan's `Leaf` of each array.
        shapes: Shapes of the unsplit model.
        steps: Steps in which chunks are gathered and scattered (`Placement.torus_steps`).
        has_tiles: Whether rows are stored in tiles, as on TPUs.
    """

    def shard_table(table_of: Callable[[PyTree], PyTree], gather_dtype: str) -> ShardedTable:
        value = table_of(shards)
        chunks, width = math.ceil(table_of(shapes).size * 4 / CHUNK_BYTES), table_of(shapes).shape[-1]
        rows = math.ceil(len(value) / chunks)
        rows = round_to_tiles(rows, width) if has_tiles else rows
        parameter, dim = table_of(parameters), table_of(leaves).fsdp_dim
        return ShardedTable(parameter, value if has_wider_grad(value) else None, dim, gather_dtype, rows, steps)

    ids_table, head_table = operator.attrgetter("embedding.weight"), operator.attrgetter("head.weight")
    inputs_table = operator.attrgetter("parts.layer_inputs.embedding.weight")
    chunked = chunked_tables(shapes)
    embedding, head, inputs = model.embedding, model.head, model.parts.layer_inputs
    if inputs is not None and chunked.inputs and inputs_table(leaves).fsdp_dim is not None:
        table = shard_table(inputs_table, inputs_table(leaves).gather_dtype)
        layer_embedding = ChunkedEmbedding(inputs.embedding, table)
        model = eqx.tree_at(lambda m: m.parts.layer_inputs.embedding, model, layer_embedding)
    if chunked.ids and ids_table(leaves).fsdp_dim is not None:
        table = shard_table(ids_table, ids_table(leaves).gather_dtype)
        embedding = ChunkedEmbedding(embedding, table)
        if chunked.logits and head is None:
            gather_dtype = narrower_dtype(model.compute_dtype, ids_table(leaves).dtype)
            embedding = ChunkedTiedEmbedding(embedding, shard_table(ids_table, gather_dtype))
    if chunked.logits and isinstance(head, nn.DenseMap) and head_table(leaves).fsdp_dim is not None:
        head = ChunkedHead(head, shard_table(head_table, head_table(leaves).gather_dtype))
    return eqx.tree_at(lambda m: (m.embedding, m.head), model, (embedding, head), is_leaf=lambda node: node is None)
