"""Setups that need less memory: each fits and needs the stated bytes, and out-of-memory errors name some of them."""

import dataclasses
from typing import Any

import jax
import pytest

from eqformer import models, nn, parallel, planning, training


ASKED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.\nBufferAssignment stats: ..."
CONFIG = dataclasses.replace(models.preset("llama-byte-1m"), layers=2)


def make_setup(remat: Any = "products", fsdp=1, pipe=1, **choices):
    execution = nn.Execution(remat=remat)
    model = execution.apply(models.shapes(CONFIG))
    plan = parallel.Plan(planning.abstract_mesh({"fsdp": fsdp, "pipe": pipe}), **choices)
    return planning.TrainingSetup(model, plan, planning.batch_shapes(16, 512), execution=execution)


def held(setup) -> int:
    return planning.step_bytes(setup.states(), setup.model, setup.batch).total


def test_settings_change_the_model_the_optimizer_and_the_plan():
    setup = make_setup()
    settings = {"plan.microbatches": 2, "execution.remat": "full", "optimization.clip": 2.0}
    other = setup.with_settings(settings | {"precision.parameters": "bfloat16"})
    assert (other.plan.microbatches, other.model.stacks[0].remat, other.optimization.clip) == (2, "full", 2.0)
    assert other.model.embedding.weight.dtype == "bfloat16" and other.precision.compute == "float32"
    with pytest.raises(ValueError, match="microbatches must be a whole number of at least 1"):
        setup.with_settings({"plan.microbatches": 0})


@pytest.mark.grid
def test_smaller_setups_fit_and_hold_what_their_settings_hold():
    setup = make_setup()
    memory = held(setup) * 9 // 10
    smaller_setups = planning.find_smaller_setups(setup, memory, "cuda")
    assert 2 <= len(smaller_setups) <= 3 and all(smaller.held <= memory for smaller in smaller_setups)
    assert all(smaller.held == held(setup.with_settings(smaller.settings)) for smaller in smaller_setups)
    assert smaller_setups[0].settings == {"execution.remat": "full"}
    assert planning.find_smaller_setups(setup, 10**6, "cuda") == []  # the state alone is larger
    staged = make_setup("full", pipe=2, microbatches=4)
    first, *_ = planning.find_smaller_setups(staged, held(staged) - 1, "cuda")
    assert first.settings == {"plan.stage_remat": True}
    recomputed = make_setup("full")
    memory = held(recomputed) - 1
    on_gpus, on_cpus = (planning.find_smaller_setups(recomputed, memory, name)[0].settings for name in ("cuda", "cpu"))
    assert on_gpus == {"execution.remat": "full_on_host"} != on_cpus  # the memory of a CPU is its own


@pytest.mark.grid
def test_the_report_of_a_full_memory():
    setup = make_setup(fsdp=2, zero=1)
    report = planning.out_of_memory_report(jax.errors.JaxRuntimeError(ASKED), setup)
    assert report is not None
    first, causes, heading, *lines = report.splitlines()
    assert first == "a device (cpu) is out of memory: the program requested 2.684 GB at once"
    assert f"holds {planning.gigabytes(held(setup))} on each device: parameters" in causes
    assert heading.startswith("by formulas, a step would hold at most") and 1 <= len(lines) <= 3
    assert lines[0].startswith("  mesh {'fsdp': 2}, plan.zero=")


def test_another_error_has_no_report():
    assert planning.out_of_memory_report(jax.errors.JaxRuntimeError("INTERNAL: a bug"), make_setup()) is None


def test_the_default_trains_all_parameters():
    assert make_setup().trained is training.trainable
