"""The folder of a run: used by one process at a time, and removed if the run did not begin."""

import dataclasses
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from eqformer import parallel, training


@dataclasses.dataclass(frozen=True)
class Recipe:
    rate: float = 0.1


def test_a_run_that_does_not_begin_leaves_nothing(tmp_path):
    with training.RunFolder(tmp_path / "runs" / "a") as folder:
        folder.acquire()
        assert folder.lock.exists()
    assert not (tmp_path / "runs").exists()
    with training.RunFolder(tmp_path / "runs" / "a") as folder:  # the control: one that begins stays
        folder.acquire()
        folder.write_recipe("mine", Recipe(), source="x = 1\n")
    content = json.loads(folder.recipe.read_text())
    assert content == {"name": "mine", "run": folder.run, "recipe": {"kind": "Recipe", "rate": 0.1}}
    assert folder.source.read_text() == "x = 1\n" and training.RunFolder(folder.path).run == folder.run


def test_one_process_at_a_time_and_no_other_folder(tmp_path):
    with training.RunFolder(tmp_path / "a") as folder:
        folder.acquire()
        folder.write_recipe("mine", Recipe())
        with pytest.raises(ValueError, match=r"^RunFolder\('.*/a'\): another process is running here; wait for it"):
            training.RunFolder(tmp_path / "a").acquire()
        assert len(folder.token()) == 32
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="^--folder x: this folder holds other things than a run"):
        training.RunFolder(tmp_path / "other", call="--folder x").acquire()
    with pytest.raises(ValueError, match="this is a file; give a folder"):
        training.RunFolder(tmp_path / "other" / "notes.txt").acquire()


def test_checkpoints_metrics_and_samples_of_a_run_that_goes_on(tmp_path):
    with training.RunFolder(tmp_path / "a") as folder:
        folder.acquire()
        folder.write_recipe("mine", Recipe())
        for start in (0, 1):
            with folder.open_metrics(start) as writers:
                for step in (1, 2):
                    if step > start:
                        writers.write({"step": step, "loss": 1.0})
            for step in (start + 1, start + 2):
                folder.add_sample(step, f"text of {start}")
        with folder.checkpointer(keep=1) as checkpointer:
            checkpointer.save({"x": np.zeros(1)}, 2, {})
    assert folder.metrics.read_text().count("\n") == 2
    assert folder.samples.read_text().count("--- step") == 3 and "text of 0" in folder.samples.read_text()
    assert folder.files_to_look_at() == [folder.samples, folder.metrics]
    assert training.RunFolder(folder.path).checkpointer().metadata()["run"] == folder.run


def test_a_signal_ends_the_run_after_the_step():
    handlers, notes = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)], []
    with training.StopSignals(parallel.make_mesh(devices=jax.devices()[:1]), lambda: notes.append("stop")) as stop:
        run = training.Progress(object.__new__(training.TrainState), 1, 9, {})
        stop.after_step(run)
        assert not run.is_stopping and not notes
        signal.raise_signal(signal.SIGTERM)
        stop.after_step(run)
        assert run.is_stopping and notes == ["stop"] and signal.getsignal(signal.SIGTERM) is handlers[0]
    assert signal.getsignal(signal.SIGINT) is handlers[1]


def test_a_thread_that_gets_no_signals_trains_without_them():
    def enter_and_leave():
        with training.StopSignals(parallel.make_mesh(devices=jax.devices()[:1])):
            return signal.getsignal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(enter_and_leave).result() is handler
    assert enter_and_leave() is not handler  # the control: the main thread catches it
