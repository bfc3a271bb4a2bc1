"""What is measured on a GPU by a process that has it for itself: each contender is made, timed and dropped in turn."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from support import environment

from benchmarks import _ours, _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import explain_error, kernels, models, nn, planning, training
from eqformer.parallel import Plan


class Card(NamedTuple):
    """The device, the bytes that JAX gives programs (0 where it does not say) and its peak in operations a second."""

    name: str
    platform: str
    memory: int
    peak: float


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is trained: with what fits into the memory, and is nearest to the usual. Shares are of the whole."""

    remat: Literal["none", "products", "full"] = "products"
    rows: float = 1.0
    narrow: bool = False
    layers: float = 1.0

    def __str__(self) -> str:
        return f"{'bfloat16' if self.narrow else 'float32'} parameters and moments, remat {self.remat}"


# Moments of 8 bits are not among them: an update has all of them in float32 at once (docs/accelerators-memory.md).
WAYS = (
    Way(),
    Way("full"),
    Way("full", 0.5),
    Way("full", narrow=True),
    Way("full", 0.5, narrow=True),
    Way("full", narrow=True, layers=0.5),
    Way("full", layers=0.25),
    Way("full", 0.25, narrow=True, layers=0.25),
)


class Work(NamedTuple):
    """What is trained: a preset (of so many layers, None: all) on rows of tokens."""

    preset: str
    rows: int
    seq: int
    layers: int | None = None

    def by(self, way: Way) -> tuple[str, Any, int]:
        """Its name, its numbers and its rows in a way's shares."""
        config: Any = models.preset(self.preset)
        layers = max(1, round(way.layers * (self.layers or config.layers)))
        rows, few = max(1, round(way.rows * self.rows)), f", {layers} layers" * (layers < config.layers)
        name = f"train {self.preset}{few}, {rows} x {self.seq} tokens"
        return name, dataclasses.replace(config, layers=layers), rows


class Found(NamedTuple):
    """The rows that a process made and, of training, in which way."""

    rows: list[Row]
    way: Way | None = None


def card() -> Card:
    """The device."""
    one = jax.devices()[0]
    peak = planning.matmul_peak("bfloat16", size=256 if one.platform == "cpu" else None)
    return Card(one.device_kind, one.platform, memory() or 0, peak)


def memory() -> int | None:
    """Bytes that JAX gives programs on its first device; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def attention(
    heads: tuple[int, int, int], rows: int, seq: int, rounds: int, *, peer: bool, kernel_alone: bool = False
) -> Found:
    """Causal attention by each core, forward and backward, or PyTorch's; hidden scores are not counted."""
    count, kv_count, head_dim = heads
    draw = lambda number, count: jax.random.normal(jax.random.key(number), (rows, seq, count, head_dim), jnp.bfloat16)
    how: dict[str, Any] = {"mask": nn.causal(), "tokens": nn.positions_like((rows, seq)), "scale": head_dim**-0.5}

    def ours(core: kernels.Operation) -> Callable[[], Any]:
        given = draw(0, count), draw(1, kv_count), draw(2, kv_count)
        loss = lambda *given: jnp.sum(core(kernels.AttentionCall(*given, **how)).astype(jnp.float32))
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
        return lambda: jax.block_until_ready(program(*given))

    cores: dict[str, kernels.Operation] = {"cuDNN": kernels.RequiredKernel("cuda", kernels.CudnnAttention())}
    if not kernel_alone:
        cores["jax.nn"] = kernels.DotProductAttention()
        cores |= {f"blocks of {size}": kernels.BlockwiseAttention(size) for size in (128, 256, 512)}
    theirs = partial(_peers.attention, heads, rows, seq)
    made = {"PyTorch": theirs} if peer else {name: partial(ours, core) for name, core in cores.items()}
    # Two products forward and five backward, of the half of the scores that is seen.
    flops = 7 * rows * count * seq**2 * head_dim
    return Found(list(_rows(f"attention, {rows} x {seq} tokens", "TFLOP/s", flops / 1e12, made, rounds)))


def train(work: Work, rounds: int, peak: float, *, unrolled: bool = False) -> Found:
    """Steps of AdamW in the first way that the device has memory for, by formulas and then in fact.

    Unrolled, a program has no loop over layers, and so copies nothing that it keeps for the backward pass into stacks;
    there it keeps all instead of results of products, which takes a third more memory than formulas tell of these.
    """
    rows: list[Row] = []
    for way in ways_that_fit(work, memory()):
        group, config, own = work.by(way)
        way = dataclasses.replace(way, remat="none") if unrolled and way.remat == "products" else way
        batch = _ours.random_batch(config.vocab, own, work.seq)
        settings = how(way, config.layers if unrolled else 1)
        made = {f"eqformer{', unrolled' * unrolled}": partial(_ours.train_step, config, batch, **settings)}
        rows += _rows(group, "tokens/s", own * work.seq, made, rounds, str(way))
        if (last := rows[-1]).value is not None:
            return Found([*rows, *_shares(last, config, work.seq, peak)], way)
    return Found(rows or [Row(work.by(Way())[0], "eqformer", note="left out: by formulas no way of it fits")])


