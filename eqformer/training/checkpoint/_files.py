"""Files of a checkpoint: folders that survive a power cut (by fsync), and the manifest of sizes and checksums."""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..._files import open_regular, read_json, sync_path


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync the folders that list them."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new_folders:
        sync_path(path.parent)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder, whoever wrote it: every file, then every folder, innermost first."""
    files, folders = [], []
    for path, _, names in os.walk(folder, topdown=False):
        files += [Path(path, name) for name in names]
        folders.append(Path(path))
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync_path, files))
    for path in folders:
        sync_path(path)


def remove(path: Path) -> None:
    """Delete a folder if it exists; of a symbolic link only the link, since the user moved the folder elsewhere."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


MANIFEST = "manifest.json"


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest into a folder as JSON, with a checksum of the manifest itself."""
    content = {"crc32": _manifest_checksum(manifest), "manifest": manifest}
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """Read the manifest that `write_manifest` wrote; if it is missing or damaged, return a sentence that says so."""
    if not (folder / MANIFEST).exists():
        return f"file {MANIFEST} is missing"
    try:
        content = read_json(folder / MANIFEST)
        manifest, is_intact = content["manifest"], content["crc32"] == _manifest_checksum(content["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        return f"file {MANIFEST} cannot be read ({error})"
    return manifest if is_intact else f"file {MANIFEST} is damaged: its checksum is not the one that was saved"


def _manifest_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def describe_files(folder: Path) -> dict[str, list[int]]:
    """Return `[bytes, CRC-32]` of each file below `folder`, by its path relative to the folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))


def check_files(folder: Path, expected: Mapping[str, list[int]]) -> list[str]:
    """Return a sentence for each file of `folder` that is missing, damaged or unreadable."""
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda item: _find_fault(folder, *item), expected.items())
        return [fault for fault in faults if fault]


def _find_fault(folder: Path, name: str, expected: list[int]) -> str | None:
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
