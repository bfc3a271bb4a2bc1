"""Modules with a weight for each group (such as experts), called without kernels on rows that are sorted by group.

Each group has as many slots as it would have rows with an even load. The first rows of each group are in the group's
slots, and one batched product computes the slots of all groups. The rows beyond the slots are computed block by block,
each block with the weights of its group. The backward pass keeps the outputs of linear maps and recomputes everything
between them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from ...kernels import varying_zero
from .._contracts import ComputeDtypeMatmul, MatmulPrecision
from .._dtype import add_float32, at_least_float32
from .._linear import dense, DenseMap, linear_maps, LinearMap, map_linears, PrecomputedLinear


Parameters = tuple[Array, Array | None]
"""A weight, and a bias or None."""


class LinearPasses(NamedTuple):
    """A forward and a backward pass of a linear map, which a kernel may compute."""

    forward: Callable[[LinearMap, Array], Array]
    """Returns the output for a map and its input."""
    backward: Callable[[MatmulPrecision, Parameters, Array, Array], tuple[Parameters, Array]]
    """Returns the gradients of the parameters and of the input. Its arguments are the precision of the map's products,
    the parameters, the input and the gradient of the output."""


def call_in_place_of_linears(module: PyTree, call: Callable[[Any, Array], Array]) -> PyTree:
    """Return the module in which `call(linear, x)` replaces each call of a linear map."""

    def replace(linear: LinearMap) -> PrecomputedLinear:
        return PrecomputedLinear(linear, functools.partial(call, linear))

    return map_linears(replace, module)


def record_linears(module: PyTree, x: Array, passes: LinearPasses) -> tuple[Array, list[Array]]:
    """Return the module's output, and the outputs of its linear maps in the order of their calls.

    If the module's own output is the output of a linear map, the list leaves this output out.
    """
    outputs: list[Array] = []

    def call(linear: LinearMap, x: Array) -> Array:
        outputs.append(passes.forward(linear, x))
        return outputs[-1]

    y = call_in_place_of_linears(module, call)(x)
    return y, [output for output in outputs if output is not y]


def replay_linears(module: PyTree, x: Array, passes: LinearPasses, outputs: Sequence[Array]) -> Array:
    """Compute the module's output from the recorded `outputs` of its linear maps.

    The backward pass of each linear map is `passes.backward`.
    """
    remaining = list(outputs)

    def backward(
        products: MatmulPrecision, residuals: tuple[Parameters, Array], gradient: Array
    ) -> tuple[Parameters, Array, None]:
        return *passes.backward(products, *residuals, gradient), None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def known_output(products: MatmulPrecision, parameters: Parameters, x: Array, y: Array) -> Array:
        return y

    def forward(
        products: MatmulPrecision, parameters: Parameters, x: Array, y: Array
    ) -> tuple[Array, tuple[Parameters, Array]]:
        return y, (parameters, x)

    known_output.defvjp(forward, backward)

    def call(linear: DenseMap, x: Array) -> Array:
        return known_output(linear.products, (linear.weight, linear.bias), x, remaining.pop(0))

    return call_in_place_of_linears(module, call)(x)


Carry = TypeVar("Carry")
FEWEST_SLOTS = 16
"""Groups have slots if each group has at least this number of rows when the load is even."""


def run_in_blocks(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    even_rows: int | None = None,
    max_group_rows: int | None = None,
) -> Array:
    """Return the rows' outputs, without residuals for gradients.

    Since no residuals are kept, there is memory for a quarter more slots than an even load needs. Few loads exceed
    these slots.
    """
    even_rows = resolve_even_rows(sizes, len(x), even_rows)
    slots = even_rows * 5 // 4 if even_rows >= FEWEST_SLOTS else 0
    return compute_in_slots(static, arrays, x, sizes, GroupSlots(sizes, len(x), slots, even_rows, max_group_rows))[0]


def blocks_forward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    even_rows: int | None = None,
    max_group_rows: int | None = None,
) -> tuple[Array, list[Array]]:
    """Return the rows' outputs and, for the rows in slots, the outputs of the linear maps.

    The outputs of the linear maps have the form that `GroupSlots.flatten` returns.
    """
    return compute_in_slots(
        static, arrays, x, sizes, GroupSlots(sizes, len(x), even_rows=even_rows, max_group_rows=max_group_rows)
    )


def compute_in_slots(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    slots: "GroupSlots",
    passes: LinearPasses | None = None,
) -> tuple[Array, list[Array]]:
    """Return the results of `blocks_forward` for these slots; linear maps in slots are computed by `passes`."""
    passes = PLAIN_PASSES if passes is None else passes
    run_module = lambda arrays, x: record_linears(eqx.combine(arrays, static), x, passes)
    shapes = jax.eval_shape(run_module, jax.tree.map(lambda a: a[0], arrays), x[:1])
    zero = varying_zero((arrays, x, sizes), x.dtype)
    zeros = jax.tree.map(lambda s: jnp.full((len(x), *s.shape[1:]), zero.astype(s.dtype)), shapes)
    if not len(x):
        return zeros

    def run_slots() -> tuple[Array, list[Array]]:
        y, outputs = jax.vmap(run_module)(arrays, slots.fill(x))
        return slots.to_rows(y), list(map(slots.flatten, outputs))

    y, outputs = slots.run_if_used(run_slots, zeros)

    def run_group(group: Array, y: Array) -> Array:
        module = eqx.combine(_select_group(arrays, group), static)
        if len(x) > _FEW_ROWS:  # Quantized maps are decoded once for all blocks of a group.
            module = map_linears(dense, module)

        def run_block(start: Array, size: int, is_owned: Array | None, y: Array) -> Array:
            return _write_block(y, module(jax.lax.dynamic_slice_in_dim(x, start, size)), start, is_owned)

        return _loop_over_blocks(run_block, y, *slots.remaining_rows(group), len(x), slots.even_rows)

    return slots.loop_over_groups(run_group, y), outputs


def blocks_backward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    outputs: Sequence[Array],
    gradient: Array,
    *,
    even_rows: int | None = None,
    max_group_rows: int | None = None,
) -> tuple[PyTree, Array]:
    """Return the gradients of the parameters and of the rows; the last of `outputs` is the modules' output."""
    zero = varying_zero((arrays, outputs, gradient, x, sizes), x.dtype)
    slots = GroupSlots(sizes, len(x), even_rows=even_rows, max_group_rows=max_group_rows)
    wide = jax.tree.map(lambda a: a.astype(at_least_float32(a.dtype)), arrays)
    zeros = jax.tree.map(lambda a: jnp.full(a.shape, zero.astype(a.dtype)), wide), jnp.full(x.shape, zero)

    def run_slots() -> tuple[PyTree, Array]:
        def differentiate_group(
            arrays: PyTree, x: Array, outputs: list[Array], gradient: Array
        ) -> tuple[PyTree, Array]:
            replay = lambda arrays, x: replay_linears(eqx.combine(arrays, static), x, PLAIN_PASSES, outputs)
            return jax.vjp(replay, arrays, x)[1](gradient)

        *inner, y = outputs
        in_slots = [*map(slots.unflatten, inner), slots.fill(y)]
        array_grads, x_grad = jax.vmap(differentiate_group)(wide, slots.fill(x), in_slots, slots.fill(gradient))
        return array_grads, slots.to_rows(x_grad)

    def run_group(group: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        group_arrays, module = _select_group(wide, group), lambda arrays, x: eqx.combine(arrays, static)(x)

        def run_block(start: Array, size: int, is_owned: Array | None, carry: tuple) -> tuple:
            totals, x_grad = carry
            pull_back = jax.vjp(module, group_arrays, _read_block(x, start, size, is_owned))[1]
            array_grads, block_grad = pull_back(_read_block(gradient, start, size, is_owned))
            totals = jax.tree.map(lambda total, grad: _add_to_group(total, grad, group), totals, array_grads)
            return totals, _write_block(x_grad, block_grad, start, is_owned)

        return _loop_over_blocks(run_block, carry, *slots.remaining_rows(group), len(x), slots.even_rows)

    grads = slots.run_if_used(run_slots, zeros)
    array_grads, x_grad = slots.loop_over_groups(run_group, grads) if len(x) else grads
    return jax.tree.map(lambda grad, a: grad.astype(a.dtype), array_grads, arrays), x_grad


def resolve_even_rows(sizes: Int[Array, "groups"], rows: int, even_rows: int | None) -> int:
    """Return the number of rows of a group with an even load: `even_rows` or, if None, an equal share of all rows."""
    return rows // len(sizes) if even_rows is None else even_rows


class GroupSlots:
    """Slots for the first rows of each group, which are computed for all groups in one batched product.

    The product copies no parameters. The other rows are computed afterwards. A group has `even_rows` slots (by default
    an equal share of all rows), or no slots if `even_rows` is small. Slots are not used if loads are so uneven that the
    slots would hold fewer than three quarters of the rows that they hold under an even load. With `max_group_rows`, a
    bound on the rows of a group, each group has this many slots, and there are no other rows.
    """

    slots: int
    """Number of slots of a group."""
    even_rows: int
    """Number of rows of a group with an even load."""
    are_used: Bool[Array, ""]
    """Whether the slots are used."""
    holds_all: bool
    """Whether every row has a slot."""

    def __init__(
        self,
        sizes: Int[Array, "groups"],
        rows: int,
        slots: int | None = None,
        even_rows: int | None = None,
        max_group_rows: int | None = None,
    ):
        self.even_rows = even_rows = resolve_even_rows(sizes, rows, even_rows)
        self.groups, self.rows = len(sizes), rows
        self.holds_all = max_group_rows is not None and rows > 0
        if max_group_rows is not None:
            self.slots = min(max_group_rows, rows)
        elif slots is not None:
            self.slots = slots
        else:
            self.slots = even_rows if even_rows >= FEWEST_SLOTS else 0
        self.ends = jnp.cumsum(sizes)
        self.starts = self.ends - sizes
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        self._row, self._is_full = self.starts[:, None] + slot, slot < sizes[:, None]
        rows_in_slots = jnp.sum(self._is_full, dtype=jnp.int32)
        self.are_used = rows_in_slots >= -(-3 * self.groups * even_rows // 4)
        self._first_remaining = jnp.where(self.are_used, self.starts + self.slots, self.starts)

    def fill(self, rows: Array) -> Array:
        """Return the rows in slots, by group, with zeros in empty slots."""
        return jnp.where(self._is_full[..., None], rows[jnp.minimum(self._row, self.rows - 1)], 0)

    def to_rows(self, slots: Array) -> Array:
        """Return the rows that `fill` put into slots, with zeros for rows without a slot."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        group = jnp.sum(row[:, None] >= self.ends, axis=1, dtype=jnp.int32)
        in_range = jnp.minimum(group, self.groups - 1)
        slot = row - self.starts[in_range]
        has_slot = (group < self.groups) & (slot < self.slots)
        flat = slots.reshape(self.groups * self.slots, -1)
        return jnp.where(has_slot[:, None], flat[jnp.where(has_slot, in_range * self.slots + slot, 0)], 0)

    def flatten(self, slots: Array) -> Array:
        """Return an array with an entry for each row: the rows in their order if every row has a slot.

        Otherwise return the slots of all groups one after another, padded with zeros or cut to the number of rows.
        """
        if self.holds_all:
            return self.to_rows(slots)
        flat = slots.reshape(self.groups * self.slots, -1)[: self.rows]
        return jnp.pad(flat, [(0, self.rows - len(flat)), (0, 0)])

    def unflatten(self, flat: Array) -> Array:
        """Return the slots by group, from the result of `flatten`."""
        if self.holds_all:
            return self.fill(flat)
        return flat[: self.groups * self.slots].reshape(self.groups, self.slots, -1)

    def run_if_used(self, run_slots: Callable[[], Carry], unused: Carry) -> Carry:
        """Return `run_slots()` if slots are used, `unused` otherwise."""
        if self.holds_all:
            return run_slots()
        return jax.lax.cond(self.are_used, run_slots, lambda: unused) if self.slots else unused

    def remaining_rows(self, group: Array) -> tuple[Array, Array]:
        """Return the first row of a group that has no slot, and the row after the group's last row."""
        return self._first_remaining[group], self.ends[group]

    def loop_over_groups(self, step: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
        """Apply `step(group, carry)` for each group with rows that have no slot; skip all other groups.

        In a decode step, most groups are skipped.
        """
        if self.holds_all:
            return carry

        def step_if_any(group: Array, carry: Carry) -> Carry:
            has_rows = self._first_remaining[group] < self.ends[group]
            return jax.lax.cond(has_rows, step, lambda _, unchanged: unchanged, group, carry)

        return jax.lax.fori_loop(0, self.groups, step_if_any, carry)


def _plain_backward(
    products: MatmulPrecision, parameters: Parameters, x: Array, gradient: Array
) -> tuple[Parameters, Array]:
    (weight, bias), wide = parameters, at_least_float32(x.dtype)
    weight_grad = products.weight_grad(gradient, x, wide).astype(weight.dtype)
    bias_grad = None if bias is None else jnp.sum(gradient, 0, dtype=wide).astype(bias.dtype)
    x_grad = products.input_grad(gradient, weight.astype(x.dtype), wide)
    return (weight_grad, bias_grad), x_grad.astype(x.dtype)


PLAIN_PASSES = LinearPasses(lambda linear, x: linear(x), _plain_backward)
"""The forward and backward pass of a linear map on the rows of one group, without a kernel."""


def _loop_over_blocks(
    step: Callable[[Array, int, Array | None, Carry], Carry],
    carry: Carry,
    start: Array,
    end: Array,
    rows: int,
    even_rows: int,
) -> Carry:
    """Apply `step(start, size, is_owned, carry)` to each block of the rows from `start` to `end`.

    If a block contains other rows too, `is_owned` marks the rows between `start` and `end`; otherwise it is None.
    Blocks have 16 to 256 rows: the larger an even load, the larger the blocks.
    """
    even_rows = 2 ** max(0, even_rows.bit_length() - 1)
    large, small = 32, 16
    if even_rows >= FEWEST_SLOTS:
        large, small = max(64, min(256, even_rows)), 64 if even_rows >= 256 else 32
    large, small = min(rows, large), min(rows, small)
    large_blocks = (end - start) // large
    carry = jax.lax.fori_loop(0, large_blocks, lambda n, carry: step(start + n * large, large, None, carry), carry)
    small_start = start + large_blocks * large

    def step_small(n: Array, carry: Carry) -> Carry:
        first = small_start + n * small
        begin = jnp.minimum(first, rows - small)  # The last block may overlap the block before it.
        row = begin + jnp.arange(small, dtype=jnp.int32)
        return step(begin, small, ((row >= first) & (row < end))[:, None], carry)

    return jax.lax.fori_loop(0, (end - small_start + (small - 1)) // small, step_small, carry)


_FEW_ROWS = 32
"""Up to this number of rows, nearly every group is one block, whose product reads a quantized map without decoding the
map first."""


def _select_group(arrays: PyTree, group: Array) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, keepdims=False), arrays)


def _add_to_group(total: Array, addend: Array, group: Array) -> Array:
    group_total = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, group_total + addend, group, 0)


def _read_block(rows: Array, start: Array, size: int, is_owned: Array | None) -> Array:
    block = jax.lax.dynamic_slice_in_dim(rows, start, size)
    return block if is_owned is None else jnp.where(is_owned, block, 0)


def _write_block(rows: Array, block: Array, start: Array, is_owned: Array | None) -> Array:
    if is_owned is not None:
        block = jnp.where(is_owned, block, jax.lax.dynamic_slice_in_dim(rows, start, len(block)))
    return jax.lax.dynamic_update_slice_in_dim(rows, block, start, 0)


# Passes without gradients on CPUs, such as prompts and decoding.

LARGE_GROUP = 2**23
"""A group's weights are large if they have this many bytes: a block's copy of the weights then exceeds the cache."""


def run_in_blocks_without_residuals(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, *, even_rows: int | None = None
) -> Array:
    """Return the rows' outputs on CPUs, in slots if copies of the groups' weights would cost more than empty slots.

    A block of rows copies its group's weights out of the ensemble. One batched product for the slots of all groups
    copies no weights. Blocks are faster if few groups have rows, and for many rows of groups with small weights.
    """
    even_rows = resolve_even_rows(sizes, len(x), even_rows)
    # Slots are used only for 32 bits and more. In 16 bits, fused operations round less often, so that quantized maps,
    # which are always computed in blocks, would give other results.
    is_wide = jnp.finfo(x.dtype).bits >= 32
    use_slots = is_wide and even_rows >= 2 and _are_slots_cheaper(static, arrays, even_rows)
    slots_per_group = max(FEWEST_SLOTS, even_rows * 5 // 4) if use_slots else 0
    slots = GroupSlots(sizes, len(x), min(slots_per_group, len(x)), even_rows)
    return compute_in_slots(static, arrays, x, sizes, slots, _WEIGHT_LEFT_PASSES)[0]


def _are_slots_cheaper(static: PyTree, arrays: PyTree, even_rows: int) -> bool:
    if not all(isinstance(linear, DenseMap) for linear in linear_maps(static)):
        return False  # Quantized maps would be decoded for all groups at once.
    is_large = sum(array[0].nbytes for array in jax.tree.leaves(arrays)) >= LARGE_GROUP
    return is_large or even_rows < FEWEST_SLOTS


def _multiply_weight_left(linear: LinearMap, x: Array) -> Array:
    """Return `linear(x)` for few rows, with the weight as the left factor, which is read in the order it is stored.

    For eight weights of 2048 x 2048 with 16 rows each, this takes 0.6 times as long.
    """
    if not isinstance(linear, DenseMap) or not isinstance(linear.products, ComputeDtypeMatmul):
        return linear(x)
    return add_float32(jnp.einsum("oi,ni->on", linear.weight.astype(x.dtype), x).T, linear.bias)


_WEIGHT_LEFT_PASSES = PLAIN_PASSES._replace(forward=_multiply_weight_left)
