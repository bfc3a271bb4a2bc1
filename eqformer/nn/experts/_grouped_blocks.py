"""`grouped` without kernels: as many rows of each group as even loads have at once, the rest in blocks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .._dtype import add_float32, at_least_float32
from .._linear import dense, DenseMap, linear_maps, LinearMap
from .._matmul_precision import ComputeDtypeMatmul, MatmulPrecision
from ._linear_replay import map_linears, Maps, Parameters, recorded, replayed, zero_of


Carry = TypeVar("Carry")
LEAST = 16  # rows a group by even loads, from which on groups are computed together


def blocked(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    even: int | None = None,
    most: int | None = None,
) -> Array:
    """The rows' outputs. What nobody keeps may take more room: a quarter more slots, which few loads overflow."""
    even = even_load(sizes, len(x), even)
    number = even * 5 // 4 if even >= LEAST else 0
    return outputs(static, arrays, x, sizes, Slots(sizes, len(x), number, even, most))[0]


def blocked_forward(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, *, even: int | None = None, most: int | None = None
) -> tuple[Array, list[Array]]:
    """The rows' outputs, and what the modules' linear maps gave of the rows in slots, as `Slots.flat` has it."""
    return outputs(static, arrays, x, sizes, Slots(sizes, len(x), even=even, most=most))


def outputs(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, slots: "Slots", maps: Maps | None = None
) -> tuple[Array, list[Array]]:
    """What `blocked_forward` gives, with these slots, in which linear maps are computed by `maps`."""
    of_rows = lambda arrays, x: recorded(eqx.combine(arrays, static), x, WHOLE if maps is None else maps)
    shapes = jax.eval_shape(of_rows, jax.tree.map(lambda a: a[0], arrays), x[:1])
    zero = zero_of(arrays, x, sizes)
    nothing = jax.tree.map(lambda s: jnp.full((len(x), *s.shape[1:]), zero.astype(s.dtype)), shapes)
    if not len(x):
        return nothing

    def together() -> tuple[Array, list[Array]]:
        y, kept = jax.vmap(of_rows)(arrays, slots.filled(x))
        return slots.rows(y), list(map(slots.flat, kept))

    y, kept = slots.used(together, nothing)

    def group(number: Array, y: Array) -> Array:
        module = map_linears(dense, eqx.combine(_of_group(arrays, number), static))  # decoded once for all its blocks

        def block(start: Array, size: int, is_own: Array | None, y: Array) -> Array:
            return _written(y, module(jax.lax.dynamic_slice_in_dim(x, start, size)), start, is_own)

        return _over_blocks(block, y, *slots.rest(number), len(x), slots.even)

    return slots.over_rests(group, y), kept


