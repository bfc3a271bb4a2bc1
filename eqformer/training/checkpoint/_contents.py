"""Contents of a checkpoint: a state's arrays by name, the metadata from which a run resumes exactly, and a manifest.

The manifest lists the checkpoint's files with their checksums. Files and folders are synced (fsync), so that they
survive a power cut.
"""

import functools
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ... import nn
from ..._files import JsonObject, open_regular, read_json, sync_path
from ..._shapes import ArrayOrShape


def named_arrays(tree: PyTree) -> dict[str, ArrayOrShape]:
    """Return the arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, nn.has_shape))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(arrays) == len(leaves)
    return arrays


def to_stored(leaf: ArrayOrShape) -> ArrayOrShape:
    """Convert an array, or its shape, to the form that a checkpoint stores: random keys become plain integer arrays."""
    if not _is_key(leaf):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def stored_shape(like: ArrayOrShape) -> jax.ShapeDtypeStruct:
    """Return the shape that a checkpoint stores for an array like `like`, with the sharding of `like`.

    An array without a sharding is read onto the first device.
    """
    sharding = None if isinstance(like, np.ndarray) else like.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = to_stored(like)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def from_stored(leaf: jax.Array, like: ArrayOrShape) -> jax.Array:
    """Convert a stored array back to an array like `like`: the inverse of `to_stored`."""
    if not _is_key(like):
        return leaf
    implementations: list[str] = []
    # Only a traced key, and not a key's shape, gives the name of its implementation.
    jax.eval_shape(lambda key: implementations.append(str(jax.random.key_impl(key))), like)
    return jax.random.wrap_key_data(leaf, impl=implementations[0])


def _is_key(leaf: ArrayOrShape) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_faults(saved: Mapping[str, list], wanted: Mapping[str, ArrayOrShape]) -> list[str]:
    """Return a sentence for each difference between saved leaves (name -> `[dtype, shape]`) and the wanted arrays."""
    faults = [f"leaf {name} is in the checkpoint and not in the model" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            faults.append(f"leaf {name} is in the model and not in the checkpoint")
            continue
        (dtype, shape), (model_dtype, model_shape) = saved[name], (str(leaf.dtype), list(leaf.shape))
        if (dtype, shape) != (model_dtype, model_shape):
            faults.append(
                f"leaf {name} is {dtype}{shape} in the checkpoint and {model_dtype}{model_shape} in the model"
            )
    return faults


# Metadata of a run.

_PACKAGES = ("eqformer", "jax", "equinox", "optax", "orbax-checkpoint")


def run_metadata(
    *, recipe: Mapping[str, object], step: int, data: Mapping[str, object], key: Key[Array, ""], **more: object
) -> JsonObject:
    """Return the metadata of a run as JSON: its recipe, the step, the position in the data and the random key."""
    raw = np.asarray(jax.random.key_data(key)).tolist()
    random_key = {"implementation": str(jax.random.key_impl(key)), "data": raw}
    return {"recipe": dict(recipe), "step": step, "data": dict(data), "random_key": random_key, **more}


def saved_key(metadata: JsonObject) -> Key[Array, ""]:
    """Return the random key that `run_metadata` wrote."""
    saved = metadata["random_key"]
    return jax.random.wrap_key_data(jnp.asarray(saved["data"], jnp.uint32), impl=saved["implementation"])


def metadata_to_json(metadata: Mapping[str, object]) -> str:
    """Write metadata and the installed versions as JSON; raises a `ValueError` for a value that JSON cannot hold."""
    _check_json("metadata", dict(metadata))
    return json.dumps(dict(metadata) | {"versions": versions()}, allow_nan=False)


def _check_json(path: str, value: object) -> None:
    match value:
        case dict():
            for name, member in value.items():
                _check_json(f"{path}[{name!r}]", member)
        case list() | tuple():
            for index, element in enumerate(value):
                _check_json(f"{path}[{index}]", element)
        case float() if not math.isfinite(value):
            raise ValueError(
                f"Checkpointer.save(metadata): {path} is {value}, but JSON has only finite numbers; save None or text."
            )
        case str() | int() | float() | None:
            return
        case _:
            raise ValueError(
                f"Checkpointer.save(metadata): {path} has the type {type(value).__name__}, which JSON does not have; "
                "save a Python number (`float(x)`, `x.tolist()`), or text."
            )


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the installed versions of packages; the default packages are those on which a run's numbers depend."""

    def find_version(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: find_version(package) for package in packages}


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync the parent of each new folder."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new_folders:
        sync_path(path.parent)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder: every file, then every folder, innermost folders first."""
    files, folders = [], []
    for path, _, names in os.walk(folder, topdown=False):
        files += [Path(path, name) for name in names]
        folders.append(Path(path))
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync_path, files))
    for path in folders:
        sync_path(path)


def remove(path: Path) -> None:
    """Delete a folder if it exists. If the path is a symbolic link, delete the link and keep its target."""
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
    return manifest if is_intact else f"file {MANIFEST} is damaged: its checksum differs from the saved checksum"


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
            return f"file {name} is damaged: its checksum differs from the saved checksum"
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


# Former names of arrays, in checkpoints of older revisions of eqformer.

# Fields that a block had for its sublayers, in the order in which they ran. Each is now an element of `sublayers`.
_FIELDS = ("mixer", "cross", "feed_forward", "gated_input", "scalar")
# Patterns of former names inside a block, and the current names that replace them. `{mixer}` is the index in
# `sublayers` of the sublayer that was in the field `mixer`, and so on.
_RENAMED = (
    (r"mixer\.mixers\.(?P<branch>\d+)", r"sublayers.{mixer}.branches.\g<branch>"),
    (r"feed_forward\.layer\.dense", r"sublayers.{feed_forward}.branches.0"),
    (r"feed_forward\.layer\.routed", r"sublayers.{feed_forward}.branches.1"),
    (r"scalar", r"sublayers.{scalar}.factor"),
    *((field, f"sublayers.{{{field}}}") for field in _FIELDS[:-1]),
    (r"mixer", r"branches.0"),  # A parallel block also had the fields `mixer` and `feed_forward`.
    (r"feed_forward", r"branches.1"),
)
# Arrays that were fields of an attention, and are now fields of its scores or its rotary positions.
_MOVED = (("sinks", "scores.sinks"), ("query_norm", "rotary.query_norm"), ("key_norm", "rotary.key_norm"))


def match_saved_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return a dict from the current name of each saved array to its saved name.

    A saved name that is not `wanted` comes from an older revision. Its current name is the first of its possible new
    names that is `wanted`. If none of them is `wanted`, the name stays.
    """
    indices = _sublayer_indices(saved)
    return {name if name in wanted else _current_name(name, wanted, indices): name for name in saved}


