"""Reading untrusted files with limits on their size, JSON on its depth, and writing small files atomically."""

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import UInt8


JsonValue: TypeAlias = Any
"""A value of a JSON text, of any type until a caller checks it."""
JsonObject: TypeAlias = dict[str, JsonValue]
"""An object of a JSON text, by name."""
MAX_JSON_BYTES = 1 << 27  # The largest published files, indices and tokenizers, have 10 to 40 MB.
MAX_JSON_DEPTH = 200  # Far below Python's recursion limit, since functions over the values recurse too.
_FILE_KINDS: Mapping[int, str] = MappingProxyType(
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
    """Map a regular file into memory; raises a `ValueError` for an empty one."""
    with open_regular(path) as file:
        try:
            return np.memmap(file, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None


def parse_json(text: str | bytes, *, unique: bool = True) -> JsonValue:
    """Return the value of a JSON text.

    Raises a `ValueError` for a text that is not JSON, that nests deeper than `MAX_JSON_DEPTH`, or, with `unique`, in
    which an object has a name twice. The message is the reason alone; the caller adds the file's name.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_names if unique else None)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH} levels") from None
    except MemoryError:
        raise ValueError("it takes more memory than this machine has") from None
    return value


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Return the JSON object in a regular file.

    Raises a `ValueError` that begins with the path: for a file that `open_regular` refuses, for more than `max_bytes`,
    for a text that `parse_json` refuses, and for JSON other than an object.
    """
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        value = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: it is no JSON that can be read ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)}: it holds no JSON object.")
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
    """Return whether the path exists, be it a broken link, so that a wrong kind of file is refused and not ignored."""
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
        raise ValueError(f"{os.fspath(path)}: it is {kind}, and only regular files are read; give the path of one.")


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{os.fspath(path)}: the file is missing.")
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"{os.fspath(path)}: it cannot be read ({reason}).")
