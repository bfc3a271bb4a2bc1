"""Search for plans over a number of devices that fit into a device's memory, for training and for decoding."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from jax.sharding import AbstractMesh

from .. import nn, parallel, training
from .._files import JsonObject
from .._shapes import Batch
from ..parallel import AXES, AXIS_TYPES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR
from . import _forecast
from ._accelerators import for_platform, Topology
from ._compile import decode_shapes
from ._held_bytes import activation_bytes, judge_formula, ON_HOST, state_bytes, step_bytes, StepBytes, Verdict
from ._roofline import Roofline
from ._sent_bytes import Sent, sent_bytes


MAX_TENSOR = 8  # The largest tensor axis that is tried where devices are unknown: a larger axis crosses GPU machines.
MAX_TENSOR_OF_TORUS = 64  # The largest tensor axis that is tried on TPUs, where no switch bounds the axis.
MAX_CONTEXT = 8  # The largest context axis that is tried.
MAX_TRACED = 16  # The maximum number of traced plans (a second or more each), once a plan fits.
MAX_TRACED_WITHOUT_FIT = 64  # The maximum number of traced plans, until a plan fits.
FIRST_SECONDS = 4.0  # A search shows the best plans so far after this time, if meshes remain to be compared.

Progress = Callable[[str, int, int], None]
"""Function called with the name of the counted items, the number of items done, and the most items possible."""


def _ignore(*_: object) -> None:
    """Do nothing; this is the default callback of a search."""


class Candidate(NamedTuple):
    """A plan that has not been traced. Its state fits into memory; the whole step may or may not fit."""

    plan: parallel.Plan
    """The plan, over a mesh without devices."""
    model: nn.LanguageModel
    """Shapes of the model, with its policy of recomputation."""
    state: int
    """Bytes of parameters, gradients and optimizer state on a device."""
    sent: float
    """Bytes that a device sends in a step."""
    sent_by: tuple[Sent, ...] = ()
    """The same bytes by cause."""
    min_held: int = 0
    """Lower bound of the bytes that a device holds, whatever the compiler does."""

    @property
    def remat(self) -> str:
        """Policy of recomputation in the backward pass."""
        return self.model.stacks[0].remat

    @property
    def mesh_and_zero(self) -> tuple[int, ...]:
        """Axis sizes of the mesh, and the stage of zero."""
        return (*parallel.axis_sizes(self.plan.mesh).values(), self.plan.zero)


class Proposal(NamedTuple):
    """A plan with the bytes that a device holds and, if the target is a topology, the seconds of a step."""

    candidate: Candidate
    held: int
    time: Roofline | None = None
    verdict: Verdict | None = None
    """Whether the plan fits, by formulas. None for a plan that was not traced: its `held` is a lower bound."""

    def as_dict(self) -> JsonObject:
        """Return the bytes held and sent, and the seconds of a step, as plain data."""
        return {"held": self.held, "sent": self.candidate.sent, **_forecast.roofline_dict(self.time)}

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key: the seconds of a step to three digits (without a topology, the bytes sent), then the bytes held."""
        return (self.candidate.sent if self.time is None else float(f"{self.time.seconds:.3g}"), self.held)


class ShapeRanking(NamedTuple):
    """The best plans by formulas over the shapes of arrays, before any plan is traced."""

    proposals: list[Proposal]
    compared: int
    """Meshes that were compared so far."""
    meshes: int
    """All meshes to compare."""


class PlanSearch(NamedTuple):
    """Result of a search for plans."""

    proposals: list[Proposal]
    """Plans that fit or that only the compiler can judge, the best first."""
    smallest: tuple[Candidate, StepBytes] | None
    """The traced plan that holds the fewest bytes; None if the training state of every plan exceeds the memory."""
    smallest_state: int
    """The fewest bytes of a plan's state."""
    meshes: int
    """Number of pairs of a mesh and a stage of ZeRO that suit the model."""
    candidates: int
    """Number of plans that may fit by the shapes of arrays; if none may, 1, since the smallest plan is traced."""
    traced: int
    """Number of plans that were traced, so that all their bytes are known."""


