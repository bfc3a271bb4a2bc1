"""Benchmarks by name, and rows about a whole model on one device: training, decoding, compilation and memory."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import (
    _checks,
    _embeddings,
    _engine,
    _folders,
    _gpu,
    _gpu_runs,
    _harness,
    _layers,
    _learning,
    _learning_peers,
    _meshes,
    _ours,
    _peers,
    _profile,
    _quantized,
    _tuning,
)
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import models, nn, planning


ROWS, SEQ = 8, 256
UNROLLED = "eqformer, unrolled, keep all"


def train(rounds: int) -> Iterator[Row]:
    """Tokens a second of a training step (8 M parameters, 8 x 256 tokens, float32) beside PyTorch, and MFU."""
    config = _llama("llama-byte-8m")
    batch = _ours.random_batch(config.vocab, ROWS, SEQ)
    contenders: dict[str, Callable[[], Any]] = {
        "eqformer": _ours.train_step(config, batch),
        UNROLLED: _ours.train_step(config, batch, execution=nn.Execution(remat="none", unroll=config.layers)),
        "eqformer, jax.nn core, keep all": _ours.train_step(config, batch, execution=nn.Execution("xla", "none")),
    }
    if _peers.are_installed():
        ids, targets = np.asarray(batch.ids), np.asarray(batch.targets)
        contenders["PyTorch, compiled"] = _peers.train_step(config, ids, targets, compiled="whole")
        contenders["PyTorch, eager"] = _peers.train_step(config, ids, targets, compiled="no")
    rows = rate_rows("train", "tokens/s", ROWS * SEQ, seconds_in_turn(contenders, rounds))
    yield from rows
    shapes = models.shapes(config)
    peak = planning.matmul_peak()
    rates = {row.name: row.value or 0 for row in rows}
    for name, attention in (("eqformer", "half"), ("eqformer", "full"), (UNROLLED, "half")):
        flops = planning.flops_per_token(shapes, SEQ, attention=attention)
        label = f"share of the matmul peak ({'unrolled' if name == UNROLLED else attention})"
        note = f"causal attention counted {attention}; peak of a product {peak / 1e9:,.0f} GFLOP/s"
        yield Row("train", label, 100 * rates[name] * flops / peak, "%", None, note)


def decode(rounds: int) -> Iterator[Row]:
    """Tokens a second of greedy decoding (8 M parameters, prompt 32, 128 new tokens) beside transformers."""
    config, prompt, new = _llama("llama-byte-8m"), 32, 128
    for batch in (1, 16):
        ids = np.random.default_rng(0).integers(1, config.vocab, (batch, prompt), dtype=np.int32)
        contenders = {
            "eqformer, layers apart": _ours.decode(config, ids, new, unstacked=True),
            "eqformer": _ours.decode(config, ids, new, unstacked=False),
        }
        if _peers.are_installed():
            contenders["transformers, static cache"] = _peers.decode(config, ids, new)
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode, batch {batch}", "tokens/s", batch * new, times)


def compilation(rounds: int) -> Iterator[Row]:
    """Seconds to trace, lower and compile a train step at 4, 16 and 64 layers."""
    first = None
    for layers in (4, 16, 64):
        config = dataclasses.replace(_llama("llama-byte-1m"), layers=layers)
        batch = _ours.random_batch(config.vocab, 2, 64)
        step, state = _ours.step_and_state(config)
        start = time.perf_counter()
        lowered = step.lower(state, batch)
        traced = time.perf_counter() - start
        lowered.compile()
        seconds = time.perf_counter() - start
        first = first or seconds
        note = f"{traced:.1f} of these seconds to trace and lower"
        yield Row("compile", f"{layers} layers", seconds, "s", seconds / first, note)


def memory(rounds: int) -> Iterator[Row]:
    """Bytes that a compiled training step holds at once, relative to a count by hand."""
    config = _llama("llama-byte-8m")
    batch = _ours.random_batch(config.vocab, ROWS, SEQ)
    step, state = _ours.step_and_state(config)
    parameters = planning.parameter_count(state.model)
    analysis: Any = step.lower(state, batch).compile().memory_analysis()
    total = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    total -= analysis.alias_size_in_bytes
    # The count has float32 parameters, two moments, gradients, and the residuals of remat="products" for each token and
    # layer: the residual stream, the results of the linear maps (except the last), and the results of attention.
    width = config.embed
    residuals = width + (width + 2 * width * config.kv_heads // config.heads + width) + 2 * config.mlp
    residuals += width + config.heads
    counted = 4 * (4 * parameters + ROWS * SEQ * config.layers * residuals)
    yield Row("memory", "train step, compiled", total / 2**20, "MiB", total / counted, "ratio: to the count by hand")
    yield Row(
        "memory", "train step, by hand", counted / 2**20, "MiB", None, "parameters, moments, gradients, activations"
    )


def _llama(name: str) -> models.LlamaConfig:
    config = models.preset(name)
    assert isinstance(config, models.LlamaConfig)
    return config


# These benchmarks need eight devices.
OF_MESHES: dict[str, Callable[[int], Iterator[Row]]] = {
    "layouts": _meshes.layouts,
    "jaxformer": _meshes.jaxformer,
    "schedules": _meshes.schedules,
    "communication": _meshes.communication,
}
# These benchmarks run in separate processes, and also write files into a folder.
OF_GPUS: dict[str, Callable[[_gpu_runs.Card, int, Path], Iterator[Row]]] = {
    "gpu": _gpu.gpu,
    "gpu-steps": _gpu.gpu_steps,
}
BENCHMARKS: dict[str, Callable[[int], Iterator[Row]]] = {
    "train": train,
    "decode": decode,
    "compile": compilation,
    "memory": memory,
    "mixtures": _layers.mixtures,
    "mixers": _layers.mixers,
    "zoo": _folders.zoo,
    "quantized": _quantized.quantized,
    "tuning": _tuning.tuning,
    "tasks": _harness.tasks,
    "engine": _engine.engine,
    "embeddings": _embeddings.embeddings,
    **OF_MESHES,
}
# These benchmarks run only if `--only` or `--profile` asks for them.
ASKED_FOR: dict[str, Callable[[int], Iterator[Row]]] = {
    "profile": _profile.profile,
    "checks": _checks.checks,
    "learning": _learning.learning,
    "learning-peers": _learning_peers.learning_peers,
}
