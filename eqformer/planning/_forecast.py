"""What a plan would hold, send and take on accelerators that are not here, by formulas alone."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import kernels, nn, parallel, training
from .._shapes import Batch
from ..parallel import STATE
from ..program import list_traced_transfers
from ._accelerators import for_platform, Topology
from ._compile import decode_shapes, traced_decode
from ._costs import flops_per_token, parameter_count
from ._counted_bytes import name_transfers
from ._fitting import Candidate, every_mesh, fitting_plans, Progress
from ._held_bytes import ON_HOST, placed_bytes, state_bytes, step_bytes
from ._roofline import link_speed, Roofline, roofline
from ._scatter_padding import scatter_padding
from ._sent_bytes import by_cause, GRADIENTS, Sent, sent_bytes
from ._temporary_bytes import StepBytes
from ._verdict import judge_formula, Verdict


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step of training or decoding by formulas: nothing was compiled or run."""

    topology: Topology
    """What the step would run on."""
    held: dict[str, int]
    """Bytes on a device by cause."""
    sent: tuple[Sent, ...]
    """Bytes that a device sends in a step, by cause."""
    time: Roofline
    """The seconds of a step, by cause."""
    parameters: int
    """Those of the whole model."""
    operations: float
    """The model's own operations of a step, on one device."""
    on_host: int = 0
    """Bytes in the memory of the host for a device."""

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(self.held.values())

    @property
    def missing(self) -> int:
        """The bytes that a device lacks; 0 where the plan fits."""
        return max(0, self.total - self.topology.accelerator.memory)

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits, as far as formulas can tell."""
        return judge_formula(self.total, certain_bytes(self.held), self.topology.accelerator.memory)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; `fits` is None where only the compiler can tell."""
        return {
            "topology": str(self.topology),
            "devices": self.topology.devices,
            "parameters": self.parameters,
            "memory": self.topology.accelerator.memory,
            "held": self.held,
            "on_host": self.on_host,
            "fits": {"fits": True, "does not fit": False}.get(self.verdict),
            "sent": by_cause(self.sent),
            "sent_by": [{"over": cause, "what": what, "bytes": size} for cause, what, size in self.sent],
            "operations": self.operations,
            "seconds": self.time.seconds,
            "seconds_by": self.time.by_cause,
            "hidden": [cause for cause in self.time.hidden if cause in self.time.by_cause],
            "bubble": self.time.bubble,
            "bound": self.time.bound,
            "mfu": self.time.utilization,
        }


def forecast(states: training.PlannedState, model: nn.Transformer, batch: Batch, topology: Topology) -> Forecast:
    """What the plan of `states` holds, sends and takes for a step over the shapes of a batch.

    Raises a `ValueError` where the plan's mesh has another number of devices than the topology.
    """
    rows, seq = batch.ids.shape
    topology.speeds(states.plan.mesh)  # which refuses a mesh of another size before anything is traced
    states = states.with_plan(for_platform(states.plan, topology.accelerator.platform))
    held, kept = step_bytes(states, model, batch, topology.accelerator.platform)
    moments = _on_host(states)
    sent, time = _sent_and_time(states, model, batch, topology, kept, moments)
    operations = flops_per_token(model, seq, trained=states.optimizer.trained) * rows * seq / topology.devices
    return Forecast(topology, held, sent, time, parameter_count(model), operations, moments + kept)


def _sent_and_time(
    states: training.PlannedState, model: nn.Transformer, batch: Batch, topology: Topology, kept: int, moments: int
) -> tuple[tuple[Sent, ...], Roofline]:
    """The bytes that a device sends in a training step over a topology, and the step's seconds.

    `kept` are the bytes that a microbatch keeps on the host, `moments` those of the optimizer's state there.
    """
    plan, trained, (rows, seq) = states.plan, states.optimizer.trained, batch.ids.shape
    sent = tuple(sent_bytes(plan, model, rows=rows, seq=seq, trained=trained))
    sent = _with_padding(sent, states, model, topology)
    return sent, _time(states, model, batch, topology, sent, kept, moments)


def _with_padding(
    sent: tuple[Sent, ...], states: training.PlannedState, model: nn.Transformer, topology: Topology
) -> tuple[Sent, ...]:
    """Return what a step sends with what a topology's compiler adds to the reduce-scatters of gradients."""
    padding = scatter_padding(states.plan, model, topology, states.optimizer.trained)
    return (*sent, Sent(STATE, f"{GRADIENTS}, padded by the compiler", padding)) if padding else sent


def _time(
    states: training.PlannedState,
    model: nn.Transformer,
    batch: Batch,
    topology: Topology,
    sent: tuple[Sent, ...],
    kept: int,
    moments: int,
) -> Roofline:
    """Return the seconds of a training step that sends so much; `kept` and `moments` as `_sent_and_time` has them."""
    plan, trained, (rows, seq) = states.plan, states.optimizer.trained, batch.ids.shape
    over_link = {"kept": float(kept * plan.microbatches), "moments": float(moments)}
    return roofline(plan, model, sent, topology, rows=rows, seq=seq, trained=trained, **over_link)


def _on_host(states: training.PlannedState) -> int:
    """Bytes of the optimizer's state that lie on hosts."""
    return 0 if states.plan.optimizer_memory == "device" else state_bytes(states)[ON_HOST][0]


