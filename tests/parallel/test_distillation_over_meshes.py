"""Distillation's loss, gradients and metrics equal one device's over every axis, with a sharded teacher."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from loss_parity import fields_of_rows, ROUNDING
from plan_models import model_of
from plan_parity import alone, Case, differences, place, under

from eqformer import Batch, training


TOP, TEMPERATURE = 5, 2.0
CASES = [
    Case("llama", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("llama", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("gpt2", {"context": 2, "tensor": 4}, {"residual": "feature", "context_method": "gather"}),
    Case("llama", {"pipe": 2, "tensor": 2}, {"schedule": "gpipe", "edges": "spread", "microbatches": 4}),
    Case("shared mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "microbatches": 2}),
]
KINDS: tuple[Any, ...] = ("forward-kl", "reverse-kl", "jsd")


def loss_of(kind: Any) -> Any:
    return training.distillation_loss(kind, temperature=TEMPERATURE, weight=0.7)


@functools.cache
def teacher_of(name: str) -> Any:
    """A teacher with other weights than the model."""
    shift = lambda x: np.roll(np.asarray(x), 1, -1) if eqx.is_inexact_array(x) else x
    return jax.tree.map(shift, model_of(name))


def plain_batch(name: str) -> Batch:
    return Batch(**fields_of_rows(name))


@functools.cache
def batch_with_teacher(name: str) -> Any:
    (batch,) = training.add_teacher([plain_batch(name)], teacher_of(name))
    return batch


def stored_batch(name: str, top_nats: Any) -> Any:
    """The batch with top ids in place of the teacher."""
    ids, nats = top_nats(teacher_of(name), plain_batch(name))
    none = {"teacher": None, "teacher_hidden": None}
    return dataclasses.replace(batch_with_teacher(name), **none, top_ids=ids, top_nats=nats, temperature=TEMPERATURE)


@functools.cache
def of_one_device(name: str, kind: str) -> Any:
    return alone(model_of(name), batch_with_teacher(name), loss_of(kind))


def under_plan(case: Case) -> Any:
    """The batch with a teacher's hidden states that are computed under the plan."""
    teacher = place(case.plan.shard(teacher_of(case.model)), case.plan)
    (batch,) = training.add_teacher([plain_batch(case.model)], teacher, case.plan)
    return batch


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case, kind):
    batch, expected = under_plan(case), batch_with_teacher(case.model)
    assert np.allclose(batch.teacher_hidden, expected.teacher_hidden, rtol=1e-4, atol=1e-5)
    planned = under(case.plan, model_of(case.model, case.remat), batch, loss_of(kind))
    assert differences(planned, of_one_device(case.model, kind), ROUNDING) == {}
    if kind == "forward-kl":  # The control: other hidden states of the teacher.
        moved = dataclasses.replace(batch, teacher_hidden=-3 * np.asarray(expected.teacher_hidden))
        planned = under(case.plan, model_of(case.model, case.remat), moved, loss_of(kind))
        assert float(planned.total) != pytest.approx(float(of_one_device(case.model, kind).total), rel=1e-3)


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_top_ids_equal_one_devices(case, kind):
    top_nats = functools.partial(training.teacher_top_nats, top=TOP, temperature=TEMPERATURE)
    plain = stored_batch(case.model, eqx.filter_jit(top_nats))
    make = training.make_teacher_top_nats(case.plan, top=TOP, temperature=TEMPERATURE)
    placed = lambda teacher, batch: make(place(case.plan.shard(teacher), case.plan), batch)
    planned = stored_batch(case.model, placed)
    assert np.array_equal(planned.top_ids, plain.top_ids)
    assert np.allclose(planned.top_nats, plain.top_nats, rtol=1e-4, atol=1e-5)
    result = under(case.plan, model_of(case.model, case.remat), planned, loss_of(kind))
    assert differences(result, alone(model_of(case.model), plain, loss_of(kind)), ROUNDING) == {}
    assert float(result.total) < float(of_one_device(case.model, kind).total)
