"""The lines that a run prints when it begins and when it ends."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes import Recipe

from eqformer import read_utf8, write_atomic
from support.recipe_file import needs_code
from support.run_directory import RunDirectory


def opening(
    name: str, recipe: Recipe, directory: RunDirectory, start: int, parameters: tuple[int, int], tokens: tuple[int, int]
) -> str:
    """One line: the model, its parameters (trained, all), the step, and the tokens (training, validation)."""
    where = f"goes on at step {start}" if start else "starts"
    if not start and recipe.from_run is not None:
        where += f" from {recipe.from_run}" + (f" at step {recipe.from_step}," if recipe.from_step else "")
    trained, there = parameters
    moving = "all trained" if trained == there else f"{trained:,} of them trained ({trained / there:.2%})"
    return (
        f"{name}: a {type(recipe.model).__name__} of {there:,} parameters, {moving}, {where} in {directory.path}; "
        f"{tokens[0]:,} training tokens, {tokens[1]:,} for validation"
    )


def figures(last: Mapping[str, Any]) -> str:
    """The latest metrics in one line: losses, learning rate and speed; empty before the first row."""
    if "loss" not in last:
        return ""
    validation = f"  validation {last['validation_loss']:.3f}" if "validation_loss" in last else ""
    return f"loss {last['loss']:.3f}{validation}  rate {last['learning_rate']:.2e}  {speed(last)}"


def closing(
    recipe: Recipe, directory: RunDirectory, done: int, skipped: int, empty: int, last: Mapping[str, Any]
) -> str:
    """Five lines: the work done, the losses, the files, and how to sample; or one line for a run that was stopped."""
    if done < recipe.steps:
        return f"stopped at step {done} of {recipe.steps}; the checkpoint is saved, the same command goes on"
    tokens = done * recipe.batch * recipe.seq
    without = f", {empty} batches without any weight" if empty else ""
    sample = f"--run-dir {directory.path} --prompt {json.dumps(recipe.prompt)} --tokens 300 --temperature 0.8 --seed 0"
    sample += " --trust-recipe" if needs_code(recipe) else ""
    return "\n".join(
        (
            f"trained    {done} steps, {tokens:,} tokens, {skipped} steps skipped{without}; {speed(last)}",
            f"loss       {last['loss']:.3f} nats a token in training; validation {last['validation_loss']:.3f} nats, "
            f"{last['validation_bits_per_byte']:.3f} bits a byte, {last['validation_accuracy']:.0%} of tokens right",
            f"checkpoint {directory.checkpoints / str(done)}",
            f"look at    {', '.join(map(str, directory.to_look_at()))}",
            f"sample     python scripts/sample.py {sample}",
        )
    )


def add_sample(path: Path, step: int, text: str) -> None:
    """Append a sample under its step; samples of this step or later, from before the run was resumed, are removed."""
    _, *entries = re.split(r"^--- step (\d+)\n", read_utf8(path) if path.exists() else "", flags=re.MULTILINE)
    kept = [f"--- step {number}\n{body}" for number, body in zip(entries[::2], entries[1::2]) if int(number) < step]
    write_atomic(path, "".join(kept) + f"--- step {step}\n{text}\n\n")


def speed(rate: Mapping[str, float]) -> str:
    """Tokens a second and the share of the measured peak."""
    return f"{rate['tokens_per_second']:,.0f} tokens/s  MFU {rate['mfu']:.0%}"
