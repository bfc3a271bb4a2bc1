"""A run's folder: its files, and the checks that it belongs to one recipe and is used by one process."""

import dataclasses
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from recipes import CHANGEABLE, Recipe

from eqformer import reason_and_fix, training
from support.own_recipe import file_of
from support.prolonged import stretches_of
from support.recipe_file import differences, read_recipe, source_beside, write_recipe


EVERYTHING = frozenset(field.name for field in dataclasses.fields(Recipe))
# The fields that may still change for a run that holds a converted model and has not trained it.
EVERYTHING_ELSE = EVERYTHING - {"model", "published"}


class RunDirectory:
    """The paths of a run. Nothing outside this folder is written, but for the tokens that a user's runs share."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.loss = path / "loss.png"
        self.loads = path / "load.png"
        self.experts = path / "experts.png"
        self.experts_page = path / "experts.html"
        self.samples = path / "samples.txt"
        self.data = path / "data"  # tokens, where the shared folder cannot be written
        self.published = path / "published"
        self.profile = path / "profile"
        self.identifier = path / "wandb-run"
        self.lock = path / ".lock"
        # What remains if the disk was full at the first write.
        self._beginning = {self.lock, source_beside(self.recipe), path / "recipe.part.json"}
        self._lock: IO[str] | None = None

    def claim(self, name: str, recipe: Recipe) -> None:
        """Make the folder this recipe's, or check that it is; raises a `ValueError` before anything is written.

        It raises for a folder of another recipe, one that holds something else, one that another process uses, and a
        run whose learning rate would jump.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--run-dir {self.path}: this is a file; give a folder.")
        if self.recipe.exists():
            self._check_same(name, recipe)
            stretches_of(recipe, training.Checkpointer(self.checkpoints))
        elif self.path.exists() and not self._beginning.issuperset(self.path.iterdir()):
            raise ValueError(
                f"--run-dir {self.path}: this folder holds other things than a run; give a new or empty one."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            write_recipe(self.recipe, name, recipe)
        except OSError as error:
            reason, fix = reason_and_fix(error)
            raise ValueError(
                f"--run-dir {self.path}: the folder cannot be written ({reason}; {_free(self.path)}); "
                f"{fix or 'see why'}, or give another."
            ) from error

    def _check_same(self, name: str, recipe: Recipe) -> None:
        self._check_source(name)
        old_name, old = read_recipe(self.recipe)
        changed = differences(old, recipe, self._may_differ())
        if changed:
            raise ValueError(
                f"--run-dir {self.path}: it holds a run of recipe {old_name!r}, and this command's {name!r} differs in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nGive the same values to continue that run, or another --run-dir to begin a new one."
            )

    def _check_source(self, name: str) -> None:
        """Raise a `ValueError` for a recipe of one's own whose file is another than when the run began."""
        file, kept = file_of(name), source_beside(self.recipe)
        if file is not None and kept.exists() and file.read_text(encoding="utf-8") != kept.read_text(encoding="utf-8"):
            raise ValueError(
                f"--run-dir {self.path} --recipe {name}: {file} has changed since the run began, which goes on with "
                f"its own copy only; give --recipe {kept} and the function's name, or another --run-dir."
            )

    def _may_differ(self) -> frozenset[str]:
        """The fields in which a command may differ from the folder's recipe: fewer once a checkpoint is saved."""
        steps = training.Checkpointer(self.checkpoints).steps
        if steps:
            return EVERYTHING_ELSE if steps == [0] else CHANGEABLE
        return EVERYTHING - {"published"} if self.published.exists() else EVERYTHING  # its files are copied already

    def _take(self) -> None:
        self._lock = self.lock.open("a", encoding="utf-8")  # "a" does not truncate another process's token
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--run-dir {self.path}: another process is running here; wait for it, or give another folder."
            ) from None
        self._lock.truncate(0)
        self._lock.write(secrets.token_hex(16))
        self._lock.flush()
        os.fsync(self._lock.fileno())  # so that processes on other hosts see it

    def to_look_at(self) -> list[Path]:
        """The files of the folder that people look at, as far as they exist."""
        files = self.loss, self.loads, self.experts, self.experts_page, self.samples, self.metrics
        return [path for path in files if path.exists()]

    def began_from(self, published: Path) -> bool:
        """Whether the folder holds a run that began from that published folder and has a checkpoint."""
        if not self.recipe.exists() or not (self.published / "config.json").exists():
            return False
        return self.read()[1].published == published and bool(training.Checkpointer(self.checkpoints).steps)

    def token(self) -> str:
        """A random token of the process that claimed the folder; empty where the folder cannot be read."""
        try:
            return self.lock.read_text(encoding="utf-8")
        except OSError:
            return ""

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def read(self) -> tuple[str, Recipe]:
        """The recipe of an existing run, without claiming it; raises a `ValueError` if there is none."""
        if not self.recipe.exists():
            near = sorted(str(path.parent) for path in self.path.parent.glob("*/recipe.json"))
            hint = f"; runs beside it: {', '.join(near)}" if near else "; train one with scripts/pretrain.py"
            raise ValueError(f"--run-dir {self.path}: there is no run (no recipe.json){hint}.")
        return read_recipe(self.recipe)


def _free(path: Path) -> str:
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return f"{shutil.disk_usage(place).free:,} bytes are free there"
