"""A small server that speaks the hub's interface, for the hub's own client."""

import base64
import hashlib
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Server of the parts of the hub's interface that describe, list, download and upload a repository.

    Names of datasets begin with `datasets/`. The connection breaks off in the middle of the files in `broken`.
    """

    repositories: dict[str, dict[str, bytes]] = {}
    gated: set[str] = set()
    broken: set[str] = set()
    token = "hf_test"
    requests: list[str] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/api").strip("/").removeprefix("models/")
        prefix, path = ("datasets/", path[9:]) if path.startswith("datasets/") else ("", path)
        name, _, rest = path.partition("/")
        name, (word, _, rest) = f"{prefix}{name}/{rest.partition('/')[0]}", rest.partition("/")[2].partition("/")
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
            name = name.removeprefix(prefix)
            return self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        if word == "tree":
            listed = [{"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                      for path, content in files.items()]  # fmt: skip
            return self.answer(200, json.dumps(listed).encode())
        if file not in files:
            return self.answer(404, error="EntryNotFound")
        return self.answer(200, files[file], is_broken=file in self.broken)

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

    def answer(self, code: int, content: bytes = b"", error: str | None = None, is_broken: bool = False) -> None:
        self.send_response(code)
        headers = {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
        headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'} | ({"X-Error-Code": error} if error else {})
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_broken else content)
        self.close_connection = self.close_connection or is_broken

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_hub(
    repositories: dict[str, dict[str, bytes]], gated: set[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve the repositories, and restart the hub's client with settings that make it use this server."""
    for name, value in {"requests": [], "gated": gated, "broken": set(), "repositories": repositories}.items():
        monkeypatch.setattr(Hub, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    restart_client(
        monkeypatch,
        HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
        HF_HOME=str(home),
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_ETAG_TIMEOUT="1",
        HF_HUB_DISABLE_TELEMETRY="1",
    )
    yield server
    server.shutdown()
    server.server_close()


def restart_client(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Make the next import load the client anew, with these settings; the client reads settings only when imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)
    for setting in settings.items():
        monkeypatch.setenv(*setting)
