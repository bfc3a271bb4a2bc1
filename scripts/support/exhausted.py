"""What is said where a device's memory was too small for a run."""

import jax
from recipes import Recipe

from eqformer import nn, planning, requested_bytes
from eqformer.planning import gigabytes
from support.mesh import abstract_plan, choices, state_of
from support.nearest import nearest
from support.setup import batch_shapes, optimizer_of


_TRIES = 6  # of so many other meshes are bytes computed, a second or two each


def exhausted(error: BaseException, recipe: Recipe, model: nn.Transformer) -> str | None:
    """What was asked for and is there, what the plan holds by formulas, and up to three that would fit.

    None for an error of another kind.
    """
    if (asked := requested_bytes(error)) is None:
        return None
    device = jax.local_devices()[0]
    there = (device.memory_stats() or {}).get("bytes_limit")
    plan = abstract_plan(recipe)
    states = state_of(recipe, plan, optimizer_of(recipe, model), model)
    platform = "tpu" if device.platform == "tpu" else "cuda"  # also of a CPU, for which there are no formulas
    step = planning.step_bytes(states, model, batch_shapes(recipe), platform)
    most = ", ".join(f"{name} {gigabytes(size)}" for name, size in step.held.items() if size)
    lines = [f"a device ({device.device_kind}) is out of memory"]
    lines[0] += f": {gigabytes(asked)} were asked for at once" if asked else ""
    lines[0] += f", and programs get {gigabytes(there)} in all" if there else ""
    lines.append(f"by formulas this run holds {gigabytes(step.total)} on each: {most}")
    # Where it should have fitted by formulas, others that hold a tenth less.
    memory = min(there or step.total, step.total * 9 // 10)
    plans = []
    if plan.mesh.size > 1:
        target = planning.DeviceMemory(memory, platform)
        search = planning.search_plans(states, model, batch_shapes(recipe), target, limit=1, max_traced=_TRIES)
        plans = [f"  {choices(recipe, found.candidate)}: {gigabytes(found.held)}" for found in search.proposals]
    plans += map(str, nearest(recipe, memory, platform, 3 - len(plans)))
    lines += [f"by formulas it would hold no more than {gigabytes(memory)} with", *plans] if plans else [_none(memory)]
    return "\n".join(lines)


def _none(memory: int) -> str:
    return (
        f"nothing was found that holds no more than {gigabytes(memory)} by formulas: take more devices, fewer "
        "--model.layers, or a smaller --batch or --seq"
    )
