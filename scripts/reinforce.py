"""Train a model on rewards: `python scripts/reinforce.py --model M --data prompts.jsonl --reward FILE.py:NAME`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from support.command import entry
from support.processes import connect, Machine, run_devices

from eqformer import dataclass_to_json, models, nn, parallel, read_utf8, text, training
from eqformer.recipes import (
    flags_of,
    load_user_function,
    Recipe,
    report,
    RunDirectory,
    schedule_phases,
    Screen,
    setup,
    short_name,
    texts,
    user_file,
)


@dataclasses.dataclass(frozen=True)
class Command:
    """Raise the rewards of a model's own completions by GRPO; run the same command again to continue a stopped run.

    Each row of --data has a prompt (a text or messages) and columns that the reward may read. A step has --batch
    completions, --group of each prompt; a prompt and its completion have --seq tokens at most.
    """

    recipe: str
    """The recipe to start from; see below; other flags change its fields."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/<recipe>)")] = None
    """The folder of the run; everything is written there."""
    reward: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """The function reward(prompts, completions, **columns), which returns a number for each completion."""
    policy_loss: training.PolicyLoss = "grpo"
    """The loss by its name, as in docs/training.md; dr_grpo divides by --tokens."""
    group: int = 8
    """Completions of each prompt, whose rewards are compared."""
    tokens: int = 64
    """Most new tokens of a completion."""
    temperature: float = 1.0
    """Divisor of the logits of which completions are drawn."""
    kl_weight: float = 0.0
    """The weight of the KL divergence from the first model, or from the model without its low-rank changes."""
    clip_low: float | None = None
    """How far a token's probability may fall before its gradient is clipped; by default as the loss was published."""
    clip_high: float | None = None
    """How far a token's probability may rise before its gradient is clipped; by default as the loss was published."""
    updates: int = 1
    """Steps on each batch of completions."""
    scale_rewards: bool | None = None
    """Whether advantages are divided by the standard deviation of the group's rewards; by default not for dr_grpo."""
    mask_equal_groups: bool = False
    """Groups whose completions all have the same reward get weight 0, as in DAPO."""
    mask_truncated: bool = False
    """Completions that --tokens cuts off get weight 0, as in DAPO."""
    resample: int = 0
    """How many times a step draws further prompts in place of groups whose rewards are all equal, as in DAPO."""
    held_out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Prompts as in --data; the mean reward of their greedy completions is written every --validate-every steps."""
    trust_recipe: bool = False
    """Run the code of a recipe of one's own that lies in a run's folder, where a class of the recipe needs it."""


# Beginnings of the recipe's flags that a run on rewards reads, beside those of its plan; the other flags are of texts.
_READ_FLAGS = (
    *("--model", "--from-", "--data", "--text.tokenizer", "--text.round-vocab", "--text.end-of-text", "--seq"),
    *("--batch", "--steps", "--prolong", "--seed", "--optimizer.", "--lora.", "--precision.", "--execution."),
    *("--metrics.", "--log-every", "--checkpoint-every", "--keep", "--sample-every", "--mesh."),
)
# How errors on some of these other flags are mended; the others are left out.
_FLAGS_INSTEAD = {"--beta": "give --kl-weight", "--validate-every": "leave it out, or give --held-out FILE too"}
# Flags that change the step of a run on text, and that no run on rewards may take over from the run of --from-run.
_FLAGS_OF_STEPS = ("--loss", "--teacher", "--optimizer.z-loss", "--precision.products")


def reinforce(command: Command) -> None:
    """Train as the command says; everything but the first rewards is checked before anything is written."""
    recipe, directory = command.run, RunDirectory(command.run_dir or Path("runs") / short_name(command.recipe))
    connect(command.machine)
    check_flags(command)
    reward = load_user_function("--reward", command.reward or "", "reward")
    with report.print_warnings():
        rows = text.read_prompts(recipe.data or "")
    held_out = read_held_out(command, rows)
    settings = list_settings(command, rows)
    check_same_settings(directory, settings)
    shapes = setup.check_run(recipe, directory)
    plan = setup.make_plan(recipe, run_devices(command.machine))
    RewardRun(command, directory, shapes, plan, rows, reward, settings, held_out).train()


def check_flags(command: Command) -> None:
    """Raise a `ValueError` for flags that are missing, do not go together, or are those of texts."""
    recipe = command.run
    if command.reward is None:
        raise ValueError(
            "--reward: there is none; give FILE.py:NAME of a function reward(prompts, completions, **columns)."
        )
    if recipe.data is None:
        raise ValueError("--data: there are no prompts; give --data PROMPTS.jsonl, whose rows each have a prompt.")
    if recipe.published is None and recipe.from_run is None:
        raise ValueError(
            "--model: rewards need a model that is sometimes right; give --model FOLDER, or --from-run DIR of a run."
        )
    if command.group < 2 or recipe.batch % command.group:
        raise ValueError(
            f"--batch {recipe.batch} --group {command.group}: a step has whole groups of at least 2 completions; give "
            "a --batch that is a multiple of --group."
        )
    for flag, steps in (("--steps", recipe.steps), ("--checkpoint-every", recipe.checkpoint_every)):
        if command.updates < 1 or steps % command.updates:
            raise ValueError(
                f"{flag} {steps} --updates {command.updates}: a run goes on with new completions, so it is saved after "
                f"all updates on a batch only; give at least 1 for --updates, and a multiple of it for {flag}."
            )
    check_flags_of_texts(recipe, has_held_out=command.held_out is not None)


def check_flags_of_texts(recipe: Recipe, *, has_held_out: bool = False) -> None:
    """Raise a `ValueError` for a flag that has an effect on training on text only.

    A run that starts from another (`--from-run`) has the recipe of that run; its choices for texts have no effect.
    """
    recipes = [Recipe(recipe.model)]
    if recipe.from_run is not None:
        recipes.append(RunDirectory(recipe.from_run).read()[1])
    if texts.reads_chats(recipe):
        recipes = list(map(texts.for_chats, recipes))
    default, *inherited = map(flags_of, recipes)
    plan_flags = flags_of(recipe.plan)
    for flag, value in flags_of(recipe).items():
        changes_step = flag in _FLAGS_OF_STEPS
        if not changes_step and (flag in plan_flags or flag.startswith(_READ_FLAGS)):
            continue
        if flag == "--validate-every" and has_held_out:
            continue
        if value != default[flag] and (changes_step or value not in [flags.get(flag) for flags in inherited]):
            fix = _FLAGS_INSTEAD.get(flag, "leave it out")
            if changes_step and inherited:
                fix += f", or give {flag} {default[flag]} if the run of --from-run has it"
            shown_value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{flag} {shown_value}: training on rewards has no such choice; {fix}.")


def read_held_out(command: Command, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Read the rows of --held-out, which have the fields of the rows of --data; None without the flag."""
    if command.held_out is None:
        return None
    with name_held_out(command), report.print_warnings():
        held_out = text.read_prompts(command.held_out)
        fields = [sorted(row) for row in (*rows[:1], *held_out[:1])]
        if len(fields) == 2 and fields[0] != fields[1]:
            raise ValueError(f"its rows have {fields[1]}, and those of --data {fields[0]}; give the same fields.")
    return held_out