def blocked_backward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    kept: Sequence[Array],
    gradient: Array,
    *,
    even: int | None = None,
    most: int | None = None,
) -> tuple[PyTree, Array]:
    """The gradients of the parameters and of the rows; `kept` ends in the output."""
    zero, slots = zero_of((arrays, kept, gradient), x, sizes), Slots(sizes, len(x), even=even, most=most)
    wide = jax.tree.map(lambda a: a.astype(at_least_float32(a.dtype)), arrays)
    nothing = jax.tree.map(lambda a: jnp.full(a.shape, zero.astype(a.dtype)), wide), jnp.full(x.shape, zero)

    def together() -> tuple[PyTree, Array]:
        def one(own: PyTree, x: Array, kept: list[Array], gradient: Array) -> tuple[PyTree, Array]:
            again = lambda own, x: replayed(eqx.combine(own, static), x, WHOLE, kept)
            return jax.vjp(again, own, x)[1](gradient)

        *inner, y = kept
        known = [*map(slots.stacked, inner), slots.filled(y)]
        to_arrays, to_x = jax.vmap(one)(wide, slots.filled(x), known, slots.filled(gradient))
        return to_arrays, slots.rows(to_x)

    def group(number: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        own, module = _of_group(wide, number), lambda own, x: eqx.combine(own, static)(x)

        def block(start: Array, size: int, is_own: Array | None, carry: tuple) -> tuple:
            totals, to_x = carry
            more, to_piece = jax.vjp(module, own, _cut(x, start, size, is_own))[1](_cut(gradient, start, size, is_own))
            totals = jax.tree.map(lambda total, more: _added(total, more, number), totals, more)
            return totals, _written(to_x, to_piece, start, is_own)

        return _over_blocks(block, carry, *slots.rest(number), len(x), slots.even)

    found = slots.used(together, nothing)
    to_arrays, to_x = slots.over_rests(group, found) if len(x) else found
    return jax.tree.map(lambda total, a: total.astype(a.dtype), to_arrays, arrays), to_x


def even_load(sizes: Int[Array, "groups"], rows: int, even: int | None) -> int:
    """How many rows a group has with an even load: those that are said, or an equal share."""
    return rows // len(sizes) if even is None else even


class Slots:
    """The number of slots for each group: by default the rows of an `even` load, by default of all rows; 0 if few.

    The first rows of each group are computed in its slots, all groups in one batched product, which copies no
    parameters; the other rows are computed after that. Slots are not used if loads are so uneven that a quarter of the
    rows would be left over. If no group has more than `most` rows, there are so many slots and no other rows.
    """

    number: int
    even: int
    are_used: Bool[Array, ""]

    def __init__(
        self,
        sizes: Int[Array, "groups"],
        rows: int,
        number: int | None = None,
        even: int | None = None,
        most: int | None = None,
    ):
        self.even = even = even_load(sizes, rows, even)
        self.number, self.groups, self.count = (even if even >= LEAST else 0), len(sizes), rows
        self.number = self.number if number is None else number
        self.hold_all = most is not None and rows > 0
        self.number = min(most, rows) if most is not None else self.number
        self.ends = jnp.cumsum(sizes)
        self.starts = self.ends - sizes
        slot = jnp.arange(self.number, dtype=jnp.int32)
        self._row, self._is_full = self.starts[:, None] + slot, slot < sizes[:, None]
        taken = jnp.sum(self._is_full, dtype=jnp.int32)
        self.are_used = taken >= -(-3 * self.groups * even // 4)
        self._firsts = jnp.where(self.are_used, self.starts + self.number, self.starts)

    def filled(self, rows: Array) -> Array:
        """The rows in slots, zeros in empty ones."""
        return jnp.where(self._is_full[..., None], rows[jnp.minimum(self._row, self.count - 1)], 0)

    def rows(self, slots: Array) -> Array:
        """The rows out of their slots, zeros for rows without one."""
        row = jnp.arange(self.count, dtype=jnp.int32)
        owner = jnp.sum(row[:, None] >= self.ends, axis=1, dtype=jnp.int32)
        mine = jnp.minimum(owner, self.groups - 1)
        slot = row - self.starts[mine]
        has_one = (owner < self.groups) & (slot < self.number)
        flat = slots.reshape(self.groups * self.number, -1)
        return jnp.where(has_one[:, None], flat[jnp.where(has_one, mine * self.number + slot, 0)], 0)

    def flat(self, slots: Array) -> Array:
        """Slots one after another in `count` rows: padded with zeros or, of more slots than rows, without the last.

        Where there may be more slots than rows, and all rows have one: the rows.
        """
        if self.hold_all:
            return self.rows(slots)
        flat = slots.reshape(self.groups * self.number, -1)[: self.count]
        return jnp.pad(flat, [(0, self.count - len(flat)), (0, 0)])

    def stacked(self, flat: Array) -> Array:
        """What `flat` gave, by group."""
        if self.hold_all:
            return self.filled(flat)
        return flat[: self.groups * self.number].reshape(self.groups, self.number, -1)

    def used(self, together: Callable[[], Carry], nothing: Carry) -> Carry:
        """What is computed `together`, where slots are used."""
        if self.hold_all:
            return together()
        return jax.lax.cond(self.are_used, together, lambda: nothing) if self.number else nothing

    def rest(self, group: Array) -> tuple[Array, Array]:
        """The first row of a group that has no slot, and the end of the group."""
        return self._firsts[group], self.ends[group]

    def over_rests(self, step: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
        """`step(group, carry)` for each group with rows that have no slot: in decoding, few have rows at all."""
        if self.hold_all:
            return carry

        def one(group: Array, carry: Carry) -> Carry:
            return jax.lax.cond(self._firsts[group] < self.ends[group], step, lambda _, same: same, group, carry)

        return jax.lax.fori_loop(0, self.groups, one, carry)


def _whole_backward(
    products: MatmulPrecision, parameters: Parameters, x: Array, gradient: Array
) -> tuple[Parameters, Array]:
    (weight, bias), exact = parameters, at_least_float32(x.dtype)
    to_weight = products.to_weight(gradient, x, exact).astype(weight.dtype)
    to_bias = None if bias is None else jnp.sum(gradient, 0, dtype=exact).astype(bias.dtype)
    to_x = products.to_input(gradient, weight.astype(x.dtype), exact)
    return (to_weight, to_bias), to_x.astype(x.dtype)


WHOLE = Maps(lambda linear, x: linear(x), _whole_backward)


def _over_blocks(
    step: Callable[[Array, int, Array | None, Carry], Carry],
    carry: Carry,
    start: Array,
    end: Array,
    rows: int,
    even: int,
) -> Carry:
    """`step(start, size, is_own, carry)` for each block of these rows; `is_own` marks them where a block has others.

    Blocks are as large as even loads fill, from 16 rows of a token each in decoding to 256.
    """
    even = 2 ** max(0, even.bit_length() - 1)
    sizes = (max(64, min(256, even)), 64 if even >= 256 else 32) if even >= LEAST else (32, 16)
    large, small = (min(rows, size) for size in sizes)
    number = (end - start) // large
    carry = jax.lax.fori_loop(0, number, lambda n, carry: step(start + n * large, large, None, carry), carry)
    left = start + number * large

    def rest(n: Array, carry: Carry) -> Carry:
        first = left + n * small
        begin = jnp.minimum(first, rows - small)  # the last block may overlap the one before it
        place = begin + jnp.arange(small, dtype=jnp.int32)
        return step(begin, small, ((place >= first) & (place < end))[:, None], carry)

    return jax.lax.fori_loop(0, (end - left + (small - 1)) // small, rest, carry)


def _of_group(arrays: PyTree, number: Array) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), arrays)


def _added(total: Array, more: Array, number: Array) -> Array:
    own = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, own + more, number, 0)


def _cut(rows: Array, start: Array, size: int, is_own: Array | None) -> Array:
    piece = jax.lax.dynamic_slice_in_dim(rows, start, size)
    return piece if is_own is None else jnp.where(is_own, piece, 0)


def _written(old: Array, new: Array, start: Array, is_own: Array | None) -> Array:
    if is_own is not None:
        new = jnp.where(is_own, new, jax.lax.dynamic_slice_in_dim(old, start, len(new)))
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, 0)


