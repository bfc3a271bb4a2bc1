"""A plan in one line."""

import math

from .. import nn
from ._axes import BATCH_AXES, CONTEXT
from ._plan import Plan
from .layouts._mesh import axis_sizes
from .pipeline._simulate import simulate


def summary(plan: Plan, model: nn.Transformer, *, rows: int, seq: int) -> str:
    """The mesh, what matters on it of the plan's choices for batches of a model, and a pipeline's idle share."""
    number, sizes = plan.mesh.size, axis_sizes(plan.mesh)
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis is split"
    parts = [f"{number} device{'s' * (number > 1)}: {axes}"]
    if sizes["fsdp"] > 1:
        parts.append(f"zero {plan.zero}")
    if sizes["tensor"] > 1:
        parts.append(f"{plan.residual} stream" + (f", overlap {plan.overlap}" if plan.overlap != "none" else ""))
    if sizes["expert"] > 1:
        pieces = math.prod(map(plan.size, (*BATCH_AXES, CONTEXT))) * plan.microbatches
        methods = {plan.expert_method_of(model, moe, rows * seq // pieces) for moe in nn.modules(model, nn.MoE)}
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
