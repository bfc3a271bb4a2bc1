"""Attention to another sequence against loops in float64, with its cache, and models with an encoder."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import attend, close, linear, normal, random_module, randomised, wide

from eqformer import nn


KEY = jax.random.key(0)
SIZES: dict[str, Any] = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 3}
PLACES = np.array([[0, 1, 2, 3, 4, 5, -1], [0, 1, 2, 0, 1, -1, -1]])
SEGMENTS = np.array([[0] * 7, [0] * 3 + [1] * 4])
run = eqx.filter_jit(lambda model, *given: model(*given))


def test_it_is_attention_to_the_source():
    """Of other channels, with key heads that are shared, padding and, in the second row, two documents."""
    module = random_module(nn.CrossAttention, **SIZES, source=5, bias=True, key=KEY)
    x, vectors = normal(0, 2, 4, 6), normal(1, 2, 7, 5)
    own = np.array([[0] * 4, [0, 0, 1, 1]])
    source = nn.Source(vectors, nn.Tokens(jnp.asarray(PLACES), jnp.asarray(SEGMENTS)))
    tokens = nn.Tokens(jnp.asarray([[0, 1, 2, 3], [0, 1, 0, 1]]), jnp.asarray(own), source=source)

    def by_loops(visible):
        query, key, value = (
            linear(wide(x), module.query),
            *(linear(wide(vectors), m) for m in (module.key, module.value)),
        )
        return linear(attend(query, key, value, visible, 3**-0.5), module.output)

    there = np.broadcast_to(PLACES[:, None] >= 0, (2, 4, 7))
    visible = there & (own[:, :, None] == SEGMENTS[:, None])
    found = run(module, x, tokens)[0]
    assert close(found, by_loops(visible))
    assert not close(found, by_loops(there), 1e-2) and not close(found, by_loops(np.ones_like(there)), 1e-2)


def test_a_softcap_bounds_its_scores():
    plain, capped = (
        random_module(nn.CrossAttention, **SIZES, source=5, scores=nn.Scores(4.0, softcap=cap), key=KEY)
        for cap in (None, 0.7)
    )
    x, vectors = normal(0, 2, 4, 6), normal(1, 2, 7, 5)
    tokens = nn.with_source(nn.positions_like((2, 4)), nn.Source(vectors, nn.positions_like((2, 7))))
    query, key, value = linear(wide(x), capped.query), *(linear(wide(vectors), m) for m in (capped.key, capped.value))
    scores = 4.0 * np.einsum("bqhd,bkhd->bhqk", query, np.repeat(key, 2, axis=-2))
    weights = np.exp(0.7 * np.tanh(scores / 0.7))
    weights = weights / weights.sum(-1, keepdims=True)
    want = linear(np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(value, 2, axis=-2)), capped.output)
    assert close(run(capped, x, tokens)[0], want) and not close(run(plain, x, tokens)[0], want, 1e-2)
    needs = [module.facts().attends.needs for module in (plain, capped)]
    assert needs == [("source",), ("source", "softcap")]


@pytest.mark.grid
def test_an_encoder_may_have_a_table_of_its_own():
    """Of other ids and channels than the model's."""
    model, ids, read = _model(), _ids(2, 6), _ids(2, 9, seed=1)
    tokens = nn.with_source(nn.positions_like((2, 6)), nn.Source(read, nn.positions_like((2, 9))))
    table = nn.Embedding(vocab=model.vocab + 3, embed=6, scale=2.0, key=jax.random.key(7))
    own = eqx.tree_at(lambda m: m.encoder.embedding, model, table, is_leaf=lambda node: node is None)
    source = eqx.filter_jit(lambda m: m.encoder(2.0 * table.weight[read], nn.positions_like((2, 9))))(model)
    want = run(model, ids, nn.with_source(nn.positions_like((2, 6)), source))[0]
    assert close(run(own, ids, tokens)[0], want) and not close(run(model, ids, tokens)[0], want, 1e-2)


@pytest.mark.by_default("float32")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cache_keeps_the_source_for_calls_without_it(dtype):
    model, ids, read = _model(), _ids(2, 6), _ids(2, 9, seed=1)
    source = nn.Source(read, nn.right_padded(jnp.array([9, 5]), 9))
    whole = run(model, ids, nn.with_source(nn.positions_like((2, 6)), source))[0]

    def written(source):
        cache, found = model.init_cache(2, 10, dtype), []
        for place in range(6):
            tokens = nn.Tokens(put(np.full((2, 1), place), np.int32), source=None if place else source)
            one, cache = run(model, put(np.asarray(ids)[:, place : place + 1]), tokens, cache)
            found.append(np.asarray(one))
        return np.concatenate(found, axis=1)

    rounding = 2e-5 if dtype == "float32" else 5e-2
    assert close(written(source), whole, rounding)
    assert not close(written(nn.Source(read[::-1], source.tokens)), whole, 4 * rounding)
    with pytest.raises(
        ValueError, match="the source has 9 tokens, but the cache that must hold its keys has the capacity 8"
    ):
        run(model, ids, nn.with_source(nn.positions_like((2, 6)), source), model.init_cache(2, 8))


