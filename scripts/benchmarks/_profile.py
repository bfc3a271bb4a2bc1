"""Rows about the time of a training step on this CPU, divided among kinds of work and among modules."""

import collections
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from benchmarks import _ours
from benchmarks._measure import Row
from eqformer import models
from eqformer.program import Span, time_account, Work


MAX_MODULES = 12  # All further modules share one row.


def profile(rounds: int, config: Any = None, rows: int = 8, seq: int = 256) -> Iterator[Row]:
    """Milliseconds of a train step (8 M parameters, 8 x 256 tokens, float32) by kind of work and by module."""
    config = models.preset("llama-byte-8m") if config is None else config
    text, run = _program(config, rows, seq)
    run()
    untraced = []
    for _ in range(rounds):
        start, busy = time.perf_counter(), time.process_time()
        run()
        untraced.append((time.perf_counter() - start, time.process_time() - busy))
    seconds = statistics.median(wall for wall, _ in untraced)
    cores = statistics.median(busy / wall for wall, busy in untraced)
    yield Row("step", "untraced", 1e3 * seconds, "ms", None, f"{cores:.2f} cores at work")
    with tempfile.TemporaryDirectory() as folder:
        spans = _trace(run, rounds, Path(folder))
    account = time_account(text, spans)
    total = sum(work.seconds for work in account)
    yield Row("step", "traced", 1e3 * total / rounds, "ms", total / rounds / seconds, "the sum of all rows of a group")
    groups: dict[str, Callable[[Work], str]] = {"kind of work": lambda work: work.kind, "module": _module}
    for group, name_of in groups.items():
        parts: dict[str, float] = collections.defaultdict(float)
        for work in account:
            parts[name_of(work)] += work.seconds
        longest = sorted(parts.items(), key=lambda entry: -entry[1])
        if remaining := sum(part for _, part in longest[MAX_MODULES:]):
            longest[MAX_MODULES:] = [("others", remaining)]
        for name, part in longest:
            yield Row(group, name, 1e3 * part / rounds, "ms", part / total)


def _program(config: Any, rows: int, seq: int) -> tuple[str, Callable[[], None]]:
    """Return the HLO text of a compiled training step with the defaults of recipes, and a function that runs it."""
    step, state = _ours.step_and_state(config)
    batch = _ours.random_batch(config.vocab, rows, seq)
    arrays, static = eqx.partition(state, eqx.is_array)

    def run(arrays: Any) -> tuple[Any, Any]:
        state, metrics = step(eqx.combine(arrays, static), batch)
        return eqx.filter(state, eqx.is_array), metrics

    compiled = jax.jit(run, donate_argnums=0).lower(arrays).compile()
    holder = [arrays]

    def run_once() -> None:
        holder[0], metrics = compiled(holder[0])
        jax.block_until_ready((holder[0], metrics))

    return compiled.as_text() or "", run_once


def _trace(run: Callable[[], None], times: int, folder: Path) -> list[Span]:
    """Return the operations that JAX's profiler records in `times` runs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for _ in range(times):
            run()
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = ((line.name, event) for plane in planes for line in plane.lines for event in line.events)
    return [Span(thread, event.name, event.start_ns / 1e9, event.end_ns / 1e9) for thread, event in events]


def _module(work: Work) -> str:
    """Return the path of the module of some work, without the parts that the paths of all layers have."""
    if work.kind == "nothing":
        return "nothing runs"
    path = ".".join(part for part in work.module.split(".") if part not in _EVERYWHERE)
    return f"{path or 'in none'}{', backward' * work.is_backward}"


_EVERYWHERE = {"stacks[0]", "blocks", "layer", "core"}
