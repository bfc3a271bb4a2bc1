"""Forecasts by formulas: the bytes that a step holds and sends, and its seconds, on devices that may be absent.

Bytes and seconds are listed by cause, such as parameters, activations, or the mesh axis over which bytes are sent.
Compilers for TPUs pad slices to whole chunks, and so add bytes to reduce-scatters of gradients; `scatter_padding`
computes these bytes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import kernels, nn, parallel, training
from .._files import JsonObject
from .._shapes import Batch
from ..parallel import FSDP, STATE
from ..program import list_transfers, read_traced
from ._accelerators import for_platform, Topology
from ._compile import decode_shapes, traced_decode
from ._counted_bytes import name_transfers
from ._held_bytes import judge_formula, ON_HOST, placed_bytes, state_bytes, step_bytes, Verdict
from ._roofline import flops_per_row_token, flops_per_token, link_speed, parameter_count, Roofline, roofline
from ._sent_bytes import GRADIENTS, place_arrays, Sent, sent_bytes, sum_by_cause


# libtpu 0.0.42 cuts each device's slice into chunks of rows, so that one chunk per device, and four more chunks, fit
# into this many bytes of a core's own memory. These sizes and the number four were read off 170 compiled
# reduce-scatters; other chips were not examined.
_CHUNK_MEMORY = {"v5e": 14.4 * 2**20, "v5p": 14.4 * 2**20, "v6e": 29.4 * 2**20}
_EXTRA_CHUNKS = 4
_TILE = 8  # Rows of a tile; a chunk is a whole number of tiles.


def scatter_padding(
    plan: parallel.Plan, model: nn.LanguageModel, topology: Topology, trained: training.Trained = training.trainable
) -> float:
    """Return the bytes of padding that a device sends in the reduce-scatters of a step, because TPUs pad them.

    The compiler pads each device's slice to whole chunks of equally many rows. Padded slices begin later than unpadded
    slices. So after the reduce-scatter, the devices also exchange the rows that arrived on the wrong device.
    """
    if topology.accelerator.name not in _CHUNK_MEMORY or plan.size(FSDP) == 1 or plan.zero == 0:
        return 0.0
    sent = 0.0
    for shape, dim, layers in _scattered_gradients(plan, model, trained):
        rows, row_bytes = shape[dim], 4 * math.prod(shape) // shape[dim]
        for devices in _scatter_steps(plan, topology):
            rows //= devices
            padding = _padded_rows(rows, row_bytes, devices, topology) - rows
            # In the ring of a reduce-scatter, a device sends the padding of all slices but its own. The exchange of
            # displaced rows then sends `(devices - 1) / devices` as much again.
            ring_bytes = layers * padding * row_bytes * (devices - 1)
            sent += ring_bytes * (1 + (devices - 1) / devices)
    return sent * (plan.microbatches if plan.zero > 1 else 1)


def _scattered_gradients(
    plan: parallel.Plan, model: nn.LanguageModel, trained: training.Trained
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield each gradient that `fsdp` scatters: its shape, the dim that is split, and its number of layers.

    Tables of the vocabulary that are scattered in parts, and tables of layers that stay split, are left out.
    """
    model = plan.shapes(model)
    for array in place_arrays(plan, model, trained(model)):
        shard, dim = array.shard, array.fsdp_dim
        if dim is None or not array.is_trained or (plan.splits_tables and not array.layers):
            continue
        if array.ids_per_token is not None:
            continue
        yield (shard[1:], dim - 1, shard[0]) if array.layers else (shard, dim, 1)


def _padded_rows(rows: int, row_bytes: int, devices: int, topology: Topology) -> int:
    """Return the number of rows of a device's slice, including the padding that makes its chunks equal."""
    sides = [side for side in topology.shape if side > 1]
    # In a torus of 2 x 2 devices, rows are sent in both directions round the ring at once.
    tile = 2 * _TILE if sides == [2, 2] and devices == 4 else _TILE
    memory = _CHUNK_MEMORY[topology.accelerator.name]
    chunk_rows = int(memory / (devices + _EXTRA_CHUNKS) / row_bytes) // tile * tile
    if rows <= 1 or chunk_rows == 0:
        return rows
    chunks = math.ceil(rows / chunk_rows)
    return chunks * math.ceil(rows / chunks / tile) * tile if chunks > 1 else rows


def _scatter_steps(plan: parallel.Plan, topology: Topology) -> tuple[int, ...]:
    """Return the number of devices in each step of a reduce-scatter over `fsdp`.

    A reduce-scatter over a whole square or box of TPUs has two steps (see `Plan.torus_steps`).
    """
    sides, devices = [side for side in topology.shape if side > 1], plan.size(FSDP)
    is_square, is_box = len(sides) == 2 and sides[0] == sides[1] >= 4, len(sides) > 2
    if devices == topology.devices and (is_square or is_box):
        return devices // sides[-1], sides[-1]
    return (devices,)


