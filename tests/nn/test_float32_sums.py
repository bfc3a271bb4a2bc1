"""Gradients sum over tokens in float32, also for arrays of 16 bits."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_sums import narrow_sums

from eqformer import nn


TOKENS = 4096
WAYS = {
    "add_float32": lambda x, other: nn.add_float32(x, other),
    "multiply_float32": lambda x, other: nn.multiply_float32(x, other),
    "spread": lambda x, other: nn.broadcast_float32(other, x.shape),
    "lookup_rows": lambda x, other: nn.lookup_rows(other[None], jnp.zeros(TOKENS, jnp.int32)),
}
NARROW = {
    "add_float32": lambda x, other: x + other.astype(x.dtype),
    "multiply_float32": lambda x, other: x * other.astype(x.dtype),
    "spread": lambda x, other: jnp.broadcast_to(other, x.shape),
    "lookup_rows": lambda x, other: other[None].at[jnp.zeros(TOKENS, jnp.int32)].get(),
}


def weighed(way, x, other, direction):
    """A number of which the gradient by `other` is a sum over tokens, of the direction or of its product with `x`."""
    return jnp.sum(way(x, other).astype(jnp.float32) * direction)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_over_tokens_in_float32(name, dtype):
    draw = np.random.default_rng(0)
    direction = jnp.asarray(draw.normal(size=(TOKENS, 2)), jnp.bfloat16).astype(jnp.float32)
    x, other = jnp.ones((TOKENS, 2), jnp.bfloat16), jnp.ones(2, dtype)
    found = jax.grad(lambda other: weighed(WAYS[name], x, other, direction))(other)
    exact = np.asarray(direction, np.float64).sum(0)
    assert found.dtype == dtype
    assert np.allclose(np.asarray(found, np.float64), exact, rtol=1e-5 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_program_adds_up_in_16_bits_but_one_without_these(name, dtype):
    x, other = jnp.ones((TOKENS, 2), jnp.bfloat16), jnp.ones(2, dtype)
    of = lambda way: narrow_sums(jax.make_jaxpr(jax.grad(lambda other: weighed(way, x, other, 1.0)))(other))
    assert of(WAYS[name]) == []
    if dtype == "bfloat16" or name in ("add_float32", "multiply_float32"):
        assert [one.primitive for one in of(NARROW[name])] == ["scatter-add" if name == "lookup_rows" else "reduce_sum"]


@pytest.mark.parametrize("name", WAYS)
def test_results_are_those_of_plain_numbers(name):
    draw = np.random.default_rng(0)
    x, other = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((TOKENS, 2), (2,)))
    assert np.array_equal(WAYS[name](x, other), NARROW[name](x, other))
    narrow = WAYS[name](x.astype(jnp.bfloat16), other.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    # Rounded once: the nearest of what float32 gives of the same numbers.
    wide = WAYS[name](*(y.astype(jnp.bfloat16).astype(jnp.float32) for y in (x, other)))
    assert np.array_equal(narrow, wide.astype(jnp.bfloat16))
    assert nn.add_float32(x, None) is x


def test_a_look_up_widens_no_table_and_has_both_derivatives():
    table, ids = jnp.arange(12.0).reshape(4, 3).astype(jnp.bfloat16), jnp.array([[3, 0], [3, 1]])
    program = str(jax.make_jaxpr(nn.lookup_rows)(table, ids))
    assert "f32" not in program and "bf16[4,3]" in program
    found, change = jax.jvp(lambda table: nn.lookup_rows(table, ids), (table,), (2 * table,))
    assert np.array_equal(found, table[ids]) and np.array_equal(change, 2 * found)
    (pulled,) = jax.vjp(lambda table: nn.lookup_rows(table, ids), table)[1](jnp.ones_like(found))
    assert pulled.dtype == table.dtype and pulled[:, 0].tolist() == [1, 1, 0, 2]


def test_an_id_outside_the_table_gives_nan_and_no_gradient():
    table, ids = jnp.ones((4, 2)), jnp.array([-1, 4, 2])
    assert np.isnan(nn.lookup_rows(table, ids)).any(axis=1).tolist() == [True, True, False]
    (pulled,) = jax.vjp(lambda table: nn.lookup_rows(table, ids), table)[1](jnp.ones((3, 2)))
    assert pulled[:, 0].tolist() == [0, 0, 1, 0]


def float64_gradients(x, weight, direction):
    """By the weight and by the input of `sum(x W^T * direction)`."""
    x, weight, direction = (np.asarray(y.astype(jnp.float32), np.float64) for y in (x, weight, direction))
    return direction.T @ x, direction @ weight


@pytest.mark.parametrize("way", ["table", "map", "plain"])
def test_a_head_multiplies_in_16_bits_and_sums_in_float32_both_ways(way):
    """Of a float32 weight; the control is JAX's own rule, which casts the weight up and rounds the sum over tokens."""
    draw = np.random.default_rng(0)
    x, direction = (jnp.asarray(draw.normal(size=(TOKENS, size)), jnp.bfloat16) for size in (8, 6))
    table = jnp.asarray(draw.normal(size=(6, 8)), jnp.bfloat16).astype(jnp.float32)
    linear = nn.Linear("embed -> vocab", embed=8, vocab=6, key=jax.random.key(0))
    product = {
        "table": lambda table, x: nn.unembed(x, table),
        "map": lambda table, x: eqx.tree_at(lambda m: m.weight, linear, table).product(x, jnp.float32),
        "plain": lambda table, x: jnp.einsum("ni,oi->no", x, table.astype(x.dtype), preferred_element_type=jnp.float32),
    }[way]
    loss = lambda table, x: jnp.sum(product(table, x) * direction.astype(jnp.float32))
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(table, x)
    avals: Any = [v.aval for line in program_lines(program.jaxpr, "dot_general") for v in line.invars]
    inputs = {str(aval.dtype) for aval in avals}
    to_table, to_x = jax.grad(loss, (0, 1))(table, x)
    wanted_table, wanted_x = float64_gradients(x, table, direction)
    error = np.abs(np.asarray(to_table, np.float64) - wanted_table).max() / np.abs(wanted_table).max()
    assert to_x.dtype == jnp.bfloat16 and np.allclose(np.asarray(to_x, np.float64), wanted_x, 2**-8, 1e-3)
    assert product(table, x).dtype == jnp.float32
    if way == "plain":
        assert inputs == {"bfloat16", "float32"} and error > 1e-4
    else:
        assert inputs == {"bfloat16"} and error < 1e-6


def program_lines(jaxpr, name):
    """The equations of a primitive in a program and what it calls."""
    for line in jaxpr.eqns:
        if line.primitive.name == name:
            yield line
        for inner in line.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from program_lines(inner, name)
