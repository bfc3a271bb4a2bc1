"""Readers of files: whatever a file contains, a reader raises one `ValueError` that names the file."""

import json
import os
import socket
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from eqformer import data, models, read_json, read_utf8
from eqformer._failures import foreign_call
from eqformer._files import check_regular, map_bytes, MAX_JSON_DEPTH, open_regular, parse_json, read_bytes
from eqformer.recipes._named_recipes import read_recipe
from eqformer.training import JsonLines, plot_losses


def place_pipe(path: Path) -> None:
    os.mkfifo(path)


def place_socket(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the longest path of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


IRREGULAR = {
    "a pipe": place_pipe,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a folder": lambda path: path.mkdir(),
    "a socket": place_socket,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "bytes that are no text": b'{"text": "\xff"}\n',
    "nested lists": b"[" * 100_000,
    "nested lists that end": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a little too deep": b'{"step": 1, "text": ' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"}",
    "a huge integer": b'{"step": ' + b"9" * 10_000 + b"}",
    "a number": b"3\n",
    "a text": b'"text"\n',
    "a list": b"[1, 2]\n",
    "null": b"null\n",
}
TWICE = {"a name twice": b'{"text": "a", "text": "b", "step": 1, "step": 2}\n'}


CONFIG = models.preset("gpt2-byte-1m")
MODEL = eqx.filter_eval_shape(models.build, CONFIG, key=jax.random.key(0))


# How each kind of file is read, by its name.
READERS = {
    "any.json": read_json,
    "config.json": lambda path: models.read_config(path.parent),
    "model.safetensors.index.json": lambda path: models.load(config_beside(path)),
    "generation_config.json": lambda path: models.read_eos_token_ids(path.parent),
    "tokenizer.json": data.FileTokenizer,
    "tokenizer_config.json": lambda path: data.ChatTemplate(path.parent),
    "special_tokens_map.json": lambda path: data.ChatTemplate(path.parent),
    "adapter_config.json": lambda path: models.load_adapter(MODEL, adapter_beside(path), config=CONFIG),
    "recipe.json": read_recipe,
}
LINES = {
    "rows.jsonl": lambda path: list(data.files(path)),
    "metrics.jsonl": lambda path: JsonLines(path, from_step=3),
    "drawn.jsonl": lambda path: plot_losses(path, path.with_suffix(".png")),
}
OTHERS = {
    "text.txt": lambda path: list(data.files(path)),
    "rows.parquet": lambda path: list(data.files(path)),
    "model.safetensors": lambda path: models.load(config_beside(path)),
    "model.gguf": models.load,
    "chat_template.jinja": lambda path: data.ChatTemplate(path.parent),
    "utf8.txt": read_utf8,
    "checked": check_regular,
    "mapped": map_bytes,
    "opened": open_regular,
    "bytes": read_bytes,
}


# A folder is a published model too, and where a link leads to nothing a new file of metrics begins.
OTHERWISE = {("model.gguf", "a folder"), ("metrics.jsonl", "a link")}


def config_beside(path: Path) -> Path:
    (path.parent / "config.json").write_text(json.dumps({"model_type": "gpt2"} | models.FAMILIES["gpt2"].write(CONFIG)))
    return path.parent


def adapter_beside(path: Path) -> Path:
    save_file({"a": np.zeros(1, np.float32)}, path.parent / "adapter_model.safetensors")
    return path.parent


def refusal(reader, path: Path) -> str:
    """The message of the `ValueError` that the reader raises, without its path, in time."""
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        reader(path)
    assert type(caught.value) is ValueError and time.perf_counter() - start < 2.0
    assert path.name in str(caught.value) and len(str(caught.value)) < 1000, str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [*READERS, *LINES, *OTHERS])
def test_only_regular_files_are_read(name, tmp_path):
    reader = {**READERS, **LINES, **OTHERS}[name]
    for number, (kind, place) in enumerate(IRREGULAR.items()):
        (folder := tmp_path / str(number)).mkdir()
        place(folder / name)
        if (name, kind.partition(" to ")[0]) not in OTHERWISE:
            refusal(reader, folder / name)


@pytest.mark.parametrize("name", [*READERS, *LINES])
def test_hostile_json_is_refused_by_name(name, tmp_path):
    reader = {**READERS, **LINES}[name]
    for number, (kind, content) in enumerate((HOSTILE | ({} if name == "rows.jsonl" else TWICE)).items()):
        (folder := tmp_path / str(number)).mkdir()
        (folder / name).write_bytes(content + b"\n" * (name in LINES and content != b""))
        if not content and name in ("metrics.jsonl", "drawn.jsonl"):
            continue  # a run without rows
        message = refusal(reader, folder / name)
        assert name not in LINES or kind == "nothing" or "line 1" in message, (kind, message)


def test_a_link_to_a_regular_file_is_read(tmp_path):
    """As caches of hubs have them; a control of the refusals above."""
    (tmp_path / "blob").write_text('{"a": [1, {"b": "c"}]}')
    (tmp_path / "link.json").symlink_to("blob")
    assert read_json(tmp_path / "link.json") == {"a": [1, {"b": "c"}]} and read_utf8(tmp_path / "link.json")[0] == "{"
    assert map_bytes(tmp_path / "link.json").tobytes() == read_bytes(tmp_path / "blob", max_bytes=22)
    with pytest.raises(ValueError, match="blob: the file must have at most 21 bytes"):
        read_bytes(tmp_path / "blob", max_bytes=21)


def test_the_depth_of_json_is_counted():
    nested = lambda depth: "[" * depth + "]" * depth
    assert parse_json(nested(MAX_JSON_DEPTH)) and parse_json('"' + "[" * 1000 + '"')
    for text in (nested(MAX_JSON_DEPTH + 1), nested(10**6), '{"a": [' * 10**5):
        with pytest.raises(ValueError, match="nests deeper than 200 levels"):
            parse_json(text)
    assert parse_json('{"a": 1, "a": 2}', unique=False) == {"a": 2}


def test_integers_of_json_have_a_largest_length():
    assert parse_json("9" * 4300) == 10**4300 - 1
    with pytest.raises(ValueError, match="^it has an integer of more than 4,300 digits$"):
        parse_json('{"a": ' + "9" * 4301 + "}")


def test_failures_of_other_libraries_are_one_error():
    PanicException = type("PanicException", (BaseException,), {})
    for error in (PanicException("index out of bounds\nmore"), MemoryError(), RecursionError("deep"), KeyError("x")):
        refused = pytest.raises(ValueError, match="^file x: (index out of bounds|MemoryError|deep|'x')$")
        with refused, foreign_call(lambda reason: f"file x: {reason}"):
            raise error
    with pytest.raises(KeyboardInterrupt), foreign_call(str):
        raise KeyboardInterrupt
