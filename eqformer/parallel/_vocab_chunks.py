"""Vocabulary tables that `fsdp` splits, chunk by chunk: no device ever holds a whole table, or its whole gradient."""

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
"""Bytes of a chunk's float32 gradient."""
WHOLE_HEAD_BYTES = 2**30
"""Bytes of a head's float32 gradient up to which logits are not chunked, since chunks take one more matmul."""
WHOLE_TIED_BYTES = 2**32
"""As `WHOLE_HEAD_BYTES`, for a table of both ids and logits: in chunks it is gathered and scattered for each use."""

LookupSettings = tuple[int, str, int, TorusSteps]
"""Fields of a `ShardedTable`: `dim`, `gather_dtype`, `rows` and `steps`."""


class ShardedTable(nn.Module):
    """A table of which this device holds a slice along `dim`; a chunk is `rows` rows of every device's slice.

    `slice` may be a gradient proxy for `value`. Chunks are gathered in `gather_dtype`. Their gradients are summed over
    tokens and devices in float32 at least.
    """

    slice: Float[Array, "some_vocab some_embed"]
    value: Float[Array, "some_vocab some_embed"] | None
    dim: int = eqx.field(static=True)
    gather_dtype: str = eqx.field(static=True)
    rows: int = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True)

    def lookup_rows(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return one vector for each id; NaN for an id outside the table."""
        value = None if self.value is None else vary_like(self.value, self.slice)
        settings = (self.dim, self.gather_dtype, self.rows, self.steps)
        return _look_up(settings, value, self.slice, ids)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the arguments of `gather_chunk`, with a dim of chunks in front: first the differentiated ones."""
        chunks = _split_rows(self.slice, self.rows)
        values = None if self.value is None else _split_rows(self.value, self.rows)
        return chunks, (jnp.arange(len(chunks)), values)

    def gather_chunk(
        self, chunk: Array, number_and_value: tuple[Array, Array | None]
    ) -> tuple[Array, Int[Array, "part"]]:
        """Return the rows of a chunk, in float32 at least, and the id of each: -1 for rows that pad the last chunk."""
        number, value = number_and_value
        wide = str(nn.at_least_float32(chunk.dtype))
        rows = gather(chunk, self.dim, self.gather_dtype, value, self.steps, wide)
        index = jnp.arange(len(rows))
        slice_rows, device = len(self.slice), index // self.rows
        row_of_slice = number * self.rows + index % self.rows
        return rows, jnp.where(row_of_slice < slice_rows, device * slice_rows + row_of_slice, -1)


class ChunkedEmbedding(nn.Module):
    """An embedding, `inner`, that looks vectors up chunk by chunk, so that no device gathers the whole table."""

    inner: nn.EmbeddingTable
    table: ShardedTable

    @property
    def weight(self) -> PyTree:  # an array, or the leaf that `tree_at` puts in its place
        """The whole table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "..."]:
        """Look up one vector for each id."""
        return self.inner.transform(self.table.lookup_rows(ids))

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return logits by the whole table."""
        return nn.unembed(x, self.weight)


class ChunkedTiedEmbedding(nn.ChunkedUnembedding):
    """An embedding, `inner`, whose table also computes logits, chunk by chunk."""

    inner: ChunkedEmbedding
    table: ShardedTable

    @property
    def weight(self) -> PyTree:  # an array, or the leaf that `tree_at` puts in its place
        """The whole table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a token."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return logits by the whole table."""
        return self.inner.unembed(x)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the table's chunks."""
        return self.table.parts()

    def of_part(self, moving: PyTree, rest: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """Return the embedding with the rows of a chunk, and their ids."""
        return _replace_weight(self.inner, *self.table.gather_chunk(moving, rest))


class ChunkedHead(nn.ChunkedUnembedding, nn.LinearWrapper):
    """An output head, `inner`, that computes logits chunk by chunk."""

    inner: nn.DenseMap
    table: ShardedTable

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return logits by the whole table."""
        return self.inner.product(x, dtype)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Return the table's chunks."""
        return self.table.parts()

    def of_part(self, moving: PyTree, rest: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """Return the head with the rows of a chunk, and their ids."""
        return _replace_weight(self.inner, *self.table.gather_chunk(moving, rest))


def _replace_weight(module: PyTree, rows: Array, ids: Array) -> tuple[nn.Module, Array]:
    return eqx.tree_at(lambda m: m.weight, module, rows), ids


def _look_up_forward(settings: LookupSettings, value: Array | None, table: Array, ids: Array) -> Array:
    dim, gather_dtype, rows, steps = settings
    values = table if value is None else value
    chunk_of_id, row_of_id = _locate_ids(values, dim, rows, ids)
    width = values.shape[1] * (jax.lax.axis_size(FSDP) if dim == 1 else 1)

    def look_up_in_chunk(x: Array, numbered_chunk: tuple[Array, Array]) -> tuple[Array, None]:
        number, chunk = numbered_chunk
        gathered = send.all_gather("weights over fsdp", chunk.astype(gather_dtype), FSDP, dim, steps=steps.gather)
        is_in_chunk = chunk_of_id == number
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

    def scatter_chunk(number: Array) -> Array:
        # The row behind the last one is out of bounds, so that its summand is dropped.
        row = jnp.where(chunk_of_id == number, row_of_id, count)
        zeros = vary_like(jnp.zeros((count, wide.shape[-1]), wide.dtype), wide, ids)
        partial_sum = zeros.at[row].add(wide, mode="drop")
        return send.psum_scatter("gradients over fsdp", partial_sum, FSDP, dim, steps=steps.scatter)

    chunks = jax.lax.map(scatter_chunk, jnp.arange(-(-len(table) // rows)))
    return None, chunks.reshape(-1, chunks.shape[-1])[: len(table)].astype(table.dtype), None


_look_up = jax.custom_vjp(_look_up_forward, nondiff_argnums=(0,))
_look_up.defvjp(_look_up_with_residuals, _look_up_backward)


def _split_rows(table: Array, rows: int) -> Float[Array, "chunks rows some_embed"]:
    """Split a device's slice into chunks of `rows` rows; the last is padded with zeros."""
    padding = -len(table) % rows
    return (jnp.pad(table, [(0, padding), (0, 0)]) if padding else table).reshape(-1, rows, table.shape[1])


def _locate_ids(table: Array, dim: int, rows: int, ids: Array) -> tuple[Array, Array]:
    """Return the chunk of each id's row, -1 for an id outside the table, and the row in the gathered chunk."""
    slice_rows = len(table)
    # Where devices hold slices of features, each device has all rows, and the device's index is 0.
    device, row_of_slice = ids // slice_rows, ids % slice_rows
    is_in_table = (ids >= 0) & (device < (jax.lax.axis_size(FSDP) if dim == 0 else 1))
    return jnp.where(is_in_table, row_of_slice // rows, -1), device * rows + row_of_slice % rows


class ChunkedTables(NamedTuple):
    """Uses of a model's tables that are chunked: lookups of ids, logits, and lookups of layers' inputs."""

    ids: bool
    logits: bool
    inputs: bool


def chunked_tables(model: nn.LanguageModel) -> ChunkedTables:
    """Return the uses of tables that are chunked in a model, or its shapes, if `fsdp` splits the tables."""
    size, head = model.embedding.weight.size * 4, model.head
    layer_inputs = model.parts.layer_inputs
    inputs = layer_inputs is not None and layer_inputs.embedding.weight.size * 4 > CHUNK_BYTES
    if model.parts.logit_bias is not None:  # A chunk of the logits would need its own chunk of the bias.
        return ChunkedTables(head is not None and size > CHUNK_BYTES, False, inputs)
    if head is None:
        return ChunkedTables(size > WHOLE_TIED_BYTES, size > WHOLE_TIED_BYTES, inputs)
    weight = _chunkable_weight(head)
    return ChunkedTables(size > CHUNK_BYTES, weight is not None and weight.size * 4 > WHOLE_HEAD_BYTES, inputs)


def _chunkable_weight(head: nn.LinearMap) -> ArrayOrShape | None:
    """Return the weight of a head that can compute the logits of some ids from these ids' rows alone, else None."""
    if not isinstance(head, nn.DenseMap) or head.products.operand_bits is not None or head.bias is not None:
        return None
    return head.weight


def round_to_tiles(rows: int, width: int) -> int:
    """Round many rows of a chunk up to whole tiles of TPUs, 16 rows of 16 bits; return few rows as they are.

    Tiles that two devices share are copied before rows are sent. A table whose vectors do not fill whole lanes is laid
    out by columns, in tiles of 128 rows; with fewer rows each device would be sent the whole sum and keep a slice.
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
    """Replace the large vocabulary tables that `fsdp` splits by chunked ones, in a model whose arrays are gathered.

    Args:
        model: The model with gathered arrays.
        shards: The model with this device's slices.
        parameters: The differentiated arrays: slices, or gradient proxies for them.
        leaves: The plan's `Leaf` of each array.
        shapes: Shapes of the whole model.
        steps: Steps in which chunks are gathered and scattered (`Placement.torus_steps`).
        has_tiles: Whether devices keep rows in tiles, as TPUs do.
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
