"""A disk that fills up while a run begins leaves a folder in which the next start works."""

import builtins
import errno
import io
import os
from pathlib import Path

import pytest

from eqformer import models
from eqformer.recipes import Recipe, RunDirectory
from eqformer.recipes._texts import copy_published_files


class Full:
    """Fails the write of a number, and all after it, as a full disk does; what shrinks or deletes goes on."""

    def __init__(self, patch: pytest.MonkeyPatch, allowed: int):
        self.left = allowed
        self.hit = False
        for name in ("mkdir", "replace", "rename", "fsync"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        opened = io.open

        def open_(file, mode="r", *arguments, **options):
            if not set(mode) & set("wax+"):
                return opened(file, mode, *arguments, **options)
            self.count()  # the name
            return Half(opened(file, mode, *arguments, **options), self)

        patch.setattr(io, "open", open_)
        patch.setattr(builtins, "open", open_)

    def count(self):
        if not self.left:
            self.hit = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1

    def _counted(self, function):
        def counted(*arguments, **options):
            self.count()
            return function(*arguments, **options)

        return counted


class Half:
    """A file of which half of what is written stays where the disk is full."""

    def __init__(self, file, full):
        self._file, self._full = file, full

    def write(self, content):
        if not self._full.left:
            self._file.write(content[: len(content) // 2])
        self._full.count()
        return self._file.write(content)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_after_any_write_that_failed_the_next_start_works(tmp_path, monkeypatch):
    published = tmp_path / "published"
    published.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (published / name).write_text("{}", encoding="utf-8")
    recipe = Recipe(models.preset("llama-byte-1m"), published=published)

    def begin(folder: Path) -> None:
        with RunDirectory(folder) as directory:
            directory.claim("name", recipe)
            directory.begin("name", recipe)
            copy_published_files(recipe, directory)
            with directory.open_metrics(0) as writers:
                writers.write({"step": 1, "loss": 2.0})

    failures = 0
    for allowed in range(100):
        folder = tmp_path / f"{allowed}" / "run"
        with monkeypatch.context() as patch:
            full = Full(patch, allowed)
            try:
                begin(folder)
            except (ValueError, OSError) as error:
                failures += 1
                assert "space" in str(error)
        if not full.hit:
            break
        begin(folder)
        assert (folder / "published" / "config.json").read_text(encoding="utf-8") == "{}"
        assert (folder / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1
        left = {path.name for path in folder.iterdir()}
        assert left == {"recipe.json", ".lock", "metrics.jsonl", "published"}, allowed
    assert failures > 8 and not full.hit


@pytest.mark.quick
def test_a_folder_that_cannot_be_written_is_named_as_that(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", forbidden)
    with pytest.raises(ValueError, match="cannot be written .*Permission denied.*make it writable, or give another"):
        RunDirectory(tmp_path / "run").claim("name", Recipe(models.preset("llama-byte-1m")))
