"""Somebody's own modules under a plan: one program a case, which tests share, and what it sends."""

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
    """What a plan makes of the model, and the program that did it."""
    case = Case(model, dict(mesh), dict(choices))
    run = program_under(case.plan, model_of(model), batch_of(model_of(model)))
    return run(model_of(model)), run.program  # type: ignore[attr-defined]


def of_plan(case: Case) -> Outcome:
    """What the plan makes of the model; the same for all tests but those that break something."""
    return ran(case.model, (*case.mesh.items(),), (*case.choices.items(),))[0] if case.remat == "none" else afresh(case)


def float64_differences(case: Case) -> dict[str, float]:
    """Return the leaves that differ from one device's by more than rounding, if all is computed in float64."""
    with jax.enable_x64(True):
        case = case._replace(dtypes=("float64", "float64"))
        return differences(afresh(case), of_one_device(case), 1e-12)


def write_texts(model: Any) -> Any:
    """Texts after two prompts, sampled with one key, and their log-probabilities."""
    options: Any = {"transforms": generation.sampling(temperature=0.8), "key": jax.random.key(1)}
    return generation.generate(model, [[3, 5, 7, 9, 11], [2]], max_new_tokens=9, log_probabilities=True, **options)


def texts_over(name: str, mesh: dict[str, int]) -> tuple[Any, Any]:
    """The texts of a model over a mesh, and on one device."""
    model, plan = model_of(name), plan_over(mesh)
    return write_texts(ShardedModel(place(model, plan), plan)), write_texts(model)


def is_seen(case: Case) -> bool:
    """Whether a plan in which something is broken has another loss than one device."""
    want = float(of_one_device(case).total)
    return abs(total_of_plan(case) - want) > 1e-3 * want


def named(every_run: list[Case], grid: list[Case]) -> list:
    """Cases for every run, and others for the grid."""
    marks = [pytest.mark.grid]
    return [pytest.param(case, id=case.name, marks=[] if case in every_run else marks) for case in (*every_run, *grid)]


def bytes_of_gradients(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """What the compiled program sends by cause, and what formulas say."""
    model, plan = model_of(case.model), case.plan
    program = ran(case.model, (*case.mesh.items(),), (*case.choices.items(),))[1]
    counted = counted_bytes(plan, list_transfers(read_hlo(program, mesh=plan.mesh)))
    return counted, sum_by_cause(sent_bytes(plan, model, rows=8, seq=16))
