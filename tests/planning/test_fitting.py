"""The search for plans that fit, apart from models."""

from types import SimpleNamespace
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from eqformer.parallel import AXES, Plan
from eqformer.planning import _fitting, abstract_mesh, meshes_of, StepBytes


def numbered(number: int) -> _fitting.Candidate:
    plan: Any = SimpleNamespace(mesh=abstract_mesh({"fsdp": number + 1}), zero=1, number=number)
    return _fitting.Candidate(plan, model=None, state=0, sent=0.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.quick
def test_the_search_goes_on_until_a_plan_fits(monkeypatch):
    monkeypatch.setattr(_fitting, "TRACED", 1)
    step: Any = lambda one: StepBytes({"all": 100 - one.plan.number}, 0)
    candidates = [numbered(number) for number in range(80)]
    offered, traced = _fitting._search(candidates, step, 80, 3)
    assert [found.total for _, found in offered] == [80] and len(traced) == 21
    offered, traced = _fitting._search(candidates, step, 30, 3)
    assert (offered, min(found.total for _, found in traced), len(traced)) == ([], 100 - 63, 64)


def test_meshes_have_as_many_devices():
    plan = Plan(abstract_mesh({"fsdp": 4, "tensor": 2, "context": 2}), zero=1, microbatches=2)
    found = list(meshes_of(plan))
    assert all(isinstance(mesh, AbstractMesh) and mesh.axis_names == AXES and mesh.size == 16 for mesh, _ in found)
    assert all(mesh.shape["context"] == 2 and mesh.shape["pipe"] <= 2 for mesh, _ in found)
    assert {zero for _, zero in found} == {1, 3}
