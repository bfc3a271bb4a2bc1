"""Large tables inside of layers, whose rows stay split over `fsdp`: no device gathers a table or its gradient."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from . import _collectives as send
from ._mesh import FSDP, TorusSteps
from ._placement import Leaf
from ._shard_map import vary_like


WHOLE_TABLE_BYTES = 2**30
"""Bytes of the float32 gradient of a layer's table up to which `Gathered` gathers the table.

The limit is high, because devices that exchange vectors send more bytes for each token that another device has.
"""


class SplitTable(nn.Module):
    """Wrapper of a table inside of a layer, with this device's rows of the table.

    The devices of `fsdp` have different tokens. Each device receives the ids of all tokens and looks up the ids of its
    rows, with zeros for other ids. A reduce-scatter adds up the vectors of all devices and returns the vectors of each
    device's tokens. Its transpose gathers the gradients of the vectors, so each device sums the gradients of its rows
    over the tokens of all devices. Vectors are sent in `dtype`, and added up in the `steps` of
    `Placement.torus_steps`.
    """

    inner: nn.EmbeddingTable
    dtype: str = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "..."]:
        """Return a vector for each id, NaN for an id outside of the table."""
        rows = self.inner.weight
        count = len(rows)
        ids = vary_like(ids, rows)
        all_ids = send.all_gather("table ids over fsdp", ids, FSDP, stacks=True)
        local_ids = all_ids - jax.lax.axis_index(FSDP) * count
        # The lookup returns NaN for rows of other devices, and drops the gradients of these vectors.
        vectors = nn.lookup_rows(rows, local_ids).astype(self.dtype)
        is_local = _expand((local_ids >= 0) & (local_ids < count), vectors)
        vectors = jnp.where(is_local, vectors, jnp.zeros_like(vectors))
        sums = send.psum_scatter("looked-up vectors over fsdp", vectors, FSDP, steps=self.steps.scatter)
        local_vectors = sums[0].astype(rows.dtype)
        is_in_table = _expand((ids >= 0) & (ids < count * jax.lax.axis_size(FSDP)), local_vectors)
        return self.inner.transform(jnp.where(is_in_table, local_vectors, jnp.full_like(local_vectors, jnp.nan)))


def _expand(flags: Array, vectors: Array) -> Array:
    """Append dims of size 1 to the flags of vectors, so that a flag is broadcast over its vector."""
    return flags.reshape(*flags.shape, *(1,) * (vectors.ndim - flags.ndim))


def keeps_split(leaf: Leaf, size: int) -> bool:
    """Return whether the rows of a table inside of a layer stay split over `fsdp` while the layer runs.

    `leaf` is the plan's leaf of the stacked tables of all layers, and `size` is the number of elements of one layer's
    table, before `fsdp` splits it.
    """
    is_split_by_rows = leaf.fsdp_dim == 1  # Dim 0 is the dim of layers.
    return is_split_by_rows and size * 4 > WHOLE_TABLE_BYTES


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