def _shares(row: Row, config: Any, seq: int, peak: float) -> Iterator[Row]:
    """The share of the peak, by both ways to count causal attention."""
    shapes = models.shapes(config)
    for attention in ("half", "full"):
        share = (row.value or 0.0) * planning.flops_per_token(shapes, seq, attention=attention) / peak
        note = f"causal attention counted {attention}"
        yield Row(row.group, f"{row.name}: share of the peak", 100 * share, "%", None, note)


def how(way: Way, unroll: int = 1) -> dict[str, Any]:
    """What `_ours.step_and_state` takes of a way, with so many layers in a turn of the loop."""
    precision = nn.Precision("bfloat16" if way.narrow else "float32", "bfloat16")
    moments = "bfloat16" if way.narrow else "float32"
    return {"execution": nn.Execution(remat=way.remat, unroll=unroll), "precision": precision, "moments": moments}


def ways_that_fit(work: Work, memory: int | None) -> Iterator[Way]:
    """The ways that hold at most 0.95 of the memory by formulas, which may be off by 5 %; without a memory all."""
    for way in WAYS:
        _, config, rows = work.by(way)
        make, optimizer = _ours.model_and_optimizer(config, **how(way))
        shapes = eqx.filter_eval_shape(make)
        states = training.PlannedState(make, optimizer, Plan(planning.abstract_mesh({})), model_shapes=shapes)
        state = lambda states=states: sum(size for size, _ in planning.state_bytes(states).values())
        step = lambda s=states, m=shapes, r=rows: planning.step_bytes(s, m, planning.batch_shapes(r, work.seq)).total
        if memory is None or all(size() < 0.95 * memory for size in (state, step)):  # the second takes seconds
            yield way


def train_peer(work: Work, rounds: int, way: Way) -> Found:
    """The same by PyTorch, compiled."""
    group, config, own = work.by(way)
    batch = _ours.random_batch(config.vocab, own, work.seq)
    its = {"compiled": "layers", "again": way.remat == "full", "narrow": way.narrow}
    made = {
        "PyTorch, layers compiled": partial(
            _peers.train_step, config, *map(np.asarray, (batch.ids, batch.targets)), **its
        )
    }
    return Found(list(_rows(group, "tokens/s", own * work.seq, made, rounds)))


def decode(name: str, batch: int, prompt: int, new: int, rounds: int, *, peer: bool) -> Found:
    """Tokens a second of greedy decoding with parameters and cache in bfloat16, the prompt's pass included."""
    config: Any = models.preset(name)
    ids = np.random.default_rng(0).integers(1, config.vocab, (batch, prompt), dtype=np.int32)
    ours = partial(_ours.decode, config, ids, new, apart=True, precision=nn.Precision("bfloat16", "bfloat16"))
    theirs = {"transformers, static cache": partial(_peers.decode, config, ids, new)}
    made = theirs if peer else {"eqformer, layers apart": ours}
    return Found(list(_rows(f"decode {name}, batch {batch}", "tokens/s", batch * new, made, rounds)))


def trace(work: Work, folder: Path) -> Found:
    """A trace of three steps."""
    _, config, rows = work.by(Way())
    step = _ours.train_step(config, _ours.random_batch(config.vocab, rows, work.seq), **how(Way()))
    step()
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            step()
    return Found([])


def by_pytorch(work: Callable[[], Found]) -> Found:
    """The work in a process that leaves the GPU to PyTorch: arrays of JAX's are on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    return work()


def unmeasured(work: Callable[[], Found]) -> Found:
    """The work in a process whose XLA takes kernels without measuring them, where only numbers are asked for."""
    environment.take_kernels_unmeasured()
    return work()


def _rows(
    group: str, unit: str, amount: float, made: dict[str, Callable[[], Callable[[], Any]]], rounds: int, way: str = ""
) -> Iterator[Row]:
    """The contenders one after another; one that fails, out of memory or without its kernel, is a row that says why."""
    for name, make in made.items():
        try:
            (row,) = rate_rows(group, unit, amount, seconds_in_turn({name: make()}, rounds))
            yield dataclasses.replace(row, note="; ".join(filter(None, (row.note, way))))
        except Exception as error:
            why = f"{type(error).__name__}: {explain_error(error)[0]}"
            yield Row(group, name, note="; ".join(filter(None, (why, way))))
        gc.collect()
