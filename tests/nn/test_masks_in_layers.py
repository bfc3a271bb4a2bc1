"""Masks of layers in a loop: their values, and that the loop's constants hold no array as large as a mask."""

import jax
import jax.numpy as jnp
import pytest
from nn_reference import close, normal

from eqformer.nn.recurrent._recurrence import mask_in_layer
from eqformer.program import read_jaxpr


X, WEIGHTS, MASK = normal(1, 6, 5), normal(2, 4, 5), jnp.arange(6)[:, None] % 3 > 0


def plainly(mask, x, beside, other=0):
    return jnp.where(mask, x, other)


def run(rule, weights):
    return jax.lax.scan(lambda x, weight: (jnp.sin(rule(MASK, x, weight) * weight), None), X, weights)[0].sum()


def handed(rule):
    """Bytes of the arrays that the loops of a gradient are given and that are the same in each iteration."""
    program = read_jaxpr(jax.make_jaxpr(jax.grad(lambda weights: run(rule, weights)))(WEIGHTS).jaxpr)
    loops = [operation for operation in program.operations if operation.kind == "scan"]
    return {loop.bodies[0].sizes[value] for loop in loops for value in loop.bodies[0].inputs[: loop.consts]}


@pytest.mark.quick
def test_it_is_where():
    assert jnp.array_equal(mask_in_layer(MASK, X, WEIGHTS), jnp.where(MASK, X, 0))
    found = jax.jit(lambda x: mask_in_layer(MASK, x, WEIGHTS, -jnp.inf))(X)
    assert jnp.array_equal(found, jnp.where(MASK, X, -jnp.inf))
    assert close(jax.grad(lambda w: run(mask_in_layer, w))(WEIGHTS), jax.grad(lambda w: run(plainly, w))(WEIGHTS), 1e-6)


def test_loops_are_handed_no_masks_of_an_arrays_size():
    assert handed(mask_in_layer) == {MASK.size}  # a byte each
    assert handed(plainly) == {X.size, X.nbytes}  # the control: a mask and zeros of the array's size
