"""Checkpoints: written in the background, committed by a rename, checked before they are read."""

import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from ... import nn
from ..._failures import explain_error, load_extra
from ..._files import JsonObject, parse_json, sync_path
from ._contents import (
    check_files,
    describe_files,
    from_stored,
    leaf_faults,
    make_folder,
    match_saved_names,
    metadata_to_json,
    named_arrays,
    read_manifest,
    remove,
    stored_shape,
    sync_tree,
    to_stored,
    write_manifest,
)


class CheckpointError(ValueError):
    """An error for a checkpoint that could not be written, or that exists and cannot be read."""


class Checkpointer:
    """A writer and reader of a run's last `keep` checkpoints, in a local folder with one sub-folder for each step.

    `save` copies the arrays to the host and returns. In the background, orbax writes them to `<step>.unfinished`; then
    a manifest with the size and checksum of every file is added, every file and folder is synced (fsync), and a rename
    to `<step>` commits the checkpoint. Older steps are deleted only after the commit. A folder whose name is a number
    is therefore always a complete checkpoint, even if the process was killed or the power failed. If the background
    thread fails, the next call of `save`, `wait` or `close` raises its error; such a call also warns of an older step
    that could not be deleted. A program that ends without such a call waits for the save, and shows its error.

    `restore` checks every file against the manifest, and every leaf's shape and dtype, before it reads arrays. It never
    falls back to an older step by itself.

    The folder of a step may be moved elsewhere if a symbolic link to it is left in its place. The step is restored
    through the link. When the step is too old to be kept, the link is deleted, and the moved folder stays. A broken
    link, for example to a disk that is not mounted, is a `CheckpointError`.

    Only one run may write to a folder, and any number of runs may read it. Nothing is created or deleted before the
    first `save`. In a run of several processes, all processes call `save`, `restore`, `wait` and `close` at the same
    steps, with the same tree of global arrays and a shared folder. Each process writes its own shards, and the first
    process commits. If one process fails, all processes raise an error.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3, run: str | None = None):
        """Keep the last `keep` checkpoints; None keeps all.

        `run` is the run's identifier, any text. It is saved in the metadata of each checkpoint as `"run"`, and a
        checkpoint with another identifier cannot be read. A checkpoint without an identifier can always be read. With
        `run=None`, every checkpoint can be read.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpointer(keep={keep}): at least one checkpoint is kept; pass None to keep all.")
        self._directory = Path(directory).absolute()
        self._keep, self._run = keep, run
        self._writer: Any = None  # orbax's checkpointer, made by the first save
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._warnings: list[str] = []  # about folders that could not be deleted, for the next call

    @property
    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in ascending order; raises a `CheckpointError` for a broken link."""
        broken = [path for path in self._entries() if path.name.isdecimal() and path.is_symlink() and not path.exists()]
        if broken:
            raise CheckpointError(
                f"{broken[0]}: this checkpoint is a link to {broken[0].readlink()}, which does not exist; mount that "
                "disk or repair the link, or remove the link to do without this step."
            )
        return self._committed()

    def _committed(self) -> list[int]:
        """Return the steps with a committed checkpoint that exists, in ascending order."""
        return sorted(int(path.name) for path in self._entries() if path.name.isdecimal() and path.is_dir())

    def _entries(self) -> list[Path]:
        return list(self._directory.iterdir()) if self._directory.is_dir() else []

    @property
    def latest_step(self) -> int | None:
        """The last step with a committed checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, state: PyTree, step: int, metadata: Mapping[str, object]) -> None:
        """Start to save the arrays of `state`, after waiting for the previous save and raising its error if it failed.

        The arrays may be donated as soon as this method returns. `metadata` is any JSON object; the versions of
        eqformer, jax, equinox, optax and orbax are added to it.
        """
        self.wait()
        latest = self.latest_step
        if step < 0:
            raise ValueError(f"Checkpointer.save(step={step}): steps count from 0; save a step of at least 0.")
        if latest is not None and step <= latest:
            raise ValueError(
                f"Checkpointer.save(step={step}): the folder already holds step {latest}, and nothing is overwritten; "
                "save a later step or use another folder."
            )
        if self._writer is not None and not self._directory.is_dir():
            raise CheckpointError(
                f"Checkpointer.save(step={step}): {self._directory} was deleted or moved since the last save, with the "
                "checkpoints in it. Nothing is saved: restore the folder, or start again in a new folder."
            )
        text = metadata_to_json(metadata if self._run is None else {**metadata, "run": self._run})
        leaves = named_arrays(state)
        if self._writer is None:
            ocp = _orbax()
            self._writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), timeout_secs=_LONGEST_SAVE)
            run_at_exit(self._finish)
            self._clean()
            _all_agree(True)  # a barrier: no process makes a folder before the first process has deleted the leftovers
        folder = self._directory / f"{step}.unfinished"
        table = {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()}
        try:
            make_folder(folder)
            inode = _inode_of(folder)
            self._writer.save(folder / "state", args=_orbax().args.StandardSave(jax.tree.map(to_stored, leaves)))
        except Exception as error:
            with suppress(OSError):
                remove(folder)
            raise self._could_not_save(step, error) from error
        self._thread = threading.Thread(target=self._commit, args=(step, folder, inode, text, table), name="checkpoint")
        self._thread.start()

    def restore(self, like: PyTree, step: int | None = None, *, partial: bool = False) -> tuple[PyTree, JsonObject]:
        """Return the state and the metadata of a step (`None`: the latest).

        `like` is a tree like the saved state, with arrays or `jax.ShapeDtypeStruct`s. Each array is read into the
        sharding of its leaf in `like`, and leaves that are not arrays are taken from `like`. With `partial`, `like` may
        lack some of the saved leaves: `{"model": shapes}` restores a model without its optimizer's state. Raises a
        `CheckpointError` if there is no such checkpoint, if any of its files is missing or damaged, or if a leaf
        differs from `like` in name, shape or dtype.
        """
        step, folder, manifest, saved_names = self._check_leaves(like, step, partial)
        arrays, static = eqx.partition(like, nn.has_shape)
        wanted = named_arrays(arrays)
        # Only the first process computes checksums, so that each file is read only once to check it.
        faults = check_files(folder, manifest["files"]) if jax.process_index() == 0 else []
        if not _all_agree(not faults):
            _refuse(
                folder, faults or ["some of its files are missing or damaged; the first process's error names them"]
            )
        targets = {saved_names[name]: stored_shape(x) for name, x in wanted.items()}
        ocp = _orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
                args = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=partial)
                stored = reader.restore(folder / "state", args=args)
        except Exception as error:
            raise CheckpointError(f"{folder}: the checkpoint of step {step} cannot be read: {error}") from error
        leaves = [from_stored(stored[saved_names[name]], like) for name, like in wanted.items()]
        restored = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
        return eqx.combine(restored, static), manifest["metadata"]

    def check(self, like: PyTree, step: int | None = None, *, partial: bool = False) -> None:
        """Raise a `CheckpointError` if the saved leaves differ from `like`, as `restore` does, but read no arrays."""
        self._check_leaves(like, step, partial)

    def _check_leaves(
        self, like: PyTree, step: int | None, partial: bool
    ) -> tuple[int, Path, JsonObject, dict[str, str]]:
        """Return the step, its folder, its manifest, and the saved names of its leaves by their current names.

        Raises a `CheckpointError` if the saved leaves differ from `like`.
        """
        step, folder, manifest = self._read_manifest(step)
        wanted = named_arrays(eqx.filter(like, nn.has_shape))
        saved_names = match_saved_names(manifest["leaves"], wanted)
        saved = {name: manifest["leaves"][saved_name] for name, saved_name in saved_names.items()}
        if partial:
            saved = {name: leaf for name, leaf in saved.items() if name in wanted}
        if faults := leaf_faults(saved, wanted):
            _refuse(folder, faults, "Restore into a model and an optimizer of the recipe that was saved.")
        return step, folder, manifest, saved_names

    def leaves(self, step: int | None = None) -> JsonObject:
        """Return the dtype and shape of each array of a step (`None`: the latest), by its name."""
        return self._read_manifest(step)[2]["leaves"]

    def metadata(self, step: int | None = None) -> JsonObject:
        """Return the metadata of a step (`None`: the latest), which suffices to build `like`."""
        return self._read_manifest(step)[2]["metadata"]

    def wait(self) -> None:
        """Wait for the running save; raise its error, and warn of older folders that could not be deleted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            has_succeeded = self._failure is None
            # All processes learn here whether one has failed.
            if not _all_agree(has_succeeded) and has_succeeded:
                raise CheckpointError(
                    f"{self._directory}: another process of the run could not save; its error gives the reason."
                )
        if self._failure is not None:
            (step, error), self._failure = self._failure, None
            raise self._could_not_save(step, error) from error
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Wait for the running save, and release orbax's threads."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._thread is not None and jax.process_count() > 1:
            self._thread.join()  # A process that has not failed would not take part in the collective of `wait`.
            self._thread = None
        self.close()

    def _finish(self) -> None:
        """Wait for the running save when the program ends, without waiting for other processes."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._could_not_save(*self._failure)

    def _commit(self, step: int, folder: Path, inode: int | None, metadata: str, leaves: dict) -> None:
        """Wait until the arrays are written, and commit the checkpoint; runs in the background."""
        assert self._writer is not None
        try:
            self._writer.wait_until_finished()
            if jax.process_index() != 0:
                return
            if _inode_of(folder) != inode:  # Orbax recreates a deleted folder for its remaining arrays.
                raise FileNotFoundError(folder)
            manifest = {"step": step, "metadata": parse_json(metadata), "leaves": leaves}
            manifest["files"] = describe_files(folder)
            write_manifest(folder, manifest)
            sync_tree(folder)
            folder.rename(self._directory / str(step))
            sync_path(self._directory)
        except BaseException as error:
            committed = self._directory / str(step)
            is_deleted = inode not in (_inode_of(folder), _inode_of(committed))
            moved = FileNotFoundError(f"{folder} was deleted or moved while it was written")
            self._failure = (step, moved if is_deleted else error)
            if jax.process_index() == 0:
                with suppress(OSError):
                    remove(folder)
        else:
            self._prune()

    def _prune(self) -> None:
        """Delete the checkpoints that are older than the last `keep`."""
        for step in self._committed()[: -self._keep] if self._keep else []:
            path = self._directory / str(step)
            with self._warn_later(path):
                if path.is_symlink():
                    self._warnings.append(f"{path}: this link is deleted; the checkpoint in {path.readlink()} stays.")
                # The rename comes first, so that an incompletely deleted checkpoint never looks like a complete one.
                remove(path.rename(self._directory / f"{step}.discarded"))

    def _clean(self) -> None:
        """Delete folders that an earlier process left unfinished or incompletely deleted."""
        if jax.process_index() == 0:
            for path in self._entries():
                if path.suffix in (".unfinished", ".discarded") and path.stem.isdecimal():
                    with self._warn_later(path):
                        remove(path)

    @contextmanager
    def _warn_later(self, path: Path) -> Iterator[None]:
        """Turn the error of a failed deletion into a warning of the next `wait`; leftovers only cost disk space."""
        try:
            yield
        except OSError as error:
            reason, fix = explain_error(error)
            fix = fix or "find the cause"
            self._warnings.append(f"{path} could not be deleted: {reason}; {fix}, or delete it by hand.")

    def _could_not_save(self, step: int, error: BaseException) -> CheckpointError:
        """Return the error of a failed save, with the reason, the state of the folder and the fix."""
        steps = self._committed()
        latest = f"the checkpoint of step {steps[-1]} is whole" if steps else "no checkpoint exists"
        is_there = step in steps
        outcome = (
            "The checkpoint was written, but not synced, so a power cut may lose it"
            if is_there
            else "No part of this checkpoint was kept"
        )
        reason, fix = explain_error(error)
        return CheckpointError(
            f"Checkpointer.save(step={step}) to {self._directory} failed: {reason.rstrip('.')}. {outcome}; {latest}. "
            f"{fix[0].upper() + fix[1:] if fix else 'Find the cause'}, or choose another folder."
        )

    def _read_manifest(self, step: int | None) -> tuple[int, Path, JsonObject]:
        """Return a step, its folder and its manifest; raise a `CheckpointError` if this run has no such checkpoint."""
        chosen = self.latest_step if step is None else step
        if chosen is None or chosen not in self.steps:
            steps = ", ".join(map(str, self.steps)) or "none"
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self._directory}: {which}; the steps there are: {steps}.")
        folder = self._directory / str(chosen)
        manifest = read_manifest(folder)
        if isinstance(manifest, str):
            _refuse(folder, [manifest])
        if (saved := manifest["step"]) != chosen:
            fault = f"its manifest belongs to step {saved}, and the folder's name says {chosen}"
            _refuse(folder, [fault], f"Rename the folder back to {saved}, or delete it.")
        run = manifest["metadata"].get("run")
        if None not in (run, self._run) and run != self._run:
            fault = f"it was saved by run {run}, and this folder holds run {self._run}"
            _refuse(folder, [fault], "Move the checkpoint back, or begin another run with its weights (--from-run).")
        return chosen, folder, manifest


