"""The training loop: the order of steps and callbacks, and what ends a run."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import same_trees
from same_bits import assert_same_bits

from eqformer import training


@pytest.fixture(scope="module")
def line():
    """The step, a first state, and the batches of a line that is fitted with noise; NaN where a batch is."""
    optimizer = training.optimizer("adamw", [jnp.zeros(3)], rate=training.constant(0.1), matrices=[None])

    def loss(model, batch, key):
        return jnp.sum((model @ batch - 1 + 0.1 * jax.random.normal(key)) ** 2), jnp.ones(())

    batches = [jnp.asarray(np.random.default_rng(n).normal(size=3), jnp.float32) for n in range(20)]
    step = training.make_step(lambda model, batch, key: loss(model[0], batch, key), optimizer)
    return step, lambda: training.init_state([jnp.ones(3)], optimizer), batches


class Notes(training.Callback):
    def __init__(self, kept, name):
        self.kept, self.name = kept, name

    def begin(self, run):
        self.kept.append((self.name, "begins", run.step, dict(run.metrics)))

    def after_step(self, run):
        self.kept.append((self.name, run.step, int(run.state.step)))


def test_callbacks_are_called_in_order_after_each_step(line):
    step, first, batches = line
    kept, key = [], jax.random.key(0)
    third = training.Every(3, lambda run: kept.append(("third", run.step)))
    run = training.train(step, first(), batches, key, steps=5, callbacks=[Notes(kept, "a"), third, Notes(kept, "b")])
    assert (run.step, int(run.state.step), run.steps) == (5, 5, 5)
    wanted = [("a", "begins", 0, {}), ("b", "begins", 0, {})]
    for number in range(1, 6):
        due = [("third", number)] if number in (3, 5) else []  # each third, and the last
        wanted += [("a", number, number), *due, ("b", number, number)]
    assert kept == wanted


def test_the_loop_gives_the_bits_of_its_steps_and_goes_on_from_any(line):
    step, first, batches = line
    key, state = jax.random.key(0), first()
    for batch in batches[:6]:
        state, metrics = step(state, batch, key)
    rows = []
    run = training.train(step, first(), batches, key, steps=6, callbacks=[training.Log(2, rows.append)])
    assert_same_bits(run.state, state)
    assert [row["step"] for row in rows] == [2, 4, 6] and rows[-1]["loss"] == float(metrics["loss"])
    part = training.train(step, first(), batches, key, steps=4)
    rest = training.train(step, part.state, batches[4:], key, steps=6, start=part.step)
    assert_same_bits(rest.state, state)
    other = training.train(step, first(), batches[1:], key, steps=6)
    assert not same_trees(other.state, state)  # the control: other batches give other bits


def test_a_function_makes_each_batch_after_the_callbacks(line):
    step, first, batches = line
    key, calls = jax.random.key(0), []

    def make_batch(run):
        calls.append(("batch", run.step, int(run.state.step)))
        return batches[run.step]

    note = training.Every(1, lambda run: calls.append(("step", run.step)))
    run = training.train(step, first(), make_batch, key, steps=3, callbacks=[note])
    assert calls == [("batch", 0, 0), ("step", 1), ("batch", 1, 1), ("step", 2), ("batch", 2, 2), ("step", 3)]
    assert_same_bits(run.state, training.train(step, first(), batches, key, steps=3).state)


def test_a_callback_ends_the_run_with_a_checkpoint(line, tmp_path):
    step, first, batches = line

    class Ends(training.Callback):
        def after_step(self, run):
            run.is_stopping = run.step == 3

    about = lambda step: training.run_metadata(recipe={}, step=step, data={}, key=jax.random.key(0))
    with training.Checkpointer(tmp_path) as checkpointer:
        save = training.Checkpoints(2, checkpointer, about)
        run = training.train(step, first(), batches, jax.random.key(0), steps=9, callbacks=[Ends(), save])
    assert run.step == 3 and run.is_stopping
    kept = training.Checkpointer(tmp_path)
    assert kept.steps == [2, 3] and kept.metadata(3)["step"] == 3


def test_batches_that_end_too_soon_are_an_error(line):
    step, first, batches = line
    with pytest.raises(ValueError, match=r"train\(steps=9\): the batches ended after 4; give one for each step"):
        training.train(step, first(), batches[:4], jax.random.key(0), steps=9)
    with pytest.raises(ValueError, match=r"train\(start=0, steps=9\): there is no batch; give one for each step"):
        training.train(step, first(), [], jax.random.key(0), steps=9)
    done = training.train(step, first(), batches, jax.random.key(0), steps=2, start=2)
    assert done.step == 2 and done.metrics == {}


def test_batches_of_another_shape_are_named(line):
    step, first, batches = line
    with pytest.raises(
        ValueError, match=r"batch of step 3 has arrays of \['float32\[2\]'\].* \['float32\[3\]'\]; give"
    ):
        training.train(step, first(), [*batches[:2], batches[2][:2]], jax.random.key(0), steps=3)
    assert training.train(step, first(), batches, jax.random.key(0), steps=3).step == 3


def test_what_is_no_callback_is_named(line):
    step, first, batches = line
    with pytest.raises(
        ValueError, match=r"callbacks\[1\] is a function; pass a Callback, or wrap a function in Every\(1,"
    ):
        bare: list = [training.Callback(), lambda run: None]
        training.train.__wrapped__(step, first(), batches, jax.random.key(0), steps=3, callbacks=bare)
    with pytest.raises(ValueError, match=r"Log\(0, ...\): the first number counts steps; give at least 1"):
        training.Log(0, print)
    assert training.Log(1, print).every == 1


def test_numbers_that_are_not_finite_end_the_run(line):
    step, first, batches = line
    broken = [*batches[:2], *[batches[0] * jnp.nan] * 12]
    with pytest.raises(training.DivergedError, match="10 steps in a row, steps 3 to 12, had a loss"):
        training.train(step, first(), broken, jax.random.key(0), steps=14)


@pytest.mark.parametrize(
    "first, last, traced",
    [
        (1, 2, 1),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in [(3, 4, 1), (5, 99, 1), (6, 9, 1)]),
        (7, 9, 0),
    ],
)
def test_a_trace_of_some_steps_is_written(first, last, traced, line, tmp_path):
    step, start, batches = line
    profile = training.Profile(first, last, tmp_path)
    training.train(step, start(), batches, jax.random.key(0), steps=6, callbacks=[profile])
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == traced


@pytest.mark.grid
@pytest.mark.parametrize("ends", ["by a callback", "by an error"])
def test_a_run_that_ends_within_its_trace_writes_it_and_leaves_none_on(ends, line, tmp_path):
    step, start, batches = line
    profile = training.Profile(2, 5, tmp_path)

    def stop(run):
        run.is_stopping = True
        if ends == "by an error":
            raise KeyboardInterrupt

    outcome = pytest.raises(KeyboardInterrupt) if ends == "by an error" else contextlib.nullcontext()
    with outcome:
        callbacks = [profile, training.Every(3, stop)]
        training.train(step, start(), batches, jax.random.key(0), steps=6, callbacks=callbacks)
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def test_steps_of_a_trace_are_in_order():
    with pytest.raises(ValueError, match=r"Profile\(first=4, last=3\): steps count from 1"):
        training.Profile(4, 3, "anywhere")
