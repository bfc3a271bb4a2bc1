"""Checkpoints reported as saved survive a power cut; problems beside a save are not reported as a failed save."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import training
from eqformer.training.checkpoint import _checkpointer


LIKE = {"x": jnp.zeros(8)}


def save(checkpointer, *steps):
    for step in steps:
        checkpointer.save({"x": jnp.full(8, float(step))}, step, {"at": step})
    checkpointer.wait()


class Durable:
    """What a power cut would leave: files and names as they were when they were last synced."""

    def __init__(self, monkeypatch):
        self.synced, self.lost = set(), []  # inode and time of change, by which a later write shows
        fsync, rename, remove = os.fsync, Path.rename, _checkpointer.remove

        def record(handle):
            fsync(handle)
            self.synced.add(self._state(os.fstat(handle)))

        def renamed(path, target):
            if path.suffix == ".unfinished":
                self.lost += [each for each in (path, *path.rglob("*")) if self._state(each.stat()) not in self.synced]
            return rename(path, target)

        def removed(path):
            if path.suffix == ".discarded":  # the rename of the newer step is durable before an older one goes
                parent = path.parent
                later = max(int(step.name) for step in parent.iterdir() if step.name.isdecimal())
                self.lost += [step for step in [parent / str(later)] if step not in self.named]
            remove(path)

        self.named = set()
        sync_path = _checkpointer.sync_path

        def named(folder):
            sync_path(folder)
            self.named |= set(folder.iterdir())

        monkeypatch.setattr(os, "fsync", record)
        monkeypatch.setattr(Path, "rename", renamed)
        monkeypatch.setattr(_checkpointer, "remove", removed)
        monkeypatch.setattr(_checkpointer, "sync_path", named)

    def _state(self, found):
        return found.st_ino, found.st_mtime_ns


def test_all_that_is_in_a_step_is_on_the_disk_before_it_is_one(tmp_path, monkeypatch):
    durable = Durable(monkeypatch)
    with training.Checkpointer(tmp_path / "a" / "b", keep=1) as checkpointer:
        save(checkpointer, 1, 2)
    assert durable.lost == [] and checkpointer.steps == [2]
    assert len(durable.synced) > 20  # it did look
    monkeypatch.setattr(_checkpointer, "sync_tree", lambda folder: None)  # the control
    with training.Checkpointer(tmp_path / "c") as checkpointer:
        save(checkpointer, 1)
    names = {path.name for path in durable.lost}
    assert {"manifest.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt"} <= names


def test_a_checkpoint_that_was_moved_and_linked_to_is_read_and_goes_as_a_link(tmp_path):
    folder, larger = tmp_path / "run", tmp_path / "larger"
    with training.Checkpointer(folder, keep=2) as checkpointer:
        save(checkpointer, 1, 2)
    shutil.move(folder / "1", larger)
    (folder / "1").symlink_to(larger)
    with training.Checkpointer(folder, keep=2) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(LIKE, 1)[0]["x"], 1)
        with pytest.warns(UserWarning, match=f"1: this link is deleted; the checkpoint in {larger} stays"):
            save(checkpointer, 3)
        save(checkpointer, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"] and (larger / "manifest.json").exists()
    (folder / "5.discarded").symlink_to(larger)  # as an earlier version left it
    with training.Checkpointer(folder, keep=2) as checkpointer:
        save(checkpointer, 6)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]


def test_a_link_that_leads_nowhere_is_an_error_and_not_passed_over(tmp_path):
    with training.Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
    (tmp_path / "2").symlink_to("/not/mounted/2")
    for call in (lambda: checkpointer.latest_step, lambda: checkpointer.restore(LIKE)):
        with pytest.raises(training.CheckpointError, match="2: this checkpoint is a link to /not/mounted/2"):
            call()


def test_what_cannot_be_deleted_is_a_warning_and_the_save_is_whole(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    with training.Checkpointer(tmp_path, keep=1) as checkpointer:
        save(checkpointer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(_checkpointer, "remove", forbidden)
            with pytest.warns(UserWarning, match="1 could not be deleted: .*Permission denied.*; make it writable, or"):
                save(checkpointer, 2)
        assert checkpointer.steps == [2]
        save(checkpointer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(_checkpointer, "remove", forbidden)
        with (
            pytest.warns(UserWarning, match="1.discarded could not be deleted"),
            training.Checkpointer(tmp_path, keep=None) as checkpointer,
        ):
            save(checkpointer, 4)
    assert checkpointer.steps == [3, 4]


def test_a_step_that_is_there_though_its_name_may_not_last_is_reported_as_that(tmp_path, monkeypatch):
    def failing(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_checkpointer, "sync_path", failing)
    checkpointer = training.Checkpointer(tmp_path)
    with pytest.raises(
        training.CheckpointError, match="written, but not synced, so a power cut may lose it.*Check the disk, or"
    ):
        save(checkpointer, 1)
    assert checkpointer.steps == [1]


def test_a_slow_disk_has_a_day(tmp_path, monkeypatch):
    ocp, seconds = _checkpointer._orbax(), []
    make = ocp.AsyncCheckpointer
    monkeypatch.setattr(
        ocp, "AsyncCheckpointer", lambda *parts, **options: seconds.append(options["timeout_secs"]) or make(*parts)
    )
    with training.Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
    assert seconds == [24 * 60 * 60]
