"""Folder of a run: its files, and the checks that it belongs to one recipe and is used by one process."""

import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from recipes import CHANGEABLE, Recipe

from eqformer import explain_write_error, read_utf8, training
from support.recipe_file import (
    differences,
    from_json,
    read_recipe,
    run_identifier,
    source_beside,
    user_classes,
    user_file,
    write_recipe,
)
from support.schedule import schedule_phases


EVERYTHING = frozenset(field.name for field in dataclasses.fields(Recipe))
# Fields that may still change for a run that holds a converted model and has not trained it.
EVERYTHING_ELSE = EVERYTHING - {"model", "published"}


class RunDirectory:
    """Paths of a run. Nothing outside this folder is written, but for the tokens that a user's runs share."""

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
        self.data = path / "data"  # Tokens, where the shared folder cannot be written.
        self.published = path / "published"
        self.tokenizer = path / "tokenizer.json"
        self.profile = path / "profile"
        self.identifier = path / "wandb-run"
        self.lock = path / ".lock"
        self._lock: IO[str] | None = None
        self._run: str | None = None  # The identifier, once the folder is claimed.
        self._created: list[Path] = []  # Files and folders that `claim` has created, in order, until `begin`.

    def claim(self, name: str, recipe: Recipe) -> None:
        """Check that the folder may hold this run, create it if it is missing, and lock it.

        Nothing else is written before `begin`: if the `with` block of this folder ends without it, everything that
        `claim` has created is removed again. Raises a `ValueError` for a folder of another recipe, one that holds
        something else, one that another process uses, and a run whose learning rate would jump.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--run-dir {self.path}: this is a file; give a folder.")
        self._run = self.run or secrets.token_hex(8)
        if self.recipe.exists():
            self._check_same(name, recipe)
            self._check_latest(recipe)
            schedule_phases(recipe, self.checkpointer())
        elif self.path.exists() and not self._leftovers().issuperset(self.path.iterdir()):
            raise ValueError(
                f"--run-dir {self.path}: this folder holds other things than a run; give a new or empty one."
            )
        with self._name_folder_in_errors():
            paths = (*reversed(self.path.absolute().parents), self.path, self.lock, self.data)
            self._created = [path for path in paths if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire_lock()

    def begin(self, name: str, recipe: Recipe) -> None:
        """Write the recipe: everything that could be refused has been checked, and the folder is a run from here on."""
        with self._name_folder_in_errors():
            assert self._run is not None
            write_recipe(self.recipe, name, recipe, self._run)
        self._created = []

    def check_exists(self) -> None:
        """Raise a `ValueError` if the folder that was claimed has been deleted, moved or replaced since."""
        assert self._lock is not None
        try:
            exists = os.path.samestat(os.fstat(self._lock.fileno()), self.lock.stat())
        except OSError:
            exists = False
        if not exists:
            raise ValueError(
                f"--run-dir {self.path}: the folder (or its .lock) was deleted, moved or replaced while the run wrote "
                "to it. Nothing more is written; put the folder back and start the same command, or begin a new run."
            )

    @contextmanager
    def _name_folder_in_errors(self) -> Iterator[None]:
        """Raise a `ValueError` that names the folder for an error of the system."""
        try:
            yield
        except OSError as error:
            reason, fix = explain_write_error(self.path, error)
            raise ValueError(
                f"--run-dir {self.path}: the folder cannot be written ({reason}); {fix or 'find the cause'}, or give "
                "another."
            ) from error

    def _leftovers(self) -> set[Path]:
        """Return the files that a process which was killed before its first step may have left."""
        recipes = {self.path / f"recipe{suffix}" for suffix in (".py", ".part.py", ".part.json")}
        return recipes | {self.lock} | ({self.data} if self.lock.exists() else set())

    def _remove_created(self) -> None:
        """Remove what `claim` has created: tokens, the lock, and folders if they are empty."""
        for path in reversed(self._created):
            with suppress(OSError):
                if path == self.data:
                    shutil.rmtree(path)
                elif path == self.lock:
                    path.unlink()
                else:
                    path.rmdir()
        self._created = []

    def _check_same(self, name: str, recipe: Recipe) -> None:
        self._check_source(name)
        old_name, old = read_recipe(self.recipe)
        changed = differences(old, recipe, self._changeable_fields())
        if changed:
            raise ValueError(
                f"--run-dir {self.path}: it holds a run of recipe {old_name!r}, and this command's {name!r} differs in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nGive the same values to continue that run, or another --run-dir to begin a new one."
            )

    def _check_latest(self, recipe: Recipe) -> None:
        """Raise a `ValueError` if the latest checkpoint was saved by another run or trained by another recipe."""
        checkpointer = self.checkpointer()
        if not (step := checkpointer.latest_step):  # There is none, or a converted model, which has no recipe yet.
            return
        saved = checkpointer.metadata().get("recipe", {}).get("recipe")
        if saved is None:
            return
        if changed := differences(from_json(saved, user_classes(source_beside(self.recipe))), recipe, CHANGEABLE):
            raise ValueError(
                f"{self.checkpoints / str(step)}: this checkpoint was trained by another recipe than the run in "
                f"{self.path}, which differs in"
                + "".join(f"\n  {line}" for line in changed)
                + "\nMove the checkpoint back to its own run, or begin a new run with its weights (--from-run DIR)."
            )

    def _check_source(self, name: str) -> None:
        """Raise a `ValueError` if the user's file of the recipe has changed since the run began."""
        file, copy = user_file(name), source_beside(self.recipe)
        if file is not None and copy.exists() and read_utf8(file) != read_utf8(copy):
            raise ValueError(
                f"--run-dir {self.path} --recipe {name}: {file} has changed since the run began, which goes on with "
                f"its own copy only; give --recipe {copy} and the function's name, or another --run-dir."
            )

    def _changeable_fields(self) -> frozenset[str]:
        """Return the fields in which a command may differ from the folder's recipe: fewer once a checkpoint is
        saved."""
        steps = self.checkpointer().steps
        if steps:
            return EVERYTHING_ELSE if steps == [0] else CHANGEABLE
        return EVERYTHING - {"published"} if self.published.exists() else EVERYTHING  # Its files are copied already.

    def _acquire_lock(self) -> None:
        self._lock = self.lock.open("a", encoding="utf-8")  # "a" does not truncate another process's token.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.path.samestat(os.fstat(self._lock.fileno()), self.lock.stat())
        except (BlockingIOError, FileNotFoundError):
            is_locked = False
        if not is_locked:  # Or a process that was refused has just removed the folder that it had created.
            self._created = []
            raise ValueError(
                f"--run-dir {self.path}: another process is running here; wait for it, or give another folder."
            )
        self._lock.truncate(0)
        self._lock.write(secrets.token_hex(16))
        self._lock.flush()
        os.fsync(self._lock.fileno())  # So that processes on other hosts see it.

    @property
    def run(self) -> str | None:
        """Random identifier of the run, which each of its checkpoints has too; None if an older version began it."""
        return self._run or run_identifier(self.recipe)

    def checkpointer(self, keep: int | None = None) -> training.Checkpointer:
        """Return the run's checkpoints, which are refused if another run saved them; the last `keep` stay, or all."""
        return training.Checkpointer(self.checkpoints, keep=keep, run=self.run)

    def files_to_look_at(self) -> list[Path]:
        """Return the files of the folder that people look at, as far as they exist."""
        files = self.loss, self.loads, self.experts, self.experts_page, self.samples, self.metrics
        return [path for path in files if path.exists()]

    def began_from(self, published: Path) -> bool:
        """Return whether the folder holds a run that began from that published folder and has a checkpoint."""
        if not self.recipe.exists() or not (self.published / "config.json").exists():
            return False
        return self.read()[1].published == published and bool(self.checkpointer().steps)

    def token(self) -> str:
        """Return a random token of the process that claimed the folder; empty where the folder cannot be read."""
        try:
            return read_utf8(self.lock)
        except ValueError:
            return ""

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_created()  # Before the lock is released.
        if self._lock is not None:
            self._lock.close()

    def read(self) -> tuple[str, Recipe]:
        """Return the name and the recipe of an existing run, without claiming it; raises a `ValueError` if there is
        none."""
        if not self.recipe.exists():
            near = sorted(str(path.parent) for path in self.path.parent.glob("*/recipe.json"))
            hint = f"; runs beside it: {', '.join(near)}" if near else "; train one with scripts/pretrain.py"
            raise ValueError(f"--run-dir {self.path}: there is no run (no recipe.json){hint}.")
        return read_recipe(self.recipe)
