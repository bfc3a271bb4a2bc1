"""One run's folder: what is in it, and that it belongs to one recipe and one process."""

import dataclasses
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from _prolonged import stretches_of
from _recipe_file import differences, read_recipe, write_recipe
from _whole import part_of
from recipes import CHANGEABLE, Recipe

from eqformer import reason_and_fix, training


EVERYTHING = frozenset(field.name for field in dataclasses.fields(Recipe))
# All that a model which was brought here leaves open, until it is trained.
EVERYTHING_ELSE = EVERYTHING - {"model", "published"}


class RunDirectory:
    """The paths of a run. Nothing outside this folder is written."""

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
        self.data = path / "data"
        self.published = path / "published"
        self.identifier = path / "wandb-run"
        self.lock = path / ".lock"
        self._beginning = {self.lock, part_of(self.recipe)}  # all that is left where the disk was full from the first
        self._lock: IO[str] | None = None

    def claim(self, name: str, recipe: Recipe) -> None:
        """Make the folder this recipe's, or check that it is; raises a `ValueError` before anything is written.

        Refused are a folder that another recipe wrote, one that holds something else, one that a process uses, and a
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
        old_name, old = read_recipe(self.recipe)
        changed = differences(old, recipe, self._may_differ())
        if changed:
            raise ValueError(
                f"--run-dir {self.path}: it holds a run of recipe {old_name!r}, and this command's {name!r} differs in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nGive the same values to continue that run, or another --run-dir to begin a new one."
            )

    def _may_differ(self) -> frozenset[str]:
        """The fields that may differ from the recipe that is here: fewer once something of it is saved."""
        steps = training.Checkpointer(self.checkpoints).steps
        if steps:
            return EVERYTHING_ELSE if steps == [0] else CHANGEABLE
        return EVERYTHING - {"published"} if self.published.exists() else EVERYTHING  # which is a copy of that model's

    def _take(self) -> None:
        self._lock = self.lock.open("a", encoding="utf-8")  # which leaves a holder's token as it is
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--run-dir {self.path}: another process is running here; wait for it, or give another folder."
            ) from None
        self._lock.truncate(0)
        self._lock.write(secrets.token_hex(16))
        self._lock.flush()
        os.fsync(self._lock.fileno())  # other hosts read it

    def to_look_at(self) -> list[Path]:
        """What of the folder is for people, as far as it is there."""
        files = self.loss, self.loads, self.experts, self.experts_page, self.samples, self.metrics
        return [path for path in files if path.exists()]

    def began_from(self, published: Path) -> bool:
        """Whether a run is here that began from that published folder, has copied what tells of it, and has trained."""
        if not self.recipe.exists() or not (self.published / "config.json").exists():
            return False
        return self.read()[1].published == published and bool(training.Checkpointer(self.checkpoints).steps)

    def token(self) -> str:
        """What tells this claim of the folder from any other, for who sees the folder; empty for who does not."""
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
        """The recipe of a run that exists, for who only reads; raises a `ValueError` where there is none."""
        if not self.recipe.exists():
            near = sorted(str(path.parent) for path in self.path.parent.glob("*/recipe.json"))
            hint = f"; runs beside it: {', '.join(near)}" if near else "; train one with scripts/pretrain.py"
            raise ValueError(f"--run-dir {self.path}: there is no run (no recipe.json){hint}.")
        return read_recipe(self.recipe)


def _free(path: Path) -> str:
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return f"{shutil.disk_usage(place).free:,} bytes are free there"
