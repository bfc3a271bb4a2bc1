"""Published folders of safetensors: one file, or shards with an index; every header is checked."""

import contextlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  # lets numpy know bfloat16
import numpy as np
from jaxtyping import UInt8

from .._annotation_checks import fits
from .._failures import foreign_call, load_extra
from .._files import check_regular, few_names, is_there, map_bytes, parse_json, read_json
from ._config_types import as_list, format_value, Index


GENERATION_CONFIG = "generation_config.json"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
MODELOPT = "hf_quant_config.json"  # where ModelOpt states the format of quantized weights
# Suffixes of files of weights. Files of a training run's state may have them too; their names begin with `_STATES`.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
_STATES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Dtypes of arrays that are not weights: codes of quantized weights, and buffers.
OTHERS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool"}
OTHERS |= {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}


class _ArrayEntry(NamedTuple):
    """The header's entry of an array: its dtype, shape, and bytes `start` to `stop` of the file."""

    dtype: str
    """The dtype's name in the file."""
    shape: list[int]
    start: int
    stop: int

    @property
    def layout(self) -> tuple[str, list[int]]:
        """The dtype and the shape."""
        return self.dtype, self.shape


class _File(NamedTuple):
    """An open file: its bytes, mapped into memory, and the entry of each array."""

    bytes: np.ndarray
    entries: dict[str, _ArrayEntry]

    def bytes_of(self, name: str) -> np.ndarray:
        """Return an array's bytes."""
        return self.bytes[self.entries[name].start : self.entries[name].stop]


