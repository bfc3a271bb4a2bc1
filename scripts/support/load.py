"""Flags of a command that loads a model, a run's latest or a published one, and the model with its tokenizer."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from eqformer import nn, parallel, text
from eqformer.recipes import Mesh, Recipe, RECIPES, RunDirectory, Screen, setup
from support.processes import Machine, run_devices


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags that name a model and the mesh that it is loaded over."""

    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/default)")] = None
    """The folder of the run."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder as published (safetensors, config.json, tokenizer.json), a file of GGUF, a name of the hub, or a run."""
    dtype: str | None = None
    """A published model's dtype: float32 (fp32), bfloat16 (bf16), float16 (fp16); as it is published by default."""
    weights: Literal["decoded", "quantized"] = "decoded"
    """Whether quantized weights, published or kept by a run, are decoded, or stay quantized in less memory."""
    mesh: Mesh = Mesh()
    zero: Literal[0, 3] = 0
    """Split over --mesh.fsdp nothing (0), or all weights (3), which are gathered when their layer runs."""
    simulate: int | None = None
    """Have the CPU act as so many devices."""
    trust_recipe: bool = False
    """Run the copy of a user's recipe file in a run's folder, if the recipe needs a class of that file."""

    @property
    def source(self) -> Path:
        """The model's folder, file or name, or the folder of the run; by default that of the default run."""
        return self.model or self.run_dir or Path("runs/default")


def load_llm(flags: ModelFlags, *, predictor: bool = False, throughput: bool = False) -> text.LLM:
    """Load the language model of the flags; a `ValueError` names flags that contradict each other or do not suit a run.

    With `predictor` the module that predicts a further token is read too, if the model has one. With `throughput`
    decoding may take longer to compile if it is faster then.
    """
    return load_model(flags, text.load_llm, predictor=predictor, throughput=throughput)


def load_model(flags: ModelFlags, load: Callable[..., T], *, predictor: bool = False, throughput: bool = False) -> T:
    """Load the model of the flags by `text.load_llm`, or by `text.load`, which takes text encoders too.

    Raises `ValueError`, and takes `predictor` and `throughput`, as `load_llm` does.
    """
    if flags.model is not None and flags.run_dir is not None:
        raise ValueError(f"--model {flags.model} --run-dir {flags.run_dir}: one model is read; leave one of them out.")
    source, plan = flags.source, _make_mesh_plan(flags)
    if flags.model is None or text.is_run(source):
        if flags.dtype is not None:
            raise ValueError(
                f"--dtype {flags.dtype}: a run's model is computed in what its recipe says; leave it out, or write the "
                "model out (scripts/convert.py) and give --model."
            )
        RunDirectory(source).read()  # Its errors name flags.
        return load(source, plan=plan, weights=flags.weights, throughput=throughput)
    with Screen(errors=True).bar() as progress:
        return load(
            source,
            plan=plan,
            dtype=None if flags.dtype is None else nn.float_dtype(flags.dtype, f"--dtype {flags.dtype}"),
            weights=flags.weights,
            predictor=predictor,
            throughput=throughput,
            progress=functools.partial(progress, f"reading {source}"),
        )


def _make_mesh_plan(flags: ModelFlags) -> parallel.Plan | None:
    """Return the plan of the mesh; None for one device."""
    if flags.mesh == Mesh() and flags.simulate is None:
        return None
    with_mesh = Recipe(RECIPES["default"]().model, mesh=flags.mesh, plan=parallel.ParallelConfig(zero=flags.zero))
    return setup.make_plan(with_mesh, run_devices(Machine(simulate=flags.simulate)))