_ENCODER = "encoder"
# The arrays of these causes are stored between steps too, so formulas compute their bytes exactly.
_EXACT_CAUSES = ("parameters", "optimizer state", "weights", _ENCODER, "caches")


class DeviceMemory(NamedTuple):
    """Devices whose speeds are unknown; a forecast for these devices has bytes, but no times."""

    memory: int | None = None
    """Bytes of a device's memory; None if the forecast need not say whether the step fits."""
    platform: str = "cuda"
    """Platform of the compiler that formulas count bytes for: `cuda` or `tpu`."""


Target = Topology | DeviceMemory
"""Devices that a step is planned for."""


def topology_of(target: Target) -> Topology | None:
    """Return the target if it is a topology; None for a `DeviceMemory`."""
    return target if isinstance(target, Topology) else None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step of training or decoding by formulas: nothing was compiled or run."""

    target: Target
    """Devices that the step would run on."""
    held: dict[str, int]
    """Bytes on a device by cause."""
    sent: tuple[Sent, ...]
    """Bytes that a device sends in a step, by cause."""
    roofline: Roofline | None
    """Seconds of a step, by cause; None without a topology."""
    parameters: int
    """Parameters of the model on all devices together."""
    operations: float
    """The model's own operations of a step, on one device."""
    devices: int
    """Number of devices that the step runs on."""
    on_host: int = 0
    """Bytes that a device stores in the memory of its host."""
    state: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Bytes of the training state by cause, on one device and on all (`state_bytes`); empty for decoding."""

    @property
    def time(self) -> Roofline:
        """Seconds of a step, by cause; raises a `ValueError` without a topology."""
        if self.roofline is None:
            raise ValueError(f"Forecast.time: {self.target} has no speeds; forecast for a topology.")
        return self.roofline

    @property
    def total(self) -> int:
        """Bytes of all causes on a device."""
        return sum(self.held.values())

    @property
    def platform(self) -> str:
        """Platform of the compiler that formulas count bytes for: `cuda` or `tpu`."""
        return self.target.platform

    @property
    def memory(self) -> int | None:
        """Bytes of a device's memory, if they are known."""
        return self.target.memory

    @property
    def missing(self) -> int:
        """Bytes that a device lacks; 0 if the plan fits or the memory is not known."""
        return 0 if self.memory is None else max(0, self.total - self.memory)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the plan fits, as far as formulas can tell; None if the memory is not known."""
        return None if self.memory is None else judge_formula(self.total, exact_bytes(self.held), self.memory)

    def as_dict(self) -> JsonObject:
        """Return all figures as plain data; `fits` is None if only the compiler can tell."""
        return {
            "topology": None if topology_of(self.target) is None else str(self.target),
            "devices": self.devices,
            "parameters": self.parameters,
            "memory": self.memory,
            "held": self.held,
            "state": {cause: {"a device": local, "in all": size} for cause, (local, size) in self.state.items()},
            "on_host": self.on_host,
            "fits": {"fits": True, "does not fit": False}.get(self.verdict or ""),
            "sent": sum_by_cause(self.sent),
            "sent_by": [{"over": sent.cause, "what": sent.what, "bytes": sent.size} for sent in self.sent],
            "operations": self.operations,
            **roofline_dict(self.roofline),
        }


def roofline_dict(time: Roofline | None) -> JsonObject:
    """Return the figures of a roofline as plain data; an empty object for None."""
    if time is None:
        return {}
    return {
        "seconds": time.seconds,
        "seconds_by": time.by_cause,
        "hidden": [cause for cause in time.hidden if cause in time.by_cause],
        "bubble": time.bubble,
        "bound": time.bound,
        "mfu": time.utilization,
    }


def forecast(
    states: training.PlannedState,
    model: nn.LanguageModel,
    batch: Batch,
    target: Target,
    *,
    noisy_copies: bool = False,
) -> Forecast:
    """Forecast the bytes and the seconds of a training step under the plan of `states`, for a batch's shapes.

    `noisy_copies` says whether half of the tokens of each row are noisy copies (`training.noise_blocks`); a noisy token
    sees as many keys as a clean one. Raises a `ValueError` if the target is a topology with another number of devices
    than the plan's mesh.
    """
    rows, seq = batch.ids.shape
    if (topology := topology_of(target)) is not None:
        topology.speeds(states.plan.mesh)  # `speeds` refuses a mesh of another size before anything is traced.
    states = states.with_plan(for_platform(states.plan, target.platform))
    plan, trained = states.plan, states.optimizer.trained
    memory_by_cause, kept_on_host = step_bytes(states, model, batch, target.platform)
    sent = tuple(sent_bytes(plan, model, rows=rows, seq=seq, trained=trained))
    time = None
    if topology is not None:
        sent = add_padding(sent, states, model, topology)
        time = training_time(states, model, batch, topology, sent, kept_on_host, noisy_copies=noisy_copies)
    return Forecast(
        target,
        held=memory_by_cause,
        sent=sent,
        roofline=time,
        parameters=parameter_count(model),
        operations=flops_per_row_token(model, seq, trained=trained, noisy_copies=noisy_copies)
        * (rows * seq / plan.mesh.size),
        devices=plan.mesh.size,
        on_host=optimizer_bytes_on_host(states) + kept_on_host,
        state=state_bytes(states),
    )


def add_padding(
    sent: tuple[Sent, ...], states: training.PlannedState, model: nn.LanguageModel, topology: Topology
) -> tuple[Sent, ...]:
    """Return the bytes sent, with the bytes that a topology's compiler adds to the reduce-scatters of gradients."""
    padding = scatter_padding(states.plan, model, topology, states.optimizer.trained)
    return (*sent, Sent(STATE, f"{GRADIENTS}, padded by the compiler", padding)) if padding else sent


