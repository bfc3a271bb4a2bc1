"""Masks of layers in a loop: what they give, and that none of an array's size is handed to all turns."""

import jax
import jax.numpy as jnp
import pytest
from nn_reference import close, normal

from eqformer.nn.recurrent._chunks import mask_in_layer
from eqformer.program import carry_of, Lines


X, WEIGHTS, MASK = normal(1, 6, 5), normal(2, 4, 5), jnp.arange(6)[:, None] % 3 > 0


def plainly(mask, x, beside, other=0):
    return jnp.where(mask, x, other)


def run(rule, weights):
    return jax.lax.scan(lambda x, weight: (jnp.sin(rule(MASK, x, weight) * weight), None), X, weights)[0].sum()


def handed(rule):
    """The sizes of arrays that the loops of a gradient are given and that are the same in each turn."""
    program = Lines(jax.make_jaxpr(jax.grad(lambda weights: run(rule, weights)))(WEIGHTS).jaxpr)
    loops = [line for line in program.lines if line.name == "scan"]
    return {v.aval.size for line in loops for v in line.params["jaxpr"].jaxpr.invars[: carry_of(line)[0]]}


@pytest.mark.quick
def test_it_is_where():
    assert jnp.array_equal(mask_in_layer(MASK, X, WEIGHTS), jnp.where(MASK, X, 0))
    found = jax.jit(lambda x: mask_in_layer(MASK, x, WEIGHTS, -jnp.inf))(X)
    assert jnp.array_equal(found, jnp.where(MASK, X, -jnp.inf))
    assert close(jax.grad(lambda w: run(mask_in_layer, w))(WEIGHTS), jax.grad(lambda w: run(plainly, w))(WEIGHTS), 1e-6)


def test_loops_are_handed_no_masks_of_an_arrays_size():
    assert max(handed(mask_in_layer)) < X.size == max(handed(plainly))  # the control
