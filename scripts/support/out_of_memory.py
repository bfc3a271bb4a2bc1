"""Ways to run in less memory, as flags: for a run that ran out of memory, and for a plan that does not fit."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from recipes import Recipe

from eqformer import nn, planning, requested_bytes
from eqformer.planning import gigabytes
from support.flags import flags_of, format_flag
from support.screen import Screen
from support.setup import (
    batch_shapes,
    candidate_flags,
    check_plan,
    make_abstract_plan,
    make_optimizer,
    make_train_state,
    model_shapes,
)


_MAX_TRACED = 6  # Other meshes that are traced, a second or two each.


class SmallerRun(NamedTuple):
    """A recipe that fits, as flags, and the bytes that a device holds by formulas."""

    flags: str
    held: int

    def __str__(self) -> str:
        return f"  {self.flags}: {gigabytes(self.held)}"


@contextmanager
def show_search() -> Iterator[planning.Progress]:
    """Say on standard error that plans are searched, and how far the search is."""
    screen = Screen(errors=True)
    screen.note("looking for plans that fit; tracing each takes seconds")
    with screen.counting() as show:
        yield show


def find_smaller_runs(
    recipe: Recipe, model: nn.LanguageModel, memory: int, platform: str, limit: int = 3
) -> list[SmallerRun]:
    """Return up to `limit` ways to run on the same mesh in so much memory: of each kind the one that changes least.

    More is computed again, and kept on hosts; the batch goes in smaller pieces; less is kept of the state, which
    changes the numbers. `model` is the recipe's, or its shapes; a model is made only for another precision.
    """

    @functools.cache
    def shapes_in(precision: nn.Precision) -> nn.LanguageModel:
        is_same = precision == recipe.precision
        return model if is_same else model_shapes(dataclasses.replace(recipe, precision=precision))

    def shapes_of(variant: Recipe) -> nn.LanguageModel:
        return variant.execution.apply(shapes_in(variant.precision))

    results: list[SmallerRun] = []
    for variants in _variants_by_kind(recipe, platform):
        if len(results) >= limit:
            break
        sizes = ((variant, _held_if_it_fits(variant, shapes_of, memory, platform)) for variant in variants)
        fitting = (SmallerRun(_changed_flags(recipe, variant), size) for variant, size in sizes if size is not None)
        results += itertools.islice(fitting, 1)
    return results


def _variants_by_kind(recipe: Recipe, platform: str) -> Iterator[list[Recipe]]:
    """Yield recipes that hold less and less, by kind."""

    def with_fields(variant: Recipe, part: str, **fields: Any) -> Recipe:
        return dataclasses.replace(variant, **{part: dataclasses.replace(getattr(variant, part), **fields)})

    def with_more_microbatches(variant: Recipe) -> list[Recipe]:
        microbatches = variant.plan.microbatches
        doublings = range(1, (recipe.batch // recipe.plan.microbatches).bit_length())
        return [with_fields(variant, "plan", microbatches=microbatches << doubling) for doubling in doublings]

    full = with_fields(recipe, "execution", remat="full")
    if recipe.mesh.fsdp > 1 and recipe.plan.zero < 3:
        yield [with_fields(recipe, "plan", zero=3)]
    if recipe.execution.remat != "full":
        yield [full]
    if platform != "cpu" and recipe.mesh.pipe == 1 and recipe.execution.remat != "full_on_host":
        yield [with_fields(recipe, "execution", remat="full_on_host")]
    if recipe.mesh.pipe > 1 and not recipe.plan.stage_remat:
        full = with_fields(full, "plan", stage_remat=True)
        yield [full]
    if recipe.execution.remat != "full":
        yield with_more_microbatches(recipe)
    yield with_more_microbatches(full)
    moments = with_fields(full, "optimizer", moments="bfloat16")
    state = with_fields(moments, "precision", parameters="bfloat16", compute="bfloat16")
    yield [moments, *with_more_microbatches(moments), state, *with_more_microbatches(state)]


def _held_if_it_fits(
    recipe: Recipe, shapes_of: Callable[[Recipe], nn.LanguageModel], memory: int, platform: str
) -> int | None:
    """Return the bytes that a device holds, by formulas; None if they exceed the memory or the plan is impossible."""
    try:
        model, plan = shapes_of(recipe), make_abstract_plan(recipe)
        check_plan(recipe, plan, model)
    except ValueError:
        return None
    states = make_train_state(recipe, plan, make_optimizer(recipe, model), model)
    if sum(local for local, _ in planning.state_bytes(states).values()) > memory:
        return None  # Nothing needs to be traced.
    total = planning.step_bytes(states, model, batch_shapes(recipe), platform).total
    return total if total <= memory else None


def _changed_flags(recipe: Recipe, variant: Recipe) -> str:
    """Return what differs, as flags."""
    old = flags_of(recipe)
    return " ".join(format_flag(flag, value) for flag, value in flags_of(variant).items() if old[flag] != value)


def out_of_memory_report(error: BaseException, recipe: Recipe, model: nn.Transformer) -> str | None:
    """Return what was requested and is there, what the plan holds by formulas, and up to three plans that would fit.

    None for an error of another kind.
    """
    if (requested := requested_bytes(error)) is None:
        return None
    device = jax.local_devices()[0]
    available = (device.memory_stats() or {}).get("bytes_limit")
    plan = make_abstract_plan(recipe)
    states = make_train_state(recipe, plan, make_optimizer(recipe, model), model)
    platform = "tpu" if device.platform == "tpu" else "cuda"  # The one for CPUs too, which have no formulas.
    step = planning.step_bytes(states, model, batch_shapes(recipe), platform)
    causes = ", ".join(f"{name} {gigabytes(size)}" for name, size in step.held.items() if size)
    heading = f"a device ({device.device_kind}) is out of memory"
    heading += f": {gigabytes(requested)} were asked for at once" if requested else ""
    heading += f", and programs get {gigabytes(available)} in all" if available else ""
    lines = [heading, f"by formulas this run holds {gigabytes(step.total)} on each: {causes}"]
    # Where the run should have fitted by formulas, plans are proposed that hold a tenth less.
    memory = min(available or step.total, step.total * 9 // 10)
    plans = []
    if plan.mesh.size > 1:
        target = planning.DeviceMemory(memory, platform)
        search = planning.search_plans(states, model, batch_shapes(recipe), target, limit=1, max_traced=_MAX_TRACED)
        plans = [
            f"  {candidate_flags(recipe, proposal.candidate)}: {gigabytes(proposal.held)}"
            for proposal in search.proposals
        ]
    plans += map(str, find_smaller_runs(recipe, model, memory, platform, 3 - len(plans)))
    if plans:
        return "\n".join([*lines, f"by formulas it would hold no more than {gigabytes(memory)} with", *plans])
    advice = "take more devices, fewer --model.layers, or a smaller --batch or --seq"
    return "\n".join([*lines, f"nothing was found that holds no more than {gigabytes(memory)} by formulas: {advice}"])
