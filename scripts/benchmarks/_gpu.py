"""Rows for one GPU: kernels' numbers and speed, training's share of the peak, and decoding, in bfloat16.

Each contender has the whole card, in a process of its own: JAX takes the memory when it starts, and PyTorch would have
the rest. The next process is started, and imports what it needs, while one is at work. What tells most comes first,
since a deadline leaves out the rest; a model's step by PyTorch comes behind ours, which says in which way it fits.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support import environment

from benchmarks import _gpu_numbers, _gpu_runs, _peers
from benchmarks._apart import Apart
from benchmarks._gpu_runs import Card, Found, Way, Work
from benchmarks._measure import Row
from eqformer import models


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: by default for a GPU of 80 GB or more."""

    dense: tuple[str, ...] = ("qwen3-0.6b", "llama-3-8b", "llama-3.2-3b")
    mixture: str = "olmoe-1b-7b"
    mixture_layers: int = 4
    lengths: tuple[int, ...] = (4096, 8192)
    tokens: int = 16_384
    """Of a step."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Of the attention that is measured alone: heads, key heads, channels."""
    decoded: tuple[str, ...] = ("llama-3-8b", "llama-3.2-1b")
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 128
    checked: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `_gpu_numbers.numbers` takes."""
    minutes: float = 9.0
    """Since the start: what is not done by then is ended or left out, and is a row that says so."""


Run = Callable[[Callable[[], Found], float], Found]


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
    start: Callable[..., Run] = Apart,
) -> Iterator[Row]:
    """Kernels, training and decoding on one GPU, in bfloat16, against PyTorch where it is installed; a trace."""
    end, rounds = time.monotonic() + 60 * sizes.minutes, max(2, rounds // 3)
    memory = f"{card.name}; programs get {card.memory / 1e9:.1f} GB of memory"
    yield Row("peak", "product in bfloat16", card.peak / 1e12, "TFLOP/s", None, memory)
    ways: dict[Work, Way] = {}
    first: dict[str, Row] = {}
    ahead = lambda task: start(*_imports(task)) if time.monotonic() < end else None
    with (
        environment.kernels_kept(),
        contextlib.closing(_started(_tasks(sizes, card, rounds, folder), ahead)) as started,
    ):
        for task, run in started:
            left = end - time.monotonic()
            if left <= 0 or run is None:
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


def _started(tasks: list[Task], ahead: Callable[[Task], Run | None]) -> Generator[tuple[Task, Run | None]]:
    """The tasks, each with a process for it, while that of the next one starts."""
    following = ahead(tasks[0])
    try:
        for task, after in zip(tasks, [*tasks[1:], None]):
            run, following = following, None if after is None else ahead(after)
            try:
                yield task, run
            finally:
                _close(run)
    finally:
        _close(following)


def _imports(task: Task) -> tuple[str, ...]:
    return (_gpu_runs.__name__, *(("torch", "transformers") if task.whom == "PyTorch" else ()))


def _close(run: Any) -> None:
    """End a process; functions that stand for one in tests have no end."""
    if isinstance(run, Apart):
        run.close()


def _tasks(sizes: Sizes, card: Card, rounds: int, folder: Path) -> list[Task]:
    """All that is to be done, what tells most before the rest, by eqformer and then PyTorch where it is installed."""
    theirs = ("PyTorch",) if _peers.are_installed() else ()
    both, per_step = ("eqformer", *theirs), lambda seq: max(1, sizes.tokens // seq)
    work = lambda name, seq, layers=None: Work(name, per_step(seq), seq, layers)
    shortest, *longer = sizes.lengths

    def attention(seq: int) -> list[Task]:
        alone = seq != shortest  # what has no kernel takes most of the time to compile
        run = partial(_gpu_runs.attention, sizes.heads, per_step(seq), seq, rounds, kernel_alone=alone)
        group = f"attention, {per_step(seq)} x {seq} tokens"
        return [Task(group, whom, lambda _, whom=whom: partial(run, peer=whom == "PyTorch")) for whom in both]

    def trained(its: Work, whoms: tuple[str, ...]) -> list[Task]:
        ours: Any = lambda _: partial(_gpu_runs.train, its, rounds, card.peak)
        peers: Any = lambda ways: partial(_gpu_runs.train_peer, its, rounds, ways.get(its, Way()))
        have = [whom for whom in whoms if whom != "PyTorch" or type(models.preset(its.preset)) in _peers.KINDS]
        return [Task(its.by(Way())[0], whom, peers if whom == "PyTorch" else ours, its) for whom in have]

    def decoded(name: str, batch: int, whoms: tuple[str, ...]) -> list[Task]:
        run = partial(_gpu_runs.decode, name, batch, sizes.prompt, sizes.new, rounds)
        group = f"decode {name}, batch {batch}"
        return [Task(group, whom, lambda _, whom=whom: partial(run, peer=whom == "PyTorch")) for whom in whoms]

    checked = partial(_gpu_numbers.numbers, **sizes.checked)
    small, *others = sizes.dense
    first, read = work(small, shortest), sizes.decoded[0]
    mixed = [work(sizes.mixture, seq, sizes.mixture_layers) for seq in sizes.lengths]
    unrolled = partial(_gpu_runs.train, first, rounds, card.peak, unrolled=True)
    traced = partial(_gpu_runs.trace, first, folder / "gpu-profile")
    return [
        Task(_gpu_numbers.GROUP, "eqformer", lambda _: partial(_gpu_runs.unmeasured, checked)),
        *attention(shortest),
        *trained(first, both),
        *(task for name in others[:1] for task in trained(work(name, shortest), both)),
        *(task for batch in sizes.batches for task in decoded(read, batch, both[:1])),
        *trained(mixed[0], both),
        *(task for seq in longer for task in (*attention(seq), *trained(work(small, seq), both))),
        *(task for its in mixed[1:] for task in trained(its, both)),
        Task(first.by(Way())[0], "eqformer, unrolled", lambda _: unrolled),
        Task("trace", str(folder / "gpu-profile"), lambda _: traced),
        *(task for batch in sizes.batches for task in decoded(read, batch, theirs)),
        *(task for name in others[1:] for task in trained(work(name, shortest), both)),
        *(task for name in sizes.decoded[1:] for batch in sizes.batches for task in decoded(name, batch, both)),
    ]


def _beside(first: dict[str, Row], row: Row) -> Row:
    """A row with the ratio of the group's first rate to its own; `first` holds those that were seen."""
    if row.value is None or row.unit in ("%", _gpu_numbers.UNIT):
        return row
    one = first.setdefault(row.group, row)
    return row if one is row else dataclasses.replace(row, ratio=(one.value or 0.0) / row.value)
