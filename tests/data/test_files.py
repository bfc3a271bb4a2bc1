import errno
import json
import os
import sys
from pathlib import Path

import pytest

from eqformer.data import _files, ByteTokenizer, files, FileTokenizer, open_store, texts


# Folders of tests hold caches and other files beside texts, of which `files` warns.
pytestmark = pytest.mark.filterwarnings("ignore:files.*skipped:UserWarning")


def _tree(root):
    (root / "b").mkdir(parents=True)
    (root / "a.txt").write_bytes("\ufeffné\r\n".encode())
    (root / "b" / "c.py").write_text("x = 1\n")
    (root / "b" / "d.MD").write_text("# d\n")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / ".hidden.txt").write_text("no")
    (root / ".git").mkdir()
    (root / ".git" / "e.txt").write_text("no")
    rows = [{"text": "one", "n": 1}, {"text": ""}, {"text": None}, {"text": "four"}]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")


def test_a_folder_gives_its_documents_in_sorted_order(tmp_path):
    _tree(tmp_path)
    source = files(tmp_path)
    assert [(document.name, document.text) for document in source] == [
        ("a.txt", "né\r\n"),  # the mark at the front is no text; line ends are kept
        ("b/c.py", "x = 1\n"),
        ("b/d.MD", "# d\n"),
        ("rows.jsonl#0", "one"),
        ("rows.jsonl#3", "four"),
    ]
    assert [document.text for document in files([tmp_path / "b" / "d.MD", tmp_path / "a.txt"])] == ["# d\n", "né\r\n"]
    assert sum(document.size for document in source) <= source.size


