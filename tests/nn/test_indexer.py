"""What an indexer chooses, against loops in float64, and that it is trained by nothing here."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import drawn, linear, normal, rotate, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, Q_LATENT, SEQ = 6, 5, 7
PLACES = np.tile(np.arange(SEQ, dtype=np.int32), (2, 1))


def make(top_k, **more):
    sizes = dict(embed=EMBED, q_latent=Q_LATENT, heads=5, dim=4, top_k=top_k, **more)
    return drawn(nn.Indexer, **sizes, rotary=nn.Rotary(2, 100.0), key=KEY)


def literal(indexer, x, latent, top_k):
    """Equation 1 of DeepSeek-V3.2, and each query's best keys of those up to its own."""
    turns = np.array([1.0])
    keys = linear(x, indexer.key)
    keys = (keys - keys.mean(-1, keepdims=True)) / np.sqrt(keys.var(-1, keepdims=True) + 1e-6)
    keys = keys * wide(indexer.key_norm.weight) + wide(indexer.key_norm.bias)
    keys = rotate(keys[:, :, None], PLACES, turns)[:, :, 0]
    queries, weights = rotate(linear(latent, indexer.query), PLACES, turns), linear(x, indexer.weight)
    chosen = np.zeros((2, SEQ, SEQ), bool)
    for row, at in np.ndindex(2, SEQ):
        scores = [weights[row, at] @ np.maximum(queries[row, at] @ keys[row, s], 0) for s in range(at + 1)]
        chosen[row, at, np.argsort(scores)[::-1][:top_k]] = True
    return chosen


@pytest.mark.parametrize("top_k", [3, SEQ])
def test_each_query_sees_its_best_keys(top_k):
    indexer, x, latent = make(top_k), normal(1, 2, SEQ, EMBED), normal(2, 2, SEQ, Q_LATENT)
    tokens = nn.Tokens(jnp.asarray(PLACES))

    def choose(indexer, x):
        return indexer(indexer.asking(x, latent, tokens), indexer.keys(x, tokens), nn.causal()(tokens, tokens))

    found = np.asarray(eqx.filter_jit(choose)(indexer, x))
    assert np.array_equal(found, literal(indexer, wide(x), wide(latent), top_k))
    assert not np.array_equal(found, literal(indexer, wide(x), wide(latent), top_k - 1))


def test_an_attention_sees_chosen_keys_alone():
    """Up to so many keys it is dense; beyond, what was not chosen has no part, and the indexer no gradient."""
    rotary, x = nn.Rotary(2, 100.0), normal(1, 2, SEQ, EMBED)
    sizes = dict(embed=EMBED, heads=2, head_dim=4, latent=3, q_latent=Q_LATENT, rotary=rotary)
    sparse = drawn(nn.LatentAttention, **sizes, indexer=make(2), key=KEY)
    dense = eqx.tree_at(lambda m: m.indexer, sparse, None)
    run = eqx.filter_jit(lambda module, x: module(x)[0])
    one, other = run(sparse, x), run(dense, x)
    assert np.allclose(one[:, :2], other[:, :2], atol=1e-6) and not np.allclose(one[:, 2:], other[:, 2:], atol=1e-3)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda module: jnp.sum(module(x)[0] ** 2)))(sparse)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient.indexer))
    assert all(np.any(leaf) for leaf in (gradient.query.weight, gradient.latent_down.weight))


@pytest.mark.parametrize("at_once", [3, SEQ - 1])
def test_some_queries_at_a_time_are_all_at_once(at_once):
    """Of packed rows, the last part not full: loss and gradients; and no matrix of the whole row is made."""
    rotary, x = nn.Rotary(2, 100.0), normal(1, 2, SEQ, EMBED)
    positions, segments = [[0, 1, 2, 3, 0, 1, 2], [*range(7)]], [[0, 0, 0, 0, 1, 1, 1], [0] * 7]
    tokens = nn.Tokens(jnp.array(positions), jnp.array(segments))
    sizes = dict(embed=EMBED, heads=2, head_dim=4, latent=3, q_latent=Q_LATENT, rotary=rotary, key=KEY)
    whole, parts = (drawn(nn.LatentAttention, indexer=make(2, at_once=n), **sizes) for n in (SEQ, at_once))
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda module, x: jnp.sum(jnp.sin(module(x, tokens)[0]))))
    for one, other in zip(*(jax.tree.leaves(run(module, x)) for module in (whole, parts)), strict=True):
        assert np.allclose(one, other, atol=1e-6)
    traced = [str(jax.make_jaxpr(lambda x, m=module: m(x, tokens)[0])(x)) for module in (whole, parts)]
    assert [f"{SEQ},{SEQ}]" in shapes for shapes in traced] == [True, False]


def test_what_no_indexer_can_do_is_refused():
    with pytest.raises(ValueError, match=r"Indexer\(top_k=0.*a query sees at least one key"):
        make(0)
    with pytest.raises(ValueError, match="an indexer reads the queries' latent; give one"):
        nn.LatentAttention(embed=6, heads=2, head_dim=4, latent=3, indexer=make(2), key=KEY)
