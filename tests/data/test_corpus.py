"""`open_corpus` gives the same batches as stores, packings and loaders that are opened one by one."""

from typing import Any

import numpy as np
import pytest

from eqformer import data


SIZES: Any = {"seq": 16, "batch": 4, "seed": 3}


def source(name, words):
    return data.texts({f"{name}{number}": f"{words} {number} " * 20 for number in range(40)}, name=name)


def test_a_corpus_has_the_loaders_of_its_stores(tmp_path):
    sources, seen = {"a": source("a", "one"), "b": source("b", "other")}, []
    note = lambda what, done, total: seen.append(what)
    weights = {"a": 3.0, "b": 1.0}
    opened = lambda its, **more: data.open_corpus(its, data.ByteTokenizer(), tmp_path, **SIZES, **more)
    mixed = opened(sources, weights=weights, vocab=256, progress=note)
    assert {*seen} == {"a (train)", "a (validation)", "b (train)", "b (validation)"}
    hand = {
        split: {
            name: data.Loader(data.open_store(its, data.ByteTokenizer(), tmp_path, split), **SIZES)
            for name, its in sources.items()
        }
        for split in ("train", "validation")
    }
    expected = data.Mixture(hand["train"], weights, seed=3)
    for step in (0, 7):
        assert np.array_equal(mixed.train.batch(step).ids, expected.batch(step).ids)
        alone = opened({"b": sources["b"]})
        assert np.array_equal(alone.train.batch(step).ids, hand["train"]["b"].batch(step).ids)
        assert not np.array_equal(mixed.train.batch(step).ids, alone.train.batch(step).ids)  # the control
    for name, loader in hand["validation"].items():
        assert np.array_equal(mixed.held_out[name].batch(0).ids, loader.batch(0).ids)
    other = hand["train"]["a"]
    for held_out, expected_held_out in ((False, mixed.held_out), (True, {"a": other, "b": other})):
        mapped = mixed.map_loaders(lambda loader: other, held_out=held_out)
        assert mapped.loaders == {"a": other, "b": other} and mapped.held_out == expected_held_out
    with pytest.raises(ValueError, match="several sources need weights"):
        opened(sources)
    with pytest.raises(ValueError, match="vocab=64"):
        opened(sources, weights=weights, vocab=64)


def text_of(store):
    """The documents of a store as one text."""
    return bytes(store.tokens).replace(b"\0", b"").decode()


def test_five_text_files_are_split_by_position_without_a_leak(tmp_path):
    texts = {f"{name}.txt": "".join(f"{name} says {line}\n" for line in range(200)) for name in "vwxyz"}
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    opened = lambda cache, **more: data.open_corpus(
        {"texts": data.files(folder)}, data.ByteTokenizer(), tmp_path / cache, **{**SIZES, **more}
    )
    with pytest.warns(UserWarning, match=r"open_corpus\('texts', validation=0.05\): there are too few documents"):
        corpus = opened("cache")
    train, held_out = text_of(corpus.loaders["texts"].store), text_of(corpus.held_out["texts"].store)
    lines = [{*text.splitlines()} for text in (train, held_out)]
    assert not lines[0] & lines[1] and lines[0] | lines[1] == {*"".join(texts.values()).splitlines()}
    assert {line[0] for line in lines[1]} == {*"vwxyz"} and 0.05 <= len(held_out) / len(train + held_out) < 0.1
    with pytest.warns(UserWarning, match="too few documents"):  # from the cache, and anew elsewhere
        assert opened("cache").identity == corpus.identity
    with pytest.warns(UserWarning, match="too few documents"):
        assert opened("other").loaders["texts"].store.tokens.tolist() == corpus.loaders["texts"].store.tokens.tolist()
    with pytest.warns(UserWarning, match=r"the last 0.1\d+ of each document"):  # so that a row is held out
        assert opened("long", seq=1024).held_out["texts"].rows_per_epoch == 1
    for number in range(60):  # the control: enough documents, each of which is in one split
        (folder / f"more{number}.txt").write_text(f"more {number}\n" * 10)
    corpus = opened("cache")
    assert corpus.loaders["texts"].store.documents + corpus.held_out["texts"].store.documents == 65
