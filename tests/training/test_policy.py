"""Policy losses against their formula in float64; metrics, advantages, and errors."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from token_table import make_table, Table, VOCAB

from eqformer import PolicyBatch, training
from eqformer.training import loss_count


ROWS, SEQ = 4, 6
LENGTHS = np.array([3, 5, 0, 2])  # a row that is left out
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.2, "unbiased_kl": False},
    "dapo": {},
    "dr_grpo": {"mean": 9},
    "gspo": {"beta": 0.1, "clip_low": 0.05, "clip_high": 0.1},
}


def model_of(seed: int = 0) -> Table:
    return make_table(seed, scale=0.6)


def log_probs_of(model: Table, batch: Any, temperature: float = 1.0) -> tuple[Array, Array]:
    """The log-probabilities of all ids after each token, and those of the targets."""
    return _log_probs_of(model, jnp.asarray(batch.ids), jnp.asarray(batch.targets), temperature)


@eqx.filter_jit
def _log_probs_of(model: Table, ids: Array, targets: Array, temperature: float) -> tuple[Array, Array]:
    log_probs = jax.nn.log_softmax(model.table[ids] @ model.head / temperature)
    return log_probs, jnp.take_along_axis(log_probs, targets[..., None] % VOCAB, -1)[..., 0]


def batch_of(**fields) -> Any:
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, VOCAB, (2, ROWS, SEQ)).astype(np.int32)
    weights = (np.arange(SEQ) < LENGTHS[:, None]).astype(np.float64)[:, ::-1]
    targets = np.where(weights > 0, targets, -1)  # no id: it must not be read
    batch = PolicyBatch(ids, targets, weights, np.arange(ROWS, dtype=np.int32))
    numbers: dict[str, Any] = {"advantages": np.array([1.3, -0.7, 0.4, -1.0])}
    for name, seed in (("old_log_probs", 2), ("reference_log_probs", 3), ("sampler_log_probs", 4)):
        numbers[name] = np.array(log_probs_of(model_of(seed), batch)[1])
    numbers["old_log_probs"][weights == 0] = np.nan
    numbers["row_metrics"] = {"reward": np.array([1.0, 0, 2, 5])}
    return jax.tree.map(jnp.asarray, dataclasses.replace(batch, **(numbers | fields)))


def formula(
    name: str, model: Table, batch: Any, beta: float = 0.0, unbiased_kl: bool = True, **_
) -> tuple[Array, float]:
    """The sum of the loss, token by token as the papers write it, and what divides it."""
    low, high = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (0.05, 0.1)}[name]
    log_probs = log_probs_of(model, batch, batch.temperature)[1]
    total = jnp.zeros(())
    for row in range(ROWS):
        indices = range(SEQ - LENGTHS[row], SEQ)
        ratios = [jnp.exp(log_probs[row, t] - batch.old_log_probs[row, t]) for t in indices]
        if name == "gspo":
            ratios = [jnp.prod(jnp.stack(ratios)) ** (1 / len(ratios))] * len(ratios) if ratios else []
        row_sum, advantage = jnp.zeros(()), batch.advantages[row]
        for t, ratio in zip(indices, ratios):
            inside = jnp.maximum(jnp.minimum(ratio, 1 + high), 1 - low)
            row_sum -= jnp.minimum(ratio * advantage, inside * advantage)
            gap = batch.reference_log_probs[row, t] - log_probs[row, t]
            row_sum += beta * (jnp.exp(gap) - gap - 1) * (ratio if unbiased_kl else 1)
        total += row_sum / len(indices) if name in ("grpo", "gspo") and len(indices) else row_sum
    rows = np.count_nonzero(LENGTHS)
    return total, {"dapo": LENGTHS.sum(), "dr_grpo": rows * 9}.get(name, rows)


@pytest.mark.by_default("grpo")  # all of them beside TRL's in test_policy_of_trl.py
@pytest.mark.parametrize("name", SETTINGS)
def test_each_loss_and_its_gradients_are_the_formula(name):
    with jax.enable_x64(True):
        model, settings = model_of(), SETTINGS[name]
        batch = batch_of(temperature=0.7 if name == "dapo" else 1.0)
        value_and_grad = eqx.filter_value_and_grad(lambda model: formula(name, model, batch, **settings), has_aux=True)
        (want, divisor), want_gradients = eqx.filter_jit(value_and_grad)(model)
        run = eqx.filter_jit(training.make_gradient_function(training.policy_loss(name, **settings)))
        total, count, gradients = run(model, batch, None)
        assert float(total) == pytest.approx(float(want), rel=1e-12) and float(loss_count(count)) == float(divisor)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
            assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        split = eqx.filter_jit(training.make_gradient_function(training.policy_loss(name, **settings), microbatches=2))
        assert float(split(model, batch, None)[0]) == pytest.approx(float(want), rel=1e-12)
        # Controls: the advantages of other rows, and log-probabilities of other tokens.
        moved = {"advantages": batch.advantages[::-1]}, {"old_log_probs": jnp.roll(batch.reference_log_probs, 1, 1)}
        for fields in moved:
            other = float(run(model, dataclasses.replace(batch, **fields), None)[0])
            assert abs(other / float(want) - 1) > 1e-3


@pytest.mark.grid
def test_each_choice_matters():
    """The control: no two of the losses, and none with another clipping or temperature, are the same."""
    with jax.enable_x64(True):
        model, batch = model_of(), batch_of()
        choices: list[Any] = [{"name": name} | SETTINGS[name] for name in SETTINGS]
        choices += [{"clip_low": 0.01}, {"clip_high": 0.01}, {"ratio": "sequence"}, {"beta": 0.1}, {"beta": 0.2}]
        values = []
        for choice in choices:
            total, count = training.policy_loss(**choice)(model, batch)
            values.append(float(total / loss_count(count)))
        total, count = training.policy_loss("grpo")(model, batch_of(temperature=0.5))
        values.append(float(total / loss_count(count)))
        assert len({round(value, 6) for value in values}) == len(choices) + 1


def test_a_step_on_new_completions_has_ratios_of_one():
    with jax.enable_x64(True):
        model, batch = model_of(), batch_of(old_log_probs=None)
        run = eqx.filter_jit(training.make_gradient_function(training.policy_loss("dapo")))
        total, _, gradients = run(model, batch, None)
        weighed = np.asarray(batch.weights) * np.asarray(batch.advantages)[:, None]
        assert float(total) == pytest.approx(-float(np.sum(weighed)), rel=1e-12)

        def score(model: Table) -> Array:
            """The policy gradient's own sum: each log-probability times the advantage."""
            return -jnp.sum(weighed * log_probs_of(model, batch)[1])

        expected = jax.jit(jax.grad(score))(model)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        known = dataclasses.replace(batch, old_log_probs=log_probs_of(model, batch)[1])
        same = run(model, known, None)[2]
        assert np.allclose(same.table, gradients.table, rtol=1e-10, atol=1e-12)


