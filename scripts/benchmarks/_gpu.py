"""Rows for one GPU, in bfloat16: accuracy and speed of kernels, training's share of the peak, and decoding.

Each contender has the whole GPU, in a separate process: JAX takes the memory when it starts, and would leave too little
memory to PyTorch. While a process works, the next process starts and imports its modules. The most important rows come
first, because the last rows are left out if the time is over. A model's training step by PyTorch comes after
eqformer's step, which finds the settings that fit into the memory.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _gpu_numbers, _gpu_runs, _peers
from benchmarks._apart import SeparateProcess, share_kernel_choices
from benchmarks._gpu_runs import Card, Result, Way, Work
from benchmarks._measure import Row
from eqformer import models


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Models and sizes to measure; the defaults are for a GPU of 80 GB or more."""

    dense: tuple[str, ...] = ("qwen3-0.6b", "llama-3-8b", "llama-3.2-3b")
    mixture: str = "olmoe-1b-7b"
    mixture_layers: int = 4
    lengths: tuple[int, ...] = (4096, 8192)
    tokens: int = 16_384
    """Tokens of a step."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Heads, key heads and channels of the attention that is measured without a model."""
    decoded: tuple[str, ...] = ("llama-3-8b", "llama-3.2-1b")
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 128
    step_layers: int = 8
    """The number of layers in `gpu_steps`, which decodes with quantized weights."""
    checked: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `_gpu_numbers.numbers`."""
    minutes: float = 9.0
    """Work that is not done after this number of minutes is stopped or left out; a row says so."""


Run = Callable[[Callable[[], Result], float], Result]


class Task(NamedTuple):
    """The work of one process, which measures a contender."""

    group: str
    """The group of the rows that are measured."""
    contender: str
    work: Callable[[dict[Work, Way]], Callable[[], Result]]
    """Function that receives the settings with which earlier training fitted into memory, and returns the work."""
    trains: Work | None = None
    """The training that is measured, if any; its settings are kept for later tasks."""


def gpu(
    card: Card,
    rounds: int,
    folder: Path,
    sizes: Sizes = Sizes(),
    start: Callable[..., Run] = SeparateProcess,
) -> Iterator[Row]:
    """Kernels, training and decoding on one GPU, in bfloat16, beside PyTorch if it is installed; and a trace."""
    end, rounds = time.monotonic() + 60 * sizes.minutes, max(2, rounds // 3)
    memory = f"{card.name}; programs get {card.memory / 1e9:.1f} GB of memory"
    yield Row("peak", "product in bfloat16", card.peak / 1e12, "TFLOP/s", None, memory)
    ways: dict[Work, Way] = {}
    first: dict[str, Row] = {}
    start_process = lambda task: start(*_imports(task)) if time.monotonic() < end else None
    with (
        share_kernel_choices(),
        contextlib.closing(_start_ahead(_tasks(sizes, card, rounds, folder), start_process)) as started,
    ):
        for task, run in started:
            seconds = end - time.monotonic()
            if seconds <= 0 or run is None:
                yield Row(task.group, task.contender, note=f"left out after {sizes.minutes:g} minutes")
                continue
            print(f"{task.group}, {task.contender} ({seconds:.0f} s are left)", file=sys.stderr, flush=True)
            try:
                work = task.work(ways)
                result = run(partial(_gpu_runs.run_on_cpu, work) if task.contender == "PyTorch" else work, seconds)
            except Exception as error:  # The process failed, or took too long.
                yield Row(task.group, task.contender, note=str(error))
                continue
            if task.trains is not None and result.way is not None:
                ways[task.trains] = result.way
            for row in result.rows:
                yield _with_ratio(first, row)


def gpu_steps(
    card: Card,
    rounds: int,
    folder: Path,
    sizes: Sizes = Sizes(),
    start: Callable[..., Run] = SeparateProcess,
) -> Iterator[Row]:
    """Decode steps on one GPU, with weights in bfloat16 and with quantized weights; without the prompt's time."""
    name, batch = sizes.decoded[0], sizes.batches[-1]
    rounds = max(2, rounds // 3)
    steps = partial(_gpu_runs.decode_steps, name, sizes.step_layers, batch, sizes.prompt, sizes.new, rounds)
    yield from start(_gpu_runs.__name__)(steps, 60 * sizes.minutes).rows


def _start_ahead(tasks: list[Task], start_process: Callable[[Task], Run | None]) -> Generator[tuple[Task, Run | None]]:
    """Yield the tasks, each with its process, while the process of the next task starts."""
    following = start_process(tasks[0])
    try:
        for task, next_task in zip(tasks, [*tasks[1:], None]):
            run, following = following, None if next_task is None else start_process(next_task)
            try:
                yield task, run
            finally:
                _close(run)
    finally:
        _close(following)


def _imports(task: Task) -> tuple[str, ...]:
    return (_gpu_runs.__name__, *(("torch", "transformers") if task.contender == "PyTorch" else ()))


def _close(run: Any) -> None:
    """End a process; do nothing for a function that replaces a process in tests."""
    if isinstance(run, SeparateProcess):
        run.close()


def _tasks(sizes: Sizes, card: Card, rounds: int, folder: Path) -> list[Task]:
    """Return all tasks, the most important first; PyTorch's tasks, if it is installed, follow eqformer's."""
    peers = ("PyTorch",) if _peers.are_installed() else ()
    contenders, rows_per_step = ("eqformer", *peers), lambda seq: max(1, sizes.tokens // seq)
    work = lambda name, seq, layers=None: Work(name, rows_per_step(seq), seq, layers)
    shortest, *longer = sizes.lengths

    def attention(seq: int) -> list[Task]:
        # Attention without a kernel takes the longest to compile, so it is measured at one length only.
        kernel_alone = seq != shortest
        run = partial(_gpu_runs.attention, sizes.heads, rows_per_step(seq), seq, rounds, kernel_alone=kernel_alone)
        group = f"attention, {rows_per_step(seq)} x {seq} tokens"
        return [_peer_task(group, contender, run) for contender in contenders]

    def training(model: Work) -> list[Task]:
        group = model.by(Way())[0]
        tasks = [Task(group, "eqformer", lambda _: partial(_gpu_runs.train, model, rounds, card.peak), model)]
        if peers and type(models.preset(model.preset)) in _peers.KINDS:
            by_peer: Any = lambda ways: partial(_gpu_runs.train_peer, model, rounds, ways.get(model, Way()))
            tasks.append(Task(group, "PyTorch", by_peer, model))
        return tasks

    def decoding(name: str, batch: int, names: tuple[str, ...]) -> list[Task]:
        run = partial(_gpu_runs.decode, name, batch, sizes.prompt, sizes.new, rounds)
        group = f"decode {name}, batch {batch}"
        return [_peer_task(group, contender, run) for contender in names]

    checked = partial(_gpu_numbers.numbers, **sizes.checked)
    small, *larger = sizes.dense
    first, decoded = work(small, shortest), sizes.decoded[0]
    mixtures = [work(sizes.mixture, seq, sizes.mixture_layers) for seq in sizes.lengths]
    unrolled = partial(_gpu_runs.train, first, rounds, card.peak, unrolled=True)
    traced = partial(_gpu_runs.trace, first, folder / "gpu-profile")
    return [
        Task(_gpu_numbers.GROUP, "eqformer", lambda _: partial(_gpu_runs.run_without_autotuning, checked)),
        *attention(shortest),
        *training(first),
        *(task for name in larger[:1] for task in training(work(name, shortest))),
        *(task for batch in sizes.batches for task in decoding(decoded, batch, contenders[:1])),
        *training(mixtures[0]),
        *(task for seq in longer for task in (*attention(seq), *training(work(small, seq)))),
        *(task for mixture in mixtures[1:] for task in training(mixture)),
        Task(first.by(Way())[0], "eqformer, unrolled", lambda _: unrolled),
        Task("trace", str(folder / "gpu-profile"), lambda _: traced),
        *(task for batch in sizes.batches for task in decoding(decoded, batch, peers)),
        *(task for name in larger[1:] for task in training(work(name, shortest))),
        *(task for name in sizes.decoded[1:] for batch in sizes.batches for task in decoding(name, batch, contenders)),
    ]


def _peer_task(group: str, contender: str, run: Callable[..., Result]) -> Task:
    return Task(group, contender, lambda _: partial(run, peer=contender == "PyTorch"))


def _with_ratio(first: dict[str, Row], row: Row) -> Row:
    """Return a row with a ratio: the rate of its group's first row over its own; `first` has the groups' first rows."""
    if row.value is None or row.unit in ("%", _gpu_numbers.UNIT):
        return row
    first_row = first.setdefault(row.group, row)
    return row if first_row is row else dataclasses.replace(row, ratio=(first_row.value or 0.0) / row.value)
