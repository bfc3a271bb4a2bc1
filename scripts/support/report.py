"""Output of a run for people: its lines, samples, metrics and text colored by experts."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from recipes import Recipe

from eqformer import dataclass_to_json, nn, read_utf8, training, write_atomic
from support.recipe_file import needs_code
from support.run_directory import RunDirectory


def opening_line(
    name: str, recipe: Recipe, directory: RunDirectory, start: int, parameters: tuple[int, int], tokens: tuple[int, int]
) -> str:
    """Return a line on the model, its parameters (trained, all), the step, and the tokens (training, validation)."""
    begin = f"goes on at step {start}" if start else "starts"
    if not start and recipe.from_run is not None:
        begin += f" from {recipe.from_run}" + (f" at step {recipe.from_step}," if recipe.from_step else "")
    trained, total = parameters
    share = "all trained" if trained == total else f"{trained:,} of them trained ({trained / total:.2%})"
    return (
        f"{name}: a {type(recipe.model).__name__} of {total:,} parameters, {share}, {begin} in {directory.path}; "
        f"{tokens[0]:,} training tokens, {tokens[1]:,} for validation"
    )


def metrics_line(last: Mapping[str, Any]) -> str:
    """Return the latest metrics in one line: losses, learning rate and speed; empty before the first row."""
    if "loss" not in last:
        return ""
    validation = f"  validation {last['validation_loss']:.3f}" if "validation_loss" in last else ""
    return f"loss {last['loss']:.3f}{validation}  rate {last['learning_rate']:.2e}  {format_speed(last)}"


def closing_lines(
    recipe: Recipe, directory: RunDirectory, done: int, skipped: int, empty: int, last: Mapping[str, Any]
) -> str:
    """Return five lines: the work done, losses, files, and how to sample; or one line for a run that was stopped."""
    if done < recipe.steps:
        return f"stopped at step {done} of {recipe.steps}; the checkpoint is saved, the same command goes on"
    tokens = done * recipe.batch * recipe.seq
    without = f", {empty} batches without any weight" if empty else ""
    sample = f"--run-dir {directory.path} --prompt {json.dumps(recipe.prompt)} --tokens 300 --temperature 0.8 --seed 0"
    sample += " --trust-recipe" if needs_code(recipe) else ""
    return "\n".join(
        (
            f"trained    {done} steps, {tokens:,} tokens, {skipped} steps skipped{without}; {format_speed(last)}",
            f"loss       {last['loss']:.3f} nats a token in training; validation {last['validation_loss']:.3f} nats, "
            f"{last['validation_bits_per_byte']:.3f} bits a byte, {last['validation_accuracy']:.0%} of tokens right",
            f"checkpoint {directory.checkpoints / str(done)}",
            f"look at    {', '.join(map(str, directory.files_to_look_at()))}",
            f"sample     python scripts/sample.py {sample}",
        )
    )


def add_sample(path: Path, step: int, text: str) -> None:
    """Append a sample under its step; samples of this step or later, from before the run was resumed, are removed."""
    _, *entries = re.split(r"^--- step (\d+)\n", read_utf8(path) if path.exists() else "", flags=re.MULTILINE)
    earlier = [f"--- step {number}\n{body}" for number, body in zip(entries[::2], entries[1::2]) if int(number) < step]
    write_atomic(path, "".join(earlier) + f"--- step {step}\n{text}\n\n")


def format_speed(rate: Mapping[str, float]) -> str:
    """Return tokens a second and the share of the measured peak."""
    return f"{rate['tokens_per_second']:,.0f} tokens/s  MFU {rate['mfu']:.0%}"


def open_metrics(recipe: Recipe, directory: RunDirectory, start: int) -> training.MetricWriters:
    """Open the run's writers of metrics: a file always, TensorBoard and Weights & Biases if the recipe asks for them.

    Rows of steps after `start`, which will be run again, are dropped.
    """
    path, wandb = directory.path, recipe.metrics.wandb
    makers: list[Callable[[], training.MetricWriter]] = []
    makers.append(lambda: training.JsonLines(directory.metrics, from_step=start + 1))
    if recipe.metrics.tensorboard:
        makers.append(lambda: training.TensorBoard(path / "tensorboard", from_step=start + 1))
    if wandb is not None:
        names = lambda: {"folder": path, "name": path.name, "identifier": _wandb_identifier(directory, start)}
        makers.append(lambda: training.WeightsAndBiases(wandb, **names(), recipe=dataclass_to_json(recipe)))
    return training.MetricWriters(*makers)


def _wandb_identifier(directory: RunDirectory, start: int) -> str:
    """Return the run's identifier at Weights & Biases, kept in its folder; a run from step 0 gets a new one."""
    if not start or not directory.identifier.exists():
        write_atomic(directory.identifier, secrets.token_hex(8))
    return read_utf8(directory.identifier)


def chooses_experts(model: nn.Transformer) -> bool:
    """Return whether the model has a mixture whose tokens choose their experts."""
    return any(not moe.router.facts().gives_slots for moe in nn.modules(model, nn.ExpertMixture))


def color_by_experts(directory: RunDirectory, model: nn.Transformer, ids: Sequence[int], pieces: Sequence[str]) -> None:
    """Write a text colored by each token's first expert to experts.html and experts.png.

    `ids` and `pieces` are the text's tokens; those beyond the model's positions are left out. Raises a `ValueError` if
    tokens do not choose their experts.
    """
    experts = np.asarray(eqx.filter_jit(nn.first_experts)(model, jnp.asarray(ids[: model.max_seq], jnp.int32)))
    title = f"{directory.path.name}: the expert that each token takes first"
    for path in (directory.experts_page, directory.experts):
        training.plot_experts(experts, pieces[: model.max_seq], path, title=title)
