"""Training on rewards in one call: a model samples completions of prompts, and a user's function scores them."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from .. import models, nn, parallel, training
from .._files import dataclass_to_json
from ..parallel import check_alike, is_first_process, on_all_processes, on_first_process
from ..text import make_llm, Reward, Rollouts
from ._recipe import check_types, flags_of, name_flags_in_errors, Recipe
from ._report import opening_line, Screen, Show
from ._rewards import (
    check_flags,
    check_same_settings,
    describe_rows,
    name_function,
    name_held_out,
    read_subject,
    RewardOptions,
    Rows,
    Subject,
)
from ._run_directory import RunDirectory, schedule_phases
from ._setup import (
    check_plan,
    check_run,
    count_parameters,
    init_run_model,
    init_run_state,
    make_keys,
    make_optimizer,
    make_plan,
    make_train_state,
)
from ._texts import complete_recipe, copy_published_files, published_files, recipe_tokenizer, Tokenizer
from ._trainer import explain_out_of_memory, TrainedRun


@dataclasses.dataclass(frozen=True)
class _RewardRun:
    """The arguments of `train_on_rewards` that errors name as flags."""

    run: Recipe
    rewards: RewardOptions
    reward: str
    held_out: str | None


def train_on_rewards(
    recipe: Recipe,
    folder: str | Path,
    reward: Reward | str,
    options: RewardOptions = RewardOptions(),
    *,
    rows: Rows | None = None,
    held_out: Rows | str | Path | None = None,
    name: str | None = None,
    devices: Sequence[Any] | None = None,
    screen: Screen | None = None,
) -> TrainedRun:
    """Train a model to write completions with higher rewards, by GRPO or a variant.

    The same call resumes a run that was stopped.

        def is_short(prompts, completions, **columns):
            return [float(len(completion) < 40) for completion in completions]

        recipe = published_recipe("HuggingFaceTB/SmolLM2-135M-Instruct", data="prompts.jsonl", batch=32, steps=100)
        run = train_on_rewards(recipe, "runs/short", is_short, RewardOptions(group=8, tokens=64))
        print(run.metrics["reward"], eqformer.load(run.folder).generate("Hello"))

    In each step, the model samples `recipe.batch` completions: `options.group` completions of each prompt. Each row of
    `recipe.data` has a prompt (a text or messages) and columns that the reward function may read. Several processes
    sample together, and only the first process calls the reward function. Everything is checked before anything is
    written; if the first call of the reward function fails, no folder is left. Raises a `ValueError` that names fields
    of the recipe and the options by their flags, as `train` does.

    Args:
        recipe: The model (a published model, or the model of a run by `from_run`), its prompts, and the settings of
            training. Fields that apply only to texts, to another loss or to evaluations are refused.
        folder: The folder of the run, which must be new, empty, or the folder of the same run.
        reward: The function `reward(prompts, completions, **columns)`, which returns a number for each completion; or
            its name, `FILE.py:NAME`.
        options: The loss of the policy, and the completions that are compared.
        rows: Rows of prompts, in place of `recipe.data`.
        held_out: Rows that no step learns from, or a file of such rows. Every `recipe.validate_every` steps, the mean
            reward of greedy completions of these rows is the metric `validation_reward`.
        name: The recipe's name in the folder and in notes, as in `train`.
        devices: The devices of the mesh, as in `train`.
        screen: Where notes and progress are shown, as in `train`.
    """
    recipe, directory = complete_recipe(recipe), RunDirectory(folder)
    name = name or directory.path.name
    path = str(held_out) if isinstance(held_out, str | Path) else None
    call = _RewardRun(recipe, options, reward if isinstance(reward, str) else name_function(reward), path)
    check_types(call)
    flags = {f"--{flag}": value for flag, value in dataclass_to_json(recipe).items()}
    check_alike({"--recipe": name} | flags | flags_of(options) | {"--reward": call.reward, "--held-out": path})
    with name_flags_in_errors(call):
        check_flags(recipe, options, has_rows=rows is not None, has_held_out=held_out is not None)
        subject = on_all_processes(lambda: read_subject(recipe, options, reward, rows, held_out))
        check_alike({**subject.settings, "--held-out": describe_rows(subject.held_out or ())})
        on_all_processes(lambda: check_same_settings(directory, subject.settings))
        shapes = check_run(recipe, directory)
        plan = make_plan(recipe, jax.devices() if devices is None else devices)
        screen = screen or Screen(silent=not is_first_process())
        trainer = RewardTrainer(name, recipe, options, subject, shapes, plan, directory, screen)
        with directory, explain_out_of_memory(dataclasses.replace(recipe, seq=trainer.rollouts.seq), shapes):
            return trainer.run()


class _RunFiles(training.Callback):
    """A callback that writes a run's files, from `begin` on; if the first call of the reward fails, no file is left."""

    def __init__(self, name: str, recipe: Recipe, directory: RunDirectory):
        """Keep the arguments, and write nothing yet."""
        self.name, self.recipe, self.directory = name, recipe, directory
        self.last: dict[str, Any] = {}
        self._open_files = contextlib.ExitStack()
        self._writers: training.MetricWriters | None = None

    def begin(self, run: training.Progress) -> None:
        """Write the recipe and the published model's files, and open the metrics."""
        recipe, directory, metrics = self.recipe, self.directory, self.recipe.metrics
        on_first_process(lambda: (directory.begin(self.name, recipe), copy_published_files(recipe, directory)))
        writers = directory.open_metrics(run.step, tensorboard=metrics.tensorboard, wandb=metrics.wandb, recipe=recipe)
        self._writers = self._open_files.enter_context(writers)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row of metrics."""
        assert self._writers is not None
        on_first_process(self.directory.check_exists)
        self._writers.write(row)
        self.last.update(row)

    def end(self, run: training.Progress) -> None:
        """Close the metrics."""
        self._open_files.close()


class RewardTrainer:
    """Training on rewards in a directory, from its latest checkpoint to its last step."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        options: RewardOptions,
        subject: Subject,
        shapes: nn.Transformer,
        plan: parallel.Plan,
        directory: RunDirectory,
        screen: Screen,
    ):
        """Encode the prompts, and check that they fit the model and the plan; no weights are read.

        Args:
            name: The recipe's name.
            recipe: The recipe.
            options: The loss of the policy, and the completions that are compared.
            subject: The function of rewards, and the prompts.
            shapes: The shapes of the recipe's model.
            plan: The recipe's plan over devices.
            directory: The run's folder.
            screen: Where notes and progress are shown.
        """
        self.name, self.recipe, self.options, self.subject = name, recipe, options, subject
        self.plan, self.directory, self.screen = plan, directory, screen
        self.phases, self.rates_note = on_all_processes(lambda: schedule_phases(recipe, directory.checkpointer()))
        optimizer = make_optimizer(recipe, shapes, self.phases)
        self.states = make_train_state(recipe, plan, optimizer, shapes)
        self.parameters, self.optimizer_lines = count_parameters(optimizer, shapes), optimizer.describe(shapes)
        self.rollouts, self.held_out = on_all_processes(lambda: self._make_all_rollouts(shapes))
        if (seq := self.rollouts.seq) > recipe.seq:
            raise ValueError(
                f"--seq {recipe.seq} --tokens {options.tokens}: the longest prompt and its completion need a row of "
                f"{seq} tokens; give --seq {seq}, or leave long prompts out."
            )
        check_plan(dataclasses.replace(recipe, seq=seq), plan, shapes)
        norms = recipe.metrics.gradient_norms
        self.step = recipe.optimizer.step(optimizer, plan, loss=options.make_loss(), gradient_norms=norms)
        self.stop = training.StopSignals(plan.mesh, lambda: screen.note("stopping; signal again to stop at once"))
        self.files = _RunFiles(name, recipe, directory)

    def run(self) -> TrainedRun:
        """Train to the last step, or until a signal asks to stop."""
        recipe, directory, screen = self.recipe, self.directory, self.screen
        on_first_process(lambda: directory.claim(self.name, recipe))
        check_alike({f"--run-dir {directory.path}": directory.token()})
        with directory.checkpointer(recipe.keep) as checkpointer, self.stop:
            start = checkpointer.latest_step or 0
            screen.note("\n".join([self._opening(start), *self.optimizer_lines]))
            if self.rates_note:
                screen.note(self.rates_note)
            if start >= recipe.steps:
                screen.note(f"the run already has its {start} steps; give a larger --steps to continue it")
                return TrainedRun(directory.path, start, start, directory.latest_metrics())
            state = self.states.restore(checkpointer)[0] if start else init_run_state(recipe, self.states, screen)
            screen.note(f"sampling {recipe.batch} completions for step {start + 1} ...")
            with screen.steps(recipe.steps, start) as show:
                run = training.train(
                    self.step,
                    state,
                    self.rollouts,
                    steps=recipe.steps,
                    start=start,
                    callbacks=self._callbacks(checkpointer, show),
                )
        if run.is_stopping:
            on_first_process(directory.draw_metrics)
        self._note_end(run)
        return TrainedRun(directory.path, start, run.step, dict(self.files.last))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the prompts and completions."""
        return recipe_tokenizer(self.recipe, self.directory)

    def _make_all_rollouts(self, shapes: nn.Transformer) -> tuple[Rollouts, Rollouts | None]:
        """Return the sampler of the batches, and the sampler of the held-out prompts if there are any."""
        rollouts, held_out = self._make_rollouts(shapes, self.subject.rows), None
        if self.subject.held_out is not None:
            with name_held_out(self.subject.held_out_name):
                held_out = self._make_rollouts(shapes, self.subject.held_out)
        return rollouts, held_out

    def _make_rollouts(self, shapes: nn.Transformer, rows: Rows) -> Rollouts:
        """Return the sampler of completions of the rows' prompts; each step samples with its current weights."""
        recipe, options, plan = self.recipe, self.options, self.plan
        published = published_files(recipe, self.directory)
        folder = self.directory.published if published is None else models.companion_folder(published)
        first_model = functools.cache(lambda: init_run_model(recipe, self.states, self.screen))
        reference = nn.without_lora if recipe.lora.rank else lambda model: first_model()
        return Rollouts(
            make_llm(shapes, self.tokenizer, folder, recipe.seq, special_tokens=published is not None),
            rows,
            self.subject.reward,
            prompts=recipe.batch // options.group,
            group=options.group,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            scale_rewards=options.scales_rewards,
            mask_equal_groups=options.mask_equal_groups,
            resample=options.resample,
            mask_truncated=options.mask_truncated,
            reference=reference if options.kl_weight else None,
            updates=options.updates,
            plan=plan if plan.mesh.size > 1 else None,
            key=make_keys(recipe).steps,
        )

    def _opening(self, start: int) -> str:
        """Return a line about the run that begins, or goes on at a step: its model, its folder and its prompts."""
        recipe, group = self.recipe, self.options.group
        source = f"{len(self.subject.rows)} rows" if recipe.data is None else recipe.data
        prompts = f"{recipe.batch // group} prompts a step of {source}, {group} completions each"
        return opening_line(self.name, recipe, self.directory, start, self.parameters, prompts)

    def _callbacks(self, checkpointer: training.Checkpointer, show: Show) -> list[training.Callback]:
        """Return the callbacks of each step, in the order of their calls."""
        recipe, last, every = self.recipe, self.files.last, training.Every
        clock = training.Clock(tokens_per_step=recipe.batch * self.rollouts.seq)
        show_last = lambda run: show(run.step, describe_metrics(last), run.is_due(recipe.log_every))
        draw = lambda run: on_first_process(self.directory.draw_metrics)
        return [
            self.files,
            training.Log(recipe.log_every, self.files.write, clock.rate),
            *clock.excluding(
                [
                    # A run stops only between batches of completions, because a resumed run samples a new batch.
                    every(self.options.updates, self.stop.after_step),
                    *self._validation(),
                    every(1, show_last),
                    every(recipe.checkpoint_every, draw),
                    training.Checkpoints(recipe.checkpoint_every, checkpointer, self._metadata, self.states),
                    *([every(recipe.sample_every, self._write_sample)] if recipe.sample_every else []),
                ]
            ),
        ]

    def _validation(self) -> list[training.Callback]:
        """Return the callback that writes the reward of held-out prompts, also before the first step."""
        if (held_out := self.held_out) is None:
            return []
        measure = lambda model: {"validation_reward": held_out.greedy_reward(model)}
        return [training.Evaluations(self.recipe.validate_every, measure, self.files.write)]

    def _metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata that a checkpoint stores beside the state."""
        recipe, settings = {"name": self.name, "recipe": dataclass_to_json(self.recipe)}, self.subject.settings
        rates, key = list(map(dataclasses.asdict, self.phases)), make_keys(self.recipe).steps
        data_position = {"text": settings["--data"]}
        return training.run_metadata(
            recipe=recipe, step=step, data=data_position, key=key, rates=rates, rewards=settings
        )

    def _write_sample(self, run: training.Progress) -> None:
        """Write the first completion of the step, and its reward."""
        prompt, completion, reward = self.rollouts.samples[0]
        question = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        sample = f"{question}\n{completion.text}\n(reward {reward:.4g})"
        on_first_process(lambda: self.directory.add_sample(run.step, sample))
        self.screen.note(f"--- at step {run.step}\n{sample}\n---")

    def _note_end(self, run: training.Progress) -> None:
        """Say where the results are."""
        if run.step < self.recipe.steps:
            self.screen.note(f"stopped at step {run.step}; the checkpoint is saved, and the same command goes on")
            return
        empty = int(run.state.empty_batches or 0)
        without = f", {empty} batches whose weights were all 0" if empty else ""
        self.screen.note(
            f"trained    {run.step} steps{without}; {describe_metrics(self.files.last)}\n"
            f"look at    {', '.join(map(str, self.directory.files_to_look_at()))}"
        )


def describe_metrics(last: Mapping[str, Any]) -> str:
    """Return the latest metrics in one line; empty before the first row of a step."""
    if "reward" not in last:
        return ""
    validation = f"  held-out {last['validation_reward']:.3f}" if "validation_reward" in last else ""
    divergence = f"  kl {last['kl']:.3g}" if "kl" in last else ""
    return (
        f"reward {last['reward']:.3f}{validation}  {last['completion_tokens']:.1f} tokens  "
        f"clipped {last['clip_fraction']:.1%}{divergence}  rate {last['learning_rate']:.2e}  "
        f"{last['step_seconds']:.1f} s a step"
    )
