"""Errors for wrong uses of a step: invalid targets, arrays of wrong shapes, and donated states used twice."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haste import put, same_trees
from nn_reference import random_module

from eqformer import Batch, nn, parallel, training
from eqformer.parallel import ParallelConfig
from eqformer.parallel._placement import check_values
from eqformer.training.losses import _cross_entropy
from eqformer.training.optimizer._optimizer import check_optimizer


VOCAB = 12


@pytest.fixture(scope="module")
def model():
    def build():
        return nn.Transformer(
            nn.Embedding(vocab=VOCAB, embed=8, key=jax.random.key(0)),
            (nn.Stack(lambda key: nn.Residual(nn.MLP(embed=8, mlp=8, key=key)), 1, key=jax.random.key(1)),),
            nn.RMSNorm("embed", embed=8),
        )

    return random_module(build)


def batch_with(**changed):
    """Four rows of six tokens, with some of their arrays changed."""
    ids = np.arange(24, dtype=np.int32).reshape(4, 6) % VOCAB
    batch = Batch(ids, (ids + 1) % VOCAB, np.ones((4, 6), np.float32), np.arange(4, dtype=np.int32))
    return dataclasses.replace(batch, **changed)


IGNORED = np.where(np.arange(6) < 2, -100, batch_with().targets).astype(np.int32)
LARGE = np.where(np.arange(6) < 2, VOCAB, batch_with().targets).astype(np.int32)
LEFT = np.where(np.arange(6) < 2, 0, batch_with().weights).astype(np.float32)


def under_tensor(model, batch):
    """The loss over two devices, each with half of the ids."""
    plan = parallel.Plan(parallel.make_mesh(tensor=2, devices=jax.devices()[:2]))
    outcome = eqx.filter_jit(training.make_gradient_function(training.next_token_loss, plan))(model, batch, None)
    return outcome[0] / outcome[1]


def alone(model, batch):
    """The loss on one device."""
    total, count = eqx.filter_jit(training.next_token_loss)(model, batch)
    return total / training.loss_count(count)


@pytest.mark.parametrize("loss", [alone, pytest.param(under_tensor, marks=pytest.mark.grid)], ids=["alone", "tensor"])
def test_a_target_that_is_no_id_has_no_loss_unless_it_weighs_nothing(model, loss):
    """Of -100, by which others leave tokens out, the loss was the normaliser alone, without a word."""
    wanted = loss(model, batch_with(weights=LEFT))
    for targets in (IGNORED, LARGE):
        assert np.isnan(loss(model, batch_with(targets=targets)))
        assert loss(model, batch_with(targets=targets, weights=LEFT)) == wanted
    assert np.isfinite(loss(model, batch_with()))


def test_rows_and_evaluations_leave_out_what_weighs_nothing(model):
    row_nats, evaluate = eqx.filter_jit(training.row_nats), eqx.filter_jit(training.evaluation_sums)
    for targets in (IGNORED, LARGE):
        batch = batch_with(targets=targets, weights=LEFT)
        wanted = batch_with(weights=LEFT)
        assert np.array_equal(row_nats(model, batch), row_nats(model, wanted))
        found, expected = (evaluate(model, each) for each in (batch, wanted))
        assert found == expected and np.isfinite(found["nats"])
        assert np.isnan(evaluate(model, batch_with(targets=targets))["nats"])


def test_gradients_do_not_see_what_weighs_nothing(model, monkeypatch):
    loss = lambda model, batch: training.next_token_loss(model, batch)[0]
    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    wanted, batch = gradient(model, batch_with(weights=LEFT)), batch_with(targets=IGNORED, weights=LEFT)
    assert same_trees(gradient(model, batch), wanted)
    monkeypatch.setattr(_cross_entropy, "apply_weights", lambda each, weights: each * weights)
    assert np.isnan(eqx.filter_jit(loss)(model, batch))


class Rows(nn.ChunkedUnembedding):
    """A table in three parts, of which the last is filled up."""

    weight: jax.Array

    def parts(self):
        """Five rows each."""
        filled = jnp.concatenate([self.weight, jnp.zeros((3, 8))]).reshape(3, 5, 8)
        return filled, jnp.where(jnp.arange(15) < VOCAB, jnp.arange(15), -1).reshape(3, 5)

    def of_part(self, trained, constants):
        """The part's table."""
        return Table(trained), constants

    def unembed(self, hidden):
        """Of all ids."""
        return hidden @ self.weight.T


class Table(nn.Module):
    """A part."""

    weight: jax.Array

    def unembed(self, hidden):
        """Of its ids."""
        return hidden @ self.weight.T


def test_a_table_in_parts_has_no_target_that_is_no_id(model):
    rows = Rows(model.embedding.weight)
    hidden = put(np.random.default_rng(2).normal(size=(4, 8)), np.float32)
    targets = put([0, VOCAB - 1, -100, VOCAB], np.int32)

    @eqx.filter_jit
    def both(rows, hidden):
        unembed = jax.tree_util.Partial(lambda table, hidden: table.unembed(hidden), rows)
        by_chunks, _ = _cross_entropy.vocabulary_chunk_nats(unembed, hidden, targets)
        return by_chunks, _cross_entropy.token_nats(rows.unembed(hidden), targets)[0]

    by_chunks, wanted = both(rows, hidden)
    np.testing.assert_allclose(by_chunks[:2], wanted[:2], rtol=1e-5)
    assert np.isnan(by_chunks[2:]).all() and np.isnan(wanted[2:]).all()


@pytest.mark.parametrize(
    "changed, rule",
    [
        ({"targets": IGNORED[:, :3]}, "Batch(targets of shape (4, 3)): with ids of shape (4, 6) it has shape (4, 6)"),
        ({"examples": np.arange(3, dtype=np.int32)}, "Batch(examples of shape (3,)): with ids of shape (4, 6) it has"),
        ({"examples": None}, "Batch(examples none)"),
        ({"ids": IGNORED[0]}, "Batch(ids of shape (6,)): it must have the dims (batch, seq), 2 of them"),
    ],
)
def test_arrays_that_do_not_fit_are_named(model, changed, rule):
    batch = batch_with()
    for name, value in changed.items():
        object.__setattr__(batch, name, value)  # what a program makes that checks no shapes
    with pytest.raises(ValueError, match=re.escape(rule)):
        training.batch_tokens(batch)
    training.batch_tokens(batch_with())


def test_a_state_is_given_to_one_step(model):
    optimizer = training.Optimizer(optax.sgd(1.0), training.constant(1e-2))
    step = training.make_step(training.next_token_loss, optimizer)
    state = training.init_state(jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model), optimizer)
    after, _ = step(state, batch_with())
    with pytest.raises(ValueError, match="an earlier step has already taken this state, and a step donates its state"):
        step(state, batch_with())
    step(after, batch_with())


def test_an_optax_transformation_alone_is_named():
    with pytest.raises(
        ValueError, match=r"call: .* a GradientTransformation.* training.Optimizer\(optax.adam\(1.0\), "
    ):
        check_optimizer(optax.adam(1e-3), "call")
    check_optimizer(training.Optimizer(optax.adam(1.0), training.constant(1e-3)), "call")


@pytest.mark.parametrize("value", [1.5, 0])
def test_pieces_are_counted_in_whole_numbers(value):
    choices = ParallelConfig()
    check_values(choices)
    object.__setattr__(choices, "microbatches", value)  # what a program makes that checks no types
    with pytest.raises(ValueError, match=rf"Plan\(microbatches={value}\): .* whole number of at least 1"):
        check_values(choices)
