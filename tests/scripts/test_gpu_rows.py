"""The rows of the GPU benchmark, with small sizes on a CPU: contents, failures, and rows that a deadline leaves out."""

import dataclasses
import functools
import json
import os
import time

import benchmark
import jax
import jax.numpy as jnp
import pytest
from benchmarks import _gpu, _gpu_numbers, _gpu_runs
from benchmarks._apart import run_apart, SeparateProcess
from benchmarks._gpu_numbers import Check, check_row, compile_check
from benchmarks._gpu_runs import Way, ways_that_fit, Work
from benchmarks._measure import Row

from eqformer import kernels, nn, planning


SMALL = _gpu.Sizes(
    dense=("llama-byte-1m",),
    mixture="mixtral-byte-500k",
    mixture_layers=1,
    lengths=(32, 64),
    tokens=64,
    heads=(4, 2, 8),
    decoded=("llama-byte-1m",),
    batches=(1, 2),
    prompt=8,
    new=4,
    step_layers=1,
    checked={"seq": 32, "names": {}, "sizes": {"layers": 1, "vocab": 64, "embed": 64, "mlp": 64}},
)
CARD = _gpu_runs.Card("a GPU", "gpu", 0, 1e12)
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes."


def measured(folder, start=lambda *modules: lambda work, seconds: work(), **sizes) -> list[Row]:
    return list(_gpu.gpu(CARD, 2, folder, dataclasses.replace(SMALL, **sizes), start))


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setattr(_gpu._peers, "are_installed", lambda: False)


@pytest.mark.grid
def test_each_group_has_its_rows(tmp_path):
    rows = measured(tmp_path, SeparateProcess)
    trained = (
        "train llama-byte-1m, 2 x 32",
        "train llama-byte-1m, 1 x 64",
        "train mixtral-byte-500k, 1 layers, 2 x 32",
    )
    groups = ["peak", "attention, 2 x 32 tokens", "attention, 1 x 64 tokens", *(f"{name} tokens" for name in trained)]
    assert {*groups, "decode llama-byte-1m, batch 1", "decode llama-byte-1m, batch 2"} <= {row.group for row in rows}
    shares = [row.value or 0.0 for row in rows if row.unit == "%"]
    assert len(shares) == 10 and all(half < full for half, full in zip(shares[::2], shares[1::2]))
    without = [(row.name, row.note.partition(":")[0]) for row in rows if not row.value]
    kernels = [f"attention, {name}" for name, call in _gpu_numbers.CALLS.items() if call.softcap is None]
    assert without == [(name, "ValueError") for name in (*kernels, "cuDNN", "cuDNN")]  # none for a CPU
    assert list((tmp_path / "gpu-profile").rglob("*.xplane.pb"))


@pytest.mark.grid
@pytest.mark.parametrize("form", ["int8", "decoded"])
def test_steps_of_quantized_weights(form, tmp_path, monkeypatch):
    """A step takes the difference of 4 tokens and 1, over 3; a contender that fails is a row that says why."""
    monkeypatch.setattr(_gpu_runs, "seconds_in_turn", lambda calls, rounds: {"one": [1.0, 3.0, 2.0], "all": [5.0]})
    monkeypatch.setattr(_gpu_runs, "FORMS", (None if form == "decoded" else form, "int3"))
    rows = list(_gpu.gpu_steps(CARD, 2, tmp_path, SMALL, lambda *_: lambda work, seconds: work()))
    assert {row.group for row in rows} == {"decode steps of llama-byte-1m, 1 layers, batch 2"}
    name = "bfloat16" if form == "decoded" else form
    assert [(row.name, row.value) for row in rows] == [(name, 1000.0), ("int3", None)]
    assert "unknown number format" in rows[-1].note


def test_what_is_late_is_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(_gpu._peers, "are_installed", lambda: True)
    peak, *others = measured(tmp_path, minutes=-1.0)
    ours, theirs = [row for row in others if row.name != "PyTorch"], [row for row in others if row.name == "PyTorch"]
    assert peak.group == "peak" and (len(ours), len(theirs)) == (11, 6)  # no numbers, mixtures or trace by PyTorch
    assert all(row.value is None and row.note == "left out after -1 minutes" for row in others)
    assert [row.group for row in others[:3]] == ["numbers", *["attention, 2 x 32 tokens"] * 2]


def test_a_process_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    calls, begun = iter(range(100)), []

    def run(work, seconds):
        number = next(calls)
        if number == 0:
            raise ChildProcessError("its process ended by itself, with exit code -9")
        return _gpu_runs.Result([Row(f"group {number % 2}", f"{number}", float(number), "tokens/s")])

    rows = measured(tmp_path, lambda *modules: begun.append(modules) or run)
    assert rows[1].note.endswith("exit code -9") and len(rows) == 1 + 11 == 1 + len(begun)
    assert [row.ratio for row in rows[2:6]] == [None, None, 1 / 3, 2 / 4]


