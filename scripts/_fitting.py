"""Whether a plan fits into a device's memory, and which others of as many devices would."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
from _budget import activation_bytes, batch_shapes, state_bytes
from _mesh import abstract_plan, check_plan, flags, State
from _sent import sent_bytes
from _setup import build_model, optimizer_of
from recipes import Recipe

from eqformer import parallel


UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MOST_TENSOR, MOST_TRACED = (
    8,
    16,
)  # devices that share a layer; plans whose activations are worked out, a few seconds each


class Candidate(NamedTuple):
    """A plan that might fit: the recipe with its choices, what its state takes, and what a step sends."""

    recipe: Recipe
    plan: parallel.Plan
    state: int
    sent: float


def memory_bytes(text: str) -> int:
    """`80GB` in bytes; raises a `ValueError` for what is no amount of memory."""
    found = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in UNITS.items()}
    try:
        size = 0.0 if found is None else float(found[1]) * units[found[2].lower()]
    except (ValueError, KeyError):
        size = 0.0
    if not size >= 1:
        raise ValueError(f"--memory {text}: give what a device has as a number and a unit, such as 80GB or 141GiB.")
    return int(size)


def fitting(recipe: Recipe, memory: int, held: int) -> str:
    """Whether `held` bytes fit, in words; where they do not, up to three plans of as many devices that would."""
    verdict = "fits" if held <= memory else "does not fit"
    line = f"{verdict}: {_gigabytes(held)} of {_gigabytes(memory)} a device, before what the compiler needs to work in"
    if held <= memory:
        return line
    found = list(itertools.islice(_fitting(recipe, memory), 3))
    if not found:
        return f"{line}\nno mesh of as many devices was found that fits; take more devices, or --accumulate more pieces"
    lines = [
        f"  {_choices(recipe, one)}: {_gigabytes(size)}, sends {_gigabytes(one.sent)} a step" for one, size in found
    ]
    return "\n".join([line, "as many devices would hold it by", *lines])


def _fitting(recipe: Recipe, memory: int) -> Iterator[tuple[Candidate, int]]:
    """Candidates that fit and the bytes of each, those that send least first."""
    in_question = sorted(_candidates(recipe, memory), key=lambda one: one.sent)
    known = []
    for one in in_question[:MOST_TRACED]:
        if (one.recipe.mesh, one.recipe.zero) in known:  # it fits without computing more again
            continue
        model = eqx.filter_eval_shape(build_model, one.recipe)
        held = one.state + sum(activation_bytes(one.plan, model, batch_shapes(one.recipe)).values())
        if held <= memory:
            known.append((one.recipe.mesh, one.recipe.zero))
            yield one, held


def _candidates(recipe: Recipe, memory: int) -> Iterator[Candidate]:
    """Plans over as many devices whose state alone fits: other sizes of fsdp, tensor and pipe, zero 3, all again."""
    mesh = recipe.mesh
    number = mesh.replica * mesh.fsdp * mesh.tensor * mesh.pipe
    for tensor, pipe in itertools.product(range(1, min(number, MOST_TENSOR) + 1), range(1, number + 1)):
        if number % (tensor * pipe) or (pipe > 1 and recipe.microbatches * recipe.accumulate < pipe):
            continue
        sizes = dataclasses.replace(mesh, replica=1, fsdp=number // (tensor * pipe), tensor=tensor, pipe=pipe)
        for zero in sorted({recipe.zero, 3} if sizes.fsdp > 1 else {recipe.zero}):
            of_mesh = dataclasses.replace(recipe, mesh=sizes, zero=zero)
            for remat in dict.fromkeys((recipe.execution.remat, "full")):
                execution = dataclasses.replace(recipe.execution, remat=remat)
                candidate = _candidate(dataclasses.replace(of_mesh, execution=execution), memory)
                if candidate is None:
                    break
                yield candidate


def _candidate(recipe: Recipe, memory: int) -> Candidate | None:
    """The recipe's plan with its costs; None for one that cannot be, or whose state is too much."""
    try:
        plan, model = abstract_plan(recipe), eqx.filter_eval_shape(build_model, recipe)
        check_plan(recipe, plan, model)
    except ValueError:
        return None
    states = State(recipe, plan, optimizer_of(recipe, model))
    state = sum(own for own, _ in state_bytes(plan, states).values())
    if state > memory:
        return None
    sent = sent_bytes(plan, model, rows=recipe.batch, seq=recipe.seq, trained=states.optimizer.trained)
    return Candidate(recipe, plan, state, math.fsum(each.size for each in sent))


def _choices(before: Recipe, one: Candidate) -> str:
    """The candidate in flags."""
    remat = one.recipe.execution.remat
    words = [flags(one.recipe)] + [f"--execution.remat {remat}"] * (remat != before.execution.remat)
    return " ".join(filter(None, words)) or "one device"


def _gigabytes(size: float) -> str:
    return f"{size / 10**9:,.{1 if size >= 10**10 else 3}f} GB"
