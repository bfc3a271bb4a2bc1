"""Checkpoints: written in the background, committed by one rename, checked before they are read."""

import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from .._extra import load_extra
from ._manifest import check_files, describe_files, sync_folder
from ._quiet import quiet_orbax
from ._run_metadata import versions


class CheckpointError(ValueError):
    """A checkpoint that could not be written, or one that exists and cannot be read."""


class Checkpointer:
    """Keeps the last `keep` checkpoints of a run in a local folder, one sub-folder a step.

    A save copies the arrays to the host and returns; orbax writes them to `<step>.unfinished`, a manifest with the
    size and checksum of every file follows, all is synced, and one rename to `<step>` commits. So a folder whose name
    is a number is a whole checkpoint, whenever the process was killed. An error in the background is raised by the
    next call of `save`, `wait` or `close`. Restoring checks every file against the manifest and every leaf's shape and
    dtype before anything is read, and never falls back to an older step by itself.

    One run writes to a folder; any number may read. Nothing is created or deleted before the first `save`. Where a run
    has several processes, all call `save`, `restore`, `wait` and `close` at the same steps with the same tree of global
    arrays, in a folder that all of them see: each writes its own pieces, the first commits, and what fails for one
    fails for all.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3):
        """`keep=None` keeps every checkpoint."""
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpointer(keep={keep}): at least one checkpoint is kept; pass None to keep all.")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._writer: Any = None  # orbax's, made by the first save
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None

    @property
    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if _is_step(path))

    @property
    def latest_step(self) -> int | None:
        """The last step with a committed checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, state: PyTree, step: int, metadata: Mapping[str, Any]) -> None:
        """Starts to save the arrays of `state`; waits first for the save before, and raises its error if it failed.

        The arrays may be donated as soon as this returns. `metadata` is any JSON object; versions of eqformer, jax,
        equinox and optax are added to it.
        """
        self.wait()
        latest = self.latest_step
        if latest is not None and step <= latest:
            raise ValueError(
                f"Checkpointer.save(step={step}): the folder already holds step {latest}, and nothing is overwritten; "
                "save a later step or use another folder."
            )
        text = json.dumps(dict(metadata) | {"versions": versions()}, allow_nan=False)
        leaves = _named_arrays(state)
        if self._writer is None:
            ocp = _orbax()
            self._writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
            self._clean()
            _all_agree(True)  # nobody begins a folder before the leftovers are gone
        folder = self._directory / f"{step}.unfinished"
        table = {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer.save(folder / "state", args=_orbax().args.StandardSave(leaves))
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise self._could_not_save(step, error) from error
        self._thread = threading.Thread(target=self._commit, args=(step, folder, text, table), name="checkpoint")
        self._thread.start()

    def restore(self, like: PyTree, step: int | None = None, *, partial: bool = False) -> tuple[PyTree, dict[str, Any]]:
        """The state and the metadata of a step (`None`: the latest).

        `like` has the tree of the saved state, with arrays or `jax.ShapeDtypeStruct`s; each array is read to the
        sharding of its leaf, and leaves that are not arrays are taken from `like`. With `partial`, what `like` lacks
        is left unread: `{"model": shapes}` restores a model without its optimizer's state. Raises `CheckpointError` if
        there is no such checkpoint, if any of its files is missing or damaged, or if a leaf differs from `like` in
        name, shape or dtype.
        """
        step, folder, manifest = self._manifest(step)
        arrays, rest = eqx.partition(like, _is_array)
        wanted = _named_arrays(arrays)
        saved = manifest["leaves"]
        _check_leaves(folder, {n: x for n, x in saved.items() if n in wanted} if partial else saved, wanted)
        # The files are read over once, by the first process, whatever the number of processes.
        faults = check_files(folder, manifest["files"]) if jax.process_index() == 0 else []
        if not _all_agree(not faults):
            _refuse(folder, faults or ["the first process of the run found its files missing or damaged"])
        targets = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)) for name, x in wanted.items()}
        ocp = _orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                how = ocp.checkpoint_utils.construct_restore_args(targets)
                how = ocp.args.PyTreeRestore(targets, restore_args=how, partial_restore=partial)
                found = reader.restore(folder / "state", args=how)
        except Exception as error:
            raise CheckpointError(f"{folder}: the checkpoint of step {step} cannot be read: {error}") from error
        found = jax.tree.unflatten(jax.tree.structure(arrays), [found[name] for name in wanted])
        return eqx.combine(found, rest), manifest["metadata"]

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the state of a step (`None`: the latest): enough to build `like`."""
        return self._manifest(step)[2]["metadata"]

    def wait(self) -> None:
        """Returns when no save is under way; raises the error of one that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            is_whole = self._failure is None
            # Only now do the others know that the first process has committed.
            if not _all_agree(is_whole) and is_whole:
                raise CheckpointError(
                    f"{self._directory}: another process of the run could not save; its error says why."
                )
        if self._failure is not None:
            (step, error), self._failure = self._failure, None
            raise self._could_not_save(step, error) from error

    def close(self) -> None:
        """Waits, and releases orbax's threads."""
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
            self._thread.join()  # an error of this process alone: the others are not asked, since they do not listen
            self._thread = None
        self.close()

    def _commit(self, step: int, folder: Path, metadata: str, leaves: dict) -> None:
        assert self._writer is not None
        try:
            self._writer.wait_until_finished()
            if jax.process_index() != 0:
                return
            manifest = {"step": step, "metadata": json.loads(metadata), "leaves": leaves}
            manifest["files"] = describe_files(folder)
            _write(folder / _MANIFEST, json.dumps({"crc32": _checksum(manifest), "manifest": manifest}))
            sync_folder(folder)
            folder.rename(self._directory / str(step))
            sync_folder(self._directory)
            self._prune()
        except BaseException as error:
            self._failure = (step, error)
            if jax.process_index() == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def _prune(self) -> None:
        for step in self.steps[: -self._keep] if self._keep else []:
            # Renamed first, so that a half-deleted checkpoint never looks like a whole one.
            discarded = (self._directory / str(step)).rename(self._directory / f"{step}.discarded")
            shutil.rmtree(discarded)

    def _clean(self) -> None:
        """Deletes what an earlier process left unfinished or half deleted."""
        if self._directory.is_dir() and jax.process_index() == 0:
            for path in self._directory.iterdir():
                if path.suffix in (".unfinished", ".discarded") and path.stem.isdecimal():
                    shutil.rmtree(path)

    def _could_not_save(self, step: int, error: BaseException) -> CheckpointError:
        latest = self.latest_step
        rest = "no checkpoint exists" if latest is None else f"the checkpoint of step {latest} is whole"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CheckpointError(
            f"Checkpointer.save(step={step}) to {self._directory} failed: {reason[:300]}. Nothing of it was kept; "
            f"{rest}. Free some space or choose another folder."
        )

    def _manifest(self, step: int | None) -> tuple[int, Path, dict[str, Any]]:
        chosen = self.latest_step if step is None else step
        if chosen is None or chosen not in self.steps:
            held = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(f"{self._directory}: no checkpoint of step {step}; the steps there are: {held}.")
        folder = self._directory / str(chosen)
        try:
            read = json.loads((folder / _MANIFEST).read_text())
            manifest, is_whole = read["manifest"], read["crc32"] == _checksum(read["manifest"])
        except FileNotFoundError:
            _refuse(folder, [f"file {_MANIFEST} is missing"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            _refuse(folder, [f"file {_MANIFEST} cannot be read ({error})"])
        if not is_whole:
            _refuse(folder, [f"file {_MANIFEST} is damaged: its checksum is not the one that was saved"])
        return chosen, folder, manifest


_MANIFEST = "manifest.json"


def _orbax() -> Any:
    quiet_orbax()
    return load_extra("orbax.checkpoint", extra="train", call="Checkpointer(directory)")


def _all_agree(mine: bool) -> bool:
    """Whether it holds in every process of the run; none goes on before all are here."""
    if jax.process_count() == 1:
        return mine
    return bool(multihost_utils.process_allgather(np.array(mine)).all())


def _is_step(path: Path) -> bool:
    return path.name.isdecimal() and path.is_dir()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _named_arrays(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, _is_array))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves)
    for name, leaf in named.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"Checkpointer: leaf {name} is a random key; put `run_metadata(key=...)` in the metadata.")
    return named


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    known = None if isinstance(leaf, np.ndarray) else leaf.sharding
    return jax.sharding.SingleDeviceSharding(jax.devices()[0]) if known is None else known


def _check_leaves(folder: Path, saved: dict[str, list], wanted: dict[str, Any]) -> None:
    faults = [f"leaf {name} is in the checkpoint and not in the model" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            faults.append(f"leaf {name} is in the model and not in the checkpoint")
            continue
        (dtype, shape), mine = saved[name], (str(leaf.dtype), list(leaf.shape))
        if (dtype, shape) != mine:
            faults.append(f"leaf {name} is {dtype}{shape} in the checkpoint and {mine[0]}{mine[1]} in the model")
    if faults:
        _refuse(folder, faults, "Restore into a model and an optimizer of the recipe that was saved.")


def _refuse(
    folder: Path, faults: list[str], fix: str = "Restore another step by its number, or delete this one."
) -> NoReturn:
    listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
    raise CheckpointError(f"{folder}: the checkpoint exists but cannot be restored: {listed}. {fix}")


def _checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