def test_processes_start_ahead_and_see_what_others_chose(tmp_path, monkeypatch):
    """Each is there before the one before it works; the folder of XLA's choices is one for all, and gone behind."""
    monkeypatch.setenv("XLA_FLAGS", "--of_the_user=1")
    events = []

    def start(*modules):
        events.append(("start", os.environ["XLA_FLAGS"]))
        return lambda work, seconds: events.append(("work", "")) or _gpu_runs.Result([])

    measured(tmp_path, start)
    assert [kind for kind, _ in events[:5]] == ["start", "start", "work", "start", "work"]
    (flags,) = {flags for kind, flags in events if kind == "start"}
    assert flags.startswith("--of_the_user=1 --") and "autotune_cache_dir=" in flags
    assert os.environ["XLA_FLAGS"] == "--of_the_user=1" and not os.path.exists(flags.split("=")[-1])


def test_numbers_tell_right_from_wrong_and_from_none():
    """Of a product that rounds, of one with another factor, of one that is no number, and of one that cannot be."""
    given = lambda: jnp.linspace(-1.0, 1.0, 64, dtype=jnp.bfloat16).reshape(8, 8)
    product = lambda x: x @ x
    right, wrong, none = product, lambda x: 1.1 * (x @ x), lambda x: x @ x / (x @ x - x @ x)

    def row(run, wanted=product):
        check = Check("a product", run, wanted, given)
        return check_row(check, functools.partial(compile_check, check))

    assert 0 < (row(right).value or 0) < 1e3 * _gpu_numbers.OF_KERNELS and row(right).note == "at most 20"
    assert row(wrong).note == "WRONG: more than 20" and row(none).note == "WRONG: some results are not finite"
    assert row(lambda x: x @ x[:3]).note.startswith("TypeError")


@pytest.mark.grid
def test_another_window_is_wrong():
    """The controls of the checks: what they compare is as sharp as what could go wrong."""
    name = "window, packed documents, sinks"
    check = next(check for check in _gpu_numbers._attentions(512) if name in check.name)
    for window, note in ((100, "at most 20"), (99, "WRONG: more than 20")):
        call = _gpu_numbers.CALLS[name]._replace(mask=nn.sliding_window(window))
        by_blocks = check._replace(run=functools.partial(_gpu_numbers._attend, call, kernels.BlockwiseAttention()))
        assert check_row(by_blocks, functools.partial(compile_check, by_blocks)).note == note


def test_out_of_memory_is_a_row_and_the_next_way_is_tried(monkeypatch):
    def step(config, batch, *, execution, **how):
        if execution.remat == "products":
            raise jax.errors.JaxRuntimeError(FULL)
        return lambda: None

    monkeypatch.setattr(_gpu_runs._ours, "train_step", step)
    found = _gpu_runs.train(Work("llama-byte-1m", 2, 32), 1, 1e12)
    failed, row, half, full = found.rows
    assert failed.value is None and FULL in failed.note and "remat products" in failed.note
    assert (row.value or 0) > 0 and "remat full" in row.note and found.way == Way("full")
    assert (full.value or 0) > (half.value or 0) > 0


@pytest.mark.grid
def test_a_model_is_trained_as_its_bytes_allow():
    """By hand: AdamW takes 16 bytes a parameter in float32; 10 with parameters and moments in bfloat16."""
    memory = planning.ACCELERATORS["h100"].memory
    large = Work("llama-3-8b", 4, 4096)
    way = next(ways_that_fit(large, memory))
    assert way == Way("full", narrow=True, layers=0.5) and large.by(way)[0].startswith(
        "train llama-3-8b, 16 layers, 4 x"
    )
    parameters = 8.03e9, (8.03e9 + 2 * 128_256 * 4096) / 2  # all, and half the layers with both tables
    assert 10 * parameters[0] > memory > 10 * parameters[1]
    assert next(ways_that_fit(large, None)) == Way() and next(ways_that_fit(large, 10**9), None) is None


@pytest.mark.grid
def test_a_process_of_its_own_gives_raises_ends_or_is_ended():
    assert run_apart(functools.partial(int, "7"), 60) == 7
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        run_apart(functools.partial(int, "seven"), 60)
    with pytest.raises(ChildProcessError, match="exit code 3"):
        run_apart(functools.partial(os._exit, 3), 60)
    with pytest.raises(TimeoutError, match="stopped after 0 seconds"):
        run_apart(functools.partial(time.sleep, 60), 0.1)


def test_rows_are_written_as_they_come(tmp_path, monkeypatch):
    def rows(*given):
        yield Row("train", "eqformer", 2.0, "tokens/s")
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "run_benchmarks", rows)
    with pytest.raises(SystemExit, match="130"):  # as shells count programs that Ctrl-C ended
        benchmark.main(["--only", "train", "--output", str(tmp_path / "found.json")])
    assert [row["value"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]] == [2.0]
