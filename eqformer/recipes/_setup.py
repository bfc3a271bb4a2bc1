"""Check a recipe, and build the parts of its run: keys, model, optimizer, plan, training state and step."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh as DeviceMesh
from jaxtyping import Array, Key

from .. import data, models, nn, parallel, planning, training
from .._annotation_checks import name_class
from ..text import load_tokenizer
from ._recipe import Distillation, fields_of, flags_of, format_flag, Mesh, name_flags_in_errors, Recipe
from ._report import Screen
from ._run_directory import RunDirectory
from ._texts import check_encoder_loss, check_published, recipe_tokenizer, stored_formats


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Keys:
    """Random keys of a run, each for one purpose."""

    init: Key[Array, ""]
    steps: Key[Array, ""]
    samples: Key[Array, ""]


def make_keys(recipe: Recipe) -> Keys:
    """Return the random keys of a run, computed from the recipe's seed."""
    return Keys(*jax.random.split(jax.random.key(recipe.seed), 3))


def load_published_model(recipe: Recipe, plan: parallel.Plan | None, screen: Screen) -> nn.Transformer:
    """Load the published model from which the recipe starts, sharded by the plan."""
    assert recipe.published is not None
    with screen.bar() as progress:
        show = functools.partial(progress, f"reading {recipe.published}")
        has_head = not recipe.has_text_rows or models.is_classifier(recipe.published)
        options: dict[str, Any] = {"dtype": recipe.precision.parameters, "head": has_head, "weights": recipe.weights}
        model = models.load(recipe.published, plan=plan, progress=show, **options)
    return configure_model(recipe, model)


def load_teacher(recipe: Recipe, plan: parallel.Plan, screen: Screen) -> nn.Transformer:
    """Load the recipe's teacher, sharded by the plan, with layers in the order of the pipeline's stages."""
    assert recipe.teacher is not None
    with screen.bar() as progress:
        show = functools.partial(progress, f"reading {recipe.teacher}")
        model = models.load(recipe.teacher, plan=plan, dtype=recipe.precision.parameters, progress=show)
    return plan.shard(recipe.precision.apply(recipe.execution.apply(model)))


def build_model(recipe: Recipe, formats: Mapping[str, Any] = MappingProxyType({})) -> nn.Transformer:
    """Build the recipe's model with its initial weights.

    Linear maps that are in `formats`, the result of `nn.quantized_formats`, hold quantized weights.
    """
    model = models.build(recipe.model, classifier=recipe.classifier, key=make_keys(recipe).init)
    return configure_model(recipe, nn.with_quantized_formats(model, formats))


def model_shapes(recipe: Recipe, directory: RunDirectory | None = None) -> nn.Transformer:
    """Return the shapes of the recipe's model; the run's folder, `directory`, has the formats of quantized weights."""
    formats = {} if recipe.weights == "decoded" else stored_formats(recipe, directory)
    return eqx.filter_eval_shape(build_model, recipe, formats)


def _check_quantized(recipe: Recipe, trains: bool, directory: RunDirectory | None) -> None:
    """Raise a `ValueError` for --weights quantized without a published model, or without LoRA in training."""
    if recipe.weights == "decoded":
        return
    flag = f"--weights {recipe.weights}"
    if recipe.published is None:
        raise ValueError(f"{flag}: only a published model has quantized weights; give --model, or leave --weights out.")
    if trains and not recipe.lora.rank:
        raise ValueError(
            f"{flag} --lora.rank 0: quantized weights cannot be trained, only low-rank changes beside them; give "
            "--lora.rank 8."
        )
    if directory is not None and directory.checkpointer().latest_step == 0:
        raise ValueError(
            f"{flag} --run-dir {directory.path}: convert.py has written decoded weights there; leave --weights out."
        )


