"""Runs that hold less than one that does not fit: the nearest first, as flags."""

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from recipes import Recipe

from eqformer import planning
from eqformer.planning import gigabytes
from support.flags import flags_of, spelled
from support.mesh import abstract_plan, check_plan, state_of
from support.screen import Screen
from support.setup import batch_shapes, optimizer_of, shapes_of


class Near(NamedTuple):
    """A recipe that fits, as flags, and the bytes that a device holds by formulas."""

    flags: str
    held: int

    def __str__(self) -> str:
        return f"  {self.flags}: {gigabytes(self.held)}"


@contextmanager
def looking() -> Iterator[planning.Progress]:
    """Say on standard error that plans are looked for, and how far the search is."""
    screen = Screen(errors=True)
    screen.note("looking for plans that fit; tracing each takes seconds")
    with screen.counting() as show:
        yield show


def nearest(recipe: Recipe, memory: int, platform: str, most: int = 3) -> list[Near]:
    """Up to `most` ways to run on the same mesh in so much memory: of each kind the one that changes least.

    More is computed again, and kept on hosts; the batch goes in smaller pieces; less is kept of the state, which
    changes the numbers.
    """
    found: list[Near] = []
    for kind in _kinds(recipe, platform):
        if len(found) >= most:
            break
        sizes = ((one, _held(one, memory, platform)) for one in kind)
        fitting = (Near(_changes(recipe, one), size) for one, size in sizes if size is not None)
        found += itertools.islice(fitting, 1)
    return found


def _kinds(recipe: Recipe, platform: str) -> Iterator[list[Recipe]]:
    """Recipes that hold less and less, by kind."""
    again = lambda remat: dataclasses.replace(recipe, execution=dataclasses.replace(recipe.execution, remat=remat))
    full = again("full")
    pieces = lambda one: [
        dataclasses.replace(one, plan=dataclasses.replace(one.plan, microbatches=one.plan.microbatches << times))
        for times in range(1, (recipe.batch // recipe.plan.microbatches).bit_length())
    ]
    if recipe.mesh.fsdp > 1 and recipe.plan.zero < 3:
        yield [dataclasses.replace(recipe, plan=dataclasses.replace(recipe.plan, zero=3))]
    if recipe.execution.remat != "full":
        yield [full]
    if platform != "cpu" and recipe.mesh.pipe == 1 and recipe.execution.remat != "full_on_host":
        yield [again("full_on_host")]
    if recipe.mesh.pipe > 1 and not recipe.plan.stage_remat:
        full = dataclasses.replace(full, plan=dataclasses.replace(full.plan, stage_remat=True))
        yield [full]
    if recipe.execution.remat != "full":
        yield pieces(recipe)
    yield pieces(full)
    narrow = dataclasses.replace(full, optimizer=dataclasses.replace(full.optimizer, moments="bfloat16"))
    narrowest = dataclasses.replace(
        narrow, precision=dataclasses.replace(narrow.precision, parameters="bfloat16", compute="bfloat16")
    )
    yield [one for its in (narrow, narrowest) for one in (its, *pieces(its))]


def _held(recipe: Recipe, memory: int, platform: str) -> int | None:
    """The bytes that a device holds, by formulas; None where they are more than the memory, or the plan is none."""
    try:
        model, plan = shapes_of(recipe), abstract_plan(recipe)
        check_plan(recipe, plan, model)
    except ValueError:
        return None
    states = state_of(recipe, plan, optimizer_of(recipe, model), model)
    if sum(own for own, _ in planning.state_bytes(states).values()) > memory:
        return None  # nothing need be traced
    held = planning.step_bytes(states, model, batch_shapes(recipe), platform).total
    return held if held <= memory else None


def _changes(recipe: Recipe, other: Recipe) -> str:
    """What differs, as flags."""
    old = flags_of(recipe)
    return " ".join(spelled(flag, value) for flag, value in flags_of(other).items() if old[flag] != value)
