"""Measure eqformer beside PyTorch and transformers, where they are installed: `python scripts/benchmark.py`.

What meshes cost is measured on 8 simulated devices: `python scripts/benchmark.py --simulate 8`; one GPU, in less than
ten minutes, by `python scripts/benchmark.py --only gpu`. XLA's flags are those for training, or, where
only `decode`, `zoo` or `quantised` are asked for, those for forward passes.
"""

import sys

from support import environment


if __name__ == "__main__":
    asked = {*" ".join(sys.argv).partition("--only ")[2].partition(" --")[0].split()}
    environment.prepare(sys.argv[1:], shared=False, gradients=not asked or bool(asked - {"decode", "zoo", "quantised"}))

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
from benchmarks._measure import machine_row, Row
from benchmarks._rows import ASKED_FOR, BENCHMARKS, OF_GPUS, OF_MESHES
from rich.console import Console
from rich.table import Table
from support.command import read
from support.screen import one_message

from eqformer import training


@dataclasses.dataclass(frozen=True)
class Command:
    """Print a table of benchmarks and write it as JSON."""

    only: tuple[
        Literal[
            "train",
            "decode",
            "compile",
            "memory",
            "mixtures",
            "mixers",
            "zoo",
            "quantised",
            "layouts",
            "schedules",
            "communication",
            "gpu",
        ],
        ...,
    ] = ()
    """The benchmarks to run; by default all of one device but `gpu` or, with --simulate 8, all of meshes."""
    profile: bool = False
    """Tell where the time of a train step goes on a CPU, by kind of work and by module, in place of all benchmarks."""
    simulate: int | None = None
    """Let the CPU act as so many devices."""
    rounds: int = 9
    """Turns that each contender gets; medians over them are printed."""
    output: Path = Path("runs/benchmark.json")
    """Where the JSON goes."""


def check(command: Command, names: Sequence[str]) -> None:
    """Raise a `ValueError` for what cannot be measured, before anything is."""
    of_meshes = [name for name in names if name in OF_MESHES]
    if command.rounds < 1:
        raise ValueError(f"--rounds {command.rounds}: give at least 1.")
    if command.simulate is not None and command.simulate < 1:
        raise ValueError(f"--simulate {command.simulate}: it counts devices, so give at least 1.")
    number = command.simulate or len(jax.devices())
    if any(name in OF_GPUS for name in names) and jax.default_backend() != "gpu":
        raise ValueError(
            f"--only gpu: measured on a GPU, but JAX computes on {jax.default_backend()}; install eqformer[cuda] on a "
            "machine that has one."
        )
    if of_meshes and number != 8:
        raise ValueError(f"{', '.join(of_meshes)}: measured on 8 devices, but there are {number}; give --simulate 8.")


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    versions = training.versions(("jax", "equinox", "torch", "transformers"))
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0))
    return {"device": device.device_kind, "cores": str(cores), "python": platform.python_version()} | versions


def show(rows: list[Row]) -> None:
    """The rows as a table."""
    table = Table("", "", "median", "", "ratio", "spread, notes", box=None)
    group = None
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        value = f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.1f}"
        table.add_row(row.group if row.group != group else "", row.name, value, row.unit, ratio, row.note)
        group = row.group
    Console(width=130).print(table)


def main(arguments: list[str]) -> None:
    """Run the chosen benchmarks, printing the name of each as it runs."""
    with one_message():
        command = read(Command, arguments)
        names = (
            ("profile",)
            if command.profile
            else command.only or [name for name in BENCHMARKS if (name in OF_MESHES) == (command.simulate is not None)]
        )
        check(command, names)
        rows: list[Row] = []
        on_this = BENCHMARKS | ASKED_FOR
        for name in names:
            print(f"measuring {name}: {(on_this | OF_GPUS)[name].__doc__}", file=sys.stderr, flush=True)
            if name in OF_GPUS:
                rows += OF_GPUS[name](command.rounds, command.output.parent)
            else:
                rows += [machine_row(name), *on_this[name](command.rounds)]
        command.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        command.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        show(rows)
        print(f"written to {command.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
