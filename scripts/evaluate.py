"""Score a model: `python scripts/evaluate.py --model M --text FILES` or `--tasks NAMES`."""

import sys

from support import environment


if __name__ == "__main__":
    environment.prepare(sys.argv, gradients=False)

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from support.command import entry
from support.load import apply_blocks, load_llm, ModelFlags

from eqformer import data, evaluation, generation, write_atomic
from eqformer.recipes import Screen
from eqformer.text import LLM


@dataclasses.dataclass(frozen=True)
class Command(ModelFlags):
    """Compute the perplexity of texts, or run tasks of lm-evaluation-harness, with a run's or a published model."""

    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Files, folders or datasets of the hub; each of their tokens is scored once, each document by itself."""
    field: str = "text"
    """The field of .jsonl and .parquet rows that holds the text."""
    window: int | None = None
    """How many tokens the model reads at once; by default its published length, but at most 1,024."""
    stride: int | None = None
    """Tokens from the beginning of a window to the beginning of the next; by default half a window."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Tasks of lm-evaluation-harness (extra `eval`)."""
    include_path: Path | None = None
    """A folder with configurations of further tasks."""
    num_fewshot: int | None = None
    """Examples before each question; the task's own number by default."""
    limit: int | None = None
    """How many documents of each task are evaluated; all by default."""
    max_length: int | None = None
    """The maximum number of tokens that the model reads for a task; by default its published length, or 2,048."""
    chat: bool = False
    """Use the model's chat template."""
    batch: int = 8
    """The number of rows that are read together."""
    blocks: generation.BlockSampler = generation.BlockSampler()
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Also write the scores to this file."""


def evaluate(command: Command) -> None:
    """Score the model as the command says, and print a line for the texts and for each task."""
    if not command.text and not command.tasks:
        raise ValueError("evaluate.py: there is nothing to score; give --text FILES or --tasks NAMES.")
    if command.batch < 1:
        raise ValueError(f"--batch {command.batch}: give a number of rows, at least 1.")
    source = data.files(list(command.text), field=command.field, piece=sys.maxsize) if command.text else None
    tasks = load_tasks(command)
    # Tasks that generate text run for so long that speed matters more than compilation time.
    llm = apply_blocks(load_llm(command, throughput=any(map(generates_text, tasks))), command.blocks)
    figures: dict[str, dict[str, float]] = {}
    if source is not None:
        figures["text"] = score_texts(command, llm, source)
    if tasks:
        figures |= score_tasks(command, llm, tasks)
    for name, values in figures.items():
        shown = "  ".join(f"{metric} {value:.6g}" for metric, value in values.items())
        print(f"{name:<20} {shown}")
    if command.out is not None:
        write_atomic(command.out, json.dumps(figures, indent=2) + "\n")


def score_texts(command: Command, llm: LLM, source: data.TextSource) -> dict[str, float]:
    """Return the scores of the texts, by name."""
    with Screen(errors=True).bar() as progress:
        scores = evaluation.evaluate_texts(
            llm,
            (document.text for document in source),
            window=command.window,
            stride=command.stride,
            batch_size=command.batch,
            progress=lambda done, total: progress("windows", done, total),
        )
    return {
        "perplexity": scores.perplexity,
        "bits_per_byte": scores.bits_per_byte,
        "accuracy": scores.accuracy,
        "tokens": scores.tokens,
    }


def load_tasks(command: Command) -> list[Any]:
    """Load the command's tasks; raises a `ValueError` that names the flag."""
    try:
        return evaluation.load_tasks(command.tasks, include_path=command.include_path)
    except ValueError as error:
        raise ValueError(f"--tasks {' '.join(command.tasks)}: {error}") from error


def generates_text(task: Any) -> bool:
    """Return whether a loaded task, or a task of a loaded group, generates text."""
    single_tasks = task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]
    return any(getattr(single, "OUTPUT_TYPE", None) == "generate_until" for single in single_tasks)


def score_tasks(command: Command, llm: LLM, tasks: list[Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task and, if several tasks have an accuracy, average accuracies."""
    with Screen(errors=True).bar() as progress:
        results = evaluation.evaluate_tasks(
            llm,
            tasks,
            num_fewshot=command.num_fewshot,
            limit=command.limit,
            apply_chat_template=command.chat,
            batch_size=command.batch,
            max_length=command.max_length,
            progress=progress,
        )
    figures = {name: dict(values) for name, values in results.metrics.items()}
    average = results.average
    if average is not None and len(average.chances) > 1:
        accuracies = {"accuracy": average.accuracy, "centered_accuracy": average.centered_accuracy}
        figures["average"] = accuracies | {"tasks": len(average.chances)}
    return figures


main = entry(Command, evaluate)

if __name__ == "__main__":
    main(sys.argv[1:])
