"""Recipes in a user's file: trained, stopped, resumed over another mesh, and sampled."""

import dataclasses
import shutil
import signal

import numpy as np
import pytest
from extending import BLOCK, PAGE
from nn_reference import random_module
from script_helpers import losses, run, run_here, start_until, write_corpus
from support.load import load_llm, ModelFlags

from eqformer import data, models, training
from eqformer.recipes import _named_recipes, Recipe, RunDirectory, Text
from eqformer.recipes._setup import build_model
from eqformer.recipes._texts import copy_published_files


TINY = "--model.embed 32 --model.periods 1 --model.window 8 --seq 32 --batch 4 --steps 6 --log-every 1 "
TINY += "--checkpoint-every 3 --validate-every 100 --sample-every 0 --optimizer.warmup 2"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(
        _named_recipes, "_MODULES", {}
    )  # after a test its family is let go, so that it registers it anew
    (text,) = (block for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if block.startswith("# windowed.py"))
    path = tmp_path / "elsewhere" / "windowed.py"
    path.parent.mkdir()
    path.write_text(text)
    return path


def arguments(file, run_dir, corpus):
    return ["--recipe", f"{file}:small", "--run-dir", run_dir, "--data", corpus, *TINY.split()]


def train(file, run_dir, corpus, *more):
    return run_here("pretrain.py", *arguments(file, run_dir, corpus), *more)


@pytest.mark.grid
def test_a_recipe_of_ones_own_trains_and_writes(file, tmp_path):
    corpus, its = write_corpus(tmp_path / "corpus"), tmp_path / "run"
    file.write_text(file.read_text().replace("kinds = (True, True, False)", "kinds = (True, False)"))
    done = train(file, its, corpus, "--simulate", "1")
    assert done.returncode == 0, done.stderr
    assert (its / "recipe.py").read_text() == file.read_text()
    file.unlink()
    written = run_here("sample.py", "--run-dir", its, "--tokens", "5", "--temperature", "0")
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr


# Of as many rows a device: six steps of a rate as large as the recipe's make a difference of rounding a million times
# larger (in float64, 1e-16 becomes 4e-10).
MESH = "--mesh.replica 2 --mesh.tensor 2 --simulate 4".split()
ONE = "--mesh.fsdp 1 --mesh.tensor 1 --simulate 1".split()
OTHER = "--mesh.fsdp 2 --mesh.tensor 2 --zero 3 --simulate 4".split()


