"""Models of the hub by name, by the hub's own client, against a small server that speaks the hub's interface."""

import base64
import dataclasses
import hashlib
import http.server
import json
import sys
import threading
from pathlib import Path

import equinox as eqx
import jax
import pytest

from eqformer import models


COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, heads=4, kv_heads=2, mlp=64)


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's interface by which a repository is described, listed and downloaded."""

    repositories: dict[str, dict[str, bytes]] = {}
    gated: set[str] = set()
    token = "hf_test"
    requests: list[str] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/")
        name, _, rest = path.partition("/")
        name, (word, _, rest) = f"{name}/{rest.partition('/')[0]}", rest.partition("/")[2].partition("/")
        revision, _, file = rest.partition("/")
        self.requests.append(f"{self.command} {word} {file}".strip())
        files = self.repositories.get(name)
        if files is None:
            return self.answer(404, error="RepoNotFound")
        if name in self.gated and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(403, error="GatedRepo")
        if revision not in ("", "main", "v1", COMMIT):
            return self.answer(404, error="RevisionNotFound")
        if word in ("", "revision"):
            return self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        if word == "tree":
            listed = [{"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                      for path, content in files.items()]  # fmt: skip
            return self.answer(200, json.dumps(listed).encode())
        if file not in files:
            return self.answer(404, error="EntryNotFound")
        return self.answer(200, files[file])

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.removeprefix("/api/").split("/")
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(401)
        self.requests.append(f"POST {path[0]} {path[-2] if len(path) > 2 else path[-1]}")
        answers: dict[str, dict[str, object]] = {"create": {"url": f"{self.address}/owner/new"}}
        answers["validate-yaml"] = {"errors": [], "warnings": []}
        if path[-2:-1] == ["preupload"]:
            files = json.loads(content)["files"]
            answers["main"] = {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                                         for file in files]}  # fmt: skip
        elif path[-2:-1] == ["commit"]:
            lines = [json.loads(line) for line in content.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.repositories["/".join(path[1:3])] = {file["path"]: base64.b64decode(file["content"]) for file in files}
            answers["main"] = {"commitUrl": f"{self.address}/owner/new/commit/{COMMIT}", "commitOid": COMMIT}
        return self.answer(200, json.dumps(answers[path[-1]]).encode())

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, code: int, content: bytes = b"", error: str | None = None) -> None:
        self.send_response(code)
        headers = {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
        headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'} | ({"X-Error-Code": error} if error else {})
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "published"
    model = models.build(CONFIG, key=jax.random.key(0))
    models.save(model, folder, config=CONFIG, files={"tokenizer.json": "{}"}, shard_bytes=8_000)
    return folder


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    """A server with repositories, and the client as it starts in a process that is to use it."""
    files = {file.name: file.read_bytes() for file in published.iterdir()}
    extra = {"pytorch_model.bin": b"x", "original/model.safetensors": b"x", "README.md": b"x", "onnx/model.onnx": b"x"}
    monkeypatch.setattr(Hub, "requests", [])
    monkeypatch.setattr(Hub, "gated", {"owner/gated"})
    monkeypatch.setattr(
        Hub,
        "repositories",
        {"owner/name": files | extra, "owner/gated": files, "owner/pickled": {"config.json": b"{}", "model.bin": b"x"}},
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for setting in settings.items():
        monkeypatch.setenv(*setting)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def restart_client(monkeypatch, **settings):
    """The client reads its settings once, when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    for setting in settings.items():
        monkeypatch.setenv(*setting)


def test_a_name_is_loaded_with_the_needed_files_only_and_once(hub, published, monkeypatch):
    assert eqx.tree_equal(models.load("owner/name"), models.load(published))
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
        "owner/name/absent.gguf": "owner/name has no file absent.gguf; correct it",
        "owner/a--b": "the hub has no models of such a name; correct it",
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
    assert eqx.tree_equal(models.load("owner/new"), models.load(published))  # and it comes back


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
