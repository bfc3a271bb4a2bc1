"""Size and checksum of every file of a folder, so that damage is told before anything is read."""

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


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


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a rename is only safe from a power cut after this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(folder: Path, name: str, expected: list[int]) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != expected[0]:
            return f"file {name} has {size} bytes and should have {expected[0]}"
        if _describe(folder / name) != list(expected):
            return f"file {name} is damaged: its checksum is not the one that was saved"
    except FileNotFoundError:
        return f"file {name} is missing"
    except OSError as error:
        return f"file {name} cannot be read ({error})"
    return None


def _describe(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]
