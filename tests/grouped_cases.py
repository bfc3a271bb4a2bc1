"""Rows and matrices of groups for tests of grouped products, and float64 references by a loop over rows."""

import equinox as eqx
import jax
import numpy as np
from nn_reference import normal, wide

from eqformer import nn
from eqformer.nn.experts._experts import run_grouped
from eqformer.nn.experts._grouped_blocks import run_in_blocks


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
# Cases that fill at least three quarters of the slots; other cases are computed in blocks alone.
FILL_SLOTS = {"even", "slots and blocks", "rows behind slots"}


def linears(weight):
    """Return an ensemble of linear maps, whose weights have a dim of groups in front."""
    linear = eqx.filter_eval_shape(nn.Linear, "inputs -> outputs", inputs=1, outputs=1, key=jax.random.key(0))
    return eqx.tree_at(lambda m: m.weight, linear, weight)


def grouped_product(x, weight, sizes):
    return run_grouped(linears(weight), x, sizes)


def slotted_product(x, weight, sizes):
    """Return the product as GPUs compute it without residuals: with a quarter more slots than an even load fills."""
    arrays, static = eqx.partition(linears(weight), eqx.is_array)
    return run_in_blocks(static, arrays, x, sizes)


def product(x, weight, sizes):
    """Return each row times its group's matrix, with zeros after the last group."""
    y, ends = np.zeros((len(x), weight.shape[1])), np.cumsum(sizes)
    for row in range(ends[-1]):
        y[row] = weight[np.sum(ends <= row)] @ x[row]
    return y


def gradients(direction, x, weight, sizes):
    """Return the gradients of `sum(direction * product)` for `x` and `weight`."""
    to_x, to_weight, ends = np.zeros(x.shape), np.zeros(weight.shape), np.cumsum(sizes)
    for row in range(ends[-1]):
        group = np.sum(ends <= row)
        to_x[row] = weight[group].T @ direction[row]
        to_weight[group] += np.outer(direction[row], x[row])
    return to_x, to_weight


def with_gradients(direction, x, weight, sizes):
    """Return the product, and the gradients of its sum weighted by `direction`."""
    y, pull = jax.vjp(lambda x, weight: grouped_product(x, weight, sizes), x, weight)
    return y, *pull(direction.astype(y.dtype))


def given(rows=ROWS, groups=GROUPS):
    return normal(1, rows, OUTPUTS), normal(2, rows, INPUTS), normal(3, groups, OUTPUTS, INPUTS)


def wanted(arrays, sizes):
    direction, x, weight = map(wide, arrays)
    return product(x, weight, sizes), *gradients(direction, x, weight, sizes)
