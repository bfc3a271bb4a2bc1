"""The folder of a run: its recipe, checkpoints, metrics, samples and pictures, used by one process at a time."""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, IO, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .. import nn
from .._failures import explain_write_error
from .._files import dataclass_to_json, read_json, read_utf8, write_atomic
from ._metrics import JsonLines, MetricWriter, MetricWriters, TensorBoard, WeightsAndBiases
from ._pictures import plot_evaluations, plot_expert_loads, plot_experts, plot_losses, plot_rewards, read_rows
from .checkpoint._checkpointer import Checkpointer


Folder = TypeVar("Folder", bound="RunFolder")


class RunFolder:
    """The folder of a run. Nothing is written before `acquire`, which locks the folder for this process.

        with training.RunFolder("runs/mine") as folder:
            folder.acquire()
            folder.write_recipe("mine", recipe)
            with folder.open_metrics(start=0) as writers:
                ...

    If the `with` block ends before `write_recipe`, everything that `acquire` has created is removed again. `text.load`
    loads the model of a run's latest checkpoint.

    The fields are paths in the folder: `recipe`, `source`, `metrics`, `checkpoints`, `samples`, the pictures `loss`,
    `rewards`, `evaluations`, `loads`, `experts` and `experts_page`, `data` (tokens), `published` and `tokenizer`
    (copies of the model's files from which the run began), `quantized` (the formats of its quantized weights),
    `profile` and `lock`.
    """

    def __init__(self, path: str | Path, *, call: str | None = None):
        """Errors begin with `call`, for example with the flag that named the folder; None: with `RunFolder(path)`."""
        self.path = path = Path(path)
        self._call = f"RunFolder({str(path)!r})" if call is None else call
        self.recipe = path / "recipe.json"
        self.source = path / "recipe.py"  # A copy of the file that defines classes of the recipe.
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.loss = path / "loss.png"
        self.rewards = path / "rewards.png"
        self.evaluations = path / "evaluations.png"
        self.loads = path / "load.png"
        self.experts = path / "experts.png"
        self.experts_page = path / "experts.html"
        self.samples = path / "samples.txt"
        self.data = path / "data"  # Tokens, if they cannot be written to the cache that all runs share.
        self.published = path / "published"  # Copies of the published model's files, except weights.
        self.tokenizer = path / "tokenizer.json"
        self.quantized = path / "quantized.json"  # The formats of weights that stay quantized.
        self.profile = path / "profile"
        self.lock = path / ".lock"
        self._wandb = path / "wandb-run"
        self._lock: IO[str] | None = None
        self._run: str | None = None
        self._created: list[Path] = []  # Files and folders that `acquire` has created, in order, until `write_recipe`.

    @property
    def run(self) -> str | None:
        """The random identifier of the run, which is also in its checkpoints; None if the folder has no identifier."""
        if self._run is not None or not self.recipe.exists():
            return self._run
        run = read_json(self.recipe).get("run")
        if not isinstance(run, str | None):
            raise ValueError(f"{self.recipe}: this is not a recipe that a run wrote (its run is {run!r:.100}).")
        return run

    def identify(self) -> str:
        """Return the identifier of the run; make a new identifier if the folder has none."""
        self._run = self.run or secrets.token_hex(8)
        return self._run

    def acquire(self) -> None:
        """Create the folder if it is missing, and lock it.

        Raises a `ValueError` if the path is a file, and if the folder holds anything but a run, is locked by another
        process, or cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self._call}: this is a file; give a folder.")
        is_other = self.path.exists() and not self.recipe.exists()
        if is_other and not self._leftovers().issuperset(self.path.iterdir()):
            raise ValueError(f"{self._call}: this folder holds other things than a run; give a new or empty one.")
        self.identify()
        with self._name_folder_in_errors():
            paths = (*reversed(self.path.absolute().parents), self.path, self.lock, self.data)
            self._created = [path for path in paths if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire_lock()

    def write_recipe(self, name: str, recipe: Any, source: str | None = None) -> None:
        """Write the run's recipe, a dataclass, under a name; from now on the folder is kept.

        `source` is the text of a Python file that defines classes of the recipe; the file is written into the folder.
        """
        with self._name_folder_in_errors():
            if source is not None:
                write_atomic(self.source, source)
            content = {"name": name, "run": self.identify(), "recipe": dataclass_to_json(recipe)}
            write_atomic(self.recipe, json.dumps(content, indent=2, allow_nan=False) + "\n")
        self._created = []

    def check_exists(self) -> None:
        """Raise a `ValueError` if the folder has been deleted, moved or replaced since `acquire`."""
        try:
            exists = self._lock is not None and os.path.samestat(os.fstat(self._lock.fileno()), self.lock.stat())
        except OSError:
            exists = False
        if not exists:
            raise ValueError(
                f"{self._call}: the folder (or its .lock) was deleted, moved or replaced while the run wrote "
                "to it. Nothing more is written; put the folder back and start the same command, or begin a new run."
            )

    def token(self) -> str:
        """Return a random token of the process that locked the folder; empty if the folder cannot be read."""
        try:
            return read_utf8(self.lock)
        except ValueError:
            return ""

    def checkpointer(self, keep: int | None = None) -> Checkpointer:
        """Return a `Checkpointer` that refuses checkpoints of other runs, and keeps the last `keep` (None: all)."""
        return Checkpointer(self.checkpoints, keep=keep, run=self.run)

    def open_metrics(
        self, start: int, *, tensorboard: bool = False, wandb: str | None = None, recipe: Any = None
    ) -> MetricWriters:
        """Open writers of metrics, and drop the rows of steps after `start`, since these steps run again.

        Args:
            start: The number of steps that the run has taken.
            tensorboard: Whether to also write events for TensorBoard into the folder `tensorboard`.
            wandb: A project of Weights & Biases that gets the metrics too; a run from step 0 is a new run there.
            recipe: The run's recipe, a dataclass, for Weights & Biases.
        """
        path, first_step = self.path, start + 1 if start else 0  # A new run evaluates its model at step 0.
        makers: list[Callable[[], MetricWriter]] = [lambda: JsonLines(self.metrics, from_step=first_step)]
        if tensorboard:
            makers.append(lambda: TensorBoard(path / "tensorboard", from_step=first_step))
        if wandb is not None:
            names = lambda: {"folder": path, "name": path.name, "identifier": self._wandb_identifier(start)}
            makers.append(lambda: WeightsAndBiases(wandb, **names(), recipe=dataclass_to_json(recipe)))
        return MetricWriters(*makers)

    def latest_metrics(self) -> dict[str, Any]:
        """Return the latest value of each metric; nothing before the first row."""
        rows = read_rows(self.metrics) if self.metrics.exists() else []
        return {name: value for row in rows for name, value in row.items()}

    def draw_metrics(self) -> None:
        """Draw the metrics of the run: rewards, or losses if there are no rewards; evaluations; and expert loads."""
        plot_rewards(self.metrics, self.rewards)
        if not self.rewards.exists():  # The loss of a policy is no measure of its progress.
            plot_losses(self.metrics, self.loss)
        plot_evaluations(self.metrics, self.evaluations)
        plot_expert_loads(self.metrics, self.loads)

    def add_sample(self, step: int, text: str) -> None:
        """Append a step's sample; first remove the samples of this and later steps, which a resumed run draws again."""
        content = read_utf8(self.samples) if self.samples.exists() else ""
        _, *entries = re.split(r"^--- step (\d+)\n", content, flags=re.MULTILINE)
        pairs = zip(entries[::2], entries[1::2])
        earlier = [f"--- step {number}\n{body}" for number, body in pairs if int(number) < step]
        write_atomic(self.samples, "".join(earlier) + f"--- step {step}\n{text}\n\n")

    def color_by_experts(self, model: nn.Transformer, ids: Sequence[int], pieces: Sequence[str]) -> None:
        """Write a text colored by each token's first expert to experts.html and experts.png.

        `ids` and `pieces` are the text's tokens; tokens beyond the model's `max_seq` positions are left out. Raises a
        `ValueError` as `nn.first_experts` does.
        """
        experts = np.asarray(eqx.filter_jit(nn.first_experts)(model, jnp.asarray(ids[: model.max_seq], jnp.int32)))
        title = f"{self.path.name}: the expert that each token takes first"
        for path in (self.experts_page, self.experts):
            plot_experts(experts, pieces[: model.max_seq], path, title=title)

    def files_to_look_at(self) -> list[Path]:
        """Return the folder's existing pictures, samples and metrics, which people look at."""
        pictures = self.loss, self.rewards, self.evaluations, self.loads, self.experts, self.experts_page
        return [path for path in (*pictures, self.samples, self.metrics) if path.exists()]

    def __enter__(self: Folder) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_created()  # Before the lock is released.
        if self._lock is not None:
            self._lock.close()

    def _wandb_identifier(self, start: int) -> str:
        """Return the run's identifier at Weights & Biases, kept in its folder."""
        if not start or not self._wandb.exists():
            write_atomic(self._wandb, secrets.token_hex(8))
        return read_utf8(self._wandb)

    @contextmanager
    def _name_folder_in_errors(self) -> Iterator[None]:
        """Raise a `ValueError` that names the folder for an error of the system."""
        try:
            yield
        except OSError as error:
            reason, fix = explain_write_error(self.path, error)
            raise ValueError(
                f"{self._call}: the folder cannot be written ({reason}); {fix or 'find the cause'}, or give another "
                "folder."
            ) from error

    def _leftovers(self) -> set[Path]:
        """Return the files that a process may have left if it was killed before its first step."""
        recipes = {self.path / f"recipe{suffix}" for suffix in (".py", ".part.py", ".part.json")}
        return recipes | {self.lock} | ({self.data} if self.lock.exists() else set())

    def _remove_created(self) -> None:
        """Remove the tokens, the lock and the empty folders that `acquire` has created."""
        for path in reversed(self._created):
            with suppress(OSError):
                if path == self.data:
                    shutil.rmtree(path)
                elif path == self.lock:
                    path.unlink()
                else:
                    path.rmdir()
        self._created = []

    def _acquire_lock(self) -> None:
        self._lock = self.lock.open("a", encoding="utf-8")  # "a" does not truncate another process's token.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.path.samestat(os.fstat(self._lock.fileno()), self.lock.stat())
        except (BlockingIOError, FileNotFoundError):
            is_locked = False
        if not is_locked:  # Another process has the lock, or has just removed the folder, which it had created.
            self._lock.close()
            self._lock, self._created = None, []
            raise ValueError(f"{self._call}: another process is running here; wait for it, or give another folder.")
        self._lock.truncate(0)
        self._lock.write(secrets.token_hex(16))
        self._lock.flush()
        os.fsync(self._lock.fileno())  # Sync, so that processes on other hosts see the token.
