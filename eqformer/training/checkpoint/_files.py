"""Files of a checkpoint: folders that survive a power cut (by fsync), the manifest, and former names of arrays."""

import functools
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..._files import JsonObject, open_regular, read_json, sync_path


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
    """Delete a folder if it exists; of a symbolic link, only the link, since the user moved the folder elsewhere."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


MANIFEST = "manifest.json"


def write_manifest(folder: Path, manifest: Mapping[str, object]) -> None:
    """Write a manifest into a folder as JSON, with a checksum of the manifest itself."""
    content = {"crc32": _manifest_checksum(manifest), "manifest": manifest}
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def read_manifest(folder: Path) -> JsonObject | str:
    """Read the manifest that `write_manifest` wrote; if it is missing or damaged, return a sentence that says so."""
    if not (folder / MANIFEST).exists():
        return f"file {MANIFEST} is missing"
    try:
        content = read_json(folder / MANIFEST)
        manifest, is_intact = content["manifest"], content["crc32"] == _manifest_checksum(content["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        return f"file {MANIFEST} cannot be read ({error})"
    return manifest if is_intact else f"file {MANIFEST} is damaged: its checksum is not the one that was saved"


def _manifest_checksum(manifest: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def describe_files(folder: Path) -> dict[str, list[int]]:
    """Return `[bytes, CRC-32]` of each file below `folder`, by its path relative to the folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_describe, [folder / name for name in names]), strict=True))


def check_files(folder: Path, expected: Mapping[str, list[int]]) -> list[str]:
    """Return a sentence for each file of `folder` that is missing, damaged or unreadable."""
    with ThreadPoolExecutor() as pool:
        faults = pool.map(functools.partial(_find_fault, folder), expected, expected.values())
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


# Names that arrays of a state had in checkpoints of older revisions.

# Fields that a block had for its sublayers, in the order in which they ran. Each is now an element of `sublayers`.
_FIELDS = ("mixer", "cross", "feed_forward", "gated_input", "scalar")
# Patterns of former names, from the field of a block on, and the text that replaces them. `{mixer}` and the like stand
# for the index of the sublayer that was in this field.
_RENAMED = (
    (r"mixer\.mixers\.(?P<branch>\d+)", r"sublayers.{mixer}.branches.\g<branch>"),
    (r"feed_forward\.layer\.dense", r"sublayers.{feed_forward}.branches.0"),
    (r"feed_forward\.layer\.routed", r"sublayers.{feed_forward}.branches.1"),
    (r"scalar", r"sublayers.{scalar}.factor"),
    *((field, f"sublayers.{{{field}}}") for field in _FIELDS[:-1]),
    (r"mixer", r"branches.0"),  # A parallel block also had the fields `mixer` and `feed_forward`.
    (r"feed_forward", r"branches.1"),
)
# Arrays of an attention that moved into one of its parts: sinks, and norms that follow the rotation.
_MOVED = (("sinks", "scores.sinks"), ("query_norm", "rotary.query_norm"), ("key_norm", "rotary.key_norm"))


def match_saved_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return a dict from the current name of each saved array to its saved name.

    The current name is the saved name itself, unless the saved name is unknown and one of the names that its array may
    have today is among the `wanted` names.
    """
    indices = _sublayer_indices(saved)
    return {name if name in wanted else _current_name(name, wanted, indices): name for name in saved}


def _current_name(name: str, wanted: Collection[str], indices: Mapping[str, Mapping[str, int]]) -> str:
    in_blocks = [name, *_names_in_blocks(name, indices)]
    candidates = [*in_blocks, *(moved for renamed in in_blocks for moved in _names_in_parts(renamed))]
    return next((candidate for candidate in candidates if candidate in wanted), name)


def _names_in_blocks(name: str, indices: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the names that an array of a block may have among the block's sublayers."""
    for former, current in _RENAMED:
        match = re.fullmatch(rf"(?P<block>(?:.*?\.)??){former}(?P<end>(?:\..+)?)", name)
        if match and match["block"] in indices:  # If not, a module other than a block has a field of this name.
            yield match["block"] + match.expand(current.format(**indices[match["block"]])) + match["end"]


def _names_in_parts(name: str) -> Iterator[str]:
    """Yield the names that an array of an attention may have among the attention's parts."""
    for former, current in _MOVED:
        if match := re.fullmatch(rf"(?P<attention>(?:.*\.)?){former}(?P<end>(?:\..+)?)", name):
            yield match["attention"] + current + match["end"]


def _sublayer_indices(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return for each block, by the beginning of its arrays' names, the index of the sublayer of each field.

    A block always had a mixer, perhaps one without arrays.
    """
    fields_by_block: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(rf"((?:.*?\.)??)({'|'.join(_FIELDS)})(\..+)?", name):
            fields_by_block.setdefault(match[1], {"mixer"}).add(match[2])
    ordered = {block: [name for name in _FIELDS if name in fields] for block, fields in fields_by_block.items()}
    return {block: {field: index for index, field in enumerate(fields)} for block, fields in ordered.items()}
