import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from eqformer.data import ByteTokenizer, hub, open_store, standard_library, texts


def test_standard_library_is_megabytes_of_this_pythons_own_text():
    source = standard_library()
    documents = list(source)
    names = [document.name for document in documents]
    assert names == sorted(set(names)) and {"argparse.py", "asyncio/tasks.py", "json/decoder.py"} < set(names)
    assert 8_000_000 < sum(len(document.text.encode()) for document in documents) < 14_000_000
    assert source.size == sum(document.size for document in documents)
    by_name = {document.name: document.text for document in documents}
    root = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "asyncio/tasks.py"):
        assert by_name[name].encode() == (root / name).read_bytes()
    banned = ("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "lib2to3", "distutils")
    assert not [name for name in names if set(banned) & set(name.split("/"))]
    assert not [name for name in names if "_sysconfigdata" in name]


@pytest.mark.grid
def test_about_a_twentieth_of_the_standard_library_is_held_out(tmp_path):
    stores = [open_store(standard_library(), ByteTokenizer(), tmp_path, split) for split in ("train", "validation")]
    train, validation = (store.text_bytes for store in stores)
    assert train + validation == standard_library().size and 0.02 < validation / (train + validation) < 0.08


def _fake_library(root, megabytes):
    for name in (
        "argparse.py",
        "asyncio/tasks.py",
        "unittest/test/test_case.py",
        "site-packages/pip/x.py",
        "stranger.py",
        "tkinter/tix.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"# a line\n" * int(megabytes * 1e6 / 9))


def test_standard_library_leaves_out_what_differs_from_machine_to_machine(tmp_path, monkeypatch):
    _fake_library(tmp_path, 0.6)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    source = standard_library()
    assert [document.name for document in source] == ["argparse.py", "asyncio/tasks.py"]
    before = source.fingerprint()
    (tmp_path / "stranger.py").write_text("changed")
    assert source.fingerprint() == before
    (tmp_path / "argparse.py").write_text("changed")
    assert source.fingerprint() != before


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    _fake_library(tmp_path, 0.0001)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"standard_library\(\).*holds 2 of them.*files\(path\)"):
        standard_library()


def test_texts_fingerprint_changes_with_names_texts_order_and_borders():
    versions = [{"a": "xy", "b": "z"}, {"a": "x", "b": "yz"}, {"b": "z", "a": "xy"}, {"a": "xy", "c": "z"}, {"a": "xy"}]
    prints = [texts(version).fingerprint() for version in versions]
    assert len(set(prints)) == len(versions)
    assert texts({"a": "xy", "b": "z"}, name="other").fingerprint() == prints[0]
    assert [tuple(document) for document in texts({"a": "né"})] == [("a", "né", 3)]


def _fake_datasets(monkeypatch, rows):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_hub_streams_the_rows_of_a_dataset(monkeypatch):
    rows = [{"text": "one"}, {"text": ""}, {"text": None}, {"text": "né"}, {"text": "never read"}]
    calls = _fake_datasets(monkeypatch, rows)
    source = hub("owner/name", config="small", revision="abc", limit=4)
    assert [tuple(document) for document in source] == [("train#0", "one", 3), ("train#3", "né", 3)]
    assert calls == [(("owner/name", "small"), {"split": "train", "revision": "abc", "streaming": True})]
    fingerprints = {
        source.fingerprint(),
        hub("owner/name", config="small", revision="abc", limit=5).fingerprint(),
        hub("owner/name", config="small", revision="abd", limit=4).fingerprint(),
        hub("owner/name", config="small", revision="abc", limit=4, field="body").fingerprint(),
    }
    assert len(fingerprints) == 4


def test_hub_once_cached_needs_neither_network_nor_package(monkeypatch, tmp_path):
    _fake_datasets(monkeypatch, [{"text": "one"}, {"text": "two"}])
    first = open_store(hub("owner/name"), ByteTokenizer(), tmp_path, validation=0.0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = open_store(hub("owner/name"), ByteTokenizer(), tmp_path, validation=0.0)
    assert again.path == first.path and again.tokens.tobytes() == b"one\0two\0"
    with pytest.raises(ImportError, match=r"hub\('owner/other'.*datasets.*eqformer\[data\]"):
        open_store(hub("owner/other"), ByteTokenizer(), tmp_path, validation=0.0)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"body": "x", "url": "y"}], r"row 0 has no field 'text'; its fields are \['body', 'url'\]"),
        ([{"text": "x"}, {"text": 7}], r"field 'text' of row 1 must hold text, but holds int"),
        (["x"], r"row 0 must be an object with a field 'text', but is str"),
    ],
)
def test_hub_names_the_fields_there_are(monkeypatch, rows, message):
    _fake_datasets(monkeypatch, rows)
    with pytest.raises(ValueError, match=message):
        list(hub("owner/name"))


def test_a_dataset_that_cannot_be_opened_is_reported(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"hub\('owner/name'.*Couldn't reach the hub.*go online"):
        list(hub("owner/name"))
