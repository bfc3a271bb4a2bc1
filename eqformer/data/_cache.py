"""Folders of files that are written atomically: a folder is either complete or not there at all."""

import contextlib
import json
import os
import platform
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .._read import open_regular, read_json
from .._whole import sync_path


_META = "meta.json"
_LOCK = "lock"


class Damaged(Exception):
    """A folder exists but cannot be used, and why; raised and caught inside of `eqformer.data`."""


class Unwritable(Exception):
    """Wraps the `OSError` of a write (a full disk, no permission), as distinct from those of reading a source."""

    def __init__(self, error: OSError):
        self.error = error


class Writer:
    """Writes the files of a folder, and keeps account of their sizes and checksums."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}
        self._files: dict[str, dict[str, int]] = {}

    def append(self, name: str, data: np.ndarray) -> None:
        """Append the array's bytes to a file."""
        view = np.ascontiguousarray(data).view(np.uint8).data
        with _writes():
            if name not in self._open:
                self._open[name] = (self.folder / name).open("wb")
                self._files[name] = {"size": 0, "crc32": 0}
            self._open[name].write(view)
        entry = self._files[name]
        entry["size"] += len(view)
        entry["crc32"] = zlib.crc32(view, entry["crc32"])

    def finish(self, meta: dict[str, Any]) -> None:
        """Sync all files to the disk (fsync), then write and sync the description."""
        with _writes():
            for file in self._open.values():
                _to_disk(file)
            with (self.folder / _META).open("wb") as file:
                file.write(json.dumps({**meta, "files": self._files}, indent=2).encode())
                _to_disk(file)
            sync_path(self.folder)

    def close(self) -> None:
        """Close the files, whatever state they are in."""
        for file in self._open.values():
            with contextlib.suppress(OSError):  # a full disk has been reported already
                file.close()


@contextlib.contextmanager
def writing(target: Path) -> Iterator[Writer]:
    """A `Writer` whose folder becomes `target` when the block ends without an error, and is removed if it raises.

    The folder is built beside `target` under a name that starts with a dot, and renamed at the end. If another process
    has made `target` in the meantime, that one stays. Unfinished folders that killed processes of this machine left are
    removed first; whether those of other machines are still written to, their locks may not say over a network.

    **Raises:** `Unwritable`.
    """
    with _writes():
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
    folder = target.parent / f"{_unfinished(target)}.{uuid.uuid4().hex[:12]}"
    writer = Writer(folder)
    try:
        with _held(folder):
            yield writer
        writer.close()
        with _writes():
            try:
                folder.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
            (target / _LOCK).unlink(missing_ok=True)
            sync_path(target.parent)
    finally:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)


def remove(target: Path) -> None:
    """Rename a folder and then delete it, so that nobody sees it half deleted. Raises `Unwritable`."""
    doomed = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}"
    with _writes(), contextlib.suppress(FileNotFoundError):  # another process may have done it
        target.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read(target: Path, *, verify: bool) -> dict[str, Any]:
    """The folder's description. Raises `Damaged` if sizes (with `verify`, checksums) are not as they were written."""
    try:
        meta = read_json(target / _META)
        files = {str(name): (int(entry["size"]), int(entry["crc32"])) for name, entry in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{_META} is absent or unreadable ({error})") from error
    for name, (size, checksum) in files.items():
        path = target / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise Damaged(f"{name} should have {size} bytes but {'is absent' if found is None else f'has {found}'}")
        if verify and _checksum(path) != checksum:
            raise Damaged(f"the bytes of {name} are not those that were written")
    return meta


def _checksum(path: Path) -> int:
    value = 0
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def _writes() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(error) from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make the folder with a locked file in it; the system releases the lock when this process ends or is killed."""
    with contextlib.ExitStack() as stack:
        with _writes():
            if os.name == "posix":
                unlocked = folder.with_name(f".{folder.name}")  # a name that `_sweep` does not look at
                unlocked.mkdir()
                _lock(stack.enter_context((unlocked / _LOCK).open("wb")))
                unlocked.rename(folder)
            else:
                folder.mkdir()
        yield


def _unfinished(target: Path) -> str:
    """How names of unfinished folders of this machine begin."""
    return f".{target.name}.{zlib.crc32(platform.node().encode()):08x}"


def _sweep(target: Path) -> None:
    """Remove unfinished folders of this machine's killed processes; nothing on systems without such locks."""
    for folder in target.parent.glob(f"{_unfinished(target)}.*"):
        with contextlib.suppress(OSError, ValueError), open_regular(folder / _LOCK) as file:
            if _lock(file):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(file: BinaryIO) -> bool:
    """True where this process now holds the lock, until the file is closed."""
    if os.name != "posix":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
