"""Reading of files that others wrote: regular files of bounded size, and JSON of bounded depth with unique names."""

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import UInt8


MAX_JSON_BYTES = 1 << 27  # the longest published files, indices and tokenizers, have 10 to 40 MB
MAX_JSON_DEPTH = 200  # far below Python's limit of recursion, which functions over the values use too
_KINDS: Mapping[int, str] = MappingProxyType(
    {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise a `ValueError` for a path that is no regular file, nor a link to one, without opening it."""
    try:
        _check_mode(path, os.stat(path).st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading bytes.

    Raises a `ValueError` at once for a missing file, a folder, a named pipe, a device and a socket: a pipe would block,
    and a device such as `/dev/zero` has no end.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    check_regular(path)  # some devices act when they are opened
    try:
        descriptor = os.open(path, flags)  # without blocking, if another process replaces the file in between
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
            while size <= max_bytes and (chunk := file.read(1 << 20)):  # `read(max_bytes)` would allocate all of it
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


def parse_json(text: str | bytes, *, unique: bool = True) -> Any:
    """Return the value that a JSON text spells.

    Raises a `ValueError` with the reason alone, for the caller to add the place, for a text that is no JSON, that nests
    deeper than `MAX_JSON_DEPTH`, or, unless `unique` is off, an object of which has a name twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_names if unique else None)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH} levels") from None
    except MemoryError:
        raise ValueError("it takes more memory than there is") from None
    return value


def read_json(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a regular file.

    Raises a `ValueError` that begins with the path: for a file that `open_regular` refuses, for one of more than
    `max_bytes`, for a text that `parse_json` refuses, and for JSON other than an object.
    """
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        value = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: it is no JSON that can be read ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)}: it holds no JSON object.")
    return value


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return whether anything has this path, a broken link too, so that a file is not passed over for its kind."""
    return os.path.lexists(path)


def few_names(names: Set[str]) -> str:
    """Return the first five names in order, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it has {few_names({name for name, count in counts.items() if count > 1})} twice")
    return values


def _check_depth(value: Any) -> None:
    level = [[value]]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [part for whole in level for part in whole if isinstance(part, dict | list)]
        level = [part.values() if isinstance(part, dict) else part for part in level]
        if not level:
            return
    raise RecursionError("the value nests too deeply")


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{os.fspath(path)}: it is {kind}, and only regular files are read; give the path of one.")


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{os.fspath(path)}: the file is missing.")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ValueError(f"{os.fspath(path)}: it cannot be read ({reason}).")