def decode_forecast(
    plan: parallel.Plan,
    model: nn.Transformer,
    topology: Topology,
    *,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
) -> Forecast:
    """What decoding one token of each of `rows` holds, sends and takes, with caches of `capacity` tokens, all filled.

    Each device reads its weights and its caches once. What is sent is counted in the traced step and waited for. An
    encoder is held, and has read its text before.

    Args:
        plan: Where the model is served.
        model: The model, or its shapes, in the dtype in which it is served, or with the codes that are kept of it.
        topology: What it would run on.
        rows: Rows that are decoded together.
        capacity: Slots of a row's caches.
        cache_dtype: What keys and values are kept in; None: the compute dtype.
    """
    one, speeds = topology.accelerator, topology.speeds(plan.mesh)
    plan = for_platform(plan, one.platform)
    served, caches = decode_shapes(plan, model, rows, capacity, cache_dtype)
    held = decode_held(served, caches)
    with kernels.traced_for(one.platform):
        traced = traced_decode(plan, served, caches, rows)
    sent = name_transfers(list_traced_transfers(traced, parallel.axis_sizes(plan.mesh)))
    writes = eqx.tree_at(lambda m: m.encoder, model, None, is_leaf=lambda node: node is None)
    operations = flops_per_token(writes, capacity, backward=False, attention="full") * rows / topology.devices
    products = operations / one.peak(str(jnp.dtype(model.compute_dtype)))
    links = {cause: size / link_speed(cause, plan, speeds) for cause, size in by_cause(sent).items()}
    time = Roofline(products, read_by_decoding(held) / one.bandwidth, links, (), 0.0, products)
    count = parameter_count(eqx.filter_eval_shape(nn.dequantize, model))
    return Forecast(topology, held, sent, time, count, operations)


def decode_held(served: parallel.ShardedModel, caches: PyTree) -> dict[str, int]:
    """Bytes on a device by cause, of what `decode_shapes` gives; nothing is traced."""
    weights, encoder = (placed_bytes(tree)[0] for tree in (served, served.model.encoder))
    given = {_ENCODER: encoder} if encoder else {}
    return {"weights": weights - encoder, **given, "caches": placed_bytes(caches)[0]}


def read_by_decoding(held: Mapping[str, int]) -> int:
    """Of the bytes that `decode_held` gives, those that a step reads."""
    return sum(size for cause, size in held.items() if cause != _ENCODER)


_ENCODER = "encoder"
# Causes of bytes that are there between steps, so that formulas know them exactly.
_STAYS = ("parameters", "optimizer state", "weights", _ENCODER, "caches")


def certain_bytes(held: Mapping[str, int]) -> int:
    """Return the bytes of what is held, by cause, that formulas know exactly."""
    return sum(size for cause, size in held.items() if cause in _STAYS)


MOST_OF_TORUS = 64  # the largest tensor axis that is tried on TPUs


class Proposal(NamedTuple):
    """A plan with the bytes that a device holds and the seconds of a step."""

    candidate: Candidate
    held: int
    time: Roofline
    verdict: Verdict | None = None
    """Whether it fits by formulas; None where nothing was traced, so that `held` is the least that it may be."""

    def as_dict(self) -> dict[str, Any]:
        """What it takes, as plain data."""
        return {
            "held": self.held,
            "sent": self.candidate.sent,
            "seconds": self.time.seconds,
            "seconds_by": self.time.by_cause,
            "bound": self.time.bound,
            "mfu": self.time.utilization,
        }


class FirstLook(NamedTuple):
    """The best plans by their shapes alone, before any is traced."""

    proposals: list[Proposal]
    compared: int
    """Meshes that were compared until then."""
    meshes: int
    """Meshes that there are."""


def best_plans(
    states: training.PlannedState,
    model: nn.Transformer,
    batch: Batch,
    topology: Topology,
    *,
    most: int = 3,
    progress: Progress = lambda what, done, most: None,
    first: Callable[[FirstLook], None] = lambda look: None,
) -> list[Proposal]:
    """Find, of all meshes over a topology, those that fit into its memory and take the least time, by formulas.

    Of plans that take as long, to three digits, the one that holds least comes first. Over machines of GPUs state may
    be held by each of them. What is kept on hosts is found by tracing: it counts among the plans that are offered, and
    not for which are tried.

    Args:
        states: The state under the plan in question, whose other choices all plans have.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        topology: What it would run on.
        most: How many to offer.
        progress: Called before each mesh that is compared and each plan that is traced.
        first: Called once, within seconds, with the best plans by shapes alone.
    """
    memory = topology.accelerator.memory

    def time(one: Candidate, kept: int = 0) -> Roofline:
        under = states.with_plan(one.plan)
        sent = _with_padding(one.sends, under, one.model, topology)
        return _time(under, one.model, batch, topology, sent, kept, _on_host(under))

    def proposal(one: Candidate, step: StepBytes) -> Proposal:
        verdict = judge_formula(step.total, certain_bytes(step.held), memory)
        return Proposal(one, step.total, time(one, step.on_host), verdict)

    def show(ranked: list[Candidate], compared: int, meshes: int) -> None:
        first(FirstLook([Proposal(one, one.least, time(one)) for one in ranked], compared, meshes))

    # A torus has no bound such as a switch's. Between machines copies may take less time than pieces.
    switched, machines = topology.accelerator.switched, math.prod(topology.shape[1:])
    limits: dict[str, Any] = {"tensor": MOST_OF_TORUS}
    if switched > 1:
        limits = {"tensor": switched, "replicas": (1, machines)}
    meshes = every_mesh(topology.devices, states.plan, model, **limits)
    cost = lambda one: (three_digits(time(one).seconds), one.least)
    of: dict[str, Any] = {"platform": topology.accelerator.platform, "meshes": meshes, "cost": cost, "first": show}
    found = fitting_plans(states, model, batch, memory, most=most, progress=progress, **of)
    offered = itertools.starmap(proposal, found.offered)
    return sorted(offered, key=lambda one: (three_digits(one.time.seconds), one.held))


def three_digits(number: float) -> float:
    """Round to three significant digits, below which a roofline says nothing."""
    return float(f"{number:.3g}")