def _current_name(name: str, wanted: Collection[str], indices: Mapping[str, Mapping[str, int]]) -> str:
    in_blocks = [name, *_names_in_blocks(name, indices)]
    candidates = [*in_blocks, *(moved for renamed in in_blocks for moved in _names_in_parts(renamed))]
    return next((candidate for candidate in candidates if candidate in wanted), name)


def _names_in_blocks(name: str, indices: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the possible current names of an array that an older block held in a field for a sublayer."""
    for former, current in _RENAMED:
        match = re.fullmatch(rf"(?P<block>(?:.*?\.)??){former}(?P<end>(?:\..+)?)", name)
        if match and match["block"] in indices:  # If not, a module other than a block has a field of this name.
            yield match["block"] + match.expand(current.format(**indices[match["block"]])) + match["end"]


def _names_in_parts(name: str) -> Iterator[str]:
    """Yield the possible current names of an array that is now in a part of an attention."""
    for former, current in _MOVED:
        if match := re.fullmatch(rf"(?P<attention>(?:.*\.)?){former}(?P<end>(?:\..+)?)", name):
            yield match["attention"] + current + match["end"]


def _sublayer_indices(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the index in `sublayers` of each field that a block had, by the prefix of the block's array names.

    Every block had a field `mixer`, even if the mixer has no arrays.
    """
    fields_by_block: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(rf"((?:.*?\.)??)({'|'.join(_FIELDS)})(\..+)?", name):
            fields_by_block.setdefault(match[1], {"mixer"}).add(match[2])
    ordered = {block: [name for name in _FIELDS if name in fields] for block, fields in fields_by_block.items()}
    return {block: {field: index for index, field in enumerate(fields)} for block, fields in ordered.items()}
