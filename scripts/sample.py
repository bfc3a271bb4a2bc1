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

import jax
import tyro
from recipes import Mesh, Recipe
from support.command import entry
from support.kernel_report import DECODING, has_kernels, local_platform
from support.processes import Machine, run_devices
from support.published import companion_folder, published_recipe, published_tokenizer, recipe_tokenizer, Tokenizer
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import load_latest_model, make_plan, model_shapes

from eqformer import data, generation, models, nn, parallel


PREDICTOR = Path("mtp")  # The draft of this name is the model's own predictor.
COMPILED = 16  # Tokens after which nothing is compiled any more: `generation.stream` gives 8 at a time.


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
    """Dtype of cached keys and values: bfloat16, int8 or fp8, with scales, for long texts; as computed by default."""
    draft: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A run or a published folder with a smaller model, which proposes tokens, or mtp, the model's own predictor."""
    draft_tokens: int = 4
    """How many tokens the draft proposes at a time."""
    mesh: Mesh = Mesh()
    zero: Literal[0, 3] = 0
    """Split over --mesh.fsdp nothing (0), or all weights (3), which are gathered when their layer runs."""
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
    """Ids that end a text."""
    folder: Path
    """The folder with the files that the model was published with, such as its chat template; it may not exist."""


def load_writer(command: Command) -> Writer:
    """Load the model that the command names, over its mesh; the text is the same on any mesh."""
    if command.model is not None and command.run_dir is not None:
        raise ValueError(
            f"--model {command.model} --run-dir {command.run_dir}: one model writes; leave one of them out."
        )
    if command.model is not None and not RunDirectory(command.model).recipe.exists():
        return load_published(command, command.model)
    if command.dtype is not None:
        raise ValueError(
            f"--dtype {command.dtype}: a run's model is computed in what its recipe says; leave it out, or write "
            "the model out (scripts/convert.py) and give --model."
        )
    if command.weights != "decoded":
        raise ValueError(f"--weights {command.weights}: a run's weights are in no fewer bits; leave it out.")
    return load_run(command, command.model or command.run_dir or Path("runs/default"))


def load_draft(command: Command, writer: Writer) -> generation.Model | str | None:
    """Load the model that proposes tokens; raises a `ValueError` if its tokenizer reads the prompt as other ids."""
    if command.draft is None:
        return None
    if command.draft == PREDICTOR:
        return str(PREDICTOR)
    load = load_run if RunDirectory(command.draft).recipe.exists() else load_published
    draft = load(dataclasses.replace(command, weights="decoded"), command.draft)  # Drafts are small.
    prompt = command.prompt or ""
    draft_ids, ids = (reader.tokenizer.encode(prompt).tolist() for reader in (draft, writer))
    if draft_ids != ids:
        raise ValueError(
            f"--draft {command.draft}: its tokenizer gives the prompt {len(draft_ids)} ids, which are not the "
            f"{len(ids)} of the model's; give a model of the same tokenizer."
        )
    return draft.model


def load_published(command: Command, folder: Path) -> Writer:
    """Load the model of a folder as published."""
    if command.weights == "quantized" and folder.is_file():
        raise ValueError(
            f"--weights quantized --model {folder}: the blocks of a GGUF file are decoded; leave out --weights, and "
            "give --dtype bfloat16 for half the memory of float32."
        )
    dtype = None if command.dtype is None else nn.float_dtype(command.dtype, f"--dtype {command.dtype}")
    plan, companions = plan_for(command, published_recipe(folder)), companion_folder(folder)
    tokenizer = published_tokenizer(companions)
    with Screen(errors=True).bar() as progress:
        show = functools.partial(progress, f"reading {folder}")
        options: dict[str, Any] = {"weights": command.weights, "predictor": command.draft == PREDICTOR}
        model = models.load(folder, plan=plan, dtype=dtype, progress=show, **options)
    return _make_writer(model, plan, tokenizer, companions)


def load_run(command: Command, folder: Path) -> Writer:
    """Load the latest model of a run."""
    directory = RunDirectory(folder)
    _, recipe = directory.read()
    plan, tokenizer = plan_for(command, recipe), recipe_tokenizer(recipe, directory)
    return _make_writer(load_latest_model(directory, recipe, plan), plan, tokenizer, directory.published)


def _make_writer(model: nn.Transformer, plan: parallel.Plan | None, tokenizer: Tokenizer, folder: Path) -> Writer:
    ends = sorted({tokenizer.end_of_text, *models.read_eos_token_ids(folder)})
    return Writer(prepare_to_decode(model, plan), tokenizer, ends, folder)


def prepare_to_decode(model: nn.Transformer, plan: parallel.Plan | None) -> generation.Model:
    """Return the model as it decodes fastest on the devices where it is, under the plan if there is one."""
    platform, chip = jax.default_backend(), jax.devices()[0].device_kind
    if plan is None:
        return generation.unstack_for_platform(model, platform, chip)
    if not plan.is_pipelined:
        split = plan.size(parallel.TENSOR) * plan.size(parallel.FSDP)
        model = plan.shard(generation.unstack_for_platform(model, platform, chip, devices=split))
    return parallel.ShardedModel(model, plan)


def plan_for(command: Command, recipe: Recipe) -> parallel.Plan | None:
    """Return the plan of the command's mesh, None for one device; a `ValueError` if the model does not suit it."""
    if command.mesh == Mesh() and command.simulate is None:
        return None
    with_mesh = Recipe(recipe.model, mesh=command.mesh, plan=parallel.ParallelConfig(zero=command.zero))
    plan = make_plan(with_mesh, run_devices(Machine(simulate=command.simulate)))
    parallel.ShardedModel(model_shapes(recipe), plan)
    return plan


def is_chat(command: Command, writer: Writer) -> bool:
    """Return whether the prompt is asked in the model's chat template."""
    return command.chat == "yes" or (command.chat == "auto" and data.has_chat_template(writer.folder))


def default_prompt(command: Command, writer: Writer) -> str:
    """Return a prompt that fits the model: a question in a chat, else the beginning of what it was trained on."""
    if is_chat(command, writer):
        return "Why is the sky blue?"
    return "Once upon a time" if writer.folder.is_dir() else "def "


def encode_prompt(command: Command, writer: Writer) -> tuple[str, list[int]]:
    """Return the part of the prompt that is printed, and the prompt's ids."""
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
    shown = prompt if writer.model.start is None else ""  # The text that an encoder reads is not written on.
    return shown, ids or [tokenizer.end_of_text]


def write(command: Command) -> None:
    """Stream the text to standard output."""
    writer, screen = load_writer(command), Screen(errors=True)
    if command.prompt is None:
        command = dataclasses.replace(command, prompt=default_prompt(command, writer))
        screen.note(f"prompt: {command.prompt} (--prompt gives another)")
    if has_kernels(local_platform()):
        screen.note(DECODING)
    shown, prompt = encode_prompt(command, writer)
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
        draft=load_draft(command, writer),
        draft_tokens=command.draft_tokens,
        key=jax.random.key(command.seed),
    )
    text = data.TextStream(writer.tokenizer)
    sys.stdout.write(shown)
    start, times = time.monotonic(), list[float]()
    for number in ids:
        times.append(time.monotonic())
        sys.stdout.write(text.push(number))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
    sys.stdout.flush()
    screen.note(speed_line(start, times))
    if (draft := ids.draft) is not None:
        screen.note(
            f"draft: {draft.acceptance:.0%} of {draft.proposed.sum()} proposed tokens taken, "
            f"{draft.tokens_per_step:.2f} tokens a step"
        )


def speed_line(start: float, times: Sequence[float]) -> str:
    """Return a line on the time that a text took, from the times at which its tokens came.

    Both programs, for the first tokens and for those that follow, are compiled before token `COMPILED` comes.
    """
    if not times:
        return "0 tokens"
    line = f"{len(times):,} tokens in {times[-1] - start:,.1f} s, the first after {times[0] - start:,.1f} s"
    if len(times) <= COMPILED or times[-1] <= times[COMPILED - 1]:
        return line
    rate = (len(times) - COMPILED) / (times[-1] - times[COMPILED - 1])
    return f"{line}; {rate:,.1f} tokens/s once compiled"


main = entry(Command, write)

if __name__ == "__main__":
    main(sys.argv[1:])
