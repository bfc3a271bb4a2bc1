"""Measurements in a process that has a GPU for itself; contenders are built, timed and dropped one after another."""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _ours, _peers
from benchmarks._apart import skip_autotuning
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import explain_error, kernels, models, nn, planning, training
from eqformer.parallel import Plan


class Card(NamedTuple):
    """A device: its name, its platform, the bytes that JAX gives programs (0: unknown), and its peak in FLOP/s."""

    name: str
    platform: str
    memory: int
    peak: float


@dataclasses.dataclass(frozen=True)
class Way:
    """Settings of training that decide its memory; `rows` and `layers` are shares of a `Work`'s rows and layers."""

    remat: Literal["none", "products", "full"] = "products"
    rows: float = 1.0
    narrow: bool = False
    layers: float = 1.0

    def __str__(self) -> str:
        return f"{'bfloat16' if self.narrow else 'float32'} parameters and moments, remat {self.remat}"


# Settings to try, nearest to the usual first. 8-bit moments would not help, because an update holds all moments in
# float32 at once (docs/accelerators-memory.md).
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
    """Training to measure: a preset, the shape of its batch, and its number of layers (None: all)."""

    preset: str
    rows: int
    seq: int
    layers: int | None = None

    def by(self, way: Way) -> tuple[str, Any, int]:
        """Return the name, the model's config and the number of rows of this work with the settings `way`."""
        config: Any = models.preset(self.preset)
        layers = max(1, round(way.layers * (self.layers or config.layers)))
        rows, note = max(1, round(way.rows * self.rows)), f", {layers} layers" * (layers < config.layers)
        name = f"train {self.preset}{note}, {rows} x {self.seq} tokens"
        return name, dataclasses.replace(config, layers=layers), rows


class Result(NamedTuple):
    """Rows that a process measured and, for training, the settings that fitted."""

    rows: list[Row]
    way: Way | None = None


def read_card() -> Card:
    """Return the first device."""
    device = jax.devices()[0]
    peak = planning.matmul_peak("bfloat16", size=256 if device.platform == "cpu" else None)
    return Card(device.device_kind, device.platform, memory() or 0, peak)


