"""Scaling studies: runs of several depths, a power law of their losses over compute, and the depth for a budget."""

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from .. import models, planning
from .._failures import load_extra
from .._files import write_atomic
from ._named_recipes import DEPTHS, speedrun_recipe, TOKENS_PER_PARAMETER
from ._recipe import Recipe
from ._report import Screen
from ._texts import complete_recipe, open_sources
from ._trainer import train


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """A run of a scaling study: its depth, learning rate, compute, speed, and loss on the validation text."""

    depth: int
    rate: float
    flops: float
    """FLOPs of the model in the whole run."""
    bits_per_byte: float
    """The loss after the last step; NaN for a run that diverged."""
    flops_per_second: float = math.nan
    """The speed of the run."""

    @property
    def finite_loss(self) -> float:
        """The loss; infinity for a run that diverged."""
        return self.bits_per_byte if math.isfinite(self.bits_per_byte) else math.inf


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """A power law of the loss over compute: `scale * flops^-exponent`."""

    scale: float
    exponent: float

    def loss(self, flops: float) -> float:
        """Return the law's loss at a number of FLOPs."""
        return self.scale * flops**-self.exponent


def fit_power_law(flops: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit a power law to losses at numbers of FLOPs, by least squares of the logarithms of the losses."""
    slope, intercept = np.polyfit(np.log(flops), np.log(losses), 1)
    return PowerLaw(float(np.exp(intercept)), float(-slope))


@dataclasses.dataclass(frozen=True)
class ScalingFit:
    """The power laws of a scaling study; made by `fit_scaling`."""

    fitted: tuple[ScalingPoint, ...]
    """The best run of each of the smaller depths."""
    held_out: tuple[ScalingPoint, ...]
    """The best run of each of the largest depths, which test the law of the smaller depths."""
    law: PowerLaw
    """The law of the smaller depths."""
    law_of_all: PowerLaw
    """The law of all depths, for predictions at larger depths."""

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative errors of `law` at the held-out depths."""
        return tuple(self.law.loss(point.flops) / point.bits_per_byte - 1 for point in self.held_out)


def fit_scaling(points: Iterable[ScalingPoint]) -> ScalingFit:
    """Fit the loss over compute to the best run of each depth; the largest fifth of the depths is held out.

    Raises a `ValueError` for fewer than three depths: a fit needs two depths, and one held-out depth tests it.
    """
    points = list(points)
    depths = sorted({point.depth for point in points})
    if len(depths) < 3:
        raise ValueError(
            f"fit_scaling(points): the runs have the depths {depths}; a fit needs two depths and a held-out depth, so "
            "give runs of at least 3 depths."
        )
    best = [
        min((point for point in points if point.depth == depth), key=lambda point: point.finite_loss)
        for depth in depths
    ]
    fit = lambda runs: fit_power_law([point.flops for point in runs], [point.bits_per_byte for point in runs])
    count = len(best) - max(1, len(best) // 5)
    return ScalingFit(tuple(best[:count]), tuple(best[count:]), fit(best[:count]), fit(best))


def scaling_recipes(
    depths: Sequence[int],
    rates: Sequence[float] = (),
    *,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    tokens: float | None = None,
    data: Path | None = None,
    seed: int = 0,
) -> dict[tuple[int, float], Recipe]:
    """Return the recipes of a scaling study, by depth and learning rate: the recipe speedrun at each depth.

    Raises a `ValueError` for repeated depths, for fewer than three depths, and for a depth that `speedrun_recipe`
    refuses.

    Args:
        depths: The depths, in any order; the result is in rising order.
        rates: The learning rates of each depth; empty: the rate of the recipe speedrun.
        tokens_per_parameter: The number of training tokens of a depth, for each parameter in its matrices.
        tokens: The number of training tokens of every depth, in place of `tokens_per_parameter`.
        data: A file or a folder of text; None: Python's standard library.
        seed: Decides initial weights and the order of the data.
    """
    if len({*depths}) < len(depths) or len(depths) < 3:
        raise ValueError(
            f"--depths {' '.join(map(str, depths))}: a fit needs two depths and a held-out depth; give at least 3 "
            "different depths."
        )
    recipes = {}
    for depth in sorted(depths):
        try:
            recipe = speedrun_recipe(depth, tokens_per_parameter=tokens_per_parameter, tokens=tokens)
        except ValueError as error:
            raise ValueError(f"--depths {depth}: {error}") from error
        recipe = dataclasses.replace(recipe, data=data, seed=seed, sample_every=0)
        for rate in rates or (recipe.optimizer.learning_rate,):
            optimizer = dataclasses.replace(recipe.optimizer, learning_rate=rate)
            recipes[depth, rate] = dataclasses.replace(recipe, optimizer=optimizer)
    return recipes


def count_run_flops(recipe: Recipe) -> float:
    """Return the FLOPs of a recipe's run: the model's FLOPs for each token, forward and backward."""
    shapes = eqx.filter_eval_shape(lambda: models.build(recipe.model, key=jax.random.key(0)))
    per_token = planning.flops_per_token(shapes, recipe.seq, noisy_copies=recipe.has_noisy_copies)
    return per_token * recipe.steps * recipe.batch * recipe.seq


def measure_text(recipe: Recipe) -> float:
    """Return the number of bytes of a recipe's training text, without its validation text; infinity if unknown."""
    sources = open_sources(complete_recipe(recipe))
    size = sum(source.size for source, _ in sources.values())
    return size * (1 - recipe.text.validation) if size else math.inf


def run_scaling(
    recipes: Mapping[tuple[int, float], Recipe], folder: Path, *, screen: Screen | None = None
) -> list[ScalingPoint]:
    """Train the recipes of `scaling_recipes`, each in its own folder, and return the runs.

    If a run's folder exists, the run is resumed; if the run has ended, its results are read. The screen shows each
    run's loss, and an estimate of the time that the remaining runs will take.
    """
    screen = Screen() if screen is None else screen
    compute = {key: count_run_flops(recipe) for key, recipe in recipes.items()}
    screen.note(f"{len(recipes)} runs, {sum(compute.values()):.3g} FLOPs in all, in {folder}")
    points, started, done = [], time.monotonic(), 0.0
    for (depth, rate), recipe in recipes.items():
        flops, run_folder = compute[depth, rate], folder / f"depth-{depth}-rate-{rate:g}"
        metrics = train(recipe, run_folder, name="speedrun", screen=screen).metrics
        speed = metrics.get("model_flops_per_second", math.nan)
        points.append(ScalingPoint(depth, rate, flops, metrics["validation_bits_per_byte"], speed))
        done += flops
        seconds_left = (time.monotonic() - started) / done * (sum(compute.values()) - done)
        screen.note(
            f"depth {depth} at {rate:g}: {points[-1].bits_per_byte:.4f} bits a byte after {flops:.3g} FLOPs; about "
            f"{seconds_left / 60:.1f} minutes left for the other runs"
        )
        if not math.isfinite(points[-1].bits_per_byte):
            screen.note(f"depth {depth} diverged at {rate:g}: see {run_folder}/loss.png, and give smaller --rates")
    return points


def choose_depth(flops: float, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> tuple[int, float] | None:
    """Return the largest depth whose run fits in a number of FLOPs, and the run's FLOPs; None if no depth fits."""
    fitting = None
    for depth in DEPTHS:
        run_flops = count_run_flops(speedrun_recipe(depth, tokens_per_parameter=tokens_per_parameter))
        if run_flops > flops:
            return fitting
        fitting = depth, run_flops
    return fitting


def write_scaling(
    points: Sequence[ScalingPoint], fit: ScalingFit, folder: Path, budget: float | None = None, depth: int | None = None
) -> None:
    """Write `scaling.json` and `scaling.png` to a folder; also `rates.png` if depths have several learning rates.

    `budget` is a number of FLOPs, and `depth` is the depth that was chosen for this budget.
    """
    content = {
        "points": list(map(dataclasses.asdict, points)),
        "fit": dataclasses.asdict(fit.law_of_all),
        "held_out_errors": fit.errors,
        "budget": budget,
        "depth": depth,
    }
    write_atomic(folder / "scaling.json", json.dumps(content, indent=1))
    plot_scaling(fit, folder / "scaling.png")
    if len(points) > len(fit.fitted) + len(fit.held_out):
        plot_rates(points, folder / "rates.png")


def plot_scaling(fit: ScalingFit, path: Path) -> None:
    """Draw the loss over compute to a PNG, with the law of the smaller depths. Needs matplotlib."""
    figure = load_extra("matplotlib.figure", extra="train", call="plot_scaling(fit, path)").Figure(
        (6.4, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    points = *fit.fitted, *fit.held_out
    flops = np.geomspace(0.7 * points[0].flops, 1.5 * points[-1].flops)
    axes.plot(flops, [fit.law.loss(x) for x in flops], color="#9ab8d6", label=f"FLOPs^-{fit.law.exponent:.3f}")
    for runs, color, label in ((fit.fitted, "#1f4e79", "fitted"), (fit.held_out, "#c8552b", "held out")):
        losses = [point.bits_per_byte for point in runs]
        axes.plot([point.flops for point in runs], losses, "o", color=color, label=label)
    for point in points:
        axes.annotate(f"depth {point.depth}", (point.flops, point.bits_per_byte), (5, 5), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="validation, bits a byte")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    write_atomic(path, figure.savefig)


def plot_rates(points: Sequence[ScalingPoint], path: Path) -> None:
    """Draw the loss over the learning rate to a PNG, a curve for each depth. Needs matplotlib."""
    figure = load_extra("matplotlib.figure", extra="train", call="plot_rates(points, path)").Figure(
        (6.4, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    for depth in sorted({point.depth for point in points}):
        curve = sorted((point.rate, point.bits_per_byte) for point in points if point.depth == depth)
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=f"depth {depth}, width {64 * depth}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation, bits a byte")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    write_atomic(path, figure.savefig)
