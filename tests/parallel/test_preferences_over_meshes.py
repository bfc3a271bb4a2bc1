"""Losses of preferences have one device's loss, gradients and metrics over every axis, and keep pairs together."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from plan_models import batch_of, model_of, plan_over
from plan_parity import alone, Case, differences, under

from eqformer import PreferenceBatch, training


ROUNDING = 50 * float(np.finfo(np.float32).eps)
LOSSES: tuple[Any, ...] = ("dpo", "ipo", "orpo", "kto")
CASES = [
    Case("llama", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("llama", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("shared mixture", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature", "microbatches": 2}),
    Case("llama", {"pipe": 2, "tensor": 2}, {"schedule": "gpipe", "microbatches": 4}),
]


@functools.cache
def batch_for(model: str) -> PreferenceBatch:
    """Pairs that also have labels, with a reference that is another model's."""
    batch = batch_of(model_of(model), 8)
    fields: Any = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} | {"group": 2}
    reference = np.random.default_rng(3).normal(30.0, 10.0, 8).astype(np.float32)
    labels = np.array([1, 0, 0, 1, 1, 1, 0, 0], np.float32)
    return PreferenceBatch(**fields, reference_nats=reference, labels=labels, baseline=np.full(8, 3, np.float32))


def loss_of(name: Any) -> Any:
    return training.preference_loss(name, beta=0.05, desirable_weight=2.0)


@functools.cache
def of_one_device(model: str, name: str) -> Any:
    return alone(model_of(model), batch_for(model), loss_of(name))


@pytest.mark.grid
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case, name):
    planned = under(case.plan, model_of(case.model, case.remat), batch_for(case.model), loss_of(name))
    assert differences(planned, of_one_device(case.model, name), ROUNDING) == {}


@pytest.mark.grid
def test_rows_in_other_pairs_have_another_loss():
    """The control: the same rows over the same mesh, each beside another row."""
    case, batch = CASES[0], batch_for("llama")
    order = np.array([0, 3, 2, 5, 4, 7, 6, 1])
    moved = jax.tree.map(lambda x: x[order], batch)
    planned = under(case.plan, model_of("llama"), moved, loss_of("dpo"))
    assert float(planned.total) != pytest.approx(float(of_one_device("llama", "dpo").total), rel=1e-3)


@pytest.mark.grid
@pytest.mark.parametrize(
    "mesh, options",
    [({"context": 2, "tensor": 2}, {}), ({"fsdp": 2, "pipe": 2}, {"schedule": "1f1b"}), ({"fsdp": 4}, {"zero": 3})],
)
def test_metrics_equal_one_devices(mesh, options):
    model, batch = model_of("llama"), batch_for("llama")
    optimizer = training.optimizer("sgd", model, rate=1e-3)
    plan = plan_over(mesh, microbatches=1 if mesh == {"fsdp": 4} else 2, **options)
    found = []
    for step in (training.make_step(loss_of("ipo"), optimizer), training.make_step(loss_of("ipo"), optimizer, plan)):
        state = training.init_state(jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model), optimizer)
        metrics = step(state, batch, None)[1]
        found.append([float(metrics[name]) for name in METRICS])
    assert np.allclose(found[0], found[1], rtol=1e-4, atol=1e-5) and found[0][0] != found[0][1]


METRICS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy", "loss")


def test_a_pair_is_never_split():
    case = Case("llama", {"fsdp": 4}, {"microbatches": 2})
    with pytest.raises(ValueError, match=r"8 rows do not fall into 4 x 2 equal pieces of whole groups of 2 rows"):
        under(case.plan, model_of("llama"), batch_for("llama"), loss_of("dpo"))
