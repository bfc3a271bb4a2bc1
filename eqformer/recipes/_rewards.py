"""Options of training on rewards, the reward function, and checks of both before a run begins."""

import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import training
from .._files import read_utf8
from ..text import read_prompts, Reward
from ._named_recipes import load_user_function, user_file
from ._recipe import flags_of, Recipe
from ._report import print_warnings
from ._run_directory import RunDirectory
from ._texts import for_chats, reads_chats


Rows = Sequence[Mapping[str, Any]]


# Prefixes of the flags that training on rewards reads, beside the plan's flags. All other flags of a recipe apply only
# to training on texts.
_READ_FLAGS = (
    *("--model", "--from-", "--data", "--text.tokenizer", "--text.round-vocab", "--text.end-of-text", "--seq"),
    *("--batch", "--steps", "--prolong", "--seed", "--optimizer.", "--lora.", "--weights", "--precision."),
    *("--execution.", "--metrics.", "--log-every", "--checkpoint-every", "--keep", "--sample-every", "--mesh."),
)
# What a user can do instead of giving a flag that applies only to texts; by default, leave the flag out.
_FLAGS_INSTEAD = {"--beta": "give --kl-weight", "--validate-every": "leave it out, or give --held-out FILE too"}
# Flags that change the step of a run on texts; a run on rewards may not inherit their values from --from-run.
_FLAGS_OF_STEPS = ("--loss", "--teacher", "--optimizer.z-loss", "--precision.products")


@dataclasses.dataclass(frozen=True)
class RewardOptions:
    """The loss of a policy, and the completions that the loss compares."""

    policy_loss: training.PolicyLoss = "grpo"
    """The name of the loss, as in docs/training.md; dr_grpo divides by --tokens."""
    group: int = 8
    """The number of completions of each prompt; their rewards are compared with each other."""
    tokens: int = 64
    """Maximum number of new tokens of a completion."""
    temperature: float = 1.0
    """The number by which logits are divided before completions are sampled."""
    kl_weight: float = 0.0
    """The weight of the KL divergence from the first model; with LoRA, from the model without low-rank changes."""
    clip_low: float | None = None
    """How far a token's probability may fall before its gradient is clipped; by default the published loss's value."""
    clip_high: float | None = None
    """How far a token's probability may rise before its gradient is clipped; by default the published loss's value."""
    updates: int = 1
    """The number of steps on each batch of completions."""
    scale_rewards: bool | None = None
    """Whether advantages are divided by the standard deviation of the group's rewards; by default not for dr_grpo."""
    mask_equal_groups: bool = False
    """Groups whose completions all have the same reward get weight 0, as in DAPO."""
    mask_truncated: bool = False
    """Completions that --tokens cuts off get weight 0, as in DAPO."""
    resample: int = 0
    """How many times a step replaces groups whose rewards are all equal by groups of new prompts, as in DAPO."""

    @property
    def scales_rewards(self) -> bool:
        """The value of `scale_rewards`; if that is None, the default of the loss."""
        return self.policy_loss != "dr_grpo" if self.scale_rewards is None else self.scale_rewards

    def make_loss(self) -> Callable[..., Any]:
        """Return the policy loss with these options."""
        return training.policy_loss(
            self.policy_loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            mean=self.tokens if self.policy_loss == "dr_grpo" else None,
            beta=self.kl_weight,
        )


class Subject(NamedTuple):
    """A reward function, and the prompts whose completions it scores."""

    reward: Reward
    rows: Rows
    """The rows of prompts that the steps learn from."""
    held_out: Rows | None
    """The held-out rows of prompts, whose mean reward is a metric."""
    held_out_name: str
    """The file of the held-out rows, after a space, as errors show it; empty without a file."""
    settings: Mapping[str, Any]
    """Settings outside of the recipe that also decide the run's results, from `list_settings`."""


def check_flags(recipe: Recipe, options: RewardOptions, *, has_rows: bool = False, has_held_out: bool = False) -> None:
    """Raise a `ValueError` for flags that are missing, contradict each other, or apply only to training on texts.

    `has_rows` and `has_held_out` say whether the caller has passed rows of prompts and held-out rows.
    """
    if recipe.data is None and not has_rows:
        raise ValueError("--data: there are no prompts; give --data PROMPTS.jsonl, whose rows each have a prompt.")
    if recipe.data is not None and has_rows:
        raise ValueError(f"--data {recipe.data}: the call has rows of prompts, too; leave out --data or the rows.")
    if recipe.published is None and recipe.from_run is None:
        raise ValueError(
            "--model: training on rewards needs a trained model, whose completions sometimes earn a reward; give "
            "--model FOLDER, or --from-run DIR of a run."
        )
    if options.group < 2 or recipe.batch % options.group:
        raise ValueError(
            f"--batch {recipe.batch} --group {options.group}: a step has whole groups of at least 2 completions; give "
            "a --batch that is a multiple of --group."
        )
    for flag, steps in (("--steps", recipe.steps), ("--checkpoint-every", recipe.checkpoint_every)):
        if options.updates < 1 or steps % options.updates:
            raise ValueError(
                f"{flag} {steps} --updates {options.updates}: a resumed run begins with new completions, so a run is "
                "saved only after all updates on a batch; give at least 1 for --updates, and a multiple of --updates "
                f"for {flag}."
            )
    check_flags_of_texts(recipe, has_held_out=has_held_out)


