"""The hub's source through the real package `datasets`, on local folders and with no network."""

import csv
import gc
import importlib
import importlib.util
import json
import logging
import warnings
from typing import Any

import pytest

from eqformer.data import ByteTokenizer, files, hub, open_store


pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="the extra `data` is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the package's own are its affair
]
ROWS = [{"text": f"The {number}th story, né 日.", "number": number} for number in range(150)]
ROWS[7]["text"], ROWS[9]["text"] = "", None
DOCUMENTS = [(f"train#{row['number']}", row["text"]) for row in ROWS if row["text"]]


@pytest.fixture(autouse=True)
def closed():
    """The package leaves files to the garbage collector, which would warn in another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """The package reads these variables when it is imported, and would write into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        datasets = importlib.import_module("datasets")
        patch.setattr(logging.getLogger("datasets"), "disabled", True)
        yield datasets


def _parquet(path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "a.parquet", row_group_size=40)


def _json(path):
    (path / "a.json").write_text(json.dumps(ROWS))


def _lines(path):
    (path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def _csv(path):
    with (path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "number"])
        writer.writeheader()
        writer.writerows(ROWS)


def _text(path):
    (path / "a.txt").write_text("".join(f"{row['text'] or ''}\n" for row in ROWS))


@pytest.mark.parametrize("write", [_parquet, _json, _lines, _csv, _text])
def test_a_folder_of_each_kind_is_read_row_by_row(write, tmp_path):
    write(tmp_path)
    source = hub(str(tmp_path))
    assert [(document.name, document.text) for document in source] == DOCUMENTS == [tuple(its[:2]) for its in source]
    assert all(document.size == len(document.text.encode()) for document in source)
    assert len(list(hub(str(tmp_path), limit=8))) == 7  # the one before the last is empty
    if write in (_parquet, _lines):  # the control, by another reader
        assert [document.text for document in files(tmp_path)] == [text for _, text in DOCUMENTS]


def test_tokens_are_those_of_the_files_as_they_are_now(tmp_path):
    _lines(tmp_path)
    first = open_store(hub(str(tmp_path)), ByteTokenizer(), tmp_path / ".cache", validation=0.0)
    again = open_store(hub(str(tmp_path)), ByteTokenizer(), tmp_path.parent / "cache", validation=0.0)
    assert first.documents == again.documents == len(DOCUMENTS)
    before = hub(str(tmp_path)).fingerprint()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('\n{"text": "one more", "number": 150}')
    assert hub(str(tmp_path)).fingerprint() != before
    later = open_store(hub(str(tmp_path)), ByteTokenizer(), tmp_path.parent / "cache", validation=0.0)
    assert later.documents == len(DOCUMENTS) + 1 and later.path != again.path


def test_splits_by_the_names_of_files_and_saved_dictionaries(tmp_path, offline):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": f"of {split}"}))
        assert [tuple(its)[:2] for its in hub(str(tmp_path), split=split)] == [(f"{split}#0", f"of {split}")]
    offline.disable_progress_bars()
    saved = offline.DatasetDict({"train": offline.Dataset.from_list(ROWS)})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [document.text for document in hub(str(tmp_path / "saved"))] == [text for _, text in DOCUMENTS]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "JSON parse error"),
        ("a.csv", b"text,n\nabc\xff,1\n", "can't decode byte 0xff"),
        ("a.txt", b"abc\xff\n", "can't decode byte 0xff"),
        ("a.parquet", b"PAR1 cut off", "Parquet"),
        ("a.unknown", b"", r"No \(supported\) data files"),
        ("set.py", b"import datasets", "scripts are no longer supported"),
    ],
)
def test_what_cannot_be_read_is_one_error_that_names_the_dataset(name, content, message, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"hub\('.*set', .*cannot be opened: .*{message}.*; correct the name"):
        list(hub(str(folder)))


def test_other_names_fields_and_splits_are_reported(tmp_path):
    _csv(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"split": "nope"}, r"Bad split: nope. Available splits: \['train'\]"),
        ({"config": "nope"}, "BuilderConfig 'nope' not found"),
        ({"field": "nope"}, r"row 0 has no field 'nope'; its fields are \['number', 'text'\]"),
        ({"field": "number"}, "row 0 must hold text, but holds int"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            list(hub(str(tmp_path), **options))
    for name in (str(tmp_path / "absent"), "owner/name"):
        with pytest.raises(ValueError, match=rf"hub\('{name}'.*cannot be opened: .*go online"):
            list(hub(name))
