import dataclasses
import json

import numpy as np
import pytest

from eqformer import Batch
from eqformer.data import (
    ByteTokenizer,
    DocumentPacking,
    labelled_texts,
    LabelledTextEncoder,
    LabelledTextPacking,
    open_store,
    text_groups,
    TextGroupEncoder,
    TextGroupPacking,
    texts,
    WindowPacking,
)
from eqformer.data._packing import pack_best_fit


def _store(lengths, folder):
    """Documents of these many tokens, ends of text included, every token telling its document and place apart."""
    documents = {}
    for number, length in enumerate(lengths):
        letters = [chr(33 + (number * 17 + place * 5) % 90) for place in range(length - 1)]
        documents[str(number)] = "".join(letters)
    return open_store(texts(documents), ByteTokenizer(), folder, validation=0.0)


def _documents_of(store):
    return [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:])]


def _literal_best_fit(sizes, capacity):
    """Best fit, longest first, one piece at a time: how full the rows are (which of equally full ones, nobody asks)."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= capacity]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return sorted(map(sum, rows))


def _literal_pieces(documents, seq):
    """Every piece as (ids, targets, weights), spelled out."""
    pieces = []
    for document in documents:
        for start in range(0, len(document), seq):
            ids = document[start : start + seq]
            targets = document[start + 1 : start + seq + 1]
            weights = [1.0] * len(targets)
            if len(targets) < len(ids):
                targets, weights = [*targets, 0], [*weights, 0.0]
            if any(weights):
                pieces.append((ids, targets, weights))
    return pieces


def _literal_row(pieces, seq):
    """A row of these pieces, slot by slot."""
    row = {"ids": [], "targets": [], "weights": [], "positions": [], "segments": []}
    for segment, (ids, targets, weights) in enumerate(pieces):
        for place in range(len(ids)):
            row["ids"].append(ids[place])
            row["targets"].append(targets[place])
            row["weights"].append(weights[place])
            row["positions"].append(place)
            row["segments"].append(segment)
    while len(row["ids"]) < seq:
        for name, empty in (("ids", 0), ("targets", 0), ("weights", 0.0), ("positions", -1), ("segments", -1)):
            row[name].append(empty)
    return row


def _pieces_in(batch, row):
    """The pieces of a row, distinguished by their segment numbers."""
    segments = batch.segments[row]
    return [
        tuple(getattr(batch, name)[row][segments == number].tolist() for name in ("ids", "targets", "weights"))
        for number in range(segments.max() + 1)
    ]


CASES = {
    "short": ([3, 5, 2, 7, 4, 4, 6, 2, 3], 8),
    "long": ([40, 3, 17, 9, 8, 16, 25, 2], 8),
    "exact": ([8, 9, 10, 16, 17, 18], 8),
    "one": ([30], 8),
    "tight": ([2, 2, 2], 2),
    "many": (np.random.default_rng(0).integers(2, 70, 300).tolist(), 32),
    "roomy": ([3, 5, 4], 64),
}


def _check_documents(store, batch, seq):
    """What packed rows must be, computed from the documents alone."""
    wanted = _literal_pieces(_documents_of(store), seq)
    found = []
    for row in range(len(batch.ids)):
        pieces = _pieces_in(batch, row)
        literal = _literal_row(pieces, seq)
        for name, values in literal.items():
            assert getattr(batch, name)[row].tolist() == values, name
        found += pieces
    assert sorted(found) == sorted(wanted)
    fills = (batch.positions >= 0).sum(axis=1).tolist()
    assert sorted(fills) == _literal_best_fit([len(ids) for ids, *_ in wanted], seq)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_those_of_a_literal_reference(case, tmp_path):
    lengths, seq = CASES[case]
    store = _store(lengths, tmp_path)
    packing = DocumentPacking(store, seq=seq)
    batch = packing(np.arange(packing.rows))
    _check_documents(store, batch, seq)
    dtypes = {name: getattr(batch, name).dtype for name in ("ids", "targets", "positions", "segments", "examples")}
    assert set(dtypes.values()) == {np.dtype(np.int32)} and batch.weights.dtype == np.float32
    # How many documents a row holds at most is known, and that they stand in order.
    assert batch.segments is not None and batch.positions is not None
    assert packing.documents == batch.documents == max(len({*row} - {-1}) for row in batch.segments.tolist())
    for segments, positions in zip(batch.segments, batch.positions):
        filled = segments[positions >= 0]
        assert np.all(np.diff(filled) >= 0) and np.all(positions[len(filled) :] == -1)
    # Every token but the first of a document is a target once.
    assert batch.weights.sum() == sum(length - 1 for length in lengths)
    # Any rows in any order are the same rows.
    chosen = np.random.default_rng(1).integers(0, packing.rows, 5)
    for name in ("ids", "targets", "weights", "positions", "segments"):
        np.testing.assert_array_equal(getattr(packing(chosen), name), getattr(batch, name)[chosen])


FAULTS = {
    "weights": lambda weights: np.ones_like(weights),  # targets across borders count
    "segments": lambda segments: np.zeros_like(segments),  # attention crosses documents
    "positions": lambda positions: np.broadcast_to(np.arange(positions.shape[1]), positions.shape).astype(np.int32),
    "targets": lambda targets: np.roll(targets, 1, axis=1),
    "ids": lambda ids: np.roll(ids, 1, axis=0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reference_sees_a_fault(fault, tmp_path):
    lengths, seq = CASES["long"]
    store = _store(lengths, tmp_path)
    packing = DocumentPacking(store, seq=seq)
    batch = packing(np.arange(packing.rows))
    wrong: Batch = dataclasses.replace(batch, **{fault: FAULTS[fault](getattr(batch, fault))})
    with pytest.raises(AssertionError):
        _check_documents(store, wrong, seq)


def test_a_long_document_goes_on_in_the_next_rows_with_its_true_targets(tmp_path):
    store = _store([21], tmp_path)
    batch = DocumentPacking(store, seq=8)(np.arange(3))
    document = store.tokens.tolist()
    assert batch.ids[:2].tolist() == [document[0:8], document[8:16]]
    assert batch.targets[:2].tolist() == [document[1:9], document[9:17]]
    assert batch.positions is not None and batch.positions.tolist() == [
        list(range(8)),
        list(range(8)),
        [0, 1, 2, 3, 4, -1, -1, -1],
    ]
    assert batch.weights.tolist() == [[1.0] * 8, [1.0] * 8, [1.0] * 4 + [0.0] * 4]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_the_literal_one(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 60))
    sizes = random.integers(1, capacity + 1, int(random.integers(1, 200)))
    row = pack_best_fit(sizes, capacity)
    assert np.sort(np.bincount(row, sizes)).tolist() == _literal_best_fit(sizes.tolist(), capacity)
    # Negative control: the pieces in their own order do not give these rows.
    in_order = np.cumsum(sizes) // capacity
    assert np.sort(np.bincount(in_order, sizes)).tolist() != _literal_best_fit(sizes.tolist(), capacity)
    firsts = [int(np.flatnonzero(row == number)[0]) for number in range(row.max() + 1)]
    assert firsts == sorted(firsts)


def test_the_table_is_small_beside_the_tokens(tmp_path):
    store = _store(np.random.default_rng(0).integers(200, 4000, 400).tolist(), tmp_path)
    assert DocumentPacking(store, seq=512).table_bytes < 0.06 * len(store.tokens)
    assert WindowPacking(store, seq=512).table_bytes == 0


@pytest.mark.parametrize("count, seq, rows", [(33, 8, 4), (34, 8, 4), (40, 8, 4), (41, 8, 5), (9, 8, 1), (5, 1, 4)])
def test_windows_are_the_tokens_in_order(count, seq, rows, tmp_path):
    lengths = [count // 2, count - count // 2]
    store = _store(lengths, tmp_path)
    packing = WindowPacking(store, seq=seq)
    assert packing.rows == rows
    batch = packing(np.arange(rows))
    tokens = store.tokens.tolist()
    assert batch.ids.reshape(-1).tolist() == tokens[: rows * seq]
    assert batch.targets.reshape(-1).tolist() == tokens[1 : rows * seq + 1]
    assert batch.targets.reshape(-1).tolist() != tokens[: rows * seq]  # negative control: the shift matters
    assert np.all(batch.weights == 1) and batch.segments is None and batch.positions is None
    assert batch.examples.tolist() == list(range(rows))


def test_rows_that_cannot_be_made_are_reported(tmp_path):
    store = _store([5, 4], tmp_path)
    with pytest.raises(ValueError, match=r"WindowPacking\(store, seq=9\).*seq \+ 1 tokens.*has 9 tokens"):
        WindowPacking(store, seq=9)
    with pytest.raises(ValueError, match=r"DocumentPacking\(store, seq=1\).*at least 2 tokens"):
        DocumentPacking(store, seq=1)


def test_rows_of_whole_texts_hold_the_longest_text(tmp_path):
    rows = {
        "groups": [{"anchor": "abc", "positive": "abcdefgh"}],
        "classes": [{"text": "abc", "label": "x"}, {"text": "abcdefgh", "label": "y"}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    groups, classes = text_groups(tmp_path / "groups.jsonl"), labelled_texts(tmp_path / "classes.jsonl", ("x", "y"))
    encoders = (
        TextGroupEncoder(ByteTokenizer(), seq=12),
        LabelledTextEncoder(ByteTokenizer(), seq=12, labels=("x", "y")),
    )
    for source, encoder, packing in zip((groups, classes), encoders, (TextGroupPacking, LabelledTextPacking)):
        store = open_store(source, encoder, tmp_path / "tokens", validation=0.0)
        longest = int(max(np.diff(store.offsets)))
        assert packing(store, seq=longest).cut == 0  # the control
        with pytest.raises(
            ValueError, match=f"a text has {longest} tokens; make the store by a {type(encoder).__name__}"
        ):
            packing(store, seq=longest - 1)
