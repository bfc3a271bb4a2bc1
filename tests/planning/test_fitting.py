"""The search for plans that fit, apart from models."""

from types import SimpleNamespace
from typing import Any

import pytest

from eqformer.planning import _fitting, abstract_mesh, bytes_of, Fitting, offers, proposals, StepBytes


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
    assert told == [(done, 64) for done in range(21)]
    offered, traced = _fitting._search(candidates, step, 30, 3, lambda done, most: None)
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


@pytest.mark.parametrize(
    "amount, size",
    [("80GB", 80e9), ("80G", 80e9), ("80 g", 80e9), ("7B", 7), ("1.5k", 1500), ("2MB", 2e6), ("3T", 3e12)]
    + [("1KiB", 2**10), ("1Ki", 2**10), ("2mib", 2**21), ("141Gi", 141 * 2**30), ("1TiB", 2**40)],
)
def test_memory_has_the_units_that_people_write(amount, size):
    assert bytes_of(amount) == size
