"""Datasets of the hub by name, downloaded by the hub's own client from a small local server."""

import json
import sys
import warnings

import pytest
from hub_server import Hub, restart_client, serve_hub

from eqformer import data


ROWS = "".join(json.dumps({"text": f"The {number}th story."}) + "\n" for number in range(8)).encode()
CHAT = [{"role": "user", "content": "6 times 7?"}, {"role": "assistant", "content": "42"}]
CHATS = (json.dumps({"messages": CHAT}) + "\n").encode()
FILES = {"data/train.jsonl": ROWS, "notes.md": b"# Notes", "README.md": b"# The card"}
SKIPPED = {".gitattributes": b"x", "load.csv": b"x", "data/images.zip": b"x"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with datasets; `owner/model` is a model and no dataset."""
    repositories = {"datasets/owner/texts": FILES | SKIPPED, "datasets/owner/gated": FILES}
    repositories |= {"datasets/owner/chats": {"chats.jsonl": CHATS}, "owner/model": FILES}
    repositories["datasets/owner/tables"] = {"a.csv": b"x", "README.md": b"# The card"}
    with serve_hub(repositories, {"datasets/owner/gated"}, tmp_path / "home", monkeypatch) as server:
        yield server


def read(path: str) -> list[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(document.name, document.text) for document in data.files(path)]


DOCUMENTS = [(f"data/train.jsonl#{number}", f"The {number}th story.") for number in range(8)]


def test_a_dataset_is_read_by_its_name_as_its_folder_would_be(hub, tmp_path, monkeypatch):
    with pytest.warns(
        UserWarning, match=r"files\('owner/texts', .*: skipped files of other kinds: 4 \(.gitattributes, "
    ):
        source = data.files("owner/texts")
    assert [(document.name, document.text) for document in source] == [*DOCUMENTS, ("notes.md", "# Notes")]
    assert {request for request in Hub.requests if request.startswith("GET resolve")} == {
        "GET resolve data/train.jsonl",
        "GET resolve notes.md",
    }
    (tmp_path / "local" / "data").mkdir(parents=True)
    for name in ("data/train.jsonl", "notes.md"):
        (tmp_path / "local" / name).write_bytes(FILES[name])
    assert source.fingerprint() == data.files(tmp_path / "local").fingerprint() and source.name == "texts"
    assert read("owner/texts@v1") == read("owner/texts")
    assert data.files("owner/texts/notes.md").name == "notes.md" and read("owner/texts/data/train.jsonl")[0][1]
    requests = len(Hub.requests)
    restart_client(monkeypatch, HF_HUB_OFFLINE="1")
    assert read("owner/texts") == [*DOCUMENTS, ("notes.md", "# Notes")] and len(Hub.requests) == requests


def test_chats_are_read_by_name(hub):
    assert data.detect_form("owner/chats") == "messages"
    assert [document.text for document in data.conversations("owner/chats")] == [CHATS.decode()]


def test_a_path_that_exists_comes_first(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "texts").mkdir()
    (tmp_path / "owner" / "texts" / "a.txt").write_text("local")
    assert read("owner/texts") == [("a.txt", "local")] and Hub.requests == []
    with pytest.raises(ValueError, match=r"no file or folder owner/b.txt; correct it"):
        data.files("owner/b.txt")  # a missing file, and no name of a dataset
    assert Hub.requests == []


@pytest.mark.parametrize(
    "name, words",
    [
        ("owner/absent", "there is no such file or folder here, and the hub has no dataset owner/absent, or it is"),
        ("owner/model", "there is no such file or folder here, and the hub has no dataset owner/model, or it is"),
        ("owner/gated", "owner/gated is gated; accept its terms on its page and log in (hf auth login)"),
        ("owner/texts@absent", "owner/texts has no revision 'absent'; give a branch, a tag or a commit"),
        ("owner/texts/absent.jsonl", "owner/texts has no file absent.jsonl; correct the file's name"),
        ("owner/tables", "a dataset must contain files of .txt, .md, .py, .jsonl, .parquet, but owner/tables has only "
         "README.md, a.csv; name another dataset, or stream this one (data.hub, --text.hub)"),
    ],
)  # fmt: skip
def test_bad_names_have_one_clear_error(name, words, hub):
    with pytest.raises(ValueError) as error:
        data.files(name)
    assert str(error.value).startswith(f"files({name!r}, field='text'): {words}") and "\n" not in str(error.value)


def test_a_download_that_breaks_off_is_not_taken_for_a_dataset(hub, monkeypatch):
    monkeypatch.setattr(Hub, "broken", {"data/train.jsonl"})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"the download of owner/texts broke off .*; call it again, which downloads"):
        data.files("owner/texts")
    monkeypatch.setattr(Hub, "broken", set())
    with monkeypatch.context() as patch:
        restart_client(patch, HF_HUB_OFFLINE="1")
        with pytest.raises(ValueError, match="cache holds only some files of owner/texts, since a download was interr"):
            data.files("owner/texts")
    restart_client(monkeypatch)
    assert read("owner/texts") == [*DOCUMENTS, ("notes.md", "# Notes")]  # the control: the next download is complete


def test_without_the_extra_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(
        ImportError, match=r"no such file or folder here.*huggingface_hub.*pip install \"eqformer\[hub\]"
    ):
        data.files("owner/texts")
