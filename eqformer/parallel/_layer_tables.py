"""Large tables inside of layers (as of `nn.NGramMemory`), whose rows stay split over `fsdp` under `zero=3`.

No device gathers such a table or its gradient. If the number of `fsdp` devices does not divide the rows, each device
needs the whole table, and `summary` says so.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._shapes import count_pieces
from . import _collectives as send
from ._mesh import axes_by_dim, FSDP, TENSOR, TorusSteps
from ._placement import Leaf, Placement
from ._shard_map import vary_like
from .tensor._vocabulary import lookup_local_rows


WHOLE_TABLE_BYTES = 2**30
"""A layer's table whose float32 gradient has at most this many bytes is gathered (see `Gathered`).

The limit is high, because the bytes of a gathered table do not depend on the batch, but the bytes of exchanged vectors
grow with the tokens of all devices.
"""


EXCHANGED_BYTES = 2**28
"""Bytes of vectors up to which a device looks up the vectors of all devices' ids at once; more are looked up in
pieces."""


class SplitTable(nn.Module):
    """Wrapper of a table inside of a layer, with this device's rows of the table.

    The devices of `fsdp` have different tokens. Each device receives the ids of all tokens, and looks up the vectors of
    the ids whose rows it holds; the vectors of other ids are zeros. A reduce-scatter adds up the vectors of all devices
    and returns to each device the vectors of its own tokens. In the backward pass, each device receives the gradients
    of all vectors, and sums the gradients of its rows. Vectors and their gradients are sent in `dtype`, and vectors are
    added up in the `steps` of `Placement.torus_steps`.

    The vectors of all devices' ids would need a multiple of the memory of the device's own vectors. A loop therefore
    looks them up in pieces of at most `EXCHANGED_BYTES`, and receives their gradients in the same pieces.
    """

    inner: nn.EmbeddingTable
    dtype: str = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "..."]:
        """Return a vector for each id, NaN for an id outside of the table."""
        rows = self.inner.weight
        ids = vary_like(ids, rows)
        devices = jax.lax.axis_size(FSDP)
        all_ids = send.all_gather("table ids over fsdp", ids, FSDP, stacks=True)
        exchanged_bytes = devices * ids.size * math.prod(rows.shape[1:]) * rows.dtype.itemsize
        pieces = count_pieces(ids.size, exchanged_bytes, EXCHANGED_BYTES)
        ids_of_pieces = jnp.swapaxes(all_ids.reshape(devices, pieces, ids.size // pieces), 0, 1)
        vectors: Array = _exchange(self.dtype, self.steps, vary_like(rows, ids), ids_of_pieces)
        local_vectors = vectors.reshape(*ids.shape, *rows.shape[1:]).astype(rows.dtype)
        is_in_table = (ids >= 0) & (ids < len(rows) * devices)
        is_in_table = jax.lax.expand_dims(is_in_table, range(ids.ndim, local_vectors.ndim))
        return self.inner.transform(jnp.where(is_in_table, local_vectors, jnp.full_like(local_vectors, jnp.nan)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(
    dtype: str, steps: TorusSteps, rows: Float[Array, "rows *row"], ids: Int[Array, "pieces devices ids"]
) -> Float[Array, "pieces ids *row"]:
    """Return the vectors of this device's ids, given this device's rows and the ids of all devices.

    A derivative of the loop would make a dense gradient of the rows for each piece, so `_exchange_backward` adds the
    gradients of all pieces to one array.
    """
    return jax.lax.map(lambda ids: _sum_vectors(steps, lookup_local_rows(rows, ids, FSDP).astype(dtype)), ids)


def _sum_vectors(steps: TorusSteps, vectors: Float[Array, "devices ids *row"]) -> Float[Array, "ids *row"]:
    """Return the sums of all devices' vectors for this device's ids."""
    return send.psum_scatter("looked-up vectors over fsdp", vectors, FSDP, steps=steps.scatter)[0]


def _exchange_forward(
    dtype: str, steps: TorusSteps, rows: Float[Array, "rows *row"], ids: Int[Array, "pieces devices ids"]
) -> tuple[Float[Array, "pieces ids *row"], tuple[Array, Array]]:
    return _exchange(dtype, steps, rows, ids), (rows, ids)


def _exchange_backward(
    dtype: str, steps: TorusSteps, residuals: tuple[Array, Array], gradients: Float[Array, "pieces ids *row"]
) -> tuple[Float[Array, "rows *row"], None]:
    rows, ids = residuals
    vectors = vary_like(jnp.zeros((*ids.shape[1:], *rows.shape[1:]), dtype), rows)
    _, gather_gradients = jax.vjp(functools.partial(_sum_vectors, steps), vectors)

    def add_piece(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        piece_ids, piece_gradients = piece
        local_ids = piece_ids - jax.lax.axis_index(FSDP) * len(rows)
        # An index behind the end is dropped; a negative index would count from the end.
        indices = jnp.where(local_ids < 0, len(rows), local_ids)
        (all_gradients,) = gather_gradients(piece_gradients)
        return total.at[indices].add(all_gradients.astype(total.dtype), mode="drop"), None

    zeros = vary_like(jnp.zeros(rows.shape, nn.at_least_float32(rows.dtype)), rows)
    total, _ = jax.lax.scan(add_piece, zeros, (ids, gradients))
    return total.astype(rows.dtype), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def keeps_split(leaf: Leaf, size: int) -> bool:
    """Return whether the rows of a table inside of a layer stay split over `fsdp` while the layer runs.

    `leaf` is the plan's leaf of the stacked tables of all layers, and `size` is the number of elements of one layer's
    table on all `fsdp` devices together, after other axes have split it.
    """
    is_split_by_rows = leaf.fsdp_dim == 1  # Dim 0 is the dim of layers.
    return is_split_by_rows and size * 4 > WHOLE_TABLE_BYTES


def describe_whole_tables(plan: Placement, model: nn.LanguageModel) -> list[str]:
    """Return a phrase for each large table of layers that a plan leaves whole on each device of an axis."""
    specs = plan.parameter_specs(model)
    phrases: dict[str, None] = {}
    for table, spec in zip(*(nn.modules(tree.stacks, nn.EmbeddingTable) for tree in (model, specs)), strict=True):
        rows, axes = table.weight.shape[1], axes_by_dim(spec.weight)
        is_over_tensor = any(TENSOR in dim_axes for dim_axes in axes)
        table_bytes = math.prod(table.weight.shape[1:]) * 4
        gradient_bytes = table_bytes // (plan.size(TENSOR) if is_over_tensor else 1)
        if plan.zero == 3 and plan.size(FSDP) > 1 and FSDP not in axes[1] and gradient_bytes > WHOLE_TABLE_BYTES:
            phrases[f"a layer's table whole on each device, because fsdp does not divide its {rows} rows"] = None
        if plan.size(TENSOR) > 1 and not is_over_tensor and table_bytes > WHOLE_TABLE_BYTES:
            phrases[f"a layer's table of {rows} rows not split over tensor"] = None
    return list(phrases)


def split_tables(blocks: PyTree, leaves: PyTree, steps: TorusSteps) -> tuple[PyTree, list[Leaf]]:
    """Wrap the large tables of a stack's blocks; return the blocks, and the leaves of the wrapped tables.

    `blocks` may be wrapped for other axes. `leaves` has the structure of the blocks before any wrapping, with the same
    tables in the same order. `steps` has the meaning of `SplitTable.steps`.
    """
    table_leaves = iter(nn.modules(leaves, nn.EmbeddingTable))
    split: list[Leaf] = []

    def wrap(table: nn.EmbeddingTable) -> PyTree:
        leaf = next(table_leaves).weight
        if not keeps_split(leaf, math.prod(table.weight.shape[1:]) * jax.lax.axis_size(FSDP)):
            return table
        split.append(leaf)
        return SplitTable(table, leaf.gather_dtype, steps)

    return nn.map_modules(wrap, blocks, nn.EmbeddingTable), split
