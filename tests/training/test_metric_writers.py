"""Metrics files after kills and resumes, and the optional writers against stand-ins."""

import json
import sys
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import training
from eqformer.training import _metrics


def rows(path):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_row_is_in_the_file_at_once_and_valid_json(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = training.JsonLines(path)
    assert isinstance(writer, training.MetricWriter)
    writer.write(
        {"step": 0, "loss": jnp.float32(1.5), "grad_norm": np.float32("inf"), "note": "é", "count": np.int64(3)}
    )
    assert rows(path) == [{"step": 0, "loss": 1.5, "grad_norm": None, "note": "é", "count": 3}]
    writer.write({"step": jnp.int32(1), "loss": float("nan")})
    writer.close()
    assert rows(path)[1] == {"step": 1, "loss": None}


def test_a_resumed_file_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "first": True}) + "\n" for step in range(6)) + '{"step": 6, "fi')
    writer = training.JsonLines(path, from_step=4)
    for step in (4, 5, 6):
        writer.write({"step": step, "first": False})
    writer.close()
    assert [(row["step"], row["first"]) for row in rows(path)] == [
        *((step, True) for step in range(4)),
        *((step, False) for step in (4, 5, 6)),
    ]
    training.JsonLines(path).close()
    assert len(rows(path)) == 7 and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    training.JsonLines(path, from_step=0).close()
    assert rows(path) == []


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot a row\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        training.JsonLines(path, from_step=2)
    assert path.read_text() == '{"step": 1}\nnot a row\n{"step": 2}\n'


def test_tensorboard_gets_every_number_at_its_step(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step=None):
            calls.append(("open", folder, purge_step))

        def add_scalar(self, *arguments):
            calls.append(arguments)

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    module = ModuleType("tensorboardX")
    module.__dict__["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    writer = training.TensorBoard(tmp_path, from_step=7)
    writer.write({"step": 7, "loss": jnp.float32(2.0), "sample": "text"})
    writer.close()
    assert calls == [("open", str(tmp_path), 7), ("loss", 2.0, 7), "flush", "close"]


def test_weights_and_biases_gets_rows_and_works_offline(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, row, step):
            calls.append((row, step))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    module = ModuleType("wandb")
    module.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    writer = training.WeightsAndBiases("p", folder=tmp_path, mode="offline", identifier="a", recipe={"embed": 8})
    writer.write({"step": 3, "loss": np.float32(0.5)})
    writer.close()
    options = dict(
        project="p", dir=str(tmp_path), mode="offline", name=None, id="a", resume="allow", config={"embed": 8}
    )
    assert calls == [options, ({"loss": 0.5}, 3), "finish"]
    with pytest.raises(ValueError, match="mode='off'"):
        training.WeightsAndBiases("p", folder=tmp_path, mode="off")


@pytest.mark.parametrize("module", ["tensorboardX", "wandb"])
def test_an_absent_package_names_its_extra(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{module}.*eqformer\\[metrics\\]"):
        if module == "wandb":
            training.WeightsAndBiases("p", folder=tmp_path)
        else:
            training.TensorBoard(tmp_path)


class Kept:
    def __init__(self, fails=False):
        assert not fails
        self.rows, self.is_closed = [], False

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.is_closed = True


def test_several_writers_get_each_row_and_are_closed_also_where_a_later_one_cannot_be_opened():
    first, second = Kept(), Kept()
    with training.MetricWriters(lambda: first, lambda: second) as writers:
        writers.write({"step": 1})
        assert not first.is_closed and isinstance(writers, training.MetricWriter)
    assert first.rows == second.rows == [{"step": 1}] and first.is_closed and second.is_closed
    third = Kept()
    with pytest.raises(AssertionError):
        training.MetricWriters(lambda: third, lambda: Kept(fails=True))
    assert third.is_closed


def test_a_process_that_is_not_the_first_opens_and_writes_nothing(monkeypatch):
    monkeypatch.setattr(_metrics, "on_first_process", lambda action: None)
    with training.MetricWriters(lambda: Kept(fails=True)) as writers:
        writers.write({"step": 1})
