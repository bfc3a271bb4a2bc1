"""Memory that each ZeRO stage saves in the compiled program, and the gathered parameters that it keeps."""

import functools
from typing import Any

import equinox as eqx
import jax
import pytest
from plan_models import batch_of

from eqformer import models, training
from eqformer.parallel import _fully_sharded, make_mesh, Plan, shardings


NUMBERS = models.LlamaConfig(vocab=64, embed=64, layers=8, heads=8, kv_heads=8, mlp=256)
STACK = 8 * 4 * (4 * 64 * 64 + 3 * 64 * 256)  # bytes of all layers' matrices


def temporary(tensor=1, **choices):
    """Bytes of temporary memory that a gradient takes on one device, where no activation is recomputed."""
    plan = Plan(make_mesh(fsdp=8 // tensor, tensor=tensor), **choices)
    model = eqx.filter_eval_shape(lambda: models.build(NUMBERS, key=jax.random.key(0)))
    arrays, rest = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    kept = shardings(plan.parameter_specs(arrays), plan.mesh)
    placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    arrays = jax.tree.map(placed, arrays, kept)
    gradients = training.make_gradient_function(training.next_token_loss, plan)
    run = jax.jit(lambda arrays, batch: eqx.filter(gradients(eqx.combine(arrays, rest), batch, None)[2], eqx.is_array))
    needs: Any = run.lower(arrays, batch_of(model)).compile().memory_analysis()
    return needs.temp_size_in_bytes


@functools.cache
def fully_sharded():
    """Without other axes."""
    return temporary(zero=3)


@pytest.mark.grid
def test_each_stage_of_zero_holds_less():
    one, two, three = (temporary(zero=1), temporary(zero=2), fully_sharded())
    # Whole gradients of all layers, then of one layer at a time. Whole parameters are arguments, no temporary memory,
    # while gathered ones are.
    assert one - two > 0.8 * STACK * 7 / 8
    assert three < two + 2 * STACK / 8


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param({}, marks=pytest.mark.quick),
        pytest.param({"tensor": 2, "residual": "feature"}, marks=pytest.mark.grid),
        pytest.param({"tensor": 2, "residual": "sequence"}, marks=pytest.mark.grid),
        pytest.param({"tensor": 2, "residual": "sequence", "overlap": "ring"}, marks=pytest.mark.grid),
    ],
    ids=" ".join,
)
def test_no_layer_keeps_what_it_gathered(beside, monkeypatch):
    held = temporary(zero=3, **beside) if beside else fully_sharded()
    monkeypatch.setattr(_fully_sharded, "_saves_all_but_gathered", jax.checkpoint_policies.everything_saveable)
    assert temporary(zero=3, **beside) > held + 0.7 * STACK / beside.get("tensor", 1)
