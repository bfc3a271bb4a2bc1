"""Which plans of as many devices fit into a device's memory, from shapes alone."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType

from .. import nn, parallel, training
from .._shapes import Batch
from ..parallel import AXES, FSDP, PIPE, REPLICA, TENSOR
from ._held_bytes import state_bytes, step_bytes
from ._sent_bytes import sent_bytes
from ._temporary_bytes import StepBytes


MOST_TENSOR = 8  # the largest tensor axis that is tried: a larger one would send over the links between machines
TRACED = 16  # the most plans that are traced (a second or more each), if some of them fit
MOST_TRACED = 64  # the same, if none fits
MOST_OFFERED = 3  # the most plans that are offered


class Candidate(NamedTuple):
    """A plan that might fit: with its model, the bytes of its state on a device, and the bytes sent in a step."""

    plan: parallel.Plan
    model: nn.Transformer
    state: int
    sent: float

    @property
    def remat(self) -> str:
        """What its backward pass computes again."""
        return self.model.stacks[0].remat


class Fitting(NamedTuple):
    """What a search found."""

    offered: list[tuple[Candidate, StepBytes]]
    """Plans that fit, each with the bytes of its step."""
    least: tuple[Candidate, StepBytes] | None
    """The plan that holds the fewest bytes of all that were traced; None if no plan's state fits alone."""
    least_state: int
    """The fewest bytes of a plan's state."""
    tried: int
    """How many meshes there are."""
    in_question: int
    """Of how many plans the state fits."""
    traced: int
    """Of how many all bytes were computed, too."""


def fitting_plans(
    states: training.PlannedState,
    model: nn.Transformer,
    batch: Batch,
    memory: int,
    *,
    platform: str = "cuda",
    meshes: Iterable[tuple[AbstractMesh, int]] | None = None,
    cost: Callable[[Candidate], float] = lambda one: one.sent,
    most: int = MOST_OFFERED,
    tries: int | None = None,
) -> Fitting:
    """The plans for as many devices that fit into `memory`, those of the least `cost` (bytes sent, by default) first.

    Plans have the `states`' choices, on the `meshes` with their stage of zero (by default `meshes_of` its plan), with
    the model's policy of recomputation or recomputing all. Nothing is compiled; models are traced once each.

    Args:
        states: The state under the plan in question.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        memory: Bytes of a device.
        platform: That of the compiler, as `step_bytes` takes it.
        meshes: Where to look.
        cost: What plans are ranked by.
        most: How many to offer.
        tries: Of how many, at most, bytes are computed; None: as many as it takes some minutes to compute.
    """
    chosen = list(meshes_of(states.plan) if meshes is None else meshes)
    candidates, least_state, tried = _candidates(states, model, batch, memory, chosen)
    candidates.sort(key=cost)
    step = lambda one: step_bytes(states.under(one.plan), one.model, batch, platform)
    offered, traced = _search(candidates if tries is None else candidates[:tries], step, memory, most)
    least = min(traced, key=lambda its: its[1].total, default=None)
    return Fitting(offered, least, least_state, tried, len(candidates), len(traced))


def meshes_of(plan: parallel.Plan) -> Iterator[tuple[AbstractMesh, int]]:
    """Meshes of other sizes of fsdp, tensor and pipe over as many devices, each with the plan's `zero` and with 3."""
    sizes = parallel.axis_sizes(plan.mesh)
    number = math.prod(sizes[axis] for axis in (REPLICA, FSDP, TENSOR, PIPE))
    for tensor, pipe in itertools.product(range(1, min(number, MOST_TENSOR) + 1), range(1, number + 1)):
        if number % (tensor * pipe) or (pipe > 1 and plan.microbatches < pipe):
            continue
        fsdp = number // (tensor * pipe)
        mesh = abstract_mesh(sizes | {REPLICA: 1, FSDP: fsdp, TENSOR: tensor, PIPE: pipe})
        yield from ((mesh, zero) for zero in sorted({plan.zero, 3} if fsdp > 1 else {plan.zero}))


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, of any size; axes that are not named have one. Raises a `ValueError` for one below 1."""
    if wrong := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"abstract_mesh({sizes}): an axis has at least one device; change {wrong}.")
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


def _search(
    candidates: list[Candidate], step: Callable[[Candidate], StepBytes], memory: int, most: int
) -> tuple[list[tuple[Candidate, StepBytes]], list[tuple[Candidate, StepBytes]]]:
    """The candidates that fit, and all that were traced, each with its bytes: in order, until a limit is reached."""
    offered: list[tuple[Candidate, StepBytes]] = []
    traced: list[tuple[Candidate, StepBytes]] = []
    for one in candidates:
        if len(offered) == most or len(traced) >= (TRACED if offered else MOST_TRACED):
            break
        if any(_place(one) == _place(other) for other, _ in offered):
            continue  # the same mesh fits already with less recomputation
        found = step(one)
        traced.append((one, found))
        if found.total <= memory:
            offered.append((one, found))
    return offered, traced


def _place(one: Candidate) -> tuple:
    return tuple(parallel.axis_sizes(one.plan.mesh).values()), one.plan.zero


def _candidates(
    states: training.PlannedState, model: nn.Transformer, batch: Batch, memory: int, meshes: list
) -> tuple[list[Candidate], int, int]:
    """Plans whose state fits; the fewest bytes of a state; and the number of meshes tried.

    A mesh's state is made once for all policies of recomputation.
    """
    models = [model, *([nn.run_with(model, remat="full")] if model.stacks[0].remat != "full" else [])]
    rows, seq = batch.ids.shape
    found, sizes = [], []
    for mesh, zero in meshes:
        for one in models:
            try:
                plan = dataclasses.replace(states.plan, mesh=mesh, zero=zero)
                plan.check(one, rows=rows, seq=seq)
            except ValueError:  # the plan does not suit the model
                break
            if one is models[0]:
                sizes.append(sum(size for size, _ in state_bytes(states.under(plan)).values()))
            if sizes[-1] > memory:
                break
            sent = sent_bytes(plan, one, rows=rows, seq=seq, trained=states.optimizer.trained)
            found.append(Candidate(plan, one, sizes[-1], math.fsum(each.size for each in sent)))
    return found, min(sizes, default=memory + 1), len(sizes)
