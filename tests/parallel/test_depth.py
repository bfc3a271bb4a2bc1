"""Layers are divided over pipeline stages evenly and in order, and are put back into the model's order."""

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params, Var
from plan_models import batch_of, filled, model_of, of_blocks, plan_over
from plan_parity import hastily
from plan_parts import EMBED, norm

from eqformer import nn, training
from eqformer.parallel import init_sharded, ring_placement, v_placement
from eqformer.parallel.pipeline._pipelined_stack import count_layers, place_layers


@pytest.mark.parametrize("depths", [(126,), (8,), (3, 58), (10, 2), (1, 1, 6)])
@pytest.mark.parametrize(
    "part_of", [ring_placement(4), ring_placement(2, 3), v_placement(4)], ids=["ring", "rounds", "v"]
)
def test_parts_hold_all_layers_in_order_and_evenly(depths, part_of):
    held = count_layers(depths, part_of.size)
    assert held.sum(axis=1).tolist() == list(depths)
    assert np.ptp(held.sum(axis=0)) == (sum(depths) % part_of.size > 0)
    expected = [(stack, layer) for stack, depth in enumerate(depths) for layer in range(depth)]
    rows, found = place_layers(depths, part_of), []
    for part in range(part_of.size):
        stage, chunk = np.argwhere(part_of == part)[0]
        for stack, each in enumerate(rows):
            mine = each.layer_of_row.reshape(*part_of.shape, -1)[stage, chunk]
            found += [(stack, layer) for layer in mine.tolist() if layer < depths[stack]]
    assert found == expected
    for each in rows:
        assert each.layer_of_row[each.row_of_layer].tolist() == list(range(each.depth))
        assert each.is_layer.sum() == each.depth


def test_the_last_parts_have_the_fewest():
    assert count_layers([126], 16).tolist() == [[8] * 14 + [7] * 2]


def test_padding_is_zero_and_goes_again():
    model = model_of("dense, then mixtures")
    plan = plan_over({"pipe": 2}, schedule="zb-v", chunks=2, microbatches=2)
    sharded = eqx.filter_jit(plan.shard)(model)
    assert [len(stack) for stack in sharded.stacks] == [4, 8] and [stack.depth for stack in sharded.stacks] == [1, 5]
    rows = place_layers([1, 5], v_placement(2))
    for stack, row in zip(sharded.stacks, rows):
        for x in jax.tree.leaves(eqx.filter(stack, eqx.is_inexact_array)):
            x = np.asarray(x)
            assert np.all(x[~row.is_layer] == 0) and np.any(x[row.is_layer] != 0)
    shapes = plan.shard(eqx.filter_eval_shape(lambda: model))  # shapes are moved like the arrays
    assert eqx.tree_equal(shapes, eqx.filter_eval_shape(lambda: sharded))
    unsharded = eqx.filter_jit(plan.unshard)(sharded)
    assert eqx.tree_equal(*(jax.device_get(row) for row in (unsharded, model)))
    assert jax.tree.structure(sharded) == jax.tree.structure(model)
    with pytest.raises(ValueError, match="must have 1 rows, but one has 4; pass a plain model to shard"):
        plan.shard(sharded)
    with pytest.raises(
        ValueError, match=r"stacks of \[1, 5\] layers need \[4, 8\] rows, .* have \[1, 5\]; pass plan.shard"
    ):
        plan.leaves(model)


def balanced(key):
    """A mixture alone, whose choice a bias keeps even."""
    one, two = jax.random.split(key)
    router = nn.TopKRouter(embed=EMBED, experts=4, top_k=2, balanced=True, key=one)
    experts = nn.Experts(lambda key: nn.MLP(embed=EMBED, mlp=8, key=key), 4, key=two)
    return nn.SuperBlock((nn.Residual(nn.MoE(router, experts), norm()),))


def equations_behind(program, results):
    """What the results of a program need, but for what runs inside `shard_map`."""
    needed = set(results)
    for equation in reversed(program.eqns):
        if needed.isdisjoint(equation.outvars) or equation.primitive.name == "shard_map":
            continue
        yield equation
        for part in jaxprs_in_params(equation.params):
            yield from equations_behind(part, part.outvars)
        needed |= {value for value in equation.invars if isinstance(value, Var)}


@pytest.mark.grid
def test_a_step_balances_layers_in_the_order_that_it_holds_and_reads_them_in_the_models():
    """Only what is read as metrics is moved; padding is in neither."""
    model = filled(lambda: of_blocks(balanced, depths=(5,)))
    batch, rule = batch_of(model), training.optimizer("sgd", model, rate=0.1)
    plan = plan_over({"pipe": 2}, schedule="interleaved", chunks=2, microbatches=2)
    make = lambda: training.init_state(plan.shard(model), rule)
    state = init_sharded(make, lambda shapes: training.state_shardings(plan, rule, shapes))
    step = training.make_step(training.next_token_loss, rule, plan, balance_rate=0.5)

    def results(arrays):
        state, metrics = step.run.__wrapped__((batch, None, step.rate), eqx.combine(arrays, rest))
        return metrics["expert_load"], eqx.filter(state.model, eqx.is_array)

    arrays, rest = eqx.partition(state, eqx.is_array)
    load, *updated = (program := jax.make_jaxpr(results)(arrays).jaxpr).outvars
    gathers = lambda *wanted: [e for e in equations_behind(program, wanted) if e.primitive.name == "gather"]
    assert len(gathers(load)) == 1 and gathers(*updated) == []

    alone = training.make_step(training.next_token_loss, rule, balance_rate=0.5)
    plain = training.init_state(jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model), rule)
    got, metrics = hastily(step, state, batch)(state, batch)
    want, expected = hastily(alone, plain, batch)(plain, batch)
    for name in ("expert_load", "load_violation", "router_entropy", "dropped_share", "balance_loss"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    biases = lambda model: model.stacks[0].blocks.blocks[0].layer.router.selection_bias
    read = eqx.filter_jit(plan.unshard)(got.model)
    np.testing.assert_allclose(biases(read), biases(want.model), rtol=1e-6)
    again = eqx.filter_jit(plan.shard)(read)
    assert eqx.tree_equal(*(jax.device_get(each) for each in (again, got.model)))
    # The controls: layers are told apart, and moved.
    for rows in (expected["expert_load"], biases(want.model) - biases(model)):
        assert np.abs(np.diff(rows, axis=0)).max(axis=-1).min() > 0.01
