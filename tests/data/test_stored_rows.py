"""Arrays that are computed once for all rows: written, resumed, opened again, and refused for other rows."""

import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eqformer.data import (
    ByteTokenizer,
    ConversationEncoder,
    labelled,
    Loader,
    Mixture,
    open_store,
    open_stored_rows,
    preferences,
    texts,
)


@dataclasses.dataclass
class Sums:
    """Arrays of rows that are sums of their ids; raises an error after `limit` batches."""

    kind: str = "reference"
    limit: int = 99
    batches: int = 0
    rows: tuple[int, int] = (0, 4)
    on_writer: Any = lambda action: action()

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "model": "a", "temperature": 2.0}

    def __call__(self, batch: Any) -> dict[str, np.ndarray]:
        if self.batches == self.limit:
            raise KeyboardInterrupt
        self.batches += 1
        sums = batch.ids.sum(1).astype(np.float32)
        if self.kind == "teacher":
            return {"top_ids": batch.ids[..., None] % 7, "top_nats": np.repeat(batch.ids[..., None] / 2, 2, -1)}
        if batch.mismatched is None:
            return {"reference_nats": sums}
        return {"reference_nats": sums, "mismatched_nats": batch.mismatched.ids.sum(1).astype(np.float32)}


def pair_loader(folder: Path, seq: int = 16, count: int = 5) -> Loader:
    rows = [{"prompt": f"{number}:", "chosen": f"{number} yes", "rejected": f"{number} no"} for number in range(count)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = ConversationEncoder(ByteTokenizer(), None)
    store = open_store(preferences(folder / "pairs.jsonl"), encoder, folder / "c", validation=0.0)
    return Loader(store, seq=seq, batch=4, seed=0, packing="pairs")


def test_pairs_have_the_nats_of_their_rows(tmp_path):
    loader, progress, sums = pair_loader(tmp_path), [], Sums()
    stored = loader.with_row_arrays(sums, progress=lambda done, total: progress.append((done, total)))
    assert progress == [(2, 5), (4, 5), (5, 5)] and sums.batches == 3 and loader.stored is None
    for batch in (stored.batch(0), stored.batch(3), next(stored.epoch())):
        compared: Any = batch
        assert compared.reference_nats.tolist() == compared.ids.sum(1).tolist()
    assert len({*stored.batch(0).ids.sum(1).tolist()}) == 4  # rows differ
    again = Sums()
    assert loader.with_row_arrays(again).batch(3).reference_nats.tolist() == compared_nats(stored)  # type: ignore[attr-defined]
    assert again.batches == 0
    mixture: Any = Mixture({"a": stored}, {"a": 1.0}, seed=0).with_loaders({"a": stored}).batch(2)
    assert mixture.reference_nats.tolist() == mixture.ids.sum(1).tolist()


def compared_nats(loader: Loader) -> list[float]:
    batch: Any = loader.batch(3)
    return batch.reference_nats.tolist()


def test_labelled_rows_have_both_nats(tmp_path):
    rows = [{"prompt": f"{n}? ", "completion": f"answer {n}", "label": n % 2 == 0} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = ConversationEncoder(ByteTokenizer(), None)
    store = open_store(labelled(tmp_path / "rows.jsonl"), encoder, tmp_path / "c", validation=0.0)
    loader = Loader(store, seq=16, batch=4, seed=0, packing="labelled")
    batch: Any = loader.with_row_arrays(Sums()).batch(1)
    for part in (batch, batch.mismatched):
        assert part.reference_nats.tolist() == part.ids.sum(1).tolist()


def test_text_gets_a_teachers_ids(tmp_path):
    store = open_store(texts({"a": "some words " * 9}), ByteTokenizer(), tmp_path, validation=0.0)
    loader = Loader(store, seq=8, batch=4, seed=0).with_row_arrays(Sums("teacher"))
    batch: Any = loader.batch(0)
    assert type(batch).__name__ == "DistillationBatch" and batch.temperature == 2.0
    assert np.array_equal(batch.top_ids[..., 0], batch.ids % 7) and np.array_equal(
        batch.top_nats[..., 1], batch.ids / 2
    )


def test_rows_that_are_missing_are_computed_by_the_next_call(tmp_path):
    loader, sums = pair_loader(tmp_path), Sums(limit=2)
    with pytest.raises(KeyboardInterrupt):
        loader.with_row_arrays(sums)
    (partial,) = (tmp_path / "c").glob(".*.partial")
    with (partial / "reference_nats.bin").open("ab") as file:
        file.write(b"half a row")  # An interrupted write leaves more than is noted.
    again = Sums()
    batch: Any = loader.with_row_arrays(again).batch(0)
    assert again.batches == 1 and batch.reference_nats.tolist() == batch.ids.sum(1).tolist()
    assert not partial.exists()


def test_other_processes_open_the_folder_after_the_first_has_finished_it(tmp_path):
    loader, first_is_done = pair_loader(tmp_path), threading.Barrier(2)

    def in_first_process(action):
        if "finish" in repr(action):
            time.sleep(0.1)  # The second process would open the folder now.
        action()
        first_is_done.wait(timeout=10)

    with ThreadPoolExecutor(1) as pool:  # A thread with the same calls stands for the second process.
        waiting = Sums(on_writer=lambda action: first_is_done.wait(timeout=10))
        second = pool.submit(loader.with_row_arrays, waiting)
        first = loader.with_row_arrays(Sums(on_writer=in_first_process))
        assert compared_nats(second.result()) == compared_nats(first)
    with pytest.raises(ValueError, match="the arrays of all rows, but meta.json is absent"):  # The control: no wait.
        pair_loader(tmp_path, count=6).with_row_arrays(Sums(on_writer=lambda action: None))


def test_what_is_refused(tmp_path):
    loader = pair_loader(tmp_path)
    stored = loader.with_row_arrays(Sums()).stored
    assert stored is not None
    with pytest.raises(ValueError, match=r"were computed for {'seq': 16}, and the loader has {'seq': 12}"):
        pair_loader(tmp_path, seq=12).with_stored(stored)
    with pytest.raises(ValueError, match=r"were computed for {'tokens': "):
        pair_loader(tmp_path, count=6).with_stored(stored)
    assert loader.with_stored(open_stored_rows(stored.path)).batch(0).ids.shape == (4, 16)
    (stored.path / "reference_nats.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"reference_nats.bin should have 40 bytes but has 5; delete the folder"):
        open_stored_rows(stored.path)
