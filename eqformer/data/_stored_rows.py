"""Arrays that a model computes once for each row of a packing, in a folder; an interrupted computation resumes."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from .._failures import explain_write_error
from .._files import JsonObject, read_json, write_atomic
from .._shapes import Batch, batch_fields, DistillationBatch, PreferenceBatch
from . import _atomic_folder as atomic_folder
from ._documents import digest


_STATE = "rows.json"  # This file of an unfinished folder has the number of complete rows, and dtypes and shapes.
Arrays = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class StoredRows:
    """Arrays of each row (or pair) of a packing, in a folder beside the tokens; made by `Loader.with_row_arrays`."""

    path: Path
    """The folder."""
    arrays: Arrays
    """The memory-mapped arrays by name; their dims are groups of the packing, rows of a group, and further dims."""
    settings: JsonObject
    """Settings that decide the arrays: the tokens, the packing, its `seq`, and the model."""

    def add_to(self, batch: Batch, rows: Int[np.ndarray, "rows"]) -> Batch:
        """Return a batch with the arrays of its rows, in the fields where a loss reads them."""
        parts = {name: array[rows].reshape(-1, *array.shape[2:]) for name, array in self.arrays.items()}
        if "top_ids" in parts:
            ids, nats, temperature = parts["top_ids"].astype(np.int32), parts["top_nats"], self.settings["temperature"]
            return DistillationBatch(**batch_fields(batch), top_ids=ids, top_nats=nats, temperature=temperature)
        assert isinstance(batch, PreferenceBatch)
        mismatched = batch.mismatched
        if mismatched is not None:
            mismatched = replace(mismatched, reference_nats=parts["mismatched_nats"])
        return replace(batch, reference_nats=parts["reference_nats"], mismatched=mismatched)


@runtime_checkable
class ComputedRows(Protocol):
    """Interface of arrays that are computed for rows, such as `training.RowArrays`."""

    @property
    def settings(self) -> JsonObject:
        """Settings that decide the arrays of given rows, as JSON: their `kind`, the model, and others."""
        ...

    @property
    def rows(self) -> tuple[int, int]:
        """The range of a batch's rows that this process passes to a call: the first row, and the row after the last."""
        ...

    def on_writer(self, action: Callable[[], object]) -> object:
        """Run an action in the process that writes; the other processes wait until it is done."""
        ...

    def __call__(self, batch: Batch) -> Arrays:
        """Return the arrays of all rows of a batch, given the rows of this process."""
        ...


def store_rows(
    tokens: Path,
    rows: int,
    compute: Callable[[Int[np.ndarray, "rows"]], Arrays],
    settings: JsonObject,
    *,
    batch: int,
    on_writer: Callable[[Callable[[], object]], object],
    progress: Callable[[int, int], object] | None = None,
) -> StoredRows:
    """Compute arrays for all rows of a packing into a folder beside its tokens, or open the folder if it exists.

    The name of the folder depends on all settings. If the process ends before the last row, the next call continues
    with the first missing row.

    Args:
        tokens: The folder of the tokens.
        rows: The number of rows.
        compute: Returns the arrays of rows by name, from the rows' numbers.
        settings: Everything that decides the arrays, as JSON.
        batch: The number of rows that are computed at once; the last row is repeated to fill the last batch.
        on_writer: As in `ComputedRows`: one process writes, and all other processes only help to compute.
        progress: Called with the number of finished rows and the number of all rows.

    Raises a `ValueError` if another process is computing the arrays, or if they cannot be written.
    """
    key = digest([tokens.name, json.dumps(settings, sort_keys=True)])
    target = tokens.parent / f"{tokens.name}-{settings['kind']}-{key[:16]}"
    if not target.exists():
        with _explain_errors(target), closing(_RowWriter(target)) as writer:
            on_writer(writer.open)
            for first in range(writer.start, rows, batch):
                count = min(batch, rows - first)
                arrays = compute(np.minimum(first + np.arange(batch), rows - 1))
                new_rows = {name: array[:count] for name, array in arrays.items()}
                on_writer(functools.partial(writer.write, new_rows, first + count))
                if progress is not None:
                    progress(first + count, rows)
            on_writer(functools.partial(writer.finish, settings))
    return open_stored_rows(target)


