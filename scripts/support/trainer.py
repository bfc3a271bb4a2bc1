"""The training loop: steps, metrics, validation, samples and checkpoints."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh
from recipes import Recipe

from eqformer import data, generation, parallel, planning, training
from eqformer.parallel import check_alike, on_all_processes, on_first_process
from support.check import steps_of
from support.colored_text import color, has_choices
from support.forked import forked
from support.kernel_report import kernel_lines, platform_here
from support.mesh import state_of, step_of
from support.metric_writers import open_metrics
from support.multiplying import chip_here, products_line
from support.prolonged import phases_of
from support.published import keep_companions, tokenizer_of
from support.recipe_file import to_json
from support.report import add_sample, closing, figures, opening
from support.run_directory import RunDirectory
from support.screen import Screen, Show
from support.setup import adapted, Keys, keys_of, load_model, optimizer_of, shapes_of
from support.stopping import signals
from support.text import open_texts, sources_of


class Trainer:
    """One run of a recipe in a directory, from its latest checkpoint to its last step."""

    def __init__(
        self, name: str, recipe: Recipe, shapes: Any, plan: parallel.Plan, directory: RunDirectory, screen: Screen
    ):
        """`shapes` are those of the recipe's model."""
        self.recipe, self.plan, self.directory, self.screen = recipe, plan, directory, screen
        self.name, self.shapes = name, shapes
        sources, self.tokenizer = on_all_processes(lambda: (sources_of(recipe), tokenizer_of(recipe, directory)))
        on_first_process(lambda: directory.claim(name, recipe))
        check_alike({f"--run-dir {directory.path}": directory.token()})
        read = lambda: open_texts(recipe, sources, self.tokenizer, directory, screen)
        texts = on_first_process(read)  # the first process writes the tokens, which the others then read
        self.texts = on_all_processes(lambda: texts or read())
        check_alike({"the text": [self.texts.identity, [one.store.path.name for one in self.texts.held_out.values()]]})
        self.rows, self.votes = training.ProcessRows(plan, recipe.batch), parallel.Votes(plan.mesh)
        self.keys: Keys = keys_of(recipe)
        self.stopping, self.spikes = False, training.LossSpikes(**dataclasses.asdict(recipe.spikes))
        self.phases, self.rates_note = on_all_processes(lambda: phases_of(recipe, directory.checkpointer()))
        self.optimizer = optimizer_of(recipe, shapes, self.phases)
        self.states = state_of(recipe, plan, self.optimizer, shapes)
        self.flops_per_token = planning.flops_per_token(shapes, recipe.seq, trained=self.optimizer.trained)
        self.parameters = parameters(recipe, shapes)
        self.summary = parallel.summary(plan, shapes, rows=recipe.batch, seq=recipe.seq)
        self.evaluate = training.make_evaluation(plan)
        self.last: dict[str, Any] = {}

    def run(self) -> None:
        """Train to the last step, or until a signal asks to stop."""
        self.spikes.retry(self._run, self.screen.note)

    def _run(self) -> None:
        """Train from the last checkpoint to the last step, or to a spike of the loss."""
        recipe, screen = self.recipe, self.screen
        checkpointer = self.directory.checkpointer(recipe.keep)
        start = checkpointer.latest_step or 0
        with checkpointer, signals(self._stop), ThreadPoolExecutor(1) as aside:
            # Compiled while the state is made or read: XLA holds no lock of Python's.
            step = aside.submit(lambda: self.step) if start < recipe.steps else None
            state = self._state(checkpointer)
            screen.note(opening(self.name, recipe, self.directory, start, self.parameters, self.texts.tokens))
            if mixed := self.texts.describe(recipe.steps):
                screen.note(mixed)
            if self.plan.mesh.size > 1:
                screen.note(self.summary)
            for line in (
                *kernel_lines(recipe, self.shapes, platform_here()),
                products_line(recipe, self.shapes, chip_here()),
            ):
                if line:
                    screen.note(line)
            if step is None:
                self._begin()
                screen.note(f"the run has its {start} steps already; a larger --steps goes on from there")
                return
            if self.rates_note:
                screen.note(self.rates_note)
            self.spikes.start(start, checkpointer.metadata().get("spikes") if start else None)
            key, rows = self.states.replicate(self.keys.steps), (self.rows.start, self.rows.stop)
            place, batch_of = self.rows.place, self.spikes.batch_number
            with (
                data.prefetch(
                    self.texts.train, start, recipe.steps, rows=rows, transform=place, batch_of=batch_of
                ) as batches,
                screen.steps(recipe.steps, start) as show,
            ):
                compiled = step.result()
                self._begin()
                with open_metrics(recipe, self.directory, start) as writers:
                    callbacks, steps = self._callbacks(writers, show, checkpointer), recipe.steps
                    try:
                        run = training.train(
                            compiled, state, batches, key, start=start, steps=steps, callbacks=callbacks
                        )
                    except training.LossSpikeError:
                        checkpointer.wait()  # so that all processes go back to the same checkpoint
                        raise
                    checkpointer.wait()
            counts = int(run.state.skipped), int(run.state.empty_batches or 0)
            screen.note(closing(recipe, self.directory, run.step, *counts, self.last))

    def _begin(self) -> None:
        """Write the recipe and what belongs to it: the first files of the run, once nothing can be refused any more."""
        recipe, directory = self.recipe, self.directory
        on_first_process(lambda: (directory.begin(self.name, recipe), keep_companions(recipe, directory)))

    @functools.cached_property
    def step(self) -> training.Step:
        """The step, compiled from shapes."""
        first = self.texts.train.rows(0, self.rows.start, self.rows.stop)
        shapes = self.states.step_shapes(self.rows.shapes(first))
        return step_of(self.recipe, self.plan, self.optimizer).compiled(*shapes)

    def _callbacks(
        self, writers: training.MetricWriters, show: Show, checkpointer: training.Checkpointer
    ) -> list[training.Callback]:
        """What is done after each step, in this order."""
        recipe, every = self.recipe, training.Every
        clock = training.Clock(
            tokens_per_step=recipe.batch * recipe.seq,
            flops_per_token=self.flops_per_token,
            peak_flops=lambda: self._peak,
        )

        def keep(row: dict[str, Any]) -> None:
            on_first_process(self.directory.check_there)
            writers.write(row)
            self.last.update(row)

        show_last = lambda run: show(run.step, figures(self.last), run.is_due(recipe.log_every))
        return [
            *([self._profile()] if recipe.profile else []),
            training.Log(recipe.log_every, keep, self._more(clock)),
            *clock.excluding(
                [
                    *([self._debug_nans()] if recipe.debug_nans else []),
                    self.spikes,
                    every(1, self._vote),
                    training.Validation(recipe.validate_every, self._validation, keep),
                    every(recipe.validate_every, lambda run: on_first_process(self._draw)),
                    every(1, show_last),
                    training.Checkpoints(recipe.checkpoint_every, checkpointer, self._metadata, self.states),
                    *([every(recipe.sample_every, self._sample)] if recipe.sample_every else []),
                ]
            ),
        ]

    @functools.cached_property
    def _peak(self) -> float:
        """The measured peak of all devices together, in FLOP/s."""
        assert isinstance(self.plan.mesh, Mesh)
        return planning.mesh_peak(self.plan.mesh, self.recipe.precision.compute, seconds=0.25)

    def _profile(self) -> training.Profile:
        return training.Profile(*steps_of(self.recipe.profile or ""), self.directory.profile)

    def _debug_nans(self) -> training.DebugNans:
        pieces, trained = self.plan.microbatches, self.optimizer.trained
        key, loss = self.keys.steps, self.recipe.optimizer.loss
        return training.DebugNans(loss, key, microbatches=pieces, trained=trained, states=self.states)

    def _more(self, clock: training.Clock) -> Callable[[training.Progress], dict[str, int | float]]:
        """What rows have beside the step's metrics."""
        left_out = sum(last - first + 1 for first, last in self.spikes.skipped_batches)
        return lambda run: clock.rate(run) | ({"batches_left_out": left_out} if left_out else {})

    def _vote(self, run: training.Progress) -> None:
        run.is_stopping = self.votes.any(self.stopping)

    def _state(self, checkpointer: training.Checkpointer) -> training.TrainState:
        """The state to go on from: the latest checkpoint's or the first."""
        if checkpointer.latest_step is None:
            if self.recipe.from_run is not None:
                return forked(self.recipe, self.states)
            if self.recipe.published is None:
                return self.states.init()
            return self.states.init_from(load_model(self.recipe, self.plan, self.screen))
        if checkpointer.latest_step == 0:  # of a model that was brought here, and nothing else
            plain = shapes_of(dataclasses.replace(self.recipe, lora=training.Lora()))
            model = training.restore_model(checkpointer, plain, self.plan)
            return self.states.init_from(adapted(self.recipe, model))
        metadata = checkpointer.metadata()
        if (text := metadata["data"]["text"]) != self.texts.identity:
            raise ValueError(
                f"--run-dir {self.directory.path}: its checkpoint was trained on {text}, but the text is now "
                f"{self.texts.identity}; restore the files as they were, or begin a new run."
            )
        if "run" not in metadata:
            self.screen.note(
                f"the checkpoint of step {checkpointer.latest_step} names no run, since an older version saved it; it "
                "is taken as this run's"
            )
        self.keys = dataclasses.replace(self.keys, steps=training.saved_key(metadata))
        return self.states.restore(checkpointer)[0]

    def _validation(self, model: Any) -> tuple[Any, Mapping[str, Any]]:
        sums = lambda batch: self.evaluate(model, self.rows.place(batch))
        rows = self.rows.start, self.rows.stop
        return self.texts.validate(sums, self.recipe.validation_batches, rows=rows)

    def _draw(self) -> None:
        training.plot_losses(self.directory.metrics, self.directory.loss)
        training.plot_expert_loads(self.directory.metrics, self.directory.loads)

    def _metadata(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps beside the state; raises a `ValueError` if the run's folder is gone."""
        on_first_process(self.directory.check_there)
        place = {"text": self.texts.identity, "example": self.spikes.batch_number(step) * self.recipe.batch}
        recipe = {"name": self.name, "recipe": to_json(self.recipe)}
        more = {"rates": list(map(dataclasses.asdict, self.phases)), "spikes": self.spikes.record()}
        return training.run_metadata(recipe=recipe, step=step, data=place, key=self.keys.steps, **more)

    def _sample(self, run: training.Progress) -> None:
        model = self.states.copy_model_to_one_device(run.state.model)
        on_first_process(lambda: self._write_sample(model, run.step))

    def _write_sample(self, model: Any, step: int) -> None:
        asked = self.tokenizer.encode(self.recipe.prompt).tolist() or [self.tokenizer.end_of_text]
        prompt, most = generation.fit_to_positions(model, asked, 160)
        written = generation.generate(
            model,
            [prompt],
            max_new_tokens=most,
            transforms=generation.sampling(temperature=0.8),
            end_of_text=self.tokenizer.end_of_text,
            key=jax.random.fold_in(self.keys.samples, step),
        )
        ids = prompt + written.new_ids()[0]
        pieces = data.TextStream(self.tokenizer).pieces(ids)
        text = "".join(pieces)
        add_sample(self.directory.samples, step, text)
        if has_choices(model):
            color(self.directory, model, ids, pieces)
        self.screen.note(f"--- after {step} steps it writes\n{text}\n---")

    def _stop(self) -> None:
        self.stopping = True
        self.screen.note("stopping after this step; once more to stop at once")


def parameters(recipe: Recipe, shapes: Any) -> tuple[int, int]:
    """The number of parameters that the recipe trains, and of all parameters."""
    trained = optimizer_of(recipe, shapes).trained(shapes)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained)), planning.parameter_count(shapes)
