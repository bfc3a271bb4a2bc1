"""Keys that an indexer selects, against loops in float64; no gradient reaches the indexer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, rotate, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, Q_LATENT, SEQ = 6, 5, 7
PLACES = np.tile(np.arange(SEQ, dtype=np.int32), (2, 1))


def make(top_k, **more):
    sizes = dict(embed=EMBED, q_latent=Q_LATENT, heads=5, dim=4, top_k=top_k, **more)
    return random_module(nn.Indexer, **sizes, rotary=nn.Rotary(2, 100.0), key=KEY)


def literal(indexer, x, latent, top_k):
    """Equation 1 of DeepSeek-V3.2, and each query's best keys of those up to its own."""
    turns = np.array([1.0])
    keys = linear(x, indexer.key)
    keys = (keys - keys.mean(-1, keepdims=True)) / np.sqrt(keys.var(-1, keepdims=True) + indexer.key_norm.eps)
    keys = keys * wide(indexer.key_norm.weight) + wide(indexer.key_norm.bias)

    def turned(y):
        """The first channels rotated, or the last ones."""
        if not indexer.rotates_last:
            return rotate(y, PLACES, turns)
        return np.concatenate([y[..., :-2], rotate(y[..., -2:], PLACES, turns)], -1)

    keys = turned(keys[:, :, None])[:, :, 0]
    queries, weights = turned(linear(latent, indexer.query)), linear(x, indexer.weight)
    chosen = np.zeros((2, SEQ, SEQ), bool)
    for row, at in np.ndindex(2, SEQ):
        scores = [weights[row, at] @ np.maximum(queries[row, at] @ keys[row, s], 0) for s in range(at + 1)]
        chosen[row, at, np.argsort(scores)[::-1][:top_k]] = True
    return chosen


@pytest.mark.parametrize(("top_k", "last"), [(3, False), (3, True), (SEQ - 1, False)])
def test_each_query_sees_its_best_keys(top_k, last):
    indexer, x, latent = (
        make(top_k, rotates_last=last, norm_eps=0.1 if last else 1e-6),
        normal(1, 2, SEQ, EMBED),
        normal(2, 2, SEQ, Q_LATENT),
    )
    tokens = nn.Tokens(jnp.asarray(PLACES))

    def choose(indexer, x):
        queries, key_tokens = indexer.index_queries(x, latent, tokens), {"tokens": tokens, "kv_tokens": tokens}
        return indexer.select_keys(queries, indexer.index_keys(x, tokens), mask=nn.causal(), **key_tokens)

    best = np.asarray(eqx.filter_jit(choose)(indexer, x).choices)
    selected = np.tril(np.any(best[..., None] == np.arange(SEQ), axis=-2))
    assert np.array_equal(selected, literal(indexer, wide(x), wide(latent), top_k))
    assert not np.array_equal(selected, literal(indexer, wide(x), wide(latent), top_k - 1))


def test_up_to_so_many_keys_nothing_is_chosen():
    indexer, x, latent = make(SEQ), normal(1, 2, SEQ, EMBED), normal(2, 2, SEQ, Q_LATENT)
    tokens = nn.positions_like((2, SEQ))

    def choose(indexer):
        queries, keys = indexer.index_queries(x, latent, tokens), indexer.index_keys(x, tokens)
        return indexer.select_keys(queries, keys, mask=nn.causal(), tokens=tokens, kv_tokens=tokens)

    assert eqx.filter_eval_shape(choose, indexer) is None


def test_an_attention_sees_chosen_keys_alone():
    """Up to so many keys it is dense; beyond, what was not chosen has no part, and the indexer no gradient."""
    rotary, x = nn.Rotary(2, 100.0), normal(1, 2, SEQ, EMBED)
    sizes = dict(embed=EMBED, heads=2, head_dim=4, latent=3, q_latent=Q_LATENT, rotary=rotary)
    sparse = random_module(nn.LatentAttention, **sizes, indexer=make(2), key=KEY)
    dense = eqx.tree_at(lambda m: m.indexer, sparse, None)
    run = eqx.filter_jit(lambda module, x: module(x)[0])
    one, other = run(sparse, x), run(dense, x)
    assert np.allclose(one[:, :2], other[:, :2], atol=1e-6) and not np.allclose(one[:, 2:], other[:, 2:], atol=1e-3)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda module: jnp.sum(module(x)[0] ** 2)))(sparse)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient.indexer))
    assert all(np.any(leaf) for leaf in (gradient.query.weight, gradient.latent_down.weight))


def pair(top_k=2):
    """An attention with an indexer, and one without whose queries have the same latent."""
    sizes = dict(embed=EMBED, heads=2, head_dim=4, latent=3, q_latent=Q_LATENT, rotary=nn.Rotary(2, 100.0))
    first = random_module(nn.LatentAttention, **sizes, indexer=make(top_k, chunk=3), key=KEY)
    second = random_module(nn.LatentAttention, **sizes, v_dim=5, key=KEY)
    return first, eqx.tree_at(lambda m: m.query_down, second, first.query_down)


