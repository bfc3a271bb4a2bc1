"""Rows about the default run: bits a byte on validation text with three seeds, and seconds of the whole command."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks._measure import Row
from eqformer.training import RunFolder


SEEDS = (0, 1, 2)
PRETRAIN = Path(__file__).parents[1] / "pretrain.py"
RUNS: dict[str, tuple[str, ...]] = {"default": (), "llama": ("--recipe", "llama")}
"""Flags of `pretrain.py` for each contender."""


class Outcome(NamedTuple):
    """The validation loss of a run, and its time."""

    bits: float
    """Bits a byte on the validation text."""
    seconds: float
    """Seconds of the command from start to end, with compilation, validation, samples and checkpoints."""


def learning(rounds: int) -> Iterator[Row]:
    """Validation bits a byte and seconds of the default command, with three seeds, beside the recipe llama."""
    del rounds  # Each seed is a round.
    outcomes: dict[str, list[Outcome]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as parent:
        for seed in SEEDS:  # Contenders take turns, so that changes in the machine's speed affect all alike.
            for index, (name, flags) in enumerate(RUNS.items()):
                outcomes[name].append(run_once(Path(parent, f"run-{index}-{seed}"), ("--seed", str(seed), *flags)))
    first = next(iter(outcomes.values()))
    for name, runs in outcomes.items():
        bits, seconds = [run.bits for run in runs], [run.seconds for run in runs]
        ratio = statistics.median(theirs.seconds / ours.seconds for ours, theirs in zip(first, runs, strict=True))
        numbers = ", ".join(f"{value:.3f}" for value in bits)
        yield Row("learning", name, statistics.median(bits), "bits a byte", None, f"seeds 0, 1, 2: {numbers}")
        numbers = ", ".join(f"{value:.0f}" for value in seconds)
        yield Row("learning", f"... {name}", statistics.median(seconds), "s", ratio, f"seeds 0, 1, 2: {numbers}")


def run_once(folder: Path, flags: tuple[str, ...]) -> Outcome:
    """Run `pretrain.py` in a separate process, with an empty run directory."""
    start = time.perf_counter()
    command = [sys.executable, str(PRETRAIN), "--run-dir", str(folder), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    return Outcome(RunFolder(folder).latest_metrics()["validation_bits_per_byte"], seconds)
