"""Write text with a trained or a published model: `python scripts/sample.py --run-dir runs/default --prompt "def "`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv, gradients=False)

import dataclasses
import datetime
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import tyro
from recipes import Mesh, Recipe
from support.command import entry
from support.kernel_report import DECODING, has_kernels, platform_here
from support.mesh import plan_of
from support.processes import devices_of, Machine
from support.published import companions_of, published_tokenizer, recipe_of_folder, Tokenizer, tokenizer_of
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import latest_model, shapes_of

from eqformer import data, generation, models, nn, parallel


OWN = Path("mtp")  # a draft that is the model's own predictor
COMPILED = 16  # tokens after which nothing is compiled any more: `generation.stream` gives 8 at a time


@dataclasses.dataclass(frozen=True)
class Command:
    """Write on from a prompt, or answer it, with the latest checkpoint of a run or with a published model."""

    run_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: runs/default)")] = None
    """The folder of the run."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder as published (safetensors, config.json, tokenizer.json) or a file of GGUF; a run's does as well."""
    prompt: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: one that fits the model)")] = None
    """What the text begins with; a question, where the model has a chat template."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether to ask in the model's chat template; auto asks so where it has one."""
    system: str | None = None
    """The system message of a chat, before the prompt."""
    tokens: int = 300
    """How many tokens to write; fewer if the model ends the text."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw from tokens at least this share as likely as the likeliest."""
    repetition_penalty: float | None = None
    """Above 1: make tokens that are already in the text less likely."""
    seed: int = 0
    """The same seed writes the same text."""
    dtype: str | None = None
    """A published model's dtype: float32 (fp32), bfloat16 (bf16), float16 (fp16); as it is published by default."""
    weights: Literal["decoded", "quantized"] = "decoded"
    """Whether a published model's quantized weights are decoded, or stay quantized in less memory."""
    cache_dtype: str | None = None
    """What keys and values are kept in: bfloat16, int8 or fp8, with scales, for long texts; as computed by default."""
    draft: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A run or a published folder with a smaller model, which proposes tokens, or mtp, the model's own predictor."""
    draft_tokens: int = 4
    """How many tokens the draft proposes at a time."""
    mesh: Mesh = Mesh()
    zero: Literal[0, 3] = 0
    """What is split over --mesh.fsdp: nothing, or (3) all weights, gathered when their layer's turn comes."""
    simulate: int | None = None
    """Have the CPU act as so many devices."""
    trust_recipe: bool = False
    """Run the code of a recipe of one's own that lies in a run's folder, where a class of the recipe needs it."""


@dataclasses.dataclass(frozen=True)
class Writer:
    """A model with its tokenizer."""

    model: generation.Model
    tokenizer: Tokenizer
    ends: list[int]
    folder: Path
    """The folder with the files that the model was published with, such as its chat template; it may not exist."""


def writer_of(command: Command) -> Writer:
    """The model that the command names, over its mesh; the text is the same on any mesh."""
    if command.model is not None and command.run_dir is not None:
        raise ValueError(
            f"--model {command.model} --run-dir {command.run_dir}: one model writes; leave one of them out."
        )
    if command.model is not None and not RunDirectory(command.model).recipe.exists():
        return of_folder(command, command.model)
    if command.dtype is not None:
        raise ValueError(
            f"--dtype {command.dtype}: a run's model is computed in what its recipe says; leave it out, or write "
            "the model out (scripts/convert.py) and give --model."
        )
    if command.weights != "decoded":
        raise ValueError(f"--weights {command.weights}: a run's weights are in no fewer bits; leave it out.")
    return of_run(command, command.model or command.run_dir or Path("runs/default"))


def draft_of(command: Command, writer: Writer) -> generation.Model | str | None:
    """The model that proposes tokens; raises a `ValueError` if its tokenizer reads the prompt as other ids."""
    if command.draft is None:
        return None
    if command.draft == OWN:
        return str(OWN)
    is_run = RunDirectory(command.draft).recipe.exists()
    decoded = dataclasses.replace(command, weights="decoded")  # a draft is small
    draft = (of_run if is_run else of_folder)(decoded, command.draft)
    prompt = command.prompt or ""
    ids, own = (one.tokenizer.encode(prompt).tolist() for one in (draft, writer))
    if ids != own:
        raise ValueError(
            f"--draft {command.draft}: its tokenizer gives the prompt {len(ids)} ids, which are not the {len(own)} of "
            "the model's; give a model of the same tokenizer."
        )
    return draft.model


def of_folder(command: Command, folder: Path) -> Writer:
    """The model of a folder as published."""
    if command.weights == "quantized" and folder.is_file():
        raise ValueError(
            f"--weights quantized --model {folder}: the blocks of a GGUF file are decoded; leave out --weights, and "
            "give --dtype bfloat16 for half the memory of float32."
        )
    dtype = None if command.dtype is None else nn.float_dtype(command.dtype, f"--dtype {command.dtype}")
    plan, companions = plan_for(command, recipe_of_folder(folder)), companions_of(folder)
    tokenizer = published_tokenizer(companions)
    with Screen(errors=True).bar() as progress:
        show = functools.partial(progress, f"reading {folder}")
        given: dict[str, Any] = {"weights": command.weights, "predictor": command.draft == OWN, "progress": show}
        model = models.load(folder, plan=plan, dtype=dtype, **given)
    return _writer(model, plan, tokenizer, companions)


