"""Atomic writes: a file is written completely, or keeps its old content."""

import os

import pytest

from eqformer import write_atomic


def test_a_file_is_written_whole_or_stays_what_it_was(tmp_path):
    path = tmp_path / "notes.txt"
    write_atomic(path, "é")
    assert path.read_text(encoding="utf-8") == "é"

    def half(part):
        assert part.suffix == ".txt" and part.parent == tmp_path and path.read_text(encoding="utf-8") == "é"
        part.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_atomic(path, half)
    assert path.read_text(encoding="utf-8") == "é" and list(tmp_path.iterdir()) == [path]
    write_atomic(str(path), lambda part: part.write_text("whole"))
    assert path.read_text(encoding="utf-8") == "whole" and list(tmp_path.iterdir()) == [path]


def test_a_file_and_its_name_are_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(handle):
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "notes.txt"
    write_atomic(path, "text")
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
