"""Preference losses against their formulas in float64; metrics and errors."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from nn_reference import random_module
from token_table import make_table, Table, VOCAB

from eqformer import kernels, models, nn, PreferenceBatch, training
from eqformer.data import batch_labelled, EncodedExample
from eqformer.parallel import make_mesh, Plan
from eqformer.training import loss_count


ROWS, SEQ, BETA = 6, 7, 0.3
SMALL = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, heads=4, kv_heads=2, mlp=64)
LOSSES: tuple[Any, ...] = ("dpo", "ipo", "orpo", "kto")


def batch_of(**fields) -> PreferenceBatch:
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, VOCAB, (2, ROWS, SEQ)).astype(np.int32)
    lengths = np.array([3, 5, 1, 7, 4, 2])
    weights = (np.arange(SEQ) < lengths[:, None]).astype(np.float64)[:, ::-1]
    numbers = {"reference_nats": rng.normal(9, 3, ROWS), "labels": np.array([1.0, 0, 0, 1, 1, 0])}
    numbers["baseline"] = np.full(ROWS, 0.7)
    batch = PreferenceBatch(ids, targets, weights, np.arange(ROWS, dtype=np.int32), group=2, **numbers)
    return jax.tree.map(jnp.asarray, dataclasses.replace(batch, **fields))


def formula(name: str, model: Table, batch: Any) -> Array:
    """The sum over pairs or rows, of all log-probabilities at once."""
    log_probs = jax.nn.log_softmax(model.table[batch.ids] @ model.head)
    picked = jnp.take_along_axis(log_probs, jnp.asarray(batch.targets)[..., None], -1)[..., 0]
    log_p, lengths = jnp.sum(picked * batch.weights, -1), batch.weights.sum(-1)
    ratios = log_p + batch.reference_nats
    if name == "dpo":
        return jnp.sum(jnp.log1p(jnp.exp(-BETA * (ratios[::2] - ratios[1::2]))))
    if name == "ipo":
        per_token = ratios / lengths
        return jnp.sum((per_token[::2] - per_token[1::2] - 1 / (2 * BETA)) ** 2)
    if name == "orpo":
        p = jnp.exp(log_p / lengths)
        odds = p / (1 - p)
        return jnp.sum(-log_p[::2] / lengths[::2] + BETA * jnp.log1p(odds[1::2] / odds[::2]))
    desirable = 2.0 * (1 - 1 / (1 + jnp.exp(-BETA * (ratios - 0.7))))
    undesirable = 0.5 * (1 - 1 / (1 + jnp.exp(-BETA * (0.7 - ratios))))
    return jnp.sum(jnp.where(batch.labels > 0, desirable, undesirable))


def loss_of(name: Any):
    return training.preference_loss(name, beta=BETA, desirable_weight=2.0, undesirable_weight=0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_and_its_gradients_are_the_formula(name):
    with jax.enable_x64(True):
        model, batch = make_table(), batch_of()
        want, want_gradients = eqx.filter_jit(eqx.filter_value_and_grad(lambda model: formula(name, model, batch)))(
            model
        )
        run = eqx.filter_jit(training.make_gradient_function(loss_of(name)))
        total, count, gradients = run(model, batch, None)
        assert float(total) == pytest.approx(float(want), rel=1e-12)
        assert float(loss_count(count)) == (ROWS if name == "kto" else ROWS // 2)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
            assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        # The control: rows in other pairs, or with other labels, have another loss.
        order = np.roll(np.arange(ROWS), 1)
        arrays = {"ids": batch.ids[order], "targets": batch.targets[order], "weights": batch.weights[order]}
        arrays |= {"reference_nats": batch.reference_nats[order]}  # type: ignore[index]
        assert abs(float(run(model, batch_of(**arrays), None)[0]) / float(want) - 1) > 1e-3


def test_microbatches_hold_whole_pairs():
    with jax.enable_x64(True):
        model, batch = make_table(), batch_of()
        run = eqx.filter_jit(training.make_gradient_function(loss_of("dpo"), microbatches=3))
        total, _, _ = run(model, batch, None)
        expected = eqx.filter_jit(formula)("dpo", model, batch)
        assert float(total) == pytest.approx(float(expected), rel=1e-12)
        apart = dataclasses.replace(batch, group=1)
        with pytest.raises(ValueError, match="has group=1 and 2 rows; use data.batch_preferences"):
            run(model, apart, None)


def test_metrics_are_means_over_all_microbatches():
    with jax.enable_x64(True):
        model, batch = make_table(), batch_of()
        optimizer = training.optimizer("sgd", model, rate=1e-3)
        nats = np.asarray(eqx.filter_jit(training.row_nats)(model, batch))
        rewards = BETA * (np.asarray(batch.reference_nats) - nats)
        for name, microbatches in (("dpo", 1), ("ipo", 3), ("kto", 3)):
            step = training.make_step(loss_of(name), optimizer, microbatches=microbatches)
            metrics = step(training.init_state(make_table(), optimizer), batch, None)[1]
            if name == "kto":
                is_desirable = np.asarray(batch.labels) > 0
                expected = {"rewards_chosen": rewards[is_desirable], "rewards_rejected": rewards[~is_desirable]}
            else:
                margins = rewards[::2] - rewards[1::2]
                expected = {"rewards_chosen": rewards[::2], "rewards_rejected": rewards[1::2]}
                expected |= {"reward_margin": margins, "reward_accuracy": margins > 0}
            for metric, values in expected.items():
                assert float(metrics[metric]) == pytest.approx(np.mean(values), rel=1e-10), (name, metric)


def test_the_baseline_is_a_mean_that_is_not_negative():
    assert float(training.kto_baseline(np.array([1.0, 2.0]), np.array([2.0, 2.0]))) == 0.5
    assert float(training.kto_baseline(np.array([3.0, 2.0]), np.array([2.0, 2.0]))) == 0


def test_a_sure_model_has_finite_odds():
    with jax.enable_x64(True):
        batch = batch_of(weights=np.zeros((ROWS, SEQ)))  # of no token: the probability is 1
        run = eqx.filter_jit(training.make_gradient_function(loss_of("orpo")))
        total, _, gradients = run(make_table(), batch, None)
        assert math.isfinite(float(total)) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_what_is_refused():
    model = make_table()

    def refused(name: Any, batch: PreferenceBatch) -> str:
        with pytest.raises(ValueError) as error:
            eqx.filter_eval_shape(loss_of(name), model, batch)
        return str(error.value)

    half = {"weights": np.ones((ROWS, SEQ), np.float32)}
    assert "the batch needs the nats of each row under a reference" in refused(
        "dpo", batch_of(reference_nats=None, **half)
    )
    assert "has no labels" in refused("kto", batch_of(labels=None, **half))
    assert "has no baseline; use data.batch_labelled" in refused("kto", batch_of(baseline=None, **half))
    with pytest.raises(ValueError, match=r"beta=0\.0, .*each must be above 0"):
        training.preference_loss("dpo", beta=0.0)


@pytest.mark.grid
def test_a_kto_step_computes_its_baseline_before_it_steps():
    """On one device as a mesh, with a model whose nats differ from the reference's."""
    build = lambda: models.build(SMALL, key=jax.random.key(0))
    model = random_module(lambda: nn.with_execution(build(), core=kernels.ReferenceAttention()))
    reference = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * x.dtype.type(3)), model)
    plan = Plan(make_mesh(devices=jax.devices()[:1]))
    rng = np.random.default_rng(0)
    rows = [
        EncodedExample(rng.integers(1, 99, 9), (np.arange(9) > 3).astype(np.float32), np.array([9]), 9)
        for _ in range(8)
    ]
    batch, mismatched = (batch_labelled(part, [True, False] * 2, seq=8) for part in (rows[:4], rows[4:]))
    batch = dataclasses.replace(batch, mismatched=mismatched)
    optimizer = training.optimizer("sgd", model, rate=0.1)
    step = training.KtoStep(training.make_step(loss_of("kto"), optimizer, plan), plan)
    (ready,) = training.add_reference_nats([batch], reference, plan)
    assert ready.mismatched is not None and ready.mismatched.reference_nats is not None
    nats = eqx.filter_jit(training.row_nats)(model, mismatched)
    baseline = float(training.kto_baseline(nats, ready.mismatched.reference_nats))
    assert baseline > 0
    expected = dataclasses.replace(ready, baseline=np.full(4, baseline, np.float32), mismatched=None)
    loss = eqx.filter_jit(training.make_gradient_function(loss_of("kto")))(model, expected, None)[0] / 4
    state = training.init_state(model, optimizer)
    with pytest.raises(ValueError, match="the batch needs mismatched rows with their reference_nats"):
        step(state, batch)
    state, metrics = step(state, ready)
    assert float(metrics["baseline"]) == pytest.approx(baseline, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
