"""A step that is planned in Python: its report, its forecast, and its program."""

import dataclasses
import re

import equinox as eqx
import jax
import pytest

from eqformer import models, planning, recipes
from eqformer.parallel import make_mesh, Plan


CONFIG = models.LlamaConfig(vocab=256, embed=16, layers=2, heads=4, kv_heads=2, mlp=32)
RECIPE = recipes.Recipe(CONFIG, batch=8, seq=16, steps=10, mesh=recipes.Mesh(fsdp=2, tensor=2))


def plan_step(recipe, target):
    return recipes.plan_training_step(recipe, recipes.check(recipe), target)


def test_a_training_step_is_reported_before_it_runs():
    step = plan_step(RECIPE, planning.DeviceMemory(None))
    parameters = planning.parameter_count(eqx.filter_eval_shape(lambda: models.build(CONFIG, key=jax.random.key(0))))
    assert step.forecast.parameters == parameters
    report = step.report()
    assert f"{parameters:,} parameters" in report and "a microbatch on a device is 4 rows of 16 tokens" in report
    with pytest.raises(ValueError, match="h100:8"):
        plan_step(RECIPE, planning.topology("h100:8"))


@pytest.mark.grid
def test_a_training_step_is_lowered_for_the_devices_of_its_plan():
    lowered = plan_step(RECIPE, planning.topology("h100:4")).lower(
        Plan(make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]))
    )
    text = lowered.as_text()
    assert "num_partitions = 4" in text and "all_reduce" in text, re.findall(r"stablehlo\.\w+", text)


@pytest.mark.grid
def test_a_decode_step_holds_caches_and_no_optimizer():
    recipe = dataclasses.replace(RECIPE, mesh=recipes.Mesh(tensor=2))
    shapes, topology = recipes.check(recipe, trains=False), planning.topology("h100:2")
    step = recipes.plan_decode_step(recipe, shapes, topology)
    assert "a microbatch" not in step.report()
    assert step.forecast.total < plan_step(recipe, topology).forecast.total
    small = recipes.plan_decode_step(recipe, shapes, topology, cache_dtype="int8")
    assert small.forecast.total < step.forecast.total
