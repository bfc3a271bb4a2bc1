"""Time contenders that take turns (A B A B), so that changes in the machine's speed affect all of them alike."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks import _peers
from eqformer import planning


REST = 0.25  # Seconds of rest between contenders, whose idle threads spin for a while, and slow down the next one.


@dataclasses.dataclass(frozen=True)
class Row:
    """Line of the table: a measured value of a contender, and its ratio to the first row of the group.

    If there is no value, the note says why.
    """

    group: str
    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    note: str = ""


def machine_rows(group: str) -> Iterator[Row]:
    """Yield rows on the current speed of the machine, which changes; other rows are read in comparison with them.

    A product of 2048 x 2048 by PyTorch is measured too: on some processors PyTorch's library is as fast as XLA's, and
    on others half as fast, which affects all rows of PyTorch.
    """
    product, copies = planning.matmul_peak(seconds=1.0), planning.copy_bandwidth(seconds=1.0)
    note = f"copies of 128 MiB: {copies / 1e9:.1f} GB/s read and written"
    yield Row("this machine", f"product, before {group}", product / 1e9, "GFLOP/s", None, note)
    if _peers.are_installed():
        peer_product = _peers.product_rate()
        yield Row("this machine", "... by PyTorch", peer_product / 1e9, "GFLOP/s", product / peer_product)


def seconds_in_turn(
    contenders: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round.

    Each measured call follows a rest and a call that is not measured, because cores need time to wake up: after a rest,
    a first token took 85 to 110 ms instead of 65 ms, with the same processor time. `time.process_time` as the `clock`
    counts processor time, which depends less on other processes.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            time.sleep(REST)
            call()
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def seconds_of_passes(passes: dict[str, Sequence[Callable[[], Any]]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each pass through all calls of a contender, for calls that take seconds.

    Contenders take turns after each call. They may have different numbers of calls.
    """
    times = {name: [0.0] * rounds for name in passes}
    for number in range(rounds):
        for calls in itertools.zip_longest(*passes.values()):
            for name, call in zip(passes, calls, strict=True):
                if call is not None:
                    time.sleep(REST)
                    start = time.perf_counter()
                    call()
                    times[name][number] += time.perf_counter() - start
    return times


def rate_rows(group: str, unit: str, amount: float, times: dict[str, list[float]]) -> list[Row]:
    """Return a row for each contender: its median rate in `unit`, and the first contender's rate divided by its rate.

    `amount` is the work of a call in `unit`. Ratios are medians over rounds.
    """
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        ratio = statistics.median(this / first_seconds for first_seconds, this in zip(first, seconds, strict=True))
        spread = f"{amount / max(seconds):,.0f} to {amount / min(seconds):,.0f}"
        value = amount / statistics.median(seconds)
        rows.append(Row(group, name, value, unit, None if seconds is first else ratio, spread))
    return rows


class Gradients:
    """Compiled gradients of the sum of squares of `call(layer, x)`, with respect to the layer's arrays and `x`.

    By default `call` returns the layer's first result.
    """

    def __init__(self, layer: Any, x: Array, call: Callable[[Any, Array], Array] = lambda layer, x: layer(x)[0]):
        arrays, static = eqx.partition(layer, eqx.is_array)
        loss = lambda arrays, x: jnp.sum(jnp.square(call(eqx.combine(arrays, static), x)))
        self.program = jax.jit(jax.grad(loss, (0, 1))).lower(arrays, x).compile()
        self.args = arrays, x

    @property
    def temporary(self) -> int:
        """The bytes of temporary memory of the program."""
        analysis = self.program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    def __call__(self) -> None:
        """Run the program once, and wait for the result."""
        jax.block_until_ready(self.program(*self.args))


def gradient_rows(
    group: str, amount: float, contenders: dict[str, Callable[[], Any]], times: dict[str, list[float]]
) -> Iterator[Row]:
    """Yield `rate_rows` of tokens a second, with the temporary memory of contenders that are `Gradients`."""
    for row in rate_rows(group, "tokens/s", amount, times):
        program = contenders[row.name]
        memory = f"; {program.temporary / 2**20:.0f} MiB" if isinstance(program, Gradients) else ""
        yield dataclasses.replace(row, note=row.note + memory)
