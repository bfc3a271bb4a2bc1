"""Write text with a trained or a published model: `python scripts/sample.py --run-dir runs/default --prompt "def "`.

`--prompts FILE.jsonl --out FILE.jsonl` writes a text for each row of a file.
"""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv, gradients=False)

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from support.command import entry
from support.load import apply_blocks, load_llm, ModelFlags

from eqformer import generation, text
from eqformer.recipes import report, Screen


PREDICTOR = Path("mtp")  # `--draft mtp` names the model's own predictor.
MANY_STEPS = 1024  # For this many decoding steps or more, a faster program is worth a longer compilation.
COMPILED = 16  # After this many tokens all programs are compiled: `generation.stream` yields 8 tokens at a time.


@dataclasses.dataclass(frozen=True)
class Command(ModelFlags):
    """Continue a prompt, or answer it, with the latest checkpoint of a run or with a published model."""

    prompt: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: one that fits the model)")] = None
    """The beginning of the text; a question, if the model has a chat template."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether to use the model's chat template; auto uses it if the model has one."""
    system: str | None = None
    """The system message of a chat, before the prompt."""
    tokens: int = 300
    """How many tokens to write; fewer if the model ends the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before them."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 samples from the model's own distribution."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least this share of the largest probability."""
    repetition_penalty: float | None = None
    """A number above 1 makes tokens that are already in the text less likely."""
    seed: int = 0
    """The same seed writes the same text."""
    cache_dtype: str | None = None
    """Dtype of cached keys and values: bfloat16, int8 or fp8 suit long texts; by default the compute dtype."""
    draft: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Proposes tokens: a run or a published folder with a smaller model, or mtp, the model's own predictor."""
    draft_tokens: int = 4
    """How many tokens the draft proposes at a time."""
    blocks: generation.BlockSampler = generation.BlockSampler()
    prompts: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """Rows {"prompt": "..."} or {"messages": [...]}, with optional settings of the row, such as {"temperature": 0}."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """The file to which the texts of --prompts are written; the same command continues a file that is incomplete."""
    best_of: int = 1
    """How many texts to write for each row of --prompts; the likeliest text comes first."""
    log_probs: bool = False
    """Whether to also write the ids of the texts of --prompts, with the log-probability of each id."""
    slots: int = 8
    """How many texts of --prompts are generated at once."""
    capacity: int = 2048
    """The largest number of tokens of a prompt of --prompts and its text together."""


def count_steps(command: Command) -> int:
    """Return about how many decoding steps the texts take; each step adds a token to each of `--slots` texts."""
    if command.prompts is None:
        return command.tokens
    texts = text.count_prompts(command.prompts) * command.best_of
    return command.tokens * math.ceil(texts / max(command.slots, 1))


def load_model(command: Command) -> text.LLM:
    """Load the model that writes the text, and build the kernel for its quantized weights."""
    llm = load_llm(command, predictor=command.draft == PREDICTOR, throughput=count_steps(command) >= MANY_STEPS)
    llm = apply_blocks(llm, command.blocks)
    text.build_kernels(llm.model)
    return llm


def load_draft(command: Command) -> text.LLM | str | None:
    """Load the draft model, which proposes tokens; "mtp" for the model's own predictor, None for no draft."""
    if command.draft is None or command.draft == PREDICTOR:
        return None if command.draft is None else str(PREDICTOR)
    # A run has the dtype of its recipe, and --dtype does not apply. Drafts are small, so their weights are decoded.
    dtype = None if text.is_run(command.draft) else command.dtype
    return load_llm(dataclasses.replace(command, model=command.draft, run_dir=None, dtype=dtype, weights="decoded"))


def is_chat(command: Command, llm: text.LLM) -> bool:
    """Return whether the prompt is put into the model's chat template."""
    return command.chat == "yes" or (command.chat == "auto" and llm.chat_template is not None)


def default_prompt(command: Command, llm: text.LLM) -> str:
    """Return a prompt that fits the model: a question for a chat, or else the beginning of a text or a program."""
    if is_chat(command, llm):
        return "Why is the sky blue?"
    return "Once upon a time" if llm.special_tokens else "def "


def settings(command: Command) -> dict[str, Any]:
    """Return the settings of generation that the command's flags choose."""
    return {
        "max_new_tokens": command.tokens,
        "stop": command.stop,
        "temperature": command.temperature,
        "top_k": command.top_k,
        "top_p": command.top_p,
        "min_p": command.min_p,
        "repetition_penalty": command.repetition_penalty,
        "seed": command.seed,
    }


