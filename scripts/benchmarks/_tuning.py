"""Rows of the benchmark table about tuning with LoRA: tokens a second and peak memory, beside peft and transformers."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _ours, _peers
from benchmarks._apart import run_apart
from benchmarks._measure import rate_rows, Row, seconds_in_turn, seconds_of_passes
from eqformer import Batch, data, models, nn, read_utf8, training


# The config of SmolLM2-135M. Its weights are random, because speed does not depend on them.
SMOLLM2 = models.LlamaConfig(
    vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1536, theta=100_000.0, tied=True
)
ROWS, SEQ, RANK = 4, 256, 8
MAPS = ("query", "key", "value", "output", "gate", "up", "down")
PEFT_MAPS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
EXECUTIONS = {"eqformer": nn.Execution(), "eqformer, keep all": nn.Execution(remat="none")}
PEER = "peft and transformers"
CONVERSATIONS = 64


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model that is tuned, and the training steps of one pass over the conversations."""

    first: Callable[[], float]
    """A step on the conversations of eqformer's first batch, which returns the loss."""
    steps: list[Callable[[], float]]
    """The steps of the pass."""
    tokens: int
    """The number of text tokens of the pass."""
    positions: int
    """The number of positions that the model computes, padding included."""


def tuning(rounds: int) -> Iterator[Row]:
    """LoRA (rank 8, all linear maps) of SmolLM2-135M's shape in float32, beside peft: full rows, and conversations."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        models.save(models.build(SMOLLM2, key=jax.random.key(0)), folder, config=SMOLLM2)
        yield from full_rows(folder, rounds)
        yield from unlike_lengths(folder, rounds)


def full_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield rows about steps of 4 x 256 tokens without padding."""
    makers: dict[str, Callable[[], Callable[[], float]]] = {
        name: partial(make_repeated_step, folder, execution) for name, execution in EXECUTIONS.items()
    }
    if _peers.are_installed() and find_spec("peft"):
        makers[PEER] = partial(make_peer_step, folder)
    contenders = {name: make() for name, make in makers.items()}
    compare_losses({name: step() for name, step in contenders.items()})
    yield from rate_rows("LoRA, SmolLM2-135M", "tokens/s", ROWS * SEQ, seconds_in_turn(contenders, rounds))
    contenders.clear()
    yield from memory_rows({name: partial(measure_peak, make) for name, make in makers.items()})


