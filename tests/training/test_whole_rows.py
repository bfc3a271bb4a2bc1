"""Rows without document boundaries are recognized before compilation: kernels get a rule instead of a mask array."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from nn_reference import random_module

from eqformer import Batch, kernels, nn, parallel, training
from eqformer.training import batch_tokens


ROWS, SEQ, VOCAB = 4, 24, 37  # no other dim is 24


def batch(**packed):
    text = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    weights, examples = np.ones((ROWS, SEQ), np.float32), np.arange(ROWS, dtype=np.int32)
    return Batch(text[:, :-1], text[:, 1:], weights, examples, **packed)


def packed():
    return batch(positions=np.tile(np.arange(SEQ, dtype=np.int32), (ROWS, 1)), segments=np.zeros((ROWS, SEQ), np.int32))


def model():
    def block(key):
        one, two = jax.random.split(key)
        given = {"embed": 8, "heads": 2, "head_dim": 4, "core": kernels.DotProductAttention(), "key": one}
        norm = nn.RMSNorm("embed", embed=8)
        return nn.Block(
            nn.Residual(nn.Attention(**given), norm), nn.Residual(nn.GatedMLP(embed=8, mlp=12, key=two), norm)
        )

    table, stack = jax.random.split(jax.random.key(0))
    embedding = nn.Embedding(vocab=VOCAB, embed=8, key=table)
    return nn.Transformer(embedding, (nn.Stack(block, 2, key=stack),), nn.RMSNorm("embed", embed=8))


@pytest.fixture
def calls(monkeypatch):
    """What the kernel is given; in its place stands something with no matrix of scores of its own."""
    seen = []

    def kernel(query, key, value, *, scale, implementation, **rules):
        seen.append({name: x.shape if name == "mask" else x for name, x in rules.items()})
        return query + key * scale + value

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    return seen


def square_arrays(program):
    """Arrays of a program, those of its parts included, that have two dims of a row's length."""
    found = []
    for equation in program.eqns:
        shapes = [getattr(variable.aval, "shape", ()) for variable in equation.outvars]
        found += [shape for shape in shapes if shape.count(SEQ) > 1]
        for part in jaxprs_in_params(equation.params):
            found += square_arrays(part)
    return found


def program_of(given):
    shapes = eqx.filter_eval_shape(model)
    arrays, rest = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    gradients = training.make_gradient_function(training.next_token_loss)
    run = lambda arrays, batch, key: gradients(eqx.combine(arrays, rest), batch, key)
    return jax.make_jaxpr(run)(arrays, given, jax.random.key(0)).jaxpr


def test_a_step_over_windows_gives_the_kernel_a_rule_and_has_no_mask(calls):
    assert not square_arrays(program_of(batch()))
    assert calls and all(rules == {"is_causal": True} for rules in calls)


def test_packed_rows_are_masked(calls):
    """The control: that segments are all the same is known too late."""
    assert square_arrays(program_of(packed()))
    assert calls and all(rules == {"mask": (ROWS, 1, SEQ, SEQ)} for rules in calls)


@pytest.mark.by_default("mesh1-heads")
@pytest.mark.parametrize(("mesh", "method"), [({"replica": 2, "tensor": 2}, "ring"), ({"context": 2}, "heads")])
def test_whole_rows_stay_known_over_devices(calls, mesh, method):
    count = int(np.prod(list(mesh.values())))
    plan = parallel.Plan(parallel.make_mesh(**mesh, devices=jax.devices()[:count]), context_method=method)
    run = training.make_gradient_function(training.next_token_loss, plan)
    eqx.filter_eval_shape(run, eqx.filter_eval_shape(model), batch(), jax.random.key(0))
    assert calls and all(rules == {"is_causal": True} for rules in calls)


def test_rows_in_another_order_are_no_longer_whole():
    plan = parallel.Plan(parallel.make_mesh(context=2, devices=jax.devices()[:2]), context_method="gather")
    given = batch()
    assert batch_tokens(given).are_whole_rows
    _, tokens = plan.arrange(given, batch_tokens(given))
    assert not tokens.are_whole_rows and np.all(tokens.lengths == SEQ)


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "method"), [({"fsdp": 2, "tensor": 2}, "ring"), ({"context": 2, "pipe": 2}, "heads")])
def test_packed_documents_stay_known_over_devices(monkeypatch, mesh, method):
    seen, choose = [], kernels.Op.choose

    def noting(op: kernels.Op, call: kernels.AttentionCall) -> kernels.Choice:
        seen.append(None if call.unknown_rows else call)
        return choose(op, call)

    monkeypatch.setattr(kernels.Op, "choose", noting)
    plan = parallel.Plan(parallel.make_mesh(**mesh, devices=jax.devices()[:4]), context_method=method)
    run = training.make_gradient_function(training.next_token_loss, plan)
    auto = eqx.filter_eval_shape(lambda: nn.with_execution(model(), core=kernels.ATTENTION))
    given = dataclasses.replace(packed(), documents=3)
    eqx.filter_eval_shape(run, auto, given, jax.random.key(0))
    assert seen and {rows and rows.documents for rows in seen} == {3}
    seen.clear()
    eqx.filter_eval_shape(run, auto, packed(), jax.random.key(0))  # nobody says that they stand in order
    assert seen and {*seen} == {None}
    with pytest.raises(ValueError, match="documents=3.*give segments"):
        dataclasses.replace(batch(), documents=3)


def test_windows_give_the_loss_of_one_segment():
    run = eqx.filter_jit(lambda model, given: training.next_token_loss(model, given)[0])
    built = random_module(model)
    assert np.isclose(run(built, batch()), run(built, packed()), rtol=1e-6)
    positions = jnp.asarray(packed().positions)
    two = batch(positions=positions % 12, segments=positions // 12)
    assert not np.isclose(run(built, two), run(built, packed()), rtol=1e-4)


def test_segments_need_positions():
    with pytest.raises(ValueError, match="packed rows need both"):
        batch(segments=np.zeros((ROWS, SEQ), np.int32))
