"""Folders that survive a power cut (by fsync), and their deletion."""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..._atomic_write import sync_path
from ..._read import open_regular, read_json


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


MANIFEST = "manifest.json"


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the description of a folder into it as JSON, with a checksum of the description itself."""
    content = {"crc32": _checksum(manifest), "manifest": manifest}
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest that `write_manifest` wrote or, if it is missing or damaged, a sentence that says so."""
    if not (folder / MANIFEST).exists():
        return f"file {MANIFEST} is missing"
    try:
        content = read_json(folder / MANIFEST)
        manifest, is_whole = content["manifest"], content["crc32"] == _checksum(content["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        return f"file {MANIFEST} cannot be read ({error})"
    return manifest if is_whole else f"file {MANIFEST} is damaged: its checksum is not the one that was saved"


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def describe_files(folder: Path) -> dict[str, list[int]]:
    """`[bytes, CRC-32]` of each file under `folder`, by its path in it."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))


def check_files(folder: Path, expected: Mapping[str, list[int]]) -> list[str]:
    """What is wrong with the files of `folder`, one sentence a file; empty if nothing is."""
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda item: _check(folder, *item), expected.items())
        return [fault for fault in faults if fault]


def _check(folder: Path, name: str, expected: list[int]) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != expected[0]:
            return f"file {name} has {size} bytes and should have {expected[0]}"
        if _describe(folder / name) != list(expected):
            return f"file {name} is damaged: its checksum is not the one that was saved"
    except FileNotFoundError:
        return f"file {name} is missing"
    except (OSError, ValueError) as error:
        return f"file {name} cannot be read ({error})"
    return None


def _describe(path: Path) -> list[int]:
    size = checksum = 0
    with open_regular(path) as file:
        while block := file.read(2**22):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]