def unlike_lengths(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield rows about passes over conversations of different lengths, in the default batches of each library."""
    makers: dict[str, Callable[[], Contender]] = {"eqformer, packed": partial(make_packed, folder)}
    if _peers.are_installed() and find_spec("peft") and find_spec("trl"):
        makers["peft, padded by TRL"] = partial(make_peer_pass, folder, None)
        makers["peft, packed by TRL"] = partial(make_peer_pass, folder, SEQ)
    contenders = {name: make() for name, make in makers.items()}
    compare_losses({name: contender.first() for name, contender in contenders.items()})
    times = seconds_of_passes({name: contender.steps for name, contender in contenders.items()}, rounds)
    seconds = {name: [elapsed / contenders[name].tokens for elapsed in times[name]] for name in times}
    for row in rate_rows("... of conversations", "text tokens/s", 1, seconds):
        padding = 1 - contenders[row.name].tokens / contenders[row.name].positions
        yield dataclasses.replace(row, note=f"{row.note}; {padding:.0%} padding")
    contenders.clear()
    yield from memory_rows({name: partial(measure_peak_of_pass, make) for name, make in makers.items()})


def compare_losses(losses: dict[str, float]) -> None:
    """Raise an `AssertionError` if the contenders' first losses differ."""
    first = next(iter(losses.values()))
    assert all(abs(loss - first) < 1e-5 * first for loss in losses.values()), f"first losses differ: {losses}"


def memory_rows(works: dict[str, Callable[[], int]]) -> Iterator[Row]:
    """Yield the peak memory of each contender, measured in a separate process."""
    ours = None
    for name, work in works.items():
        peak = run_apart(work, 600) / 2**20
        ours = ours or peak
        yield Row("... peak memory of its process", name, peak, "MiB", None if peak == ours else peak / ours)


def make_step(folder: Path, execution: nn.Execution) -> Callable[[Batch], float]:
    """Return a function that runs a step of forward, backward, clipping and AdamW on a batch, and returns the loss."""
    model = execution.apply(models.load(folder))
    adapted = nn.with_lora(model, MAPS, rank=RANK, alpha=2.0 * RANK, key=jax.random.key(1))
    optimizer = training.optimizer("adamw", adapted, rate=1e-3, trained=nn.lora_factors)
    step = training.make_step(training.next_token_loss, optimizer)
    holder = [training.init_state(adapted, optimizer)]

    def run(batch: Batch) -> float:
        holder[0], metrics = step(holder[0], batch)
        return float(metrics["loss"])

    return run


def make_repeated_step(folder: Path, execution: nn.Execution) -> Callable[[], float]:
    """Return a function that takes a step on the same full rows at each call."""
    return partial(make_step(folder, execution), _ours.random_batch(SMOLLM2.vocab, ROWS, SEQ))


def make_peer_step(folder: Path) -> Callable[[], float]:
    """Return the function of `make_repeated_step` with peft and transformers instead of eqformer."""
    batch = _ours.random_batch(SMOLLM2.vocab, ROWS, SEQ)
    ids, targets = (_peers.as_ids(np.asarray(array)) for array in (batch.ids, batch.targets))
    return partial(_peers.lora_step(folder, rank=RANK, maps=PEFT_MAPS), {"input_ids": ids}, targets)


def random_conversations() -> list[np.ndarray]:
    """Return conversations of random tokens.

    The logarithms of their lengths have a normal distribution, with a median of 100 tokens and a standard deviation of
    0.6. Lengths are clipped to 20 to 250 tokens.
    """
    random = np.random.default_rng(0)
    lengths = np.clip(np.rint(random.lognormal(np.log(100), 0.6, CONVERSATIONS)), 20, 250).astype(int)
    return [random.integers(1, SMOLLM2.vocab, length) for length in lengths]


def pack(conversations: Sequence[np.ndarray]) -> list[Batch]:
    """Return full batches of packed rows, as in training on documents; the rows are shuffled."""
    lengths = [len(ids) for ids in conversations]
    store = data.TokenStore(
        path=Path("conversations"),
        tokens=np.concatenate(conversations).astype(np.uint32),
        offsets=np.cumsum([0, *lengths]),
        text_bytes=0,
        largest=SMOLLM2.vocab - 1,
        vocab=SMOLLM2.vocab,
        end_of_text=0,
        fingerprint="",
    )
    packing = data.DocumentPacking(store, seq=SEQ)
    order = np.random.default_rng(0).permutation(packing.rows)
    starts = range(0, packing.rows - ROWS + 1, ROWS)
    return [jax.tree.map(jnp.asarray, packing(order[start : start + ROWS])) for start in starts]


def unpack(batch: Batch) -> list[np.ndarray]:
    """Return the conversations of a batch."""
    assert batch.segments is not None
    ids, segments = np.asarray(batch.ids), np.asarray(batch.segments)
    return [ids[row][segments[row] == number] for row in range(len(ids)) for number in range(segments[row].max() + 1)]


def make_packed(folder: Path) -> Contender:
    """Return the contender eqformer with packed rows."""
    batches, step = pack(random_conversations()), make_step(folder, nn.Execution())
    tokens = sum(len(ids) for batch in batches for ids in unpack(batch))
    steps = [partial(step, batch) for batch in batches]
    return Contender(steps[0], steps, tokens, sum(batch.ids.size for batch in batches))


def make_peer_pass(folder: Path, pack_seq: int | None) -> Contender:
    """Return the contender peft with TRL's batches, which are padded, or packed into rows of `pack_seq` tokens.

    The number of conversations in a padded batch is the average number in eqformer's batches.
    """
    conversations = random_conversations()
    packed = pack(conversations)
    size = ROWS if pack_seq else round(np.mean([len(unpack(batch)) for batch in packed]))
    batches = _peers.trl_batches(conversations, size, pack_seq)
    common = unpack(packed[0])
    first = _peers.trl_batches(common, ROWS if pack_seq else len(common), pack_seq)[0]
    step = _peers.lora_step(folder, rank=RANK, maps=PEFT_MAPS)
    positions = sum(inputs["input_ids"].numel() for inputs, _ in batches)
    padding = sum(int((inputs["attention_mask"] == 0).sum()) for inputs, _ in batches if "attention_mask" in inputs)
    steps = [partial(step, *batch) for batch in batches]
    return Contender(partial(step, *first), steps, positions - padding, positions)


def measure_peak_of_pass(make: Callable[[], Contender]) -> int:
    """Run a pass in this process, and return the process's peak memory, see `measure_peak`."""
    contender = make()
    return measure_peak(lambda: lambda: float(sum(step() for step in contender.steps)), steps=1)


def measure_peak(make: Callable[[], Callable[[], float]], steps: int = 3) -> int:
    """Make and run a step in this process, and return the process's peak memory in bytes; 0 outside of Linux.

    `getrusage` cannot be used, because it would also count the memory of the parent process.
    """
    step = make()
    for _ in range(steps):
        step()
    status = Path("/proc/self/status")
    lines = read_utf8(status).splitlines() if status.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
