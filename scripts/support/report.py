"""Output of a run for people: its lines, samples, metrics and text colored by experts."""

import json
from collections.abc import Mapping
from typing import Any

from recipes import Recipe

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
    validation += f"  margin {last['reward_margin']:.3f}" if "reward_margin" in last else ""
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


def format_speed(rate: Mapping[str, float]) -> str:
    """Return tokens a second and the share of the measured peak."""
    return f"{rate['tokens_per_second']:,.0f} tokens/s  MFU {rate['mfu']:.0%}"
