"""The page's pipelined classifier: one device's gradients under every schedule, and its loss after 17 steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page import example

from eqformer.parallel import make_mesh, Plan


classifier = example("systems-classifier.md")
EMBED = 16
KEY = jax.random.key(1)


def plan(schedule):
    chunks = 2 if schedule in ("looping", "interleaved") else 1
    return Plan(make_mesh(replica=2, pipe=4), schedule=schedule, microbatches=8, chunks=chunks)


@pytest.fixture(scope="module")
def model():
    return eqx.filter_jit(classifier.Classifier)(EMBED, key=jax.random.key(0))


@pytest.fixture(scope="module")
def gradients(model):
    """Loss and gradients of the same model written once more, in plain JAX without modules but dropout's keys."""
    rows = classifier.with_tokens(classifier.make_batch(), KEY)

    def plain(model):
        x = (jnp.asarray(rows["x"]) @ model.enter.weight.T + model.enter.bias)[:, 0]

        def layer(x, given):
            place, block = given
            centred = x - x.mean(-1, keepdims=True)
            normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            hidden = (normed * block.norm.weight + block.norm.bias) @ block.up.weight.T + block.up.bias
            keys = rows["tokens"].fold_in(place).keys[:, 0]
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (EMBED,)))(keys)
            hidden = hidden / (1 + jnp.exp(-hidden)) * keep.astype(hidden.dtype) / 0.9
            return x + hidden @ block.down.weight.T + block.down.bias, None

        x, _ = jax.lax.scan(layer, x, (jnp.arange(classifier.LAYERS), model.stack.blocks))
        centred = x - x.mean(-1, keepdims=True)
        x = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * model.norm.weight + model.norm.bias
        logits = x @ model.leave.weight.T + model.leave.bias
        return -jnp.sum(jax.nn.log_softmax(logits)[np.arange(len(x)), rows["labels"][:, 0]])

    return eqx.filter_jit(eqx.filter_value_and_grad(plain))(model)


def distance(ours, theirs):
    """The largest relative distance of any array's gradient, and of the loss."""
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)) for tree in (ours, theirs)]
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in zip(*arrays, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["looping", "gpipe", "1f1b"])
def test_a_schedule_gives_the_gradients_of_plain_jax(schedule, model, gradients):
    over = plan(schedule)
    run, sharded = eqx.filter_jit(classifier.pipelined_gradients(over)), over.shard(model)
    total, count, sharded_gradients = run(sharded, classifier.make_batch(), KEY)
    assert float(count) == classifier.ROWS
    assert distance((total, over.unshard(sharded_gradients)), gradients) < 2e-5
    of_other_masks = run(sharded, classifier.make_batch(), jax.random.key(2))[2]
    assert distance((total, over.unshard(of_other_masks)), gradients) > 0.01  # other masks


@pytest.mark.grid
@pytest.mark.parametrize("way", ["plain", "gpipe", "looping", "1f1b", "accumulated", "bfloat16", "remat"])
def test_seventeen_steps_learn_the_batch(way):
    options = {"accumulated": {"microbatches": 4}, "bfloat16": {"dtype": "bfloat16"}, "remat": {"remat": "full"}}
    options |= {"plain": {}} | {name: {"plan": plan(name)} for name in ("gpipe", "looping", "1f1b")}
    trained, losses = classifier.train(**options[way])
    reached = classifier.evaluate(trained, make_mesh(replica=2, pipe=4))
    print(way, losses[-1], reached)
    assert reached["accuracy"] == 1.0 and reached["loss"] < losses[-1]
    assert losses[-1] == pytest.approx(0.000153, rel=0.2 if way == "bfloat16" else 0.01)
