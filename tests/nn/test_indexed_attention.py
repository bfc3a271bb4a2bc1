"""Attention of several key heads to selected pools of keys, against loops in float64 for each document."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, sigmoid, wide
from selection_cases import by_document, check_gradients, check_replaced_tokens, decode, packed, POSITIONS, to_float64

from eqformer import nn
from eqformer.nn._cache import quantize_caches


KEY = jax.random.key(0)
EMBED, HEADS, KV_HEADS, DIM, INDEX_DIM = 6, 4, 2, 4, 6
ROTARY = nn.Rotary(2, 100.0)


def make_indexer(pool_size: int = 3, top_k: int = 1, **options: Any) -> nn.MeanPoolIndexer:
    norms = {name: nn.RMSNorm("index_dim", index_dim=INDEX_DIM, offset=1.0) for name in ("query_norm", "key_norm")}
    sizes = {"embed": EMBED, "heads": 3, "dim": INDEX_DIM, "rotary": ROTARY, **options}
    return nn.MeanPoolIndexer(pool_size=pool_size, top_k=top_k, **norms, **sizes, key=KEY)


def indexed(**options: Any) -> nn.IndexedAttention:
    """Return a layer with random weights."""
    sizes = {"embed": EMBED, "heads": HEADS, "head_dim": DIM, "kv_heads": KV_HEADS, "rotary": ROTARY, "gate": True}
    return random_module(lambda: nn.IndexedAttention(make_indexer(**options), **sizes, key=KEY))


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    """Rotate the first two channels of vectors by the angle of their only frequency."""
    cos, sin = np.cos(position), np.sin(position)
    turned = np.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 1] * cos + x[..., 0] * sin], -1)
    return np.concatenate([turned, x[..., 2:]], -1)


def normed(x: np.ndarray, norm: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * (1 + wide(norm.weight))


def literal(layer: Any, x: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the output for one document, whose first token is at position `start`."""
    indexer, output = layer.indexer, wide(layer.output.weight)
    turn = lambda y: np.array([rotated(vectors, start + token) for token, vectors in enumerate(y)])
    queries, keys, values = turn(linear(x, layer.query)), turn(linear(x, layer.key)), linear(x, layer.value)
    small, small_queries = linear(x, indexer.key), turn(normed(linear(x, indexer.query), indexer.query_norm))
    pool_of = [(start + token) // indexer.pool_size for token in range(len(x))]
    gates, outputs = sigmoid(linear(x, layer.gate)), []
    for token in range(len(x)):
        scores = {}
        for number in set(pool_of):
            members = [key for key in range(len(x)) if pool_of[key] == number]
            if (start + members[-1] + 1) % indexer.pool_size or members[-1] > token:
                continue
            mean = normed(small[members].mean(0), indexer.key_norm)
            scores[number] = np.maximum(small_queries[token] @ rotated(mean, number * indexer.pool_size), 0).sum()
        best = sorted(scores, key=lambda number: -scores[number])[: indexer.top_k]
        best += [pool_of[token]] if (start + token + 1) % indexer.pool_size else []
        seen, total = [key for key in range(token + 1) if pool_of[key] in best], np.zeros(EMBED)
        for head in range(HEADS):
            key_head = head * KV_HEADS // HEADS
            shares = np.exp([queries[token, head] @ keys[key, key_head] * DIM**-0.5 for key in seen])
            attended = shares @ values[seen, key_head] / shares.sum()
            total += output[:, head] @ (attended * gates[token, head])
        outputs.append(total)
    return np.array(outputs)


@pytest.mark.parametrize("chunk", [64, pytest.param(5, marks=pytest.mark.grid)])
def test_packed_documents_follow_the_formula(chunk):
    with jax.enable_x64(True):
        layer = to_float64(indexed(chunk=chunk))
        x = np.random.default_rng(1).normal(size=(len(POSITIONS), EMBED))
        y = np.asarray(eqx.filter_jit(layer)(jnp.asarray(x)[None], packed())[0][0])
        expected = by_document(literal, layer, x)
        assert np.allclose(y[: len(expected)], expected, rtol=0, atol=1e-6)
        everything = np.asarray(eqx.filter_jit(to_float64(indexed(top_k=20)))(jnp.asarray(x)[None], packed())[0][0])
        assert abs(everything[: len(expected)] - expected).max() > 1e-2  # the control: all keys are seen


@pytest.mark.grid
def test_gradients_are_slopes_and_none_passes_through_the_indexer():
    with jax.enable_x64(True):
        layer, rng = to_float64(indexed(chunk=8)), np.random.default_rng(2)
        x = jnp.asarray(rng.normal(size=(1, len(POSITIONS), EMBED)))
        check_gradients(layer, x, packed(), jnp.asarray(POSITIONS >= 0)[:, None], rng)


@pytest.mark.parametrize("cuts", [(16, 17), pytest.param((9, 10, 16, 17), marks=pytest.mark.grid)])
def test_left_padding_and_pieces_of_any_length_decode_alike(cuts):
    layer, x = indexed(chunk=4), normal(3, 2, 17, EMBED)
    shift = np.array([2, 0])  # The first row has two tokens of padding on its left.
    positions = jnp.asarray(np.maximum(np.arange(17) - shift[:, None], -1).astype(np.int32))
    expected = [literal(layer, wide(x[row, start:])) for row, start in enumerate(shift)]
    y, cache = decode(layer, x, cuts, layer.init_cache((2,), 24), positions)
    for row, start in enumerate(shift):
        assert np.allclose(y[row, start:], expected[row], atol=2e-5)
    # With the small keys of other tokens, other pools are selected.
    other = eqx.tree_at(lambda cache: cache.index.vectors, cache, cache.index.vectors[:, ::-1])
    last, _ = decode(layer, x[:, -1:], (1,), other, positions[:, -1:])
    assert max(abs(last[row, 0] - expected[row][-1]).max() for row in (0, 1)) > 1e-2 and nn.can_roll_back(cache)


@pytest.mark.grid
def test_tokens_that_are_replaced_leave_nothing_behind():
    check_replaced_tokens(indexed(), normal(4, 1, 17, EMBED), normal(5, 1, 17, EMBED), 24)


@pytest.mark.grid
def test_caches_of_8_bits():
    layer, x = indexed(pool_size=2, top_k=2), normal(6, 1, 17, EMBED)
    expected = np.asarray(eqx.filter_jit(lambda x: layer(x)[0])(x))
    narrow: Any = quantize_caches(layer.init_cache((1,), 18), "int8")
    y, _ = decode(layer, x, range(1, 18), narrow)
    assert narrow.index.vectors.dtype == jnp.int8 and 1e-6 < np.median(abs(y - expected)) < 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_indexer(pool_size=0), r"MeanPoolIndexer\(pool_size=0"),
        (lambda: make_indexer(rotary=nn.Rotary(8, 10.0)), r"MeanPoolIndexer\(dim=6, rotary="),
        (
            lambda: nn.IndexedAttention(
                make_indexer(), **{"embed": 6, "heads": 2, "head_dim": 2, "scores": nn.Scores(softcap=2.0), "key": KEY}
            ),
            "no softcap and no bias",
        ),
        (
            lambda: nn.IndexedAttention(
                nn.PooledIndexer(embed=6, q_latent=4, heads=2, dim=4, pool_size=2, top_k=1, key=KEY),
                **{"embed": 6, "heads": 2, "head_dim": 2, "key": KEY},
            ),
            "reads the latent of queries",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
