"""A user's optimizer (`docs/extending.md`) is sharded, saved and restored like the package's optimizers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from extending import beside
from plan_models import batch_of, model_of, plan_over
from plan_parity import hastily, leaf_differences
from plan_steps import begun, stepped

from eqformer import nn, training


DOUBLE = ("float64", "float64")  # in which no rounding turns a sign


def rule(model: nn.Transformer, **options: Any) -> training.Optimizer:
    return beside("cautious").cautious_lion(model, rate=training.constant(1e-3), **options)


def stepped_alone(model: nn.Transformer, steps: int) -> Callable[[float], Any]:
    """The same on one device, in a program of any decay `b1`."""
    batch, key = batch_of(model), jax.random.key(7)

    def step(state: training.TrainState, b1: Any) -> Any:
        return training.make_step(training.next_token_loss, rule(model, b1=b1))(state, batch, key)

    begin = eqx.filter_jit(lambda model: training.init_state(model, rule(model)))
    program = hastily(step, begin(model), jnp.float64(0.9))

    def run(b1: float) -> Any:
        state, metrics = begin(model), {}
        for _ in range(steps):
            state, metrics = program(state, jnp.float64(b1))
        return state, float(metrics["loss"])

    return run


def momentum_of(state: training.TrainState) -> Any:
    return state.optimizer_state.momentum.stacks[0].blocks.feed_forward.layer.up.weight


def up_of(state: training.TrainState) -> Any:
    return state.model.stacks[0].blocks.feed_forward.layer.up.weight  # type: ignore[attr-defined]


CASES = [
    ("five layers", {"fsdp": 2, "tensor": 2}, {"zero": 2, "smallest": 1, "residual": "feature"}),
    ("five layers", {"fsdp": 2, "pipe": 2}, {"zero": 3, "smallest": 1, "microbatches": 2}),  # with rows of padding
    ("windows", {"replica": 2, "fsdp": 2, "tensor": 2}, {"zero": 1, "smallest": 1}),
    ("llama", {"context": 2, "pipe": 2, "tensor": 2}, {"schedule": "interleaved", "chunks": 2, "microbatches": 2}),
]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.grid) for case in CASES[1:])], ids=str
)
def test_steps_equal_one_devices(case):
    """Three steps in float64: parameters and momentum; and another moment's decay gives others."""
    name, mesh, choices = case
    with jax.enable_x64(True):
        model, plan = model_of(name, dtypes=DOUBLE), plan_over(mesh, **choices)
        alone = stepped_alone(model, 3)
        (want, last), (got, loss) = alone(0.9), stepped(model, plan, rule(model), 3)
        assert loss == pytest.approx(last, rel=1e-11)
        for its in (lambda state: state.model, lambda state: state.optimizer_state.momentum):
            assert leaf_differences(plan.unshard(its(got)), its(want), 1e-10, rounding=1e-11) == {}
        other, _ = alone(0.8)
        assert leaf_differences(other.model, want.model, 1e-5, rounding=1e-11) != {}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_its_state_lies_where_the_plan_keeps_gradients(zero):
    model = model_of("llama")
    state = begun(model, plan_over({"fsdp": 2, "tensor": 2}, zero=zero, smallest=1), rule(model))
    held = lambda x: x.addressable_shards[0].data.size * 4 // x.size
    assert (held(momentum_of(state)), held(up_of(state))) == {0: (2, 2), 1: (1, 2), 2: (1, 2), 3: (1, 1)}[zero]
    # Of every array that is split over both axes there is a quarter, of all together a little more.
    memory = [x for x in jax.tree.leaves(state.optimizer_state) if isinstance(x, jax.Array)]
    share = sum(x.addressable_shards[0].data.size for x in memory) / sum(x.size for x in memory)
    assert len(memory) == len(jax.tree.leaves(training.trainable(model)))
    assert share < (0.52 if zero == 0 else 0.27)


WEIGHTS = {
    "llama": (lambda model: model.stacks[0].blocks.feed_forward.layer.up.weight, (4,)),
    "mixture": (lambda model: model.stacks[0].blocks.feed_forward.layer.experts.mlps.up.weight, (4, 8)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_is_the_formula(name):
    """A step of the own array of each layer, and of each expert, worked out by numpy."""
    model, (weight, ensemble) = model_of(name), WEIGHTS[name]
    moving, optimizer, draw = training.trainable(model), rule(model), np.random.default_rng(0)
    gradients, momentum = (
        jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape).astype(np.float32)), moving) for _ in range(2)
    )
    update = eqx.filter_jit(optimizer.update)
    moved, memory = update(gradients, beside("cautious").Momentum(momentum), moving, jnp.float32(0.1))
    after, remembered, stayed = np.asarray(weight(moved)), np.asarray(weight(memory.momentum)), set()
    for at in np.ndindex(*ensemble):
        gradient, before = np.asarray(weight(gradients))[at], np.asarray(weight(momentum))[at]
        direction = np.sign(0.9 * before + 0.1 * gradient)
        agrees = direction * gradient > 0
        expected = np.asarray(weight(model))[at] - 0.1 * direction * agrees / agrees.mean()
        np.testing.assert_allclose(after[at], expected, atol=1e-6)
        np.testing.assert_allclose(remembered[at], 0.99 * before + 0.01 * gradient, atol=1e-6)
        stayed.add(float(agrees.mean()))
    assert len(stayed) > 2  # a mean over all together would be another


@pytest.mark.grid  # the page's program does as much, but for one loss
def test_it_is_restored_under_another_mesh(tmp_path):
    """Bit by bit, and goes on as if it had been there from the start."""
    first = plan_over({"fsdp": 4, "tensor": 2}, zero=3, smallest=1)
    second = plan_over({"fsdp": 2, "pipe": 2}, zero=1, smallest=1, microbatches=2)
    with jax.enable_x64(True):
        model = model_of("llama", dtypes=DOUBLE)
        optimizer = rule(model)
        state, _ = stepped(model, first, optimizer, 2)
        with training.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state, 2, {})
            checkpointer.wait()
            again, _ = checkpointer.restore(begun(model, second, optimizer), 2)
        same = lambda one, other: np.array_equal(one, other) if isinstance(one, jax.Array) else True
        assert jax.tree.all(jax.tree.map(same, again, state))
        assert momentum_of(again).sharding == momentum_of(begun(model, second, optimizer)).sharding
        assert momentum_of(again).sharding != momentum_of(state).sharding
        _, loss = stepped(model, second, optimizer, 1, again)
        assert loss == pytest.approx(stepped(model, None, optimizer, 3)[1], rel=1e-11)
        assert loss != pytest.approx(stepped(model, second, optimizer, 1)[1], rel=1e-4)


@pytest.mark.quick
def test_a_state_of_another_shape_is_refused():
    """Such as the means over rows and columns of factored moments."""
    model = model_of("llama")
    factored = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape[:-1]), params),
        lambda updates, state, params=None: (updates, state),
    )
    optimizer = training.Optimizer(factored, training.constant(1e-3))
    with pytest.raises(ValueError, match=r"holds an array of shape \(48,\) for a parameter of shape \(48, 32\)"):
        begun(model, plan_over({"fsdp": 2}, zero=1), optimizer)