def open_stored_rows(path: str | os.PathLike[str]) -> StoredRows:
    """Open a folder that `store_rows` has finished. Raises a `ValueError` for any other folder."""
    path = Path(path)
    try:
        meta = atomic_folder.read_description(path, verify=False)
        arrays = {
            name: np.memmap(path / f"{name}.bin", entry["dtype"], "r", shape=(meta["rows"], *entry["shape"]))
            for name, entry in meta["arrays"].items()
        }
        return StoredRows(path, {name: array.view(np.ndarray) for name, array in arrays.items()}, meta["settings"])
    except (atomic_folder.DamagedFolder, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"open_stored_rows({str(path)!r}): the folder must have the arrays of all rows, but {error}; delete the "
            "folder, and compute the arrays again."
        ) from error


@contextmanager
def _explain_errors(target: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as a `ValueError` that says why the arrays cannot be written."""
    try:
        yield
    except OSError as error:
        reason, fix = explain_write_error(target.parent, error)
        raise ValueError(
            f"store_rows({target.name}): the arrays must be written to {target.parent}, but the system says {reason}; "
            f"{fix or 'find the cause'}, and call again to go on."
        ) from error


class _RowWriter:
    """Writer of arrays of rows into an unfinished folder, which `finish` renames to `target`.

    Every process has a writer, but only one process calls `open`, `write` and `finish`.
    """

    def __init__(self, target: Path):
        self._target, self._folder = target, target.with_name(f".{target.name}.partial")
        state_path = self._folder / _STATE
        self.start = int(read_json(state_path)["rows"]) if state_path.exists() else 0  # Rows that the folder has.
        self._files: dict[str, BinaryIO] = {}
        self._state: dict[str, Any] = {"rows": 0, "arrays": {}}
        self._lock = ExitStack()

    def open(self) -> None:
        """Create and lock the folder; if it exists already, lock it and read which arrays it has."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._lock.enter_context(atomic_folder.lock_folder(self._folder)):
            raise ValueError(f"store_rows({self._target.name}): another process computes these arrays; wait for it.")
        if self.start:
            self._state = read_json(self._folder / _STATE)

    def write(self, arrays: Arrays, rows: int) -> None:
        """Append the arrays of new rows to the files, and record the number of complete rows."""
        for name, array in arrays.items():
            if name not in self._files:
                self._files[name] = self._open_file(name, array)
            dtype = self._state["arrays"][name]["dtype"]
            self._files[name].write(np.ascontiguousarray(array, dtype).tobytes())
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self._state["rows"] = rows
        write_atomic(self._folder / _STATE, json.dumps(self._state))

    def _open_file(self, name: str, array: Shaped[np.ndarray, "..."]) -> BinaryIO:
        """Open the file of an array, and cut off everything after the file's complete rows."""
        self._state["arrays"][name] = {"dtype": array.dtype.newbyteorder("<").str, "shape": array.shape[1:]}
        row_bytes = array.itemsize * int(np.prod(array.shape[1:]))
        path = self._folder / f"{name}.bin"
        with path.open("ab"):  # Creates the file.
            os.truncate(path, self.start * row_bytes)
        return path.open("ab")

    def finish(self, settings: JsonObject) -> None:
        """Write the description of the complete files, and rename the folder to its final name."""
        self.close()
        names = [f"{name}.bin" for name in self._state["arrays"]]
        files = {name: atomic_folder.describe_file(self._folder / name) for name in names}
        meta = {"settings": settings, **self._state, "files": files}
        write_atomic(self._folder / "meta.json", json.dumps(meta, indent=2))
        shutil.rmtree(self._target, ignore_errors=True)
        self._folder.rename(self._target)

    def close(self) -> None:
        """Close the files, and unlock the folder."""
        for file in self._files.values():
            file.close()
        self._lock.close()