def to_messages(command: Command, prompt: str) -> list[dict[str, str]]:
    """Return the messages of a chat in which the user's message is the prompt."""
    system = [] if command.system is None else [{"role": "system", "content": command.system}]
    return [*system, {"role": "user", "content": prompt}]


def check_system(command: Command, llm: text.LLM) -> None:
    """Raise a `ValueError` for a system message without a chat."""
    if command.system is not None and not is_chat(command, llm):
        raise ValueError(
            f"--system {command.system!r}: only a chat has a system message; leave --system out, or give --chat yes."
        )


def start_text(command: Command, llm: text.LLM, prompt: str) -> text.StreamedText:
    """Start to generate the command's text, and return it as a stream of pieces."""
    options: Any = settings(command) | {
        "cache_dtype": command.cache_dtype,
        "draft": load_draft(command),
        "draft_tokens": command.draft_tokens,
    }
    check_system(command, llm)
    if is_chat(command, llm):
        return llm.chat(to_messages(command, prompt), stream=True, **options)
    return llm.generate(prompt, stream=True, **options)


def write_file(command: Command, prompts: Path, out: Path) -> None:
    """Write a text for each row of a file."""
    llm, screen = load_model(command), Screen(errors=True)
    check_system(command, llm)
    engine = llm.engine(
        slots=command.slots,
        capacity=command.capacity,
        cache_dtype=command.cache_dtype,
        draft=load_draft(command),
        draft_tokens=command.draft_tokens,
        throughput=count_steps(command) >= MANY_STEPS,
    )
    screen.note(f"{command.slots} texts at once, with caches of {engine.cache_bytes / 1e6:,.0f} MB; reading {prompts}")
    start = time.monotonic()
    with screen.counting() as show:
        summary = text.complete_file(
            engine,
            prompts,
            out,
            request=text.TextRequest("", **settings(command)),
            ask=lambda prompt: to_messages(command, prompt) if is_chat(command, llm) else prompt,
            best_of=command.best_of,
            log_probs=command.log_probs,
            fingerprint=f"{command.model or command.run_dir} {command.dtype} {command.weights} {command.cache_dtype} "
            f"{command.draft} {command.chat} {command.system}"
            + ("" if command.blocks == generation.BlockSampler() else f" {command.blocks}"),
            progress=lambda done, total: show("rows", done, total),
        )
    seconds = time.monotonic() - start
    screen.note(
        f"{out}: {summary.rows} rows, {summary.kept} of them from before, {summary.errors} new rows with errors; "
        f"{summary.tokens:,} tokens in {seconds:,.1f} s ({summary.tokens / seconds:,.1f} tokens/s)"
    )


def write(command: Command) -> None:
    """Stream the text to standard output, or write a file of texts."""
    if command.prompts is not None and command.out is not None and command.prompt is None:
        return write_file(command, command.prompts, command.out)
    if command.prompts is not None or command.out is not None:
        raise ValueError(
            f"--prompts {command.prompts} --out {command.out} --prompt {command.prompt}: --prompts and --out belong "
            "together, and exclude --prompt; give both of the first two flags, or neither."
        )
    llm, screen = load_model(command), Screen(errors=True)
    prompt = command.prompt
    if prompt is None:
        prompt = default_prompt(command, llm)
        screen.note(f"prompt: {prompt} (give another by --prompt)")
    if report.has_kernels(report.local_platform()):
        screen.note(report.DECODING)
    pieces = start_text(command, llm, prompt)
    # An answer, and the text of a model with an encoder, do not continue the prompt.
    if not is_chat(command, llm) and llm.model.start is None:
        sys.stdout.write(prompt)
    start, times = time.monotonic(), list[float]()
    for piece in pieces:
        times += [time.monotonic()] * (len(pieces.ids) - len(times))
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    screen.note(speed_line(start, times))
    if (draft := pieces.draft) is not None:
        screen.note(
            f"draft: {draft.acceptance:.0%} of {draft.proposed.sum()} proposed tokens taken, "
            f"{draft.tokens_per_step:.2f} tokens a step"
        )


def speed_line(start: float, times: Sequence[float]) -> str:
    """Return a line about the time that a text took; `times` has the time at which each token came.

    The programs for the first tokens and for later tokens are both compiled before token number `COMPILED` comes.
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
