"""Whether a plan fits into a device's memory and, if not, which plans for the same number of devices do."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from recipes import Mesh, Recipe

from eqformer import nn, parallel
from eqformer.planning import activation_bytes, sent_bytes, state_bytes
from support.mesh import abstract_plan, check_plan, flags, state_of
from support.setup import batch_shapes, optimizer_of, shapes_of


MOST_TENSOR = 8  # the largest tensor axis that is tried: a larger one would send over the links between machines
TRACED = 16  # the most plans whose activations are computed (a second or more each), if some of them fit
MOST_TRACED = 64  # the same, if none fits
MOST_OFFERED = 3  # the most plans that are listed


class Candidate(NamedTuple):
    """A plan that might fit: its recipe and model, the bytes of its state on a device, and the bytes sent in a step."""

    recipe: Recipe
    plan: parallel.Plan
    model: nn.Transformer
    state: int
    sent: float


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


def fitting(recipe: Recipe, memory: int, state: int, activations: int) -> str:
    """Whether a plan's state and activations fit, as text; if not, up to three plans for as many devices that do."""
    held = state + activations
    verdict = "fits" if held <= memory else "does not fit"
    line = f"{verdict}: {_gigabytes(held)} of {_gigabytes(memory)} a device, before what the compiler needs to work in"
    if held <= memory:
        return line
    in_question, least_state, number = _candidates(recipe, memory)
    if not in_question:
        return f"{line}\n{_too_large_state(least_state, number)}"
    offered, least, traced = _search(in_question, memory)
    if not offered:
        return f"{line}\n{_too_large_activations(*least, traced, len(in_question))}"
    lines = [
        f"  {_choices(recipe, one)}: {_gigabytes(size)}, sends {_gigabytes(one.sent)} a step" for one, size in offered
    ]
    return "\n".join([line, "as many devices would hold it by", *lines])


def _too_large_state(least: int, number: int) -> str:
    return (
        f"no mesh of as many devices was found that fits, of {number} that are possible: the state alone (parameters, "
        f"gradients, optimizer) takes {_gigabytes(least)} at least; take more devices, or a smaller model (more pieces "
        "or a smaller batch make no difference to it)"
    )


def _too_large_activations(least: Candidate, held: int, traced: int, number: int) -> str:
    stopped = f"; the search stopped after {traced} of {number} plans, those that send least" * (traced < number)
    return (
        f"no mesh of as many devices was found that fits: the state does, with {_gigabytes(least.state)}, but not the "
        f"activations beside it, {_gigabytes(held - least.state)} at least{stopped}; take more devices, more "
        "--microbatches, or a smaller --batch or --seq"
    )


def _search(
    in_question: list[Candidate], memory: int
) -> tuple[list[tuple[Candidate, int]], tuple[Candidate, int], int]:
    """The candidates that fit, each with its bytes; the candidate with the fewest bytes; and how many were traced.

    Candidates are tried in order, plans that send least first, until `MOST_OFFERED` fit or the limits are reached.
    """
    offered: list[tuple[Candidate, int]] = []
    traced: list[tuple[Candidate, int]] = []
    for one in in_question:
        enough = TRACED if offered else MOST_TRACED
        if len(offered) == MOST_OFFERED or len(traced) >= enough:
            break
        if any(_devices(one) == _devices(other) for other, _ in offered):
            continue  # the same mesh fits already with less recomputation
        held = one.state + sum(activation_bytes(one.plan, one.model, batch_shapes(one.recipe)).values())
        traced.append((one, held))
        if held <= memory:
            offered.append((one, held))
    return offered, min(traced, key=lambda its: its[1]), len(traced)


def _devices(one: Candidate) -> tuple[Mesh, int]:
    return one.recipe.mesh, one.recipe.plan.zero


def _candidates(recipe: Recipe, memory: int) -> tuple[list[Candidate], int, int]:
    """Plans whose state fits, those that send least first; the fewest bytes of a state; and the number of meshes tried.

    Shapes that do not depend on the mesh are made once, and a mesh's state once for all remat policies.
    """
    executions = [
        dataclasses.replace(recipe.execution, remat=remat) for remat in dict.fromkeys((recipe.execution.remat, "full"))
    ]
    recipes = [dataclasses.replace(recipe, execution=execution) for execution in executions]
    models = [shapes_of(one) for one in recipes]
    states = state_of(recipe, abstract_plan(recipe), optimizer_of(recipe, models[0]), models[0])
    found, sizes = [], []
    for mesh, zero in _meshes(recipe):
        for one, model in zip(recipes, models):
            own = dataclasses.replace(one, mesh=mesh, plan=dataclasses.replace(one.plan, zero=zero))
            try:
                plan = abstract_plan(own)
                check_plan(own, plan, model)
            except ValueError:  # the plan does not suit the model
                break
            if one is recipes[0]:
                sizes.append(sum(size for size, _ in state_bytes(states.under(plan)).values()))
            if sizes[-1] > memory:
                break
            sent = sent_bytes(plan, model, rows=own.batch, seq=own.seq, trained=states.optimizer.trained)
            found.append(Candidate(own, plan, model, sizes[-1], math.fsum(each.size for each in sent)))
    return sorted(found, key=lambda its: its.sent), min(sizes, default=memory + 1), len(sizes)


def _meshes(recipe: Recipe) -> Iterator[tuple[Mesh, int]]:
    """Meshes of other sizes of fsdp, tensor and pipe over as many devices, with the recipe's `zero` and with 3."""
    mesh = recipe.mesh
    number = mesh.replica * mesh.fsdp * mesh.tensor * mesh.pipe
    for tensor, pipe in itertools.product(range(1, min(number, MOST_TENSOR) + 1), range(1, number + 1)):
        if number % (tensor * pipe) or (pipe > 1 and recipe.plan.microbatches < pipe):
            continue
        sizes = dataclasses.replace(mesh, replica=1, fsdp=number // (tensor * pipe), tensor=tensor, pipe=pipe)
        yield from ((sizes, zero) for zero in sorted({recipe.plan.zero, 3} if sizes.fsdp > 1 else {recipe.plan.zero}))


def _choices(before: Recipe, one: Candidate) -> str:
    """The candidate's choices, as flags."""
    remat = one.recipe.execution.remat
    words = [flags(one.recipe)] + [f"--execution.remat {remat}"] * (remat != before.execution.remat)
    return " ".join(filter(None, words)) or "one device"


def _gigabytes(size: float) -> str:
    return f"{size / 10**9:,.{1 if size >= 10**10 else 3}f} GB"
