"""Embedding, tied unembedding, learned positions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, wide

from eqformer import nn


KEY = jax.random.key(0)


def test_lookup_and_scale():
    table = nn.Embedding(vocab=7, embed=3, key=KEY)
    ids = jnp.array([[0, 6, 3], [3, 3, 1]])
    assert np.array_equal(table(ids), np.asarray(table.weight)[np.asarray(ids)])
    scaled = nn.Embedding(vocab=7, embed=3, scale=1.75, key=KEY)
    assert np.array_equal(scaled(ids), 1.75 * np.asarray(table(ids)))
    assert np.array_equal(table(ids[0, 1:]), table(ids)[0, 1:])


def test_an_id_outside_the_table_is_nan_and_never_a_neighbour():
    table = nn.Embedding(vocab=7, embed=3, key=KEY)
    nan = np.isnan(table(jnp.array([-1, -7, -8, 7, 1000, 0, 6]))).all(axis=1)
    assert nan.tolist() == [True, True, True, True, True, False, False]


def test_initial_deviation():
    weight = nn.Embedding(vocab=200, embed=64, std=0.3, key=KEY).weight
    assert abs(float(jnp.std(weight)) / 0.3 - 1) < 0.03


def test_gradient_adds_up_repeated_ids():
    table = nn.Embedding(vocab=4, embed=2, scale=2.0, key=KEY)
    weights = normal(1, 3, 2)
    gradient = eqx.filter_grad(lambda t: jnp.sum(t(jnp.array([1, 3, 1])) * weights))(table).weight
    expected = np.zeros((4, 2))
    for row, id in enumerate((1, 3, 1)):
        expected[id] += 2 * wide(weights)[row]
    assert close(gradient, expected)


def test_unembed_is_the_table_transposed_and_the_scale_is_for_lookup_only():
    table = nn.Embedding(vocab=7, embed=3, scale=5.0, key=KEY)
    x = normal(1, 2, 4, 3)
    assert close(table.unembed(x), wide(x) @ wide(table.weight).T)


def test_unembed_of_bfloat16_adds_up_in_float32():
    """256 + 1 + 1 + ... is stuck at 256 in a bfloat16 sum; the products themselves are exact."""
    table = eqx.tree_at(lambda t: t.weight, nn.Embedding(vocab=2, embed=257, key=KEY), jnp.ones((2, 257)))
    x = jnp.ones((1, 257), jnp.bfloat16).at[0, 0].set(256)
    logits = table.unembed(x)
    assert logits.dtype == jnp.float32 and logits.tolist() == [[512.0, 512.0]]
    assert logits.astype(jnp.bfloat16).dtype != logits.dtype
    halves = eqx.tree_at(lambda t: t.weight, table, jnp.full((2, 257), 1 + 2**-7))
    logits = halves.unembed(jnp.ones((1, 257), jnp.bfloat16))
    assert logits.tolist() == [[257 * (1 + 2**-7)] * 2]  # not a bfloat16 number: the sum was not rounded either
    assert float(logits.astype(jnp.bfloat16)[0, 0]) != logits[0, 0]


def test_learned_positions():
    table = nn.LearnedPositions(max_seq=4, embed=2, key=KEY)
    found = table(jnp.array([[3, 0, -1], [2, 4, 1]]))
    weight = np.asarray(table.weight)
    assert np.array_equal(found[0], weight[[3, 0, 0]])
    assert np.array_equal(found[1, ::2], weight[[2, 1]]) and np.isnan(found[1, 1]).all()


def test_ids_must_be_integers_and_vectors_of_the_tables_size():
    table = nn.Embedding(vocab=7, embed=3, key=KEY)
    with pytest.raises(ValueError, match=r"Embedding\(ids of float32 .* must hold integers"):
        table(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"Embedding.unembed\(x of int32 .* must hold floats"):
        nn.Embedding.unembed(table, jnp.ones(3, jnp.int32))