def search_plans(
    states: training.PlannedState,
    model: nn.LanguageModel,
    batch: Batch,
    target: _forecast.Target,
    *,
    limit: int = 3,
    max_traced: int | None = None,
    noisy_copies: bool = False,
    progress: Progress = _ignore,
    show_ranking: Callable[[ShapeRanking], None] = _ignore,
) -> PlanSearch:
    """Search all meshes with the same number of devices for plans that fit into the memory of a device.

    The plans differ from `states.plan` in the mesh, in the stage of ZeRO (the stage of `states.plan`, or 3) and in the
    policy of recomputation (the model's policy, or `full`). Nothing is compiled: plans are ranked by formulas over the
    shapes of arrays, and the best plans are traced. If the target is a topology, plans are ranked by the seconds of a
    step, rounded to three digits, and then by the bytes that a device holds. If the topology has several machines of
    GPUs, plans with a copy of the state on each machine are tried too. Without a topology, plans are ranked by the
    bytes that a device sends. The seconds of copies to hosts are known only after tracing, so these seconds change the
    order of the proposed plans, but not the choice of the plans to trace.

    Args:
        states: The training state under a plan; the searched plans keep the other settings of this plan.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        target: Devices to plan for, whose memory is known.
        limit: Maximum number of plans to propose.
        max_traced: Maximum number of plans to trace; None: 64 until a plan fits, then 16.
        noisy_copies: As in `forecast`.
        progress: Called before each mesh that is compared and each plan that is traced.
        show_ranking: Called once, within seconds and before any plan is traced, with the best plans so far.
    """
    if target.memory is None:
        raise ValueError(f"search_plans(target={target}): only plans that fit are searched, so give a device's memory.")
    step = _PlannedStep(states, model, batch, target, target.memory, noisy_copies)
    ranked, state_sizes = _rank_by_shapes(step, limit, progress, show_ranking)
    # If no plan can fit, trace the smallest plan, to report what is too large.
    possible = [proposal.candidate for proposal in ranked if proposal.held <= step.memory]
    possible = possible or [proposal.candidate for proposal in sorted(ranked, key=attrgetter("held"))[:1]]
    fitting, traced = _trace_until_fits(possible[:max_traced], step.trace, step.memory, limit, progress)
    proposals = [
        Proposal(
            candidate,
            held=traced_bytes.total,
            time=step.step_time(candidate, traced_bytes.on_host),
            verdict=judge_formula(traced_bytes.total, _forecast.exact_bytes(traced_bytes.held), step.memory),
        )
        for candidate, traced_bytes in fitting
    ]
    return PlanSearch(
        proposals=sorted(proposals, key=attrgetter("rank")),
        smallest=min(traced, key=lambda pair: pair[1].total, default=None),
        smallest_state=min(state_sizes, default=step.memory + 1),
        meshes=len(state_sizes),
        candidates=len(possible),
        traced=len(traced),
    )


@dataclasses.dataclass(frozen=True)
class _PlannedStep:
    """The training step that a search plans, and the devices that it plans for."""

    states: training.PlannedState
    model: nn.LanguageModel
    batch: Batch
    target: _forecast.Target
    memory: int
    noisy_copies: bool

    def step_time(self, candidate: Candidate, kept_on_host: int = 0) -> Roofline | None:
        """Return the seconds of a step under a plan; None without a topology."""
        if (topology := _forecast.topology_of(self.target)) is None:
            return None
        states = self.states.with_plan(candidate.plan)
        sent = _forecast.add_padding(candidate.sent_by, states, candidate.model, topology)
        return _forecast.training_time(
            states, candidate.model, self.batch, topology, sent, kept_on_host, noisy_copies=self.noisy_copies
        )

    def trace(self, candidate: Candidate) -> StepBytes:
        """Return the bytes that a step holds under a plan, from its trace."""
        states = self.states.with_plan(candidate.plan)
        return step_bytes(states, candidate.model, self.batch, self.target.platform)

    def make_candidates(self, mesh: AbstractMesh, zero: int) -> tuple[int | None, list[Candidate]]:
        """Return the bytes of a device's state on a mesh, and the plans on this mesh whose state fits.

        The plans are one plan for each policy of recomputation: the model's policy and `full`. The bytes are None if
        the mesh does not suit the model.
        """
        (rows, seq), model = self.batch.ids.shape, self.model
        plan = for_platform(dataclasses.replace(self.states.plan, mesh=mesh, zero=zero), self.target.platform)
        variants = [model]
        if model.stacks[0].remat != "full":
            variants.append(nn.with_execution(model, remat="full"))
        state_size, size_between_steps, candidates = None, 0, []
        for variant in variants:
            try:
                plan.check(variant, rows=rows, seq=seq, group=self.batch.group)
            except ValueError:  # the plan does not suit the model
                break
            if state_size is None:  # Recomputation does not change the state, so it is computed once.
                state_size, size_between_steps = self._state_sizes(plan)
            if state_size > self.memory:
                break
            sent_by = tuple(sent_bytes(plan, variant, rows=rows, seq=seq, trained=self.states.optimizer.trained))
            min_held = max(state_size, size_between_steps + activation_bytes(plan, variant, rows=rows, seq=seq))
            sent = math.fsum(item.size for item in sent_by)
            candidates.append(Candidate(plan, variant, state_size, sent, sent_by, min_held))
        return state_size, candidates

    def _state_sizes(self, plan: parallel.Plan) -> tuple[int, int]:
        """Return the bytes of a device's state with its gradients, and without them, as between two steps."""
        sizes = {cause: local for cause, (local, _) in state_bytes(self.states.with_plan(plan)).items()}
        total = sum(size for cause, size in sizes.items() if cause != ON_HOST)
        return total, total - sizes["gradients"]


