"""Schedule-free AdamW: parameters and points of gradients equal optax's, and routers stay balanced."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from resumed_runs import copy, run_and_restore
from same_bits import assert_same_bits

from eqformer import nn, training


DECAY, STEPS = 0.1, 4


def rates(step):
    """Rates with a warmup, after which they fall: the average weighs steps by the largest rate so far."""
    return jnp.asarray([1 / 512, 1 / 128, 1 / 64, 1 / 128])[step]  # exact in float32, too


def loss(model, batch, key=None):
    inputs, targets = batch
    return jnp.sum((model(inputs) - targets) ** 2), jnp.float64(len(inputs))


def trained_by_optax(model, batch, b1):
    """Losses, averaged weights and the weights of gradients by `optax.contrib.schedule_free`."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    decays = jax.tree.map(lambda x, mark: mark is not None, parameters, nn.matrices(model))
    base = optax.chain(
        optax.scale_by_rms(decay=0.95, eps=1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(DECAY, lambda _: decays),
        optax.scale_by_learning_rate(rates),
    )
    rule = optax.contrib.schedule_free(base, lambda count: rates(count - 1), b1=b1)  # Optax counts from 1.

    @jax.jit
    def step(parameters, state):
        mean = lambda parameters: jnp.divide(*loss(eqx.combine(parameters, static), batch))
        value, gradients = jax.value_and_grad(mean)(parameters)
        updates, state = rule.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, updates), state

    state, losses = jax.jit(rule.init)(parameters), []
    for _ in range(STEPS):
        value, parameters, state = step(parameters, state)
        losses.append(float(value))
    return losses, jax.jit(optax.contrib.schedule_free_eval_params)(state, parameters), parameters


def differences(one, other):
    leaves = zip(jax.tree.leaves(eqx.filter(one, eqx.is_inexact_array)), jax.tree.leaves(other), strict=True)
    return [float(np.abs(np.subtract(a, b)).max()) for a, b in leaves]


def test_steps_are_those_of_optax():
    """In float64: the losses, the state's model, and the weights at which the next step computes gradients."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        draw = np.random.default_rng(0)
        model = eqx.filter_eval_shape(lambda: nn.GatedMLP(embed=4, mlp=6, bias=True, key=jax.random.key(0)))
        model = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), model)
        batch = tuple(jnp.asarray(draw.normal(size=(8, 4))) for _ in range(2))
        optimizer = training.optimizer("schedule-free-adamw", model, rate=rates, weight_decay=DECAY)
        step = training.make_step(loss, optimizer, clip=None)
        state, losses = training.init_state(copy(model), optimizer), []
        for _ in range(STEPS):
            state, metrics = step(state, batch, None)
            losses.append(float(metrics["loss"]))
        expected, averages, points = trained_by_optax(model, batch, 0.9)
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert max(differences(state.model, averages)) < 1e-12
        gradient_point = eqx.filter_jit(optimizer.gradient_point)(state.model, state.optimizer_state)
        assert max(differences(gradient_point, points)) < 1e-12
        # The controls: the two are not the same weights, and another share gives others.
        assert min(differences(averages, points)) > 1e-5
        assert min(differences(state.model, trained_by_optax(model, batch, 0.5)[1])) > 1e-5


@pytest.mark.grid
@pytest.mark.parametrize("moments", training.MOMENTS)
def test_a_run_resumes_bit_for_bit(moments, make_model, make_batch, tmp_path):
    """With the weights that move in float32 in any case."""
    model, batch = make_model(layers=1), make_batch()
    optimizer = training.optimizer("schedule-free-adamw", model, rate=1e-2, moments=moments)
    step, state, again = run_and_restore(optimizer, model, batch, tmp_path, steps=4, saved=2)
    assert {x.dtype for x in jax.tree.leaves(state.optimizer_state.fast)} == {jnp.dtype("float32")}
    lost = eqx.tree_at(lambda s: s.optimizer_state.weight_sum, copy(again), jnp.zeros(()))
    for _ in range(2):
        again, _ = step(again, batch, jax.random.key(0))
        lost, _ = step(lost, batch, jax.random.key(0))
    assert_same_bits(again, state)
    assert min(differences(lost.model, eqx.filter(state.model, eqx.is_inexact_array))) > 0  # the control


@pytest.mark.grid
def test_routers_move_in_the_average_and_in_the_weights_that_it_averages(make_batch):
    """A selection bias moves by the rate of balance, and nothing pulls it back."""

    def build():
        block = lambda key: nn.Block(
            nn.Residual(
                nn.MoE(
                    nn.TopKRouter(embed=8, experts=4, top_k=1, balanced=True, key=key),
                    nn.Experts(lambda key: nn.GatedMLP(embed=8, mlp=8, key=key), 4, key=key),
                ),
                nn.RMSNorm("embed", embed=8),
            )
        )
        table = nn.Embedding(vocab=50, embed=8, key=jax.random.key(1))
        return nn.Transformer(table, (nn.Stack(block, 1, key=jax.random.key(0)),), nn.RMSNorm("embed", embed=8))

    model = build()
    optimizer = training.optimizer("schedule-free-adamw", model, rate=1e-2)
    step = training.make_step(training.next_token_loss, optimizer, balance_rate=0.5)
    state, bias_of = training.init_state(model, optimizer), lambda model: nn.modules(model, nn.TopKRouter)[0]
    for _ in range(3):
        state, _ = step(state, make_batch(), None)
    average, fast = (bias_of(tree).selection_bias for tree in (state.model, state.optimizer_state.fast))
    np.testing.assert_allclose(average, fast, atol=1e-6)
    assert np.abs(average).max() > 0.4
    np.testing.assert_allclose(2 * average, np.round(2 * average), atol=1e-6)


@pytest.mark.quick
def test_what_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"Optimizer\(average=1.0\): average must be between 0 and 1"):
        training.Optimizer(optax.sgd(1.0), training.constant(1e-3), average=1.0)
