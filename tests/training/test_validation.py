"""Validation and evaluation write means and scores as rows, at the steps at which they are due."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from eqformer import training


def test_rows_have_the_means_of_all_and_of_each_of_several_sources():
    rows, asked = [], []

    def of(loss: float) -> Any:
        rewards = {"reward_margin": loss / 2}
        return SimpleNamespace(loss=loss, accuracy=loss / 8, bytes_per_token=2.0, rewards=rewards)

    def means(model):
        asked.append(model)
        return of(3.0), {"a": of(2.0), "b": of(4.0)} if model == "mixed" else {"a": of(3.0)}

    validation = training.Validation(2, means, rows.append)
    zero = jnp.zeros((), jnp.int32)
    run = training.Progress(training.TrainState(None, None, zero, zero, zero), 0, 5, {})
    for run.step in range(1, 6):
        model = "mixed" if run.step < 5 else "one"
        run.state = training.TrainState(model, None, zero, zero, zero)
        validation.after_step(run)
    assert asked == ["mixed", "mixed", "one"] and [row["step"] for row in rows] == [2, 4, 5]  # and after the last
    assert rows[0]["validation_loss"] == 3.0 and rows[0]["validation_accuracy"] == 3 / 8
    assert rows[0]["validation_reward_margin"] == 1.5
    assert rows[0]["validation_bits_per_byte"] == pytest.approx(1.5 / math.log(2))
    assert (rows[0]["validation_loss/a"], rows[0]["validation_loss/b"]) == (2.0, 4.0)
    assert [name for name in rows[2] if "/" in name] == []


def test_scores_are_written_before_the_first_step_and_when_they_are_due():
    zero = jnp.zeros((), jnp.int32)

    def steps_with_scores(start: int) -> list[tuple[int | float, int | float]]:
        rows: list[dict[str, int | float]] = []
        callback = training.Evaluations(2, lambda model: {"evaluation/a/acc": model}, rows.append)
        run = training.Progress(training.TrainState(start, None, zero, zero, zero), start, 5, {})
        callback.begin(run)
        for run.step in range(start + 1, 6):
            run.state = training.TrainState(run.step, None, zero, zero, zero)
            callback.after_step(run)
        return [(row["step"], row["evaluation/a/acc"]) for row in rows]

    assert steps_with_scores(0) == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert steps_with_scores(2) == [(4, 4), (5, 5)]  # a run that goes on has the scores of step 2
