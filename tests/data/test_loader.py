import dataclasses

import numpy as np
import pytest

from eqformer.data import ByteTokenizer, Loader, open_store, texts


FIELDS = ("ids", "targets", "weights", "positions", "segments", "examples")
PACKINGS = ("windows", "documents")


def _equal(one, two):
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in FIELDS)


def _join(batches):
    held = [name for name in FIELDS if getattr(batches[0], name) is not None]
    return {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in held}


def _row_texts(batch):
    named = [getattr(batch, name) for name in ("ids", "targets", "weights", "segments")]
    fields = [field for field in named if field is not None]
    return [b"|".join(field[row].tobytes() for field in fields) for row in range(len(batch.ids))]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_each_epoch_has_every_row_once(store, packing, batch):
    loader = Loader(store, seq=160, batch=batch, seed=5, packing=packing)
    rows = loader.rows_per_epoch
    every = sorted(_row_texts(loader.packing(np.arange(rows))))
    stream = [row for step in range(-(-3 * rows // batch)) for row in _row_texts(loader.batch(step))]
    epochs = [stream[start : start + rows] for start in (0, rows, 2 * rows)]
    for epoch in epochs:
        assert sorted(epoch) == every
    assert epochs[0] != epochs[1] and epochs[1] != epochs[2]
    assert sorted(stream[3 : 3 + rows]) != every  # negative control: a stretch that is no epoch
    assert loader.steps_per_epoch == -(-rows // batch)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_is_a_function_of_seed_and_step_alone(store, packing):
    make = lambda **changes: Loader(store, **{"seq": 16, "batch": 4, "seed": 5, "packing": packing, **changes})
    loader, again = make(), make()
    forwards = [loader.batch(step) for step in range(12)]
    backwards = [again.batch(step) for step in reversed(range(12))][::-1]
    assert all(_equal(one, two) for one, two in zip(forwards, backwards))
    assert not _equal(forwards[3], forwards[4]) and not _equal(forwards[3], make(seed=6).batch(3))
    # Twice the batch in half the steps is the same run.
    joined, wide = _join(forwards), _join([make(batch=8).batch(step) for step in range(6)])
    assert all(np.array_equal(joined[name], wide[name]) for name in joined)
    assert joined["examples"].tolist() == list(range(48))
    assert {getattr(forwards[0], name).dtype.name for name in joined} == {"int32", "float32"}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("borders", [(0, 8), (0, 4, 8), (0, 1, 3, 8), tuple(range(9))])
def test_the_hosts_rows_put_together_are_the_batch(store, packing, borders):
    loader = Loader(store, seq=16, batch=8, seed=1, packing=packing)
    for step in (0, 3, 1_000_003):
        parts = _join([loader.rows(step, start, stop) for start, stop in zip(borders[:-1], borders[1:])])
        whole = loader.batch(step)
        assert all(np.array_equal(parts[name], getattr(whole, name)) for name in parts)
    if len(borders) > 2:  # negative control: hosts in another order would not do
        wrong = _join([loader.rows(3, start, stop) for start, stop in zip(borders[-2::-1], borders[:0:-1])])
        assert not np.array_equal(wrong["ids"], loader.batch(3).ids)


def test_a_host_makes_its_own_rows_only(store, monkeypatch):
    loader = Loader(store, seq=16, batch=8, seed=1)
    made = []

    class Watched:
        rows, group = loader.packing.rows, loader.packing.group

        def __call__(self, rows, packing=loader.packing):
            made.append(len(rows))
            return packing(rows)

    monkeypatch.setattr(loader, "packing", Watched())
    assert len(loader.rows(2, 5, 7).ids) == 2 and made == [2]


def test_example_numbers_stay_int32_for_ever(store):
    loader = Loader(store, seq=16, batch=8, seed=1)
    step = 2**31 // 8
    assert loader.batch(step - 1).examples.tolist() == list(range(2**31 - 8, 2**31))
    assert loader.batch(step).examples.tolist() == list(range(8))
    assert not np.array_equal(loader.batch(step).ids, loader.batch(0).ids)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_ordered_pass_takes_every_row_once(store, packing):
    loader = Loader(store, seq=40, batch=7, seed=1, packing=packing)
    batches = list(loader.epoch())
    assert len(batches) == loader.steps_per_epoch and {batch.ids.shape for batch in batches} == {(7, 40)}
    joined, rows = _join(batches), loader.rows_per_epoch
    every = loader.packing(np.arange(rows))
    assert rows % 7, "the last batch must need filling for this test to show something"
    for name in joined:
        assert np.array_equal(joined[name][:rows], getattr(every, name))
    assert not joined["weights"][rows:].any() and joined["weights"].sum() == every.weights.sum()
    assert all(_equal(one, two) for one, two in zip(batches, loader.epoch()))
    other_seed = Loader(store, seq=40, batch=7, seed=2, packing=packing)
    assert all(_equal(one, two) for one, two in zip(batches, other_seed.epoch()))
    halves = [_join([a, b]) for a, b in zip(loader.epoch(stop=3), loader.epoch(start=3))]
    assert all(np.array_equal(half["weights"], batch.weights) for half, batch in zip(halves, batches))
    assert all(np.array_equal(half["ids"], batch.ids) for half, batch in zip(halves, batches))


def test_a_short_pass_is_spread_over_the_data(store):
    loader = Loader(store, seq=16, batch=5, seed=1)
    examples = _join(list(loader.epoch(3)))["examples"]
    rows = loader.rows_per_epoch
    assert examples.tolist() == [number * rows // 15 for number in range(15)]
    assert len(set(examples.tolist())) == 15 and examples[-1] > 0.9 * rows
    assert len(list(loader.epoch(10**6))) == loader.steps_per_epoch


def test_a_batch_larger_than_the_data_runs_through_it_several_times(tmp_path):
    store = open_store(texts({"a": "0123456789"}), ByteTokenizer(), tmp_path, validation=0.0)
    loader = Loader(store, seq=2, batch=12, seed=0)
    assert loader.rows_per_epoch == 5 and loader.steps_per_epoch == 1
    ids = loader.batch(0).ids.tolist()
    for start in (0, 5):
        assert sorted(ids[start : start + 5]) == loader.packing(np.arange(5)).ids.tolist()
    (only,) = loader.epoch()
    assert only.weights.sum() == 10 and only.ids.shape == (12, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": 0}, r"at least 1 row, but batch is 0"),
        ({"seq": 0}, r"WindowPacking\(store, seq=0\): .*seq is at least 1"),
        ({"seq": 10**6}, r"WindowPacking\(store, seq=1000000\): .* has \d+ tokens; pass a seq from 1 to \d+"),
        ({"seq": 1, "packing": "documents"}, r"DocumentPacking\(store, seq=1\): .*at least 2"),
    ],
)
def test_bad_sizes_are_reported(store, changes, message):
    with pytest.raises(ValueError, match=message):
        Loader(store, **{"seq": 16, "batch": 4, "seed": 0, **changes})


def test_documents_are_packed_into_rows_longer_than_the_text(tmp_path):
    store = open_store(texts({"a": "0123", "b": "45678"}), ByteTokenizer(), tmp_path, validation=0.0)
    batch = Loader(store, seq=64, batch=1, seed=0, packing="documents").batch(0)
    assert batch.segments is not None
    assert batch.weights.sum() == 9 and sorted(set(batch.segments[0])) == [-1, 0, 1]
    with pytest.raises(ValueError, match="has 11 tokens"):
        Loader(store, seq=64, batch=1, seed=0)


@pytest.mark.parametrize("step, start, stop", [(-1, 0, 4), (0, 2, 2), (0, -1, 2), (0, 0, 5)])
def test_rows_outside_the_batch_are_reported(store, step, start, stop):
    loader = Loader(store, seq=16, batch=4, seed=0)
    with pytest.raises(ValueError, match=rf"Loader\.rows\(step={step}, start={start}, stop={stop}\).*batch is 4"):
        loader.rows(step, start, stop)


def test_a_bad_pass_is_reported_when_it_is_asked_for(store):
    loader = Loader(store, seq=16, batch=4, seed=0)
    for arguments in ({"batches": 0}, {"start": 3, "stop": 2}, {"stop": 5}):
        with pytest.raises(ValueError, match=r"Loader\.epoch\(.*batch is 4"):
            loader.epoch(**arguments)


@pytest.mark.parametrize(("packing", "absent"), [("windows", {"positions", "segments"}), ("documents", set())])
def test_batches_are_trees_of_arrays(store, packing, absent):
    batch = Loader(store, seq=16, batch=4, seed=0, packing=packing).batch(0)
    arrays = [field.name for field in dataclasses.fields(batch) if not field.metadata.get("static")]
    fields = {name: getattr(batch, name) for name in arrays if not name.startswith("source_")}  # nothing to read beside
    # Types of tokens are given with pairs of texts, and a step numbers the rows.
    assert {name for name, field in fields.items() if field is None} == absent | {"types", "row_numbers"}
    assert all(isinstance(field, np.ndarray) for field in fields.values() if field is not None)
