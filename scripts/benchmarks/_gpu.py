"""Rows for one GPU: attention's kernels one by one, training's share of the peak, and decoding, in bfloat16.

Each contender has the whole card, in a process of its own: JAX takes the memory when it starts, and PyTorch would have
the rest. Ours come first, so that a deadline leaves out PyTorch's.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _gpu_runs, _peers
from benchmarks._apart import apart
from benchmarks._gpu_runs import Card, Found, Way, Work
from benchmarks._measure import Row
from eqformer import models


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: by default for a GPU of 80 GB or more."""

    dense: tuple[str, ...] = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b")
    mixture: str = "olmoe-1b-7b"
    mixture_layers: int = 4
    lengths: tuple[int, ...] = (4096, 8192)
    tokens: int = 16_384
    """Of a step."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Of the attention that is measured alone: heads, key heads, channels."""
    decoded: tuple[str, ...] = ("llama-3.2-1b", "llama-3-8b")
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 128
    minutes: float = 9.0
    """Since the start: what is not done by then is ended or left out, and is a row that says so."""


class Task(NamedTuple):
    """What a process does: of which group, by whom, and what, given the ways in which models were trained."""

    group: str
    whom: str
    work: Callable[[dict[Work, Way]], Callable[[], Found]]
    trains: Work | None = None


def gpu(
    card: Card,
    rounds: int,
    folder: Path,
    sizes: Sizes = Sizes(),
    run: Callable[[Callable[[], Found], float], Found] = apart,
) -> Iterator[Row]:
    """Attention, training and decoding on one GPU, in bfloat16, against PyTorch where it is installed; a trace."""
    end, rounds = time.monotonic() + 60 * sizes.minutes, max(2, rounds // 3)
    memory = f"{card.name}; programs get {card.memory / 1e9:.1f} GB of memory"
    yield Row("peak", "product in bfloat16", card.peak / 1e12, "TFLOP/s", None, memory)
    ways: dict[Work, Way] = {}
    first: dict[str, Row] = {}
    for task in _tasks(sizes, card, rounds, folder):
        left = end - time.monotonic()
        if left <= 0:
            yield Row(task.group, task.whom, note=f"left out: {sizes.minutes:g} minutes are over")
            continue
        print(f"{task.group}, {task.whom} ({left:.0f} s are left)", file=sys.stderr, flush=True)
        try:
            work = task.work(ways)
            found = run(partial(_gpu_runs.by_pytorch, work) if task.whom == "PyTorch" else work, left)
        except Exception as error:  # of a process that ended, or was ended
            yield Row(task.group, task.whom, note=str(error))
            continue
        if task.trains is not None and found.way is not None:
            ways[task.trains] = found.way
        for row in found.rows:
            yield _beside(first, row)


def _tasks(sizes: Sizes, card: Card, rounds: int, folder: Path) -> list[Task]:
    """All that is to be done: by eqformer, then by PyTorch where it is installed."""
    per_step = lambda seq: max(1, sizes.tokens // seq)
    trained = [Work(name, per_step(sizes.lengths[0]), sizes.lengths[0]) for name in sizes.dense]
    trained += [Work(sizes.mixture, per_step(seq), seq, sizes.mixture_layers) for seq in sizes.lengths]
    trained += [Work(sizes.dense[0], per_step(seq), seq) for seq in sizes.lengths[1:]]
    decoding = sizes.batches, sizes.prompt, sizes.new, rounds
    tasks = []
    for whom in ("eqformer", "PyTorch") if _peers.are_installed() else ("eqformer",):
        peer = whom == "PyTorch"
        for seq in sizes.lengths:
            rows = per_step(seq)
            work = partial(_gpu_runs.attention, sizes.heads, rows, seq, rounds, peer=peer)
            tasks.append(Task(f"attention, {rows} x {seq} tokens", whom, lambda _, work=work: work))
        for its in trained:
            if peer and not isinstance(models.preset(its.preset), models.LlamaConfig):
                continue
            ours: Any = lambda _, its=its: partial(_gpu_runs.train, its, rounds, card.peak)
            theirs: Any = lambda ways, its=its: partial(_gpu_runs.train_peer, its, rounds, ways.get(its, Way()))
            tasks.append(Task(its.by(Way())[0], whom, theirs if peer else ours, its))
        for name in sizes.decoded:
            work = partial(_gpu_runs.decode, name, *decoding, peer=peer)
            tasks.append(Task(f"decode {name}", whom, lambda _, work=work: work))
        if not peer:
            work = partial(_gpu_runs.trace, trained[0], folder / "gpu-profile")
            tasks.append(Task("trace", str(folder / "gpu-profile"), lambda _, work=work: work))
    return tasks


def _beside(first: dict[str, Row], row: Row) -> Row:
    """A row with the ratio of the group's first rate to its own; `first` holds those that were seen."""
    if row.value is None or row.unit == "%":
        return row
    one = first.setdefault(row.group, row)
    return row if one is row else dataclasses.replace(row, ratio=(one.value or 0.0) / row.value)