def of_run(command: Command, folder: Path) -> Writer:
    """The latest model of a run."""
    directory = RunDirectory(folder)
    _, recipe = directory.read()
    plan, tokenizer = plan_for(command, recipe), tokenizer_of(recipe, directory)
    return _writer(latest_model(directory, recipe, plan), plan, tokenizer, directory.published)


def _writer(model: nn.Transformer, plan: parallel.Plan | None, tokenizer: Tokenizer, folder: Path) -> Writer:
    return Writer(
        served(model, plan), tokenizer, sorted({tokenizer.end_of_text, *models.read_eos_token_ids(folder)}), folder
    )


def served(model: nn.Transformer, plan: parallel.Plan | None) -> generation.Model:
    """The model as it decodes in place on its devices, under the plan if there is one."""
    here = jax.default_backend(), jax.devices()[0].device_kind
    if plan is None:
        return generation.unstack_for_platform(model, *here)
    if not plan.is_pipelined:
        split = plan.mesh.shape["tensor"] * plan.mesh.shape["fsdp"]
        arrays, rest = eqx.partition(generation.unstack_for_platform(model, *here, devices=split), eqx.is_array)
        model = eqx.combine(jax.device_put(arrays, parallel.shardings(plan.parameter_specs(arrays), plan.mesh)), rest)
    return parallel.ShardedModel(model, plan)


def plan_for(command: Command, recipe: Recipe) -> parallel.Plan | None:
    """The plan of the command's mesh, None for one device; raises a `ValueError` if the model does not suit it."""
    if command.mesh == Mesh() and command.simulate is None:
        return None
    asked = Recipe(recipe.model, mesh=command.mesh, plan=parallel.ParallelConfig(zero=command.zero))
    plan = plan_of(asked, devices_of(Machine(simulate=command.simulate)))
    parallel.ShardedModel(shapes_of(recipe), plan)
    return plan


def is_chat(command: Command, writer: Writer) -> bool:
    """Return whether the prompt is asked in the model's chat template."""
    return command.chat == "yes" or (command.chat == "auto" and data.has_chat_template(writer.folder))


def default_prompt(command: Command, writer: Writer) -> str:
    """Return a prompt that fits the model: a question in a chat, else the beginning of what it was trained on."""
    if is_chat(command, writer):
        return "Why is the sky blue?"
    return "Once upon a time" if writer.folder.is_dir() else "def "


def prompt_of(command: Command, writer: Writer) -> tuple[str, list[int]]:
    """The part of the prompt that is printed, and its ids."""
    prompt, chat = command.prompt or "", is_chat(command, writer)
    if not chat and command.system is not None:
        raise ValueError(
            f"--system {command.system!r}: only a chat has a system message; leave it out, or give --chat yes."
        )
    tokenizer = writer.tokenizer
    if chat:
        system = [] if command.system is None else [{"role": "system", "content": command.system}]
        template = data.ChatTemplate(writer.folder, now=datetime.datetime.now)
        text = template.render([*system, {"role": "user", "content": prompt}])
        return "", tokenizer.encode_prompt(text, add_special_tokens=False).tolist()
    encode = tokenizer.encode_prompt if writer.folder.is_dir() else tokenizer.encode
    ids = encode(prompt).tolist()
    shown = prompt if writer.model.start is None else ""  # what an encoder reads is no part of the text
    return shown, ids or [tokenizer.end_of_text]


def write(command: Command) -> None:
    """Stream the text to standard output."""
    writer = writer_of(command)
    if command.prompt is None:
        command = dataclasses.replace(command, prompt=default_prompt(command, writer))
        Screen(errors=True).note(f"prompt: {command.prompt} (--prompt gives another)")
    if has_kernels(platform_here()):
        Screen(errors=True).note(DECODING)
    shown, prompt = prompt_of(command, writer)
    ids = generation.stream(
        writer.model,
        prompt,
        max_new_tokens=command.tokens,
        transforms=generation.sampling(
            temperature=command.temperature,
            top_k=command.top_k,
            top_p=command.top_p,
            min_p=command.min_p,
            repetition_penalty=command.repetition_penalty,
        ),
        end_of_text=writer.ends,
        cache_dtype=command.cache_dtype,
        draft=draft_of(command, writer),
        draft_tokens=command.draft_tokens,
        key=jax.random.key(command.seed),
    )
    text = data.TextStream(writer.tokenizer)
    sys.stdout.write(shown)
    begun, times = time.monotonic(), list[float]()
    for number in ids:
        times.append(time.monotonic())
        sys.stdout.write(text.push(number))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
    sys.stdout.flush()
    Screen(errors=True).note(speed(begun, times))
    if (drafted := ids.draft) is not None:
        Screen(errors=True).note(
            f"draft: {drafted.acceptance:.0%} of {drafted.proposed.sum()} proposed tokens taken, "
            f"{drafted.tokens_per_step:.2f} tokens a step"
        )


def speed(begun: float, times: Sequence[float]) -> str:
    """Return a line on the time that a text took, of the times at which its tokens came.

    Both programs, for the first tokens and for those that follow, are compiled before token `COMPILED` comes.
    """
    if not times:
        return "0 tokens"
    line = f"{len(times):,} tokens in {times[-1] - begun:,.1f} s, the first after {times[0] - begun:,.1f} s"
    if len(times) <= COMPILED or times[-1] <= times[COMPILED - 1]:
        return line
    rate = (len(times) - COMPILED) / (times[-1] - times[COMPILED - 1])
    return f"{line}; {rate:,.1f} tokens/s once compiled"


main = entry(Command, write)

if __name__ == "__main__":
    main(sys.argv[1:])
