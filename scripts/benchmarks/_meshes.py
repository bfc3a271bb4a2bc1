"""Rows about meshes: time of a step on 8 simulated devices relative to one device, bytes sent, and schedules.

All simulated devices share the machine's cores, so a step on 8 of them takes at least as long as on one device, and a
ratio above 1 is overhead. Processor time measures computation and copies, even if other programs use the cores.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks import _ours
from benchmarks._measure import Row, seconds_in_turn
from eqformer import models, nn, planning
from eqformer.parallel import CONTEXT, FSDP, make_mesh, make_schedule, PIPE, Plan, REPLICA, simulate, TENSOR
from eqformer.program import list_transfers, read_hlo


ROWS, SEQ = 16, 256
NUMBERS = models.LlamaConfig(vocab=256, embed=128, layers=8, heads=8, kv_heads=4, mlp=384)
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({REPLICA: 8}, {}),
    "ZeRO-1": ({FSDP: 8}, {"zero": 1}),
    "ZeRO-2": ({FSDP: 8}, {"zero": 2}),
    "ZeRO-3": ({FSDP: 8}, {"zero": 3}),
    "HSDP": ({REPLICA: 2, FSDP: 4}, {"zero": 3}),
    "tensor, replicated": ({FSDP: 2, TENSOR: 4}, {}),
    "tensor, sequence": ({FSDP: 2, TENSOR: 4}, {"residual": "sequence"}),
    "tensor, sequence, ring": ({FSDP: 2, TENSOR: 4}, {"residual": "sequence", "overlap": "ring"}),
    "tensor, sequence, both ways": ({FSDP: 2, TENSOR: 4}, {"residual": "sequence", "overlap": "bidirectional"}),
    "tensor, feature": ({FSDP: 2, TENSOR: 4}, {"residual": "feature"}),
    "context, ring": ({FSDP: 2, CONTEXT: 4}, {"context_method": "ring"}),
    "context, gather": ({FSDP: 2, CONTEXT: 4}, {"context_method": "gather"}),
    "context, heads": ({FSDP: 2, CONTEXT: 4}, {"context_method": "heads"}),
    "pipeline, gpipe": ({FSDP: 2, PIPE: 4}, {"schedule": "gpipe", "microbatches": 8}),
    "pipeline, gpipe, edges spread": (
        {FSDP: 2, PIPE: 4},
        {"schedule": "gpipe", "microbatches": 8, "edges": "spread"},
    ),
    "pipeline, 1f1b": ({FSDP: 2, PIPE: 4}, {"schedule": "1f1b", "microbatches": 8}),
    "pipeline, interleaved": ({FSDP: 2, PIPE: 4}, {"schedule": "interleaved", "microbatches": 8, "chunks": 2}),
    "pipeline, looping": ({FSDP: 2, PIPE: 4}, {"schedule": "looping", "microbatches": 8, "chunks": 2}),
    "pipeline, zb-h1": ({FSDP: 2, PIPE: 4}, {"schedule": "zb-h1", "microbatches": 8}),
    "pipeline, zb-v": ({FSDP: 2, PIPE: 4}, {"schedule": "zb-v", "microbatches": 8, "chunks": 2}),
    "pipeline, dualpipe-v": ({FSDP: 2, PIPE: 4}, {"schedule": "dualpipe-v", "microbatches": 8, "chunks": 2}),
    "fsdp x tensor x pipe": (
        {FSDP: 2, TENSOR: 2, PIPE: 2},
        {"zero": 3, "residual": "sequence", "microbatches": 4},
    ),
    "fsdp x context x tensor": ({FSDP: 2, CONTEXT: 2, TENSOR: 2}, {"zero": 3, "residual": "sequence"}),
}
JAXFORMER = dataclasses.replace(models.preset("jaxformer-byte-7m"), vocab=4096, experts=2, top_k=1)
JAXFORMER_ROWS, JAXFORMER_SEQ = 16, 128
JAXFORMER_MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "fsdp 8": {FSDP: 8},
    "fsdp 4 x tensor 2": {FSDP: 4, TENSOR: 2},
    "fsdp 4 x pipe 2": {FSDP: 4, PIPE: 2},
    "fsdp 2 x tensor 2 x pipe 2": {FSDP: 2, TENSOR: 2, PIPE: 2},
}


def layouts(rounds: int) -> Iterator[Row]:
    """Step time of each layout on 8 simulated devices, relative to one device with the same batch; compile time."""
    single = _run(Plan(make_mesh(devices=jax.devices()[:1])))
    median = statistics.median(seconds_in_turn({"one": single}, rounds)["one"])
    yield Row("layouts", "one device", 1000 * median, "ms", None, f"compiled in {single.seconds_to_compile:.1f} s")
    for name, (mesh, _) in LAYOUTS.items():
        run = _run(_plan(name))
        times = seconds_in_turn({"one": single, name: run}, max(2, rounds // 3))
        ratio = statistics.median(step / base for base, step in zip(times["one"], times[name], strict=True))
        note = f"compiled in {run.seconds_to_compile:.1f} s; {' x '.join(f'{a} {n}' for a, n in mesh.items())}"
        yield Row("layouts", name, 1000 * statistics.median(times[name]), "ms", ratio, note)


def schedules(rounds: int) -> Iterator[Row]:
    """GPipe and 1F1B on 4 stages at 4, 16 and 64 microbatches of 2 rows: time, temporary memory, idle share."""
    mesh = make_mesh(pipe=4, devices=jax.devices()[:4])
    for microbatches in (4, 16, 64):
        plans = {name: Plan(mesh, schedule=name, microbatches=microbatches) for name in ("1f1b", "gpipe")}
        runs = {name: _run(plan, rows=2 * microbatches) for name, plan in plans.items()}
        times = seconds_in_turn(runs, max(2, rounds // 3))
        seconds = {name: statistics.median(run_times) for name, run_times in times.items()}
        for name, run in runs.items():
            bubble = simulate(make_schedule(name, stages=4, microbatches=microbatches), backward=2.0).lock_step.bubble
            memory = _program(run).memory_analysis()
            assert memory is not None
            note = f"{memory.temp_size_in_bytes / 2**20:.1f} MiB temporary; bubble {100 * bubble:.0f} %"
            ratio = None if name == "1f1b" else seconds[name] / seconds["1f1b"]
            yield Row(f"{microbatches} microbatches", name, 1000 * seconds[name], "ms", ratio, note)


def communication(rounds: int) -> Iterator[Row]:
    """Bytes that a device sends in a step of each layout, counted in the compiled program, relative to the formulas."""
    model = nn.Execution().apply(models.shapes(NUMBERS))
    for name in LAYOUTS:
        plan = _plan(name)
        counted = planning.counted_bytes(plan, list_transfers(read_hlo(_program(_run(plan)), mesh=plan.mesh)))
        for cause, size in planning.sum_by_cause(planning.sent_bytes(plan, model, rows=ROWS, seq=SEQ)).items():
            sent = counted.get(cause, 0.0)
            yield Row(f"sent: {name}", cause, sent / 1e6, "MB", sent / size, f"formula {size / 1e6:.2f} MB")


def jaxformer(
    rounds: int,
    config: Any = JAXFORMER,
    meshes: Mapping[str, dict[str, int]] = JAXFORMER_MESHES,
    rows: int = JAXFORMER_ROWS,
    seq: int = JAXFORMER_SEQ,
) -> Iterator[Row]:
    """Tokens a second of JAXformer (12.8 M parameters, 16 x 128 tokens, expert capacity), on one device and meshes."""
    runs = {name: _run_with_capacity(config, mesh, rows, seq) for name, mesh in meshes.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    processor_times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start, processor_start = time.perf_counter(), time.process_time()
            run()
            times[name].append(time.perf_counter() - start)
            processor_times[name].append(time.process_time() - processor_start)

    def ratio_to_one_device(seconds: dict[str, list[float]], name: str) -> float:
        return statistics.median(step / base for step, base in zip(seconds[name], seconds["one device"]))

    for name, run in runs.items():
        note = f"{statistics.median(processor_times[name]):.2f} processor seconds a step "
        note += f"({ratio_to_one_device(processor_times, name):.2f} times one device's); "
        note += f"compiled in {run.seconds_to_compile:.1f} s; loss {run.loss:.4f}"
        rate = rows * seq / statistics.median(times[name])
        yield Row("jaxformer", name, rate, "tokens/s", ratio_to_one_device(times, name), note)


def _plan(name: str) -> Plan:
    mesh, choices = LAYOUTS[name]
    sizes: dict[str, Any] = {**mesh}
    return Plan(make_mesh(**sizes), **choices)


def _run(plan: Plan, rows: int = ROWS) -> _ours.OverMesh:
    return _ours.OverMesh(NUMBERS, plan, rows, SEQ)


def _program(run: _ours.OverMesh) -> jax.stages.Compiled:
    """Return the compiled program of a run's step."""
    assert run.step.program is not None
    return run.step.program


def _run_with_capacity(config: Any, mesh: dict[str, Any], rows: int, seq: int) -> _ours.OverMesh:
    plan = Plan(make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]))
    return _ours.OverMesh(config, plan, rows, seq, jax.random.key(1))
