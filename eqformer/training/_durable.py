"""Folders that outlast a power cut, and their end."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Makes a folder, with those above it that are missing, and their names durable."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        sync_folder(place.parent)


def sync_tree(folder: Path) -> None:
    """Makes all below a folder durable, whoever wrote it: every file, then every folder, the innermost first."""
    files, folders = [], []
    for place, _, names in os.walk(folder, topdown=False):
        files += [Path(place, name) for name in names]
        folders.append(Path(place))
    with ThreadPoolExecutor() as pool:
        list(pool.map(_sync, files))
    for place in folders:
        _sync(place)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a rename is only safe from a power cut after this."""
    _sync(folder)


def remove(path: Path) -> None:
    """Deletes a folder that is there; of a link to one only the link, since what is elsewhere is the user's."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