def test_a_layer_reads_what_an_earlier_one_has_chosen():
    """It sees the keys that the other's indexer would choose for it, where both choose by the same."""
    (first, second), x = pair(), normal(1, 2, SEQ, EMBED)
    run = eqx.filter_jit(lambda module, x, given=None: module(x, None, given))
    y, left = run(first, x, nn.ShareRequest(None))
    assert (
        np.array_equal(y, run(first, x)[0])
        and left.wrapped is None
        and left.value.selection.choices.shape == (2, SEQ, 2)
    )
    found, after = run(second, x, left)
    assert np.allclose(found, run(eqx.tree_at(lambda m: m.indexer, second, first.indexer, is_leaf=_is_none), x)[0])
    assert not np.allclose(found, run(second, x)[0], atol=1e-3) and after.wrapped is None
    indices = jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ, SEQ))
    every = nn.SharedValue(nn.SharedKeys(nn.KeySelection(choices=indices, chunk=3)))
    assert np.allclose(run(second, x, every)[0], run(second, x)[0], atol=1e-6)
    assert run(*(pair(SEQ)[0], x, nn.ShareRequest(None)))[1].value.selection is None  # so few keys are all seen
    with pytest.raises(ValueError, match=r"LatentAttention\(x\): it was given ArrayImpl of an earlier layer"):
        second(x, None, nn.SharedValue(jnp.zeros(3)))


@pytest.mark.grid
def test_layers_that_read_a_choice_have_caches_and_decode_alike():
    def stack_of(reads):
        first, second = pair()
        block = lambda mixer, **own: nn.Block(nn.Residual(mixer, nn.RMSNorm("embed", embed=EMBED), **own))
        blocks = block(first, shares="choice"), block(second, reads=reads)
        return eqx.filter_jit(lambda: nn.Stack(lambda key: nn.SuperBlock(blocks), 2, key=KEY))()

    stack, x = stack_of("choice"), normal(1, 2, SEQ, EMBED)
    call = eqx.filter_jit(lambda stack, x, tokens, cache: stack(x, tokens, cache))
    want, cache = call(stack, x, None, None)[0], stack.init_cache((2,), SEQ)
    assert [its.rotary_keys.shape[-1] for its in cache] == [2 + 4, 2]  # the indexer's keys in the first alone
    found, start = [], 0
    for stop in (5, 6, 7):
        y, cache, _ = call(stack, x[:, start:stop], nn.Tokens(jnp.asarray(PLACES[:, start:stop])), cache)
        found, start = [*found, y], stop
    assert np.allclose(np.concatenate(found, axis=1), want, atol=1e-5)
    assert not np.allclose(call(stack_of(None), x, None, None)[0], want, atol=1e-3)


def _is_none(node):
    return node is None


@pytest.mark.grid
@pytest.mark.parametrize("chunk", [3, SEQ - 1])
def test_chunks_of_queries_give_the_same(chunk):
    """Of packed rows, the last part not full: loss and gradients; and no matrix of the whole row is made."""
    rotary, x = nn.Rotary(2, 100.0), normal(1, 2, SEQ, EMBED)
    positions, segments = [[0, 1, 2, 3, 0, 1, 2], [*range(7)]], [[0, 0, 0, 0, 1, 1, 1], [0] * 7]
    tokens = nn.Tokens(jnp.array(positions), jnp.array(segments))
    sizes = dict(embed=EMBED, heads=2, head_dim=4, latent=3, q_latent=Q_LATENT, rotary=rotary, key=KEY)
    at_once, chunked = (random_module(nn.LatentAttention, indexer=make(2, chunk=n), **sizes) for n in (SEQ, chunk))
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda module, x: jnp.sum(jnp.sin(module(x, tokens)[0]))))
    for one, other in zip(*(jax.tree.leaves(run(module, x)) for module in (at_once, chunked)), strict=True):
        assert np.allclose(one, other, atol=1e-6)
    traced = [str(jax.make_jaxpr(lambda x, m=module: m(x, tokens)[0])(x)) for module in (at_once, chunked)]
    assert [f"{SEQ},{SEQ}]" in shapes for shapes in traced] == [True, False]


def test_what_no_indexer_can_do_is_refused():
    with pytest.raises(ValueError, match=r"Indexer\(top_k=0.*a query sees at least one key"):
        make(0)
    with pytest.raises(ValueError, match="this indexer reads the queries' latent; give q_latent"):
        nn.LatentAttention(embed=6, heads=2, head_dim=4, latent=3, indexer=make(2), key=KEY)
