"""The search for plans that fit, without models."""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import pytest

from eqformer import models, parallel
from eqformer.planning import (
    _search,
    abstract_mesh,
    batch_shapes,
    Candidate,
    DeviceMemory,
    format_search,
    parse_bytes,
    PlanSearch,
    Proposal,
    ranking_table,
    Roofline,
    search_plans,
    ShapeRanking,
    StepBytes,
    topology,
)
from eqformer.training import optimizer, PlannedState


def numbered(number: int) -> Candidate:
    plan: Any = SimpleNamespace(mesh=abstract_mesh({"fsdp": number + 1}), zero=1, number=number)
    return Candidate(plan, model=None, state=0, sent=0.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.quick
def test_the_search_goes_on_until_a_plan_fits(monkeypatch):
    monkeypatch.setattr(_search, "MAX_TRACED", 1)
    step: Any = lambda candidate: StepBytes({"all": 100 - candidate.plan.number}, 0)
    candidates = [numbered(number) for number in range(80)]
    progress = []
    fitting, traced = _search._trace_until_fits(candidates, step, 80, 3, lambda *counts: progress.append(counts))
    assert [step.total for _, step in fitting] == [80] and len(traced) == 21
    assert progress == [("plans traced, at most", done, 64) for done in range(21)]
    fitting, traced = _search._trace_until_fits(candidates, step, 30, 3, lambda cause, done, most: None)
    assert (fitting, min(step.total for _, step in traced), len(traced)) == ([], 100 - 63, 64)


def test_a_result_lists_plans_or_what_is_too_large():
    candidate = numbered(3)._replace(state=10**9, sent=2e9)
    step, flags = StepBytes({"all": 5 * 10**9}, 0), lambda candidate: f"--mesh.fsdp {candidate.plan.mesh.size}"
    proposal, smallest = Proposal(candidate, step.total), (candidate, step)
    heading = "plans for the same number of devices, by formulas:\n  --mesh.fsdp 4: 5.000 GB, sends 2.000 GB a step"
    assert format_search(PlanSearch([proposal], smallest, 10**9, 9, 5, 5), flags) == heading
    timed = proposal._replace(time=Roofline(2.0, 0.0, {}, (), 0.0, 1.0))
    assert format_search(PlanSearch([timed], smallest, 1, 9, 5, 5), flags) == f"{heading}, at least 2.000 s a step"
    unsure = proposal._replace(verdict="too close to tell without the compiler")
    assert format_search(PlanSearch([unsure], smallest, 1, 9, 5, 5), flags) == f"{heading}, {unsure.verdict}"
    assert "of 9 possible meshes: the state alone" in format_search(PlanSearch([], None, 10**9, 9, 0, 0), flags)
    for traced, stops in ((5, False), (2, True)):
        text = format_search(PlanSearch([], smallest, 10**9, 9, 5, traced), flags)
        assert "takes 1.000 GB and fits alone, but the temporaries of a step take at least 4.000 GB more" in text
        assert ("only the first 2 were traced" in text) == stops


class Tiny(NamedTuple):
    """A state, its model and a batch."""

    states: PlannedState
    model: Any
    batch: Any


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    config = models.LlamaConfig(vocab=256, embed=64, layers=2, heads=4, kv_heads=2, mlp=128)
    make = lambda: models.build(config, key=jax.random.key(0))
    shapes = eqx.filter_eval_shape(make)
    plan = parallel.Plan(abstract_mesh({"fsdp": 2}))
    return Tiny(PlannedState(make, optimizer("adamw", shapes, rate=1e-3), plan), shapes, batch_shapes(64, 128))


@pytest.mark.grid
def test_the_first_ranking_comes_before_any_plan_is_traced(tiny: Tiny, monkeypatch):
    """And after a time at most, although meshes remain: then it says how many were compared."""
    events = []
    monkeypatch.setattr(_search, "step_bytes", lambda *_, **__: events.append("traced") or StepBytes({"all": 1}, 0))
    monkeypatch.setattr(_search, "FIRST_SECONDS", math.inf)  # on a busy machine, too, all meshes are compared
    show = lambda ranking: events.append(ranking)
    search_plans(*tiny, topology("h100:2"), show_ranking=show)
    assert isinstance(events[0], ShapeRanking) and events[1:] == ["traced"] * 3
    assert events[0].compared == events[0].meshes > 3 and len(events[0].proposals) == 3
    assert all(one.verdict is None and one.held == one.candidate.min_held > 0 for one in events[0].proposals)
    monkeypatch.setattr(_search, "FIRST_SECONDS", -1.0)
    events.clear()
    search_plans(*tiny, topology("h100:2"), show_ranking=show)
    assert events[0].compared == 1 < events[0].meshes and events[1:] == ["traced"] * 3


def test_a_tie_goes_to_the_plan_that_holds_least(tiny: Tiny, monkeypatch):
    """On one machine what is sent hides behind products, so that plans take as long; the control: bytes decide."""
    monkeypatch.setattr(_search, "step_bytes", lambda states, *_, **__: StepBytes({"all": size(states.plan)}, 0))
    monkeypatch.setattr(
        "eqformer.planning._forecast.training_time", lambda *_, **__: Roofline(1.0, 0.0, {}, (), 0.0, 1.0)
    )
    size = lambda plan: plan.size("fsdp")
    propose = lambda: search_plans(*tiny, topology("h100:2"), limit=5).proposals
    fewest = propose()
    assert [proposal.held for proposal in fewest] == sorted(proposal.held for proposal in fewest)
    least = [proposal.candidate.min_held for proposal in fewest]
    size = lambda plan: -plan.size("fsdp")
    assert [proposal.candidate.min_held for proposal in propose()] != least
    table = ranking_table(fewest, [None] * len(fewest), lambda candidate: "", 10**9)
    assert table.count("<= 100.0%") == table.count(">= 1.000") == len(fewest) > 2 and "\n>= " in table


def test_plans_that_cannot_fit_are_not_traced(tiny: Tiny, monkeypatch):
    """Only one is where none can fit, to tell what is too large."""
    traced, size = [], 0
    step = lambda states, *_, **__: traced.append(states.plan) or StepBytes({"all": size}, 0)
    monkeypatch.setattr(_search, "step_bytes", step)
    leasts = sorted(
        {proposal.candidate.min_held for proposal in search_plans(*tiny, topology("h100:2"), limit=99).proposals}
    )
    size = 10**12
    counts = []
    for memory in (leasts[0] - 1, leasts[0], leasts[-1]):
        traced.clear()
        assert not search_plans(*tiny, DeviceMemory(memory), limit=99).proposals
        counts.append(len(traced))
    assert counts[0] == 1 <= counts[1] < len(leasts) <= counts[2]


def test_a_search_needs_the_memory_of_a_device(tiny: Tiny):
    with pytest.raises(ValueError, match="so give a device's memory"):
        search_plans(*tiny, DeviceMemory())


@pytest.mark.parametrize(
    "amount, size",
    [("80GB", 80e9), ("80G", 80e9), ("80 g", 80e9), ("7B", 7), ("1.5k", 1500), ("2MB", 2e6), ("3T", 3e12)]
    + [("1KiB", 2**10), ("1Ki", 2**10), ("2mib", 2**21), ("141Gi", 141 * 2**30), ("1TiB", 2**40)],
)
def test_memory_has_the_units_that_people_write(amount, size):
    assert parse_bytes(amount) == size