def test_fingerprint_follows_names_bytes_and_options_and_not_the_folder(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    _tree(one)
    _tree(two)
    assert files(one).fingerprint() == files(two).fingerprint()
    versions = {files(one).fingerprint(), files(one, field="n").fingerprint(), files(one, piece=3).fingerprint()}
    (two / "b" / "c.py").write_text("x = 2\n")
    versions.add(files(two).fingerprint())
    (one / "a.txt").rename(one / "a2.txt")
    versions.add(files(one).fingerprint())
    assert len(versions) == 5


def test_pieces_put_together_are_the_text_and_end_at_borders(tmp_path):
    paragraphs = [f"Paragraph {number}.\nIt has two lines." for number in range(40)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    pieces = list(files(tmp_path, piece=200))
    assert "".join(piece.text for piece in pieces) == "\n\n".join(paragraphs)
    assert [piece.name for piece in pieces] == ["book.txt", *(f"book.txt#{n}" for n in range(1, len(pieces)))]
    assert all(len(piece.text) <= 200 for piece in pieces) and all(len(piece.text) >= 100 for piece in pieces[:-1])
    assert all(piece.text.endswith("\n\n") for piece in pieces[:-1])

    (tmp_path / "book.txt").write_text("abc def " * 50)
    assert all(piece.text.endswith(" ") for piece in files(tmp_path, piece=30))
    (tmp_path / "book.txt").write_text("é" * 95)
    assert [len(piece.text) for piece in files(tmp_path, piece=30)] == [30, 30, 30, 5]


def test_a_file_that_is_given_itself_can_be_split_and_those_of_a_folder_are_left_whole(tmp_path):
    (tmp_path / "book.txt").write_text("A line of a long book.\n" * 20_000)
    source = files(tmp_path / "book.txt")
    assert 200 < len(list(source)) < 600
    train = open_store(source, ByteTokenizer(), tmp_path / "cache", "train")
    validation = open_store(source, ByteTokenizer(), tmp_path / "cache", "validation")
    assert train.text_bytes + validation.text_bytes == 460_000
    assert 0.01 < validation.text_bytes / 460_000 < 0.12
    (tmp_path / "other.txt").write_text("x")
    assert len(list(files(tmp_path))) == 2
    assert len({files(path).fingerprint() for path in (tmp_path, tmp_path / "book.txt", tmp_path / "other.txt")}) == 3


class Counting(ByteTokenizer):
    """Counts the texts that it is given."""

    count = 0

    def encode_batch(self, texts):
        Counting.count += len(texts)
        return super().encode_batch(texts)


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("z.jsonl", b'{"text": "x"}\n{"text": \n', r"line 2 of .*z\.jsonl must be JSON"),
        ("z.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"line 2 of .*z\.jsonl has no field 'text'"),
        ("z.txt", "né".encode("latin1"), r"byte 1 of .*z\.txt is 0xe9"),
    ],
)
def test_what_cannot_be_read_is_reported_before_anything_is_tokenised(name, data, words, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * 600_000)
    source, count = files(tmp_path), Counting.count
    open_store(source, Counting(), tmp_path / "cache", validation=0.0)
    assert Counting.count == count + 5  # a control: it counts
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        open_store(files(tmp_path), Counting(), tmp_path / "cache", validation=0.0)
    assert Counting.count == count + 5


def test_files_are_checked_once_a_source_and_again_after_a_mistake(tmp_path, monkeypatch):
    read, whole = [], _files._read_plain
    monkeypatch.setattr(_files, "_read_plain", lambda entry, *more: read.append(entry.name) or whole(entry, *more))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\xe9")
    source = files(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="0xe9"):
            open_store(source, ByteTokenizer(), tmp_path / "cache", validation=0.5)
    assert read == ["a.txt", "b.txt"] * 2
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("x")
    (tmp_path / "b.txt").unlink()
    source, number = files(tmp_path), 10
    read.clear()
    for split in ("train", "validation"):
        open_store(source, ByteTokenizer(), tmp_path / "cache", split, validation=0.5)
    assert len(read) == 3 * number  # to check them, and for each split


def test_half_a_character_is_replaced_with_a_warning(tokenizer_json, tmp_path):
    rows = [r"one \ud83e\udd8b two", r"three \ud83e four \udd8b", "five", r"\udfff", r"\ud83e\\u0041"]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    wanted = ["one 🦋 two", "three \ufffd four \ufffd", "five", "\ufffd", "\ufffd\\u0041"]
    for tokenizer in (ByteTokenizer(), FileTokenizer(tokenizer_json)):
        with pytest.warns(
            UserWarning, match=r"open_store\(.*U\+FFFD in 3 documents, the first of them rows\.jsonl#1\."
        ):
            store = open_store(files(tmp_path), tokenizer, tmp_path / "cache", validation=0.0)
        borders = zip(store.offsets[:-1], store.offsets[1:] - 1)
        assert [tokenizer.decode(store.tokens[start:stop]) for start, stop in borders] == wanted
        assert store.text_bytes == sum(len(text.encode()) for text in wanted)
    broken = {"a": "x\ud800", "b\ud800": "y"}
    with pytest.warns(UserWarning, match=r"U\+FFFD in 1 document, the first of them a\."):
        open_store(texts(broken), ByteTokenizer(), tmp_path / "cache", validation=0.0)


def test_a_name_that_is_no_utf8_is_spelled_out(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
        (folder / os.fsdecode(b"th\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("the file system has no such names")
    (folder / "rows.jsonl").write_text('{"body": ""}')
    source = files(folder, field="body")
    assert source.name == "caf\\xe9" and [document.name for document in source] == ["th\\xe9.txt"]
    store = open_store(source, ByteTokenizer(), tmp_path / "cache", validation=0.0)
    assert store.documents == 1 and store.path.name.startswith("caf-xe9-train-")
    with pytest.raises(ValueError, match=r"line 1 of .*caf\\xe9/rows\.jsonl has no field 'text'") as caught:
        list(files(folder))
    assert str(caught.value).encode("utf-8")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"path": "absent"}, r"no file or folder .*absent"),
        ({"path": "image.png"}, r"must end in one of \.txt, .*ends in '\.png'"),
        ({"path": "empty_folder"}, r"must contain files of \.txt.*none in"),
        ({"path": "empty.txt"}, r"the files must contain some text, but all 1 files are empty"),
        ({"path": "good.txt", "piece": 0}, r"piece is a number of characters, at least 1, but is 0"),
        ({"path": "latin.txt"}, r"must be UTF-8, but byte 1 of .*latin\.txt is 0xe9.*iconv"),
        ({"path": "good.jsonl", "field": "body"}, r"line 1 of .*good\.jsonl has no field 'body'.*\['n', 'text'\]"),
        ({"path": "good.jsonl", "field": "n"}, r"field 'n' of line 1 .* must hold text, but holds int"),
        ({"path": "list.jsonl"}, r"line 1 of .* must be an object with a field 'text', but is list"),
        ({"path": "broken.jsonl"}, r"line 2 of .*broken\.jsonl must be JSON"),
        ({"path": "latin.jsonl"}, r"must be UTF-8, but byte 11 of line 1 of .*latin\.jsonl"),
    ],
)
def test_bad_input_is_reported_in_one_message(tmp_path, arguments, message):
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("né".encode("latin1"))
    (tmp_path / "good.jsonl").write_text('{"text": "x", "n": 1}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "latin.jsonl").write_bytes('{"text": "né"}\n'.encode("latin1"))
    assert [document.text for document in files(tmp_path / "good.jsonl")] == ["x"]
    with pytest.raises(ValueError, match=message) as caught:
        list(files(**{**arguments, "path": tmp_path / arguments["path"]}))
    assert str(caught.value).startswith("files(")


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"files\(.*pyarrow.*eqformer\[data\]"):
        list(files(tmp_path))


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = [f"row {number} né" if number % 7 else None for number in range(3000)]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"body": wanted, "n": list(range(3000))}), path, row_group_size=500)
    source = files(path, field="body")
    documents = list(source)
    assert [(document.name, document.text) for document in documents] == [
        (f"rows.parquet#{number}", text) for number, text in enumerate(wanted) if text
    ]
    assert 0 < sum(document.size for document in documents) <= source.size
    with pytest.raises(ValueError, match=r"no field 'text'; its fields are \['body', 'n'\]"):
        list(files(path))
    with pytest.raises(ValueError, match=r"field 'n' of row 0 .* must hold text, but holds int"):
        list(files(path, field="n"))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"must be a complete Parquet file"):
        list(files(path, field="body"))


