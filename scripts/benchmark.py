"""Measure eqformer beside PyTorch and transformers, if these are installed: `python scripts/benchmark.py`.

`python scripts/benchmark.py --simulate 8` measures the costs of meshes on 8 simulated devices, and
`python scripts/benchmark.py --only gpu` measures one GPU, in less than ten minutes. XLA gets eqformer's flags for
training, or its flags for forward passes if `--only` names only benchmarks without training (`decode`, `zoo`,
`quantized`, `engine`, `embeddings` and `tasks`).
"""

import sys

from support import environment
from support.flags import parse_words


if __name__ == "__main__":
    names = {*parse_words(sys.argv).get("--only", [])}
    forward_only = {"decode", "zoo", "quantized", "engine", "embeddings", "tasks"}
    environment.prepare(sys.argv[1:], shared=False, gradients=not names or bool(names - forward_only))

import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from benchmarks._apart import run_apart
from benchmarks._gpu_runs import Card, read_card
from benchmarks._measure import machine_rows, Row
from benchmarks._rows import ASKED_FOR, BENCHMARKS, OF_GPUS, OF_MESHES
from rich.console import Console
from rich.table import Table
from support.command import entry

from eqformer import training, write_atomic


NAMES = (*BENCHMARKS, *(name for name in ASKED_FOR if name != "profile"), *OF_GPUS)


@dataclasses.dataclass(frozen=True)
class Command:
    """Print a table of benchmarks and write it as JSON."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="{" + ",".join(NAMES) + "} ...")] = ()
    """The benchmarks; by default all of one device except checks, learning* and gpu; with --simulate 8, of meshes."""
    profile: bool = False
    """Print how the time of a train step on a CPU is divided among kinds of work and modules; no other benchmark."""
    simulate: int | None = None
    """Let the CPU simulate this number of devices."""
    rounds: int = 9
    """How often each contender is measured; contenders take turns, and medians are printed."""
    output: Path = Path("runs/benchmark.json")
    """The file to which the JSON is written."""


def check(command: Command, names: Sequence[str]) -> None:
    """Raise a `ValueError` for benchmarks that cannot be measured, before anything is measured."""
    of_meshes = [name for name in names if name in OF_MESHES]
    if unknown := [name for name in command.only if name not in NAMES]:
        raise ValueError(f"--only {' '.join(unknown)}: the benchmarks are {', '.join(NAMES)}.")
    if command.rounds < 1:
        raise ValueError(f"--rounds {command.rounds}: give at least 1.")
    if command.simulate is not None and command.simulate < 1:
        raise ValueError(f"--simulate {command.simulate}: give a number of devices, at least 1.")
    if any(name in OF_GPUS for name in names):
        if len(names) > 1:
            raise ValueError(f"--only {' '.join(names)}: a GPU's benchmark needs the whole GPU; give it alone.")
        return
    number = command.simulate or len(jax.devices())
    if of_meshes and number != 8:
        raise ValueError(
            f"{', '.join(of_meshes)}: this is measured on 8 devices, but there are {number}; give --simulate 8."
        )


def find_card() -> Card:
    """Find the GPU in a separate process, because this process must not take any of the GPU's memory."""
    jax.config.update("jax_platforms", "cpu")
    gpu = run_apart(read_card, 180)
    if gpu.platform != "gpu":
        raise ValueError(
            f"--only gpu: this is measured on a GPU, but JAX computes on {gpu.platform}; install eqformer[cuda] on a "
            "machine that has a GPU."
        )
    return gpu


def describe_machine(device: str) -> dict[str, str]:
    """Describe the measured machine: its device (on Linux with the CPU's model and vectors), cores and versions."""
    versions = training.versions(("jax", "equinox", "torch", "transformers"))
    if device == "cpu" and (about := Path("/proc/cpuinfo")).is_file():
        parts = (line.partition(":") for line in about.read_text(encoding="utf-8").splitlines())
        fields = {name.strip(): value.strip() for name, _, value in parts}
        widest = [name for name in ("avx512f", "avx2") if name in fields.get("flags", "").split()][:1]
        device = " ".join([device, *filter(None, [fields.get("model name")]), *widest])
    cores = len(os.sched_getaffinity(0))
    return {"device": device, "cores": str(cores), "python": platform.python_version()} | versions


def run_benchmarks(command: Command, names: Sequence[str], gpu: Card | None) -> Iterator[Row]:
    """Yield each row of the benchmarks as soon as it is measured; print the name of a benchmark before it begins."""
    benchmarks = BENCHMARKS | ASKED_FOR
    for name in names:
        print(f"measuring {name}: {(benchmarks | OF_GPUS)[name].__doc__}", file=sys.stderr, flush=True)
        if gpu is not None:
            yield from OF_GPUS[name](gpu, command.rounds, command.output.parent)
        else:
            yield from machine_rows(name)
            yield from benchmarks[name](command.rounds)


def print_table(rows: list[Row]) -> None:
    """Print the rows as a table."""
    table = Table("", "", "median", "", "ratio", "spread, notes", box=None)
    group = None
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        value = "" if row.value is None else f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.1f}"
        table.add_row(row.group if row.group != group else "", row.name, value, row.unit, ratio, row.note)
        group = row.group
    Console(width=130).print(table)


def measure(command: Command) -> None:
    """Run the chosen benchmarks."""
    names = (
        ("profile",)
        if command.profile
        else command.only or [name for name in BENCHMARKS if (name in OF_MESHES) == (command.simulate is not None)]
    )
    check(command, names)
    gpu = find_card() if any(name in OF_GPUS for name in names) else None
    about = describe_machine(jax.devices()[0].device_kind if gpu is None else gpu.name)
    rows: list[Row] = []
    command.output.parent.mkdir(parents=True, exist_ok=True)
    for row in run_benchmarks(command, names, gpu):  # Rows are written at once, so that a stopped run keeps them.
        rows.append(row)
        content = {"machine": about, "rows": [dataclasses.asdict(measured) for measured in rows]}
        write_atomic(command.output, json.dumps(content, indent=2) + "\n")
    print_table(rows)
    print(f"on {about['device']}, {about['cores']} cores; written to {command.output}")


main = entry(Command, measure)

if __name__ == "__main__":
    main(sys.argv[1:])
