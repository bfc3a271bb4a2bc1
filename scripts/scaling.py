"""Train several depths, and fit the loss over compute: `python scripts/scaling.py --data TEXT --depths 1 2 4`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import tyro
from support.command import entry

from eqformer.recipes import (
    choose_depth,
    fit_scaling,
    measure_text,
    Recipe,
    run_scaling,
    scaling_recipes,
    ScalingPoint,
    Screen,
    write_scaling,
)


@dataclasses.dataclass(frozen=True)
class Command:
    """Train models of several depths on a text, fit a power law of their losses, and name the depth for a budget.

    Each depth is a run of the recipe speedrun, in its own folder. The same command continues where it stopped. If it
    has further depths or rates, runs that are already done are not repeated.
    """

    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """The text: a file or a folder; Python's standard library by default."""
    depths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (1, 2, 3, 4, 5)
    """The depths to train; the largest fifth of the depths, at least one depth, is held out of the fit."""
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE ...")] = ()
    """The learning rates of each depth, for a picture of the loss over the rate; by default the recipe's rate."""
    tokens_per_parameter: float = 20.0
    """The number of training tokens of a depth, for each parameter in its matrices."""
    tokens: float | None = None
    """The number of training tokens of every depth, such as 1e6, in place of --tokens-per-parameter."""
    epochs: float = 4.0
    """Maximum number of passes over the text; further passes are worth less than new text (arXiv:2305.16264)."""
    budget: float | None = None
    """A budget in FLOPs, such as 1e17; the largest depth for this budget is printed."""
    hours: float | None = None
    """A budget in hours, at the speed of the largest depth of this study, in place of --budget."""
    seed: int = 0
    """Decides initial weights and the order of the data."""
    out: Path = Path("runs/scaling")
    """The folder of the runs, of scaling.json and of the pictures."""


def run(command: Command) -> None:
    """Train the missing runs, print the fit, and draw it; everything is checked first."""
    recipes, screen = check_command(command), Screen()
    report(command, run_scaling(recipes, command.out, screen=screen), screen)


def check_command(command: Command) -> dict[tuple[int, float], Recipe]:
    """Return the recipe of each depth and rate; raise a `ValueError`, before anything is written, for bad input."""
    if command.budget is not None and command.hours is not None:
        raise ValueError(f"--budget {command.budget} --hours {command.hours}: give only one of the two.")
    if command.tokens is not None and not (command.budget is None and command.hours is None):
        raise ValueError(
            f"--tokens {command.tokens:g}: for a budget, the number of tokens must grow with the parameters; leave out "
            "--tokens, or --budget and --hours."
        )
    values = [("--tokens-per-parameter", command.tokens_per_parameter), ("--epochs", command.epochs)]
    values += [("--budget", command.budget), ("--hours", command.hours), ("--tokens", command.tokens)]
    values += [("--rates", rate) for rate in command.rates]
    for flag, value in values:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{flag} {value}: the value must be a positive number.")
    horizon = {"tokens_per_parameter": command.tokens_per_parameter, "tokens": command.tokens}
    recipes = scaling_recipes(command.depths, command.rates, **horizon, data=command.data, seed=command.seed)
    largest = recipes[max(recipes)]
    tokens, size = largest.steps * largest.batch * largest.seq, measure_text(largest)
    if (epochs := tokens / size) > command.epochs:
        shorter = f"--tokens-per-parameter {command.tokens_per_parameter * command.epochs / epochs:.2g}"
        if command.tokens is not None:
            shorter = f"--tokens {command.tokens * command.epochs / epochs:.2g}"
        raise ValueError(
            f"--depths {max(command.depths)}: this depth's {tokens:,} tokens are {epochs:.3g} epochs of the "
            f"{size:,.0f} bytes of training text, more than --epochs {command.epochs:g}; give more text, a smaller "
            f"depth, {shorter}, or --epochs {math.ceil(epochs)}."
        )
    return recipes


def report(command: Command, points: list[ScalingPoint], screen: Screen) -> None:
    """Print the fit of the best rates and the depth for the budget; write scaling.json and the pictures."""
    fit = fit_scaling(points)
    for point, error in zip(fit.held_out, fit.errors, strict=True):
        screen.note(
            f"held out   depth {point.depth}: {point.bits_per_byte:.4f} bits a byte, predicted "
            f"{fit.law.loss(point.flops):.4f} ({error:+.1%})"
        )
    law = fit.law_of_all
    screen.note(f"fit        {law.scale:.3g} * FLOPs^-{law.exponent:.3f} bits a byte, of all depths")
    budget = command.budget
    if command.hours is not None:
        budget = command.hours * 3600 * fit.held_out[-1].flops_per_second
    chosen = None if budget is None else choose_depth(budget, command.tokens_per_parameter)
    if budget is not None:
        advice = "the budget is too small for every depth; lower --tokens-per-parameter"
        if chosen is not None:
            depth, flops = chosen
            advice = f"depth {depth} of {flops:.3g} FLOPs, predicted {law.loss(flops):.4f} bits a byte"
        screen.note(f"budget     {budget:.3g} FLOPs: {advice}")
    write_scaling(points, fit, command.out, budget, None if chosen is None else chosen[0])
    screen.note(f"look at    {command.out}/scaling.png, {command.out}/scaling.json")


main = entry(Command, run)

if __name__ == "__main__":
    main(sys.argv[1:])
