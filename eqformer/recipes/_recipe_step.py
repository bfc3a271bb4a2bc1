"""Forecasts of a recipe's step before anything runs: bytes, communication and seconds, and other plans that fit."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .. import generation, models, nn, parallel, planning, training
from ..parallel import CONTEXT
from . import _report as report, _setup as setup
from ._recipe import Mesh, Recipe


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """A recipe's training step (`plan_training_step`) or decode step (`plan_decode_step`) under the recipe's plan.

    ```python
    recipe = recipes.RECIPES["llama"]()
    step = recipes.plan_training_step(recipe, recipes.check(recipe), planning.topology("h100:8"))
    print(step.report())
    ```
    """

    recipe: Recipe
    """The recipe of the step."""
    model: nn.LanguageModel
    """The shapes of the model."""
    forecast: planning.Forecast
    """The memory, the communication and the time of the step, computed by formulas."""
    lower: Callable[[parallel.Plan], jax.stages.Lowered]
    """A function that lowers the step under a plan from shapes."""
    find_alternatives: Callable[[planning.Progress], str]
    """A function that searches for other plans that fit, and describes them; the search reports its progress."""
    decodes: bool = False
    """Whether the step is a decode step."""
    cache_dtype: str | None = None
    """The dtype of a decode step's caches; None: the compute dtype."""

    def report(self) -> str:
        """Return a report on the step: its plan, its kernels, and the forecast by formulas."""
        recipe, model, target = self.recipe, self.model, self.forecast.target
        plan = planning.for_platform(setup.make_abstract_plan(recipe), self.forecast.platform)
        summary = parallel.summary(plan, model, rows=recipe.batch, seq=1 if self.decodes else recipe.seq)
        is_topology = isinstance(target, planning.Topology)
        heading = [str(target)] if is_topology else []
        parts = ["; ".join([*heading, summary, f"{self.forecast.parameters:,} parameters"])]
        if is_topology:
            platform, name = target.accelerator.platform, target.accelerator.name
            if self.decodes:
                parts += report.decode_lines(recipe, model, platform, self.cache_dtype)
            else:
                parts += report.training_lines(recipe, model, platform, name)
        parts = [part for part in parts if part]
        if not self.decodes:
            shapes = plan.shapes(model)
            table = parallel.layout_table(shapes, plan.parameter_specs(shapes), plan.mesh)
            _, _, table_without_mesh = table.partition("\n")
            parts += ["", table_without_mesh, *report.replicated_lines(plan, shapes)]
        parts += ["", "by formulas:", planning.forecast_table(self.forecast)]
        if not self.decodes:
            parts += _microbatch_lines(recipe, plan, model, self.forecast)
        return "\n".join(parts)


def plan_training_step(recipe: Recipe, model: nn.LanguageModel, target: planning.Target) -> RecipeStep:
    """Return the recipe's training step on a target, such as `planning.topology("v5e:16x16")`.

    `model` has the shapes of the recipe's model, as `check` returns them. Raises a `ValueError` for a recipe that does
    not fit the mesh, or a mesh that does not fit the target.
    """
    plan, batch = setup.make_abstract_plan(recipe), recipe.batch_shapes()
    optimizer = setup.make_optimizer(recipe, model)
    if isinstance(target, planning.Topology):
        setup.with_plan_flags(recipe, lambda: target.speeds(plan.mesh), f"--topology {target}")
    setup.check_plan(recipe, plan, model)
    states = setup.make_train_state(recipe, plan, optimizer, model)
    forecast = planning.forecast(states, model, batch, target, noisy_copies=recipe.has_noisy_copies)

    def find_alternatives(progress: planning.Progress) -> str:
        search = planning.search_plans(
            states, model, batch, target, noisy_copies=recipe.has_noisy_copies, progress=progress
        )
        assert forecast.memory is not None
        limit = 3 - len(search.proposals)
        training_setup = setup.make_training_setup(recipe, model)
        smaller_setups = planning.find_smaller_setups(training_setup, forecast.memory, forecast.platform, limit=limit)
        lines = [planning.format_search(search, functools.partial(setup.candidate_flags, recipe))]
        if smaller_setups:
            lines.append("setups that fit on the same mesh:")
        for smaller in smaller_setups:
            lines.append(f"  {setup.setting_flags(smaller.settings)}: {planning.gigabytes(smaller.held)}")
        return "\n".join(lines)

    lower = functools.partial(lower_training_step, recipe, states)
    return RecipeStep(recipe, model, forecast, lower, find_alternatives)