def check_flags_of_texts(recipe: Recipe, *, has_held_out: bool = False) -> None:
    """Raise a `ValueError` for a flag that affects only training on texts.

    A run that starts from another run (`--from-run`) inherits that run's recipe. Inherited values of such flags are
    ignored without an error.
    """
    recipes = [Recipe(recipe.model)]
    if recipe.from_run is not None:
        recipes.append(RunDirectory(recipe.from_run).read()[1])
    if reads_chats(recipe):
        recipes = list(map(for_chats, recipes))
    default, *inherited = map(flags_of, recipes)
    plan_flags = flags_of(recipe.plan)
    for flag, value in flags_of(recipe).items():
        changes_step = flag in _FLAGS_OF_STEPS
        if not changes_step and (flag in plan_flags or flag.startswith(_READ_FLAGS)):
            continue
        if flag == "--validate-every" and has_held_out:
            continue
        is_inherited = value in [flags.get(flag) for flags in inherited]
        if value != default[flag] and (changes_step or not is_inherited):
            fix = _FLAGS_INSTEAD.get(flag, "leave it out")
            if changes_step and inherited:
                fix += f", or give {flag} {default[flag]} if the run of --from-run has it"
            shown_value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{flag} {shown_value}: this flag has no effect on training on rewards; {fix}.")


def read_subject(
    recipe: Recipe, options: RewardOptions, reward: Reward | str, rows: Rows | None, held_out: Rows | str | Path | None
) -> Subject:
    """Load the reward function and read the rows of prompts, unless they are passed as a function and lists of rows."""
    function = load_user_function("--reward", reward, "reward") if isinstance(reward, str) else reward
    if rows is None:
        with print_warnings():
            rows = read_prompts(recipe.data or "")
    name = f" {held_out}" if isinstance(held_out, str | Path) else ""
    with name_held_out(name), print_warnings():
        held_out = read_prompts(held_out) if isinstance(held_out, str | Path) else held_out
        fields = [sorted(row) for row in (*rows[:1], *(held_out or ())[:1])]
        if len(fields) == 2 and fields[0] != fields[1]:
            raise ValueError(
                f"the held-out rows have the fields {fields[1]}, and the rows of --data have {fields[0]}; give the "
                "same fields."
            )
    return Subject(function, rows, held_out, name, list_settings(options, reward, rows))


@contextlib.contextmanager
def name_held_out(name: str) -> Iterator[None]:
    """Put --held-out and the name of its file in front of a `ValueError` that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--held-out{name}: {error}") from error


def list_settings(options: RewardOptions, reward: Reward | str, rows: Rows) -> dict[str, Any]:
    """Return, by flag, the settings outside of the recipe that decide the run's results; checkpoints store them."""
    settings = flags_of(options) | {"--scale-rewards": options.scales_rewards, "--reward": _describe_reward(reward)}
    return settings | {"--data": describe_rows(rows)}


def describe_rows(rows: Rows) -> str:
    """Return a text with the number of rows and a hash of their content.

    If JSON cannot hold a value, only the value's type is hashed.
    """
    content = json.dumps(rows, default=lambda value: type(value).__name__)
    return f"{len(rows)} rows with the SHA-256 {_digest(content)}"


def name_function(reward: Reward) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return getattr(reward, "__qualname__", type(reward).__qualname__)


def _describe_reward(reward: Reward | str) -> str:
    """Return the name of a reward function with a hash of its file, or of its source if it was passed as a function."""
    if isinstance(reward, str):
        file = user_file(reward)
        assert file is not None
        name = reward.removeprefix(str(file)).removeprefix(":") or "reward"
        return f"{name} of a file with the SHA-256 {_digest(read_utf8(file))}"
    source = _source_of(reward)
    return name_function(reward) + ("" if source is None else f" with the SHA-256 {_digest(source)}")


def _source_of(reward: Reward) -> str | None:
    """Return a function's source; None if it was typed interactively, and for an object that is not a function."""
    code = getattr(inspect.unwrap(reward), "__code__", None)
    # In a process of `python -c`, Python 3.13 takes that command for the source of all code that `exec` has run.
    if code is not None and code.co_filename == "<string>":
        return None
    try:
        return inspect.getsource(reward)
    except (OSError, TypeError):
        return None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_same_settings(directory: RunDirectory, settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the folder's checkpoints were saved with other reward settings, or without rewards."""
    checkpointer = directory.checkpointer()
    if not directory.recipe.exists() or checkpointer.latest_step is None:
        return
    saved = checkpointer.metadata().get("rewards")
    if saved is None:
        raise ValueError(
            f"--run-dir {directory.path}: the folder holds a run that does not learn from rewards; give another "
            f"folder, and --from-run {directory.path} to begin with the weights of that run."
        )
    changed = [f"{flag}: {saved.get(flag)} -> {value}" for flag, value in settings.items() if saved.get(flag) != value]
    if changed:
        raise ValueError(
            f"--run-dir {directory.path}: the folder holds a run, and this command differs in\n  "
            + "\n  ".join(changed)
            + "\nGive the same values to continue that run, or another --run-dir to begin a new run."
        )
