"""Arrays that a model computes once for each row of a packing: written in order, resumed, and memory-mapped."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from .._failures import explain_write_error
from .._files import JsonObject, read_json, write_atomic
from .._shapes import Batch, DistillationBatch, PreferenceBatch
from . import _atomic_folder as atomic_folder
from ._documents import digest


_STATE = "rows.json"  # Of an unfinished folder: the number of complete rows, and the arrays' dtypes and shapes.
Arrays = Mapping[str, Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class StoredRows:
    """Arrays of each row (or pair) of a packing, in a folder beside the tokens; made by `Loader.with_row_arrays`."""

    path: Path
    """The folder."""
    arrays: Arrays
    """The arrays by name, memory-mapped, of dims: groups of the packing, rows of a group, others."""
    settings: JsonObject
    """Settings that decide the arrays: the tokens, the packing, its `seq`, and the model."""

    def add_to(self, batch: Batch, rows: Int[np.ndarray, "rows"]) -> Batch:
        """Return a batch of these rows of the packing with their arrays, as a loss reads them."""
        parts = {name: array[rows].reshape(-1, *array.shape[2:]) for name, array in self.arrays.items()}
        if "top_ids" in parts:
            copied = {field.name: getattr(batch, field.name) for field in fields(Batch)}
            ids, nats = parts["top_ids"].astype(np.int32), parts["top_nats"]
            return DistillationBatch(**copied, top_ids=ids, top_nats=nats, temperature=self.settings["temperature"])
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
        """Settings of the arrays beside the rows, as JSON: a name for their `kind`, the model, and others."""
        ...

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of each batch that this process gives, from the first to the one after the last."""
        ...

    @property
    def is_writer(self) -> bool:
        """Whether this process writes; others only take part in the computation."""
        ...

    def __call__(self, batch: Batch) -> Arrays:
        """Return the arrays of all rows of a batch, of which this process gives its own."""
        ...


def store_rows(
    tokens: Path,
    rows: int,
    compute: Callable[[Int[np.ndarray, "rows"]], Arrays],
    settings: JsonObject,
    *,
    batch: int,
    is_writer: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> StoredRows:
    """Compute arrays for all rows of a packing into a folder beside its tokens, or open the folder if it exists.

    The name of the folder depends on all settings. If the process ends before the last row, the next call goes on with
    the first row that is missing.

    Args:
        tokens: The folder of the tokens.
        rows: The number of rows.
        compute: Returns the arrays of rows by name, from the rows' numbers.
        settings: Everything that decides the arrays, as JSON.
        batch: The number of rows that are computed at once; at the end, the last row is repeated.
        is_writer: Whether this process writes; the others only take part in the computation.
        progress: Called with the number of rows done and of all.

    Raises a `ValueError` if another process computes them at this time, or they cannot be written.
    """
    key = digest([tokens.name, json.dumps(settings, sort_keys=True)])
    target = tokens.parent / f"{tokens.name}-{settings['kind']}-{key[:16]}"
    if not target.exists():
        partial = target.with_name(f".{target.name}.partial")
        start = int(read_json(partial / _STATE)["rows"]) if (partial / _STATE).exists() else 0
        with _open_writer(partial, start, target) if is_writer else _no_writer() as write:
            for first in range(start, rows, batch):
                count = min(batch, rows - first)
                arrays = compute(np.minimum(first + np.arange(batch), rows - 1))
                write({name: array[:count] for name, array in arrays.items()}, first + count)
                if progress is not None:
                    progress(first + count, rows)
            write({}, rows)
        if is_writer:
            _finish(partial, target, settings)
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
            f"open_stored_rows({str(path)!r}): the folder must have the arrays of all rows, but {error}; delete it, "
            "and compute them again."
        ) from error


Write = Callable[[Arrays, int], None]


@contextmanager
def _no_writer() -> Iterator[Write]:
    yield lambda arrays, rows: None


@contextmanager
def _open_writer(partial: Path, start: int, target: Path) -> Iterator[Write]:
    """Yield `write(arrays, rows)`, which appends the arrays of rows to files and notes how many rows are complete."""
    call = f"store_rows({target.name})"
    files: dict[str, BinaryIO] = {}
    state: dict[str, Any] = {"rows": 0, "arrays": {}}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with atomic_folder.lock_folder(partial) as is_locked:
            if not is_locked:
                raise ValueError(f"{call}: another process computes these arrays; wait for it.")
            if start:
                state = read_json(partial / _STATE)

            def write(arrays: Arrays, rows: int) -> None:
                for name, array in arrays.items():
                    if name not in files:
                        state["arrays"][name] = {"dtype": array.dtype.newbyteorder("<").str, "shape": array.shape[1:]}
                        row_bytes = array.itemsize * int(np.prod(array.shape[1:]))
                        path = partial / f"{name}.bin"
                        with path.open("ab"):  # Creates the file.
                            os.truncate(path, start * row_bytes)
                        files[name] = path.open("ab")
                    files[name].write(np.ascontiguousarray(array, state["arrays"][name]["dtype"]).tobytes())
                    files[name].flush()
                    os.fsync(files[name].fileno())
                state["rows"] = rows
                write_atomic(partial / _STATE, json.dumps(state))

            yield write
    except OSError as error:
        reason, fix = explain_write_error(target.parent, error)
        raise ValueError(
            f"{call}: the arrays must be written to {target.parent}, but the system says {reason}; "
            f"{fix or 'find the cause'}, and call again to go on."
        ) from error
    finally:
        for file in files.values():
            file.close()


def _finish(partial: Path, target: Path, settings: JsonObject) -> None:
    """Describe the files of an unfinished folder, whose rows are all written, and give it its name."""
    state = read_json(partial / _STATE)
    names = [f"{name}.bin" for name in state["arrays"]]
    meta = {
        "settings": settings,
        **state,
        "files": {name: atomic_folder.describe_file(partial / name) for name in names},
    }
    write_atomic(partial / "meta.json", json.dumps(meta, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