def configure_model(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """Return the model with the recipe's execution settings, precision and LoRA, and the head that its loss needs."""
    model = replace_head(recipe, model)
    return apply_lora(recipe, recipe.precision.apply(recipe.execution.apply(model)))


def replace_head(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """Return the model with the head that the recipe's loss needs: no head, a classifier, or the model's own head."""
    if recipe.loss == "contrastive":
        return nn.without_head(model)
    if recipe.classifier is None or model.classifier is not None:
        return model
    return models.with_classifier(model, recipe.model, recipe.classifier, key=make_keys(recipe).init)


def apply_lora(recipe: Recipe, model: nn.Transformer) -> nn.Transformer:
    """Return the model with the recipe's LoRA, which changes nothing before the first step."""
    return recipe.lora.apply(model, key=jax.random.fold_in(make_keys(recipe).init, 1))


def make_optimizer(
    recipe: Recipe, model: nn.LanguageModel, phases: Sequence[training.SchedulePhase] | None = None
) -> training.Optimizer:
    """Build the recipe's optimizer, with the learning rates of `phases` or, by default, of a new run."""
    config = recipe.optimizer
    return config.optimizer(model, phases or config.phases(recipe.steps), trained=recipe.lora.trained)


def count_parameters(optimizer: training.Optimizer, shapes: Any) -> tuple[int, int]:
    """Return the number of parameters that the optimizer trains, and the number of all parameters, from shapes."""
    trained = optimizer.trained(shapes)
    count = planning.parameter_count(eqx.filter_eval_shape(nn.dequantize, shapes))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained)), count


def make_plan(recipe: Recipe, devices: Sequence[Any]) -> parallel.Plan:
    """Return the recipe's plan over the devices; raise a `ValueError` that names the flags if the mesh does not fit."""
    mesh = with_plan_flags(recipe, lambda: parallel.make_mesh(**vars(recipe.mesh), devices=devices))
    return _plan_over(recipe, mesh)


def make_abstract_plan(recipe: Recipe) -> parallel.Plan:
    """Return the recipe's plan over an abstract mesh, which has no devices and may therefore be of any size."""
    return _plan_over(recipe, with_plan_flags(recipe, lambda: planning.abstract_mesh(vars(recipe.mesh))))


def _plan_over(recipe: Recipe, mesh: DeviceMesh | AbstractMesh) -> parallel.Plan:
    return with_plan_flags(recipe, lambda: parallel.Plan(mesh, **vars(recipe.plan)))


def check_plan(recipe: Recipe, plan: parallel.Plan, model: nn.LanguageModel) -> None:
    """Raise a `ValueError`, which begins with flags, if the model (or its shapes) or the rows do not fit the plan."""
    sizes = f"--batch {recipe.batch} --seq {recipe.seq} --execution.core {recipe.execution.core}"
    group = recipe.batch_shapes().group
    with_plan_flags(recipe, lambda: plan.check(model, rows=recipe.batch, seq=recipe.seq, group=group), sizes)


def with_plan_flags(recipe: Recipe, call: Callable[[], Result], *more_flags: str) -> Result:
    """Return the result of `call`, with the recipe's plan flags and `more_flags` in front of a `ValueError`."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{' '.join([plan_flags(recipe) or '--mesh', *more_flags])}: {error}") from error


def plan_flags(recipe: Recipe) -> str:
    """Return the flags of the recipe's mesh and plan whose values differ from the defaults."""
    fields = [*fields_of(recipe.mesh, "--mesh."), *fields_of(recipe.plan)]
    defaults = flags_of(Recipe)
    return " ".join(format_flag(flag, value) for flag, value, *_ in fields if value != defaults[flag])


def with_candidate(recipe: Recipe, candidate: planning.Candidate) -> Recipe:
    """Return the recipe with the mesh, the ZeRO stage and the rematerialisation of a plan that a search found."""
    execution = dataclasses.replace(recipe.execution, remat=candidate.remat)
    mesh = Mesh(**parallel.axis_sizes(candidate.plan.mesh))
    plan = dataclasses.replace(recipe.plan, zero=candidate.plan.zero)
    return dataclasses.replace(recipe, mesh=mesh, plan=plan, execution=execution)