def test_metrics_are_means_over_all_microbatches():
    with jax.enable_x64(True):
        model, batch = model_of(), batch_of(temperature=0.7)
        optimizer = training.optimizer("sgd", model, rate=1e-3)
        step = training.make_step(training.policy_loss("grpo"), optimizer, microbatches=2)
        metrics = step(training.init_state(model_of(), optimizer), batch, None)[1]
        log_probs, picked = map(np.asarray, log_probs_of(model, batch, 0.7))
        is_counted = np.asarray(batch.weights) > 0
        entropies = -np.sum(np.exp(log_probs) * log_probs, -1)[is_counted]
        gap = (np.asarray(batch.reference_log_probs) - picked)[is_counted]
        ratios = np.exp(picked - np.asarray(batch.old_log_probs))[is_counted]
        signs = np.broadcast_to(np.asarray(batch.advantages)[:, None], is_counted.shape)[is_counted]
        clipped = np.where(signs > 0, ratios > 1.2, ratios < 0.8)
        expected = {
            "entropy": entropies.mean(),
            "kl": (np.exp(gap) - gap - 1).mean(),
            "clip_fraction": clipped.mean(),
            "sampler_difference": np.abs(picked - np.asarray(batch.sampler_log_probs))[is_counted].mean(),
            "reward": 2.0,
        }
        for name, value in expected.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-10), name
        assert 0 < expected["clip_fraction"] < 1 and "kl" not in step_metrics(batch_of(reference_log_probs=None))


def step_metrics(batch: Any) -> Any:
    return eqx.filter_eval_shape(training.policy_loss("grpo"), model_of(), batch)[1].metrics


def test_log_probabilities_of_tokens():
    with jax.enable_x64(True):
        model, batch = model_of(), batch_of()
        is_counted = np.asarray(batch.weights) > 0
        for temperature in (1.0, 0.7):
            log_probs = training.token_log_probs(model, dataclasses.replace(batch, temperature=temperature), chunk=5)
            want = log_probs_of(model, batch, temperature)[1]
            assert np.allclose(log_probs[is_counted], want[is_counted], rtol=1e-12)
        assert not np.allclose(log_probs[is_counted], log_probs_of(model, batch)[1][is_counted], rtol=1e-3)


def test_advantages_of_groups():
    rewards = [1.0, 0.0, 0.5, 0.1, 0.1, 0.1]  # 0.1 three times: the mean is not 0.1 to the bit
    advantages, stds = training.group_advantages(rewards, 3)
    assert advantages == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0, 0, 0, 0], rel=1e-6)
    assert np.all(advantages[3:] == 0) and stds == pytest.approx([0.5, 0.5, 0.5, 0, 0, 0])
    assert training.group_advantages(rewards, 3, scale=False).advantages == pytest.approx([0.5, -0.5, 0, 0, 0, 0])
    assert training.group_advantages(rewards, 2).advantages != pytest.approx(advantages)  # the control
    for group in (1, 4):
        with pytest.raises(ValueError, match=rf"group={group}\): rewards are compared in whole groups"):
            training.group_advantages(rewards, group)


def test_what_is_refused():
    def refused(**choices) -> str:
        with pytest.raises(ValueError) as error:
            training.policy_loss(**choices)
        return str(error.value)

    assert "for dr_grpo pass the largest number of new tokens" in refused(name="dr_grpo")
    assert "clip_low must be above 0" in refused(clip_low=1.0)
    with pytest.raises(
        ValueError, match=r"temperature=0\.0\): it must be the temperature of sampling, finite and above 0"
    ):
        batch_of(temperature=0.0)
    single = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch_of())
    with pytest.raises(ValueError, match="the batch has no advantages; give"):
        training.policy_loss()(model_of(), dataclasses.replace(single, advantages=None))
    with pytest.raises(ValueError, match=r"beta=0\.1\): the batch needs log-probabilities under a reference"):
        training.policy_loss(beta=0.1)(model_of(), dataclasses.replace(single, reference_log_probs=None))
