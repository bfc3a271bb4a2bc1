"""Captured values of a model with sharded arrays equal one device's."""

import equinox as eqx
import jax
import numpy as np
import pytest
from inside_cases import IDS, LAYER, make_model, MLP

from eqformer import nn
from eqformer.interpretability import capture, patch
from eqformer.parallel import make_mesh, Plan, ShardedModel


PATHS = ["stacks[0].blocks", f"{LAYER}.core.weights", f"{MLP}.down.input", "norm.input"]
run = eqx.filter_jit(lambda captured, ids: captured(ids))


@pytest.fixture(scope="module")
def model():
    return make_model((4,))


@pytest.mark.grid
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"pipe": 2, "replica": 2}])
def test_values_and_edits_over_a_mesh_are_those_of_one_device(model, axes):
    plan = Plan(make_mesh(**axes, devices=jax.devices()[:4]))
    sharded = plan.shard(model)
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(sharded))
    double = {"stacks[0][1].sublayers[0].layer.core.weights": lambda weights: weights.at[:, 0].multiply(2)}
    for change in (lambda model: model, lambda model: patch(model, double)):
        values, expected = run(capture(change(sharded), PATHS), IDS), run(capture(change(model), PATHS), IDS)
        for path in PATHS:
            np.testing.assert_allclose(values[path], expected[path], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values.output[0], expected.output[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected["norm.input"], run(capture(model, PATHS), IDS)["norm.input"], atol=1e-3)


@pytest.mark.grid
def test_a_device_that_has_a_part_of_a_value_refuses_it(model):
    served = ShardedModel(patch(model, {"norm": lambda x: 2 * x}), Plan(make_mesh(fsdp=2, devices=jax.devices()[:2])))
    with pytest.raises(ValueError, match=r"'norm' is computed inside a shard_map.*plan\.shard\(model\)"):
        served.encode(IDS, nn.positions_like(IDS.shape), served.init_cache(2, 8))
