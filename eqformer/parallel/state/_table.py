"""Tables of the vocabulary that `fsdp` splits, part by part: neither they nor their gradients are ever whole."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from .. import _send as send
from .._axes import FSDP
from .._vary import vary_like
from ..layouts._devices import Steps
from ._leaves import narrower
from ._stand_ins import gather, is_narrow


PART = 2**27  # bytes of a part's float32 gradient
# Bytes of a whole table's float32 gradient up to which it gives logits whole: in parts these take one product more. And
# of one table for ids and logits, which in parts is gathered and scattered for either.
LOGITS, TIED = 2**30, 2**32


class SlicedTable(nn.Module):
    """A table of which this device holds a slice along `dim`; a part of it is so many `rows` of every device's slice.

    `slice` may be a stand-in for `value`. Parts are sent in the dtype `sent`, and their gradients are summed over
    tokens and devices in float32 at least.
    """

    slice: Float[Array, "some_vocab some_embed"]
    value: Float[Array, "some_vocab some_embed"] | None
    dim: int = eqx.field(static=True)
    sent: str = eqx.field(static=True)
    rows: int = eqx.field(static=True)
    steps: Steps = eqx.field(static=True)

    def lookup_rows(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """One vector for each id; NaN for an id outside the table."""
        value = None if self.value is None else vary_like(self.value, self.slice)
        rest = (self.dim, self.sent, self.rows, self.steps)
        return _look_up(rest, value, self.slice, ids)

    def parts(self) -> tuple[PyTree, PyTree]:
        """What has gradients and what has none of each part, as `whole_part` takes it, with a dim of parts in front."""
        pieces = _cut(self.slice, self.rows)
        values = None if self.value is None else _cut(self.value, self.rows)
        return pieces, (jnp.arange(len(pieces)), values)

    def whole_part(self, piece: Array, rest: tuple[Array, Array | None]) -> tuple[Array, Int[Array, "part"]]:
        """The rows of a part, in float32 at least, and the id of each, -1 for those that fill the last part up."""
        number, value = rest
        wide = str(nn.at_least_float32(piece.dtype))
        whole = gather(piece, self.dim, self.sent, value, self.steps, wide)
        place = jnp.arange(len(whole))
        own, device, within = len(self.slice), place // self.rows, number * self.rows + place % self.rows
        return whole, jnp.where(within < own, device * own + within, -1)


class EmbeddingInParts(nn.Module):
    """An embedding that looks vectors up in a table in parts; its `weight`, which no lookup reads, is whole."""

    weight: Float[Array, "vocab embed"]
    table: SlicedTable
    scale: float | None = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a token."""
        x = self.table.lookup_rows(ids)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits by the whole table."""
        return nn.unembed(x, self.weight)


class LayerEmbeddingInParts(nn.Module):
    """A `LayerEmbedding`, `inner`, that looks the vectors of all layers up at once in a table in parts."""

    inner: nn.LayerEmbedding
    table: SlicedTable

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq depth mlp"]:
        """Look up a token's vectors for all layers."""
        return self.inner.by_layers(self.table.lookup_rows(ids))


class TiedInParts(nn.ChunkedUnembedding):
    """An embedding, `inner`, whose table gives logits in parts."""

    inner: nn.Embedding | EmbeddingInParts
    table: SlicedTable

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """The whole table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a token."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits by the whole table."""
        return self.inner.unembed(x)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Those of the table."""
        return self.table.parts()

    def of_part(self, moving: PyTree, rest: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """The embedding with the rows of a part."""
        return _with_rows(self.inner, *self.table.whole_part(moving, rest))


class HeadInParts(nn.ChunkedUnembedding, nn.LinearWrapper):
    """A head, `inner`, that gives logits in parts."""

    inner: nn.Linear
    table: SlicedTable

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Logits by the whole table."""
        return self.inner.product(x, dtype)

    def parts(self) -> tuple[PyTree, PyTree]:
        """Those of the table."""
        return self.table.parts()

    def of_part(self, moving: PyTree, rest: PyTree) -> tuple[nn.Module, Int[Array, "part"]]:
        """The head with the rows of a part."""
        return _with_rows(self.inner, *self.table.whole_part(moving, rest))


def _with_rows(inner: PyTree, rows: Array, ids: Array) -> tuple[nn.Module, Array]:
    return eqx.tree_at(lambda m: m.weight, inner, rows), ids


