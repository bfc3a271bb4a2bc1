"""Evaluation of mixtures drops no choice on any mesh, with every dispatch and every expert method."""

import functools
from typing import Any

import pytest
from plan_models import batch_of, model_of
from plan_parity import Case, hastily, place

from eqformer import nn, training


SCARCE: dict[str, Any] = {"expert_method": "exchange", "expert_factor": 0.25}
CASES = [
    Case("shared mixture", {"expert": 4, "tensor": 2}, SCARCE | {"residual": "feature"}),
    pytest.param(Case("shared mixture", {"expert": 4, "fsdp": 2}, SCARCE), marks=pytest.mark.grid),
    pytest.param(
        Case("shared mixture", {"expert": 2, "pipe": 2}, SCARCE | {"microbatches": 2}), marks=pytest.mark.grid
    ),
    pytest.param(Case("mixture", {"context": 2, "expert": 4}, SCARCE), marks=pytest.mark.grid),
]


def evaluated(function, model):
    batch = batch_of(model)
    sums = hastily(function, model, batch)(model, batch)
    return {name: float(value) for name, value in sums.items()}


def by_plan(case):
    return evaluated(training.make_evaluation(case.plan), place(model_of(case.model), case.plan))


@functools.cache
def by_one_device(model):
    return evaluated(training.evaluation_sums, model_of(model))


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_evaluation_is_one_devices(case):
    assert by_plan(case) == pytest.approx(by_one_device(case.model), rel=1e-4)


@pytest.mark.grid
def test_with_the_drops_of_training_it_is_not(monkeypatch):
    whole = by_one_device(CASES[0].model)
    monkeypatch.setattr(nn.Tokens, "is_training", True)
    assert evaluated(training.evaluation_sums, model_of(CASES[0].model)) != pytest.approx(whole, rel=1e-3)