def lower_training_step(recipe: Recipe, states: training.PlannedState, plan: parallel.Plan) -> jax.stages.Lowered:
    """Lower the recipe's training step under `plan` from shapes; `states` may belong to another plan."""
    step = setup.make_train_step(recipe, plan, states.optimizer)
    if isinstance(step, training.KtoStep):
        step = step.step  # The pass that computes KTO's baseline holds fewer bytes than the step.
    return planning.lowered_step(states.with_plan(plan), step, recipe.batch_shapes())


def plan_decode_step(
    recipe: Recipe,
    model: nn.LanguageModel,
    topology: planning.Topology,
    *,
    cache_dtype: str | None = None,
) -> RecipeStep:
    """Return the step that decodes one token of each row, with parameters in the compute dtype.

    Raises a `ValueError` for a mesh that does not fit the topology.

    Args:
        recipe: A recipe whose `batch` is the number of rows, and `seq` the capacity of the caches in tokens.
        model: The shapes of the recipe's model, as `check(recipe, trains=False)` returns them.
        topology: The accelerators.
        cache_dtype: The dtype of the caches, such as int8; None: the compute dtype.
    """
    compute = recipe.precision.compute
    plan = setup.make_abstract_plan(recipe)
    setup.with_plan_flags(recipe, lambda: topology.speeds(plan.mesh), f"--topology {topology}")
    if recipe.weights == "quantized":
        assert recipe.published is not None
        stacked = models.load_shapes(recipe.published, dtype=compute, weights="quantized")
    else:
        stacked = eqx.filter_eval_shape(nn.Precision(compute, compute).apply, model)
    decoder = stacked
    if recipe.mesh.pipe == 1:
        accelerator = topology.accelerator
        split = recipe.mesh.tensor * recipe.mesh.fsdp
        decoder = eqx.filter_eval_shape(
            generation.unstack_for_platform, stacked, accelerator.platform, accelerator.name, split
        )
    sizes: dict[str, Any] = {"rows": recipe.batch, "capacity": recipe.seq, "cache_dtype": cache_dtype}

    def format_plan(decode_plan: planning.DecodePlan) -> str:
        variant = dataclasses.replace(recipe, mesh=Mesh(**parallel.axis_sizes(decode_plan.plan.mesh)))
        flags = [setup.plan_flags(variant)]
        if decode_plan.rows != recipe.batch:
            flags.append(f"--batch {decode_plan.rows}")
        if decode_plan.cache_dtype:
            flags.append(f"--cache-dtype {decode_plan.cache_dtype}")
        return " ".join(filter(None, flags)) or "one device"

    def find_alternatives(progress: planning.Progress) -> str:
        plans = planning.search_decode_plans(plan, stacked, topology, **sizes, progress=progress)
        return planning.format_decode_plans(plans, format_plan)

    forecast = planning.decode_forecast(plan, decoder, topology, **sizes)
    lower = lambda plan: planning.lowered_decode(plan, decoder, **sizes)
    return RecipeStep(recipe, model, forecast, lower, find_alternatives, True, cache_dtype)


def _microbatch_lines(
    recipe: Recipe, plan: parallel.Plan, model: nn.LanguageModel, forecast: planning.Forecast
) -> list[str]:
    """Return lines on the size of a microbatch, the optimizers of the parameters, and the timeline of a pipeline."""
    optimizer = setup.make_optimizer(recipe, model)
    pieces = math.prod(plan.size(axis) for axis in parallel.BATCH_AXES) * plan.microbatches
    tokens = f"{recipe.batch // pieces} rows of {recipe.seq // plan.size(CONTEXT)} tokens"
    lines = [f"a microbatch on a device is {tokens}", *optimizer.describe(model)]
    names = {"muon": "Muon", "normuon": "Muon", "soap": "SOAP"}
    for name in dict.fromkeys(names[name] for name in dict(optimizer.assignment).values() if name in names):
        if forecast.sent:
            lines.append(
                f"{name}'s products of whole matrices send more bytes than these formulas count; compile the step to "
                "count all bytes"
            )
    if plan.is_pipelined:
        lines += ["", "timeline, if a backward pass takes two forwards' time", parallel.draw_timeline(plan.timetable())]
    return lines