def candidate_flags(recipe: Recipe, candidate: planning.Candidate) -> str:
    """Return the flags that change the recipe's plan to the plan that a search found."""
    flags = [plan_flags(with_candidate(recipe, candidate))]
    if candidate.remat != recipe.execution.remat:
        flags.append(f"--execution.remat {candidate.remat}")
    return " ".join(filter(None, flags)) or "one device"


def make_training_setup(recipe: Recipe, model: nn.LanguageModel) -> planning.TrainingSetup:
    """Return the settings that decide the memory of the recipe's step; `model` is the model or its shapes."""
    plan, trained = make_abstract_plan(recipe), recipe.lora.trained
    parts = recipe.optimizer, recipe.precision, recipe.execution
    return planning.TrainingSetup(model, plan, recipe.batch_shapes(), *parts, trained)


def setting_flags(settings: Mapping[str, object]) -> str:
    """Return settings of a `planning.TrainingSetup` as flags."""
    prefixes = {"optimization": "--optimizer.", "plan": "--"}
    flags = []
    for path, value in settings.items():
        part, _, field = path.partition(".")
        flags.append(format_flag(prefixes.get(part, f"--{part}.") + field.replace("_", "-"), value))
    return " ".join(flags)


def make_train_step(
    recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer
) -> training.Step | training.KtoStep:
    """Build the recipe's step under a plan."""
    gradient_norms = recipe.metrics.gradient_norms
    step = recipe.optimizer.step(optimizer, plan, loss=make_loss(recipe), gradient_norms=gradient_norms)
    return training.KtoStep(step, plan) if recipe.loss == "kto" else step


def make_loss(recipe: Recipe) -> Callable[..., Any]:
    """Return the recipe's loss."""
    if recipe.teacher is not None:
        options = recipe.distillation
        return training.distillation_loss(
            options.divergence, temperature=options.temperature, weight=options.weight, beta=options.beta
        )
    if recipe.loss in ("next-token", "mlm"):
        return recipe.optimizer.loss
    if recipe.loss == "block-diffusion":
        return functools.partial(training.block_diffusion_loss, z_loss=recipe.optimizer.z_loss)
    if recipe.loss == "contrastive":
        options = recipe.contrastive
        return training.contrastive_loss(
            temperature=options.temperature,
            pooling=options.pooling or "mean",
            similarity=options.similarity,
            symmetric=options.symmetric,
            dims=options.dims,
        )
    if recipe.loss == "classification":
        return training.classification_loss
    weights = {"desirable_weight": recipe.desirable_weight, "undesirable_weight": recipe.undesirable_weight}
    return training.preference_loss(recipe.loss, beta=recipe.beta, **weights)


def make_train_state(
    recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer, shapes: nn.LanguageModel | None = None
) -> training.PlannedState:
    """Return the recipe's `PlannedState` under a plan; pass the `shapes` of its model if they are known."""
    return training.PlannedState(lambda: build_model(recipe), optimizer, plan, model_shapes=shapes)


_COUNTS = "--steps --seq --batch --log-every --checkpoint-every --keep --validate-every --validation-batches".split()


def check(recipe: Recipe, *, trains: bool = True, directory: RunDirectory | None = None) -> nn.Transformer:
    """Check a recipe and return the shapes of its model.

    Raises a `ValueError`, which names the flags, for a recipe that cannot work.

    Args:
        recipe: The recipe.
        trains: Whether the recipe is for training; its model must then suit its loss.
        directory: The folder of the recipe's run; once the run has a checkpoint, its copy of the tokenizer is read.
    """
    check_fields(recipe)
    if not 0 < (share := recipe.text.validation) < 1:
        raise ValueError(f"--text.validation {share}: the share must be above 0 and below 1; 0.05 is usual.")
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"--seed {recipe.seed}: give a number from 0 to 2**32 - 1.")
    if recipe.sample_every < 0:
        raise ValueError(f"--sample-every {recipe.sample_every}: give the steps between samples, or 0 for none at all.")
    if recipe.profile is not None:
        parse_steps(recipe.profile)
    if recipe.has_preferences and (recipe.text.hub or recipe.loss_on == "all"):
        raise ValueError(
            f"--loss {recipe.loss}: this loss reads completions in rows of --data or --text.mix; leave --text.hub and "
            "--loss-on all out."
        )
    if recipe.loss == "kto" and recipe.debug_nans:
        raise ValueError(
            "--loss kto --debug-nans: the search cannot compute KTO's reference point, which is not in the batch; "
            "leave --debug-nans out."
        )
    _check_quantized(recipe, trains, directory)
    check_encoder_loss(recipe, directory)
    _check_vocab(recipe, directory)
    _check_distillation(recipe, directory)
    with name_flags_in_errors(recipe):  # The calls in this block make further checks.
        training.LossSpikes(**dataclasses.asdict(recipe.spikes))
        shapes = model_shapes(recipe, directory)
        if trains and not recipe.writes_text:
            _check_encoder(recipe, shapes)
        elif trains and recipe.loss == "block-diffusion":
            training.check_block_diffusion(shapes)
        elif trains:
            training.check_next_token(shapes, seq=recipe.seq)
        recipe.optimizer.step(make_optimizer(recipe, shapes), loss=make_loss(recipe))
    if recipe.metrics.tensorboard:
        training.TensorBoard.package()
    if recipe.metrics.wandb is not None:
        training.WeightsAndBiases.package()
    return shapes


def check_run(recipe: Recipe, directory: RunDirectory) -> nn.Transformer:
    """Check a recipe for a run in a folder, as `check` does, and return the shapes of its model."""
    shapes = check(recipe, directory=directory)
    check_published(recipe, directory)
    check_from_run(recipe, shapes, directory)
    return shapes


def _check_encoder(recipe: Recipe, shapes: nn.Transformer) -> None:
    """Raise a `ValueError` if the recipe's loss is for text encoders, and its model cannot be trained by this loss."""
    name = name_class(recipe.model)
    if shapes.start is not None:
        raise ValueError(f"--loss {recipe.loss}: {name} has an encoder and a decoder; take a model with one stack.")
    if (longest := shapes.max_seq) is not None and recipe.seq > longest:
        raise ValueError(
            f"--seq {recipe.seq}: the model has {longest} learned positions; give --seq {longest} or less."
        )
    families = [family for family in models.FAMILIES.values() if family.config is type(recipe.model)]
    if recipe.loss == "mlm" and not any(family.is_encoder for family in families):
        raise ValueError(
            f"--loss mlm: in {name} no token sees later tokens; take a family of encoders, such as ModernBERT, or "
            "another --loss."
        )


def _check_distillation(recipe: Recipe, directory: RunDirectory | None) -> None:
    """Raise a `ValueError` for flags that no teacher can be combined with, or for a teacher of another vocabulary."""
    options = recipe.distillation
    if recipe.teacher is None:
        if options != Distillation():
            raise ValueError(
                "--distillation: these flags need a teacher; give --teacher, or leave the --distillation flags out."
            )
        return
    flag = f"--teacher {recipe.teacher}"
    if recipe.loss != "next-token" or recipe.optimizer.z_loss:
        raise ValueError(
            f"{flag}: a teacher is combined only with --loss next-token; leave --loss {recipe.loss} and "
            f"--optimizer.z-loss {recipe.optimizer.z_loss} out."
        )
    if recipe.debug_nans and options.top is None:
        raise ValueError(
            f"{flag} --debug-nans: the search cannot run a second model; leave one of the two flags out, or give "
            "--distillation.top."
        )
    vocab, known = recipe.model.vocab, models.read_config(recipe.teacher).vocab
    if vocab != known:
        raise ValueError(
            f"{flag}: teacher and model must have the same ids, but the teacher has {known} ids and the model {vocab}; "
            "take models of one family, or give the teacher's --text.tokenizer and --model.vocab."
        )
    if options.top is not None and not 1 <= options.top <= vocab:
        raise ValueError(f"--distillation.top {options.top}: give a number of ids from 1 to {vocab}.")
    try:
        data.check_same_ids(recipe_tokenizer(recipe, directory), load_tokenizer(recipe.teacher))
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def check_fields(recipe: Recipe) -> None:
    """Raise a `ValueError`, which names the flag, for a value that recipe.json cannot hold or that a run cannot use."""
    unbounded = _flags_without_bounds(recipe.model)
    for flag, value in flags_of(recipe).items():
        _check_value(flag, value, flag in unbounded)


def parse_steps(profile: str) -> tuple[int, int]:
    """Return the first and the last step of `20:25`; raises a `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--profile {profile}: give the first and last step to trace, such as 20:25.")
    return int(match[1]), int(match[2])


def _check_vocab(recipe: Recipe, directory: RunDirectory | None) -> None:
    """Raise a `ValueError` if the tokenizer has more ids than the model; a published model is not checked."""
    if recipe.published is not None:
        return
    file, vocab, known = recipe.text.tokenizer, recipe.model.vocab, recipe_tokenizer(recipe, directory).vocab
    if vocab < known:
        flag, subject = ("", "bytes have") if file is None else (f" --text.tokenizer {file}", "the tokenizer has")
        raise ValueError(
            f"--model.vocab {vocab}{flag}: {subject} {known} ids; leave --model.vocab out, or give at least {known}."
        )


def _flags_without_bounds(config: Any) -> set[str]:
    """Return the flags of a config that may be infinite, because their defaults contain infinity (no bound)."""
    is_infinite = lambda part: isinstance(part, float) and math.isinf(part)
    defaults = fields_of(type(config), "--model.")
    return {flag for flag, value, *_ in defaults if any(map(is_infinite, jax.tree.leaves(value)))}


def _check_value(flag: str, value: Any, may_be_infinite: bool) -> None:
    for part in jax.tree.leaves(value):
        match part:
            case _ if flag in _COUNTS and part < 1:
                fix = "give at least 1"
            case float() if not (math.isfinite(part) or (may_be_infinite and math.isinf(part))):
                fix = "give a finite number"
            case int() if not -(2**63) <= part < 2**63:
                fix = "give a number of at most 64 bits"
            case str() if part.encode(errors="ignore").decode() != part:
                part, fix = ascii(part), "this is not valid UTF-8; type it again"
            case _:
                continue
        raise ValueError(f"{flag} {part}: {fix}.")


def check_from_run(recipe: Recipe, shapes: nn.Transformer, directory: RunDirectory) -> None:
    """Raise a `ValueError` if the recipe's model, with these `shapes`, cannot start from the run in `from_run`."""
    if recipe.from_run is None:
        if recipe.from_step is not None or recipe.from_optimizer:
            raise ValueError(
                "--from-step, --from-optimizer: these flags choose parts of an earlier run; give --from-run DIR too."
            )
        return
    flag = f"--from-run {recipe.from_run}"
    if directory.checkpointer().latest_step is not None:
        return  # The run has already begun, and continues from its own checkpoints.
    if Path(recipe.from_run).absolute() == directory.path.absolute():
        raise ValueError(
            f"{flag} --run-dir {directory.path}: a run cannot begin from itself; give the new run another folder."
        )
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    checkpointer = training.Checkpointer(source.checkpoints)  # Without `run=`, checkpoints of any run can be read.
    if not checkpointer.steps or recipe.from_step not in (None, *checkpointer.steps):
        steps = ", ".join(map(str, checkpointer.steps)) or "none"
        raise ValueError(f"{flag} --from-step {recipe.from_step}: the run has checkpoints of these steps: {steps}.")
    if recipe.weights == "quantized" and (old.weights, old.lora) != (recipe.weights, recipe.lora):
        raise ValueError(
            f"{flag} --weights quantized: low-rank changes belong to the quantized weights beside which they were "
            "trained; give that run's --lora and --weights, or --weights decoded to merge weights and changes."
        )
    if recipe.from_optimizer:
        fields = {
            "--optimizer.name": (old.optimizer.name, recipe.optimizer.name),
            "--optimizer.paths": (old.optimizer.paths, recipe.optimizer.paths),
            "--lora.rank": (old.lora.rank, recipe.lora.rank),
            "--weights": (old.weights, recipe.weights),
            "--precision.parameters": (old.precision.parameters, recipe.precision.parameters),
        }
        if changed := [f"{name} {new} (saved: {saved})" for name, (saved, new) in fields.items() if saved != new]:
            raise ValueError(
                f"{flag} --from-optimizer: the run's optimizer state has a different structure; leave out "
                f"{', '.join(changed)}."
            )
    try:
        shapes = model_shapes(_with_saved_dtypes(recipe, old), source)
        checkpointer.check({"model": shapes}, recipe.from_step, partial=True)
    except training.CheckpointError as error:
        raise ValueError(f"{flag}: the recipe's model has other arrays than that run's model: {error}") from error