LARGE = 2**23  # bytes of a group's weights: a copy of as much, which a block makes, is no longer read from a cache


def unkept(static: PyTree, arrays: PyTree, x: Array, sizes: Array, *, even: int | None = None) -> Array:
    """The rows' outputs: in slots where a copy of each group's weights would cost more than empty slots do.

    A block of rows copies its group's weights out of the ensemble, and one batched product for the slots of all groups
    copies none. Blocks win where few groups have rows at all, and where small weights meet many rows.
    """
    even = even_load(sizes, len(x), even)
    # In 16 bits fused operations round less often, so that maps in codes, which go by blocks, would differ.
    is_wide = jnp.finfo(x.dtype).bits >= 32
    number = max(LEAST, even * 5 // 4) if is_wide and even >= 2 and _are_better_together(static, arrays, even) else 0
    return outputs(static, arrays, x, sizes, Slots(sizes, len(x), min(number, len(x)), even), _LEFT)[0]


def _are_better_together(static: PyTree, arrays: PyTree, even: int) -> bool:
    if not all(isinstance(one, DenseMap) for one in linear_maps(static)):  # codes would be decoded for all at once
        return False
    large = sum(array[0].nbytes for array in jax.tree.leaves(arrays)) >= LARGE
    return large or even < LEAST


def _left(linear: LinearMap, x: Array) -> Array:
    """Return `linear(x)` of few rows, with the weight on the left, so that it is multiplied in the order it is stored.

    Of eight weights of 2048 x 2048 and 16 rows each that takes 0.6 of the time.
    """
    if not isinstance(linear, DenseMap) or not isinstance(linear.products, ComputeDtypeMatmul):
        return linear(x)
    return add_float32(jnp.einsum("oi,ni->on", linear.weight.astype(x.dtype), x).T, linear.bias)


_LEFT = WHOLE._replace(forward=_left)
