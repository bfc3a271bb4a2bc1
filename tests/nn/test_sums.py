"""Sums over tokens that a gradient takes: in float32, however narrow the numbers are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_sums import narrow_sums

from eqformer import nn


TOKENS = 4096
WAYS = {
    "wide_sum": lambda x, other: nn.wide_sum(x, other),
    "wide_product": lambda x, other: nn.wide_product(x, other),
    "spread": lambda x, other: nn.spread(other, x.shape),
    "look_up": lambda x, other: nn.look_up(other[None], jnp.zeros(TOKENS, jnp.int32)),
}
NARROW = {
    "wide_sum": lambda x, other: x + other.astype(x.dtype),
    "wide_product": lambda x, other: x * other.astype(x.dtype),
    "spread": lambda x, other: jnp.broadcast_to(other, x.shape),
    "look_up": lambda x, other: other[None].at[jnp.zeros(TOKENS, jnp.int32)].get(),
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
    if dtype == "bfloat16" or name in ("wide_sum", "wide_product"):
        assert [one.primitive for one in of(NARROW[name])] == ["scatter-add" if name == "look_up" else "reduce_sum"]


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
    assert nn.wide_sum(x, None) is x


def test_a_look_up_widens_no_table_and_has_both_derivatives():
    table, ids = jnp.arange(12.0).reshape(4, 3).astype(jnp.bfloat16), jnp.array([[3, 0], [3, 1]])
    program = str(jax.make_jaxpr(nn.look_up)(table, ids))
    assert "f32" not in program and "bf16[4,3]" in program
    found, change = jax.jvp(lambda table: nn.look_up(table, ids), (table,), (2 * table,))
    assert np.array_equal(found, table[ids]) and np.array_equal(change, 2 * found)
    (pulled,) = jax.vjp(lambda table: nn.look_up(table, ids), table)[1](jnp.ones_like(found))
    assert pulled.dtype == table.dtype and pulled[:, 0].tolist() == [1, 1, 0, 2]


def test_an_id_outside_the_table_gives_nan_and_no_gradient():
    table, ids = jnp.ones((4, 2)), jnp.array([-1, 4, 2])
    assert np.isnan(nn.look_up(table, ids)).any(axis=1).tolist() == [True, True, False]
    (pulled,) = jax.vjp(lambda table: nn.look_up(table, ids), table)[1](jnp.ones((3, 2)))
    assert pulled[:, 0].tolist() == [0, 0, 1, 0]
