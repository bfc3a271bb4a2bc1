"""Flags of commands that load the latest model of a run or a published model, and functions that load the model."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from eqformer import generation, nn, parallel, text
from eqformer.recipes import Mesh, Recipe, RECIPES, RunDirectory, Screen, setup
from support.processes import Machine, run_devices


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags that name a model, and the mesh over which it is loaded."""

    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/default)")] = None
    """The folder of the run."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A published folder (safetensors, config.json, tokenizer.json), a GGUF file, a name of the hub, or a run."""
    dtype: str | None = None
    """A published model's dtype: float32 (fp32), bfloat16 (bf16), float16 (fp16); by default the published dtype."""
    weights: Literal["decoded", "quantized"] = "decoded"
    """Decode quantized weights of a published model or a run, or keep them quantized, which takes less memory."""
    mesh: Mesh = Mesh()
    zero: Literal[0, 3] = 0
    """Over --mesh.fsdp, split nothing (0), or split all weights (3) and gather them when their layer runs."""
    simulate: int | None = None
    """Let the CPU simulate this number of devices."""
    trust_recipe: bool = False
    """Run the Python file recipe.py of a run's folder if the recipe needs a class that this file defines."""

    @property
    def source(self) -> Path:
        """The model's folder, file or name, or the folder of the run; by default runs/default."""
        return self.model or self.run_dir or Path("runs/default")


def apply_blocks(llm: text.LLM, blocks: generation.BlockSampler) -> text.LLM:
    """Return the language model with the settings of --blocks; a mask id that is not given is the model's own.

    Raises a `ValueError` for settings of a model that generates one token after another.
    """
    if blocks == generation.BlockSampler():
        return llm
    if not isinstance(llm.sampler, generation.BlockSampler):
        raise ValueError("--blocks: the model generates one token after another; leave the --blocks flags out.")
    mask_id = llm.sampler.mask_id if blocks.mask_id is None else blocks.mask_id
    return dataclasses.replace(llm, sampler=dataclasses.replace(blocks, mask_id=mask_id))


def load_llm(flags: ModelFlags, *, predictor: bool = False, throughput: bool = False) -> text.LLM:
    """Load the language model that the flags name.

    With `predictor`, the module that predicts a further token is loaded too, if the model has one. With `throughput`,
    decoding may take longer to compile in order to run faster. Raises a `ValueError` that names flags that contradict
    each other or do not apply to a run.
    """
    return load_model(flags, text.load_llm, predictor=predictor, throughput=throughput)


def load_model(flags: ModelFlags, load: Callable[..., T], *, predictor: bool = False, throughput: bool = False) -> T:
    """Load the model that the flags name by `load`: `text.load_llm`, or `text.load`, which also loads text encoders.

    `predictor`, `throughput` and errors are as in `load_llm`.
    """
    if flags.model is not None and flags.run_dir is not None:
        raise ValueError(
            f"--model {flags.model} --run-dir {flags.run_dir}: only one model is loaded; leave one of the flags out."
        )
    source, plan = flags.source, _make_mesh_plan(flags)
    if flags.model is None or text.is_run(source):
        if flags.dtype is not None:
            raise ValueError(
                f"--dtype {flags.dtype}: a run's model has the dtype of its recipe; leave --dtype out, or convert the "
                "run (scripts/convert.py) and give --model."
            )
        RunDirectory(source).read()  # `read` raises errors that name the flags.
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
    """Return the plan of the flags' mesh; None for a single device."""
    if flags.mesh == Mesh() and flags.simulate is None:
        return None
    with_mesh = Recipe(RECIPES["default"]().model, mesh=flags.mesh, plan=parallel.ParallelConfig(zero=flags.zero))
    return setup.make_plan(with_mesh, run_devices(Machine(simulate=flags.simulate)))
