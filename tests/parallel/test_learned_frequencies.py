"""Learned rotary frequencies, which all layers share, have one device's gradients over pipelines, leaf by leaf."""

from typing import Any

import jax
import numpy as np
import pytest
from contract_cases import afresh, bytes_of_gradients, named, of_plan
from plan_models import model_of
from plan_parity import Case, differences, of_one_device

from eqformer.parallel.pipeline import _pipeline


MODEL, ROUNDING = "learned frequencies", 1000 * float(np.finfo(np.float32).eps)  # a sum over all positions and layers
GRID = [
    Case(MODEL, {"pipe": 2}, {"schedule": "zb-h1", "microbatches": 2}),
    Case(MODEL, {"pipe": 2}, {"schedule": "interleaved", "chunks": 2, "microbatches": 2}),
    Case(MODEL, {"pipe": 2}, {"schedule": "gpipe", "microbatches": 2, "edges": "spread"}),
]


@pytest.mark.parametrize("case", named([], GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
def test_a_part_of_the_sum_over_stages_that_is_left_out_is_seen(monkeypatch):
    case: Any = GRID[0]
    wanted, sum_over_stages = of_one_device(case), _pipeline._sum_over_stages

    def sum_without_half(sums: Any) -> Any:
        loss, edges, shared = sum_over_stages(sums)
        return loss, edges, jax.tree.map(lambda x: x / 2, shared)

    monkeypatch.setattr(_pipeline, "_sum_over_stages", sum_without_half)
    assert len(differences(afresh(case), wanted, 1e-2)) == 1


@pytest.mark.grid
def test_planning_counts_the_sum_of_the_learned_numbers_over_stages():
    """A program sends the loss and the count, of 4 bytes each, beside the gradients that planning counts."""
    counted, told = bytes_of_gradients(Case(MODEL, {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2}))
    assert counted["state"] == told["state"] + 2 * 4
    learned: Any = model_of(MODEL).parts.frequencies
    assert told["state"] - learned.alpha.nbytes < counted["state"] - 2 * 4  # the control
