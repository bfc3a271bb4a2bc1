"""Folders that survive a power cut (by fsync), and their deletion."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .._atomic_write import sync_path


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, and syncs the folders that list them."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        sync_path(place.parent)


def sync_tree(folder: Path) -> None:
    """Syncs everything below a folder, whoever wrote it: every file, then every folder, innermost first."""
    files, folders = [], []
    for place, _, names in os.walk(folder, topdown=False):
        files += [Path(place, name) for name in names]
        folders.append(Path(place))
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync_path, files))
    for place in folders:
        sync_path(place)


def remove(path: Path) -> None:
    """Deletes a folder if it exists; of a symbolic link only the link, since the user moved the folder elsewhere."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