# A save that takes longer than this number of seconds fails. Orbax's default of twenty minutes is too short for large
# states on slow disks.
_LONGEST_SAVE = 24 * 60 * 60


def _orbax() -> ModuleType:
    quiet_orbax()
    return load_extra("orbax.checkpoint", extra="train", call="Checkpointer(directory)")


def _inode_of(folder: Path) -> int | None:
    """Return a folder's inode, which stays the same when it is renamed; None if the folder does not exist."""
    return folder.stat().st_ino if folder.exists() else None


def _all_agree(condition: bool) -> bool:
    """Return whether a condition holds in every process of the run; the call is also a barrier."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.array(condition)).all())


def _refuse(
    folder: Path, faults: list[str], fix: str = "Restore another step by its number, or delete this one."
) -> NoReturn:
    """Raise a `CheckpointError` that lists the first eight faults of a checkpoint."""
    listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
    raise CheckpointError(f"{folder}: the checkpoint exists but cannot be restored: {listed}. {fix}")


def run_at_exit(method: Callable[[], object]) -> None:
    """Register an object's method to be called when the program ends; errors of the method are shown.

    If the object no longer exists by then, nothing is called. The call comes before Python shuts down executors, so
    that background work can still finish; `atexit` would be too late. A Python without such a hook calls nothing.
    """
    reference = weakref.WeakMethod(method)

    def finish() -> None:
        live_method = reference()
        try:
            if live_method is not None:
                live_method()
        except Exception as error:  # an error raised here would keep other hooks from running
            sys.excepthook(type(error), error, None)

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(finish)


def quiet_orbax() -> None:
    """Drop orbax's log records: its progress, and its tracebacks, which `Checkpointer` raises as one error.

    If the disk is full or the folder is deleted, several of orbax's threads fail at once, and each of them would print
    the same traceback.
    """
    # Orbax logs through absl's logger, which other libraries share; the filter keeps the records of other libraries.
    logger = logging.getLogger("absl")
    if _is_not_from_orbax not in logger.filters:
        logger.addFilter(_is_not_from_orbax)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname
