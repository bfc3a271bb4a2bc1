"""Training loop of a run: steps, metrics, validation, samples and checkpoints."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from .. import data, generation, nn, parallel, planning, training
from .._files import dataclass_to_json
from .._shapes import Batch
from ..parallel import check_alike, is_first_process, on_all_processes, on_first_process
from ._evaluation import evaluation_line, make_scores, open_evaluator
from ._recipe import check_types, name_flags_in_errors, Recipe
from ._report import closing_lines, local_platform, metrics_line, opening_line, Screen, Show, training_lines
from ._run_directory import RunDirectory, schedule_phases
from ._setup import (
    apply_lora,
    candidate_flags,
    check_plan,
    check_run,
    count_parameters,
    init_run_model,
    init_run_state,
    Keys,
    load_teacher,
    make_keys,
    make_loss,
    make_optimizer,
    make_plan,
    make_train_state,
    make_train_step,
    make_training_setup,
    model_shapes,
    parse_steps,
    setting_flags,
)
from ._texts import (
    complete_recipe,
    copy_published_files,
    known_mask_id,
    open_sources,
    open_texts,
    recipe_tokenizer,
    row_encoder,
    run_mask_id,
    sample_prompt,
)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The result of `train`; `eqformer.load(run.folder)` loads the model."""

    folder: Path
    """The folder of the run."""
    start: int
    """The number of steps that the run had taken when the call began; 0 for a new run."""
    step: int
    """The last step that was taken."""
    metrics: dict[str, Any]
    """The latest value of each metric of metrics.jsonl, such as `loss` and `validation_loss`."""


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    name: str | None = None,
    devices: Sequence[Any] | None = None,
    screen: Screen | None = None,
) -> TrainedRun:
    """Train a model as a recipe describes; the same call resumes a run that was stopped.

        recipe = Recipe(models.preset("llama-byte-1m"), data="my_text/", steps=300)
        run = train(recipe, "runs/mine")
        print(run.metrics["validation_loss"], eqformer.load(run.folder).generate("def "))

    Everything is checked before anything is written. Raises a `ValueError` that names fields of the recipe by their
    flags, see `Recipe`, and the folder as `--run-dir`. Call `eqformer.prepare()` before the first array of the program.

    Args:
        recipe: The model, the data and the settings of training. A run that has ended may continue to more `steps`.
        folder: The folder of the run, which must be new, empty, or the folder of the same recipe's run.
        name: The recipe's name in the folder and in notes, by default the name of the folder. A recipe that uses
            classes of a user's file needs `FILE.py:NAME`, so that these classes can be found again.
        devices: The devices of the mesh, whose number is the product of the sizes of `recipe.mesh`; by default all.
        screen: Where notes and progress are shown; `Screen(silent=True)` shows nothing. By default, the first process
            prints to standard output: a progress bar in a terminal if `rich` is installed, or else lines.
    """
    check_types(recipe)
    recipe, directory = complete_recipe(recipe), RunDirectory(folder)
    name = name or directory.path.name
    check_alike({"--recipe": name} | {f"--{flag}": value for flag, value in dataclass_to_json(recipe).items()})
    with name_flags_in_errors(recipe):
        shapes = check_run(recipe, directory)
        plan = make_plan(recipe, jax.devices() if devices is None else devices)
        check_plan(recipe, plan, shapes)
        with directory, explain_out_of_memory(recipe, shapes):
            screen = screen or Screen(silent=not is_first_process())
            return Trainer(name, recipe, shapes, plan, directory, screen).run()


@contextmanager
def explain_out_of_memory(recipe: Recipe, shapes: nn.Transformer) -> Iterator[None]:
    """Explain an out-of-memory error of a device by a `ValueError`.

    The error names the bytes of the recipe's step, and flags with which a step takes fewer bytes.
    """
    try:
        yield
    except JaxRuntimeError as error:
        training_setup, format_plan = make_training_setup(recipe, shapes), functools.partial(candidate_flags, recipe)
        message = planning.out_of_memory_report(
            error, training_setup, format_plan=format_plan, format_settings=setting_flags
        )
        if message is None:
            raise
        raise ValueError(message) from error


