"""Loss spikes: return to the last checkpoint, skipped batches, and the same results after a kill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits

from eqformer import training


KEY = jax.random.key(0)
STEPS, EVERY = 14, 3


@pytest.fixture(scope="module")
def fitted():
    """A step that fits a line with noise, and its first state."""
    optimizer = training.optimizer("adamw", [jnp.zeros(3)], rate=training.constant(0.01), matrices=[None])

    def loss(model, batch, key):
        return jnp.sum((model[0] @ batch - 1) ** 2) + 1 + jax.random.uniform(key), jnp.ones(())

    return training.make_step(loss, optimizer), lambda: training.init_state([jnp.ones(3)], optimizer)


def batches(*loud: int) -> list:
    """Batches, of which some are far from the line."""
    draw = lambda n: np.random.default_rng(n).normal(size=3) * 0.1 + 50 * (n in loud)
    return [jnp.asarray(draw(n), jnp.float32) for n in range(STEPS + 12)]


class Kill(training.Callback):
    """Ends the process, so to say, at a step, when it comes there for the n-th time."""

    def __init__(self, step, times=1):
        self.step, self.times = step, times

    def after_step(self, run):
        self.times -= run.step == self.step
        if not self.times and run.step == self.step:
            raise KeyboardInterrupt


def trained(fitted, folder, source, *more, factor: float | None = 4.0, max_rollbacks=3, forgets=False):
    """A run in a folder, from its last checkpoint; `forgets` leaves out what checkpoints keep of spikes."""
    (step, first), noted = fitted, []
    spikes = training.LossSpikes(factor, window=4, max_rollbacks=max_rollbacks)

    def stretch():
        with training.Checkpointer(folder, keep=2) as checkpointer:
            start, state, record = checkpointer.latest_step or 0, first(), None
            if start:
                state, metadata = checkpointer.restore(state)
                record = None if forgets else metadata["spikes"]
            spikes.start(start, record)
            about = lambda n: training.run_metadata(recipe={}, step=n, data={}, key=KEY, spikes=spikes.record())
            callbacks = [*more, spikes, training.Checkpoints(EVERY, checkpointer, about)]
            taken = (source[spikes.batch_number(n)] for n in range(start, STEPS))
            return training.train(step, state, taken, KEY, steps=STEPS, start=start, callbacks=callbacks)

    return spikes.retry(stretch, noted.append), spikes, noted


def without(fitted, *left_out: int):
    """The state of a plain run over all batches but some, which are all the loud ones."""
    step, first = fitted
    source = [batch for number, batch in enumerate(batches()) if number not in left_out]
    return training.train(step, first(), source, KEY, steps=STEPS).state


@pytest.mark.grid
def test_the_run_goes_back_and_leaves_out_the_batches_since(fitted, tmp_path):
    run, spikes, noted = trained(fitted, tmp_path, batches(7))
    assert spikes.skipped_batches == ((6, 7),)  # the spike is in step 8, and the checkpoint of step 6
    assert len(noted) == 1 and noted[0].startswith("step 8: the loss is") and "above 4 times" in noted[0]
    assert run.step == STEPS and int(run.state.step) == STEPS
    assert_same_bits(run.state, without(fitted, 6, 7))
    saved = training.Checkpointer(tmp_path).metadata()["spikes"]
    assert saved["left_out"] == [[6, 7]] and len(saved["losses"]) == 4
    # The controls: without a spike nothing is left out, and where none is watched for it goes by.
    assert trained(fitted, tmp_path / "quiet", batches())[1].skipped_batches == ()
    assert trained(fitted, tmp_path / "unwatched", batches(7), factor=None)[1].skipped_batches == ()


# Killed before the spike, on the way again to it, just before a checkpoint keeps what was left out, and after.
@pytest.mark.grid
@pytest.mark.parametrize("step, times", [(7, 1), (8, 1), (7, 2), (11, 1)])
def test_a_run_that_is_killed_leaves_out_the_same(step, times, fitted, tmp_path):
    source = batches(7, 11)
    straight, spikes, _ = trained(fitted, tmp_path / "straight", source)
    assert spikes.skipped_batches == ((6, 7), (11, 11))
    assert_same_bits(straight.state, without(fitted, 6, 7, 11))
    with pytest.raises(KeyboardInterrupt):
        trained(fitted, tmp_path / "killed", source, Kill(step, times))
    again, spikes, _ = trained(fitted, tmp_path / "killed", source)
    assert spikes.skipped_batches == ((6, 7), (11, 11))
    assert_same_bits(again.state, straight.state)


def test_the_record_is_what_a_run_goes_on_by(fitted, tmp_path):
    source = batches(7)
    with pytest.raises(KeyboardInterrupt):
        trained(fitted, tmp_path, source, Kill(11))
    state = trained(fitted, tmp_path, source, forgets=True)[0].state
    with pytest.raises(AssertionError):
        assert_same_bits(state, without(fitted, 6, 7))


def test_a_run_goes_back_so_often_and_no_more(fitted, tmp_path):
    of = training.LossSpikes
    with pytest.raises(training.LossSpikeError, match=r"^step 8: .* gone back 1 of at most 1 times"):
        trained(fitted, tmp_path, batches(7, 9), max_rollbacks=1)
    for make in (lambda: of(1.0), lambda: of(2.0, window=0), lambda: of(2.0, max_rollbacks=0)):
        with pytest.raises(ValueError, match=r"Spikes\("):
            make()
