"""Models of the hub by name, downloaded by the hub's own client from a small local server."""

import dataclasses
import sys
from pathlib import Path

import jax
import pytest
from haste import same_trees
from hub_server import COMMIT, Hub, restart_client, serve_hub
from nn_reference import random_module

from eqformer import models


CONFIG = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, heads=4, kv_heads=2, mlp=64)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "published"
    model = random_module(models.build, CONFIG, key=jax.random.key(0))
    models.save(model, folder, config=CONFIG, files={"tokenizer.json": "{}"}, shard_bytes=8_000)
    return folder


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    """A server with repositories, and the client as it starts in a process that is to use it."""
    files = {file.name: file.read_bytes() for file in published.iterdir()}
    extra = {"pytorch_model.bin": b"x", "original/model.safetensors": b"x", "README.md": b"x", "onnx/model.onnx": b"x"}
    repositories = {"owner/name": files | extra, "owner/gated": files}
    repositories["owner/modelopt"] = files | {"hf_quant_config.json": b'{"quantization": {"quant_algo": "INT4"}}'}
    repositories["owner/pickled"] = {"config.json": b"{}", "model.bin": b"x"}
    with serve_hub(repositories, {"owner/gated"}, tmp_path / "home", monkeypatch) as server:
        yield server


def test_a_name_is_loaded_with_the_needed_files_only_and_once(hub, published, monkeypatch):
    assert same_trees(models.load("owner/name"), models.load(published))
    folder = models.local_path("owner/name@v1")
    assert folder.name == COMMIT and {file.name for file in folder.iterdir()} == {
        file.name for file in published.iterdir()
    }
    assert len([file for file in folder.glob("*.safetensors")]) > 1  # the shards that the index names
    downloads = [request for request in Hub.requests if request.startswith("GET resolve")]
    assert len(downloads) == len({*downloads}) == len(list(published.iterdir()))
    restart_client(monkeypatch, HF_HUB_OFFLINE="1")
    assert models.read_config("owner/name") == CONFIG  # from the cache
    with pytest.raises(ValueError, match="the hub cannot be reached, and its cache does not hold owner/gated"):
        models.read_config("owner/gated")


def test_the_file_in_which_modelopt_states_its_format_is_downloaded(hub):
    assert (models.local_path("owner/modelopt") / "hf_quant_config.json").is_file()
    with pytest.raises(ValueError, match="hf_quant_config.json: quantization: quant_algo='INT4' is not known"):
        models.load("owner/modelopt")


def test_a_path_that_exists_comes_first(hub, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(published)
    assert models.local_path("owner/name") == Path("owner/name") and Hub.requests == []
    assert models.local_path("a/b/c") == Path("a/b/c") and models.local_path("/a/b") == Path("/a/b")


def test_a_gated_model_asks_for_a_login(hub, monkeypatch):
    with pytest.raises(ValueError, match=r"owner/gated is gated; accept its terms on its page and log in"):
        models.read_config("owner/gated")
    restart_client(monkeypatch, HF_TOKEN=Hub.token)
    assert models.read_config("owner/gated") == CONFIG


def test_bad_names_have_one_clear_error(hub, monkeypatch):
    for name, words in {
        "owner/absent": "there is no such folder here, and the hub has no model owner/absent, or it is private",
        "owner/name@absent": "owner/name has no revision 'absent'; give a branch, a tag or a commit",
        "owner/pickled": "the repository has no model.safetensors and no model.safetensors.index.json. Pickled",
        "owner/name/absent.gguf": "owner/name has no file absent.gguf; correct the file's name",
        "owner/a--b": "the hub has no models of such a name; correct the name",
    }.items():
        with pytest.raises(ValueError) as error:
            models.load(name)
        assert str(error.value).startswith(f"load({name!r}): {words}") and "\n" not in str(error.value)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ValueError, match=r"the hub cannot be reached, and its cache does not hold owner/other; check"):
        models.load("owner/other")


def test_a_folder_is_uploaded_with_its_card(hub, published, monkeypatch):
    card = models.ModelCard("apache-2.0", "owner/name", ("owner/texts", "my notes"), "pretrain.py --steps 5")
    restart_client(monkeypatch, HF_TOKEN=Hub.token)
    assert models.push(published, "owner/new", card).endswith(f"/owner/new/commit/{COMMIT}")
    uploaded = Hub.repositories["owner/new"]
    assert uploaded.keys() == {file.name for file in published.iterdir()} | {"README.md"}
    text = uploaded["README.md"].decode()
    header = text.split("---\n")[1]
    assert 'license: "apache-2.0"\nbase_model: "owner/name"\ndatasets: ["owner/texts"]\n' in header
    for words in ("# new\n", "- Data: owner/texts, my notes\n", "pretrain.py --steps 5", "eqformer.load('owner/new')"):
        assert words in text
    assert same_trees(models.load("owner/new"), models.load(published))  # and it comes back


def test_uploads_that_cannot_be_are_refused_before_anything_is_sent(hub, published, tmp_path, monkeypatch):
    card = models.ModelCard("other")
    for folder, name, words in (
        (tmp_path, "owner/new", r"there is no published folder \(no config.json\)"),
        (published, "new", "the name of a model of the hub is OWNER/NAME"),
        (published, "owner/new", "the hub refuses the upload .* log in with a token that may write"),
    ):
        with pytest.raises(ValueError, match=words):
            models.push(folder, name, card)
    assert "owner/new" not in Hub.repositories and "base_model" not in card.to_markdown("owner/new")


def test_without_the_extra_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"no such folder here.*huggingface_hub.*pip install \"eqformer\[hub\]\""):
        models.load("owner/name")


def test_a_download_that_breaks_off_is_not_taken_for_a_model(hub, published, monkeypatch):
    shard = max(file.name for file in published.glob("*.safetensors"))
    monkeypatch.setattr(Hub, "broken", {shard})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(
        ValueError, match=r"load\('owner/name'\): the download of owner/name broke off .*; call it again"
    ):
        models.load("owner/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    restart_client(monkeypatch)
    with pytest.raises(ValueError, match="its cache holds only some files of owner/name, since a download was interr"):
        models.load("owner/name")
    monkeypatch.setattr(Hub, "broken", set())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    restart_client(monkeypatch)
    assert same_trees(models.load("owner/name"), models.load(published))
    restart_client(monkeypatch, HF_HUB_OFFLINE="1")
    assert same_trees(models.load("owner/name"), models.load(published))  # the control: all files are there
