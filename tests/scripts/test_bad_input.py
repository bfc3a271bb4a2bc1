"""Bad input ends a script with one clear message and exit code 2, and overwrites nothing."""

import json
import os
import subprocess
import sys

import pretrain
import pytest
import sample
from script_helpers import command, LLAMA, TINY, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture
def refused(capsys):
    """Runs a command line in this process and returns the message of its refusal."""

    def message(*arguments, main=pretrain.main):
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert error.count("error:") <= 1 and "Traceback" not in error
        return error

    return message


@pytest.mark.parametrize(
    "arguments,words",
    [
        ("--recipe defualt", ["--recipe defualt", "default, gpt2, jaxformer, muon"]),
        ("--model.embd 64", ["model.embd", "--model.embed"]),
        ("--steps many", ["steps", "many"]),
        ("--model.heads 8 --model.kv-heads 3", ["heads=8, kv_heads=3", "[1, 2, 4, 8]"]),
        ("--recipe gpt2 --model.embed 100", ["embed=100, heads=8", "divide"]),
        ("--batch 16 --accumulate 3", ["--batch 16", "--accumulate 3", "divide"]),
        ("--recipe gpt2 --seq 1024", ["--seq 1024", "512 learned positions"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--optimizer.learning-rate -1", ["peak=-1", "positive"]),
        ("--precision.compute int8", ["int8", "floating-point"]),
        ("--data no/such/folder", ["no/such/folder"]),
        ("--text.tokenizer no/such.json", ["no/such.json"]),
        ("--data README.md --text.hub someone/texts", ["README.md", "someone/texts", "one of them"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(arguments, words, refused, tmp_path):
    error = refused("--run-dir", tmp_path / "run", *arguments.split())
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_smaller_than_a_token_id(refused, corpus, tmp_path):
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--model.vocab", 64)
    assert "vocab=64" in error and "vocab=256" in error and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_empty_and_unreadable_data(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused("--run-dir", tmp_path / "a", "--data", tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    for number in range(30):
        (tmp_path / "bad" / f"{number}.txt").write_bytes(b"\xff\xfe\x00 not utf-8")
    error = refused("--run-dir", tmp_path / "b", "--data", tmp_path / "bad", *TINY, *LLAMA)
    assert ".txt" in error and "UTF-8" in error


def test_rows_longer_than_the_text(refused, corpus, tmp_path):
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--seq", 10**6)
    assert "seq=1000000" in error


def test_a_folder_of_another_recipe_and_a_folder_that_is_no_run(refused, corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    error = refused("--run-dir", tmp_path / "other", "--data", corpus)
    assert "holds other things than a run" in error
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--model.vocab", 64)  # leaves its recipe
    recipe = (tmp_path / "run" / "recipe.json").read_text()
    error = refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA, "--model.embed", 64)
    assert "model.embed: 32 -> 64" in error and "model.vocab: 64 -> 256" in error
    assert (tmp_path / "run" / "recipe.json").read_text() == recipe
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"name": "default"}))
    assert "not a recipe that a run wrote" in refused("--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)


def test_a_truncated_checkpoint_is_an_error_and_never_a_new_start(refused, corpus, tmp_path):
    arguments = ["--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA]
    pretrain.main([str(argument) for argument in [*arguments, "--steps", 3]])
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    largest = max((tmp_path / "run" / "checkpoints" / "3").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    for error in (refused(*arguments), refused("--run-dir", tmp_path / "run", main=sample.main)):
        assert str(tmp_path / "run" / "checkpoints" / "3") in error and largest.name in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_sampling_where_there_is_no_run(refused, tmp_path):
    assert "there is no run (no recipe.json)" in refused("--run-dir", tmp_path, main=sample.main)


@pytest.mark.parametrize("limit,place", [(4_000, "data"), (60_000, "checkpoints")])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(limit, place, corpus, tmp_path):
    # A limit on the size of a file fails writes as a full disk does, for any user.
    limited = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2)"
    program = [sys.executable, "-c", limited + "; os.execv(sys.argv[1], sys.argv[1:])"]
    arguments = command("pretrain.py", "--run-dir", tmp_path / "run", "--data", corpus, *TINY, *LLAMA)
    # Without bytecode: Python itself would leave files of it cut short, which the next process could not import.
    unwritten = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=300, env=unwritten)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error:") == 1 and place in done.stderr and "File too large" in done.stderr, done.stderr
    folder = tmp_path / "run" / place
    assert not folder.exists() or not [path for path in folder.iterdir() if path.name[0].isalnum()]
