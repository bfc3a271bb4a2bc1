"""Functions that run the scripts, mostly in processes of their own, and read what the runs wrote."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest
from haste import FLAGS


SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
TINY = (
    "--model.embed 32 --model.layers 2 --model.heads 4 --seq 32 --batch 4 --steps 6 --log-every 1 "
    "--checkpoint-every 3 --validate-every 3 --validation-batches 2 --sample-every 6 --optimizer.warmup 2 "
    "--optimizer.name adamw --optimizer.learning-rate 3e-3"
).split()
LLAMA = "--recipe llama --model.kv-heads 2 --model.mlp 64".split()
# The environment of a script's process. A script has one device or simulates its own, not the eight of the tests'
# process. Programs are compiled in haste; programs of one device are cached for all runs.
_CACHE = tempfile.TemporaryDirectory(prefix="compiled")
PLAIN = os.environ | {
    "XLA_FLAGS": " ".join(FLAGS),
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_ENABLE_COMPILATION_CACHE": "1",
    "JAX_COMPILATION_CACHE_DIR": _CACHE.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def write_corpus(folder: pathlib.Path, files: int = 40) -> pathlib.Path:
    """Write small texts, all different, into a new folder, and return the folder."""
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [f"line {line} of text {number} says {line * number % 97}\n" for line in range(20)]
        (folder / f"{number:03}.txt").write_text("".join(lines))
    return folder


def command(script: str, *arguments: object) -> list[str]:
    """Return the command line that runs a script with this Python."""
    return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]


def run(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run a script to its end in a process of its own."""
    options.setdefault("env", PLAIN)
    return subprocess.run(command(script, *arguments), capture_output=True, text=True, timeout=300, **options)


def run_here(script: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a script to its end in this process, which has eight devices and has imported the libraries already."""
    written, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(errors):
        try:
            importlib.import_module(script.removesuffix(".py")).main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess([script, *map(str, arguments)], code, written.getvalue(), errors.getvalue())


def learn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs in this process train on `sum_squares`: a step without the model is traced and compiled quickly."""
    monkeypatch.setattr("eqformer.training._optimization.next_token_loss", sum_squares)


def sum_squares(model: Any, batch: Any, key: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return the sum of the squares of all weights, as a loss of one token."""
    import jax
    import jax.numpy as jnp

    from eqformer import training

    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(training.trainable(model))), jnp.ones(())


def rows(run_dir: pathlib.Path, with_key: str = "loss") -> list[dict]:
    """Return the rows of metrics.jsonl that have a key."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if with_key in row]


def losses(run_dir: pathlib.Path) -> list[float]:
    """Return the training loss of each step."""
    assert [row["step"] for row in rows(run_dir)] == list(range(1, len(rows(run_dir)) + 1))
    return [row["loss"] for row in rows(run_dir)]


def saved_arrays(run_dir: pathlib.Path, step: int) -> dict:
    """Return every array of a checkpoint by its name."""
    import jax

    from eqformer.training import Checkpointer

    leaves = json.loads((run_dir / "checkpoints" / str(step) / "manifest.json").read_text())["manifest"]["leaves"]
    like = {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (dtype, shape) in leaves.items()}
    # Leaves of a flat dictionary by these names have the names of the saved tree's leaves, so any checkpoint restores.
    return Checkpointer(run_dir / "checkpoints").restore(like, step)[0]


def start(script: str, *arguments: object) -> subprocess.Popen:
    """Start a script in a process of its own."""
    return _start(command(script, *arguments))


def start_code(code: str, *arguments: object) -> subprocess.Popen:
    """Start code, which may import the scripts' modules, in a process of its own."""
    return _start(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{code}", *map(str, arguments)]
    )


def _start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=PLAIN)


def start_until(run_dir: pathlib.Path, step: int, script: str, *arguments: object) -> subprocess.Popen:
    """Start a script in a process of its own; return the process when its metrics have reached a step."""
    process = start(script, *arguments)
    wait_until(run_dir, step, process)
    return process


def wait_until(run_dir: pathlib.Path, step: int, process: subprocess.Popen) -> None:
    """Wait until the metrics of a running process have reached a step; fail if it ends before."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"the script did not reach step {step}: {process.communicate()[0]}")


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """Make a run in this process receive the signal `number` when it writes the metrics of a step."""
    from eqformer import training
    from eqformer.training import _run_folder

    class Stops(training.JsonLines):
        def write(self, row):
            super().write(row)
            if row["step"] == step:
                signal.raise_signal(number)

    monkeypatch.setattr(_run_folder, "JsonLines", Stops)