class Folder:
    """The arrays of a published folder by name, memory-mapped.

    `single` is the name of the file that holds all arrays if there are no shards; shards come with an index. Raises a
    `ValueError` for a folder that contradicts itself: for an index that names files outside of the folder, or arrays
    that are not in those files; for arrays that are in two files; for files that do not fit their headers; and for a
    single file beside shards that hold other arrays.
    """

    def __init__(self, path: str | Path, single: str = SINGLE, caller: str = "load"):
        """Open every file of the folder and compare it with the index."""
        self.path, self.call = Path(path), f"{caller}({str(path)!r})"
        if not self.path.is_dir():
            if is_there(self.path):
                check_regular(self.path)
            raise ValueError(
                f"{self.call}: there is no such folder, and this is not the name of a model of the hub (OWNER/NAME); "
                "correct it."
            )
        self._single, self._index = single, self.path / f"{single}.index.json"
        self._files: dict[str, _File] = {}
        self._notes: list[str] = []
        self._file_of = self._choose_source()
        self._note_unused_files()
        self._files = {file: self._files[file] for file in set(self._file_of.values())}

    @property
    def names(self) -> Set[str]:
        """Every array's name."""
        return self._file_of.keys()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about files of the folder that are not read, one line each."""
        return tuple(self._notes)

    def dtype(self, name: str) -> str:
        """Return an array's dtype by its JAX name; raises a `ValueError` for a dtype that is not a float."""
        dtype = self._entry(name).dtype
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.path / self._file_of[name]}: {name} is of {dtype}; weights are {', '.join(FLOATS)}."
            )
        return FLOATS[dtype]

    def read(self, name: str) -> np.ndarray:
        """Return an array of floats, mapped into memory, so that nothing is read from disk before it is used."""
        return self._bytes(name).view(self.dtype(name)).reshape(self.shape(name))

    def dtype_in_file(self, name: str) -> str:
        """Return an array's dtype as its file calls it."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape."""
        return tuple(self._entry(name).shape)

    def read_any(self, name: str) -> np.ndarray:
        """Return an array of any dtype, mapped into memory; raises a `ValueError` for an unknown dtype."""
        dtype = self._entry(name).dtype
        if (known := (FLOATS | OTHERS).get(dtype)) is None:
            raise ValueError(f"{self.path / self._file_of[name]}: {name} is of {dtype}, which is not known.")
        return self._bytes(name).view(known).reshape(self.shape(name))

    def _entry(self, name: str) -> _ArrayEntry:
        return self._files[self._file_of[name]].entries[name]

    def _bytes(self, name: str) -> np.ndarray:
        return self._files[self._file_of[name]].bytes_of(name)

    def _choose_source(self) -> dict[str, str]:
        """Return the file of each array: the single file, or the shards of an index.

        Transformers reads the single file wherever there is one, even if it is older than the shards.
        """
        has_single = is_there(self.path / self._single)
        if not is_there(self._index):
            if has_single:
                return self._read_single()
            files = self._weight_files()
            unread = f"; its other weight files are not read ({few_names(files)})" if files else ""
            raise ValueError(
                f"{self.call}: the folder has no {self._single} and no {self._index.name}{unread}. Pickled weights "
                "(.bin, .pt) are never read, since they can run programs; convert them to safetensors on a machine "
                "where you trust them."
            )
        file_of = self._read_index()
        shards = set(file_of.values())
        if has_single and not any(is_there(self.path / file) for file in shards):
            self._notes.append(
                f"{self.call}: the files that {self._index.name} names are gone; {self._single} is read."
            )
            return self._read_single()
        self._check_index(file_of)
        if not has_single or self._single in shards:
            return file_of
        if differing := self._differing(file_of):
            raise ValueError(
                f"{self.call}: {self._single} and the files that {self._index.name} names hold different arrays "
                f"({few_names(differing)}), and either may be out of date; move {self._single} away, or "
                f"{self._index.name} with {few_names(shards)}."
            )
        return self._read_single()  # The shards beside it hold the same arrays.

    def _read_single(self) -> dict[str, str]:
        return dict.fromkeys(self._open(self._single).entries, self._single)

    def _read_index(self) -> dict[str, str]:
        file_of = read_json(self._index).get("weight_map")
        if not fits(file_of, dict[str, str]):
            raise ValueError(f"{self._index}: it has no weight_map of names to files.")
        for file in sorted(set(file_of.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{self._index}: it names {file!r}, which is not a safetensors file of this folder.")
        return file_of

    def _check_index(self, file_of: Mapping[str, str]) -> None:
        """Raise a `ValueError` unless each file holds exactly the arrays that the index lists for this file."""
        listed_of: dict[str, set[str]] = {}
        for name, file in file_of.items():
            listed_of.setdefault(file, set()).add(name)
        for file, listed in sorted(listed_of.items()):
            if (stored := self._open(file).entries.keys()) != listed:
                raise ValueError(
                    f"{self.path / file}: the index and the file disagree on {few_names(stored ^ listed)}; each "
                    "file must hold exactly the arrays that the index lists for this file."
                )

    def _differing(self, file_of: Mapping[str, str]) -> set[str]:
        """Return the names of arrays that differ between the single file and the shards.

        Names are compared first, then dtypes and shapes, then values. The comparison of values ends with the first
        array that differs.
        """
        single, shards = self._open(self._single), {name: self._open(file) for name, file in file_of.items()}
        if differing := single.entries.keys() ^ file_of.keys():
            return differing
        layouts = {name: shard.entries[name].layout for name, shard in shards.items()}
        if differing := {name for name, layout in layouts.items() if single.entries[name].layout != layout}:
            return differing
        different = (
            name for name, file in shards.items() if not _are_equal(single.bytes_of(name), file.bytes_of(name))
        )
        return set(itertools.islice(different, 1))

    def _note_unused_files(self) -> None:
        """Add a note on weight files that are not read; in a folder opened for its adapter, only on adapter files."""
        if unused := self._weight_files() - set(self._file_of.values()):
            has_adapter = self._single != ADAPTER and any(file.startswith("adapter_") for file in unused)
            hint = "; load_adapter reads adapters" if has_adapter else ""
            self._notes.append(f"{self.call}: weight files that are not read: {few_names(unused)}{hint}.")

    def _weight_files(self) -> set[str]:
        files = {file.name for file in self.path.iterdir() if file.suffix in _WEIGHTS and file.is_file()}
        files = {file for file in files if not file.startswith((".", *_STATES))}
        return {file for file in files if file.startswith("adapter_")} if self._single == ADAPTER else files

    def _open(self, file: str) -> _File:
        if file in self._files:
            return self._files[file]
        path = self.path / file
        check_regular(path)
        safetensors = load_extra("safetensors", extra="train", call=self.call)
        with (
            foreign_call(lambda reason: f"{path}: it is not a complete safetensors file ({reason})."),
            safetensors.safe_open(path, framework="np"),  # `safe_open` checks the header and the file size.
        ):
            content = map_bytes(path)
            data = 8 + int.from_bytes(content[:8].tobytes(), "little")
            header = parse_json(content[8:data].tobytes())
        header.pop("__metadata__", None)
        entries = {}
        for name, entry in header.items():
            start, stop = (data + offset for offset in entry["data_offsets"])
            entries[name] = _ArrayEntry(entry["dtype"], entry["shape"], start, stop)
        self._files[file] = _File(content, entries)
        return self._files[file]


def _are_equal(first: UInt8[np.ndarray, "octets"], second: UInt8[np.ndarray, "octets"], step: int = 1 << 24) -> bool:
    """Return whether two byte arrays of one length are equal; they are compared in pieces, which need little memory."""
    return all(
        np.array_equal(first[start : start + step], second[start : start + step])
        for start in range(0, first.size, step)
    )


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `target` at the end, or removed if an error is raised."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    part.mkdir()
    try:
        yield part
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], call: str) -> None:
    """Write a safetensors file with the permissions of any new file; safetensors alone would set 0600."""
    save_file = load_extra("safetensors.numpy", extra="train", call=call).save_file
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(arrays), path, metadata={"format": "pt"})
    path.chmod(mode)


