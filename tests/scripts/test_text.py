"""Where a run's tokens are: shared by all runs, or in its own folder."""

import shutil
from pathlib import Path

import pytest
from recipes import Recipe
from script_helpers import write_corpus
from support.run_directory import RunDirectory
from support.screen import Screen
from support.text import open_text, shared_folder, source_of

from eqformer import data, models


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.setenv("EQFORMER_TOKENS", str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def opened(corpus, run):
    recipe = Recipe(models.preset("llama-byte-1m"), data=corpus)
    return open_text(recipe, source_of(recipe), data.ByteTokenizer(), RunDirectory(run), Screen())


def test_the_shared_folder_is_in_the_users_cache_or_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("EQFORMER_TOKENS", "/big/disk")
    assert shared_folder() == [Path("/big/disk")]
    monkeypatch.delenv("EQFORMER_TOKENS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert shared_folder() == [Path("/caches/eqformer/tokens")]
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert shared_folder() == [Path("/home/me/.cache/eqformer/tokens")]

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert shared_folder() == []


def test_runs_share_tokens_and_make_them_again_once_deleted(corpus, shared, tmp_path, capsys):
    first = opened(corpus, tmp_path / "one")
    size = sum(file.stat().st_size for file in shared.rglob("*.bin")) / 1e6
    told = f"the tokens are in {shared}, which all runs share ({size:,.1f} MB; it may be deleted)\n"
    assert capsys.readouterr().out == told
    second = opened(corpus, tmp_path / "two")
    assert [store.path for store in second] == [store.path for store in first] and capsys.readouterr().out == ""
    assert len(list(shared.iterdir())) == 2 and not (tmp_path / "one").exists() and not (tmp_path / "two").exists()
    shutil.rmtree(shared)
    again = opened(corpus, tmp_path / "one")
    assert [store.path for store in again] == [store.path for store in first] and capsys.readouterr().out == told


def test_a_run_with_tokens_of_its_own_uses_them(corpus, shared, tmp_path, capsys):
    recipe = Recipe(models.preset("llama-byte-1m"), data=corpus)
    for split in ("train", "validation"):
        data.open_store(source_of(recipe), data.ByteTokenizer(), tmp_path / "run" / "data", split)
    stores = opened(corpus, tmp_path / "run")
    assert {store.path.parent for store in stores} == {tmp_path / "run" / "data"}
    assert not shared.exists() and capsys.readouterr().out == ""


def test_where_the_shared_folder_cannot_be_written_the_run_keeps_its_own_and_says_so_once(
    corpus, shared, tmp_path, capsys
):
    shared.write_text("a file, and no folder")
    stores = opened(corpus, tmp_path / "run")
    assert {store.path.parent for store in stores} == {tmp_path / "run" / "data"}
    written, told = capsys.readouterr()
    assert written == "" and told.count("\n") == 1
    assert told.startswith("warning: ") and f"cannot be written to {shared}" in told and "run/data" in told
