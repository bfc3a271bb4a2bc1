"""What ZeRO saves, as the compiled program's memory, and what of gathered parameters is kept."""

import equinox as eqx
import jax
import pytest
from plan_models import batch_of

from eqformer import models, training
from eqformer.parallel import init_sharded, make_mesh, Plan, shardings
from eqformer.parallel.state import _fully_sharded


NUMBERS = models.LlamaConfig(vocab=64, embed=64, layers=8, heads=8, kv_heads=8, mlp=256)
STACK = 8 * 4 * (4 * 64 * 64 + 3 * 64 * 256)  # bytes of all layers' matrices


def temporary(mesh, **choices):
    """Bytes of temporary memory that a gradient takes on one device, where no activation is recomputed."""
    plan = Plan(make_mesh(**mesh), **choices)
    make = lambda: models.build(NUMBERS, key=jax.random.key(0))
    model = init_sharded(make, lambda shapes: shardings(plan.parameter_specs(shapes), plan.mesh))
    gradients = training.planned_gradients(plan)(training.next_token_loss)
    run = eqx.filter_jit(lambda model, batch: gradients(model, batch, None)[2])
    return run.lower(model, batch_of(model)).compile().compiled.memory_analysis().temp_size_in_bytes


def test_each_stage_of_zero_holds_less():
    one, two, three = (temporary({"fsdp": 8}, zero=stage) for stage in (1, 2, 3))
    # Whole gradients of all layers, then of one layer at a time. Whole parameters are arguments, no temporary memory,
    # while gathered ones are.
    assert one - two > 0.8 * STACK * 7 / 8
    assert three < two + 2 * STACK / 8


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param({"residual": "feature"}, marks=pytest.mark.grid),
        {"residual": "sequence"},
        pytest.param({"residual": "sequence", "overlap": "ring"}, marks=pytest.mark.grid),
    ],
    ids=" ".join,
)
def test_no_layer_keeps_what_it_gathered(stream, monkeypatch):
    held = temporary({"fsdp": 4, "tensor": 2}, zero=3, **stream)
    monkeypatch.setattr(_fully_sharded, "_all_but_gathered", jax.checkpoint_policies.everything_saveable)
    assert temporary({"fsdp": 4, "tensor": 2}, zero=3, **stream) > held + 0.7 * STACK / 2
