import jax.numpy as jnp
import pytest

from eqformer import training
from eqformer.training import _metrics


class Steps:
    """A step that takes two seconds of a clock of its own, and ten callbacks' seconds that are left out."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(_metrics.time, "perf_counter", lambda: self.now)

    def take(self, seconds):
        self.now += seconds


def test_the_speed_leaves_out_what_callbacks_take(monkeypatch):
    time, rows, peaks = Steps(monkeypatch), [], []

    def peak():
        peaks.append(1)
        return 4000.0

    clock = training.Clock(tokens_per_step=100, flops_per_token=8.0, peak_flops=peak)
    slow = training.Every(1, lambda run: time.take(10))

    class SlowStart(training.Callback):
        def begin(self, run):
            time.take(100)

    callbacks = [training.Log(2, rows.append, clock.rate), *clock.excluding([SlowStart(), slow])]
    zero = jnp.zeros((), jnp.int32)
    run = training.Progress(training.TrainState(None, None, zero, zero, zero), 0, 4, {})
    for one in callbacks:
        one.begin(run)
    for run.step in range(1, 5):
        time.take(2)
        run.metrics = {"loss": jnp.ones(())}
        for one in callbacks:
            one.after_step(run)
    assert [(row["step"], row["tokens"], row["step_seconds"]) for row in rows] == [(2, 200, 2.0), (4, 400, 2.0)]
    assert all(row["tokens_per_second"] == 50 and row["mfu"] == pytest.approx(0.1) for row in rows)
    assert rows[0]["peak_bytes"] > 10**6 and peaks == [1]
    # The control: what is not left out is counted.
    rows.clear()
    bare = training.Clock(tokens_per_step=100)
    callbacks = [slow, training.Log(1, rows.append, bare.rate), *bare.excluding([])]
    for one in callbacks:
        one.begin(run)
    time.take(2)
    for one in callbacks:
        one.after_step(run)
    assert rows[0]["step_seconds"] == 12 and "mfu" not in rows[0]
