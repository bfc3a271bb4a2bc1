"""Build the parts of a run from its recipe: keys, model, optimizer, plan, training state and step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh as DeviceMesh
from jaxtyping import Array, Key
from recipes import Mesh, Recipe

from eqformer import Batch, models, nn, parallel, planning, training
from support.flags import format_flag
from support.screen import Screen


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Keys:
    """Random keys of a run, each for one purpose."""

    init: Key[Array, ""]
    steps: Key[Array, ""]
    samples: Key[Array, ""]


def make_keys(recipe: Recipe) -> Keys:
    """Return the keys that a recipe's seed gives."""
    return Keys(*jax.random.split(jax.random.key(recipe.seed), 3))


def load_published_model(recipe: Recipe, plan: parallel.Plan | None, screen: Screen) -> nn.Transformer:
    """Load the published model that the recipe starts from, sharded by the plan."""
    assert recipe.published is not None
    with screen.bar() as progress:
        show = functools.partial(progress, f"reading {recipe.published}")
        model = models.load(recipe.published, plan=plan, dtype=recipe.precision.parameters, progress=show)
    return configure_model(recipe, model)


def build_model(recipe: Recipe) -> nn.Transformer:
    """Build the recipe's model with its initial weights."""
    return configure_model(recipe, models.build(recipe.model, key=make_keys(recipe).init))


def model_shapes(recipe: Recipe) -> nn.Transformer:
    """Return the shapes of the recipe's model."""
    return eqx.filter_eval_shape(build_model, recipe)


def configure_model(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """Return the model with the recipe's execution settings, precision and LoRA."""
    return add_lora(recipe, recipe.precision.apply(recipe.execution.apply(model)))


def add_lora(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """Return the model with the recipe's LoRA, which changes nothing before the first step."""
    return recipe.lora.apply(model, key=jax.random.fold_in(make_keys(recipe).init, 1))


def batch_shapes(recipe: Recipe) -> Batch:
    """Return the shapes of a batch."""
    return planning.batch_shapes(recipe.batch, recipe.seq, packed=recipe.text.packing != "windows")


def make_optimizer(
    recipe: Recipe, model: nn.LanguageModel, phases: Sequence[training.SchedulePhase] | None = None
) -> training.Optimizer:
    """Build the recipe's optimizer, with the learning rates of a new run or, if given, those of these phases."""
    config = recipe.optimizer
    return config.optimizer(model, phases or config.phases(recipe.steps), trained=recipe.lora.trained)


def make_plan(recipe: Recipe, devices: Sequence[Any]) -> parallel.Plan:
    """Return the recipe's plan over all the devices; a `ValueError` that it raises names the flags."""
    mesh = with_plan_flags(recipe, lambda: parallel.make_mesh(**vars(recipe.mesh), devices=devices))
    return _plan_over(recipe, mesh)


def make_abstract_plan(recipe: Recipe) -> parallel.Plan:
    """Return the recipe's plan over an abstract mesh, which may be of any size, since it has no devices."""
    return _plan_over(recipe, with_plan_flags(recipe, lambda: planning.abstract_mesh(vars(recipe.mesh))))


def _plan_over(recipe: Recipe, mesh: DeviceMesh | AbstractMesh) -> parallel.Plan:
    return with_plan_flags(recipe, lambda: parallel.Plan(mesh, **vars(recipe.plan)))


def check_plan(recipe: Recipe, plan: parallel.Plan, model: nn.LanguageModel) -> None:
    """Raise a `ValueError`, with the flags in front, if the model (or its shapes) or the rows do not fit the plan."""
    sizes = f"--batch {recipe.batch} --seq {recipe.seq} --execution.core {recipe.execution.core}"
    group = 2 if recipe.compares_pairs else 1
    with_plan_flags(recipe, lambda: plan.check(model, rows=recipe.batch, seq=recipe.seq, group=group), sizes)


def with_plan_flags(recipe: Recipe, call: Callable[[], Result], *more_flags: str) -> Result:
    """Return the result of `call`, with the recipe's plan flags and `more_flags` in front of a `ValueError`."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{' '.join([plan_flags(recipe) or '--mesh', *more_flags])}: {error}") from error


def plan_flags(recipe: Recipe) -> str:
    """Return the mesh, and the plan's choices that differ from the defaults, as flags."""
    defaults = vars(Recipe.plan)
    axes = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(recipe.mesh).items() if size != 1]
    choices = [(name, value) for name, value in vars(recipe.plan).items() if value != defaults[name]]
    return " ".join(axes + [format_flag(f"--{name.replace('_', '-')}", value) for name, value in choices])


def with_candidate(recipe: Recipe, candidate: planning.Candidate) -> Recipe:
    """Return the recipe with the mesh and the choices of a plan that a search found."""
    execution = dataclasses.replace(recipe.execution, remat=candidate.remat)
    mesh = Mesh(**parallel.axis_sizes(candidate.plan.mesh))
    plan = dataclasses.replace(recipe.plan, zero=candidate.plan.zero)
    return dataclasses.replace(recipe, mesh=mesh, plan=plan, execution=execution)


def candidate_flags(recipe: Recipe, candidate: planning.Candidate) -> str:
    """Return the flags that give the recipe a plan that a search found."""
    remat = [f"--execution.remat {candidate.remat}"] * (candidate.remat != recipe.execution.remat)
    return " ".join(filter(None, [plan_flags(with_candidate(recipe, candidate)), *remat])) or "one device"


def make_training_setup(recipe: Recipe, model: nn.LanguageModel) -> planning.TrainingSetup:
    """Return what decides the bytes of the recipe's step, with the model or its shapes."""
    plan, trained = make_abstract_plan(recipe), recipe.lora.trained
    parts = recipe.optimizer, recipe.precision, recipe.execution
    return planning.TrainingSetup(model, plan, batch_shapes(recipe), *parts, trained)


def setting_flags(settings: Mapping[str, object]) -> str:
    """Return settings of a `planning.TrainingSetup` as flags."""
    prefixes = {"optimization.": "--optimizer.", "plan.": "--"}
    flags = []
    for path, value in settings.items():
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), "")
        flags.append(format_flag(prefixes.get(prefix, "--") + path.removeprefix(prefix).replace("_", "-"), value))
    return " ".join(flags)


def make_train_step(recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer) -> training.Step:
    """Build the recipe's step under a plan."""
    return recipe.optimizer.step(optimizer, plan, loss=make_loss(recipe), gradient_norms=recipe.metrics.gradient_norms)


def make_loss(recipe: Recipe) -> Callable[..., Any]:
    """Return the recipe's loss."""
    if recipe.loss == "next-token":
        return recipe.optimizer.loss
    return training.preference_loss(recipe.loss, beta=recipe.beta)


def make_train_state(
    recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer, shapes: nn.LanguageModel | None = None
) -> training.PlannedState:
    """Describe the recipe's training state under a plan; `shapes` are its model's, where they are known."""
    return training.PlannedState(lambda: build_model(recipe), optimizer, plan, model_shapes=shapes)