def _rank_by_shapes(
    step: _PlannedStep, limit: int, progress: Progress, show_ranking: Callable[[ShapeRanking], None]
) -> tuple[list[Proposal], list[int]]:
    """Return the plans of all meshes, ranked without a trace, and the bytes of the state on each mesh.

    The best `limit` plans are shown after `FIRST_SECONDS`, or once all meshes are compared.
    """
    ranked: list[Proposal] = []
    state_sizes: list[int] = []
    meshes = _meshes_over(step.target, step.states.plan, step.model)
    meshes = sorted(meshes, key=lambda mesh_and_zero: _mesh_complexity(mesh_and_zero[0]))
    is_shown, start = False, time.monotonic()

    def show(compared: int) -> None:
        ranked.sort(key=attrgetter("rank"))
        show_ranking(ShapeRanking(_first_of_each_mesh(ranked, step.memory)[:limit], compared, len(meshes)))

    for number, (mesh, zero) in enumerate(meshes):
        progress("meshes compared", number, len(meshes))
        if not is_shown and ranked and time.monotonic() - start > FIRST_SECONDS:
            is_shown = True
            show(number)
        state_size, candidates = step.make_candidates(mesh, zero)
        if state_size is not None:
            state_sizes.append(state_size)
        ranked += [Proposal(candidate, candidate.min_held, step.step_time(candidate)) for candidate in candidates]
    if not is_shown:
        show(len(meshes))
    return sorted(ranked, key=attrgetter("rank")), state_sizes


def _meshes_over(
    target: _forecast.Target, plan: parallel.Plan, model: nn.LanguageModel
) -> Iterator[tuple[AbstractMesh, int]]:
    """Return the meshes to compare, each with a stage of ZeRO."""
    if (topology := _forecast.topology_of(target)) is None:
        return enumerate_meshes(plan.mesh.size, plan, model)
    switched = topology.accelerator.switched
    if switched == 1:
        return enumerate_meshes(topology.devices, plan, model, tensor=MAX_TENSOR_OF_TORUS)
    # Between machines, replicating the state may be faster than sharding it.
    machines = math.prod(topology.shape[1:])
    return enumerate_meshes(topology.devices, plan, model, tensor=switched, replicas=(1, machines))


def _mesh_complexity(mesh: AbstractMesh) -> tuple[int, int]:
    """Return the number of axes with several devices, and the product of the sizes of all axes but `fsdp`."""
    sizes = parallel.axis_sizes(mesh)
    return sum(size > 1 for size in sizes.values()), mesh.size // sizes.get(FSDP, 1)


def _first_of_each_mesh(proposals: list[Proposal], memory: int) -> list[Proposal]:
    """Return, for each mesh and stage of ZeRO, the first proposal that may fit."""
    first: dict[tuple[int, ...], Proposal] = {}
    for proposal in proposals:
        if proposal.held <= memory:
            first.setdefault(proposal.candidate.mesh_and_zero, proposal)
    return list(first.values())


def enumerate_meshes(
    devices: int,
    plan: parallel.Plan,
    model: nn.LanguageModel,
    *,
    tensor: int = MAX_TENSOR,
    context: int = MAX_CONTEXT,
    replicas: Iterable[int] = (1,),
) -> Iterator[tuple[AbstractMesh, int]]:
    """Yield pairs of a mesh of `devices` devices and a stage of ZeRO.

    Each mesh is yielded with the plan's stage and, if `fsdp` has several devices, with stage 3. The size of `pipe` is
    at most the number of microbatches and at most the number of layers. The size of `expert` is at most the number of
    experts. `fsdp` has the devices that the other axes leave.

    Args:
        devices: Number of devices of each mesh.
        plan: Plan with the number of microbatches and the stage of ZeRO.
        model: The model, or its shapes.
        tensor: Maximum number of devices of the axis `tensor`.
        context: Maximum number of devices of the axis `context`.
        replicas: Sizes that `replica` may have.
    """
    experts = min((moe.router.facts().experts for moe in nn.modules(model, nn.ExpertMixture)), default=1)
    stages = min(plan.microbatches, sum(map(len, model.stacks)))
    sizes_of_axes = (_divisors(devices, int(size)) for size in (experts, stages, context, tensor))
    for replica, expert, pipe, context_size, tensor_size in itertools.product(sorted(set(replicas)), *sizes_of_axes):
        fsdp, remainder = divmod(devices, replica * expert * pipe * context_size * tensor_size)
        if fsdp and not remainder:
            sizes = {REPLICA: replica, FSDP: fsdp, EXPERT: expert, PIPE: pipe}
            sizes |= {CONTEXT: context_size, TENSOR: tensor_size}
            for zero in sorted({plan.zero, 3} if fsdp > 1 else {plan.zero}):
                yield abstract_mesh(sizes), zero


