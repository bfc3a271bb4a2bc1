"""`pretrain.py` and `sample.py` as commands: their files, and a bit-for-bit resume after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import equinox as eqx
import numpy as np
import pretrain
import pytest
from script_helpers import (
    LLAMA,
    PLAIN,
    rows,
    run,
    run_here,
    saved_arrays,
    start_until,
    stop_at,
    sum_squares,
    TINY,
    write_corpus,
)

from eqformer import training
from eqformer.training import _run_folder, Checkpointer


KILLED = [*TINY, "--recipe", "gpt2-byte-1m", "--model.dropout", "0.1", "--steps", "14", "--checkpoint-every", "4"]
KILLED += ["--sample-every", "5"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


# What Python imports when it starts, on a machine whose network is down.
OFFLINE = """
import socket

def refused(*given, **options):
    raise SystemExit("the network was asked for")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refused
"""


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    # Where the terminal knows no letter beyond ASCII, as under a bare `LC_ALL=C`, on a machine with no compiler (nor
    # any other program), no network, and no home that can be written, be it by root.
    offline = tmp_path_factory.mktemp("offline")
    (offline / "sitecustomize.py").write_text(OFFLINE)
    bare = {"PATH": "", "HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "EQFORMER_TOKENS": ""}
    bare["PYTHONPATH"] = f"{offline}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    plain = PLAIN | bare | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    soon_compiled = "--execution.core", "reference", "--execution.remat", "none"
    done = run("pretrain.py", "--run-dir", run_dir, "--data", corpus, *TINY, *LLAMA, *soon_compiled, env=plain)
    assert done.returncode == 0, done.stderr
    (offline / "asks.py").write_text("import socket; socket.create_connection(('localhost', 1))")
    asks = subprocess.run([sys.executable, offline / "asks.py"], env=plain, capture_output=True, text=True)
    assert asks.stderr == "the network was asked for\n"  # the control
    return run_dir, done


@pytest.mark.quick
def test_a_run_leaves_what_it_promises(trained):
    run_dir, done = trained
    expected = {"recipe.json", "metrics.jsonl", "checkpoints", "data", "loss.png", "samples.txt", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == expected
    assert json.loads((run_dir / "recipe.json").read_text())["recipe"]["model"]["embed"] == 32
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    written = (run_dir / "samples.txt").read_text(encoding="utf-8")
    assert written.startswith("--- step 6\ndef ") and "\ufffd" in written and "\\ufffd" in done.stdout
    steps = rows(run_dir)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second"):
        assert all(np.isfinite(row[name]) and row[name] > 0 for row in steps)
    validated = rows(run_dir, "validation_loss")
    assert [row["step"] for row in validated] == [3, 6]
    bits = validated[-1]["validation_loss"] / np.log(2)
    assert validated[-1]["validation_bits_per_byte"] == pytest.approx(bits, rel=0.01)  # a byte a token, ends aside
    assert validated[-1]["validation_loss"] < validated[0]["validation_loss"] < 5.6
    assert Checkpointer(run_dir / "checkpoints").steps == [3, 6]


def test_a_machine_with_no_compiler_network_or_home_trains(trained):
    _, done = trained
    assert "cannot be written to /dev/null/home" in done.stderr and "\ntrained    6 steps" in done.stdout


@pytest.mark.grid
def test_the_default_run_ends_in_five_minutes_below_two_bits_a_byte(tmp_path):
    as_users_have_it = {name: value for name, value in PLAIN.items() if name != "XLA_FLAGS"}
    done = run("pretrain.py", "--run-dir", tmp_path / "run", env=as_users_have_it)  # which waits so long
    assert done.returncode == 0, done.stderr
    first, *_, last = (row["validation_bits_per_byte"] for row in rows(tmp_path / "run", "validation_loss"))
    assert last < 2.0 < first and rows(tmp_path / "run")[-1]["step"] == 320


def test_the_last_lines_hold_the_command_that_samples(trained):
    run_dir, done = trained
    last = done.stdout.strip().splitlines()[-5:]
    assert [line.split()[0] for line in last] == ["trained", "loss", "checkpoint", "look", "sample"]
    assert f'scripts/sample.py --run-dir {run_dir} --prompt "def " --tokens 300' in last[-1]


def test_lines_without_a_terminal_tell_what_was_measured(trained):
    """The first line comes at the first row and the last at the last step; between are at least five seconds."""
    run_dir, done = trained
    opening, *lines = [line for line in done.stdout.splitlines() if line.startswith(("llama: ", "step "))]
    assert "of 26,784 parameters, all trained, starts in" in opening
    assert "\nadamw trains 11 arrays of 26,784 parameters: all trained parameters\n" in done.stdout
    first, last = rows(run_dir)[0], rows(run_dir)[-1]
    assert lines[0].startswith(f"step 1/6  loss {first['loss']:.3f}  rate {first['learning_rate']:.2e}  ")
    assert lines[0].endswith("ETA -:--:--")
    validated = rows(run_dir, "validation_loss")[-1]["validation_loss"]
    line = f"step 6/6  loss {last['loss']:.3f}  validation {validated:.3f}  rate {last['learning_rate']:.2e}  "
    assert lines[-1].startswith(line) and lines[-1].endswith("ETA 0:00:00")


@pytest.mark.grid
def test_samples_can_be_turned_off(corpus, tmp_path, capsys):
    arguments = ["--run-dir", tmp_path, "--data", corpus, *TINY, *LLAMA, "--steps", 1, "--sample-every", 0]
    arguments += ["--optimizer.warmup", 0]
    pretrain.main([str(argument) for argument in [*arguments, "--simulate", 1]])
    lines = capsys.readouterr().out
    assert f"look at    {tmp_path}/loss.png, {tmp_path}/metrics.jsonl\n" in lines and "it writes" not in lines
    assert not (tmp_path / "samples.txt").exists()


def test_a_finished_run_says_so_and_changes_nothing(trained, corpus):
    run_dir, _ = trained
    before = (run_dir / "metrics.jsonl").read_text()
    again = run_here("pretrain.py", "--run-dir", run_dir, "--data", corpus, *TINY, *LLAMA, "--simulate", 1)
    assert again.returncode == 0 and "the run already has its 6 steps" in again.stdout
    assert (run_dir / "metrics.jsonl").read_text() == before


@pytest.mark.grid
def test_sampling_is_seeded_and_starts_with_the_prompt(trained):
    def text(seed, where="--run-dir"):
        flags = "--prompt", "line 3 ", "--tokens", 40, "--seed", seed, "--simulate", 1
        done = run_here("sample.py", where, trained[0], *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = text(1)
    assert first == text(1, "--model") != text(2)
    assert first.startswith("line 3 ")


@pytest.mark.grid
def test_a_draft_leaves_the_likeliest_text_as_it_is(trained):
    """A model that is its own draft proposes what it would write."""
    flags = "--run-dir", trained[0], "--prompt", "line 3 ", "--tokens", 40, "--temperature", 0, "--simulate", 1
    plain, drafted = (run_here("sample.py", *flags, *more) for more in ((), ("--draft", trained[0])))
    assert plain.stdout == drafted.stdout and "draft" not in plain.stderr
    assert "draft: 100% of" in drafted.stderr and "tokens a step" in drafted.stderr


@pytest.mark.grid
def test_a_killed_run_goes_on_bit_for_bit(corpus, tmp_path, monkeypatch):
    """On a mixture of two texts, and where the tokens that runs share have been deleted."""
    mix = ["--text.mix", f"{corpus}=0.7", f"{write_corpus(tmp_path / 'other', 60)}=0.3"]
    whole, killed, tokens = tmp_path / "whole", tmp_path / "killed", tmp_path / "tokens"
    monkeypatch.setitem(PLAIN, "EQFORMER_TOKENS", str(tokens))
    done = run("pretrain.py", "--run-dir", whole, *mix, *KILLED)
    assert done.returncode == 0, done.stderr
    process = start_until(killed, 9, "pretrain.py", "--run-dir", killed, *mix, *KILLED)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left_at = Checkpointer(killed / "checkpoints").latest_step
    assert left_at in (4, 8, 12)
    shutil.rmtree(tokens)
    resumed = run("pretrain.py", "--run-dir", killed, *mix, *KILLED)
    assert resumed.returncode == 0, resumed.stderr
    assert f"goes on at step {left_at}" in resumed.stdout and f"the tokens are in {tokens}, " in resumed.stdout
    numbers = ("step", "loss", "grad_norm", "learning_rate")
    assert [[row[n] for n in numbers] for row in rows(killed)] == [[row[n] for n in numbers] for row in rows(whole)]
    assert rows(killed, "validation_loss") == rows(whole, "validation_loss")
    samples = [(path / "samples.txt").read_text() for path in (killed, whole)]
    assert samples[0] == samples[1] and samples[0].count("--- step ") == 3
    ours, theirs = saved_arrays(killed, 14), saved_arrays(whole, 14)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs) and len(ours) == len(theirs) > 20
    # Validation is each source's own, and their mean by weight.
    assert "the text is corpus (" in resumed.stdout and " tokens) 0.3 of the rows, " in resumed.stdout
    for row in rows(whole, "validation_loss"):
        mean = 0.7 * row["validation_loss/corpus"] + 0.3 * row["validation_loss/other"]
        assert row["validation_loss"] == pytest.approx(mean) and row["validation_loss/other"] != row["validation_loss"]
    # The comparison can fail: two steps before, numbers were others.
    assert not eqx.tree_equal(saved_arrays(whole, 12), theirs)
    assert rows(killed)[-1]["loss"] != rows(whole)[-3]["loss"]


def endless(corpus, tmp_path):
    arguments = ["--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--steps", "100000"]
    return [*arguments, "--checkpoint-every", "100000"]


def is_saved(output, run_dir):
    (step,) = Checkpointer(run_dir / "checkpoints").steps
    return "the checkpoint is saved, and the same command goes on" in output and rows(run_dir)[-1]["step"] == step


def test_the_step_is_traced_once_and_a_signal_saves_and_ends_cleanly(corpus, tmp_path, monkeypatch):
    stop_at(monkeypatch, 2, signal.SIGINT)
    traced = []
    counting = lambda *args, **given: traced.append(threading.current_thread()) or sum_squares(*args, **given)
    monkeypatch.setattr("eqformer.training._optimization.next_token_loss", counting)
    ended = run_here("pretrain.py", *endless(corpus, tmp_path), "--simulate", 1)
    assert ended.returncode == 0 and is_saved(ended.stdout, tmp_path / "run"), ended.stderr
    assert len(traced) == 1 and traced[0] is not threading.main_thread()  # beside the program of the first weights


@pytest.mark.grid
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_process_saves_and_ends_cleanly(number, corpus, tmp_path):
    process = start_until(tmp_path / "run", 2, "pretrain.py", *endless(corpus, tmp_path))
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and is_saved(output, tmp_path / "run"), output


@pytest.mark.grid
def test_a_run_whose_folder_is_deleted_ends_at_the_next_row_and_writes_nothing(corpus, tmp_path, monkeypatch):
    class Deletes(training.JsonLines):
        def write(self, row):
            super().write(row)
            if row["step"] == 2:
                shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(_run_folder, "JsonLines", Deletes)
    ended = run_here("pretrain.py", *endless(corpus, tmp_path), "--simulate", 1)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "was deleted, moved or" in ended.stderr
    assert not (tmp_path / "run").exists()
