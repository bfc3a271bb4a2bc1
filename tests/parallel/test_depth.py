"""Layers fall into parts in order and evenly, and come back from the rows that devices hold."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import model_of, plan_over

from eqformer.parallel import ring_placement, v_placement
from eqformer.parallel.pipeline._depth import layer_rows, layers_of_parts


@pytest.mark.parametrize("depths", [(126,), (8,), (3, 58), (10, 2), (1, 1, 6)])
@pytest.mark.parametrize(
    "part_of", [ring_placement(4), ring_placement(2, 3), v_placement(4)], ids=["ring", "rounds", "v"]
)
def test_parts_hold_all_layers_in_order_and_evenly(depths, part_of):
    held = layers_of_parts(depths, part_of.size)
    assert held.sum(axis=1).tolist() == list(depths)
    assert np.ptp(held.sum(axis=0)) == (sum(depths) % part_of.size > 0)
    expected = [(stack, layer) for stack, depth in enumerate(depths) for layer in range(depth)]
    rows, found = layer_rows(depths, part_of), []
    for part in range(part_of.size):
        stage, chunk = np.argwhere(part_of == part)[0]
        for stack, each in enumerate(rows):
            mine = each.order.reshape(*part_of.shape, -1)[stage, chunk]
            found += [(stack, layer) for layer in mine.tolist() if layer < depths[stack]]
    assert found == expected
    for each in rows:
        assert each.order[each.back].tolist() == list(range(each.depth))
        assert each.is_layer.sum() == each.depth


def test_the_last_parts_have_the_fewest():
    assert layers_of_parts([126], 16).tolist() == [[8] * 14 + [7] * 2]


def test_padding_is_zero_and_goes_again():
    model = model_of("dense, then mixtures")
    plan = plan_over({"pipe": 2}, schedule="zb-v", chunks=2, microbatches=2)
    held = plan.to_ring_order(model)
    assert [len(stack) for stack in held.stacks] == [4, 8] and [stack.depth for stack in held.stacks] == [1, 5]
    rows = layer_rows([1, 5], v_placement(2))
    for stack, each in zip(held.stacks, rows):
        for x in jax.tree.leaves(eqx.filter(stack, eqx.is_inexact_array)):
            assert bool(jnp.all(x[~each.is_layer] == 0)) and bool(jnp.any(x[each.is_layer] != 0))
    assert eqx.tree_equal(plan.to_reading_order(held), model)
    assert jax.tree.structure(held) == jax.tree.structure(model)
    with pytest.raises(ValueError, match="has 1 rows where it is moved from, but this one has 4; each is for what the"):
        plan.to_ring_order(held)
    with pytest.raises(ValueError, match=r"whose stacks have \[1, 5\] layers lies in \[4, 8\] rows .* has \[1, 5\]"):
        plan.leaves(model)
