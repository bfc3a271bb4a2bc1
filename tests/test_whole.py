"""A file is written whole, or stays what it was."""

import pytest

from eqformer import write_whole


def test_a_file_is_written_whole_or_stays_what_it_was(tmp_path):
    path = tmp_path / "notes.txt"
    write_whole(path, "é")
    assert path.read_text(encoding="utf-8") == "é"

    def half(part):
        assert part.suffix == ".txt" and part.parent == tmp_path and path.read_text(encoding="utf-8") == "é"
        part.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_whole(path, half)
    assert path.read_text(encoding="utf-8") == "é" and list(tmp_path.iterdir()) == [path]
    write_whole(str(path), lambda part: part.write_text("whole"))
    assert path.read_text(encoding="utf-8") == "whole" and list(tmp_path.iterdir()) == [path]
