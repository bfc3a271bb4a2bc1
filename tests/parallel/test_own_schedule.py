"""A user's pipeline schedule (`docs/extending.md`), with its own placement, runs beside every other axis."""

import dataclasses
import functools
import re

import numpy as np
import plan_controls as control
import pytest
from extending import beside, PAGE
from plan_models import model_of
from plan_parity import Case, differences, of_one_device, of_plan, total_of_plan, trained_by_plan, trained_on_one_device

from eqformer import parallel


ROUNDING = 50 * float(np.finfo(np.float32).eps)


def waves(*counts: int, number: int = 2) -> parallel.Schedule:
    """The page's schedule."""
    return beside("waves").waves(*counts, number=number)


once = functools.partial(waves, number=1)
CASES = {
    "tensor": Case(
        "eight layers", {"pipe": 2, "tensor": 2}, {"schedule": waves, "microbatches": 2, "residual": "feature"}
    ),
    "zero 2, context": Case(
        "eight layers", {"fsdp": 2, "pipe": 2, "context": 2}, {"schedule": waves, "microbatches": 4, "zero": 2}
    ),
    "zero 3": Case(
        "eight layers", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"schedule": waves, "microbatches": 2, "zero": 3}, "full"
    ),
    "four devices": Case("eight layers", {"pipe": 4, "fsdp": 2}, {"schedule": once, "microbatches": 4, "zero": 1}),
    "unequal parts": Case("five layers", {"pipe": 2, "tensor": 2}, {"schedule": once, "microbatches": 2}),
    "mixtures": Case("shared mixture", {"pipe": 2, "expert": 2}, {"schedule": once, "microbatches": 4}),
    "many microbatches": Case(
        "eight layers", {"pipe": 2}, {"schedule": waves, "microbatches": 8, "residual": "sequence"}
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_one_devices(name):
    case = CASES[name]
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
def test_layers_need_its_placement(monkeypatch):
    """Layers that lie in reading order run in another one."""
    case = CASES["tensor"]
    want = of_one_device(case)
    control.in_order_read(monkeypatch)
    assert total_of_plan(case) != pytest.approx(float(want.total), rel=1e-3)


@pytest.mark.grid
def test_steps_equal_one_devices():
    case = CASES["zero 2, context"]
    got, want = trained_by_plan(case), trained_on_one_device(case.model, case.optimizer, case.dtypes)
    for found, expected in zip(got.metrics, want.metrics, strict=True):
        assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    "stages,microbatches,number", [(1, 1, 2), (2, 2, 1), (2, 4, 2), (4, 4, 3), (4, 6, 2), (3, 2, 2)]
)
def test_it_is_complete_and_turns_without_sending(stages, microbatches, number):
    schedule = waves(stages, microbatches, number=number)
    found = parallel.simulate(schedule)
    assert schedule.part_of[0].tolist() == [i * stages * 2 + j for i in range(number) for j in (0, 2 * stages - 1)]
    turns = 2 * number - 1  # a microbatch is handed over where a wave turns, forwards and backwards
    assert found.messages.sum() == 2 * microbatches * (schedule.parts - 1 - turns)
    assert found.peak(1.0, 0.0).max() <= stages * schedule.chunks


@pytest.mark.quick
def test_its_timeline_is_the_pages():
    text = PAGE.read_text(encoding="utf-8").split("## A schedule\n")[1]
    shown = re.search(r"```text\n(.*?)\n```", text, re.DOTALL)
    assert shown and shown.group(1) == parallel.draw_timeline(waves(2, 2))


def test_what_cannot_be_run_is_refused():
    table = waves(2, 2)
    late = table.forward.copy()
    late[0, 0] = parallel.IDLE
    choices = {"schedule": dataclasses.replace(table, forward=late), "microbatches": 2}
    with pytest.raises(
        ValueError, match=r"stage 0, microbatch 0, chunk 0: the rule is one forward entry, but there is none"
    ):
        Case("eight layers", {"pipe": 2}, choices).plan.timetable()
    five = model_of("five layers")
    with pytest.raises(ValueError, match="more parts than layers"):
        Case("five layers", {"pipe": 2}, {"schedule": waves, "microbatches": 2}).plan.check(five, rows=8, seq=16)
