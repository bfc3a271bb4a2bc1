"""Rows of JAXformer's shape on 8 simulated devices over one device: wall time and processor time of a train step.

All devices share the machine's cores, so that a step over 8 of them can at best take as long as on one. Processor time
tells what is computed and copied, whatever else runs on the cores.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks import _ours
from benchmarks._measure import Row
from eqformer import models
from eqformer.parallel import FSDP, make_mesh, PIPE, Plan, TENSOR


ROWS, SEQ = 16, 128
CONFIG = dataclasses.replace(models.preset("jaxformer-byte-7m"), vocab=4096, experts=2, top_k=1)
MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "fsdp 8": {FSDP: 8},
    "fsdp 4 x tensor 2": {FSDP: 4, TENSOR: 2},
    "fsdp 4 x pipe 2": {FSDP: 4, PIPE: 2},
    "fsdp 2 x tensor 2 x pipe 2": {FSDP: 2, TENSOR: 2, PIPE: 2},
}


def jaxformer(
    rounds: int, config: Any = CONFIG, meshes: Mapping[str, dict[str, int]] = MESHES, rows: int = ROWS, seq: int = SEQ
) -> Iterator[Row]:
    """Tokens a second of JAXformer (12.8 M parameters, 16 x 128 tokens) on one device and on meshes, with capacity."""
    runs = {name: _run(config, mesh, rows, seq) for name, mesh in meshes.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - start, time.process_time() - busy))
    of = lambda name, which: [each[which] for each in times[name]]
    for name, run in runs.items():
        wall, busy = (
            statistics.median(ours / theirs for ours, theirs in zip(of(name, which), of("one device", which)))
            for which in (0, 1)
        )
        note = f"{statistics.median(of(name, 1)):.2f} processor seconds a step ({busy:.2f} times one device's); "
        note += f"compiled in {run.seconds_to_compile:.1f} s; loss {run.loss:.4f}"
        yield Row("jaxformer", name, rows * seq / statistics.median(of(name, 0)), "tokens/s", wall, note)


def _run(config: Any, mesh: dict[str, Any], rows: int, seq: int) -> _ours.OverMesh:
    plan = Plan(make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]))
    return _ours.OverMesh(config, plan, rows, seq, jax.random.key(1))
