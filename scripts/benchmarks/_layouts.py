"""Rows about meshes: what each layout costs over one device, what it sends, and how schedules compare.

All simulated devices share the machine's cores, so that a step over 8 of them can at best take as long as on one: the
ratio is overhead.
"""

import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax

from benchmarks import _ours
from benchmarks._measure import Row, seconds_in_turn
from eqformer import models, nn, planning, training
from eqformer.parallel import (
    CONTEXT,
    FSDP,
    make_mesh,
    make_schedule,
    PIPE,
    Plan,
    REPLICA,
    shardings,
    simulate,
    TENSOR,
)


ROWS, SEQ = 16, 256
NUMBERS = models.LlamaConfig(vocab=256, embed=128, layers=8, heads=8, kv_heads=4, mlp=384)
_AS_RECIPES: dict[str, Any] = {"core": nn.AutoCore(), "remat": "products"}
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


class Run:
    """A step over a mesh, its state and a batch, ready to be called."""

    def __init__(self, plan: Plan, config: models.LlamaConfig = NUMBERS, rows: int = ROWS, **how: Any):
        make = lambda: nn.run_with(models.build(config, key=jax.random.key(0)), **_AS_RECIPES | how)
        optimizer = training.optimizer("adamw", eqx.filter_eval_shape(make), rate=1e-3)
        self.state = training.PlannedState(make, optimizer, plan).init()
        batch = _ours.random_batch(config.vocab, rows, SEQ)
        self.batch = jax.device_put(batch, shardings(plan.batch_specs(batch), plan.mesh))
        step = training.planned_step(training.next_token_loss, optimizer, plan)
        start = time.perf_counter()
        self.step = step.compiled(self.state, self.batch)
        self.seconds_to_compile = time.perf_counter() - start

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory on a device."""
        return self.step.program.memory_analysis().temp_size_in_bytes

    def __call__(self) -> float:
        """One step; returns the loss."""
        self.state, metrics = self.step(self.state, self.batch)
        return float(metrics["loss"])


def layouts(rounds: int) -> Iterator[Row]:
    """Step time of each layout on 8 simulated devices over one device's at the same batch, and seconds to compile."""
    one = Run(Plan(make_mesh(devices=jax.devices()[:1])))
    yield Row(
        "layouts", "one device", 1000 * _median(one, rounds), "ms", None, f"compiled in {one.seconds_to_compile:.1f} s"
    )
    for name, (mesh, _) in LAYOUTS.items():
        run = Run(_plan(name))
        times = seconds_in_turn({"one": one, name: run}, max(2, rounds // 3))
        ratios = sorted(theirs / ours for ours, theirs in zip(times["one"], times[name], strict=True))
        note = f"compiled in {run.seconds_to_compile:.1f} s; {' x '.join(f'{a} {n}' for a, n in mesh.items())}"
        seconds = sorted(times[name])[len(ratios) // 2]
        yield Row("layouts", name, 1000 * seconds, "ms", ratios[len(ratios) // 2], note)


def schedules(rounds: int) -> Iterator[Row]:
    """GPipe and 1F1B on 4 stages at 4, 16 and 64 microbatches of 2 rows: time, temporary memory, idle share."""
    mesh = make_mesh(pipe=4, devices=jax.devices()[:4])
    for microbatches in (4, 16, 64):
        runs = {
            name: Run(Plan(mesh, schedule=name, microbatches=microbatches), rows=2 * microbatches)
            for name in ("1f1b", "gpipe")
        }
        times = seconds_in_turn(runs, max(2, rounds // 3))
        for name, run in runs.items():
            seconds = sorted(times[name])[len(times[name]) // 2]
            found = simulate(make_schedule(name, stages=4, microbatches=microbatches), backward=2.0).lock_step
            note = f"{run.temporary / 2**20:.1f} MiB temporary; bubble {100 * found.bubble:.0f} %"
            ratio = None if name == "1f1b" else seconds / (sorted(times["1f1b"])[len(times["1f1b"]) // 2])
            yield Row(f"{microbatches} microbatches", name, 1000 * seconds, "ms", ratio, note)
    share = simulate(make_schedule("gpipe", stages=2, microbatches=4)).useful_share
    yield Row("work", "8 blocks, 2 stages, 4 microbatches", 100 * share, "%", None, "of block evaluations are needed")


def communication(rounds: int) -> Iterator[Row]:
    """Bytes a device sends in a step of each layout, counted in the compiled program, over those by the formulas."""
    model = eqx.filter_eval_shape(lambda: nn.run_with(models.build(NUMBERS, key=jax.random.key(0)), **_AS_RECIPES))
    for name in LAYOUTS:
        plan = _plan(name)
        counted = planning.counted_bytes(plan, planning.communication(Run(plan).step.program, mesh=plan.mesh))
        for cause, size in planning.by_cause(planning.sent_bytes(plan, model, rows=ROWS, seq=SEQ)).items():
            sent = counted.get(cause, 0.0)
            yield Row(f"sent: {name}", cause, sent / 1e6, "MB", sent / size, f"formula {size / 1e6:.2f} MB")


def _plan(name: str) -> Plan:
    mesh, choices = LAYOUTS[name]
    sizes: dict[str, Any] = {**mesh}
    return Plan(make_mesh(**sizes), **choices)


def _median(run: Run, rounds: int) -> float:
    times = seconds_in_turn({"one": run}, rounds)["one"]
    return sorted(times)[len(times) // 2]
