"""The origin of non-finite numbers: the module, the layer, the operation and the step."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from eqformer import Batch, nn, parallel, training
from eqformer.training import _debug_nans


class Growing(nn.Module):
    """`exp(factor x)` behind a mask of its own, whose minus infinities are meant."""

    factor: Float[Array, "_"]
    floor: Float[Array, "_"]

    def __call__(self, x):
        weights = jax.nn.softmax(jnp.where(jnp.arange(x.shape[-1]) < 3, x, -jnp.inf))
        return weights * jnp.exp(self.factor * x) + jnp.sqrt(self.floor)


@eqx.filter_jit
def build(layers=3):
    key = jax.random.key(0)
    sublayer = lambda key: nn.Residual(Growing(jnp.ones(1), jnp.ones(1)), scale=0.1)
    stack = nn.Stack(sublayer, layers, key=key)
    norm = nn.RMSNorm("embed", embed=4)
    return nn.with_execution(nn.Transformer(nn.Embedding(vocab=8, embed=4, key=key), (stack,), norm), remat="full")


def at_layer(name, value, layer=1):
    leaf = lambda m: getattr(m.stacks[0].blocks.layer, name)
    return eqx.tree_at(leaf, build(), leaf(build()).at[layer].set(value))


def batch_of(number, rows=4):
    ids = np.random.default_rng(number).integers(0, 8, (rows, 5)).astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.ones((rows, 4), np.float32), np.arange(rows, dtype=np.int32))


def found(model, batch=None, **options) -> training.NonFinite:
    batch = batch_of(0) if batch is None else batch
    where = training.first_non_finite(training.next_token_loss, model, batch, **options)
    assert where is not None
    return where


def test_the_module_the_layer_and_the_line_are_named():
    # The control: the mask's infinities reach nothing.
    assert training.first_non_finite(training.next_token_loss, build(), batch_of(0)) is None
    where = found(at_layer("factor", 1e5))
    assert (where.kind, where.module, where.layer) == ("infinity", "stacks[0].blocks.layer", 1)
    assert (where.operation, where.is_backward) == ("exp", False)
    assert "test_debug_nans.py" in where.source and "Growing" in where.source
    assert str(where).startswith("infinity from `exp` in the forward pass of stacks[0].blocks.layer, layer 1 (")
    # Of the first layer if of two, and with microbatches, of as many rows: what was compiled above is used again.
    twice = {"batch": batch_of(0, rows=8), "microbatches": 2}
    both = eqx.tree_at(lambda m: m.stacks[0].blocks.layer.factor, build(), jnp.full((3, 1), 1e5))
    assert found(both, **twice) == found(at_layer("factor", 1e5, layer=0), **twice)


def test_a_gradient_alone_and_a_planted_leaf_are_named():
    where = found(at_layer("floor", 0.0))  # of which the square root has a value, and no derivative
    assert (where.module, where.layer, where.is_backward) == ("stacks[0].blocks.layer", 1, True)
    where = found(at_layer("factor", jnp.nan, layer=2))
    assert (where.kind, where.module, where.layer) == ("NaN", "stacks[0].blocks.layer.factor", 2)
    assert str(where) == "NaN in stacks[0].blocks.layer.factor, layer 2"
    weights = batch_of(0).weights.copy()
    weights[1, 2] = np.inf
    where = found(build(), eqx.tree_at(lambda b: b.weights, batch_of(0), weights))
    assert where.module == "the batch's weights"


@pytest.mark.grid
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}])
def test_a_run_ends_at_its_first_such_step(axes):
    plan = parallel.Plan(parallel.make_mesh(**axes, devices=jax.devices()[: 4 if axes else 1]), microbatches=2)
    optimizer = training.optimizer("sgd", build(), rate=1e-3)
    table, large = lambda m: m.embedding.weight, lambda x: x.at[7].set(2.0)
    first = lambda: eqx.tree_at(table, at_layer("factor", 50.0, 2), replace_fn=large)
    states = training.PlannedState(first, optimizer, plan)
    step = training.make_step(training.next_token_loss, optimizer, plan)
    quiet, loud = batch_of(1), batch_of(2)
    quiet = eqx.tree_at(lambda b: b.ids, quiet, np.zeros_like(quiet.ids))
    key = states.replicate(jax.random.key(0))

    def train(*callbacks, steps=4):
        return training.train(step, states.init(), [quiet, quiet, loud, quiet], key, steps=steps, callbacks=callbacks)

    debug = training.DebugNans(training.next_token_loss, key, microbatches=2, states=states)
    named = r"^step 3: .* `exp` .* stacks\[0\].blocks.layer, layer 2 .* unchanged since step 2"
    with pytest.raises(training.DivergedError, match=named):
        train(debug)
    assert train(debug, steps=2).step == 2
    if not axes:
        run = train()  # the control: without it the step is skipped, and the run goes on
        assert int(run.state.skipped) == 1 and run.step == 4


@pytest.mark.quick
def test_a_batch_without_weights_is_passed_over():
    optimizer = training.optimizer("sgd", [jnp.ones(1)], rate=1e-3, matrices=[None])
    loss = lambda model, batch, key: (jnp.sum(model[0] * batch), jnp.sum(batch))
    debug = training.DebugNans(loss, None)
    run = training.train(
        training.make_step(loss, optimizer),
        training.init_state([jnp.ones(1)], optimizer),
        [jnp.zeros(3)] * 12,
        steps=12,
        callbacks=[debug],
    )
    assert (int(run.metrics["empty_batches"]), int(run.metrics["skipped"])) == (12, 0)


def test_an_id_that_the_model_does_not_know_is_named_with_its_place():
    """Of the batch, where its weight is not 0, before the program is looked through."""
    batch = batch_of(0)
    assert _debug_nans._explain_unknown_id(batch, build()) == ""
    for name, value in (("ids", 8), ("targets", -100)):
        changed = np.array(getattr(batch, name))
        changed[2, 1] = value
        strange = dataclasses.replace(batch, **{name: changed})
        message = f"The batch's {name} hold {value} in row 2 at index 1, and the model's 8 ids are 0 to 7"
        assert _debug_nans._explain_unknown_id(strange, build()).startswith(message)
        weights = np.array(batch.weights)
        weights[2, 1] = 0
        known = _debug_nans._explain_unknown_id(dataclasses.replace(strange, weights=weights), build()) == ""
        assert known == (name == "targets")  # an id is read whatever its target weighs