def test_nothing_in_a_folder_is_left_out_without_a_line_and_a_count(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    _tree(root)
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "f.txt").write_text("linked")
    (root / "linked").symlink_to(outside)
    (outside / "deep" / "up").symlink_to(root)  # a cycle
    (root / "again").symlink_to(root / "b")
    (root / "gone.txt").symlink_to(tmp_path / "nothing")
    (root / "empty.txt").touch()
    os.mkfifo(root / "pipe.txt")
    with pytest.warns(UserWarning) as warned:
        source = files(root)
    names = ["a.txt", "b/c.py", "b/d.MD", "linked/deep/f.txt", "rows.jsonl#0", "rows.jsonl#3"]
    assert [document.name for document in source] == names
    (line,) = [str(one.message) for one in warned]
    for words in (
        "hidden files and folders: 2 (.git, .hidden.txt)",
        "files of other kinds: 1 (image.png)",
        "links to folders that are already read: 2 (again, linked/deep/up)",
        "broken links: 1 (gone.txt)",
        "special files: 1 (pipe.txt)",
        "empty files: 1 (empty.txt)",
    ):
        assert words in line
    with pytest.warns(UserWarning, match=r"skipped rows without text: 2 \(rows.jsonl#1, rows.jsonl#2\)$"):
        source.check()


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    assert [document.name for document in files(tmp_path)] == ["a.txt"]
    scandir = os.scandir

    def refuse(folder):
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)  # as for a user who may not read it; root may read everything
    with pytest.raises(
        ValueError, match=r"every folder must be readable, but .*closed is not .*make it writable|readable"
    ):
        files(tmp_path)
