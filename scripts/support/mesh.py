"""From a recipe to its plan, its step and its state under a plan."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from recipes import Mesh, Recipe

from eqformer import parallel, planning, training
from support.flags import spelled
from support.setup import build_model


def plan_of(recipe: Recipe, devices: Sequence[Any]) -> parallel.Plan:
    """The recipe's plan over all the devices; raises a `ValueError` that names the flags if it is impossible."""
    make = lambda: parallel.make_mesh(**vars(recipe.mesh), devices=devices)
    return plan_over(recipe, in_flags(recipe, make))


def abstract_plan(recipe: Recipe) -> parallel.Plan:
    """The recipe's plan over an abstract mesh, which may be of any size, since it has no devices."""
    return plan_over(recipe, in_flags(recipe, lambda: planning.abstract_mesh(vars(recipe.mesh))))


def plan_over(recipe: Recipe, mesh: Any) -> parallel.Plan:
    """The recipe's plan over a mesh."""
    return in_flags(recipe, lambda: parallel.Plan(mesh, **vars(recipe.plan)))


def check_plan(recipe: Recipe, plan: parallel.Plan, model: Any) -> None:
    """Raise a `ValueError`, with the flags in front, if the model (or its shapes) or the rows do not fit the plan."""
    more = f"--batch {recipe.batch} --seq {recipe.seq} --execution.core {recipe.execution.core}"
    in_flags(recipe, lambda: plan.check(model, rows=recipe.batch, seq=recipe.seq), more)


def flags(recipe: Recipe) -> str:
    """The mesh, and the plan's choices that differ from the defaults, as flags."""
    plain = vars(Recipe.plan)
    axes = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(recipe.mesh).items() if size != 1]
    chosen = [(name, value) for name, value in vars(recipe.plan).items() if value != plain[name]]
    return " ".join(axes + [spelled(f"--{name.replace('_', '-')}", value) for name, value in chosen])


def recipe_under(recipe: Recipe, candidate: planning.Candidate) -> Recipe:
    """The recipe with a candidate's mesh and choices."""
    execution = dataclasses.replace(recipe.execution, remat=candidate.remat)
    mesh, plan = (
        Mesh(**parallel.axis_sizes(candidate.plan.mesh)),
        dataclasses.replace(recipe.plan, zero=candidate.plan.zero),
    )
    return dataclasses.replace(recipe, mesh=mesh, plan=plan, execution=execution)


def choices(recipe: Recipe, candidate: planning.Candidate) -> str:
    """The candidate's choices, as flags."""
    remat = [f"--execution.remat {candidate.remat}"] * (candidate.remat != recipe.execution.remat)
    return " ".join(filter(None, [flags(recipe_under(recipe, candidate)), *remat])) or "one device"


def in_flags(recipe: Recipe, call: Callable[[], Any], *more: str) -> Any:
    """The result of `call`; if it raises a `ValueError`, the recipe's flags and `more` are put in front of it."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{' '.join([flags(recipe) or '--mesh', *more])}: {error}") from error


def step_of(recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer) -> training.Step:
    """The recipe's step under a plan."""
    return recipe.optimizer.step(optimizer, plan, gradient_norms=recipe.metrics.gradient_norms)


def state_of(
    recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer, shapes: Any = None
) -> training.PlannedState:
    """The recipe's training state under a plan; `shapes` are its model's, where they are known."""
    return training.PlannedState(lambda: build_model(recipe), optimizer, plan, model_shapes=shapes)
