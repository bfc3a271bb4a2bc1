"""Grouped products without residuals for gradients, against a loop over rows in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import given, grouped_product, GROUPS, INPUTS, linears, product
from nn_reference import close, normal, random_module, wide

from eqformer import nn
from eqformer.nn.experts._experts import run_grouped


run = jax.jit(grouped_product)
LOADS = {
    "even": [6, 6, 6, 6],
    "more than a group has slots": [20, 1, 2, 1],
    "one takes all": [0, 0, 24, 0],
    "rows behind": [9, 0, 5, 7],
    "nobody": [0, 0, 0, 0],
}


def has_slots(number, call, *args):
    """Whether the traced call has an array of so many rows of every group."""
    return f"[{GROUPS},{number},{INPUTS}]" in str(jax.make_jaxpr(call)(*args))


@pytest.mark.parametrize("name", LOADS)
def test_few_rows_of_a_group(name):
    _, x, weight = given(24)
    sizes = LOADS[name]
    found = run(x, weight, np.array(sizes))
    assert close(found, product(wide(x), wide(weight), sizes), 1e-6)
    if sum(sizes):  # the control: a border that is one row off
        first, last = int(np.argmax(sizes)), (int(np.argmax(sizes)) + 1) % GROUPS
        moved = [n - (place == first) + (place == last) for place, n in enumerate(sizes)]
        assert not close(found, product(wide(x), wide(weight), moved), 1e-3)


def test_a_bias_is_added_once():
    make = lambda key: nn.Linear("inputs -> outputs", bias=True, inputs=INPUTS, outputs=3, key=key)
    maps = eqx.filter_vmap(lambda key: random_module(make, key))(jax.random.split(jax.random.key(0), GROUPS))
    x, sizes = normal(1, 24, INPUTS), jnp.array(LOADS["more than a group has slots"])
    grouped_sums = np.asarray(jax.jit(lambda x: run_grouped(maps, x, sizes))(x))
    weights = product(wide(x), wide(maps.weight), list(sizes))
    assert close(grouped_sums, weights + np.repeat(wide(maps.bias), sizes, axis=0), 1e-6) and not close(
        grouped_sums, weights, 1e-3
    )


@pytest.mark.grid
def test_large_weights_and_many_rows():
    """Two groups of 8 MiB each, whose 64 rows have 40 slots: one group has more."""
    x, weight, sizes = normal(1, 64, 1024), normal(2, 2, 2048, 1024), [45, 17]
    found = run(x, weight, np.array(sizes))
    expected = product(wide(x), wide(weight), sizes)
    assert close(found, expected, 1e-5)
    assert not close(found, product(wide(x), wide(weight), [44, 18]), 1e-3)  # the control


@pytest.mark.parametrize("rows, reads_codes", [(24, True), (64, False)])
def test_codes_are_multiplied_for_few_rows_and_decoded_for_many(rows, reads_codes):
    maps, sizes = nn.quantize(linears(given(rows)[2]), "int8"), [rows // 4, 0, rows // 2, rows // 4]
    x = normal(3, rows, INPUTS)
    arguments = x, jnp.array(sizes)
    lowered = jax.jit(lambda x, sizes: run_grouped(maps, x, sizes)).lower(*arguments)
    assert ("quantized_matmul" in lowered.as_text(debug_info=True)) == reads_codes
    products = np.asarray(lowered.compile()(*arguments))
    weight = wide(maps.matrix())
    assert close(products, product(wide(x), weight, sizes), 1e-6)
    assert not close(products, product(wide(x), weight, [*sizes[:2], sizes[2] - 1, sizes[3] + 1]), 1e-3)


def test_which_have_slots():
    """16 from two rows a group on by even loads; none for small weights and many rows, codes, and in 16 bits."""
    sizes = jnp.zeros(GROUPS, jnp.int32)
    of = lambda rows: has_slots(16, grouped_product, *given(rows)[1:], sizes)
    assert [of(rows * GROUPS) for rows in (1, 4, 12, 16)] == [False, True, True, False]
    maps = linears(given(4 * GROUPS)[2])
    by = lambda maps: has_slots(16, lambda x: run_grouped(maps, x, sizes), given(4 * GROUPS)[1])
    assert by(maps) and not by(nn.quantize(maps, "int8"))
    rows = given(4 * GROUPS)[1]
    assert not has_slots(16, lambda x: run_grouped(maps, x, sizes), rows.astype(jnp.bfloat16))
