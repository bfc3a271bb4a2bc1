"""A stack of residual feed-forward layers trained by hand with `filter_shard_map`: the losses of one device.

The layouts split rows, hidden features, or both, or accumulate gradients over parts of a batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import filter_shard_map, Layout, make_mesh, partition_specs, vary


class FeedForwards(eqx.Module):
    """`x + W2 relu(W1 x)`, some times over; `reduce` makes the sum of what devices have of the second map."""

    layers: tuple[nn.MLP, ...]
    reduce: Callable[..., Any] = eqx.field(static=True, default=lambda x: x)

    def __call__(self, x):
        """Apply the layers in turn."""
        for layer in self.layers:
            x = x + self.reduce(layer(x))
        return x


EMBED, HIDDEN, STEPS, RATE = 8, 32, 5, 0.05


@pytest.fixture(scope="module")
def stack():
    make = lambda key: nn.MLP(embed=EMBED, mlp=HIDDEN, activation=jax.nn.relu, key=key)
    return FeedForwards(tuple(map(make, jax.random.split(jax.random.key(0), 3))))


@pytest.fixture(scope="module")
def samples():
    draw = np.random.default_rng(2)
    x = draw.normal(size=(STEPS, 16, EMBED))
    return jnp.float32(x), jnp.float32(np.sin(x @ draw.normal(size=(EMBED, EMBED))))


@pytest.fixture(scope="module")
def one_device_losses(stack, samples):
    """SGD in float64 numpy: forwards, backwards and steps written out."""
    weights = [[np.asarray(m.weight, np.float64) for m in (layer.up, layer.down)] for layer in stack.layers]
    losses = []
    for x, y in zip(*(np.asarray(part, np.float64) for part in samples)):
        inputs, hidden = [x], []
        for up, down in weights:
            hidden.append(np.maximum(inputs[-1] @ up.T, 0))
            inputs.append(inputs[-1] + hidden[-1] @ down.T)
        losses.append(np.mean((inputs[-1] - y) ** 2))
        gradient = 2 * (inputs[-1] - y) / y.size
        for (up, down), x, h in zip(weights[::-1], inputs[-2::-1], hidden[::-1]):
            to_hidden = (gradient @ down) * (h > 0)
            to_input = gradient + to_hidden @ up
            down -= RATE * gradient.T @ h
            up -= RATE * to_hidden.T @ x
            gradient = to_input
    return np.array(losses)


@dataclasses.dataclass(frozen=True)
class Way:
    """How to train: a mesh, whether rows and hidden features are split, and in how many parts a batch is taken."""

    mesh: dict[str, Any]
    microbatches: int = 1
    reduce: bool = True
    average: bool = True


WAYS = {
    "data": Way(dict(replica=8)),
    "columns then rows": Way(dict(tensor=8)),
    "hybrid": Way(dict(replica=2, tensor=4)),
    "accumulated": Way(dict(replica=4, tensor=2), microbatches=2),
}


def train(way, stack, samples):
    """Losses of some steps of SGD, all of them inside one mapped function."""
    reduce = (lambda x: jax.lax.psum(x, "tensor")) if way.reduce else (lambda x: x)
    layout = Layout({"mlp": "tensor"})
    specs = partition_specs(stack, layout, make_mesh(**way.mesh))

    def loss(stack, x, y):
        return jnp.mean(jnp.square(dataclasses.replace(stack, reduce=reduce)(x) - y))

    def step(stack, batch):
        parts = jax.tree.map(lambda x: x.reshape(way.microbatches, -1, EMBED), batch)
        local = vary(stack, ["replica"])  # gradients stay a device's own until they are averaged, once a step

        def add(total, part):
            value, gradients = jax.value_and_grad(loss)(local, *part)
            return jax.tree.map(jnp.add, total, (value, gradients)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.sum(parts[0]) * 0, local))
        total = jax.lax.scan(add, zeros, parts)[0]
        mean = jax.tree.map(lambda x: x / way.microbatches, total)
        if way.average:
            value, gradients = jax.lax.pmean(mean, "replica")
        else:
            value, gradients = jax.lax.pmean(mean[0], "replica"), mean[1]
        stack = jax.tree.map(lambda x, gradient: x - RATE * gradient, stack, gradients)
        return stack, value

    def run(stack, samples):
        return jax.lax.scan(step, stack if way.average else vary(stack, ["replica"]), samples)[1]

    samples_spec = P(None, "replica")
    return eqx.filter_jit(filter_shard_map(run, make_mesh(**way.mesh), (specs, samples_spec), P()))(stack, samples)


@pytest.mark.by_default("hybrid", "accumulated")
@pytest.mark.parametrize("name", WAYS)
def test_feed_forwards_train_to_the_losses_of_one_device(name, stack, samples, one_device_losses):
    losses = train(WAYS[name], stack, samples)
    np.testing.assert_allclose(losses, one_device_losses, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_gradients_that_are_not_averaged_are_seen(stack, samples, one_device_losses):
    losses = train(dataclasses.replace(WAYS["data"], average=False), stack, samples)
    assert abs(losses[0] / one_device_losses[0] - 1) < 1e-5  # the first step sees nothing
    assert abs(losses[-1] / one_device_losses[-1] - 1) > 1e-3


def test_a_product_that_is_not_reduced_is_refused(stack, samples):
    with pytest.raises((ValueError, TypeError), match="tensor"):
        train(dataclasses.replace(WAYS["hybrid"], reduce=False), stack, samples)