def write_folder(
    path: Path, arrays: Iterator[tuple[str, np.ndarray]], config: Mapping[str, object], shard_bytes: int
) -> None:
    """Write `config.json` and the arrays, in files of up to `shard_bytes`; one file's arrays are in memory at a
    time."""
    call = "save(model, path, config)"
    file_of: dict[str, int] = {}
    part: dict[str, np.ndarray] = {}  # the arrays of the next file
    number, part_bytes, total_bytes = 0, 0, 0

    def flush() -> None:
        nonlocal number, part_bytes
        write_arrays(path / f"part-{number}.safetensors", part, call)
        number, part_bytes = number + 1, 0
        part.clear()

    for name, array in arrays:
        if part and part_bytes + array.nbytes > shard_bytes:
            flush()
        part[name], file_of[name] = np.asarray(array, order="C"), number  # keeps 0 dims, unlike `ascontiguousarray`
        part_bytes, total_bytes = part_bytes + array.nbytes, total_bytes + array.nbytes
    flush()
    names = [f"model-{i + 1:05}-of-{number:05}.safetensors" if number > 1 else SINGLE for i in range(number)]
    for i, name in enumerate(names):
        (path / f"part-{i}.safetensors").rename(path / name)
    if number > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: names[i] for name, i in file_of.items()}}
        write_json(path / INDEX, index)
    write_json(path / CONFIG, config)


def read_arrays(folder: str | Path) -> dict[str, np.ndarray]:
    """Return every array of a folder of safetensors by its name; for example, of a dense layer's folder in
    sentence-transformers.

    Raises a `ValueError` for a folder without safetensors, and for arrays that are not floats.
    """
    source = Folder(folder, caller="read_arrays")
    return {name: np.array(source.read(name)) for name in sorted(source.names)}


def read_eos_token_ids(folder: str | Path) -> list[int]:
    """Return the ids that end a text of a published model, the main one first; empty if the folder names none.

    The ids are the attribute `eos_token_id` of `generation_config.json` or, if that file lacks the attribute, of
    `config.json`.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        file = Path(folder) / name
        stated = read_json(file).get("eos_token_id") if is_there(file) else None
        if stated is None:
            continue
        if not fits(stated, Index | list[Index]):
            raise ValueError(
                f"{file}: eos_token_id={format_value(stated)}: it must be an id, or a list of ids, from 0 on."
            )
        return as_list(stated)
    return []
