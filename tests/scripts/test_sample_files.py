"""`sample.py --prompts` writes a text for each row of a file, and continues after it was killed."""

import json
import signal
import subprocess
import time
from types import SimpleNamespace

import jax
import pytest
import sample
from nn_reference import random_module
from script_helpers import command, PLAIN, run, run_here

from eqformer import data, kernels, models, text


ROWS = [{"prompt": "def " * (number % 5 + 1), "max_new_tokens": 40 + 17 * number % 80} for number in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small published model, and a file of rows."""
    path, config = tmp_path_factory.mktemp("published"), models.preset("llama-byte-1m")
    tokenizer = data.tokenizer_files(data.ByteTokenizer(), max_length=256)
    models.save(
        random_module(models.build, config, key=jax.random.key(0)), path / "model", config=config, files=tokenizer
    )
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return path


def flags(folder, out, *more):
    files = ["--model", folder / "model", "--prompts", folder / "rows.jsonl", "--out", out]
    return [*files, "--slots", 4, "--capacity", 256, *more]


@pytest.mark.grid
def test_a_killed_command_goes_on_and_makes_the_same_file(folder, tmp_path):
    whole = run("sample.py", *flags(folder, tmp_path / "whole", "--log-probs"))
    assert whole.returncode == 0 and "24 rows, 0 of them from before, 0 new rows with errors" in whole.stderr
    killed = 0
    for _ in range(8):
        process = subprocess.Popen(command("sample.py", *flags(folder, tmp_path / "part", "--log-probs")), env=PLAIN)
        before = lines(tmp_path / "part")
        while process.poll() is None and lines(tmp_path / "part") < before + 5:
            time.sleep(0.02)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 2 and (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    "more, rows, is_long",
    [
        ({}, None, False),
        ({"tokens": 1023}, None, False),
        ({"tokens": 1024}, None, True),
        ({"tokens": 128, "slots": 4}, 28, False),  # 7 texts in each slot
        ({"tokens": 128, "slots": 4}, 29, True),
        ({"tokens": 128, "slots": 4, "best_of": 2}, 15, True),
    ],
)
def test_layers_are_unstacked_for_many_decoding_steps(more, rows, is_long, tmp_path, monkeypatch):
    """A single short answer would wait longer for its compilation than for its tokens."""
    loads, builds = [], []
    if rows is not None:
        more = more | {"prompts": tmp_path / "rows.jsonl"}
        more["prompts"].write_text("\n".join(['{"prompt": "a"}'] * rows) + "\n\n")

    def load(*arguments, **options):
        loads.append(options["throughput"])
        return SimpleNamespace(model="model")

    monkeypatch.setattr(sample, "load_llm", load)
    monkeypatch.setattr(text, "build_kernels", builds.append)
    monkeypatch.setattr(kernels, "find_compiler", lambda: "c++")
    sample.load_model(sample.Command(**more))
    assert loads == [is_long] and builds == ["model"]


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    "more,words",
    [
        (["--prompt", "a"], "--prompts and --out belong together"),
        (["--capacity", 64], "line 2: Engine.submit(request): a prompt of 8 ids and 57 new tokens need a row of 65"),
        (["--system", "a"], "--system 'a': only a chat has a system message"),
        (["--best-of", 0], "best_of=0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(folder, tmp_path, more, words):
    refused = run_here("sample.py", *flags(folder, tmp_path / "out", *more))
    assert refused.returncode == 2 and not (tmp_path / "out").exists()
    assert words in " ".join(refused.stderr.split())
