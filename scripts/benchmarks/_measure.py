"""Time several contenders in turn, A B A B, so that changes in the machine's speed affect all alike."""

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


REST = 0.25  # Seconds. Idle threads of a thread pool spin for a while, which would slow down the next contender.


@dataclasses.dataclass(frozen=True)
class Row:
    """Line of the table: what was measured, of whom, and how it compares with the first of its group.

    Without a value the note says why there is none.
    """

    group: str
    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    note: str = ""


def machine_rows(group: str) -> Iterator[Row]:
    """Yield rows on the speed of the machine now, beside which other rows are read: machines have slow days.

    A product of 2048 x 2048 by PyTorch is measured too: on some processors its library is as fast as XLA's, on others
    half as fast, and so are all of its rows.
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
    """Return the seconds of each call, after a rest and a call that is not counted, since cores that slept start late.

    `time.process_time` as the clock counts processor time, which work of other processes changes less.

    (A first token of 65 ms took 85 to 110 after a rest, with the same processor time; idle threads of PyTorch's spin.)
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
    """Return the seconds of each pass through a contender's calls, of seconds each; contenders take turns at each call.

    A contender may have more calls than another.
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
    """Return rows of median rates of `amount` a second, each with the first contender's rate over it.

    Ratios are medians over rounds.
    """
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(first, seconds, strict=True))
        spread = f"{amount / max(seconds):,.0f} to {amount / min(seconds):,.0f}"
        value = amount / statistics.median(seconds)
        rows.append(Row(group, name, value, unit, None if seconds is first else ratio, spread))
    return rows


class Gradients:
    """Compiled gradients of `call(layer, x)`, or of the first value that a layer returns, for parameters and input."""

    def __init__(self, layer: Any, x: Array, call: Callable[[Any, Array], Array] = lambda layer, x: layer(x)[0]):
        arrays, static = eqx.partition(layer, eqx.is_array)
        loss = lambda arrays, x: jnp.sum(jnp.square(call(eqx.combine(arrays, static), x)))
        self.program = jax.jit(jax.grad(loss, (0, 1))).lower(arrays, x).compile()
        self.args = arrays, x

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory."""
        analysis = self.program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    def __call__(self) -> None:
        """Run the program once, to the end."""
        jax.block_until_ready(self.program(*self.args))


def gradient_rows(
    group: str, amount: float, contenders: dict[str, Callable[[], Any]], times: dict[str, list[float]]
) -> Iterator[Row]:
    """Yield `rate_rows` of tokens a second, with the temporary memory of those that are `Gradients`."""
    for row in rate_rows(group, "tokens/s", amount, times):
        program = contenders[row.name]
        memory = f"; {program.temporary / 2**20:.0f} MiB" if isinstance(program, Gradients) else ""
        yield dataclasses.replace(row, note=row.note + memory)