def _look_up_plainly(rest: tuple, value: Array | None, table: Array, ids: Array) -> Array:
    dim, sent, rows, steps = rest
    held = table if value is None else value
    part_of, row_of = _places(held, dim, rows, ids)
    width = held.shape[1] * (jax.lax.axis_size(FSDP) if dim == 1 else 1)

    def add(x: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        number, piece = given
        whole = send.all_gather("parameters over fsdp", piece.astype(sent), FSDP, dim, steps=steps.gather)
        is_there = part_of == number
        found = whole[jnp.where(is_there, row_of, 0)].astype(x.dtype)
        return jnp.where(is_there[..., None], found, x), None

    nothing = vary_like(jnp.full((*ids.shape, width), jnp.nan, held.dtype), held, ids)
    pieces = _cut(held, rows)
    return jax.lax.scan(add, nothing, (jnp.arange(len(pieces)), pieces))[0]


def _look_up_backward(rest: tuple, saved: tuple[Array, Array], gradient: Array) -> tuple[None, Array, None]:
    dim, _, rows, steps = rest
    table, ids = saved
    part_of, row_of = _places(table, dim, rows, ids)
    count = rows * (jax.lax.axis_size(FSDP) if dim == 0 else 1)
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))

    def of_part(number: Array) -> Array:
        row = jnp.where(part_of == number, row_of, count)  # behind the last: left out
        zeros = vary_like(jnp.zeros((count, wide.shape[-1]), wide.dtype), wide, ids)
        whole = zeros.at[row].add(wide, mode="drop")
        return send.psum_scatter("gradients over fsdp", whole, FSDP, dim, steps=steps.scatter)

    found = jax.lax.map(of_part, jnp.arange(-(-len(table) // rows)))
    return None, found.reshape(-1, found.shape[-1])[: len(table)].astype(table.dtype), None


_look_up = jax.custom_vjp(_look_up_plainly, nondiff_argnums=(0,))
_look_up.defvjp(lambda *given: (_look_up_plainly(*given), given[-2:]), _look_up_backward)


def _cut(held: Array, rows: int) -> Float[Array, "parts rows some_embed"]:
    """A device's slice in pieces of so many rows; the last is filled up with zeros."""
    spare = -len(held) % rows
    return (jnp.pad(held, [(0, spare), (0, 0)]) if spare else held).reshape(-1, rows, held.shape[1])


def _places(held: Array, dim: int, rows: int, ids: Array) -> tuple[Array, Array]:
    """In which part each id's row is, -1 for an id outside the table, and where in the gathered part."""
    own = len(held)
    device, within = ids // own, ids % own  # where devices hold slices of features, each has all rows
    is_there = (ids >= 0) & (device < (jax.lax.axis_size(FSDP) if dim == 0 else 1))
    return jnp.where(is_there, within // rows, -1), device * rows + within % rows


class InParts(NamedTuple):
    """Which uses of a model's tables are in parts."""

    ids: bool
    logits: bool
    inputs: bool


def in_parts(model: nn.Transformer) -> InParts:
    """What a large model, or one of shapes, does in parts where `fsdp` splits its tables."""
    size, head = model.embedding.weight.size * 4, model.head
    inputs = model.layer_inputs is not None and model.layer_inputs.embedding.weight.size * 4 > PART
    if model.logit_bias is not None:  # a part of the logits would need its own part of it
        return InParts(head is not None and size > PART, False, inputs)
    if head is None:
        return InParts(size > TIED, size > TIED, inputs)
    is_large = isinstance(head, nn.Linear) and head.bias is None and head.weight.size * 4 > LOGITS
    return InParts(size > PART, is_large, inputs)


def rows_in_tiles(rows: int, width: int) -> int:
    """Rows of a part, or a few more where they are many: whole tiles of TPUs, 16 rows of 16 bits.

    Tiles that two devices share are copied before rows are sent. Of vectors that fill no whole lanes, laid out by
    columns there, a tile has 128 rows: else each device is sent the whole sum, of which it keeps a part.
    """
    tile = 16 if width % 128 == 0 else 128
    return rows + -rows % tile if rows >= 16 * tile else rows


def with_tables_in_parts(
    model: nn.Transformer,
    whole: nn.Transformer,
    parameters: PyTree,
    leaves: PyTree,
    shapes: nn.Transformer,
    steps: Steps,
    *,
    has_tiles: bool,
) -> nn.Transformer:
    """A model whose arrays are gathered, with its large tables of the vocabulary in parts where `fsdp` splits them.

    Args:
        model: The model with gathered arrays.
        whole: It with this device's slices.
        parameters: What is differentiated, slices or their stand-ins.
        leaves: What the plan decides of each array.
        shapes: Those of the whole model.
        steps: In which parts are gathered and scattered (`Plan.torus_steps`).
        has_tiles: Whether devices keep rows in tiles, as TPUs do.
    """

    def sliced(of: Callable[[PyTree], Any], sent: str) -> SlicedTable:
        value = of(whole)
        parts, width = math.ceil(of(shapes).size * 4 / PART), of(shapes).shape[-1]
        rows = math.ceil(len(value) / parts)
        rows = rows_in_tiles(rows, width) if has_tiles else rows
        held, dim = of(parameters), of(leaves).fsdp_dim
        return SlicedTable(held, value if is_narrow(value) else None, dim, sent, rows, steps)

    of_ids, of_head, is_in = lambda m: m.embedding.weight, lambda m: m.head.weight, in_parts(shapes)
    of_inputs = lambda m: m.layer_inputs.embedding.weight
    embedding, head, inputs = model.embedding, model.head, model.layer_inputs
    if inputs is not None and is_in.inputs and of_inputs(leaves).fsdp_dim is not None:
        each = LayerEmbeddingInParts(inputs.embedding, sliced(of_inputs, of_inputs(leaves).sent))
        model = eqx.tree_at(lambda m: m.layer_inputs.embedding, model, each)
    if is_in.ids and of_ids(leaves).fsdp_dim is not None:
        embedding = EmbeddingInParts(embedding.weight, sliced(of_ids, of_ids(leaves).sent), embedding.scale)
        if is_in.logits and head is None:
            embedding = TiedInParts(embedding, sliced(of_ids, narrower(model.compute_dtype, of_ids(leaves).dtype)))
    if is_in.logits and isinstance(head, nn.Linear) and of_head(leaves).fsdp_dim is not None:
        head = HeadInParts(head, sliced(of_head, of_head(leaves).sent))
    return eqx.tree_at(lambda m: (m.embedding, m.head), model, (embedding, head), is_leaf=lambda node: node is None)
