"""The chunked loss against all logits at once in float64, and its residuals in memory."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from eqformer import nn, training


TOKENS, VOCAB, EMBED = (3, 7), 11, 5


@pytest.fixture
def data():
    draw = np.random.default_rng(0)
    arrays = dict(
        table=draw.normal(size=(VOCAB, EMBED)).astype(np.float32),
        bias=draw.normal(size=VOCAB).astype(np.float32),
        hidden=draw.normal(size=(*TOKENS, EMBED)).astype(np.float32),
        targets=draw.integers(0, VOCAB, TOKENS).astype(np.int32),
        weights=draw.uniform(size=TOKENS).astype(np.float32) * draw.integers(0, 2, TOKENS).astype(np.float32),
    )
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def by_hand(table, bias, hidden, targets, weights, z_loss, cap=4.0):
    """Sum and its gradients in float64, from the formulas; logits pass `cap * tanh(. / cap)`."""
    table, bias, hidden, weights = (np.asarray(x, np.float64) for x in (table, bias, hidden, weights))
    hidden, targets, weights = hidden.reshape(-1, EMBED), targets.reshape(-1), weights.reshape(-1)
    bounded = np.tanh((hidden @ table.T + bias) / cap)
    logits = cap * bounded
    log_z = np.log(np.exp(logits).sum(-1))
    total = (weights * (log_z - logits[np.arange(len(targets)), targets] + z_loss * log_z**2)).sum()
    of_logits = np.exp(logits - log_z[:, None]) * (1 + 2 * z_loss * log_z)[:, None]
    of_logits[np.arange(len(targets)), targets] -= 1
    of_raw = weights[:, None] * of_logits * (1 - bounded**2)
    return total, (of_raw.T @ hidden, of_raw.sum(0), (of_raw @ table).reshape(*TOKENS, EMBED))


def chunked(table, bias, hidden, targets, weights, chunk, z_loss, cap=4.0):
    def unembed(x):
        return cap * jnp.tanh((x @ table.T + bias) / cap)

    return training.cross_entropy(unembed, hidden, targets, weights, chunk=chunk, z_loss=z_loss)


@pytest.mark.by_default("0.1-None", "0.1-8", "0.0-8")
@pytest.mark.parametrize(
    "z_loss,chunk",
    [*((0.1, chunk) for chunk in (None, 21, 8, 1)), *((0.0, chunk) for chunk in (8, None, 21, 1))],
)
def test_sum_and_gradients_are_the_formulas(data, chunk, z_loss):
    arguments = tuple(data.values())
    total, gradients = by_hand(**data, z_loss=z_loss)
    evaluate = jax.jit(jax.value_and_grad(partial(chunked, chunk=chunk, z_loss=z_loss), (0, 1, 2), has_aux=True))
    (found, count), found_gradients = evaluate(*arguments)
    np.testing.assert_allclose(found, total, rtol=1e-5)
    np.testing.assert_allclose(count, data["weights"].sum(), rtol=1e-6)
    for one, other in zip(found_gradients, gradients):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    alone = jax.jit(partial(chunked, chunk=chunk, z_loss=z_loss))  # without gradients it is another program
    np.testing.assert_allclose(alone(*arguments)[0], found, rtol=1e-6)


def test_float64_stays_float64(data):
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for name, x in data.items()}
        arguments = tuple(wide.values())
        evaluate = jax.value_and_grad(partial(chunked, chunk=8, z_loss=0.1), (0, 1, 2), has_aux=True)
        (found, count), found_gradients = jax.jit(evaluate)(*arguments)
        total, gradients = by_hand(**data, z_loss=0.1)
        assert found.dtype == count.dtype == jnp.float64
        np.testing.assert_allclose(found, total, rtol=1e-13)
        for one, other in zip(found_gradients, gradients):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def test_the_comparison_can_fail(data):
    total, gradients = by_hand(**data, z_loss=0.1)
    other_total, other_gradients = by_hand(**data, z_loss=0.0)
    assert abs(total - other_total) > 1e-2 and np.abs(gradients[0] - other_gradients[0]).max() > 1e-2
    shifted = data | {"targets": jnp.roll(data["targets"], 1)}
    assert abs(by_hand(**shifted, z_loss=0.0)[0] - other_total) > 1e-2


def test_a_cotangent_scales_all_gradients_and_dtypes_stay(data):
    def half(table, hidden):
        return 0.5 * training.cross_entropy(lambda x: x @ table.T, hidden, data["targets"], data["weights"], chunk=4)[
            0
        ].astype(jnp.float32)

    def whole(table, hidden):
        return 2 * half(table, hidden)

    narrow = jnp.bfloat16(data["table"]), jnp.bfloat16(data["hidden"])
    one, two = (jax.jit(jax.grad(loss, (0, 1)))(*narrow) for loss in (half, whole))
    assert [x.dtype for x in one] == [jnp.bfloat16] * 2
    for small, large in zip(one, two):
        np.testing.assert_array_equal(np.float32(large), 2 * np.float32(small))
    assert half(*narrow).dtype == jnp.float32


def test_all_logits_never_exist_at_once():
    tokens, vocab, embed, chunk = 512, 1024, 8, 32
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((vocab, embed), (tokens, embed), (tokens,))]
    targets = jnp.zeros(tokens, jnp.int32)

    def temporary(chunk):
        def loss(table, hidden, weights):
            return training.cross_entropy(lambda x: x @ table.T, hidden, targets, weights, chunk=chunk)[0]

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    all_logits = tokens * vocab * 4
    assert temporary(chunk) < 0.25 * all_logits
    assert temporary(tokens) >= all_logits  # the control: one chunk of everything


def test_token_loss_of_a_model_is_the_mean_over_plain_logits(make_model, make_batch):
    batch = make_batch()
    model = make_model(tied=False, layers=1)

    def plain(model):
        logits, _ = model(jnp.asarray(batch.ids), nn.Tokens(jnp.asarray(batch.positions), jnp.asarray(batch.segments)))
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.targets)[..., None], -1)[..., 0]
        first = jnp.argmax(logits, -1) == batch.targets
        return jnp.sum(each * batch.weights), jnp.sum(jnp.where(first, batch.weights, 0.0))

    (total, count), gradients = eqx.filter_jit(
        eqx.filter_value_and_grad(partial(training.next_token_loss, chunk=20), has_aux=True)
    )(model, batch)
    (expected, correct), expected_gradients = eqx.filter_jit(eqx.filter_value_and_grad(plain, has_aux=True))(model)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert count == batch.weights.sum()
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    sums = eqx.filter_jit(partial(training.evaluation_sums, chunk=20))(model, batch)
    np.testing.assert_allclose(sums["nats"], expected, rtol=1e-6)
    assert sums["correct"] == correct and sums["count"] == count


def test_tied_table_collects_both_gradients(make_model, make_batch):
    batch, model = make_batch(), make_model(tied=True, layers=1)
    loss = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: training.next_token_loss(m, batch, chunk=16)[0]))
    gradients = loss(model)[1]
    step = 2e-3
    direction = jax.random.normal(jax.random.key(1), model.embedding.weight.shape)

    def moved(by):
        there = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight + by * direction)
        return loss(there)[0]

    slope = (moved(step) - moved(-step)) / (2 * step)
    np.testing.assert_allclose(jnp.sum(gradients.embedding.weight * direction), slope, rtol=2e-2)


def test_keys_differ_within_a_row_and_follow_the_example(make_batch, key):
    batch = make_batch(rows=4)

    def key_data(batch):
        keys = training.batch_tokens(batch, key).keys
        assert keys is not None
        return jax.random.key_data(keys)

    data = key_data(batch)
    assert len(np.unique(data.reshape(-1, data.shape[-1]), axis=0)) == batch.ids.size
    assert len(np.unique(batch.positions)) < batch.ids.shape[1]  # the control: positions alone would repeat keys
    other = eqx.tree_at(lambda b: b.examples, batch, batch.examples[::-1].copy())
    np.testing.assert_array_equal(key_data(other), data[::-1])
    assert training.batch_tokens(batch).keys is None


def test_rows_split_over_devices_give_the_same_sum_and_gradients(data):
    devices = jax.make_mesh((3,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    rows, whole = PartitionSpec("rows"), PartitionSpec()

    def loss(table, hidden, targets, weights, reduce=True, closed_over=False):
        unembed = (lambda x: x @ table.T) if closed_over else jax.tree_util.Partial(lambda t, x: x @ t.T, table)
        total, count = training.cross_entropy(unembed, hidden, targets, weights, chunk=3)
        return jax.lax.psum((total, count), "rows") if reduce else (total, count)

    entry = partial(jax.shard_map, mesh=devices, in_specs=(whole, rows, rows, rows), out_specs=(whole, whole))
    split = entry(loss)
    arguments = [data[name] for name in ("table", "hidden", "targets", "weights")]
    (total, count), gradients = jax.jit(jax.value_and_grad(split, (0, 1), has_aux=True))(*arguments)
    alone = jax.jit(jax.value_and_grad(partial(loss, reduce=False), (0, 1), has_aux=True))
    (expected, expected_count), expected_gradients = alone(*arguments)
    np.testing.assert_allclose([total, count], [expected, expected_count], rtol=1e-6)
    for one, other in zip(gradients, expected_gradients):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="same axes as hidden"):
        jax.grad(lambda *a: entry(partial(loss, closed_over=True))(*a)[0])(*arguments)


def test_a_chunk_of_no_tokens_is_refused(data):
    with pytest.raises(ValueError, match="chunk=0"):
        chunked(**data, chunk=0, z_loss=0.0)


def test_what_is_no_batch_is_refused_where_shapes_are_not_checked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    ids = np.zeros((2, 4), np.int32)
    wrongs: list[Any] = [ids, {"ids": ids}, (ids, ids)]
    for wrong in wrongs:
        with pytest.raises(
            ValueError,
            match=f"{type(wrong).__name__}.*must be of the class Batch.* Batch\\(ids, targets, weights, examples",
        ):
            training.batch_tokens(wrong)
