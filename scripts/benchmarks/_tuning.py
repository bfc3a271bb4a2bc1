"""Rows about tuning by low-rank changes: tokens a second and peak memory beside peft and transformers."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np

from benchmarks import _ours, _peers
from benchmarks._apart import run_apart
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import models, nn, read_utf8, training


# SmolLM2-135M, with random weights: speed does not depend on them.
SMOLLM2 = models.LlamaConfig(
    vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1536, theta=100_000.0, tied=True
)
ROWS, SEQ, RANK = 4, 256, 8
MAPS = ("query", "key", "value", "output", "gate", "up", "down")
PEFT_MAPS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
EXECUTIONS = {"eqformer": nn.Execution(), "eqformer, keep all": nn.Execution(remat="none")}
PEER = "peft and transformers"


def tuning(rounds: int) -> Iterator[Row]:
    """LoRA (rank 8, all linear maps) of a model like SmolLM2-135M, 4 x 256 tokens, float32, beside peft."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        models.save(models.build(SMOLLM2, key=jax.random.key(0)), folder, config=SMOLLM2)
        makers: dict[str, Callable[[], Callable[[], float]]] = {
            name: partial(make_step, folder, execution) for name, execution in EXECUTIONS.items()
        }
        if _peers.are_installed() and find_spec("peft"):
            makers[PEER] = partial(make_peer_step, folder)
        contenders = {name: make() for name, make in makers.items()}
        losses = {name: step() for name, step in contenders.items()}
        first = losses["eqformer"]
        assert all(abs(loss - first) < 1e-3 * first for loss in losses.values()), f"first losses differ: {losses}"
        yield from rate_rows("LoRA, SmolLM2-135M", "tokens/s", ROWS * SEQ, seconds_in_turn(contenders, rounds))
        contenders.clear()
        ours = None
        for name, make in makers.items():
            peak = run_apart(partial(measure_peak, make), 600) / 2**20
            ours = ours or peak
            yield Row("... peak memory of its process", name, peak, "MiB", None if peak == ours else peak / ours)


def make_step(folder: Path, execution: nn.Execution) -> Callable[[], float]:
    """Return a function that runs a step of forward, backward, clipping and AdamW, and returns the loss."""
    model = execution.apply(models.load(folder))
    adapted = nn.with_lora(model, MAPS, rank=RANK, alpha=2.0 * RANK, key=jax.random.key(1))
    optimizer = training.optimizer("adamw", adapted, rate=1e-3, trained=nn.lora_factors)
    step = training.make_step(training.next_token_loss, optimizer)
    holder = [training.init_state(adapted, optimizer)]
    batch = _ours.random_batch(SMOLLM2.vocab, ROWS, SEQ)

    def run() -> float:
        holder[0], metrics = step(holder[0], batch)
        return float(metrics["loss"])

    return run


def make_peer_step(folder: Path) -> Callable[[], float]:
    """Return the same step by peft and transformers."""
    batch = _ours.random_batch(SMOLLM2.vocab, ROWS, SEQ)
    ids, targets = np.asarray(batch.ids), np.asarray(batch.targets)
    return _peers.lora_step(folder, ids, targets, rank=RANK, maps=PEFT_MAPS)


def measure_peak(make: Callable[[], Callable[[], float]], steps: int = 3) -> int:
    """Return the most bytes that this process, which makes and runs the step, has held in memory; 0 outside Linux.

    `getrusage` would count the memory of the process that started this one.
    """
    step = make()
    for _ in range(steps):
        step()
    status = Path("/proc/self/status")
    lines = read_utf8(status).splitlines() if status.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
