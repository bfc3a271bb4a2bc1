"""Small training runs of a text encoder: the recipe's sizes, held-out rows, and a check of runs that are resumed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import eqformer
from eqformer import data, models, training
from eqformer.data._token_store import is_validation
from eqformer.recipes import Mesh, Recipe, Screen, train


CONFIG = models.BERTConfig(256, 32, 2, 4, 48, max_seq=64)
SGD = training.Optimization("sgd", learning_rate=1e-2, warmup=1)
TEXT = dataclasses.replace(Recipe(CONFIG).text, validation=0.3)
SIZES: dict[str, Any] = {
    "seq": 24,
    "steps": 4,
    "log_every": 1,
    "validate_every": 4,
    "checkpoint_every": 2,
    "sample_every": 0,
}
MESHES = [Mesh(fsdp=2, tensor=2), Mesh(context=2, fsdp=2), Mesh(replica=2, pipe=2)]
load: Any = eqformer.load  # its result's class depends on the folder


def write_rows(file: Path, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Write rows to a file, and return the training and held-out rows."""
    file.write_text("\n".join(map(json.dumps, rows)))
    held_out = [is_validation(name, TEXT.validation) for name, _, _ in data.files(file, field=None)]
    return [[rows[n] for n in range(len(rows)) if held_out[n] == is_held_out] for is_held_out in (False, True)]


def run_of(recipe: Recipe, folder: Path, devices: int = 1) -> Any:
    return train(recipe, folder, devices=jax.devices()[:devices], screen=Screen(silent=True))


def with_arrays(model: Any, other: Any) -> Any:
    """Return `model` with the arrays of `other`: the programs compiled for `model` run it.

    Other fields of the two may differ.
    """
    return jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(other))


def losses(run: Any) -> list[float]:
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def arrays(run: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(load(run.folder).model, eqx.is_array))]


def check_it_goes_on(recipe: Recipe, folder: Path) -> None:
    """Check that a run over four devices, interrupted and resumed, equals the uninterrupted run bit for bit.

    The losses must be those of a run on one device.
    """
    devices = 4
    uninterrupted = run_of(recipe, folder / "whole", devices)
    half = run_of(dataclasses.replace(recipe, steps=2), folder / "half", devices)
    parts = run_of(recipe, half.folder, devices)
    assert parts.start == 2 and all(map(np.array_equal, arrays(parts), arrays(uninterrupted)))
    alone = run_of(dataclasses.replace(recipe, mesh=Mesh()), folder / "alone")
    np.testing.assert_allclose(losses(uninterrupted), losses(alone), rtol=1e-5)
    other = run_of(dataclasses.replace(recipe, mesh=Mesh(), seed=1), folder / "other")
    assert not np.allclose(losses(other), losses(alone), rtol=1e-4)  # another seed gives other losses