def training_time(
    states: training.PlannedState,
    model: nn.LanguageModel,
    batch: Batch,
    topology: Topology,
    sent: tuple[Sent, ...],
    kept_on_host: int = 0,
    *,
    noisy_copies: bool = False,
) -> Roofline:
    """Return the seconds of a training step.

    Args:
        states: The training state under a plan.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        topology: Devices that the step runs on.
        sent: Bytes that the step sends, by cause.
        kept_on_host: Bytes that a microbatch keeps on the host for its backward pass.
        noisy_copies: As in `forecast`.
    """
    plan, (rows, seq) = states.plan, batch.ids.shape
    host_bytes = {
        "kept_bytes": float(kept_on_host * plan.microbatches),
        "moment_bytes": float(optimizer_bytes_on_host(states)),
    }
    return roofline(
        plan,
        model,
        sent,
        topology,
        rows=rows,
        seq=seq,
        trained=states.optimizer.trained,
        noisy_copies=noisy_copies,
        **host_bytes,
    )


def optimizer_bytes_on_host(states: training.PlannedState) -> int:
    """Return the bytes of the optimizer's state in the memory of a device's host."""
    return 0 if states.plan.optimizer_memory == "device" else state_bytes(states)[ON_HOST][0]


def decode_forecast(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    topology: Topology,
    *,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
) -> Forecast:
    """Forecast the bytes and the seconds of a step that decodes one token of each row, with full caches.

    Each device reads its weights and its caches once. The bytes sent are counted in a trace of the step.
    Communication is assumed not to overlap with other work. An encoder stays in memory but is not read, because the
    source text is encoded before decoding.

    Args:
        plan: The plan that serves the model.
        model: The model, or its shapes, in the dtype in which it is served, or with its quantized weights.
        topology: Devices that the step runs on.
        rows: Rows that are decoded together.
        capacity: Tokens of each row that the caches have room for.
        cache_dtype: Dtype of cached keys and values; None: the compute dtype.
    """
    accelerator, speeds = topology.accelerator, topology.speeds(plan.mesh)
    plan = for_platform(plan, accelerator.platform)
    served, caches = decode_shapes(plan, model, rows, capacity, cache_dtype)
    memory_by_cause = decode_held(served, caches)
    with kernels.traced_for(accelerator.platform):
        traced = traced_decode(plan, served, caches, rows)
    sent = name_transfers(transfer for program in read_traced(traced) for transfer in list_transfers(program))
    decoder = model if model.parts.encoder is None else eqx.tree_at(lambda m: m.parts.encoder, model, None)
    operations = flops_per_token(decoder, capacity, backward=False, attention="full") * rows / topology.devices
    product_seconds = operations / accelerator.peak(str(jnp.dtype(model.compute_dtype)))
    time = Roofline(
        products=product_seconds,
        memory=decode_read_bytes(memory_by_cause) / accelerator.bandwidth,
        sent={cause: size / link_speed(cause, plan, speeds) for cause, size in sum_by_cause(sent).items()},
        hidden=(),
        bubble=0.0,
        of_model=product_seconds,
    )
    count = parameter_count(eqx.filter_eval_shape(nn.dequantize, model))
    return Forecast(topology, memory_by_cause, sent, time, count, operations, topology.devices)


def decode_held(served: parallel.ShardedModel, caches: PyTree) -> dict[str, int]:
    """Return a device's bytes by cause, for the shapes that `decode_shapes` returns, without a trace."""
    weights, encoder = (placed_bytes(tree)[0] for tree in (served, served.model.parts.encoder))
    encoder_bytes = {_ENCODER: encoder} if encoder else {}
    return {"weights": weights - encoder, **encoder_bytes, "caches": placed_bytes(caches)[0]}


def decode_read_bytes(held: Mapping[str, int]) -> int:
    """Return the bytes that a decode step reads: all causes of `decode_held` except for the encoder."""
    return sum(size for cause, size in held.items() if cause != _ENCODER)


def exact_bytes(held: Mapping[str, int]) -> int:
    """Return the bytes of the causes that formulas know exactly."""
    return sum(size for cause, size in held.items() if cause in _EXACT_CAUSES)
