"""A corpus is opened as its parts are by hand."""

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
    with pytest.raises(ValueError, match="several sources need weights"):
        opened(sources)
    with pytest.raises(ValueError, match="vocab=64"):
        opened(sources, weights=weights, vocab=64)
