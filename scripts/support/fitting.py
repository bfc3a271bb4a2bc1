"""The words on whether a plan fits into a device's memory and, if not, which plans for as many devices do."""

import dataclasses
import re

from recipes import Mesh, Recipe

from eqformer import nn, parallel, planning, training
from eqformer.planning import gigabytes
from support.mesh import flags
from support.setup import batch_shapes


def memory_bytes(text: str) -> int:
    """`80GB` (or `80G`) in bytes; raises a `ValueError` for anything else, such as a number without a unit."""
    found = re.fullmatch(r"([\d.]+) ?(?:([kmgt])(i?)b?|b)", text.strip(), re.IGNORECASE)
    try:
        power = 0 if found is None or not found[2] else " kmgt".index(found[2].lower())
        size = 0.0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** power
    except ValueError:  # of more than one point
        size = 0.0
    if not size >= 1:
        raise ValueError(
            f"--memory {text}: give what a device has as a number and a unit, such as 80GB (or 80G, of 10^9 bytes) or "
            f"141GiB (or 141Gi, of 2^30)."
        )
    return int(size)


def fitting(recipe: Recipe, memory: int, held: int, states: training.PlannedState, model: nn.Transformer) -> str:
    """Whether a plan that holds so much fits, as text; if not, up to three plans for as many devices that do."""
    verdict = "fits" if held <= memory else "does not fit"
    line = f"{verdict}: {gigabytes(held)} of {gigabytes(memory)} a device, before what the compiler needs to work in"
    if held <= memory:
        return line
    found = planning.fitting_plans(states, model, batch_shapes(recipe), memory)
    if found.least is None:
        return f"{line}\n{_too_large_state(found)}"
    if not found.offered:
        least, step = found.least
        return f"{line}\n{_too_large_step(found, least, step.total)}"
    lines = [
        f"  {choices(recipe, one)}: {gigabytes(step.total)}, sends {gigabytes(one.sent)} a step"
        for one, step in found.offered
    ]
    return "\n".join([line, "as many devices would hold it by", *lines])


def _too_large_state(found: planning.Fitting) -> str:
    return (
        f"no mesh of as many devices was found that fits, of {found.tried} that are possible: the state alone "
        f"(parameters, gradients, optimizer) takes {gigabytes(found.least_state)} at least; take more devices, or a "
        "smaller model (more pieces or a smaller batch make no difference to it)"
    )


def _too_large_step(found: planning.Fitting, least: planning.Candidate, held: int) -> str:
    stopped = (
        f"; the search stopped after {found.traced} of {found.in_question} plans, those that send least"
        if found.traced < found.in_question
        else ""
    )
    return (
        f"no mesh of as many devices was found that fits: the state does, with {gigabytes(least.state)}, but not the "
        f"temporaries of a step beside it, {gigabytes(held - least.state)} at least{stopped}; take more devices, more "
        "--microbatches, or a smaller --batch or --seq"
    )


def recipe_under(recipe: Recipe, one: planning.Candidate) -> Recipe:
    """The recipe with a candidate's mesh and choices."""
    execution = dataclasses.replace(recipe.execution, remat=one.remat)
    mesh, plan = Mesh(**parallel.axis_sizes(one.plan.mesh)), dataclasses.replace(recipe.plan, zero=one.plan.zero)
    return dataclasses.replace(recipe, mesh=mesh, plan=plan, execution=execution)


def choices(recipe: Recipe, one: planning.Candidate) -> str:
    """The candidate's choices, as flags."""
    remat = [f"--execution.remat {one.remat}"] * (one.remat != recipe.execution.remat)
    return " ".join(filter(None, [flags(recipe_under(recipe, one)), *remat])) or "one device"
