"""Which plans of as many devices fit into a device's memory, from shapes alone."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType

from .. import nn, parallel, training
from .._shapes import Batch
from ..parallel import AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from ._accelerators import for_platform
from ._held_bytes import state_bytes, step_bytes
from ._sent_bytes import sent_bytes
from ._temporary_bytes import StepBytes


MOST_TENSOR = 8  # the largest tensor axis that is tried: on GPUs a larger one would send between machines
MOST_CONTEXT = 8  # the largest context axis that is tried
TRACED = 16  # the most plans that are traced (a second or more each), if some of them fit
MOST_TRACED = 64  # the same, if none fits
MOST_OFFERED = 3  # the most plans that are offered
Progress = Callable[[int, int], None]
"""Is called with how many plans were traced, and of how many at most."""


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
    progress: Progress = lambda done, most: None,
) -> Fitting:
    """The plans for as many devices that fit into `memory`, those of the least `cost` (bytes sent, by default) first.

    Plans have the `states`' choices, on the `meshes` with their stage of zero (by default `every_mesh` of as many
    devices), with the model's policy of recomputation or recomputing all. Nothing is compiled; models are traced once
    each.

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
        progress: Called before each of these with how many are done, and how many there are at most.
    """
    chosen = list(every_mesh(states.plan.mesh.size, states.plan, model) if meshes is None else meshes)
    candidates, least_state, tried = _candidates(states, model, batch, memory, chosen, platform)
    candidates.sort(key=cost)
    step = lambda one: step_bytes(states.under(one.plan), one.model, batch, platform)
    offered, traced = _search(candidates if tries is None else candidates[:tries], step, memory, most, progress)
    least = min(traced, key=lambda its: its[1].total, default=None)
    return Fitting(offered, least, least_state, tried, len(candidates), len(traced))


def every_mesh(
    devices: int,
    plan: parallel.Plan,
    model: nn.Transformer,
    *,
    tensor: int = MOST_TENSOR,
    context: int = MOST_CONTEXT,
    replicas: Iterable[int] = (1,),
) -> Iterator[tuple[AbstractMesh, int]]:
    """Meshes of so many devices with a stage of zero each: the plan's and, where `fsdp` splits rows, 3.

    `pipe` has as many stages as there are microbatches and layers, `expert` as many devices as there are experts;
    `fsdp` has the rest.

    Args:
        devices: How many there are.
        plan: Whose microbatches and stage of zero are meant.
        model: The model, or its shapes.
        tensor: The most devices of that axis.
        context: The most devices of that axis.
        replicas: What `replica` may have.
    """
    experts = min((moe.router.facts().experts for moe in nn.modules(model, nn.MoE)), default=1)
    stages = min(plan.microbatches, sum(map(len, model.stacks)))
    most = (_divisors(devices, int(size)) for size in (experts, stages, context, tensor))
    for replica, expert, pipe, ring, split in itertools.product(sorted(set(replicas)), *most):
        rest, left = divmod(devices, replica * expert * pipe * ring * split)
        if rest and not left:
            sizes = {REPLICA: replica, FSDP: rest, EXPERT: expert, PIPE: pipe, CONTEXT: ring, TENSOR: split}
            yield from ((abstract_mesh(sizes), zero) for zero in sorted({plan.zero, 3} if rest > 1 else {plan.zero}))


def _divisors(number: int, most: int) -> list[int]:
    """The divisors of a number up to `most`."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, of any size; axes that are not named have one. Raises a `ValueError` for one below 1."""
    if wrong := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"abstract_mesh({sizes}): an axis has at least one device; change {wrong}.")
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


def _search(
    candidates: list[Candidate], step: Callable[[Candidate], StepBytes], memory: int, most: int, progress: Progress
) -> tuple[list[tuple[Candidate, StepBytes]], list[tuple[Candidate, StepBytes]]]:
    """The candidates that fit, and all that were traced, each with its bytes: in order, until a limit is reached."""
    offered: list[tuple[Candidate, StepBytes]] = []
    traced: list[tuple[Candidate, StepBytes]] = []
    for one in candidates:
        limit = TRACED if offered else MOST_TRACED
        if len(offered) == most or len(traced) >= limit:
            break
        progress(len(traced), min(limit, len(candidates)))
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
    states: training.PlannedState, model: nn.Transformer, batch: Batch, memory: int, meshes: list, platform: str
) -> tuple[list[Candidate], int, int]:
    """Plans whose state fits; the fewest bytes of a state; and the number of meshes tried.

    A mesh's state is made once for all policies of recomputation.
    """
    models = [model, *([nn.with_execution(model, remat="full")] if model.stacks[0].remat != "full" else [])]
    rows, seq = batch.ids.shape
    found, sizes = [], []
    for mesh, zero in meshes:
        for one in models:
            try:
                plan = for_platform(dataclasses.replace(states.plan, mesh=mesh, zero=zero), platform)
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
