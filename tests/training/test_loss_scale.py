"""Training in float16: the loss scale keeps gradients of many tokens from overflow and underflow."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits

from eqformer import nn, training
from eqformer.training.losses._loss_aux import init_loss_scale, loss_cotangent


ROWS, SEQ, WEIGHT, STEPS = 256, 16, 16, 11


@pytest.fixture(scope="module")
def many(make_batch):
    """4,096 tokens of weight 16, all alike: of a float16 model, gradients of their sum are beyond 65,504."""
    batch = make_batch(rows=ROWS, seq=SEQ)
    alike = np.full((ROWS, SEQ), 3, np.int32)
    return eqx.tree_at(
        lambda b: (b.ids, b.targets, b.weights), batch, (alike, alike + 1, np.full_like(batch.weights, WEIGHT))
    )


@pytest.mark.parametrize("parameters", ["float16", pytest.param("float32", marks=pytest.mark.grid)])
def test_a_batch_that_overflows_is_learnt(make_model, many, parameters):
    plain = make_model(layers=1)
    make = lambda: eqx.filter_jit(nn.Precision(parameters, "float16").apply)(plain)
    rule = training.optimizer("sgd", make(), rate=0.02)
    step = training.make_step(training.next_token_loss, rule)
    rows, of_plain = [], training.make_gradient_function(training.next_token_loss)
    one_row = jax.tree.map(lambda x: x[:1], many)  # alike, so that the mean is one row's
    exact = eqx.filter_jit(lambda m: [training.global_norm(x) for x in of_plain(m, one_row, None)[1:]])(plain)
    state = training.init_state(make(), rule)
    for _ in range(STEPS):
        state, metrics = step(state, many)
        rows.append({name: float(value) for name, value in metrics.items()})
    first = next(one_row for one_row in rows if one_row["skipped_in_a_row"] == 0)
    assert rows[-1]["skipped"] < STEPS - 3 and rows[-1]["loss"] < first["loss"] - 0.1
    assert first["grad_norm"] == pytest.approx(float(exact[1] / exact[0]), rel=0.01)
    scales = [one_row["loss_scale"] for one_row in rows]
    assert scales == [2.0 ** (16 - min(i, int(first["skipped"]))) for i in range(STEPS)]
    # Without a scale none of them would be taken: a scale of as many as there are tokens gives the same, a seed of 1.
    assert loss_cotangent(jnp.float32(ROWS * SEQ), many) == 1 == loss_cotangent(None, many)
    assert ROWS * SEQ in scales[: int(first["skipped"])]


def test_other_dtypes_have_no_scale(make_model):
    for dtypes in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        model = nn.Precision(*dtypes).apply(make_model(layers=1))
        assert init_loss_scale(model) is None
        assert (
            len(jax.tree.leaves(training.init_state(model, training.optimizer("sgd", model, rate=0.1))))
            == len(jax.tree.leaves(model))
            + len(jax.tree.leaves(training.optimizer("sgd", model, rate=0.1).init(model)))
            + 4
        )
    of_half = init_loss_scale([jnp.ones(2, jnp.float16)])
    assert of_half is not None and of_half.value == 2**16


@pytest.mark.quick
def test_the_scale_is_halved_and_doubled():
    scale, seen = training.LossScale(jnp.float32(2), jnp.int32(0), interval=3), []
    for is_finite in (False, False, True, True, True, True, True, False, True, True, True):
        scale = scale.advance(jnp.asarray(is_finite))
        seen.append(float(scale.value))
    assert seen == [1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 2]
    most = training.LossScale(jnp.float32(2**24), jnp.int32(2), interval=3)
    assert most.advance(jnp.asarray(True)).value == 2**24


@pytest.mark.grid
def test_the_scale_changes_no_bit_of_what_neither_overflows_nor_vanishes(make_model, make_batch):
    model, batch = make_model(layers=1), make_batch(rows=4)
    for microbatches in (1, 2):
        of_batch = training.make_gradient_function(training.next_token_loss, microbatches=microbatches)
        run = eqx.filter_jit(of_batch)
        one, other, none = (run(model, batch, None, scale) for scale in (jnp.float32(1), jnp.float32(2**20), None))
        assert_same_bits(one, other)
        assert_same_bits(one[:2], none[:2])
    assert loss_cotangent(jnp.float32(8), (jnp.zeros((4, 12)), jnp.zeros(3))) == 8 / 64
    assert loss_cotangent(None, batch) == 1


@pytest.mark.grid
def test_a_resumed_run_has_its_scale(make_model, make_batch, tmp_path):
    model, batch = nn.Precision("float16", "float16").apply(make_model(layers=1)), make_batch(rows=4)
    rule = training.optimizer("sgd", model, rate=0.02)
    step = training.make_step(training.next_token_loss, rule)
    state, _ = step(training.init_state(model, rule), batch)
    state = eqx.tree_at(lambda s: s.loss_scale.value, state, jnp.float32(2**7))
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, {})
        checkpointer.wait()
        like = eqx.filter_eval_shape(lambda: training.init_state(model, rule))
        restored, _ = checkpointer.restore(like)
    assert_same_bits(restored, state)
    (went_on, metrics), (other, _) = step(restored, batch), step(state, batch)
    assert_same_bits(went_on, other)
    assert went_on.loss_scale is not None
    assert metrics["loss_scale"] == 2**7 and int(went_on.loss_scale.finite_in_a_row) == 2
