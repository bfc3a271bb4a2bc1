"""Running the scripts in processes of their own."""

import json
import pathlib
import subprocess
import sys
import time

import pytest


SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
TINY = (
    "--model.embed 32 --model.layers 2 --model.heads 4 --seq 32 --batch 4 --steps 6 --log-every 1 "
    "--checkpoint-every 3 --validate-every 3 --validation-batches 2 --sample-every 6 --optimizer.warmup 2"
).split()
LLAMA = "--model.kv-heads 2 --model.mlp 64".split()


def write_corpus(folder: pathlib.Path, files: int = 40) -> pathlib.Path:
    """A folder of small texts that are not all alike."""
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [f"line {line} of text {number} says {line * number % 97}\n" for line in range(20)]
        (folder / f"{number:03}.txt").write_text("".join(lines))
    return folder


def command(script: str, *arguments: object) -> list[str]:
    """The command line of a script in this Python."""
    return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]


def run(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """A script in a process of its own, to its end."""
    return subprocess.run(command(script, *arguments), capture_output=True, text=True, timeout=300, **options)


def rows(run_dir: pathlib.Path, with_key: str = "loss") -> list[dict]:
    """The rows of metrics.jsonl that have a key."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if with_key in row]


def start_until(run_dir: pathlib.Path, step: int, script: str, *arguments: object) -> subprocess.Popen:
    """A script in a process of its own, returned once its metrics have reached a step."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command(script, *arguments), stdout=pipe, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return process
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"the script did not reach step {step}: {process.communicate()[0]}")