@contextlib.contextmanager
def name_held_out(command: Command) -> Iterator[None]:
    """Begin a `ValueError` raised inside with --held-out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--held-out {command.held_out}: {error}") from error


def list_settings(command: Command, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what decides the numbers of the run beside its recipe, by flag, as its checkpoints keep it."""
    other_fields = ("recipe", "run", "machine", "run_dir", "held_out", "trust_recipe")
    names = [field.name for field in dataclasses.fields(Command) if field.name not in other_fields]
    settings = {f"--{name.replace('_', '-')}": getattr(command, name) for name in names}
    settings["--scale-rewards"] = scales_rewards(command)
    file = user_file(command.reward or "")
    assert file is not None
    function = (command.reward or "").removeprefix(str(file)).removeprefix(":") or "reward"
    settings["--reward"] = f"{function} of a file with the SHA-256 {_digest(read_utf8(file))}"
    return settings | {"--data": f"{len(rows)} rows with the SHA-256 {_digest(json.dumps(rows))}"}


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_same_settings(directory: RunDirectory, settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the folder has checkpoints of a run that has not learned from these rewards."""
    checkpointer = directory.checkpointer()
    if not directory.recipe.exists() or checkpointer.latest_step is None:
        return
    saved = checkpointer.metadata().get("rewards")
    if saved is None:
        raise ValueError(
            f"--run-dir {directory.path}: it holds a run that learns from no rewards; give another folder, and "
            f"--from-run {directory.path} to begin with its weights."
        )
    changed = [f"{flag}: {saved.get(flag)} -> {value}" for flag, value in settings.items() if saved.get(flag) != value]
    if changed:
        raise ValueError(
            f"--run-dir {directory.path}: it holds a run, from which this command differs in\n  "
            + "\n  ".join(changed)
            + "\nGive the same values to continue that run, or another --run-dir to begin a new one."
        )


class RunFiles(training.Callback):
    """The files of a run, which are written from its first batch on: until then a reward may be refused."""

    def __init__(self, name: str, recipe: Recipe, directory: RunDirectory):
        """Keep the arguments; `begin` writes."""
        self.name, self.recipe, self.directory = name, recipe, directory
        self.last: dict[str, Any] = {}
        self._open_files = contextlib.ExitStack()
        self._writers: training.MetricWriters | None = None

    def begin(self, run: training.Progress) -> None:
        """Write the recipe and the published model's files, and open the metrics."""
        self.directory.begin(self.name, self.recipe)
        texts.copy_published_files(self.recipe, self.directory)
        metrics = self.recipe.metrics
        writers = self.directory.open_metrics(
            run.step, tensorboard=metrics.tensorboard, wandb=metrics.wandb, recipe=self.recipe
        )
        self._writers = self._open_files.enter_context(writers)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row of metrics."""
        assert self._writers is not None
        self.directory.check_exists()
        self._writers.write(row)
        self.last.update(row)

    def end(self, run: training.Progress) -> None:
        """Close the metrics."""
        self._open_files.close()


class RewardRun:
    """A run that raises rewards, from the latest checkpoint of its folder to its last step."""

    def __init__(
        self,
        command: Command,
        directory: RunDirectory,
        shapes: nn.Transformer,
        plan: parallel.Plan,
        rows: list[dict[str, Any]],
        reward: text.Reward,
        settings: Mapping[str, Any],
        held_out: list[dict[str, Any]] | None = None,
    ):
        """Encode the prompts, and check that they fit the model and the plan; no weights are read.

        `settings` are those of `list_settings`, and `held_out` the rows of --held-out.
        """
        recipe = command.run
        self.command, self.recipe, self.directory, self.settings = command, recipe, directory, settings
        self.screen = Screen()
        self.phases, self.rates_note = schedule_phases(recipe, directory.checkpointer())
        optimizer = setup.make_optimizer(recipe, shapes, self.phases)
        self.states = setup.make_train_state(recipe, plan, optimizer, shapes)
        self.parameters, self.optimizer_lines = setup.count_parameters(optimizer, shapes), optimizer.describe(shapes)
        self.rollouts = self._make_rollouts(shapes, plan, rows, reward)
        self.held_out = None
        if held_out is not None:
            with name_held_out(command):
                self.held_out = self._make_rollouts(shapes, plan, held_out, reward)
        if (seq := self.rollouts.seq) > recipe.seq:
            raise ValueError(
                f"--seq {recipe.seq} --tokens {command.tokens}: the longest prompt and its completion need a row of "
                f"{seq} tokens; give --seq {seq}, or leave long prompts out."
            )
        setup.check_plan(dataclasses.replace(recipe, seq=seq), plan, shapes)
        norms = recipe.metrics.gradient_norms
        self.step = recipe.optimizer.step(optimizer, plan, loss=make_loss(command), gradient_norms=norms)
        self.stop = training.StopSignals(plan.mesh, lambda: self.screen.note("stopping; once more to stop at once"))
        self.files = RunFiles(command.recipe, self.recipe, directory)

    def train(self) -> None:
        """Train to the last step, or until a signal asks to stop."""
        recipe, directory, screen = self.recipe, self.directory, self.screen
        with directory:
            directory.claim(self.command.recipe, recipe)
            with directory.checkpointer(recipe.keep) as checkpointer, self.stop:
                start = checkpointer.latest_step or 0
                screen.note("\n".join([self._opening(start), *self.optimizer_lines]))
                if self.rates_note:
                    screen.note(self.rates_note)
                if start >= recipe.steps:
                    screen.note(f"the run has its {start} steps already; a larger --steps goes on from there")
                    return
                state = (
                    self.states.restore(checkpointer)[0] if start else setup.init_run_state(recipe, self.states, screen)
                )
                screen.note(f"sampling {recipe.batch} completions for step {start + 1} ...")
                with screen.steps(recipe.steps, start) as show:
                    callbacks = self._callbacks(checkpointer, show)
                    run = training.train(
                        self.step, state, self.rollouts, steps=recipe.steps, start=start, callbacks=callbacks
                    )
            if run.is_stopping:
                directory.draw_metrics()
        self._note_end(run.step)

    def _make_rollouts(
        self, shapes: nn.Transformer, plan: parallel.Plan, rows: list[dict[str, Any]], reward: text.Reward
    ) -> text.Rollouts:
        """Return the sampler of the batches, which samples by the weights of each step."""
        command, recipe = self.command, self.recipe
        published = texts.published_files(recipe, self.directory)
        tokenizer = texts.recipe_tokenizer(recipe, self.directory)
        folder = self.directory.published if published is None else models.companion_folder(published)
        first_model = functools.cache(lambda: setup.init_run_model(recipe, self.states, self.screen))
        reference = nn.without_lora if recipe.lora.rank else lambda model: first_model()
        return text.Rollouts(
            text.make_llm(shapes, tokenizer, folder, recipe.seq, special_tokens=published is not None),
            rows,
            reward,
            prompts=recipe.batch // command.group,
            group=command.group,
            max_new_tokens=command.tokens,
            temperature=command.temperature,
            scale_rewards=scales_rewards(command),
            mask_equal_groups=command.mask_equal_groups,
            resample=command.resample,
            mask_truncated=command.mask_truncated,
            reference=reference if command.kl_weight else None,
            updates=command.updates,
            plan=plan if plan.mesh.size > 1 else None,
            key=setup.make_keys(recipe).steps,
        )

    def _opening(self, start: int) -> str:
        """Return a line on the run that begins or goes on at a step: its model, its folder and its prompts."""
        recipe, command = self.recipe, self.command
        prompts = f"{recipe.batch // command.group} prompts a step of {recipe.data}, {command.group} completions each"
        return report.opening_line(command.recipe, recipe, self.directory, start, self.parameters, prompts)

    def _callbacks(self, checkpointer: training.Checkpointer, show: report.Show) -> list[training.Callback]:
        """Return what is done after each step, in this order."""
        recipe, last, every = self.recipe, self.files.last, training.Every
        clock = training.Clock(tokens_per_step=recipe.batch * self.rollouts.seq)
        show_last = lambda run: show(run.step, describe_metrics(last), run.is_due(recipe.log_every))
        draw = lambda run: self.directory.draw_metrics()
        return [
            self.files,
            training.Log(recipe.log_every, self.files.write, clock.rate),
            *clock.excluding(
                [
                    every(self.command.updates, self.stop.after_step),  # Completions are sampled anew after a stop.
                    *self._validation(),
                    every(1, show_last),
                    every(recipe.checkpoint_every, draw),
                    training.Checkpoints(recipe.checkpoint_every, checkpointer, self._metadata, self.states),
                    *([every(recipe.sample_every, self._note_sample)] if recipe.sample_every else []),
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
        """Return what a checkpoint keeps beside the state."""
        recipe = {"name": self.command.recipe, "recipe": dataclass_to_json(self.recipe)}
        rates, key = list(map(dataclasses.asdict, self.phases)), setup.make_keys(self.recipe).steps
        data_position = {"text": self.settings["--data"]}
        return training.run_metadata(
            recipe=recipe, step=step, data=data_position, key=key, rates=rates, rewards=self.settings
        )

    def _note_sample(self, run: training.Progress) -> None:
        """Write the first completion of the step, and its reward."""
        prompt, completion, reward = self.rollouts.samples[0]
        question = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        sample = f"{question}\n{completion.text}\n(reward {reward:.4g})"
        self.directory.add_sample(run.step, sample)
        self.screen.note(f"--- at step {run.step}\n{sample}\n---")

    def _note_end(self, step: int) -> None:
        """Say where the results are."""
        path = self.directory.path
        if step < self.recipe.steps:
            self.screen.note(f"stopped at step {step}; the checkpoint is saved, the same command goes on")
            return
        self.screen.note(
            f"trained    {step} steps; {describe_metrics(self.files.last)}\n"
            f"look at    {', '.join(map(str, self.directory.files_to_look_at()))}\n"
            f"sample     python scripts/sample.py --run-dir {path} --prompt PROMPT\n"
            f"write out  python scripts/convert.py {path} FOLDER"
        )


def make_loss(command: Command) -> Callable[..., Any]:
    """Return the loss that the flags choose."""
    return training.policy_loss(
        command.policy_loss,
        clip_low=command.clip_low,
        clip_high=command.clip_high,
        mean=command.tokens if command.policy_loss == "dr_grpo" else None,
        beta=command.kl_weight,
    )


def scales_rewards(command: Command) -> bool:
    """Return whether advantages are divided by standard deviations: as the flag says, or as the loss was published."""
    return command.policy_loss != "dr_grpo" if command.scale_rewards is None else command.scale_rewards


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


# Flags that the short help of other scripts shows, and that `check_flags_of_texts` or a given model refuses.
HIDDEN = (
    *("--model.embed", "--model.layers", "--model.heads", "--loss-on", "--text.mix"),
    *("--evaluate-every", "--prompt"),
)
main = entry(Command, reinforce, hidden=HIDDEN)

if __name__ == "__main__":
    main(sys.argv[1:])
