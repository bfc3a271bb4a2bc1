"""Large tables inside of layers, whose rows stay split over `fsdp` under `zero=3`.

No device gathers such a table or its gradient. If the number of `fsdp` devices does not divide the rows, the table is
not split, and each device holds all of it.
"""

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
from .tensor._vocabulary import lookup_local_rows


WHOLE_TABLE_BYTES = 2**30
"""Bytes of the float32 gradient of a layer's table up to which `Gathered` gathers the table.

The limit is high, because the bytes of a gathered table do not depend on the batch, but the bytes of exchanged vectors
grow with the tokens of all devices.
"""


class SplitTable(nn.Module):
    """Wrapper of a table inside of a layer, with this device's rows of the table.

    The devices of `fsdp` have different tokens. Each device receives the ids of all tokens, and looks up the vectors of
    the ids whose rows it holds; the vectors of other ids are zeros. A reduce-scatter adds up the vectors of all devices
    and returns to each device the vectors of its own tokens. In the backward pass, each device receives the gradients
    of all vectors, and sums the gradients of its rows. Vectors and their gradients are sent in `dtype`, and vectors are
    added up in the `steps` of `Placement.torus_steps`. A device holds the vectors of all devices' tokens at a time.
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
        vectors = lookup_local_rows(rows, all_ids, FSDP).astype(self.dtype)
        sums = send.psum_scatter("looked-up vectors over fsdp", vectors, FSDP, steps=self.steps.scatter)
        local_vectors = sums[0].astype(rows.dtype)
        is_in_table = (ids >= 0) & (ids < count * jax.lax.axis_size(FSDP))
        is_in_table = jax.lax.expand_dims(is_in_table, range(ids.ndim, local_vectors.ndim))
        return self.inner.transform(jnp.where(is_in_table, local_vectors, jnp.full_like(local_vectors, jnp.nan)))


def keeps_split(leaf: Leaf, size: int) -> bool:
    """Return whether the rows of a table inside of a layer stay split over `fsdp` while the layer runs.

    `leaf` is the plan's leaf of the stacked tables of all layers, and `size` is the number of elements of one layer's
    table on all `fsdp` devices together, after other axes have split it.
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
