"""Small files that are written atomically and durably."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomic(path: str | Path, content: str | Callable[[Path], Any]) -> None:
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