def _divisors(number: int, largest: int) -> list[int]:
    """Return the divisors of a number up to `largest`."""
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """Return a mesh without devices, of any size; axes that are not named have size 1.

    Raises a `ValueError` for a size below 1.
    """
    if wrong := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"abstract_mesh({sizes}): an axis has at least one device; change {wrong}.")
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, AXIS_TYPES)


def _trace_until_fits(
    candidates: list[Candidate],
    trace: Callable[[Candidate], StepBytes],
    memory: int,
    limit: int,
    progress: Progress,
) -> tuple[list[tuple[Candidate, StepBytes]], list[tuple[Candidate, StepBytes]]]:
    """Trace candidates in order until `limit` of them may fit, and return these candidates and all traced candidates.

    Each candidate is returned with the bytes of its step. A candidate may fit if its estimate without the margin is at
    most `memory`. If the estimate with the margin exceeds `memory`, only the compiler can tell.
    """
    fitting: list[tuple[Candidate, StepBytes]] = []
    traced: list[tuple[Candidate, StepBytes]] = []
    for candidate in candidates:
        max_traced = MAX_TRACED if fitting else MAX_TRACED_WITHOUT_FIT
        if len(fitting) == limit or len(traced) >= max_traced:
            break
        progress("plans traced, at most", len(traced), min(max_traced, len(candidates)))
        if any(candidate.mesh_and_zero == fit.mesh_and_zero for fit, _ in fitting):
            continue  # The same mesh fits already with less recomputation.
        step = trace(candidate)
        traced.append((candidate, step))
        if step.estimate <= memory:
            fitting.append((candidate, step))
    return fitting, traced


class DecodePlan(NamedTuple):
    """A plan for decoding that fits."""

    plan: parallel.Plan
    rows: int
    cache_dtype: str | None
    forecast: _forecast.Forecast


def search_decode_plans(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    topology: Topology,
    *,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
    limit: int = 3,
    progress: Progress = _ignore,
) -> list[DecodePlan]:
    """Search for plans for decoding that fit into a topology's memory by formulas.

    Each plan keeps the settings of `plan`, on another mesh over `tensor`, `expert` and `fsdp`. First, all meshes are
    tried with all rows and `cache_dtype`. If fewer than `limit` plans fit and `cache_dtype` is None, all meshes are
    tried again with int8 caches. If no plan fits with all rows, half of the rows are tried, then a quarter, and so on.
    The plans are returned in the order of these attempts, and within one attempt by rising time. Meshes that do not
    suit the model are left out.

    Args:
        plan: The plan that does not fit.
        model: The model, or its shapes, in the dtype in which it is served.
        topology: Devices to plan for.
        rows: Rows that are decoded together.
        capacity: Tokens of each row that the caches have room for.
        cache_dtype: Dtype of cached keys and values; None: the compute dtype.
        limit: Maximum number of plans to return.
        progress: Called with the number of plans that were tried, and the largest possible number.
    """
    unpipelined = dataclasses.replace(plan, microbatches=1)  # With one microbatch, `pipe` has one stage.
    meshes = enumerate_meshes(topology.devices, unpipelined, model, tensor=topology.devices, context=1)
    plans = [dataclasses.replace(plan, mesh=mesh) for mesh, zero in meshes if zero == plan.zero]
    small_dtype = "int8" if cache_dtype is None else cache_dtype
    variants = [(rows, cache_dtype)]
    for halvings in range(rows.bit_length()):
        if (variant := (rows >> halvings, small_dtype)) not in variants:
            variants.append(variant)
    results: list[DecodePlan] = []
    for variant_index, (row_count, dtype) in enumerate(variants):
        if len(results) >= limit or (results and row_count < rows):
            break
        fitting = []
        for number, mesh_plan in enumerate(plans):
            done = variant_index * len(plans) + number
            progress("ways to decode tried, at most", done, len(variants) * len(plans))
            try:
                sizes = _forecast.decode_held(*decode_shapes(mesh_plan, model, row_count, capacity, dtype))
                if sum(sizes.values()) > topology.accelerator.memory:
                    continue  # A step that does not fit need not be traced.
                forecast = _forecast.decode_forecast(
                    mesh_plan, model, topology, rows=row_count, capacity=capacity, cache_dtype=dtype
                )
            except ValueError:  # The mesh does not suit the model or this number of rows.
                continue
            fitting.append(DecodePlan(mesh_plan, row_count, dtype, forecast))
        results += sorted(fitting, key=attrgetter("forecast.time.seconds"))
    return results[:limit]
