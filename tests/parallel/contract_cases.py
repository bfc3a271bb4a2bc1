"""Runs of users' own modules under plans: tests share one program for each case, and read which bytes it sends."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from plan_models import batch_of, model_of, plan_over
from plan_parity import (
    Case,
    differences,
    of_one_device,
    of_plan as afresh,
    Outcome,
    place,
    program_under,
    total_of_plan,
)

from eqformer import generation, nn
from eqformer.parallel import ShardedModel
from eqformer.planning import counted_bytes, sent_bytes, sum_by_cause
from eqformer.program import list_transfers, read_hlo


ROUNDING = 50 * float(np.finfo(np.float32).eps)
ZERO: dict[str, Any] = {"zero": 3, "smallest": 1}
STAGES = {"schedule": "zb-h1", "microbatches": 2, "residual": "sequence", "overlap": "ring"}


class SilentMixer(nn.Mixer):
    """A user's own mixer around another mixer, which declares nothing."""

    inner: nn.Mixer

    def __call__(self, x, tokens=None, cache=None):
        """Call the inner mixer."""
        return self.inner(x, tokens, cache)

    def init_cache(self, *args):
        """Return the inner mixer's empty cache."""
        return self.inner.init_cache(*args)


@functools.cache
def ran(model: str, mesh: tuple, choices: tuple) -> tuple[Outcome, Any]:
    """Return a model's loss and gradients under a plan, and the compiled program that computed them."""
    case = Case(model, dict(mesh), dict(choices))
    run = program_under(case.plan, model_of(model), batch_of(model_of(model)))
    return run(model_of(model)), run.program  # type: ignore[attr-defined]


def of_plan(case: Case) -> Outcome:
    """Return the case's loss and gradients under its plan, computed once for all tests if `remat` is "none".

    A test that breaks something on purpose compiles its own program, with `afresh`.
    """
    return ran(case.model, (*case.mesh.items(),), (*case.choices.items(),))[0] if case.remat == "none" else afresh(case)


def float64_differences(case: Case) -> dict[str, float]:
    """Return the leaves that differ from one device's by more than rounding when both are computed in float64."""
    with jax.enable_x64(True):
        case = case._replace(dtypes=("float64", "float64"))
        return differences(afresh(case), of_one_device(case), 1e-12)


def write_texts(model: Any) -> Any:
    """Generate after two prompts, sampling with one key; return the texts' ids with their log-probabilities."""
    options: Any = {"transforms": generation.sampling(temperature=0.8), "key": jax.random.key(1)}
    return generation.generate(model, [[3, 5, 7, 9, 11], [2]], max_new_tokens=9, log_probabilities=True, **options)


def texts_over(name: str, mesh: dict[str, int]) -> tuple[Any, Any]:
    """Return the texts that a model generates over a mesh, and those that it generates on one device."""
    model, plan = model_of(name), plan_over(mesh)
    return write_texts(ShardedModel(place(model, plan), plan)), write_texts(model)


def is_seen(case: Case) -> bool:
    """Return whether the loss under a plan, in which a test has broken something, differs from one device's loss."""
    want = float(of_one_device(case).total)
    return abs(total_of_plan(case) - want) > 1e-3 * want


def named(every_run: list[Case], grid: list[Case]) -> list:
    """Return both lists of cases as parameters of a test; those of `grid` are marked to run only with the grid."""
    marks = [pytest.mark.grid]
    return [pytest.param(case, id=case.name, marks=[] if case in every_run else marks) for case in (*every_run, *grid)]


def bytes_of_gradients(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes by cause that the compiled program sends, and those that planning's formulas predict."""
    model, plan = model_of(case.model), case.plan
    program = ran(case.model, (*case.mesh.items(),), (*case.choices.items(),))[1]
    counted = counted_bytes(plan, list_transfers(read_hlo(program, mesh=plan.mesh)))
    return counted, sum_by_cause(sent_bytes(plan, model, rows=8, seq=16))
