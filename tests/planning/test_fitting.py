"""The search for plans that fit, apart from models."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import pytest

from eqformer import models, parallel
from eqformer.planning import (
    _fitting,
    _forecast,
    abstract_mesh,
    batch_shapes,
    best_plans,
    bytes_of,
    FirstLook,
    Fitting,
    offers,
    proposals,
    ranking_table,
    Roofline,
    StepBytes,
    topology,
)
from eqformer.training import optimizer, PlannedState


def numbered(number: int) -> _fitting.Candidate:
    plan: Any = SimpleNamespace(mesh=abstract_mesh({"fsdp": number + 1}), zero=1, number=number)
    return _fitting.Candidate(plan, model=None, state=0, sent=0.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.quick
def test_the_search_goes_on_until_a_plan_fits(monkeypatch):
    monkeypatch.setattr(_fitting, "TRACED", 1)
    step: Any = lambda one: StepBytes({"all": 100 - one.plan.number}, 0)
    candidates = [numbered(number) for number in range(80)]
    told = []
    offered, traced = _fitting._search(candidates, step, 80, 3, lambda *how: told.append(how))
    assert [found.total for _, found in offered] == [80] and len(traced) == 21
    assert told == [("plans traced, at most", done, 64) for done in range(21)]
    offered, traced = _fitting._search(candidates, step, 30, 3, lambda what, done, most: None)
    assert (offered, min(found.total for _, found in traced), len(traced)) == ([], 100 - 63, 64)


def test_what_was_found_is_told_or_what_is_too_large():
    one = numbered(3)._replace(state=10**9, sent=2e9)
    step, spelled = StepBytes({"all": 5 * 10**9}, 0), lambda one: f"--mesh.fsdp {one.plan.mesh.size}"
    assert offers(Fitting([(one, step)], (one, step), 10**9, 9, 5, 5), spelled) == (
        "as many devices would hold it by\n  --mesh.fsdp 4: 5.000 GB, sends 2.000 GB a step"
    )
    assert "of 9 that are possible: the state alone" in offers(Fitting([], None, 10**9, 9, 0, 0), spelled)
    for traced, stops in ((5, False), (2, True)):
        text = offers(Fitting([], (one, step), 10**9, 9, 5, traced), spelled)
        assert "with 1.000 GB, but not the temporaries of a step beside it, 4.000 GB" in text
        assert ("stopped after 2 of 5 plans" in text) == stops
    assert "no other mesh" in proposals([], spelled)


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


def test_the_first_ranking_comes_before_any_plan_is_traced(tiny: Tiny, monkeypatch):
    """And after a time at most, although meshes remain: then it says how many were compared."""
    events = []
    monkeypatch.setattr(_fitting, "step_bytes", lambda *_: events.append("traced") or StepBytes({"all": 1}, 0))
    show = lambda look: events.append(look)
    best_plans(*tiny, topology("h100:2"), first=show)
    assert isinstance(events[0], FirstLook) and events[1:] == ["traced"] * 3
    assert events[0].compared == events[0].meshes > 3 and len(events[0].proposals) == 3
    assert all(one.verdict is None and one.held == one.candidate.least > 0 for one in events[0].proposals)
    monkeypatch.setattr(_fitting, "FIRST_SECONDS", -1.0)
    events.clear()
    best_plans(*tiny, topology("h100:2"), first=show)
    assert events[0].compared == 1 < events[0].meshes and events[1:] == ["traced"] * 3


def test_a_tie_goes_to_the_plan_that_holds_least(tiny: Tiny, monkeypatch):
    """On one machine what is sent hides behind products, so that plans take as long; the control: bytes decide."""
    monkeypatch.setattr(_fitting, "step_bytes", lambda states, *_: StepBytes({"all": size(states.plan)}, 0))
    monkeypatch.setattr(_forecast, "_time", lambda *_: Roofline(1.0, 0.0, {}, (), 0.0, 1.0))
    size = lambda plan: plan.size("fsdp")
    fewest = best_plans(*tiny, topology("h100:2"), most=5)
    assert [one.held for one in fewest] == sorted(one.held for one in fewest)
    least = [one.candidate.least for one in fewest]
    size = lambda plan: -plan.size("fsdp")
    assert [one.candidate.least for one in best_plans(*tiny, topology("h100:2"), most=5)] != least
    table = ranking_table(fewest, [None] * len(fewest), lambda one: "", 10**9)
    assert table.count("<= 100.0%") == table.count(">= 1.000") == len(fewest) > 2 and "\n>= " in table


def test_plans_that_cannot_fit_are_not_traced(tiny: Tiny, monkeypatch):
    """Only one is where none can fit, to tell what is too large."""
    traced, size = [], 0
    step = lambda states, *_: traced.append(states.plan) or StepBytes({"all": size}, 0)
    monkeypatch.setattr(_fitting, "step_bytes", step)
    leasts = sorted({one.candidate.least for one in best_plans(*tiny, topology("h100:2"), most=99)})
    size = 10**12
    counts = []
    for memory in (leasts[0] - 1, leasts[0], leasts[-1]):
        traced.clear()
        assert not _fitting.fitting_plans(*tiny, memory, most=99).offered
        counts.append(len(traced))
    assert counts[0] == 1 <= counts[1] < len(leasts) <= counts[2]


@pytest.mark.parametrize(
    "amount, size",
    [("80GB", 80e9), ("80G", 80e9), ("80 g", 80e9), ("7B", 7), ("1.5k", 1500), ("2MB", 2e6), ("3T", 3e12)]
    + [("1KiB", 2**10), ("1Ki", 2**10), ("2mib", 2**21), ("141Gi", 141 * 2**30), ("1TiB", 2**40)],
)
def test_memory_has_the_units_that_people_write(amount, size):
    assert bytes_of(amount) == size
