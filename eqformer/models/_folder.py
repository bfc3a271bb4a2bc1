"""Folders of safetensors as they are published: one file, or several with an index; every header is checked."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # lets numpy know bfloat16
import numpy as np

from .._extra import load_extra
from .._failures import foreign_call
from .._read import check_regular, few_names, is_there, map_bytes, parse_json, read_json


CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# What other arrays of a folder are of: codes of weights, and what other parts hold.
OTHERS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool"}
OTHERS |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


class Folder:
    """The arrays of a published model, or of another `single` file, by name, memory-mapped; read when asked for.

    Raises a `ValueError` for a folder that is not what it says: an index that names files elsewhere or arrays that its
    files do not hold, arrays that are in two files, files whose headers do not fit them.
    """

    def __init__(self, path: str | Path, single: str = SINGLE, caller: str = "load"):
        """Open every file of the folder and compare it with the index."""
        self.path, self.call = Path(path), f"{caller}({str(path)!r})"
        if not self.path.is_dir():
            if is_there(self.path):
                check_regular(self.path)
            raise ValueError(
                f"{self.call}: there is no such folder; nothing is downloaded, so give the folder that a download made "
                "(hf download OWNER/NAME --local-dir FOLDER)."
            )
        index = self.path / f"{single}.index.json"
        self._maps: dict[str, np.ndarray] = {}
        self._placed: dict[str, tuple[str, list[int], int, int]] = {}  # the file's dtype, shape, first and last byte
        if is_there(index):
            self._file_of = self._indexed(index)
        elif is_there(self.path / single):
            self._file_of = dict.fromkeys(self._open(single), single)
        else:
            raise ValueError(
                f"{self.call}: the folder has no {single} and no {index.name}. Pickled weights (.bin, .pt) are "
                "never read, since they can run programs; convert them to safetensors where you trust them."
            )

    @property
    def names(self) -> Set[str]:
        """Every array's name."""
        return self._file_of.keys()

    def dtype(self, name: str) -> str:
        """An array's dtype as JAX calls it; raises a `ValueError` for one that is no float, as only buffers are."""
        dtype = self._placed[name][0]
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.path / self._file_of[name]}: {name} is of {dtype}; weights are {', '.join(FLOATS)}."
            )
        return FLOATS[dtype]

    def read(self, name: str) -> np.ndarray:
        """An array as it lies in its file, mapped into memory: nothing is read before it is used."""
        _, shape, start, stop = self._placed[name]
        return self._maps[self._file_of[name]][start:stop].view(self.dtype(name)).reshape(shape)

    def dtype_in_file(self, name: str) -> str:
        """An array's dtype as its file calls it."""
        return self._placed[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """An array's shape."""
        return tuple(self._placed[name][1])

    def stored(self, name: str) -> np.ndarray:
        """An array of whatever dtype as it lies in its file, mapped into memory; a `ValueError` for an unknown one."""
        dtype, shape, start, stop = self._placed[name]
        if (known := (FLOATS | OTHERS).get(dtype)) is None:
            raise ValueError(f"{self.path / self._file_of[name]}: {name} is of {dtype}, which is not known.")
        return self._maps[self._file_of[name]][start:stop].view(known).reshape(shape)

    def _indexed(self, index: Path) -> dict[str, str]:
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise ValueError(f"{index}: it has no weight_map of names to files.")
        listed_of: dict[str, set[str]] = {}
        for name, file in file_of.items():
            listed_of.setdefault(file, set()).add(name)
        for file, listed in sorted(listed_of.items()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{index}: it names {file!r}, which is no safetensors file of this folder.")
            if (held := set(self._open(file))) != listed:
                raise ValueError(
                    f"{self.path / file}: the index and the file disagree on {few_names(held ^ listed)}; the index "
                    "must give each array's file, once."
                )
        return file_of

    def _open(self, file: str) -> list[str]:
        path = self.path / file
        check_regular(path)
        safetensors = load_extra("safetensors", extra="train", call=self.call)
        with (
            foreign_call(lambda reason: f"{path}: it is no whole safetensors file ({reason})."),
            safetensors.safe_open(path, framework="np"),  # it compares header and size, byte by byte
        ):
            whole = map_bytes(path)
            data = 8 + int.from_bytes(whole[:8].tobytes(), "little")
            header = parse_json(whole[8:data].tobytes())
        header.pop("__metadata__", None)
        for name, its in header.items():
            start, stop = (data + offset for offset in its["data_offsets"])
            self._placed[name] = its["dtype"], its["shape"], start, stop
        self._maps[file] = whole
        return list(header)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to `target` at the end, and removed if an error is raised."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    part.mkdir()
    try:
        yield part
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


def write_folder(
    path: Path, arrays: Iterator[tuple[str, np.ndarray]], config: Mapping[str, Any], shard_bytes: int
) -> None:
    """Write `config.json` and the arrays, in as many files as need be; only the arrays of one file are held at once."""
    save_file = load_extra("safetensors.numpy", extra="train", call="save(model, path, config)").save_file
    file_of: dict[str, int] = {}
    part: dict[str, np.ndarray] = {}
    number, held, total = 0, 0, 0

    def flush() -> None:
        nonlocal number, held
        save_file(part, path / f"part-{number}.safetensors", metadata={"format": "pt"})
        number, held = number + 1, 0
        part.clear()

    for name, array in arrays:
        if part and held + array.nbytes > shard_bytes:
            flush()
        part[name], file_of[name] = np.asarray(array, order="C"), number  # and 0 dims stay 0
        held, total = held + array.nbytes, total + array.nbytes
    flush()
    names = [f"model-{i + 1:05}-of-{number:05}.safetensors" if number > 1 else SINGLE for i in range(number)]
    for i, name in enumerate(names):
        (path / f"part-{i}.safetensors").rename(path / name)
    if number > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in file_of.items()}}
        write_json(path / INDEX, index)
    write_json(path / CONFIG, config)


def ends_of_text(folder: str | Path) -> list[int]:
    """The ids that end a text of a published model, the main one first; empty if the folder names none.

    They are `eos_token_id` of `generation_config.json` or, where it says nothing, of `config.json`.
    """
    for name in ("generation_config.json", CONFIG):
        file = Path(folder) / name
        found = read_json(file).get("eos_token_id") if is_there(file) else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []
