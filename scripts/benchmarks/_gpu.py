"""Rows for one GPU: attention's kernels one by one, training's share of the peak, and decoding, in bfloat16."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _ours, _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import models, nn, planning


_MIXED, _NARROW = nn.Precision(compute="bfloat16"), nn.Precision("bfloat16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: by default for a GPU of 80 GB or more."""

    dense: tuple[str, ...] = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b")
    mixture: str = "olmoe-1b-7b"
    mixture_layers: int = 4
    lengths: tuple[int, ...] = (4096, 8192)
    tokens: int = 16_384
    """Of a step."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Of the attention that is measured alone: heads, key heads, channels."""
    decoded: tuple[str, ...] = ("llama-3.2-1b", "llama-3-8b")
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 128
    minutes: float = 8.0
    """No row is begun later."""


def gpu(rounds: int, folder: Path, sizes: Sizes = Sizes()) -> Iterator[Row]:
    """Attention, training and decoding on one GPU, in bfloat16, against PyTorch where it is installed; a trace."""
    end, rounds = time.monotonic() + 60 * sizes.minutes, max(2, rounds // 3)
    peak = planning.matmul_peak("bfloat16", size=256 if jax.default_backend() == "cpu" else None)
    yield Row("peak", "product in bfloat16", peak / 1e12, "TFLOP/s")
    mixture = dataclasses.replace(models.preset(sizes.mixture), layers=sizes.mixture_layers)
    trained: list[tuple[str, Any, int]] = [(name, models.preset(name), sizes.lengths[0]) for name in sizes.dense]
    trained += [(f"{sizes.mixture}, {sizes.mixture_layers} layers", mixture, seq) for seq in sizes.lengths]
    trained += [(sizes.dense[0], models.preset(sizes.dense[0]), seq) for seq in sizes.lengths[1:]]
    work: list[Callable[[], Iterator[Row]]] = [partial(_attention, sizes, seq, rounds) for seq in sizes.lengths]
    work += [partial(_train, name, config, seq, sizes.tokens, rounds, peak) for name, config, seq in trained]
    work += [partial(_decode, name, sizes, batch, rounds) for name in sizes.decoded for batch in sizes.batches]
    for number, rows in enumerate(work):
        if time.monotonic() > end:
            _tell(f"{sizes.minutes:g} minutes are over; {len(work) - number} of {len(work)} groups are left out")
            break
        yield from rows()
    _trace(sizes, folder / "gpu-profile")


def _attention(sizes: Sizes, seq: int, rounds: int) -> Iterator[Row]:
    """Causal attention of 16,384 tokens by each core, forward and backward; hidden scores are not counted."""
    heads, kv_heads, head_dim = sizes.heads
    rows = max(1, sizes.tokens // seq)
    _tell(f"attention of {rows} x {seq} tokens")
    draw = lambda number, count: jax.random.normal(jax.random.key(number), (rows, seq, count, head_dim), jnp.bfloat16)
    given = draw(0, heads), draw(1, kv_heads), draw(2, kv_heads)
    how: dict[str, Any] = {"mask": nn.causal(), "tokens": nn.positions_like((rows, seq)), "scale": head_dim**-0.5}
    cores: dict[str, nn.Core] = {"cuDNN": nn.CudnnCore()} if jax.default_backend() == "gpu" else {}
    cores |= {"blocks": nn.BlockwiseCore(), "jax.nn": nn.DotProductCore()}
    contenders: dict[str, Callable[[], Any]] = {}
    for name, core in cores.items():
        loss = lambda *given, core=core: jnp.sum(core(*given, **how).astype(jnp.float32))
        try:
            program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
            jax.block_until_ready(program(*given))
        except jax.errors.JaxRuntimeError as error:  # out of memory
            _tell(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        contenders[name] = lambda program=program: jax.block_until_ready(program(*given))
    if _peers.are_installed():
        contenders["PyTorch"] = _peers.attention(*(np.asarray(x, np.float32) for x in given))
    # Two products forward and five backward, of the half of the scores that is seen.
    flops = 7 * rows * heads * seq**2 * head_dim
    group = f"attention, {rows} x {seq} tokens"
    yield from rate_rows(group, "TFLOP/s", flops / 1e12, seconds_in_turn(contenders, rounds))


def _train(name: str, config: Any, seq: int, tokens: int, rounds: int, peak: float) -> Iterator[Row]:
    """Tokens a second of a step of AdamW, float32 with products in bfloat16, and its share of the peak."""
    rows = max(1, tokens // seq)
    shapes = eqx.filter_eval_shape(lambda key: models.build(config, key=key), jax.random.key(0))
    if not _fits(f"training {name}", 16 * planning.parameter_count(shapes)):
        return
    _tell(f"training {name} on {rows} x {seq} tokens")
    batch = _ours.random_batch(config.vocab, rows, seq)
    how: dict[str, Any] = {"core": nn.AutoCore(), "remat": "products", "precision": _MIXED}
    contenders: dict[str, Callable[[], Any]] = {"eqformer": _ours.train_step(config, batch, **how)}
    if _peers.are_installed() and isinstance(config, models.LlamaConfig):
        arrays = np.asarray(batch.ids), np.asarray(batch.targets)
        contenders["PyTorch, compiled"] = _peers.train_step(config, *arrays, compiled=True)
    group = f"train {name}, {rows} x {seq} tokens"
    found = rate_rows(group, "tokens/s", rows * seq, seconds_in_turn(contenders, rounds))
    yield from found
    for attention in ("half", "full"):
        flops = planning.flops_per_token(shapes, seq, attention=attention)
        for row in found:
            note = f"causal attention counted {attention}"
            yield Row(group, f"{row.name}: share of the peak", 100 * row.value * flops / peak, "%", None, note)


def _decode(name: str, sizes: Sizes, batch: int, rounds: int) -> Iterator[Row]:
    """Tokens a second of greedy decoding with parameters and cache in bfloat16, the prompt's pass included."""
    config: Any = models.preset(name)
    shapes = eqx.filter_eval_shape(lambda key: models.build(config, key=key), jax.random.key(0))
    if not _fits(f"decoding {name}", 2 * planning.parameter_count(shapes)):
        return
    _tell(f"decoding {name}, batch {batch}")
    ids = np.random.default_rng(0).integers(1, config.vocab, (batch, sizes.prompt), dtype=np.int32)
    contenders: dict[str, Callable[[], Any]] = {
        "eqformer": _ours.decode(config, ids, sizes.new, apart=False, precision=_NARROW),
        "eqformer, layers apart": _ours.decode(config, ids, sizes.new, apart=True, precision=_NARROW),
    }
    if _peers.are_installed():
        contenders["transformers, static cache"] = _peers.decode(config, ids, sizes.new)
    times = seconds_in_turn(contenders, rounds)
    yield from rate_rows(f"decode {name}, batch {batch}", "tokens/s", batch * sizes.new, times)


def _trace(sizes: Sizes, folder: Path) -> None:
    """A trace of three steps of the smallest model."""
    config: Any = models.preset(sizes.dense[0])
    batch = _ours.random_batch(config.vocab, max(1, sizes.tokens // sizes.lengths[0]), sizes.lengths[0])
    step = _ours.train_step(config, batch, core=nn.AutoCore(), remat="products", precision=_MIXED)
    step()
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            step()
    _tell(f"a trace of three steps of {sizes.dense[0]} is in {folder}")


def _fits(what: str, held: int) -> bool:
    """Whether the device holds so many bytes, with a fifth to spare; says so where it does not."""
    has = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 64 * 2**30)
    if held > 0.8 * has:
        _tell(f"{what} is left out: its state takes {held / 1e9:.0f} GB of {has / 1e9:.0f} GB")
    return held <= 0.8 * has


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