@functools.cache
def _measure_peak(mesh: Mesh, dtype: str) -> float:
    """Measure the peak FLOP/s of all devices of a mesh; further runs of the process reuse the result."""
    return planning.mesh_peak(mesh, dtype, seconds=0.25)


class Trainer:
    """Training of a recipe in a directory, from its latest checkpoint to its last step."""

    def __init__(
        self, name: str, recipe: Recipe, shapes: Any, plan: parallel.Plan, directory: RunDirectory, screen: Screen
    ):
        """Open the text, and lock the run's folder.

        Args:
            name: The recipe's name.
            recipe: The recipe.
            shapes: The shapes of the recipe's model.
            plan: The recipe's plan over devices.
            directory: The run's folder.
            screen: Where notes and progress are shown.
        """
        self.recipe, self.plan, self.directory, self.screen = recipe, plan, directory, screen
        self.name, self.shapes = name, shapes
        self.evaluator = on_all_processes(lambda: open_evaluator(recipe))
        sources, self.tokenizer = on_all_processes(lambda: (open_sources(recipe), recipe_tokenizer(recipe, directory)))
        on_first_process(lambda: directory.claim(name, recipe))
        check_alike({f"--run-dir {directory.path}": directory.token()})
        self.encoder: Any = on_all_processes(lambda: row_encoder(recipe, self.tokenizer, directory))
        open_corpus = lambda: open_texts(recipe, sources, self.encoder or self.tokenizer, directory, screen)
        texts = on_first_process(open_corpus)  # The first process writes the tokens, which the other processes read.
        self.texts = on_all_processes(lambda: texts or open_corpus())
        check_alike(
            {"the text": [self.texts.identity, [text.store.path.name for text in self.texts.held_out.values()]]}
        )
        self.rows = training.ProcessRows(plan, recipe.batch)
        self.keys: Keys = make_keys(recipe)
        note_stop = lambda: screen.note("stopping after this step; signal again to stop at once")
        self.stop = training.StopSignals(plan.mesh, note_stop)
        self.spikes = training.LossSpikes(**dataclasses.asdict(recipe.spikes))
        self.phases, self.rates_note = on_all_processes(lambda: schedule_phases(recipe, directory.checkpointer()))
        self.optimizer = make_optimizer(recipe, shapes, self.phases)
        self.states = make_train_state(recipe, plan, self.optimizer, shapes)
        self.flops_per_token = planning.flops_per_token(
            shapes, recipe.seq, trained=self.optimizer.trained, noisy_copies=recipe.has_noisy_copies
        )
        self.parameters = count_parameters(self.optimizer, shapes)
        self.summary = parallel.summary(plan, shapes, rows=recipe.batch, seq=recipe.seq)
        self.evaluate = training.make_evaluation(plan)
        if recipe.has_text_rows:
            accuracy = "retrieval_accuracy" if recipe.loss == "contrastive" else "accuracy"
            self.evaluate = training.make_loss_evaluation(plan, make_loss(recipe), accuracy=accuracy)
        self.scores = None
        if self.evaluator is not None:
            self.scores = make_scores(recipe, self.evaluator, self.tokenizer, directory, self.states, shapes)
        self.reference: Any = None
        self.add_reference_nats = training.make_reference_nats(plan)
        self.last: dict[str, Any] = {}

    def run(self) -> "TrainedRun":
        """Train to the last step, or until a signal asks to stop."""
        return self.spikes.retry(self._run, self.screen.note)

    def _run(self) -> "TrainedRun":
        """Train from the last checkpoint to the last step, or to a spike of the loss."""
        recipe, screen = self.recipe, self.screen
        checkpointer = self.directory.checkpointer(recipe.keep)
        start = checkpointer.latest_step or 0
        with checkpointer, self.stop, ThreadPoolExecutor(1) as executor:
            if start < recipe.steps:
                self._store_arrays(checkpointer)
            # A thread compiles the step while the state is initialized or loaded; XLA releases Python's lock meanwhile.
            step = executor.submit(lambda: self.step) if start < recipe.steps else None
            state = self._state(checkpointer)
            tokens = "{:,} training tokens, {:,} for validation".format(*self.texts.tokens)
            screen.note(opening_line(self.name, recipe, self.directory, start, self.parameters, tokens))
            if mix := self.texts.describe(recipe.steps):
                screen.note(mix)
            if self.plan.mesh.size > 1:
                screen.note(self.summary)
            kernel_lines = training_lines(recipe, self.shapes, local_platform(), jax.devices()[0].device_kind)
            for line in (*self.optimizer.describe(self.shapes), *kernel_lines):
                screen.note(line)
            if step is None:
                self._begin()
                screen.note(f"the run already has its {start} steps; give a larger --steps to continue it")
                return TrainedRun(self.directory.path, start, start, self.directory.latest_metrics())
            if self.rates_note:
                screen.note(self.rates_note)
            self.spikes.start(start, checkpointer.metadata().get("spikes") if start else None)
            key, rows = self.states.replicate(self.keys.steps), (self.rows.start, self.rows.stop)
            transform, batch_of = self.rows.place, self.spikes.batch_number
            with (
                data.prefetch(
                    self.texts.train, start, recipe.steps, rows=rows, transform=transform, batch_of=batch_of
                ) as batches,
                screen.steps(recipe.steps, start) as show,
            ):
                compiled = step.result()
                batches = self._prepare_batches(batches, state, is_first=not start)
                self._begin()
                with self._open_metrics(start) as writers:
                    callbacks, steps = self._callbacks(writers, show, checkpointer), recipe.steps
                    try:
                        run = training.train(
                            compiled, state, batches, key, start=start, steps=steps, callbacks=callbacks
                        )
                    except training.LossSpikeError:
                        checkpointer.wait()  # Wait, so that all processes go back to the same checkpoint.
                        raise
                    checkpointer.wait()
            counts = int(run.state.skipped), int(run.state.empty_batches or 0)
            screen.note(closing_lines(recipe, self.directory, run.step, *counts, self.last))
        return TrainedRun(self.directory.path, start, run.step, dict(self.last))

    def _begin(self) -> None:
        """Write the first files of the run, its recipe and its tokenizer, after all checks have passed."""
        recipe, directory = self.recipe, self.directory
        on_first_process(lambda: (directory.begin(self.name, recipe), copy_published_files(recipe, directory)))

    @functools.cached_property
    def step(self) -> training.Step | training.KtoStep:
        """The step, compiled from shapes."""
        first = self.texts.train.rows(0, self.rows.start, self.rows.stop)
        if self.recipe.teacher is not None and self.recipe.distillation.top is None:
            return make_train_step(self.recipe, self.plan, self.optimizer)  # The first call compiles this step.
        if self.recipe.has_reference:
            first = dataclasses.replace(first, reference_nats=np.zeros(len(first.ids), np.float32))
        if self.recipe.loss == "block-diffusion":
            noisy = eqx.filter_eval_shape(self._mask_batch, first)
            first = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), noisy)
        shapes: Any = self.states.step_shapes(self.rows.shapes(first))
        return make_train_step(self.recipe, self.plan, self.optimizer).compile(*shapes)

    def _callbacks(
        self, writers: training.MetricWriters, show: Show, checkpointer: training.Checkpointer
    ) -> list[training.Callback]:
        """Return the callbacks of each step, in the order of their calls."""
        recipe, every = self.recipe, training.Every
        clock = training.Clock(
            tokens_per_step=recipe.batch * recipe.seq,
            flops_per_token=self.flops_per_token,
            peak_flops=self._find_peak,
        )

        def write_row(row: dict[str, Any]) -> None:
            on_first_process(self.directory.check_exists)
            writers.write(row)
            self.last.update(row)

        has_samples = recipe.sample_every and recipe.writes_text
        draw = lambda run: on_first_process(self.directory.draw_metrics)
        show_last = lambda run: show(run.step, metrics_line(self.last), run.is_due(recipe.log_every))
        return [
            *([self._profile()] if recipe.profile else []),
            training.Log(recipe.log_every, write_row, self._extra_metrics(clock)),
            *clock.excluding(
                [
                    *([self._debug_nans()] if recipe.debug_nans else []),
                    self.spikes,
                    self.stop,
                    *self._evaluations(write_row, draw),
                    training.Validation(recipe.validate_every, self._validate, write_row, has_bits=recipe.writes_text),
                    every(recipe.validate_every, draw),
                    every(1, show_last),
                    training.Checkpoints(recipe.checkpoint_every, checkpointer, self._metadata, self.states),
                    *([every(recipe.sample_every, self._sample)] if has_samples else []),
                ]
            ),
        ]

    def _evaluations(
        self, write_row: Callable[[dict[str, Any]], None], draw: Callable[[training.Progress], object]
    ) -> list[training.Callback]:
        """Return the callbacks that score the model on texts and tasks, and draw the scores."""
        if self.scores is None:
            return []

        def write(row: dict[str, int | float]) -> None:
            write_row(row)
            self.screen.note(evaluation_line(row))

        every = self.recipe.evaluate_every
        return [training.Evaluations(every, self.scores, write), training.Every(every, draw)]

    @functools.cached_property
    def evaluate_rewards(self) -> Callable[..., dict[str, Any]] | None:
        """The function that sums the rewards of a batch of pairs; None if rows are not pairs."""
        recipe = self.recipe
        if recipe.loss not in ("dpo", "ipo", "orpo"):
            return None
        return training.make_reward_evaluation(self.plan, recipe.loss, beta=recipe.beta)

    @functools.cached_property
    def _mask_batch(self) -> Callable[[Batch], Batch]:
        """The function that masks a batch's tokens for `--loss mlm` or `--loss block-diffusion`.

        Random numbers depend only on the seed and on a row's index among all rows of the run, so that a resumed run
        reads the same batches, on any mesh.
        """
        recipe, tokenizer = self.recipe, self.tokenizer
        mask, key = known_mask_id(recipe, tokenizer, self.directory), jax.random.key(recipe.seed)
        if recipe.loss == "block-diffusion":
            block = training.check_block_diffusion(self.shapes)
            noise = functools.partial(training.noise_blocks, key=key, mask_id=mask, block=block)
            return functools.partial(noise, answers_only=self.encoder is not None)
        special_ids = {*tokenizer.special_ids, tokenizer.end_of_text, mask}
        options: dict[str, Any] = {"mask_id": mask, "mlm_probability": recipe.masking.share}
        options |= {"vocab": tokenizer.vocab, "special_ids": sorted(special_ids)}
        return functools.partial(training.mask_tokens, key=key, **options)

    @functools.cached_property
    def mask(self) -> Callable[[Batch], Batch]:
        """`_mask_batch` as compiled programs, whose results have the shardings that the compiled step expects."""
        programs: dict[Any, Callable[[Batch], Batch]] = {}

        def apply(batch: Batch) -> Batch:
            # Arrays with a number per row are sharded like `examples`, arrays with a number per token like `ids`.
            sharding_by_ndim = {x.ndim: x.sharding for x in map(jnp.asarray, (batch.examples, batch.ids))}
            key = jax.tree.structure(batch), batch.ids.shape, *sharding_by_ndim.values()
            if key not in programs:
                shapes = eqx.filter_eval_shape(self._mask_batch, batch)
                out_shardings = jax.tree.map(lambda x: sharding_by_ndim[x.ndim], shapes)
                programs[key] = jax.jit(self._mask_batch, out_shardings=out_shardings)
            return programs[key](batch)

        return apply

    def _find_peak(self) -> float:
        """Return the measured peak of all devices together, in FLOP/s, in the compute dtype."""
        assert isinstance(self.plan.mesh, Mesh)
        return _measure_peak(self.plan.mesh, self.recipe.precision.compute)

    def _profile(self) -> training.Profile:
        return training.Profile(*parse_steps(self.recipe.profile or ""), self.directory.profile)

    def _debug_nans(self) -> training.DebugNans:
        pieces, trained = self.plan.microbatches, self.optimizer.trained
        key, loss = self.keys.steps, make_loss(self.recipe)
        return training.DebugNans(loss, key, microbatches=pieces, trained=trained, states=self.states)

    def _extra_metrics(self, clock: training.Clock) -> Callable[[training.Progress], dict[str, int | float]]:
        """Return a function that computes further metrics of a row, beside the metrics of the step."""
        skipped = sum(last - first + 1 for first, last in self.spikes.skipped_batches)
        return lambda run: clock.rate(run) | ({"batches_left_out": skipped} if skipped else {})

    def _store_arrays(self, checkpointer: training.Checkpointer) -> None:
        """Compute and store the teacher's or the reference's arrays of all rows, while no other model is in memory."""
        recipe, top = self.recipe, self.recipe.distillation.top
        if any(loader.stored is not None for loader in self.texts.loaders.values()):
            return  # The arrays are already stored: the run goes on after a loss spike.
        if recipe.teacher is not None and top is not None:
            title, temperature = "computing the teacher's probabilities", recipe.distillation.temperature
            teacher = load_teacher(recipe, self.plan, self.screen)
            arrays = training.teacher_arrays(
                teacher, self.plan, top=top, temperature=temperature, batch_size=recipe.batch
            )
        elif recipe.has_reference and recipe.reference == "stored":
            title = "computing the reference's nats"
            if checkpointer.latest_step == 0:
                model = self.plan.shard(self._converted_model(checkpointer))
            else:
                model = init_run_model(recipe, self.states, self.screen)
            arrays = training.reference_arrays(nn.without_lora(model), self.plan, batch_size=recipe.batch)
        else:
            return
        with self.screen.bar() as progress:
            show = functools.partial(progress, title)
            add_arrays = lambda loader: loader.with_row_arrays(arrays, progress=show)
            # Validation reads these arrays only to measure the rewards of pairs.
            self.texts = self.texts.map_loaders(add_arrays, held_out=recipe.compares_pairs)

    def _prepare_batches(self, batches: Iterable[Any], state: training.TrainState, *, is_first: bool) -> Iterable[Any]:
        """Return the batches as the loss reads them: with masked tokens, or with a teacher's or reference's outputs.

        The reference is the model before its first step; with LoRA, the model without low-rank changes.
        """
        recipe = self.recipe
        if recipe.loss in ("mlm", "block-diffusion"):
            return map(self.mask, batches)
        if recipe.teacher is not None and recipe.distillation.top is None:
            return training.add_teacher(batches, load_teacher(recipe, self.plan, self.screen), self.plan)
        if not recipe.has_reference or recipe.reference == "stored":
            return batches
        if is_first or recipe.lora.rank:
            copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))  # Steps donate the state's arrays.
            arrays, static = eqx.partition(nn.without_lora(state.model), eqx.is_array)
            self.reference = eqx.combine(copy(arrays), static)
        else:
            self.reference = init_run_model(recipe, self.states, self.screen)
        return (self.add_reference_nats(self.reference, batch) for batch in batches)

    def _converted_model(self, checkpointer: training.Checkpointer) -> nn.LanguageModel:
        """Return the recipe's model, with layers in the model's order, from a checkpoint that convert.py wrote."""
        shapes = model_shapes(dataclasses.replace(self.recipe, lora=training.Lora()), self.directory)
        return apply_lora(self.recipe, training.restore_model(checkpointer, shapes, self.plan))

    def _state(self, checkpointer: training.Checkpointer) -> training.TrainState:
        """Return the state of the latest checkpoint, or else the initial state."""
        if checkpointer.latest_step is None:
            return init_run_state(self.recipe, self.states, self.screen)
        if checkpointer.latest_step == 0:  # A converted model's checkpoint has step 0 and contains only the model.
            return self.states.init_from(self._converted_model(checkpointer))
        metadata = checkpointer.metadata()
        if (text := metadata["data"]["text"]) != self.texts.identity:
            raise ValueError(
                f"--run-dir {self.directory.path}: the run's checkpoint was trained on {text}, but the text is now "
                f"{self.texts.identity}; restore the files as they were, or begin a new run."
            )
        if "run" not in metadata:
            self.screen.note(
                f"the checkpoint of step {checkpointer.latest_step} names no run, because an older version saved it; "
                "the run continues from this checkpoint"
            )
        self.keys = dataclasses.replace(self.keys, steps=training.saved_key(metadata))
        return self.states.restore(checkpointer)[0]

    def _validate(self, model: Any) -> tuple[Any, Mapping[str, Any]]:
        def sums(batch: Batch) -> dict[str, Any]:
            placed: Any = self.rows.place(batch)
            placed = self.mask(placed) if self.recipe.loss in ("mlm", "block-diffusion") else placed
            results = self.evaluate(model, placed)
            if self.evaluate_rewards is None:
                return results
            compared = placed if self.reference is None else self.add_reference_nats(self.reference, placed)
            return results | self.evaluate_rewards(model, compared)

        rows = self.rows.start, self.rows.stop
        return self.texts.validate(sums, self.recipe.validation_batches, rows=rows)

    def _open_metrics(self, start: int) -> training.MetricWriters:
        metrics = self.recipe.metrics
        return self.directory.open_metrics(
            start, tensorboard=metrics.tensorboard, wandb=metrics.wandb, recipe=self.recipe
        )

    def _metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint; raise a `ValueError` if the run's folder is gone."""
        on_first_process(self.directory.check_exists)
        data_position = {"text": self.texts.identity, "example": self.spikes.batch_number(step) * self.recipe.batch}
        recipe = {"name": self.name, "recipe": dataclass_to_json(self.recipe)}
        progress = {"rates": list(map(dataclasses.asdict, self.phases)), "spikes": self.spikes.record()}
        return training.run_metadata(recipe=recipe, step=step, data=data_position, key=self.keys.steps, **progress)

    def _sample(self, run: training.Progress) -> None:
        model = self.states.copy_model_to_one_device(run.state.model)
        on_first_process(lambda: self._write_sample(model, run.step))

    def _write_sample(self, model: Any, step: int) -> None:
        prompt, ends = sample_prompt(self.recipe, self.tokenizer, self.encoder)
        prompt, max_new_tokens = generation.fit_to_positions(model, prompt, 160)
        sampler = generation.sampler_of(model, run_mask_id(self.recipe, self.tokenizer, self.directory))
        output = sampler.generate(
            model,
            [prompt],
            examples=[0],
            max_new_tokens=max_new_tokens,
            transforms=generation.sampling(temperature=0.8),
            end_of_text=ends,
            key=jax.random.fold_in(self.keys.samples, step),
        )
        ids = prompt + output.new_ids()[0]
        pieces = data.TextStream(self.tokenizer).pieces(ids)
        text = "".join(pieces)
        self.directory.add_sample(step, text)
        if nn.chooses_experts(model):
            self.directory.color_by_experts(model, ids, pieces)
        self.screen.note(f"--- after {step} steps it writes\n{text}\n---")
