import json
import sys

import pytest

from eqformer.data import ByteTokenizer, files, open_store


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
    assert [piece.name for piece in pieces] == [f"book.txt#{number}" for number in range(len(pieces))]
    assert all(len(piece.text) <= 200 for piece in pieces) and all(len(piece.text) > 100 for piece in pieces[:-1])
    assert all(piece.text.endswith("\n\n") for piece in pieces[:-1])

    (tmp_path / "book.txt").write_text("abc def " * 50)
    assert all(piece.text.endswith(" ") for piece in files(tmp_path, piece=30))
    (tmp_path / "book.txt").write_text("é" * 95)
    assert [len(piece.text) for piece in files(tmp_path, piece=30)] == [30, 30, 30, 5]


def test_one_long_file_alone_can_be_split_and_two_are_left_whole(tmp_path):
    (tmp_path / "book.txt").write_text("A line of a long book.\n" * 20_000)
    source = files(tmp_path / "book.txt")
    assert 200 < len(list(source)) < 600
    train = open_store(source, ByteTokenizer(), tmp_path / "cache", "train")
    validation = open_store(source, ByteTokenizer(), tmp_path / "cache", "validation")
    assert train.text_bytes + validation.text_bytes == 460_000
    assert 0.01 < validation.text_bytes / 460_000 < 0.12
    (tmp_path / "other.txt").write_text("x")
    assert len(list(files(tmp_path))) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"path": "absent"}, r"no file or folder .*absent"),
        ({"path": "image.png"}, r"must be one of \.txt, .*ends in '\.png'"),
        ({"path": "empty_folder"}, r"must hold files of \.txt.*none in"),
        ({"path": "empty.txt"}, r"must find some text, but all of its 1 files are empty"),
        ({"path": "good.txt", "piece": 0}, r"piece counts characters and must be at least 1, but is 0"),
        ({"path": "latin.txt"}, r"must be UTF-8, but byte 1 of .*latin\.txt is 0xe9.*iconv"),
        ({"path": "good.jsonl", "field": "body"}, r"line 1 of .*good\.jsonl has no field 'body'.*\['n', 'text'\]"),
        ({"path": "good.jsonl", "field": "n"}, r"field 'n' of line 1 .* must hold text, but holds int"),
        ({"path": "list.jsonl"}, r"line 1 of .* must be an object with a field 'text', but is list"),
        ({"path": "broken.jsonl"}, r"line 2 of .*broken\.jsonl must be JSON"),
        ({"path": "latin.jsonl"}, r"must be UTF-8, but byte 11 of line 1 of .*latin\.jsonl"),
    ],
)
def test_bad_input_is_told_in_one_message(tmp_path, arguments, message):
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
    with pytest.raises(ValueError, match=r"must be a whole Parquet file"):
        list(files(path, field="body"))
