"""The folders of a run's tokens, shared or the run's own, and mixtures of several texts."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pretrain
import pytest
from hub_server import serve_hub
from script_helpers import PLAIN, write_corpus
from support.command import parse

from eqformer import data, models
from eqformer.recipes import Recipe, RunDirectory, Screen, Text
from eqformer.recipes._texts import open_sources, open_texts, shared_token_folders


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.setenv("EQFORMER_TOKENS", str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def texts_of(run, **fields):
    recipe = Recipe(models.preset("llama-byte-1m"), seq=64, batch=4, **fields)
    return open_texts(recipe, open_sources(recipe), data.ByteTokenizer(), RunDirectory(run), Screen())


def opened(corpus, run):
    """The tokens of a run on the corpus."""
    texts = texts_of(run, data=corpus)
    return [one.store for one in (*texts.loaders.values(), *texts.held_out.values())]


def test_tests_keep_tokens_out_of_the_users_home():
    (folder,) = shared_token_folders()
    assert Path(tempfile.gettempdir()) in folder.parents and PLAIN["EQFORMER_TOKENS"] == str(folder)


@pytest.mark.quick
def test_the_shared_folder_is_in_the_users_cache_or_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("EQFORMER_TOKENS", "/big/disk")
    assert shared_token_folders() == [Path("/big/disk")]
    monkeypatch.delenv("EQFORMER_TOKENS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert shared_token_folders() == [Path("/caches/eqformer/tokens")]
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert shared_token_folders() == [Path("/home/me/.cache/eqformer/tokens")]

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert shared_token_folders() == []


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
    for split in ("train", "validation"):
        data.open_store(data.files(corpus), data.ByteTokenizer(), tmp_path / "run" / "data", split)
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


def test_a_mixture_has_each_sources_own_order_and_its_own_held_out_text(corpus, shared, tmp_path):
    other = write_corpus(tmp_path / "other", 80)
    mix = (f"{corpus}=3", f"{other}=1")
    texts = texts_of(tmp_path / "run", text=Text(mix=mix))
    alone = {place.name: texts_of(tmp_path / "run", data=place) for place in (corpus, other)}
    assert texts.weights == {"corpus": 0.75, "other": 0.25} and list(texts.loaders) == list(texts.held_out) == [*alone]
    for name, its in alone.items():
        assert texts.loaders[name].store.path == its.loaders[name].store.path
        assert np.array_equal(texts.loaders[name].batch(5).ids, its.train.batch(5).ids)
        assert texts.held_out[name].store.path == its.held_out[name].store.path
    assert texts.tokens == tuple(map(sum, zip(*(its.tokens for its in alone.values()))))
    # A checkpoint's text is another where a weight is, but not where both are multiplied.
    same, others = (
        texts_of(tmp_path, text=Text(mix=(f"{corpus}=0.75", f"{other}=0.25"))),
        texts_of(tmp_path, text=Text(mix=mix[::-1])),
    )
    assert same.identity == texts.identity != others.identity and texts.identity.count(" + ") == 1
    numbers = [rows * 100 * 4 / texts.loaders[name].rows_per_epoch for name, rows in texts.weights.items()]
    counted = [f"{len(one.store.tokens):,}" for one in texts.loaders.values()]
    assert texts.describe(100) == (
        f"the text is corpus ({counted[0]} tokens) 0.75 of the rows, {numbers[0]:.3g} epochs; "
        f"other ({counted[1]} tokens) 0.25 of the rows, {numbers[1]:.3g} epochs"
    )
    assert alone["other"].describe(100) == ""


def test_a_mixture_of_folders_of_one_name_is_told_apart_by_their_paths(shared, tmp_path):
    places = [write_corpus(tmp_path / where / "text") for where in ("a", "b")]
    recipe = Recipe(models.preset("llama-byte-1m"), text=Text(mix=tuple(f"{place}=1" for place in places)))
    assert list(open_sources(recipe)) == [str(place) for place in places]


def test_the_command_line_spells_a_mixture():
    command = parse(pretrain.Command, "--text.mix a/b=0.7 hub:owner/name=0.3 --steps 5".split())
    assert command.run.text.mix == ("a/b=0.7", "hub:owner/name=0.3") and command.run.steps == 5


def test_validation_is_the_mean_of_the_sources_by_their_weights(corpus, shared, tmp_path):
    """With a model whose loss of a token is its id, against numpy over the held-out rows."""
    other = write_corpus(tmp_path / "other", 80)
    texts = texts_of(tmp_path / "run", text=Text(mix=(f"{corpus}=3", f"{other}=1")))

    def sums(batch):
        counted = {"nats": batch.ids, "correct": batch.ids < 60, "count": np.ones_like(batch.ids)}
        return {name: (x * batch.weights).sum() for name, x in counted.items()}

    mean, each = texts.validate(sums, 10**6, rows=(0, 4))
    ids = [one.packing(np.arange(one.rows_per_epoch)).ids for one in texts.held_out.values()]
    sizes = [one.store.bytes_per_token for one in texts.held_out.values()]
    assert list(each) == ["corpus", "other"]
    assert [its.loss for its in each.values()] == pytest.approx([its.mean() for its in ids])
    assert mean.loss == pytest.approx(0.75 * ids[0].mean() + 0.25 * ids[1].mean())
    assert mean.accuracy == pytest.approx(0.75 * (ids[0] < 60).mean() + 0.25 * (ids[1] < 60).mean())
    assert mean.bytes_per_token == pytest.approx(0.75 * sizes[0] + 0.25 * sizes[1])
    assert mean.loss != pytest.approx(np.concatenate(ids).mean(), rel=1e-4)  # the control: not the mean of all rows
    alone, of_one = texts_of(tmp_path / "run", data=other).validate(sums, 10**6)
    assert alone == of_one["other"] == each["other"]


def test_data_may_be_the_name_of_a_dataset_of_the_hub(tmp_path, monkeypatch):
    files = {"a.txt": b"a story", "README.md": b"# The card"}
    with serve_hub({"datasets/owner/texts": files}, set(), tmp_path / "home", monkeypatch):
        command = parse(pretrain.Command, ["--data", "owner/texts"])
        ((name, (source, _)),) = open_sources(command.run).items()
    assert name == "texts" and [document.text for document in source] == ["a story"]
