"""Load a run's latest model or a published one with its tokenizer, over the mesh of a command's flags."""

import functools
from pathlib import Path
from typing import Literal

from recipes import Mesh, Recipe, RECIPES

from eqformer import nn, parallel, text
from support.processes import Machine, run_devices
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import make_plan


def choose_source(model: Path | None, run_dir: Path | None) -> tuple[Path, bool]:
    """Return what --model or --run-dir names, or the default run, and whether it is a run; a `ValueError` for both."""
    if model is not None and run_dir is not None:
        raise ValueError(f"--model {model} --run-dir {run_dir}: one model is read; leave one of them out.")
    source = model or run_dir or Path("runs/default")
    return source, model is None or RunDirectory(source).recipe.exists()


def load_llm(
    source: Path,
    plan: parallel.Plan | None,
    *,
    is_run: bool,
    dtype: str | None,
    weights: str,
    predictor: bool = False,
) -> text.LLM:
    """Load the model of a run or a published one; a `ValueError` names flags that a run does not have."""
    if is_run:
        if dtype is not None:
            raise ValueError(
                f"--dtype {dtype}: a run's model is computed in what its recipe says; leave it out, or write the model "
                "out (scripts/convert.py) and give --model."
            )
        if weights != "decoded":
            raise ValueError(f"--weights {weights}: a run's weights are in no fewer bits; leave it out.")
        RunDirectory(source).read()  # Its errors name flags.
        return text.load(source, plan=plan)
    if weights == "quantized" and source.is_file():
        raise ValueError(
            f"--weights quantized --model {source}: the blocks of a GGUF file are decoded; leave out --weights, and "
            "give --dtype bfloat16 for half the memory of float32."
        )
    with Screen(errors=True).bar() as progress:
        return text.load(
            source,
            plan=plan,
            dtype=None if dtype is None else nn.float_dtype(dtype, f"--dtype {dtype}"),
            weights=weights,
            predictor=predictor,
            progress=functools.partial(progress, f"reading {source}"),
        )


def make_mesh_plan(mesh: Mesh, zero: Literal[0, 3], simulate: int | None) -> parallel.Plan | None:
    """Return the plan of a command's mesh; None for one device."""
    if mesh == Mesh() and simulate is None:
        return None
    with_mesh = Recipe(RECIPES["default"]().model, mesh=mesh, plan=parallel.ParallelConfig(zero=zero))
    return make_plan(with_mesh, run_devices(Machine(simulate=simulate)))
