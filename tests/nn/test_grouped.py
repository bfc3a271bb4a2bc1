"""Rows by the map or module of their group, against a loop over rows in float64; what each platform compiles."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import compiled_for_tpu
from nn_reference import close, drawn, normal, wide

from eqformer import nn
from eqformer.nn.experts import _grouped_blocks, _grouped_kernels, _grouped_ragged
from eqformer.nn.experts._grouped import grouped


ROWS, INPUTS, OUTPUTS, GROUPS = 160, 5, 3, 4
SIZES = {
    "even": [40, 40, 40, 40],
    "empty groups": [0, 70, 0, 90],
    "one takes all": [0, 0, 160, 0],
    "the last takes all": [0, 0, 0, 160],
    "rows behind": [30, 0, 20, 10],
    "nobody": [0, 0, 0, 0],
    "whole blocks": [64, 0, 64, 32],
    "one row off whole blocks": [63, 1, 65, 31],
    "one row each": [1, 127, 1, 1],
    "slots and blocks": [70, 45, 30, 15],
    "rows behind slots": [41, 39, 40, 5],
}
# Who fills three of four slots; others go by blocks alone.
FILL_SLOTS = {"even", "slots and blocks", "rows behind slots"}


def grouped_product(x, weight, sizes):
    """Linear maps alone: of any sizes, with `groups` in front of their weights."""
    linear = eqx.filter_eval_shape(nn.Linear, "inputs -> outputs", inputs=1, outputs=1, key=jax.random.key(0))
    return grouped(eqx.tree_at(lambda m: m.weight, linear, weight), x, sizes)


def product(x, weight, sizes):
    """Each row by its group's matrix; zeros behind the last group."""
    y, ends = np.zeros((len(x), weight.shape[1])), np.cumsum(sizes)
    for row in range(ends[-1]):
        y[row] = weight[np.sum(ends <= row)] @ x[row]
    return y


def gradients(direction, x, weight, sizes):
    """Of `sum(direction * product)`, for `x` and `weight`."""
    to_x, to_weight, ends = np.zeros(x.shape), np.zeros(weight.shape), np.cumsum(sizes)
    for row in range(ends[-1]):
        group = np.sum(ends <= row)
        to_x[row] = weight[group].T @ direction[row]
        to_weight[group] += np.outer(direction[row], x[row])
    return to_x, to_weight


def with_gradients(direction, x, weight, sizes):
    """The product, and the gradients of its sum weighted by `direction`."""
    y, pull = jax.vjp(lambda x, weight: grouped_product(x, weight, sizes), x, weight)
    return y, *pull(direction.astype(y.dtype))


run = jax.jit(with_gradients)
run_alone = jax.jit(grouped_product)


def given(rows=ROWS, groups=GROUPS):
    return normal(1, rows, OUTPUTS), normal(2, rows, INPUTS), normal(3, groups, OUTPUTS, INPUTS)


def wanted(arrays, sizes):
    direction, x, weight = map(wide, arrays)
    return product(x, weight, sizes), *gradients(direction, x, weight, sizes)


@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_are_those_of_a_loop(name):
    arrays, sizes = given(), SIZES[name]
    slots = _grouped_blocks.Slots(jnp.array(sizes), ROWS)
    assert slots.number == 40 and bool(slots.are_used) == (name in FILL_SLOTS)
    found, expected = jax.tree.map(np.asarray, run(*arrays, np.array(sizes))), wanted(arrays, sizes)
    for one, other in zip(found, expected, strict=True):
        assert close(one, other, 1e-6)
    assert close(run_alone(*arrays[1:], np.array(sizes)), expected[0], 1e-6)  # with more slots
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


