"""Folders of files that are written atomically: a folder is either complete or absent."""

import contextlib
import json
import os
import platform
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .._files import JsonObject, open_regular, read_json, sync_path


_META = "meta.json"
_LOCK = "lock"


class DamagedFolder(Exception):
    """Error for a folder that exists but cannot be used, with the reason; raised and caught inside `eqformer.data`."""


class WriteFailure(Exception):
    """Error of a write, such as a full disk or a missing permission; the exception holds the `OSError`."""

    def __init__(self, error: OSError):
        self.error = error


class FolderWriter:
    """Writer of the files of a folder, which records their sizes and checksums."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}
        self._files: dict[str, dict[str, int]] = {}

    def append(self, name: str, data: np.ndarray) -> None:
        """Append the array's bytes to a file."""
        view = np.ascontiguousarray(data).view(np.uint8).data
        with _wrap_write_errors():
            if name not in self._open:
                self._open[name] = (self.folder / name).open("wb")
                self._files[name] = {"size": 0, "crc32": 0}
            self._open[name].write(view)
        entry = self._files[name]
        entry["size"] += len(view)
        entry["crc32"] = zlib.crc32(view, entry["crc32"])

    def finish(self, meta: JsonObject) -> None:
        """Sync all files to the disk (fsync), then write and sync the description `meta.json`."""
        with _wrap_write_errors():
            for file in self._open.values():
                _sync_and_close(file)
            with (self.folder / _META).open("wb") as file:
                file.write(json.dumps({**meta, "files": self._files}, indent=2).encode())
                _sync_and_close(file)
            sync_path(self.folder)

    def close(self) -> None:
        """Close the files, complete or not."""
        for file in self._open.values():
            # Closing writes buffered bytes, and may fail. After `finish` no bytes are buffered; without `finish` the
            # folder has no `meta.json`, and is therefore never read.
            with contextlib.suppress(OSError):
                file.close()


@contextlib.contextmanager
def write_atomic_folder(target: Path) -> Iterator[FolderWriter]:
    """Yield a writer whose folder becomes `target` if the block ends without an error, and is deleted otherwise.

    The block must call the writer's `finish`: otherwise `read_description` refuses the folder. The folder is built
    beside `target` under a name that starts with a dot, and renamed at the end. If another process has created `target`
    in the meantime, the other process's folder stays. Before the block runs, unfinished folders of this machine's
    killed processes are deleted. Unfinished folders of other machines stay, because their locks may not be visible over
    a network.

    **Raises:** `WriteFailure`.
    """
    with _wrap_write_errors():
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete_unfinished(target)
    folder = target.parent / f"{_unfinished_prefix(target)}.{uuid.uuid4().hex[:12]}"
    writer = FolderWriter(folder)
    try:
        with _locked_folder(folder):
            yield writer
            writer.close()
            # The folder stays locked until it is renamed, because other processes delete unlocked unfinished folders.
            with _wrap_write_errors():
                try:
                    folder.rename(target)
                except OSError:
                    if not target.is_dir():
                        raise
        with _wrap_write_errors():
            (target / _LOCK).unlink(missing_ok=True)
            sync_path(target.parent)
    finally:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)


def delete_folder(target: Path) -> None:
    """Rename a folder and then delete it, so that no process sees a half-deleted folder. Raises `WriteFailure`."""
    renamed = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}"
    # The folder is missing if another process has deleted it.
    with _wrap_write_errors(), contextlib.suppress(FileNotFoundError):
        target.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def read_description(target: Path, *, verify: bool) -> JsonObject:
    """Return the folder's `meta.json`.

    Raises `DamagedFolder` if a file's size (with `verify`, also its checksum) differs from the recorded size.
    """
    try:
        meta = read_json(target / _META)
        files = {str(name): (int(entry["size"]), int(entry["crc32"])) for name, entry in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFolder(f"{_META} is absent or unreadable ({error})") from error
    for name, (size, checksum) in files.items():
        path = target / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is absent" if actual is None else f"has {actual}"
            raise DamagedFolder(f"{name} should have {size} bytes but {state}")
        if verify and _checksum(path) != checksum:
            raise DamagedFolder(f"the bytes of {name} have changed since they were written")
    return meta


def describe_file(path: Path) -> dict[str, int]:
    """Return the size and the checksum of a file, in the form of the description's `files`."""
    return {"size": path.stat().st_size, "crc32": _checksum(path)}


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block ends; yield False if another process has the lock.

    Systems without POSIX locks have no lock, and the result is True there.
    """
    with (folder / _LOCK).open("wb") as file:
        yield os.name != "posix" or _lock(file)


def _checksum(path: Path) -> int:
    value = 0
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def _wrap_write_errors() -> Iterator[None]:
    """Raise an `OSError` of the block as a `WriteFailure`."""
    try:
        yield
    except OSError as error:
        raise WriteFailure(error) from error


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create the folder with a locked file; the system releases the lock when this process ends or is killed."""
    with contextlib.ExitStack() as stack:
        with _wrap_write_errors():
            if os.name == "posix":
                # Until the folder's file is locked, the folder has a name that `_delete_unfinished` does not match.
                unlocked = folder.with_name(f".{folder.name}")
                unlocked.mkdir()
                _lock(stack.enter_context((unlocked / _LOCK).open("wb")))
                unlocked.rename(folder)
            else:
                folder.mkdir()
        yield


def _unfinished_prefix(target: Path) -> str:
    """Return the beginning of the names of this machine's unfinished folders."""
    return f".{target.name}.{zlib.crc32(platform.node().encode()):08x}"


def _delete_unfinished(target: Path) -> None:
    """Delete the unfinished folders of this machine's killed processes.

    A system without POSIX locks cannot tell whether the writing process still runs, so nothing is deleted there.
    """
    for folder in target.parent.glob(f"{_unfinished_prefix(target)}.*"):
        with contextlib.suppress(OSError, ValueError), open_regular(folder / _LOCK) as file:
            if _lock(file):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed; return False if another process has the lock, or without POSIX locks."""
    if os.name != "posix":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
