"""Preference losses, their gradients and metrics equal one device's over every axis, and pairs stay together."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from loss_parity import CASES, fields_of_rows, metrics_of_steps, over_three_meshes, ROUNDING
from plan_models import model_of
from plan_parity import alone, Case, differences, under

from eqformer import PreferenceBatch, training


LOSSES: tuple[Any, ...] = ("dpo", "ipo", "orpo", "kto")


@functools.cache
def batch_for(model: str) -> PreferenceBatch:
    """Pairs that also have labels, with a reference that is another model's."""
    fields: Any = fields_of_rows(model) | {"group": 2}
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
@over_three_meshes
def test_metrics_equal_one_devices(mesh, options):
    rows = metrics_of_steps(loss_of("ipo"), batch_for("llama"), METRICS, mesh, options)
    assert np.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-5) and rows[0][0] != rows[0][1]


METRICS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy", "loss")


def test_a_pair_is_never_split():
    case = Case("llama", {"fsdp": 4}, {"microbatches": 2})
    with pytest.raises(ValueError, match=r"8 rows do not fall into 4 x 2 equal pieces of whole groups of 2 rows"):
        under(case.plan, model_of("llama"), batch_for("llama"), loss_of("dpo"))
