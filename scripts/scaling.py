"""Train several depths, and fit the loss over compute: `python scripts/scaling.py --data TEXT --depths 1 2 4`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv)

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Annotated

import equinox as eqx
import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from support.command import entry

from eqformer import models, planning, write_atomic
from eqformer.recipes import DEPTHS, Recipe, Screen, speedrun_recipe, texts, train


@dataclasses.dataclass(frozen=True)
class Command:
    """Train models of several depths on a text, fit a power law of their losses, and name the depth for a budget.

    Each depth is a run of the recipe speedrun, in a folder of its own; the same command goes on where it stopped, and
    further depths or rates are added to those that are there.
    """

    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """The text: a file or a folder; Python's standard library by default."""
    depths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (1, 2, 3, 4, 5)
    """The depths to train; the largest fifth of them, at least one, is held out of the fit."""
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE ...")] = ()
    """Learning rates to train each depth with, for a picture of the loss over the rate; the recipe's by default."""
    tokens_per_parameter: float = 20.0
    """Tokens that a depth is trained on, for each parameter in its matrices."""
    epochs: float = 4.0
    """How often a text may be repeated at most; more repetitions are worth less than new text (arXiv 2305.16264)."""
    budget: float | None = None
    """A budget in FLOPs, such as 1e17, for which the depth is named."""
    hours: float | None = None
    """A budget in hours at the speed of the largest depth here, in place of --budget."""
    seed: int = 0
    """Decides weights and order."""
    out: Path = Path("runs/scaling")
    """The folder of the runs, of scaling.json and of the pictures."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A run's depth, rate, compute and losses."""

    depth: int
    rate: float
    flops: float
    bits_per_byte: float
    flops_per_second: float


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """The loss `scale * flops^-exponent`, fitted in logarithms."""

    scale: float
    exponent: float

    def loss(self, flops: float) -> float:
        """Return the loss at a number of FLOPs."""
        return self.scale * flops**-self.exponent


def fit_power_law(points: list[Point]) -> PowerLaw:
    """Return the power law with the least squared error of the logarithms of the points' losses."""
    slope, intercept = np.polyfit(
        np.log([point.flops for point in points]), np.log([point.bits_per_byte for point in points]), 1
    )
    return PowerLaw(float(np.exp(intercept)), float(-slope))


def run_scaling(command: Command) -> None:
    """Train what is missing, print the table and the fit, and draw them; everything is checked before."""
    recipes = check_command(command)
    screen = Screen()
    compute = {key: count_flops(recipe) for key, recipe in recipes.items()}
    screen.note(f"{len(recipes)} runs, {sum(compute.values()):.3g} FLOPs in all, in {command.out}")
    points, started, done = [], time.monotonic(), 0.0
    for key, recipe in recipes.items():
        depth, rate = key
        folder = command.out / f"depth-{depth}-rate-{rate:g}"
        run = train(recipe, folder, name="speedrun", screen=screen)
        points.append(
            Point(
                *(depth, rate, compute[key]),
                run.metrics["validation_bits_per_byte"],
                run.metrics.get("model_flops_per_second", math.nan),
            )
        )
        done += compute[key]
        seconds_left = (time.monotonic() - started) / done * (sum(compute.values()) - done)
        screen.note(
            f"depth {depth} at {rate:g}: {points[-1].bits_per_byte:.4f} bits a byte after {compute[key]:.3g} FLOPs; "
            f"about {seconds_left / 60:.1f} minutes left for the other runs"
        )
        if not math.isfinite(points[-1].bits_per_byte):
            screen.note(f"depth {depth} diverged at {rate:g}: see {folder}/loss.png, and give smaller --rates")
    report(command, points, screen)


def check_command(command: Command) -> dict[tuple[int, float], Recipe]:
    """Return the recipe of each depth and rate; raise a `ValueError`, before anything is written, for bad input."""
    if len({*command.depths}) < len(command.depths) or len(command.depths) < 3:
        raise ValueError(
            f"--depths {' '.join(map(str, command.depths))}: a fit needs two depths, and one that is held out; give at "
            "least 3 different ones."
        )
    if command.budget is not None and command.hours is not None:
        raise ValueError(f"--budget {command.budget} --hours {command.hours}: give one of them.")
    numbers = {"--tokens-per-parameter": command.tokens_per_parameter, "--epochs": command.epochs}
    numbers |= {"--budget": command.budget, "--hours": command.hours}
    numbers |= {f"--rates {rate}": rate for rate in command.rates}
    for flag, value in numbers.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{flag if ' ' in flag else f'{flag} {value}'}: it must be a positive number.")
    recipes = {}
    for depth in sorted(command.depths):
        try:
            recipe = speedrun_recipe(depth, tokens_per_parameter=command.tokens_per_parameter)
        except ValueError as error:
            raise ValueError(f"--depths {depth}: {error}") from error
        recipe = dataclasses.replace(recipe, data=command.data, seed=command.seed, sample_every=0)
        for rate in command.rates or (recipe.optimizer.learning_rate,):
            optimizer = dataclasses.replace(recipe.optimizer, learning_rate=rate)
            recipes[depth, rate] = dataclasses.replace(recipe, optimizer=optimizer)
    check_horizon(command, recipes[max(command.depths), next(iter(recipes))[1]])
    return recipes