def init_run_state(recipe: Recipe, states: training.PlannedState, screen: Screen) -> training.TrainState:
    """Return the state before the first step of a new run; with `--from-optimizer`, the state of the earlier run."""
    if recipe.from_optimizer:
        assert recipe.from_run is not None
        checkpointer = training.Checkpointer(RunDirectory(recipe.from_run).checkpoints)
        return states.restore(checkpointer, recipe.from_step, reset_counters=True)[0]
    if recipe.from_run is None and recipe.published is None:
        return states.init()
    return states.init_from(_load_weights(recipe, states.plan, screen))


def init_run_model(recipe: Recipe, states: training.PlannedState, screen: Screen) -> nn.LanguageModel:
    """Return the model before the first step of a new run, sharded by the plan, without an optimizer's state."""
    if recipe.from_run is None and recipe.published is None:
        return states.init().model
    return states.plan.shard(_load_weights(recipe, states.plan, screen))


def _load_weights(recipe: Recipe, plan: parallel.Plan, screen: Screen) -> nn.Transformer:
    """Load the recipe's model with the weights of `from_run` or of `published`; layers are in the model's order."""
    return load_published_model(recipe, plan, screen) if recipe.from_run is None else load_run_weights(recipe, plan)


def load_run_weights(recipe: Recipe, plan: parallel.Plan) -> nn.Transformer:
    """Load the recipe's model with the weights of the run in `from_run`; layers are in the model's order."""
    assert recipe.from_run is not None
    source = RunDirectory(recipe.from_run)
    _, old = source.read()
    shapes = model_shapes(_with_saved_dtypes(recipe, old), source)
    checkpointer = training.Checkpointer(source.checkpoints)
    model = training.restore_model(checkpointer, shapes, plan, step=recipe.from_step)
    # With --from-optimizer the run's low-rank factors stay, because the optimizer's state belongs to these factors.
    if (old.lora, old.weights) != (recipe.lora, recipe.weights) and not recipe.from_optimizer:
        model = apply_lora(recipe, nn.dequantize(nn.merge_lora(model)))
    return recipe.precision.apply(replace_head(recipe, model))


def _with_saved_dtypes(recipe: Recipe, old: Recipe) -> Recipe:
    """Return the recipe with the settings of LoRA, precision, quantized weights and head of the old recipe."""
    recipe = dataclasses.replace(recipe, lora=old.lora, precision=old.precision, weights=old.weights)
    if not recipe.has_text_rows:
        return recipe
    return dataclasses.replace(recipe, loss=old.loss, classification=old.classification)
