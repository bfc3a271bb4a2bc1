"""Rows about the cost of shape checks: by eqformer's public calls, and by an import hook with beartype."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks._measure import Row
from eqformer import read_json


FILE = Path(__file__).with_name("_check_costs.py")
CHECKS = {"none": "no checks", "own": "checks of public calls", "hook": "... and the import hook"}


def checks(rounds: int) -> Iterator[Row]:
    """Processor time of calls and training steps without shape checks, with eqformer's checks, and with beartype's."""
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(max(2, rounds // 3)):
        for kind in CHECKS:
            for name, seconds in _measure(kind).items():
                times.setdefault(name, {kind: [] for kind in CHECKS})[kind].append(seconds)
    for name, seconds_of in times.items():
        for kind, label in CHECKS.items():
            fastest, slowest = (1000 * choose(seconds_of[kind]) for choose in (min, max))
            ratio = None if kind == "none" else min(seconds_of[kind]) / min(seconds_of["none"])
            yield Row(
                f"checks: {name}", label, fastest, "ms", ratio, f"{fastest:.3g} to {slowest:.3g} ms of processor time"
            )


def _measure(kind: str) -> dict[str, float]:
    """Return the seconds of each call, measured in a process with one kind of `CHECKS`."""
    path = os.pathsep.join([str(FILE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        subprocess.run([sys.executable, str(FILE), kind, str(times)], env=environment, check=True)
        return read_json(times)
