"""From a recipe to its parts: model, optimizer, keys."""

import dataclasses
import functools
from collections.abc import Sequence

import equinox as eqx
import jax
from jaxtyping import Array, Key
from recipes import Recipe

from eqformer import Batch, models, nn, parallel, planning, training
from support.run_directory import RunDirectory
from support.screen import Screen


@dataclasses.dataclass(frozen=True)
class Keys:
    """A run's random keys, each for one purpose."""

    init: Key[Array, ""]
    steps: Key[Array, ""]
    samples: Key[Array, ""]


def keys_of(recipe: Recipe) -> Keys:
    """The keys that a recipe's seed gives."""
    return Keys(*jax.random.split(jax.random.key(recipe.seed), 3))


def load_model(recipe: Recipe, plan: parallel.Plan | None, screen: Screen) -> nn.Transformer:
    """The published model that the recipe starts from, sharded by the plan."""
    assert recipe.published is not None
    with screen.bar() as progress:
        show = functools.partial(progress, f"reading {recipe.published}")
        model = models.load(recipe.published, plan=plan, dtype=recipe.precision.parameters, progress=show)
    return as_recipe_says(recipe, model)


def build_model(recipe: Recipe) -> nn.Transformer:
    """The recipe's model with its initial weights."""
    return as_recipe_says(recipe, models.build(recipe.model, key=keys_of(recipe).init))


def shapes_of(recipe: Recipe) -> nn.Transformer:
    """The shapes of the recipe's model."""
    return eqx.filter_eval_shape(build_model, recipe)


def as_recipe_says(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """The model with the recipe's execution settings, precision and LoRA."""
    return adapted(recipe, recipe.precision.apply(recipe.execution.apply(model)))


def adapted(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """The model with the recipe's LoRA, which changes nothing before the first step."""
    return recipe.lora.apply(model, key=jax.random.fold_in(keys_of(recipe).init, 1))


def latest_model(directory: RunDirectory, recipe: Recipe, plan: parallel.Plan | None = None) -> nn.Transformer:
    """The model of a run's latest checkpoint, sharded by the plan, for text: its products are in the compute dtype.

    Raises a `ValueError` if there is none yet.
    """
    with directory.checkpointer() as checkpointer:
        if checkpointer.latest_step is None:
            raise ValueError(f"--run-dir {directory.path}: the run has no checkpoint yet; let it train on.")
        return training.restore_model(checkpointer, nn.without_fp8(shapes_of(recipe)), plan)


def batch_shapes(recipe: Recipe) -> Batch:
    """The shapes of a batch."""
    return planning.batch_shapes(recipe.batch, recipe.seq, packed=recipe.text.packing == "documents")


def optimizer_of(
    recipe: Recipe, model: nn.Transformer, phases: Sequence[training.SchedulePhase] | None = None
) -> training.Optimizer:
    """The recipe's optimizer, with the learning rates of a new run or, if given, those of these phases."""
    its = recipe.optimizer
    return its.optimizer(model, phases or its.phases(recipe.steps), trained=recipe.lora.trained)
