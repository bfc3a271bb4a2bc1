"""Counts and times of a server, in the text format of Prometheus."""

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Histogram of durations, in buckets bounded by `_SECONDS`."""

    def __init__(self):
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration in its bucket."""
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the text format."""
        totals = list(itertools.accumulate(self._counts))
        for bound, total in zip((*map(str, _SECONDS), "+Inf"), totals):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {totals[-1]}"


class ServerMetrics:
    """Counts and times since the start of a server; every method may be called from any thread."""

    def __init__(self, counters: Sequence[str], times: Sequence[str]):
        self._lock = threading.Lock()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._counters: Counter[str] = Counter(dict.fromkeys(counters, 0))
        self._times = {name: Histogram() for name in times}

    def count_response(self, path: str, status: int) -> None:
        """Count a response by its path and its status."""
        with self._lock:
            self._responses[path, status] += 1

    def add(self, counter: str, amount: int = 1) -> None:
        """Add to one of the counters."""
        with self._lock:
            self._counters[counter] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration in the histogram of this name."""
        with self._lock:
            self._times[name].observe(seconds)

    def render(self, gauges: Mapping[str, float | int]) -> str:
        """Return all metrics, and the gauges, in the text format of Prometheus."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines(gauges))

    def _lines(self, gauges: Mapping[str, float | int]) -> Iterator[str]:
        yield "# TYPE eqformer_http_responses_total counter"
        for (path, status), count in sorted(self._responses.items()):
            yield f'eqformer_http_responses_total{{path="{path}",status="{status}"}} {count}'
        for name, count in self._counters.items():
            yield f"# TYPE eqformer_{name}_total counter"
            yield f"eqformer_{name}_total {count}"
        for name, value in gauges.items():
            yield f"# TYPE eqformer_{name} gauge"
            yield f"eqformer_{name} {value:g}"
        for name, histogram in self._times.items():
            yield f"# TYPE eqformer_{name}_seconds histogram"
            yield from histogram.lines(f"eqformer_{name}_seconds")
