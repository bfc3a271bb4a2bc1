"""From a recipe to its plan, its step and its state under a plan."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from recipes import Recipe

from eqformer import parallel, planning, training
from support.setup import build_model


def plan_of(recipe: Recipe, devices: Sequence[Any]) -> parallel.Plan:
    """The recipe's plan over all the devices; raises a `ValueError` that names the flags if it is impossible."""
    sizes = check_sizes(recipe)
    wanted, there = math.prod(sizes.values()), len(devices)
    given = flags(recipe) or "--mesh"
    if wanted > there:
        raise ValueError(
            f"{given}: the axes multiply to {wanted} devices, but there are {there}; make an axis smaller, or simulate "
            f"devices on the CPU with --simulate {math.ceil(wanted / jax.process_count())}."
        )
    if wanted < there:
        more = sizes["replica"] * (there // wanted)
        fix = f"give them to an axis, such as --mesh.replica {more}" if there % wanted == 0 else "make an axis larger"
        raise ValueError(
            f"{given}: the axes multiply to {wanted} devices, and {there - wanted} of {there} would be left over; "
            f"{fix}, or hide the rest from JAX (--simulate on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
        )
    return plan_over(recipe, parallel.make_mesh(**sizes, devices=devices))


def abstract_plan(recipe: Recipe) -> parallel.Plan:
    """The recipe's plan over an abstract mesh, which may be of any size, since it has no devices."""
    return plan_over(recipe, planning.abstract_mesh(check_sizes(recipe)))


def plan_over(recipe: Recipe, mesh: Any) -> parallel.Plan:
    """The recipe's plan over a mesh."""
    return in_flags(recipe, lambda: parallel.Plan(mesh, **vars(recipe.plan)))


def check_plan(recipe: Recipe, plan: parallel.Plan, model: Any) -> None:
    """Raise a `ValueError`, with the flags in front, if the model (or its shapes) or the rows do not fit the plan."""
    more = f"--batch {recipe.batch} --seq {recipe.seq} --execution.core {recipe.execution.core}"
    in_flags(recipe, lambda: plan.check(model, rows=recipe.batch, seq=recipe.seq), more)


def check_sizes(recipe: Recipe) -> dict[str, int]:
    """The size of each axis; raises a `ValueError` for one below 1."""
    sizes = dataclasses.asdict(recipe.mesh)
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"--mesh.{axis} {size}: an axis has at least one device; give 1 or more.")
    return sizes


def flags(recipe: Recipe) -> str:
    """The mesh, and the plan's choices that differ from the defaults, as flags."""
    plain = vars(Recipe.plan)
    axes = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(recipe.mesh).items() if size != 1]
    chosen = [(name, value) for name, value in vars(recipe.plan).items() if value != plain[name]]
    return " ".join(axes + [f"--{name.replace('_', '-')} {value}" for name, value in chosen])


def in_flags(recipe: Recipe, call: Callable[[], Any], *more: str) -> Any:
    """The result of `call`; if it raises a `ValueError`, the recipe's flags and `more` are put in front of it."""
    try:
        return call()
    except ValueError as error:
        given = " ".join(filter(None, (flags(recipe), *more)))
        raise ValueError(f"{given}: {error}" if given else str(error)) from error


def step_of(recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer) -> training.Step:
    """The recipe's step under a plan."""
    return recipe.optimizer.step(optimizer, plan, gradient_norms=recipe.metrics.gradient_norms)


def state_of(
    recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer, shapes: Any = None
) -> training.PlannedState:
    """The recipe's training state under a plan; `shapes` are its model's, where they are known."""
    return training.PlannedState(lambda: build_model(recipe), optimizer, plan, model_shapes=shapes)
