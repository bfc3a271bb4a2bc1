"""Rows about meshes: what each layout costs over one device, what it sends, and how schedules compare.

All simulated devices share the machine's cores, so that a step over 8 of them can at best take as long as on one: the
ratio is overhead.
"""

import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from benchmarks import _ours
from benchmarks._measure import Row, seconds_in_turn
from eqformer import models, nn, planning, training
from eqformer.parallel import IDLE, init_sharded, make_mesh, make_schedule, Plan, shardings, simulate


ROWS, SEQ = 16, 256
NUMBERS = models.Llama(vocab=256, embed=128, layers=8, heads=8, kv_heads=4, mlp=384)
_AS_RECIPES: dict[str, Any] = {"core": nn.BlockwiseCore(), "remat": "products"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({"replica": 8}, {}),
    "ZeRO-1": ({"fsdp": 8}, {"zero": 1}),
    "ZeRO-2": ({"fsdp": 8}, {"zero": 2}),
    "ZeRO-3": ({"fsdp": 8}, {"zero": 3}),
    "HSDP": ({"replica": 2, "fsdp": 4}, {"zero": 3}),
    "tensor, replicated": ({"fsdp": 2, "tensor": 4}, {}),
    "tensor, sequence": ({"fsdp": 2, "tensor": 4}, {"residual": "sequence"}),
    "tensor, sequence, ring": ({"fsdp": 2, "tensor": 4}, {"residual": "sequence", "overlap": "ring"}),
    "tensor, sequence, both ways": ({"fsdp": 2, "tensor": 4}, {"residual": "sequence", "overlap": "bidirectional"}),
    "tensor, feature": ({"fsdp": 2, "tensor": 4}, {"residual": "feature"}),
    "context, ring": ({"fsdp": 2, "context": 4}, {"context_method": "ring"}),
    "context, gather": ({"fsdp": 2, "context": 4}, {"context_method": "gather"}),
    "context, heads": ({"fsdp": 2, "context": 4}, {"context_method": "heads"}),
    "pipeline, gpipe": ({"fsdp": 2, "pipe": 4}, {"schedule": "gpipe", "microbatches": 8}),
    "pipeline, gpipe, edges spread": (
        {"fsdp": 2, "pipe": 4},
        {"schedule": "gpipe", "microbatches": 8, "edges": "spread"},
    ),
    "pipeline, 1f1b": ({"fsdp": 2, "pipe": 4}, {"schedule": "1f1b", "microbatches": 8}),
    "pipeline, interleaved": ({"fsdp": 2, "pipe": 4}, {"schedule": "interleaved", "microbatches": 8, "chunks": 2}),
    "pipeline, looping": ({"fsdp": 2, "pipe": 4}, {"schedule": "looping", "microbatches": 8, "chunks": 2}),
    "pipeline, zb-h1": ({"fsdp": 2, "pipe": 4}, {"schedule": "zb-h1", "microbatches": 8}),
    "fsdp x tensor x pipe": (
        {"fsdp": 2, "tensor": 2, "pipe": 2},
        {"zero": 3, "residual": "sequence", "microbatches": 4},
    ),
    "fsdp x context x tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "residual": "sequence"}),
}


class Run:
    """A step over a mesh, its state and a batch, ready to be called."""

    def __init__(self, plan: Plan, numbers: models.Llama = NUMBERS, rows: int = ROWS, **how: Any):
        how = _AS_RECIPES | how
        make = lambda: models.build(numbers, **how, key=jax.random.key(0))
        optimizer = training.optimizer("adamw", eqx.filter_eval_shape(make), schedule=1e-3)
        first = lambda: training.init_state(plan.in_ring_order(make()), optimizer)
        self.state = init_sharded(first, lambda shapes: training.state_shardings(plan, optimizer, shapes))
        batch = _ours.random_batch(numbers.vocab, rows, SEQ)
        self.batch = jax.device_put(batch, shardings(plan.batch_specs(batch), plan.mesh))
        step = training.planned_step(training.next_token_loss, optimizer, plan)
        start = time.perf_counter()
        self.step = step.lower(self.state, self.batch).compile()
        self.seconds_to_compile = time.perf_counter() - start

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory on a device."""
        return self.step.compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> float:
        """One step; returns the loss."""
        self.state, metrics = self.step((self.batch, None), self.state)
        return float(metrics["loss"])


def layouts(rounds: int) -> Iterator[Row]:
    """Step time of each layout on 8 simulated devices over one device's at the same batch, and seconds to compile."""
    _need_devices()
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
    _need_devices()
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
    """Bytes a device sends in a step of each layout, counted in the compiled program, over the least it must."""
    _need_devices()
    for name in LAYOUTS:
        plan = _plan(name)
        compiled = Run(plan).step.compiled
        transfers = planning.communication(compiled, mesh=plan.mesh)
        for part, least in bounds(plan).items():
            sent = sum(t.sent * (t.times or 0) for t in transfers if _cause(t) == part)
            note = f"at least {least / 1e6:.2f} MB"
            if plan.is_pipelined:
                share = _share_of_ticks(plan, part)
                sent, note = sent * share, f"{note}; done in {100 * share:.0f} % of the ticks"
            yield Row(f"sent: {name}", part, sent / 1e6, "MB", sent / least, note)