def check_horizon(command: Command, largest: Recipe) -> None:
    """Raise a `ValueError` if the largest depth would repeat a text of known size too often."""
    sources = texts.open_sources(texts.complete_recipe(largest))
    size = sum(source.size for source, _ in sources.values())
    if not size:
        return
    tokens = largest.steps * largest.batch * largest.seq
    epochs = tokens / max(1, size * (1 - largest.text.validation))
    if epochs > command.epochs:
        raise ValueError(
            f"--depths {max(command.depths)}: its {tokens:,} tokens are {epochs:.3g} epochs of a text of {size:,} "
            f"bytes, more than --epochs {command.epochs:g}; give more text, a smaller depth, --tokens-per-parameter "
            f"{command.tokens_per_parameter * command.epochs / epochs:.2g}, or --epochs {math.ceil(epochs)}."
        )


def count_flops(recipe: Recipe) -> float:
    """Return the FLOPs of a recipe's run: those of the model for each token, forward and backward."""
    shapes = eqx.filter_eval_shape(lambda: models.build(recipe.model, key=jax.random.key(0)))
    return planning.flops_per_token(shapes, recipe.seq) * recipe.steps * recipe.batch * recipe.seq


def report(command: Command, points: list[Point], screen: Screen) -> None:
    """Print the fit of the best rates and the depth for the budget; write scaling.json and the pictures."""
    best = [
        min((point for point in points if point.depth == depth), key=finite_loss)
        for depth in sorted({point.depth for point in points})
    ]
    held_out = best[-max(1, len(best) // 5) :]
    fit = fit_power_law(best[: -len(held_out)])
    errors = [fit.loss(point.flops) / point.bits_per_byte - 1 for point in held_out]
    for point, error in zip(held_out, errors, strict=True):
        screen.note(
            f"held out   depth {point.depth}: {point.bits_per_byte:.4f} bits a byte, predicted "
            f"{fit.loss(point.flops):.4f} ({error:+.1%})"
        )
    full_fit = fit_power_law(best)
    screen.note(f"fit        {full_fit.scale:.3g} * FLOPs^-{full_fit.exponent:.3f} bits a byte, of all depths")
    chosen = None
    budget = command.budget
    if command.hours is not None:
        budget = command.hours * 3600 * best[-1].flops_per_second
    if budget is not None:
        chosen = choose_depth(budget, command.tokens_per_parameter)
        at = f"{budget:.3g} FLOPs"
        screen.note(
            f"budget     {at}: no depth has so short a run; lower --tokens-per-parameter"
            if chosen is None
            else f"budget     {at}: depth {chosen[0]} of {chosen[1]:.3g} FLOPs, predicted "
            f"{full_fit.loss(chosen[1]):.4f} bits a byte"
        )
    content = {
        "points": list(map(dataclasses.asdict, points)),
        "fit": dataclasses.asdict(full_fit),
        "held_out_errors": errors,
        "budget": budget,
        "depth": chosen and chosen[0],
    }
    write_atomic(command.out / "scaling.json", json.dumps(content, indent=1))
    draw_fit(best, held_out, fit, command.out / "scaling.png")
    if command.rates:
        draw_rates(points, command.out / "rates.png")
    screen.note(f"look at    {command.out}/scaling.png, {command.out}/scaling.json")


def finite_loss(point: Point) -> float:
    """Return a point's loss; infinity for a run that diverged."""
    return point.bits_per_byte if math.isfinite(point.bits_per_byte) else math.inf


def choose_depth(budget: float, tokens_per_parameter: float) -> tuple[int, float] | None:
    """Return the largest depth whose run fits in a number of FLOPs, and its FLOPs; None if no depth fits."""
    fitting = None
    for depth in DEPTHS:
        flops = count_flops(speedrun_recipe(depth, tokens_per_parameter=tokens_per_parameter))
        if flops > budget:
            return fitting
        fitting = depth, flops
    return fitting


def draw_fit(best: list[Point], held_out: list[Point], fit: PowerLaw, path: Path) -> None:
    """Draw the loss over compute, with the fit of all depths but those held out."""
    figure = Figure((6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    flops = np.geomspace(0.7 * best[0].flops, 1.5 * best[-1].flops)
    axes.plot(flops, [fit.loss(x) for x in flops], color="#9ab8d6", label=f"FLOPs^-{fit.exponent:.3f}")
    for points, color, label in ((best[: -len(held_out)], "#1f4e79", "fitted"), (held_out, "#c8552b", "held out")):
        axes.plot(
            [point.flops for point in points], [point.bits_per_byte for point in points], "o", color=color, label=label
        )
    for point in best:
        axes.annotate(f"depth {point.depth}", (point.flops, point.bits_per_byte), (5, 5), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="validation, bits a byte")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    write_atomic(path, figure.savefig)


def draw_rates(points: list[Point], path: Path) -> None:
    """Draw the loss over the learning rate, a curve for each depth."""
    figure = Figure((6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for depth in sorted({point.depth for point in points}):
        curve = sorted((point.rate, point.bits_per_byte) for point in points if point.depth == depth)
        axes.plot(*zip(*curve), marker="o", markersize=4, label=f"depth {depth}, width {64 * depth}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation, bits a byte")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    write_atomic(path, figure.savefig)


main = entry(Command, run_scaling)

if __name__ == "__main__":
    main(sys.argv[1:])
