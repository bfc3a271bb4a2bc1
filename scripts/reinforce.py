"""Train a model on rewards: `python scripts/reinforce.py --model M --data prompts.jsonl --reward FILE.py:NAME`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from support.command import entry
from support.processes import connect, Machine, run_devices

from eqformer.parallel import is_first_process
from eqformer.recipes import Recipe, RewardOptions, Screen, short_name, train_on_rewards


@dataclasses.dataclass(frozen=True)
class Command:
    """Raise the rewards of a model's own completions by GRPO; run the same command again to continue a stopped run.

    Each row of --data has a prompt (a text or messages) and columns that the reward function may read. A step has
    --batch completions, --group of each prompt. A prompt and its completion have at most --seq tokens together.
    """

    recipe: str
    """The recipe to start from; see below; other flags change its fields."""
    run: Annotated[Recipe, tyro.conf.arg(name="")]
    machine: Annotated[Machine, tyro.conf.arg(name="")] = Machine()
    rewards: Annotated[RewardOptions, tyro.conf.arg(name="")] = RewardOptions()
    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/<recipe>)")] = None
    """The folder of the run; everything is written there."""
    reward: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """The function reward(prompts, completions, **columns), which returns a number for each completion."""
    held_out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Prompts that are not trained on; the mean reward of their greedy completions is a metric (--validate-every)."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""


def reinforce(command: Command) -> None:
    """Train as the command says. All settings are checked before anything is written; rewards are computed later."""
    recipe, folder = command.run, command.run_dir or Path("runs") / short_name(command.recipe)
    connect(command.machine)
    if command.reward is None:
        raise ValueError(
            "--reward: there is no reward function; give FILE.py:NAME of a function reward(prompts, completions, "
            "**columns)."
        )
    screen = Screen(silent=not is_first_process())
    run = train_on_rewards(
        recipe,
        folder,
        command.reward,
        command.rewards,
        held_out=command.held_out,
        name=command.recipe,
        devices=run_devices(command.machine),
        screen=screen,
    )
    if run.start < run.step == recipe.steps:
        screen.note(
            f"sample     python scripts/sample.py --run-dir {folder} --prompt PROMPT\n"
            f"write out  python scripts/convert.py {folder} FOLDER"
        )


# Flags that the short help of this command leaves out, because `train_on_rewards` or a published model refuses them.
HIDDEN = "--model.embed --model.layers --model.heads --loss-on --text.mix --evaluate-every --prompt".split()
main = entry(Command, reinforce, hidden=HIDDEN)

if __name__ == "__main__":
    main(sys.argv[1:])
