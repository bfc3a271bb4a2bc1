"""Caches of tokens in several folders, one of which is shared by runs, processes and machines."""

import platform
import shutil
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eqformer.data import ByteTokenizer, open_store, texts
from eqformer.data._atomic_folder import _delete_unfinished, write_atomic_folder


def _open(documents, folders, **options):
    source = documents if not isinstance(documents, dict) else texts(documents)
    return open_store(source, ByteTokenizer(), folders, validation=0.0, **options)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_folders_are_searched_and_the_first_is_written(corpus, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    older = _open(corpus, own)
    assert _open(corpus, [shared, own]).path == older.path and not shared.exists()
    new = _open({"a": "another text"}, [str(shared), own])
    assert new.path.parent == shared and len(_names(own)) == len(_names(shared)) == 1
    shutil.rmtree(own)
    moved = _open(corpus, [shared, own])  # made again, where new ones are
    assert moved.path == shared / older.path.name and np.array_equal(moved.tokens, older.tokens)


def test_a_folder_that_cannot_be_written_is_told_and_passed_over(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    folders = [tmp_path / "file", tmp_path / "own"]
    with pytest.warns(UserWarning, match=r"cannot be written to .*file \(.*\), and go to .*own\.$") as told:
        store = _open(corpus, folders)
    assert store.path.parent == tmp_path / "own" and len(told) == 1
    assert _open(corpus, folders).path == store.path  # found, and nothing to tell
    with (
        pytest.warns(UserWarning, match="cannot be written"),
        pytest.raises(ValueError, match=r"must be written to .*file.*another `cache_dir`"),
    ):
        _open(corpus, [tmp_path / "file", tmp_path / "file"])
    with pytest.raises(ValueError, match=r"cache_dir must name a folder, but is \[\]"):
        _open(corpus, [])


def test_a_damaged_cache_is_passed_over_where_another_folder_has_a_whole_one(corpus, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    whole, damaged = _open(corpus, own), _open(corpus, shared)
    (damaged.path / "tokens.bin").write_bytes(b"short")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _open(corpus, [shared, own]).path == whole.path
    shutil.rmtree(own)
    with pytest.warns(UserWarning, match="is damaged: .*; the text is tokenized again"):
        assert _open(corpus, [shared, own]).path == damaged.path


def test_many_writers_at_once_leave_one_whole_cache(corpus, tmp_path):
    """None sees another's half, whoever is first."""
    writers, got = 6, []
    all_begun = threading.Barrier(writers)

    def documents():
        all_begun.wait(60)
        yield from texts(corpus)

    source = replace(texts(corpus), documents=documents)
    threads = [threading.Thread(target=lambda: got.append(_open(source, tmp_path))) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == writers and len({store.path for store in got}) == 1
    assert all(store.tokens.tobytes() == got[0].tokens.tobytes() for store in got)
    assert _names(tmp_path) == [got[0].path.name] and _names(got[0].path) == ["meta.json", "offsets.bin", "tokens.bin"]


def test_a_folder_that_is_deleted_while_it_is_written_or_read_ends_nothing(corpus, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"

    def deleted():
        yield from texts(corpus)
        shutil.rmtree(shared, ignore_errors=True)  # at the first attempt

    with pytest.warns(UserWarning, match="cannot be written to"):
        store = _open(replace(texts(corpus), documents=deleted), [shared, own])
    assert store.path.parent == own
    before = store.tokens.tobytes()
    shutil.rmtree(own)
    assert store.tokens.tobytes() == before  # mapped files stay until they are closed


@pytest.mark.parametrize("machine", ["this", "another"])
def test_what_another_machine_writes_stays_even_where_its_lock_cannot_be_seen(machine, corpus, tmp_path, monkeypatch):
    target = _open(corpus, tmp_path).path
    shutil.rmtree(target)
    monkeypatch.setattr(platform, "node", lambda: machine)
    with write_atomic_folder(target):
        (unfinished,) = tmp_path.glob(f".{target.name}.*")
        shutil.copytree(unfinished, tmp_path / "kept")
    (tmp_path / "kept").rename(unfinished)  # with a lock that nobody holds
    shutil.rmtree(target)
    monkeypatch.setattr(platform, "node", lambda: "this")
    _open(corpus, tmp_path)
    assert unfinished.exists() == (machine == "another")


def test_a_finished_folder_is_locked_until_it_is_renamed(tmp_path, monkeypatch):
    rename, target = Path.rename, tmp_path / "tokens"

    def rename_while_another_process_deletes(self, new):
        _delete_unfinished(target)
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", rename_while_another_process_deletes)
    with write_atomic_folder(target) as writer:
        writer.finish({})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["meta.json", "tokens"]