@pytest.mark.grid
def test_it_goes_on_over_another_mesh_and_from_its_copy(file, tmp_path):
    corpus, whole, parted = write_corpus(tmp_path / "corpus"), tmp_path / "whole", tmp_path / "parted"
    done = train(file, whole, corpus, *MESH)
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, parted)
    shutil.rmtree(parted / "checkpoints" / "6")  # as if it had been killed before its end
    done = train(file, parted, corpus, *OTHER)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(parted), losses(whole), rtol=2e-5)
    file.write_text(file.read_text().replace("kinds = (True, True, False)", "kinds = (True, False, False)"))
    refused = run("pretrain.py", *arguments(file, parted, corpus), *MESH)  # of a new process
    assert refused.returncode == 2 and "has changed since the run began" in refused.stderr
    file.unlink()
    copy = train(parted / "recipe.py", parted, corpus, *MESH)
    assert copy.returncode == 0 and "already has its 6 steps" in copy.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing.py:small", "there is no file nothing.py"),
        (
            "{file}:large",
            "has no function 'large' that returns the recipe; the file defines WindowedConfig, build_",
        ),
        ("{file}", "has no function 'recipe'"),
        ("{file}:number", "number() returned an int; return a recipes.Recipe"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, message, file, tmp_path):
    file.write_text(file.read_text() + "\n\ndef number():\n    return 7\n")
    done = run_here("pretrain.py", "--recipe", name.format(file=file), "--run-dir", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.grid
def test_it_is_killed_resumed_over_another_mesh_forked_and_sampled(file, tmp_path):
    """After the kill its copy goes on over the same mesh, with which the first steps over another are compared."""
    corpus, its, copy, fork = (tmp_path / name for name in ("corpus", "its", "copy", "fork"))
    write_corpus(corpus)
    process = start_until(its, 8, "pretrain.py", *arguments(file, its, corpus), *MESH, "--steps", "60")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = training.Checkpointer(its / "checkpoints").latest_step
    assert kept is not None and 3 <= kept < 60 and len(losses(its)) < 60
    shutil.copytree(its, copy)
    for folder, mesh in ((its, OTHER), (copy, MESH)):
        resumed = train(file, folder, corpus, *mesh, "--steps", "60")
        assert resumed.returncode == 0 and f"goes on at step {kept}" in resumed.stdout, resumed.stderr
    same, other = losses(copy), losses(its)
    assert len(same) == len(other) == 60 and same[:kept] == other[:kept]
    np.testing.assert_allclose(other[kept : kept + 2], same[kept : kept + 2], rtol=2e-5)
    assert abs(other[kept] - same[kept + 1]) > 1e-3  # the control: of another step
    file.unlink()
    forked = run_here("pretrain.py", "--from-run", its, "--run-dir", fork, "--steps", "6", *ONE)
    assert forked.returncode == 0 and f"starts from {its}" in forked.stdout, forked.stderr
    assert losses(fork)[0] < other[0] - 1
    written = run_here("sample.py", "--run-dir", fork, "--tokens", "5", "--temperature", "0")
    assert written.returncode == 0 and len(written.stdout) > len("def "), written.stderr


CODE = """import dataclasses, pathlib
from eqformer.training import Optimization

pathlib.Path({marker!r}).touch()


@dataclasses.dataclass(frozen=True)
class Mine(Optimization):
    pass
"""


def test_code_in_a_run_folder_runs_only_where_a_class_needs_it_and_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(_named_recipes, "_MODULES", {})
    marker, its = tmp_path / "marker", RunDirectory(tmp_path / "run")
    (tmp_path / "mine.py").write_text(CODE.format(marker=str(marker)))
    config = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, mlp=64)
    tokenizer = tmp_path / "bytes.json"
    tokenizer.write_text(data.ByteTokenizer().to_json())
    recipe = Recipe(config, text=Text(tokenizer=tokenizer))
    with its:
        its.claim(f"{tmp_path}/mine.py:make", recipe)
        its.begin(f"{tmp_path}/mine.py:make", recipe)
        copy_published_files(recipe, its)
    with its.checkpointer() as checkpointer:
        checkpointer.save({"model": random_module(build_model, recipe)}, 3, {})
    (tmp_path / "mine.py").unlink()
    tokenizer.unlink()  # the run has a copy
    llm = load_llm(ModelFlags(run_dir=its.path))  # of data alone
    assert llm.tokenizer.vocab == 256 and its.read() == (f"{tmp_path}/mine.py:make", recipe)
    assert (its.path / "recipe.py").exists() and not marker.exists()
    its.recipe.write_text(its.recipe.read_text().replace('"kind": "Optimization"', '"kind": "Mine"'))
    for script, *flags in (
        ("sample.py", "--run-dir", its.path),
        ("pretrain.py", "--from-run", its.path, "--run-dir", tmp_path / "new"),
        ("pretrain.py", "--run-dir", its.path, "--simulate", 1),
    ):
        refused = run_here(script, *flags)
        assert refused.returncode == 2 and "if you trust it, name the folder" in refused.stderr, script
        assert "the class Mine of this recipe is defined by the code in" in refused.stderr and not marker.exists()
    said = run_here("convert.py", its.path, its.path, "--trust-recipe")  # which has no need of the classes
    assert f"running the code in {its.path}/recipe.py, as --trust-recipe says" in said.stderr.replace("\n", "")
    assert marker.exists() and type(its.read()[1].optimizer).__name__ == "Mine"