@pytest.mark.parametrize("rows,sizes,slots", [(1100, [257, 800], 550), (1101, [3, 1090], 550), (7, [3, 2], 0)])
def test_slots_large_blocks_and_small_ones(rows, sizes, slots):
    assert _grouped_blocks.Slots(jnp.array(sizes), rows).number == slots
    assert _grouped_blocks.Slots(jnp.array(sizes), rows, devices=4).number == slots // 4  # of rows for four devices
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


@pytest.mark.parametrize("name", [pytest.param("odd", marks=pytest.mark.grid), "gated"])
def test_modules_in_blocks_and_in_ragged_products_are_those_of_a_loop(name):
    """Both ways, whatever the platform, with the gradients of what they keep; biases too."""
    experts = drawn(nn.Experts, KINDS[name], GROUPS, key=jax.random.key(0))
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
        ragged, blocked = ("ragged", _grouped_ragged, {"interpret": True}), ("blocked", _grouped_blocks)
        for way, place, more in ((*blocked, {}), (*blocked, {"devices": 2}), ragged):
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


def operations(platform):
    """What the products and gradients lower to, by name."""
    traced = jax.jit(with_gradients).trace(*given(), np.array(SIZES["even"]))
    return re.findall(r"\b(?:stable|c)hlo\.(\w+)\"?(?!<)", traced.lower(lowering_platforms=(platform,)).as_text())


def test_cpus_and_gpus_get_a_loop_over_blocks_and_none_a_product_with_all_groups():
    for platform in ("cpu", "cuda"):
        found = operations(platform)
        assert "ragged_dot" not in found and found.count("while") >= 3, platform


@pytest.mark.parametrize("rows,sizes", [(130, [50, 0, 77, 3]), (5, [1, 0, 0, 2])])
def test_kernels_for_tpus_give_the_products_of_a_loop(rows, sizes):
    """As plain JAX; rows fill no whole tile, and some are behind the last group."""
    direction, x, weight = given(rows)
    kernels: Any = (_grouped_kernels.times, _grouped_kernels.back, _grouped_kernels.outer)
    pairs = (x, weight), (direction, weight), (direction, x)

    @jax.jit
    def run_all(pairs, sizes):
        return [kernel(*pair, sizes, interpret=True) for kernel, pair in zip(kernels, pairs, strict=True)]

    found = run_all(pairs, np.array(sizes, np.int32))
    for one, other in zip(found, wanted((direction, x, weight), sizes), strict=True):
        assert close(one, other, 1e-6)
    assert not close(found[0], product(wide(x), wide(weight), sizes[::-1]), 1e-3)


def test_kernels_for_tpus_say_over_which_axes_they_vary():
    """In a mapped function that checks it; JAX's own are refused there."""
    (_, x, weight), sizes = given(), np.array([[20, 30, 0, 30], [80, 0, 0, 0]], np.int32)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows, plain = jax.sharding.PartitionSpec("rows"), _grouped_kernels._kernels().gmm

    def shapes(kernel):
        mapped = jax.shard_map(kernel, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        return jax.eval_shape(mapped, x, jnp.concatenate([weight] * 2), sizes)

    assert shapes(lambda x, weight, sizes: _grouped_kernels.times(x, weight, sizes[0])).shape == (ROWS, OUTPUTS)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="vma|manual_axis_type"):
        shapes(lambda x, weight, sizes: plain(x, weight, sizes[0], tiling=(8, 5, 3), transpose_rhs=True))


def test_the_compiler_for_tpus_takes_the_kernels_and_copies_no_weights():
    """Where it is installed: a product with every group and row would have as many times the operations."""
    x, weight = ((4096, 512), jnp.bfloat16), ((16, 768, 512), jnp.bfloat16)
    program = compiled_for_tpu(with_gradients, ((4096, 768), jnp.bfloat16), x, weight, ((16,), jnp.int32))
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r"bf16\[16,(768,512|512,768)\]\S* (copy|transpose)\(", text)
    assert program.cost_analysis()["flops"] < 1.1 * 3 * 2 * 4096 * 512 * 768


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
