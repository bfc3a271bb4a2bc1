"""Which blocks the programs of TPUs' kernel for caches read, and what that comes to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from ..cache_write._tpu import is_turned
from ._call import if_given


class Part(NamedTuple):
    """Some channels of queries and keys."""

    query: Float[Array, "rows group head_dim"]
    key: Num[Array, "layers rows kv_seq head_dim"]
    scales: Float[Array, "rows 1 kv_seq"] | Float[Array, "layers batch kv_heads kv_seq"] | None
    """Of a row, or of all its heads in a stack's own array."""


class Given(NamedTuple):
    """Arrays that the kernel reads; a row is one of the batch and a key head."""

    visible: Bool[Array, "batch 1 kv_seq"] | Int[Array, "batch 1 kv_seq"]
    parts: list[Part]
    value: Num[Array, "layers rows kv_seq v_dim"] | None
    """None: the first keys."""
    value_scales: Float[Array, "rows 1 kv_seq"] | Float[Array, "layers batch kv_heads kv_seq"] | None
    sinks: Float[Array, "rows group 1"] | None


class Seen(NamedTuple):
    """Scalars that are prefetched: the layer, and the first and the last visible block of each row of the batch."""

    layer: Int[Array, "1"]
    first: Int[Array, "batch"]
    last: Int[Array, "batch"]


class Sizes(NamedTuple):
    """Slots of a block and of a row, key heads, and channels of values."""

    block: int
    kv_seq: int
    kv_heads: int
    v_dim: int


def seen_of(visible: Bool[Array, "batch kv_seq"], layer: Int[Array, ""], block: int) -> Seen:
    """Return the prefetched scalars. Rows whose query attends to nothing read block 0, which is fully masked."""
    slots = jnp.arange(visible.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(visible, slots, 0), axis=1)
    first = jnp.min(jnp.where(visible, slots, last[:, None]), axis=1)
    return Seen(layer[None], first // block, last // block)


def laid(x: Num[Array, "layers rows kv_seq width"]) -> Num[Array, "layers rows _ _"]:
    """Return memories in the order in which TPU compilers store them, so that nothing is copied."""
    return x.swapaxes(-2, -1) if is_turned(*x.shape[-2:]) else x


def specs_of(sizes: Sizes, given: Given) -> Any:
    """Return the block of each array that a program reads, of memories in the order of `laid`."""
    from jax.experimental import pallas as pl

    def of_block(row: Any, number: Any, seen: Seen) -> Any:
        row = jax.lax.div(row, sizes.kv_heads)
        return jnp.minimum(jnp.maximum(number, seen.first[row]), seen.last[row])

    def spec(shape: tuple, index: Callable[[Any, Any, Seen], tuple]) -> Any:
        return pl.BlockSpec(shape, lambda row, number, *seen: index(row, number, Seen(*seen)))

    def layer(x: Array, seen: Seen) -> Any:
        return jnp.minimum(seen.layer[0], x.shape[0] - 1)  # what is of no stack has one

    def memory(x: Array, width: int) -> Any:
        if is_turned(sizes.kv_seq, width):
            its = lambda row, number, seen: (layer(x, seen), row, 0, of_block(row, number, seen))
            return spec((None, None, width, sizes.block), its)
        its = lambda row, number, seen: (layer(x, seen), row, of_block(row, number, seen), 0)
        return spec((None, None, sizes.block, width), its)

    def line(heads: int) -> Any:
        return spec(
            (None, 1, sizes.block), lambda row, number, seen: (jax.lax.div(row, heads), 0, of_block(row, number, seen))
        )

    own = lambda x: spec((None, *x.shape[1:]), lambda row, *_: (row, 0, 0))

    def scales(x: Array | None) -> Any:
        if x is None or x.ndim == 3:
            return if_given(lambda _: line(1), x)
        its = lambda row, number, seen: (layer(x, seen), jax.lax.div(row, sizes.kv_heads), 0, 0)
        return spec((None, None, *x.shape[2:]), its)

    part = lambda one: Part(own(one.query), memory(one.key, one.query.shape[-1]), scales(one.scales))
    value = if_given(lambda x: memory(x, sizes.v_dim), given.value)
    parts = [part(one) for one in given.parts]
    return Given(line(sizes.kv_heads), parts, value, scales(given.value_scales), if_given(own, given.sinks))


def cost_of(sizes: Sizes, seen: Seen, given: Given, result: Any) -> Any:
    """Return the costs of a call whose queries see all slots: each array of the layer is read once, the mask by heads.

    XLA schedules by this estimate, and analyses of compiled programs count it.
    """
    from jax.experimental import pallas as pl

    rows, group, v_dim = result.shape
    scales = [given.value_scales, *(part.scales for part in given.parts)]
    index_layer = [
        x for x in (*(part.key for part in given.parts), given.value, *scales) if x is not None and x.ndim == 4
    ]
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((seen, given, result)))
    read -= sum((x.shape[0] - 1) * x.size // x.shape[0] * x.dtype.itemsize for x in index_layer)
    again = sizes.kv_heads - 1 if sizes.block < sizes.kv_seq else 0
    read += again * given.visible.size * given.visible.dtype.itemsize
    scores, channels = rows * group * sizes.kv_seq, sum(part.query.shape[-1] for part in given.parts) + v_dim
    return pl.CostEstimate(flops=2 * scores * channels, transcendentals=scores, bytes_accessed=read)
