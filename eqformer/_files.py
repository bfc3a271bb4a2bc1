"""Small files: reading untrusted files with limits, atomic writing, and dataclasses as JSON.

Each dataclass is written with the name of its class; reading runs no code.
"""

import dataclasses
import io
import json
import math
import os
import stat
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import UInt8

from ._annotation_checks import violated_annotation


JsonValue: TypeAlias = Any
"""A value of a JSON text, of any type until a caller checks it."""
JsonObject: TypeAlias = dict[str, JsonValue]
"""An object of a JSON text: its values by name."""
MAX_JSON_BYTES = 1 << 27  # The largest published files, indices and tokenizers, have 10 to 40 MB.
MAX_JSON_DEPTH = 200  # Far below Python's recursion limit, since functions over the values recurse too.
_FILE_KINDS: Mapping[int, str] = types.MappingProxyType(
    {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise a `ValueError` for a path that is not a regular file or a link to a regular file; open no file."""
    try:
        _check_mode(path, os.stat(path).st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or a link to a regular file, for reading bytes.

    Raises a `ValueError` at once for a missing file, a folder, a named pipe, a device and a socket: a pipe would block,
    and a device such as `/dev/zero` has no end.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    # Some devices act when they are opened, so the kind is checked first.
    check_regular(path)
    try:
        # `O_NONBLOCK` keeps this call from blocking if another process has replaced the file by a pipe.
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; raises a `ValueError` for more than `max_bytes`."""
    chunks, size = list[bytes](), 0
    with open_regular(path) as file:
        try:
            # Chunks, since `read(max_bytes)` would allocate all of `max_bytes`.
            while size <= max_bytes and (chunk := file.read(1 << 20)):
                chunks.append(chunk)
                size += len(chunk)
        except OSError as error:
            raise _unreadable(path, error) from None
    if size > max_bytes:
        raise ValueError(f"{os.fspath(path)}: the file must have at most {max_bytes:,} bytes, but has more.")
    return b"".join(chunks)


def read_utf8(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the UTF-8 text of a regular file; raises a `ValueError` for more than `max_bytes`."""
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: the text must be UTF-8 ({error}); convert it.") from None


def map_bytes(path: str | os.PathLike[str]) -> UInt8[np.ndarray, "bytes"]:
    """Map a regular file into memory; raises a `ValueError` for an empty file."""
    with open_regular(path) as file:
        try:
            return np.memmap(file, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None


def parse_json(text: str | bytes, *, unique: bool = True) -> JsonValue:
    """Return the value of a JSON text.

    Raises a `ValueError` for a text that is not JSON, that nests deeper than `MAX_JSON_DEPTH`, that has an integer of
    more than 4,300 digits, or, with `unique`, in which an object has a name twice. The message states only the reason;
    the caller adds the file's name.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_names if unique else None)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH} levels") from None
    except MemoryError:
        raise ValueError("it takes more memory than this machine has") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's own advice is to change a setting of the interpreter.
            raise ValueError("it has an integer of more than 4,300 digits") from None
        raise
    return value


def _read_json_value(path: str | os.PathLike[str], max_bytes: int) -> JsonValue:
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        return parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: it cannot be read as JSON ({error}).") from None


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Return the JSON object in a regular file.

    Raises a `ValueError` that begins with the path: for a file that `open_regular` refuses, for more than `max_bytes`,
    for a text that `parse_json` refuses, and for JSON other than an object.
    """
    value = _read_json_value(path, max_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)}: it holds no JSON object.")
    return value


def read_json_list(path: str | os.PathLike[str]) -> list[JsonObject]:
    """Return the JSON list of objects in a regular file; raises a `ValueError` as `read_json` does."""
    value = _read_json_value(path, MAX_JSON_BYTES)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{os.fspath(path)}: it must hold a JSON list of objects.")
    return value


def write_atomic(path: str | Path, content: str | Callable[[Path], object]) -> None:
    """Write a small file so that a reader finds the old or the new content and no mixture, even after a power cut.

    A temporary file beside `path` is written, synced to the disk (fsync) and renamed to `path`; then the folder is
    synced. `content` is the text, or a function that writes to the path that it receives, which has the suffix of
    `path`. If writing fails, the temporary file is deleted.
    """
    part = Path(path).with_suffix(f".part{Path(path).suffix}")
    try:
        part.write_text(content, encoding="utf-8") if isinstance(content, str) else content(part)
        sync_path(part)
        part.replace(path)
        sync_path(part.parent)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync_path(path: Path) -> None:
    """Sync a file, or the list of names in a folder, to the disk.

    A rename survives a power cut only once its folder is synced. Folders are not synced on systems other than POSIX,
    where a folder cannot be opened.
    """
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return one or several paths as a list."""
    return [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return whether a path exists, even as a broken link; callers refuse such a path instead of ignoring it."""
    return os.path.lexists(path)


def few_names(names: Set[str]) -> str:
    """List the first five names in order, and the number of further names."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _unique_names(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    """Return the object of these pairs; raise a `ValueError` if a name occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {few_names({name for name, count in counts.items() if count > 1})} twice")
    return values


def _check_depth(value: JsonValue) -> None:
    """Raise a `RecursionError` if a value nests too deeply; go level by level, without recursion."""
    level = [[value]]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [part for container in level for part in container if isinstance(part, dict | list)]
        level = [part.values() if isinstance(part, dict) else part for part in level]
        if not level:
            return
    raise RecursionError("the value nests too deeply")


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _FILE_KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{os.fspath(path)}: it is {kind}, and only regular files are read; give a regular file.")


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{os.fspath(path)}: the file is missing.")
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"{os.fspath(path)}: it cannot be read ({reason}).")


_FORMER_NAME = "former name"  # The key of a field's metadata.
_FLOAT = "__float__"  # The key that transformers writes for numbers that JSON does not have.


class UnknownKindError(ValueError):
    """A file names a class that is not known; `kind` is the name of the class."""

    def __init__(self, kind: object, known: Iterable[str], source: str):
        super().__init__(f"{source}: kind {kind!r} is unknown; it must be one of {sorted(known)}.")
        self.kind = kind


def dataclass_to_json(value: Any) -> Any:
    """Return a value as JSON; a dataclass keeps its class's name as `kind`."""
    match value:
        case tuple():
            return [dataclass_to_json(part) for part in value]
        case float() if math.isinf(value):
            return {_FLOAT: "Infinity" if value > 0 else "-Infinity"}
        case Path():
            return str(value)
        case type():
            return value
        case _ if dataclasses.is_dataclass(value):
            fields = {field.name: dataclass_to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"kind": type(value).__name__, **fields}
        case _:
            return value


def renamed_field(former_name: str, *, default: Any) -> Any:
    """Return a field of a dataclass that had another name; `dataclass_from_json` also reads the former name."""
    return dataclasses.field(default=default, metadata={_FORMER_NAME: former_name})


def dataclass_from_json(value: Any, classes: Mapping[str, type], source: str) -> Any:
    """Return the value that `dataclass_to_json` wrote.

    `classes` are the allowed classes by name, and `source` is the name of the file, for errors. Raises an
    `UnknownKindError` for a class that is not allowed, and a `ValueError` for a field that its class does not have or
    whose value has a wrong type.
    """
    match value:
        case list():
            return tuple(dataclass_from_json(part, classes, source) for part in value)
        case dict() if value.get(_FLOAT) in ("Infinity", "-Infinity"):
            return float(value[_FLOAT])
        case dict():
            return _make_dataclass(value, classes, source)
        case _:
            return value


def _make_dataclass(value: Mapping[str, Any], classes: Mapping[str, type], source: str) -> Any:
    """Return the dataclass that an object in JSON describes."""
    fields = {name: dataclass_from_json(part, classes, source) for name, part in value.items() if name != "kind"}
    kind: Any = classes.get(value.get("kind", ""))
    if kind is None:
        raise UnknownKindError(value.get("kind"), classes, source)
    known = {field.name: field for field in dataclasses.fields(kind)}
    new_names = {field.metadata.get(_FORMER_NAME): name for name, field in known.items()}
    fields = {name if name in known else new_names.get(name, name): value for name, value in fields.items()}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(
            f"{source}: {kind.__name__} has no fields {unknown}; it was written by another version of eqformer; "
            "use that version to continue the run."
        )
    for name in fields:
        if "Path" in str(known[name].type) and isinstance(fields[name], str):
            fields[name] = Path(fields[name])
    _check_types(kind, fields, source)
    return kind(**fields)


def dataclass_differences(old: Any, new: Any, *, ignored: Container[str] = ()) -> list[str]:
    """Return the values that differ between two dataclasses, as `field.part: old -> new`, without ignored fields."""
    pairs = [(field.name, getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(old)]
    return [
        line
        for name, old_value, new_value in pairs
        if name not in ignored
        for line in _compare(name, dataclass_to_json(old_value), dataclass_to_json(new_value))
    ]


def _compare(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        return [line for part in old for line in _compare(f"{name}.{part}", old[part], new[part])]
    return [] if old == new else [f"{name}: {old!r} -> {new!r}"]


def _check_types(kind: Any, fields: Mapping[str, Any], source: str) -> None:
    """Raise a `ValueError` for a field whose value does not fit the field's annotation."""
    for name, value in fields.items():
        if (hint := violated_annotation(kind, name, value)) is not None:
            raise ValueError(
                f"{source}: {kind.__name__}.{name} must be of {hint}, but is {value!r:.100}; write the file "
                "again with the command that began the run."
            )