def _share_of_ticks(plan: Plan, part: str) -> float:
    """In how many ticks a device does what is counted as if it were done in all: entries are branches."""
    schedule = plan.timetable()
    if part == "pipe":  # all send in a tick in which any has something to send
        stage = np.arange(schedule.stages)
        is_last = (stage == schedule.stages - 1) & (schedule.forward >= (schedule.chunks - 1) * schedule.microbatches)
        is_first = (stage == 0) & (schedule.backward < schedule.microbatches)
        up = (schedule.forward != IDLE) & ~is_last
        down = (schedule.backward != IDLE) & ~is_first
        return float(up.any(1).sum() + down.any(1).sum()) / (2 * schedule.ticks)
    if part == "state" and plan.zero != 3:
        return 1.0
    return schedule.microbatches * schedule.chunks / schedule.ticks


def _cause(transfer: planning.Transfer) -> str:
    """Why something is sent: the training state is what goes between copies of it, and is reduced over `context`."""
    axes = set(transfer.axes or ())
    if axes == {"context"} and transfer.kind != "all-reduce":
        return "context"
    return next(iter(axes)) if axes in ({"tensor"}, {"pipe"}) else "state"


def bounds(plan: Plan) -> dict[str, float]:
    """The least bytes a device sends in a step, by cause, from the formulas of `eqformer.planning`."""
    shapes = eqx.filter_eval_shape(lambda: models.build(NUMBERS, **_AS_RECIPES, key=jax.random.key(0)))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating))
    arrays = eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    blocks = count(arrays.stacks)
    parameters = (blocks / plan.size("pipe") + count(arrays) - blocks) / plan.size("tensor")
    fsdp = plan.size("fsdp") if plan.zero else 1
    copies = plan.size("replica") * plan.size("context") * plan.size("fsdp") // fsdp
    sizes = {"weight_bytes": 4, "gradient_bytes": 4}
    times = plan.microbatches if plan.is_pipelined and plan.zero == 3 else 1
    how = {"zero": plan.zero, "replicas": copies, "microbatches": times}
    least = {"state": float(planning.sharded_state_bytes(parameters, fsdp, **how, **sizes))}
    rows = ROWS // (plan.size("replica") * plan.size("fsdp"))
    layers, embed = NUMBERS.layers // plan.size("pipe"), NUMBERS.embed
    if (tensor := plan.size("tensor")) > 1:
        tokens = rows * SEQ // plan.size("context")
        edges = 4 * (tensor - 1) / tensor * tokens * embed * 4
        least["tensor"] = float(layers * planning.tensor_bytes(tokens, embed, tensor, activation_bytes=4) + edges)
    if (context := plan.size("context")) > 1:
        kv_embed = embed * NUMBERS.kv_heads // NUMBERS.heads // tensor
        how = {"method": plan.context_method, "embed": embed // tensor, "activation_bytes": 4}
        least["context"] = float(layers * planning.context_bytes(rows * SEQ, kv_embed, context, **how))
    if plan.is_pipelined:
        tokens = rows * SEQ // plan.microbatches
        split = tensor if plan.residual != "replicated" else 1
        how = {"chunks": plan.chunks, "tensor": split, "activation_bytes": 4}
        least["pipe"] = float(planning.pipeline_bytes(tokens, embed, plan.microbatches, **how))
    return least


def _plan(name: str) -> Plan:
    mesh, choices = LAYOUTS[name]
    sizes: dict[str, Any] = {**mesh}
    return Plan(make_mesh(**sizes), **choices)


def _median(run: Run, rounds: int) -> float:
    times = seconds_in_turn({"one": run}, rounds)["one"]
    return sorted(times)[len(times) // 2]


def _need_devices() -> None:
    if len(jax.devices()) != 8:
        raise ValueError(
            f"benchmark: these rows are of 8 devices, but there are {len(jax.devices())}; add --simulate 8."
        )
