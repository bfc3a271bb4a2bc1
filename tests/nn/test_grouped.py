"""Rows that are multiplied with the matrix, or passed through the module, of their group, against a float64 loop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import (
    FILL_SLOTS,
    given,
    grouped_product,
    GROUPS,
    INPUTS,
    OUTPUTS,
    ROWS,
    SIZES,
    slotted_product,
    wanted,
    with_gradients,
)
from nn_reference import close, normal, random_module, wide

from eqformer import nn
from eqformer.kernels import TpuGroupedMatmul
from eqformer.nn.experts import _experts as _grouped, _grouped_blocks


run = jax.jit(with_gradients)
run_alone, run_slotted = jax.jit(grouped_product), jax.jit(slotted_product)


@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_are_those_of_a_loop(name):
    arrays, sizes = given(), SIZES[name]
    slots = _grouped_blocks.GroupSlots(jnp.array(sizes), ROWS)
    assert slots.slots == 40 and bool(slots.are_used) == (name in FILL_SLOTS)
    found, expected = jax.tree.map(np.asarray, run(*arrays, np.array(sizes))), wanted(arrays, sizes)
    for one, other in zip(found, expected, strict=True):
        assert close(one, other, 1e-6)
    for forward in (run_alone, run_slotted):
        assert close(forward(*arrays[1:], np.array(sizes)), expected[0], 1e-6)
    y, to_x, to_weight = found
    assert not np.any(y[sum(sizes) :]) and not np.any(to_x[sum(sizes) :])
    assert not np.any(to_weight[np.array(sizes) == 0])
    if sum(sizes) == 0:
        return
    # The controls: a border that is one row off, and the groups in another order.
    big, other = int(np.argmax(sizes)), (int(np.argmax(sizes)) + 1) % GROUPS
    moved = np.array(sizes)
    moved[big], moved[other] = moved[big] - 1, moved[other] + 1
    for wrong in (moved, np.roll(sizes, 1)):
        for one, other in zip(found, wanted(arrays, list(wrong)), strict=True):
            assert list(wrong) == sizes or not close(one, other, 1e-3)


@pytest.mark.by_default("1100-sizes0-550", "7-sizes2-0")
@pytest.mark.parametrize("rows,sizes,slots", [(1100, [257, 800], 550), (1101, [3, 1090], 550), (7, [3, 2], 0)])
def test_slots_large_blocks_and_small_ones(rows, sizes, slots):
    assert _grouped_blocks.GroupSlots(jnp.array(sizes), rows).slots == slots
    assert _grouped_blocks.GroupSlots(jnp.array(sizes), rows, even_rows=137).slots == 137  # of rows for four devices
    arrays = given(rows, 2)
    expected = wanted(arrays, sizes)
    for one, other in zip(run(*arrays, np.array(sizes)), expected, strict=True):
        assert close(one, other, 2e-6)
    assert close(run_alone(*arrays[1:], np.array(sizes)), expected[0], 2e-6)


def test_no_rows_and_many_groups_of_few():
    arrays = given(0, 3)
    y, to_x, to_weight = run(*arrays, np.zeros(3, np.int32))
    assert y.shape == (0, OUTPUTS) and to_x.shape == (0, INPUTS) and not np.any(to_weight)
    sizes = np.random.default_rng(0).integers(0, 4, 50)
    arrays = given(130, 50)
    for one, other in zip(run(*arrays, sizes), wanted(arrays, list(sizes)), strict=True):
        assert close(one, other, 1e-6)


def test_what_rows_behind_hold_is_not_read():
    """NaN behind the last group, as memory that nobody wrote may hold, spoils no result and no gradient."""
    (direction, x, weight), sizes = given(), SIZES["rows behind"]
    found = run(direction, x.at[60:].set(jnp.nan), weight, np.array(sizes))
    for one, other in zip(found, wanted((direction, x, weight), sizes), strict=True):
        assert close(one, other, 1e-6)


def test_narrow_and_wide_numbers():
    (direction, x, weight), sizes = given(), SIZES["one row off whole blocks"]
    half = x.astype("bfloat16")
    y, to_x, to_weight = run(direction, half, weight, np.array(sizes))
    assert (str(y.dtype), str(to_x.dtype), str(to_weight.dtype)) == ("bfloat16", "bfloat16", "float32")
    coarse = (direction.astype("bfloat16"), half, weight.astype("bfloat16"))
    # One rounding to 8 bits of sums that are wider: 65 rows summed in bfloat16 would be off by far more.
    for one, other in zip((y, to_x, to_weight), wanted(coarse, sizes), strict=True):
        assert np.all(np.abs(wide(one) - other) <= 2.0**-8 * np.abs(other) + 1e-5 * np.abs(other).max())
    with jax.enable_x64(True):
        double = [jnp.asarray(wide(array)) for array in (direction, x, weight)]
        found = run(*double, np.array(sizes))  # of int64
        assert {str(array.dtype) for array in found} == {"float64"}
        for one, other in zip(found, wanted(double, sizes), strict=True):
            assert close(one, other, 1e-14)


def test_in_a_scan_and_recomputed():
    """Three layers with groups of their own, their gradients against a dense product over all groups."""
    x, weights = normal(1, 48, INPUTS), normal(2, 3, GROUPS, INPUTS, INPUTS)
    sizes = jnp.asarray([[10, 0, 30, 8], [48, 0, 0, 0], [1, 2, 3, 4]])
    owners = np.array([np.repeat(range(GROUPS + 1), [*row, 48 - row.sum()]) for row in np.asarray(sizes)])
    is_mine = jnp.asarray(owners[..., None] == np.arange(GROUPS), jnp.float32)

    def grouped(x, weights):
        @jax.checkpoint
        def layer(x, given):
            return x + jnp.tanh(grouped_product(x, *given)), None

        return jax.lax.scan(layer, x, (weights, sizes))[0]

    def dense(x, weights):
        for weight, mine in zip(weights, is_mine):
            x = x + jnp.tanh(jnp.einsum("ng,goi,ni->no", mine, weight, x))
        return x

    ends = [jax.value_and_grad(lambda *x, kind=kind: jnp.sum(kind(*x) ** 2), (0, 1)) for kind in (grouped, dense)]
    found, expected = jax.jit(lambda *given: [jax.tree.leaves(end(*given)) for end in ends])(x, weights)
    assert all(close(*pair, 1e-5) for pair in zip(found, expected, strict=True))


class Odd(eqx.Module):
    """Calls one map twice, and ends in none."""

    wide: nn.Linear
    narrow: nn.Linear

    def __init__(self, key):
        self.wide = nn.Linear("embed -> mlp", embed=INPUTS, mlp=INPUTS, bias=True, key=key)
        self.narrow = nn.Linear("mlp -> embed", embed=INPUTS, mlp=INPUTS, key=key)

    def __call__(self, x):
        return jnp.tanh(self.narrow(jnp.sin(self.wide(self.wide(x)))))


KINDS = {"odd": Odd, "gated": lambda key: nn.GatedMLP(embed=INPUTS, mlp=7, bias=True, limit=0.5, key=key)}


@pytest.mark.grid
@pytest.mark.parametrize("name", [pytest.param("odd", marks=pytest.mark.grid), "gated"])
def test_modules_in_blocks_and_in_ragged_products_are_those_of_a_loop(name):
    """Both ways, whatever the platform, with the gradients of what they keep; biases too."""
    experts = random_module(nn.Experts, KINDS[name], GROUPS, key=jax.random.key(0))
    arrays, static = eqx.partition(experts, eqx.is_array)
    x, direction, sizes = normal(1, 90, INPUTS), normal(2, 90, INPUTS), [30, 0, 47, 3]

    def loop(arrays, x):
        experts, (*pieces, rest) = eqx.combine(arrays, static), jnp.split(x, np.cumsum(sizes))
        own = [experts[number](piece) for number, piece in enumerate(pieces)]
        return jnp.concatenate([*own, jnp.zeros_like(rest)])

    def by_hand(arrays, x):
        y, pull = jax.vjp(loop, arrays, x)
        return y, pull(direction)

    def both_ways(arrays, x, sizes):
        interpreted = TpuGroupedMatmul(interpret=True)
        ragged, blocked = (
            ("kernels", _grouped, {"kernel_for": lambda call: interpreted}),
            ("blocks", _grouped_blocks),
        )
        for way, place, more in (
            (*blocked, {}),
            (*blocked, {"even_rows": 11}),
            (*blocked, {"max_group_rows": 50}),
            ragged,
        ):
            y, kept = getattr(place, f"{way}_forward")(static.mlps, arrays.mlps, x, sizes, **more)
            given = (arrays.mlps, x, sizes, (*kept, y), direction)
            to_arrays, to_x = getattr(place, f"{way}_backward")(static.mlps, *given, **more)
            yield y, (eqx.tree_at(lambda e: e.mlps, arrays, to_arrays), to_x)

    expected = jax.jit(by_hand)(arrays, x)
    run_both: Any = jax.jit(lambda *given: list(both_ways(*given)))
    for found in run_both(arrays, x, np.array(sizes, np.int32)):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert close(one, other, 2e-6)
        shifted = jax.tree.map(lambda a: jnp.roll(a, 1, 0), found[1][0])
        assert not any(close(*pair, 1e-3) for pair in zip(jax.tree.leaves(shifted), jax.tree.leaves(expected[1][0])))


def test_the_loop_does_not_grow_with_the_groups():
    """Neither the program nor its work: as many blocks as rows fill, not groups times rows."""

    def compiled(groups):
        arrays = (*given(512, groups), np.full(groups, 512 // groups))
        return jax.jit(grouped_product).lower(*arrays[1:]).compile()

    few, many = compiled(4), compiled(16)
    assert str(few.as_text()).count("\n") == pytest.approx(str(many.as_text()).count("\n"), rel=0.02)
    memory = lambda program: program.memory_analysis().temp_size_in_bytes
    assert memory(many) < 1.2 * memory(few)


def test_in_a_shard_map_of_ones_own():
    """Rows over two devices, the weights on both: their gradients are summed as those of any product are."""
    (direction, x, weight), sizes = given(), np.array([[20, 30, 0, 30], [80, 0, 0, 0]])
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def cost(weight, x, direction, sizes):
        return jax.lax.psum(jnp.sum(grouped_product(x, weight, sizes[0]) * direction), "rows")

    rows = jax.sharding.PartitionSpec("rows")
    specs = jax.sharding.PartitionSpec(), rows, rows, rows
    total = jax.shard_map(cost, mesh=mesh, in_specs=specs, out_specs=specs[0])
    found = jax.jit(jax.grad(total, (0, 1)))(weight, x, direction, sizes)
    halves = [
        wanted((direction[part], x[part], weight), list(s)) for part, s in zip((slice(80), slice(80, 160)), sizes)
    ]
    assert close(found[0], halves[0][2] + halves[1][2], 1e-6)
    assert close(found[1], np.concatenate([half[1] for half in halves]), 1e-6)