@pytest.mark.grid
def test_packed_pairs_are_as_each_alone_and_vectors_are_read_as_they_are():
    model, ids, read = _model(), _ids(1, 8), _ids(1, 9, seed=1)
    cut = lambda x, first, last: put(np.asarray(x)[:, first:last])
    places = lambda *lengths: put(np.concatenate([np.arange(n) for n in lengths])[None], np.int32)
    segments = lambda *lengths: put(np.concatenate([np.full(n, i) for i, n in enumerate(lengths)])[None], np.int32)
    source = nn.Source(read, nn.Tokens(places(5, 4), segments(5, 4)))
    together = np.asarray(run(model, ids, nn.Tokens(places(3, 5), segments(3, 5), source=source))[0])
    for (first, last), (begin, end) in (((0, 3), (0, 5)), ((3, 8), (5, 9))):
        one = nn.Source(cut(read, begin, end), nn.positions_like((1, end - begin)))
        alone = nn.with_source(nn.positions_like((1, last - first)), one)
        assert close(together[:, first:last], run(model, cut(ids, first, last), alone)[0])
    assert not close(together, run(model, ids, nn.Tokens(places(8), source=source))[0], 1e-2)  # one document
    encoded = eqx.filter_jit(lambda m, ids, tokens: m.encoder(m.embedding(ids), tokens))(model, read, source.tokens)
    assert not encoded.is_of_ids
    tokens = nn.Tokens(places(3, 5), segments(3, 5), source=encoded)
    bare = eqx.tree_at(lambda m: m.encoder, model, None)
    assert close(run(bare, ids, tokens)[0], together)
    with pytest.raises(ValueError, match="CrossAttention: the source holds ids, and the model has no encoder"):
        run(bare, ids, nn.with_source(tokens, source))
    with pytest.raises(
        ValueError, match="CrossAttention: there is neither a source nor a cache that holds a source; pass"
    ):
        run(model, ids)


def test_the_source_has_random_keys_of_its_own():
    """In training, dropout falls elsewhere in the source than in the row."""
    found = []

    class Seen(nn.Dropout):
        def __call__(self, x: Any, keys: Any) -> Any:
            found.append(np.asarray(jax.random.key_data(keys)))
            return x

    model, ids = eqx.tree_at(lambda m: m.dropout, _model(), Seen(0.1), is_leaf=lambda x: x is None), _ids(2, 5)
    keys = nn.token_keys(KEY, jnp.arange(2), nn.positions_like((2, 5)).positions)
    tokens = nn.positions_like((2, 5), keys)
    model(ids, nn.with_source(tokens, nn.Source(ids, tokens)))
    row, source = found
    assert row.shape == source.shape and not np.any(np.all(row == source, axis=-1))


def test_mixtures_stand_in_decoders_alone():
    def routed(key):
        router = nn.TopKRouter(embed=6, experts=2, top_k=1, key=key)
        experts = nn.Experts(lambda key: nn.MLP(embed=6, mlp=4, key=key), 2, key=key)
        return nn.Residual(nn.MoE(router, experts))

    with pytest.raises(ValueError, match=r"Encoder\(stacks=...\): a layer routes tokens"):
        nn.Encoder((nn.Stack(routed, 1, key=KEY),), nn.RMSNorm("embed", embed=6))
    with pytest.raises(ValueError, match=r"CrossAttention\(heads=4, kv_heads=3\): kv_heads must divide heads"):
        nn.CrossAttention(embed=6, heads=4, kv_heads=3, head_dim=3, key=KEY)


def _ids(*shape, seed=0):
    return put(np.random.default_rng(seed).integers(0, 20, shape), np.int32)


def _model() -> Any:
    """Of an encoder and a decoder of two layers, with biases of distances; packed rows see positions of their own."""
    norm = lambda: nn.RMSNorm("embed", embed=6)
    bias = lambda both_ways: nn.RelativeBias(ranges=6, heads=4, farthest=5, both_ways=both_ways, key=KEY)

    def block(key, reads):
        attention = nn.Attention(
            **SIZES, mask=nn.full() if reads else nn.causal(), scores=nn.Scores(bias=True), key=key
        )
        cross = [] if reads else [nn.Residual(nn.CrossAttention(**SIZES, key=key), norm(), reads="source")]
        mlp = nn.MLP(embed=6, mlp=5, key=key)
        return nn.Block(nn.Residual(attention, norm()), *cross, nn.Residual(mlp, norm()))

    stack = lambda reads: (nn.Stack(lambda key: block(key, reads), 2, key=KEY),)

    def make():
        encoder = nn.Encoder(stack(True), norm(), bias(True), start=3)
        table = nn.Embedding(vocab=20, embed=6, key=KEY)
        return nn.Transformer(table, stack(False), norm(), encoder=encoder, score_bias=bias(False))

    return randomised(eqx.filter_eval_shape(make))