def memory() -> int | None:
    """Return the bytes that JAX gives programs on its first device; None if unknown."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def attention(
    heads: tuple[int, int, int], rows: int, seq: int, rounds: int, *, peer: bool, kernel_alone: bool = False
) -> Result:
    """Measure causal attention, forward and backward, by each core or by PyTorch; masked scores count no FLOPs."""
    count, kv_count, head_dim = heads
    draw = lambda number, count: jax.random.normal(jax.random.key(number), (rows, seq, count, head_dim), jnp.bfloat16)
    options: dict[str, Any] = {"mask": nn.causal(), "tokens": nn.positions_like((rows, seq)), "scale": head_dim**-0.5}

    def ours(core: kernels.Operation) -> Callable[[], Any]:
        arrays = draw(0, count), draw(1, kv_count), draw(2, kv_count)
        loss = lambda *arrays: jnp.sum(core(kernels.AttentionCall(*arrays, **options)).astype(jnp.float32))
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
        return lambda: jax.block_until_ready(program(*arrays))

    cores: dict[str, kernels.Operation] = {"cuDNN": kernels.RequiredKernel("cuda", kernels.CudnnAttention())}
    if not kernel_alone:
        cores["jax.nn"] = kernels.DotProductAttention()
        cores |= {f"blocks of {size}": kernels.BlockwiseAttention(size) for size in (128, 256, 512)}
    theirs = partial(_peers.attention, heads, rows, seq)
    contenders = {"PyTorch": theirs} if peer else {name: partial(ours, core) for name, core in cores.items()}
    # There are two products forward and five backward, over the unmasked half of the scores.
    flops = 7 * rows * count * seq**2 * head_dim
    return Result(list(_rows(f"attention, {rows} x {seq} tokens", "TFLOP/s", flops / 1e12, contenders, rounds)))


def train(work: Work, rounds: int, peak: float, *, unrolled: bool = False) -> Result:
    """Measure training steps of AdamW with the first settings that fit into the memory, by formulas and in practice.

    With `unrolled`, the program has no loop over layers, and therefore copies no residuals into stacked arrays. It then
    keeps all residuals, not only the results of products, which takes a third more memory than the formulas say.
    """
    rows: list[Row] = []
    for way in ways_that_fit(work, memory()):
        group, config, row_count = work.by(way)
        way = dataclasses.replace(way, remat="none") if unrolled and way.remat == "products" else way
        batch = _ours.random_batch(config.vocab, row_count, work.seq)
        settings = step_options(way, config.layers if unrolled else 1)
        contenders = {f"eqformer{', unrolled' * unrolled}": partial(_ours.train_step, config, batch, **settings)}
        rows += _rows(group, "tokens/s", row_count * work.seq, contenders, rounds, str(way))
        if (last := rows[-1]).value is not None:
            return Result([*rows, *_shares(last, config, work.seq, peak)], way)
    return Result(rows or [Row(work.by(Way())[0], "eqformer", note="left out: no settings fit, by formulas")])


def _shares(row: Row, config: Any, seq: int, peak: float) -> Iterator[Row]:
    """Yield the share of the peak twice, with half and with all of the scores of causal attention counted."""
    shapes = models.shapes(config)
    for attention in ("half", "full"):
        share = (row.value or 0.0) * planning.flops_per_token(shapes, seq, attention=attention) / peak
        note = f"causal attention counted {attention}"
        yield Row(row.group, f"{row.name}: share of the peak", 100 * share, "%", None, note)


def step_options(way: Way, unroll: int = 1) -> dict[str, Any]:
    """Return the options of `_ours.step_and_state` for settings, with `unroll` layers in an iteration of the loop."""
    precision = nn.Precision("bfloat16" if way.narrow else "float32", "bfloat16")
    moments = "bfloat16" if way.narrow else "float32"
    return {"execution": nn.Execution(remat=way.remat, unroll=unroll), "precision": precision, "moments": moments}


def ways_that_fit(work: Work, memory: int | None) -> Iterator[Way]:
    """Yield settings that need at most 0.95 of the memory, by formulas, which may be off by 5 %; None: yield all."""
    for way in WAYS:
        _, config, rows = work.by(way)
        make, optimizer = _ours.model_and_optimizer(config, **step_options(way))
        shapes = eqx.filter_eval_shape(make)
        states = training.PlannedState(make, optimizer, Plan(planning.abstract_mesh({})), model_shapes=shapes)
        state = lambda states=states: sum(size for size, _ in planning.state_bytes(states).values())
        step = lambda s=states, m=shapes, r=rows: planning.step_bytes(s, m, planning.batch_shapes(r, work.seq)).total
        # `step` takes seconds, and is computed only if the state fits.
        if memory is None or all(size() < 0.95 * memory for size in (state, step)):
            yield way


def train_peer(work: Work, rounds: int, way: Way) -> Result:
    """Measure the training steps of `train` by compiled PyTorch."""
    group, config, row_count = work.by(way)
    batch = _ours.random_batch(config.vocab, row_count, work.seq)
    options = {"compiled": "layers", "remat": way.remat == "full", "narrow": way.narrow}
    contenders = {
        "PyTorch, layers compiled": partial(
            _peers.train_step, config, *map(np.asarray, (batch.ids, batch.targets)), **options
        )
    }
    return Result(list(_rows(group, "tokens/s", row_count * work.seq, contenders, rounds)))


def decode(name: str, batch: int, prompt: int, new: int, rounds: int, *, peer: bool) -> Result:
    """Measure tokens a second of greedy decoding, prefill included, with parameters and cache in bfloat16."""
    config: Any = models.preset(name)
    ids = np.random.default_rng(0).integers(1, config.vocab, (batch, prompt), dtype=np.int32)
    ours = partial(_ours.decode, config, ids, new, unstacked=True, precision=nn.Precision("bfloat16", "bfloat16"))
    theirs = {"transformers, static cache": partial(_peers.decode, config, ids, new)}
    contenders = theirs if peer else {"eqformer, layers apart": ours}
    return Result(list(_rows(f"decode {name}, batch {batch}", "tokens/s", batch * new, contenders, rounds)))


FORMS = (None, "int8", "fp8", "int4")


def decode_steps(name: str, layers: int, batch: int, prompt: int, new: int, rounds: int) -> Result:
    """Measure decode steps with weights in bfloat16 and with quantized weights.

    The time of a step is the time of `new` tokens, minus the time of one token with its prefill, over `new - 1`.
    """
    config: Any = dataclasses.replace(models.preset(name), layers=layers)
    ids = np.random.default_rng(0).integers(1, config.vocab, (batch, prompt), dtype=np.int32)
    precision, rows = nn.Precision("bfloat16", "bfloat16"), list[Row]()
    for form in FORMS:
        group, contender = f"decode steps of {name}, {layers} layers, batch {batch}", form or "bfloat16"
        change = (lambda model: model) if form is None else partial(nn.quantize, form=form)
        try:
            decode = partial(_ours.decode, config, ids, unstacked=True, precision=precision, change=change)
            calls: dict[str, Callable[[], Any]] = {"one": decode(1), "all": decode(new)}
            times = {count: statistics.median(seconds) for count, seconds in seconds_in_turn(calls, rounds).items()}
            step = (times["all"] - times["one"]) / (new - 1)
            rows.append(Row(group, contender, 1e3 * step, "ms a step"))
        except Exception as error:
            rows.append(Row(group, contender, note=f"{type(error).__name__}: {explain_error(error)[0]}"))
        gc.collect()
    return Result(rows)


def trace(work: Work, folder: Path) -> Result:
    """Write a profiler trace of three training steps."""
    _, config, rows = work.by(Way())
    step = _ours.train_step(config, _ours.random_batch(config.vocab, rows, work.seq), **step_options(Way()))
    step()
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            step()
    return Result([])


def run_on_cpu(work: Callable[[], Result]) -> Result:
    """Run the work in this process with JAX on the CPU, which leaves the GPU to PyTorch."""
    jax.config.update("jax_platforms", "cpu")
    return work()


def run_without_autotuning(work: Callable[[], Result]) -> Result:
    """Run the work in this process, where XLA chooses kernels without measuring them; for work that is not timed."""
    skip_autotuning()
    return work()


def _rows(
    group: str,
    unit: str,
    amount: float,
    contenders: dict[str, Callable[[], Callable[[], Any]]],
    rounds: int,
    way: str = "",
) -> Iterator[Row]:
    """Yield a row for each contender; if a contender fails (no memory, no kernel), its row says why."""
    for name, make in contenders.items():
        try:
            (row,) = rate_rows(group, unit, amount, seconds_in_turn({name: make()}, rounds))
            yield dataclasses.replace(row, note="; ".join(filter(None, (row.note, way))))
        except Exception as error:
            reason = f"{type(error).__name__}: {explain_error(error)[0]}"
            yield Row(group, name, note="; ".join(filter(None, (reason, way))))
        gc.collect()
