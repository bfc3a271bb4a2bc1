import json
from typing import Any

import numpy as np
import pytest

from eqformer import training
from eqformer.training import _pictures


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_picture_has_the_bits_that_are_printed(tmp_path, monkeypatch):
    """The validation text has other bytes a token than the training text."""
    drawn: list[Any] = []
    monkeypatch.setattr(_pictures, "write_atomic", lambda path, write: drawn.append(write.__self__))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for step in (1, 2)
            for row in (
                {"step": step, "loss": 5.0 / step},
                {"step": step, "validation_loss": 4.0 / step, "validation_bits_per_byte": 2.654 / step},
            )
        )
    )
    training.plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    (right,) = axes.child_axes
    drawn[0].draw_without_rendering()
    assert np.divide(axes.get_ylim(), right.get_ylim()) == pytest.approx(4.0 / 2.654)
    assert "validation" in right.get_ylabel()


def test_evaluations_are_drawn_by_text_and_task(tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(_pictures, "write_atomic", lambda path, write: drawn.append(write.__self__))
    scores = {"book.txt/bits_per_byte": 1.5, "book.txt/perplexity": 9.0, "quiz/acc": 0.5, "quiz/acc_stderr": 0.1}
    scores |= {"sums/exact_match (strict)": 0.25, "average/centered_accuracy": 0.1}
    rows = [{"step": step} | {f"evaluation/{name}": value for name, value in scores.items()} for step in (0, 4)]
    training.plot_evaluations(written(tmp_path / "metrics.jsonl", rows), tmp_path / "evaluations.png")
    texts, tasks = drawn[0].axes
    assert texts.get_ylabel() == "bits per byte" and [line.get_label() for line in texts.lines] == ["book.txt"]
    assert [line.get_label() for line in tasks.lines] == ["quiz", "sums (strict)", "average, centered accuracy"]
    assert tasks.lines[0].get_xydata().tolist() == [[0, 0.5], [4, 0.5]]
    training.plot_evaluations(written(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}]), tmp_path / "no.png")
    assert len(drawn) == 1  # the control: nothing is drawn of a run without evaluations


def test_rewards_are_drawn_in_four_panels(tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(_pictures, "write_atomic", lambda path, write: drawn.append(write.__self__))
    metrics = {"reward": 0.25, "reward_std": 0.1, "completion_tokens": 7.5, "clip_fraction": 0.0, "entropy": 2.0}
    rows = [{"step": step, "loss": 0.1} | metrics for step in (1, 2)] + [{"step": 2, "validation_reward": 0.5}]
    training.plot_rewards(written(tmp_path / "metrics.jsonl", rows), tmp_path / "rewards.png")
    labels = [[line.get_label() for line in axes.lines if line.get_label()[0] != "_"] for axes in drawn[0].axes]
    assert labels == [
        ["reward", "reward std", "validation reward"],
        ["completion tokens"],
        ["clip fraction"],
        ["entropy"],
    ]
    assert drawn[0].axes[1].lines[0].get_xydata().tolist() == [[1, 7.5], [2, 7.5]]
    training.plot_rewards(written(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}]), tmp_path / "no.png")
    assert len(drawn) == 1  # the control: nothing is drawn of a run without rewards


def test_a_folder_draws_rewards_in_place_of_losses(tmp_path):
    for name, row in (("rewards", {"step": 1, "loss": 0.1, "reward": 0.5}), ("loss", {"step": 1, "loss": 2.0})):
        folder = training.RunFolder(tmp_path / name)
        folder.path.mkdir()
        written(folder.metrics, [row])
        folder.draw_metrics()
        assert [path.name for path in folder.files_to_look_at()] == [f"{name}.png", "metrics.jsonl"]


def test_pictures_are_written_whole_and_only_of_what_there_is(tmp_path):
    loads = [[0.25, 0.75], [0.5, 0.5]]  # of two layers
    rows = [{"step": step, "loss": 5.0 / step, "expert_load": loads} for step in (1, 2, 3)]
    metrics = written(tmp_path / "metrics.jsonl", rows)
    training.plot_losses(metrics, tmp_path / "loss.png")
    training.plot_expert_loads(metrics, tmp_path / "loads.png")
    nothing = written(tmp_path / "nothing.jsonl", [{"step": 1}])
    training.plot_losses(nothing, tmp_path / "no.png")
    training.plot_expert_loads(nothing, tmp_path / "no.png")
    for name in ("text.png", "text.html"):
        training.plot_experts(np.asarray([[0, 2], [1, 1]]), ["a<", "b"], tmp_path / name, title="of two & two")
    page = (tmp_path / "text.html").read_text()
    assert page.count('<span class="e1" title="expert 1">') == 2 and "a&lt;</span>" in page and "two &amp;" in page
    assert sorted(path.name for path in tmp_path.glob("*.[ph]*")) == ["loads.png", "loss.png", "text.html", "text.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
