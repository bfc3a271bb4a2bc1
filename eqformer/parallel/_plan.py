"""`Plan`: a mesh and choices, by which a plain model is laid out, checked and run; and a plan in one line."""

import dataclasses
import math

import equinox as eqx

from .. import nn
from ._axes import BATCH_AXES, CONTEXT
from ._check_plan import check_model, check_parallel_config, check_rows
from ._on_device import OnDevice
from ._placement import Placement
from ._wrap import Mode
from .layouts._mesh import axis_sizes
from .pipeline._simulate import simulate


@dataclasses.dataclass(frozen=True)
class Plan(Placement):
    """A `ParallelConfig` on a mesh: `Plan(mesh, zero=3, residual="sequence")`.

    A plan takes and gives global arrays, laid out by its specs; each device works inside one `filter_shard_map`, with
    the methods of `on_device(model)`.
    """

    def __post_init__(self):
        check_parallel_config(self)

    def check(self, model: nn.LanguageModel, *, rows: int, seq: int, group: int = 1) -> None:
        """Raise a `ValueError`, before anything is compiled, where model, rows or tokens do not fit the mesh.

        `group` is the batch's: groups of so many rows are not split.
        """
        check_model(self, model)
        check_rows(self, model, rows, seq, group)

    def on_device(self, model: nn.LanguageModel, mode: Mode = "train", sharers: int = 1) -> OnDevice:
        """Return the functions of one device for its slices of a model, which is global and may be of shapes.

        `mode` says what the model is wrapped for: `"train"` for losses, `"serve"` for text with caches, in which
        `sharers` devices have the same key head.
        """
        return OnDevice(self, self.leaves(model), eqx.filter_eval_shape(lambda: model), mode, sharers)


def summary(plan: Plan, model: nn.LanguageModel, *, rows: int, seq: int) -> str:
    """Return one line: the mesh, the choices that matter on it for batches of a model, and a pipeline's idle share."""
    number, sizes = plan.mesh.size, axis_sizes(plan.mesh)
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis is split"
    parts = [f"{number} device{'s' * (number > 1)}: {axes}"]
    if sizes["fsdp"] > 1:
        parts.append(f"zero {plan.zero}")
    if sizes["tensor"] > 1:
        parts.append(f"{plan.residual} stream" + (f", overlap {plan.overlap}" if plan.overlap != "none" else ""))
    if sizes["expert"] > 1:
        pieces = math.prod(map(plan.size, (*BATCH_AXES, CONTEXT))) * plan.microbatches
        methods = {
            plan.expert_method_of(model, moe, rows * seq // pieces) for moe in nn.modules(model, nn.ExpertMixture)
        }
        parts += [f"experts by {method}" for method in sorted(methods)]
    if sizes["context"] > 1:
        parts.append(f"context by {plan.context_method}")
    if plan.is_pipelined:
        schedule = plan.timetable()
        timing = simulate(schedule).lock_step
        chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        bubble = f"bubble {100 * timing.bubble:.1f} %"
        parts.append(f"{schedule.name}, {plan.microbatches} microbatches{chunks}, {bubble}")
    elif plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches one after another")
    return "; ".join(parts)
