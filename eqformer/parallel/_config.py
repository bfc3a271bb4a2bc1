"""The choices of a plan, whatever the mesh: plain data that the command line reads with its documentation."""

import dataclasses
import math
import numbers
import typing
from typing import Literal

from ._expert_method import ExpertMethod
from .context._context_attention import ContextMethod
from .pipeline._schedule import Schedule
from .pipeline._schedules import Maker, ScheduleName
from .tensor._collective_matmul import Overlap
from .tensor._residual_stream import StreamKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Choices of how a model runs over the axes of a mesh. Plain data: a `Plan` checks it."""

    zero: Literal[0, 1, 2, 3] = 0
    """What --mesh.fsdp splits: 0 rows only, 1 also the optimizer's state, 2 also gradients, 3 also parameters."""
    residual: StreamKind = "replicated"
    """The residual stream over --mesh.tensor: replicated, or split by tokens or by features."""
    overlap: Overlap = "none"
    """How a split stream is gathered and scattered: by one collective, or in rings that overlap with the products."""
    context_method: ContextMethod = "ring"
    """How attention sees other devices' tokens: keys and values pass round a ring, or are gathered, or by Ulysses."""
    expert_method: ExpertMethod = "auto"
    """How tokens reach experts: all are gathered, or each choice is sent by all-to-all; by default the cheaper."""
    expert_factor: float | None = None
    """Room in a round of --expert-method exchange, times an even load: of a device 1.25 or, on CPUs, of a pair 2."""
    schedule: ScheduleName | Maker | Schedule = "1f1b"
    """The order in which the stages of a pipeline work."""
    microbatches: int = 1
    """Pieces that a batch is computed in; they go through --mesh.pipe or, without it, one after another."""
    stage_remat: bool = False
    """Stages keep their input alone and run again in backward passes, as with spread edges; else what layers keep."""
    chunks: int = 1
    """Parts of the model that each stage holds: any number for interleaved and looping, 2 for zb-v and dualpipe-v."""
    edges: Literal["ends", "spread"] = "ends"
    """Embedding and loss are computed by the first and last stage or, with --schedule gpipe, spread over all stages."""
    smallest: int = 1024
    """Arrays of fewer entries are not split over --mesh.fsdp."""
    optimizer_memory: Literal["device", "pinned_host"] = "device"
    """Where the optimizer's state lies between steps: on the devices, or in the memory of their hosts."""


def option_values(name: str) -> tuple[str | int, ...]:
    """Return the values that a field of `ParallelConfig` may have; none where it is a number.

    A schedule may also be a function or a table.
    """
    annotation = typing.get_type_hints(ParallelConfig)[name]
    literals = [kind for kind in (annotation, *typing.get_args(annotation)) if typing.get_origin(kind) is Literal]
    return typing.get_args(literals[0]) if literals else ()


def check_values(config: ParallelConfig) -> None:
    """Raise a `ValueError` for a field whose value is none of its allowed values."""
    for field in dataclasses.fields(ParallelConfig):
        name, value, allowed = field.name, getattr(config, field.name), option_values(field.name)
        is_custom_schedule = name == "schedule" and not isinstance(value, str)
        if allowed and value not in allowed and not is_custom_schedule:
            raise ValueError(f"Plan({name}={value!r}): the choices are {', '.join(map(str, allowed))}.")
    if config.expert_factor is not None and not 0 < config.expert_factor < math.inf:
        raise ValueError(
            f"Plan(expert_factor={config.expert_factor}): a device, or on CPUs a pair of devices, has that many times "
            "the room that even loads need in a round of an exchange; give a positive and finite number, such as 1.25."
        )
    for name, value in (("microbatches", config.microbatches), ("chunks", config.chunks)):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"Plan({name}={value!r}): {name} must be a whole number of at least 1.")
