"""Which plans of as many devices fit into a device's memory, from shapes alone."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType

from .. import nn, parallel, training
from .._shapes import Batch
from ..parallel import AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from ._accelerators import for_platform
from ._held_bytes import activation_bytes, ON_HOST, state_bytes, step_bytes
from ._sent_bytes import Sent, sent_bytes
from ._temporary_bytes import StepBytes


MOST_TENSOR = 8  # the largest tensor axis that is tried: on GPUs a larger one would send between machines
MOST_CONTEXT = 8  # the largest context axis that is tried
TRACED = 16  # the most plans that are traced (a second or more each), if some of them fit
MOST_TRACED = 64  # the same, if none fits
MOST_OFFERED = 3  # the most plans that are offered
FIRST_SECONDS = 4.0  # after which a search shows what it has so far, though meshes remain to be compared
Progress = Callable[[str, int, int], None]
"""Is called with what a search counts, how many of these are done, and how many there are at most."""


class Candidate(NamedTuple):
    """A plan that might fit, with its model; nothing of it was traced."""

    plan: parallel.Plan
    """Mesh and choices."""
    model: nn.Transformer
    """Model of shapes, with its policy of recomputation."""
    state: int
    """Bytes of parameters, gradients and optimizer state on a device."""
    sent: float
    """Bytes that a device sends in a step."""
    sends: tuple[Sent, ...] = ()
    """The same bytes by cause."""
    least: int = 0
    """Bytes that a device holds at least, whatever the compiler does."""

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
    cost: Callable[[Candidate], Any] = lambda one: (one.sent, one.least),
    most: int = MOST_OFFERED,
    tries: int | None = None,
    progress: Progress = lambda what, done, most: None,
    first: Callable[[list[Candidate], int, int], None] = lambda ranked, compared, meshes: None,
) -> Fitting:
    """Find plans for as many devices that fit into `memory`, those of the least `cost` (bytes sent, by default) first.

    Plans have the `states`' choices, on the `meshes` with their stage of zero (by default `every_mesh` of as many
    devices), with the model's policy of recomputation or recomputing all. Nothing is compiled; plans are compared by
    their shapes, and the best of them are traced.

    Args:
        states: The state under the plan in question.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        memory: Bytes of a device.
        platform: That of the compiler, as `step_bytes` takes it.
        meshes: Where to look.
        cost: What plans are ranked by, which may be a tuple.
        most: How many to offer.
        tries: Of how many, at most, bytes are computed; None: as many as it takes some minutes to compute.
        progress: Called before each mesh that is compared and each plan that is traced.
        first: Called once, before any plan is traced and after `FIRST_SECONDS` at most, with the best plans by shapes,
            the number of meshes that were compared until then, and the number of all.
    """
    chosen = list(every_mesh(states.plan.mesh.size, states.plan, model) if meshes is None else meshes)
    chosen.sort(key=lambda its: _complexity(its[0]))
    ranked: list[tuple[Any, Candidate]] = []
    sizes: list[int] = []  # of the state on each mesh that suits the model
    shown, start = False, time.monotonic()

    def show(compared: int) -> None:
        ranked.sort(key=lambda its: its[0])
        possible = [one for _, one in ranked if one.least <= memory]
        first(_by_place(possible)[:most], compared, len(chosen))

    for number, (mesh, zero) in enumerate(chosen):
        progress("meshes compared", number, len(chosen))
        if not shown and ranked and time.monotonic() - start > FIRST_SECONDS:
            shown = True
            show(number)
        size, found = _candidates(states, model, batch, memory, mesh, zero, platform)
        sizes += [] if size is None else [size]
        ranked += [(cost(one), one) for one in found]
    if not shown:
        show(len(chosen))
    ranked.sort(key=lambda its: its[0])
    candidates = [one for _, one in ranked]
    # Of plans that cannot fit, one is traced, to tell what is too large.
    possible = [one for one in candidates if one.least <= memory] or sorted(candidates, key=lambda one: one.least)[:1]
    step = lambda one: step_bytes(states.with_plan(one.plan), one.model, batch, platform)
    offered, traced = _search(possible if tries is None else possible[:tries], step, memory, most, progress)
    least = min(traced, key=lambda its: its[1].total, default=None)
    return Fitting(offered, least, min(sizes, default=memory + 1), len(sizes), len(candidates), len(traced))


def _complexity(mesh: AbstractMesh) -> tuple[int, int]:
    """Return the number of axes that split anything, and the devices of all axes but `fsdp`."""
    sizes = parallel.axis_sizes(mesh)
    return sum(size > 1 for size in sizes.values()), mesh.size // sizes.get(FSDP, 1)


def _by_place(candidates: list[Candidate]) -> list[Candidate]:
    """Return the first candidate of each mesh and stage of zero."""
    first: dict[tuple, Candidate] = {}
    for one in candidates:
        first.setdefault(_place(one), one)
    return list(first.values())


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
        progress("plans traced, at most", len(traced), min(limit, len(candidates)))
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
    states: training.PlannedState,
    model: nn.Transformer,
    batch: Batch,
    memory: int,
    mesh: AbstractMesh,
    zero: int,
    platform: str,
) -> tuple[int | None, list[Candidate]]:
    """Return the bytes of the state on a mesh (None where it does not suit the model), and plans whose state fits.

    A mesh's state is made once for all policies of recomputation.
    """
    rows, seq = batch.ids.shape
    plan = for_platform(dataclasses.replace(states.plan, mesh=mesh, zero=zero), platform)
    size, stays, candidates = None, 0, []
    for variant in (model, *([nn.with_execution(model, remat="full")] if model.stacks[0].remat != "full" else [])):
        try:
            plan.check(variant, rows=rows, seq=seq)
        except ValueError:  # the plan does not suit the model
            break
        if size is None:
            by_cause = {
                cause: own for cause, (own, _) in state_bytes(states.with_plan(plan)).items() if cause != ON_HOST
            }
            size, stays = sum(by_cause.values()), sum(by_cause.values()) - by_cause["gradients"]
        if size > memory:
            break
        sends = tuple(sent_bytes(plan, variant, rows=rows, seq=seq, trained=states.optimizer.trained))
        least = max(size, stays + activation_bytes(plan, variant, rows=rows, seq=seq))
        candidates.append(Candidate(plan, variant, size, math.fsum(each.size for each in sends), sends, least))
    return size, candidates
