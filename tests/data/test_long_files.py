"""Long and growing files: they are read block by block, and a held-out text stays held out when its file grows."""

import json
import random
import tracemalloc

import pytest

from eqformer.data import _files, files
from eqformer.data._token_store import is_validation


pytestmark = pytest.mark.filterwarnings("ignore:files.*skipped:UserWarning")  # of empty files


def _text(number, length):
    """Words and lines and paragraphs of characters of one to four bytes."""
    draw = random.Random(number)
    parts = ["salt ", "ocean ", "né ", "日本 ", "🦋", "a line\n", "a paragraph.\n\n", "\n\n\n", "w" * 70]
    return "".join(draw.choice(parts) for _ in range(length))


def _split_of(documents):
    """For each character of each file, whether it is held out."""
    found: dict[str, list[bool]] = {}
    for document in documents:
        is_held = is_validation(document.name, 0.3)
        found.setdefault(document.name.split("#")[0], []).extend([is_held] * len(document.text))
    return found


WAYS = {
    "a file": lambda folder, name: files(folder / name),
    "pieces": lambda folder, name: files(folder, piece=50),
    "a folder": lambda folder, name: files(folder),
    "several": lambda folder, name: files([folder / name, *sorted(folder.glob("other*"))]),
}


@pytest.mark.by_default("pieces", "a folder")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_out_stays_so_however_the_corpus_grows(way, tmp_path, monkeypatch):
    """Text is added at a file's end, wherever it ended, and files beside it."""
    monkeypatch.setattr(_files, "_MAX_CHARACTERS", 400)
    text = _text(0, 60_000 if way == "a file" else 3000)
    sizes = range(20, len(text), len(text) // 15) if way == "a file" else range(20, 2000, 29)
    before, others = {"book.txt": []}, 0
    for place, size in enumerate([*sizes, len(text)]):
        (tmp_path / "book.txt").write_bytes(text[:size].encode())
        if way != "a file" and place % 20 == 15:
            (tmp_path / f"other{others}.txt").write_bytes(_text(size, 200).encode())
            others += 1
        now = _split_of(WAYS[way](tmp_path, "book.txt"))
        assert len(now["book.txt"]) == size and len(now) == 1 + others
        assert all(now[name][: len(its)] == its for name, its in before.items())
        before = now
    assert 0.1 < sum(now["book.txt"]) / len(text) < 0.6


def test_pieces_that_follow_the_size_of_the_file_would_not_stay(tmp_path):
    """A control of the test above."""
    text = _text(0, 3000)
    (tmp_path / "book.txt").write_bytes(text.encode())
    grown = text + _text(1, 300)
    (tmp_path / "grown.txt").write_bytes(grown.encode())
    named = [
        _split_of(files(tmp_path / name, piece=len(its) // 64))
        for name, its in (("book.txt", text), ("grown.txt", grown))
    ]
    old, new = named[0]["book.txt"], named[1]["grown.txt"][: len(text)]
    assert sum(was and not now for was, now in zip(old, new, strict=True)) > 0.1 * len(text)


def test_rows_that_are_added_leave_the_others_where_they_are(tmp_path):
    rows = [json.dumps({"text": f"story {number}"}) + "\n" for number in range(50)]
    for count in (10, 11, 50):
        (tmp_path / "rows.jsonl").write_text("".join(rows[:count]))
        assert [document.name for document in files(tmp_path)] == [f"rows.jsonl#{number}" for number in range(count)]


@pytest.mark.parametrize("block", [1, 3, 50])
def test_documents_do_not_depend_on_how_a_file_is_read(block, tmp_path, monkeypatch):
    text = _text(2, 400)
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "other.md").write_bytes(b"")
    for way in WAYS.values():
        with monkeypatch.context() as patch:
            patch.setattr(_files, "_MAX_CHARACTERS", 300)
            want = list(way(tmp_path, "book.txt"))
            patch.setattr(_files, "_BLOCK_BYTES", block)
            assert list(way(tmp_path, "book.txt")) == want and len(want) > 1
        assert "".join(document.text for document in want) == text
    (tmp_path / "book.txt").write_bytes(text.encode()[:100] + b"\xff")
    monkeypatch.setattr(_files, "_BLOCK_BYTES", block)
    with pytest.raises(ValueError, match=r"byte 100 of .*book\.txt is 0xff"):
        list(files(tmp_path))
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfab" + "日".encode()[:2])
    with pytest.raises(ValueError, match=r"byte 5 of .*book\.txt is 0xe6"):
        list(files(tmp_path))


@pytest.mark.parametrize("name", ["", "book.txt"])
def test_of_a_long_file_a_document_is_held_at_once(name, tmp_path):
    (tmp_path / "book.txt").write_bytes(b"A line of a long book.\n" * 1_000_000)
    source = files(tmp_path / name)
    tracemalloc.start()
    try:
        size = sum(document.size for document in source)
        read = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        whole = (tmp_path / "book.txt").read_bytes()
        control = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == len(whole) == source.size == 23_000_000
    assert read < 8_000_000 < 23_000_000 <= control
