"""Attention to selected pools of keys, against loops in float64 for each document, and its caches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, wide
from selection_cases import (
    by_document,
    check_gradients,
    check_replaced_tokens,
    decode,
    packed,
    POSITIONS,
    START,
    to_float64,
)

from eqformer import nn
from eqformer.nn._cache import quantize_caches


KEY = jax.random.key(0)
EMBED, Q_LATENT, LATENT, HEADS, DIM, INDEX_DIM = 6, 5, 4, 2, 3, 4
KINDS: dict[str, dict[str, int]] = {
    "pools of three": {"pool_size": 3, "top_k": 1},
    "pools of two": {"pool_size": 2, "top_k": 2},
    "single keys": {"pool_size": 1, "top_k": 3},
}
BY_DEFAULT = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "pools of three" else pytest.mark.grid) for kind in KINDS]
)


def make_indexer(pool_size: int = 3, top_k: int = 1, **options: Any) -> nn.PooledIndexer:
    sizes = {"embed": EMBED, "q_latent": Q_LATENT, "heads": 3, "dim": INDEX_DIM, **options}
    return nn.PooledIndexer(pool_size=pool_size, top_k=top_k, **sizes, key=KEY)


def pooled(mask: Any = None, **options: Any) -> nn.LatentAttention:
    """Return a layer with random weights."""
    sizes = {"embed": EMBED, "heads": HEADS, "head_dim": DIM, "latent": LATENT, "q_latent": Q_LATENT, "mask": mask}
    return random_module(lambda: nn.LatentAttention(**sizes, indexer=make_indexer(**options), key=KEY))


def pool_keys_of(indexer: Any, x: np.ndarray, start: int) -> dict[int, tuple[list[int], np.ndarray]]:
    """Return the tokens and the key of each complete pool of a document, by the pool's number."""
    small = linear(x, indexer.key)
    small = (small - small.mean(-1, keepdims=True)) / np.sqrt(small.var(-1, keepdims=True) + indexer.key_norm.eps)
    small = small * wide(indexer.key_norm.weight) + wide(indexer.key_norm.bias)
    gates, (pool_size, dim) = linear(x, indexer.gate), indexer.bias.shape
    members: dict[int, list[int]] = {}
    for token in range(len(x)):
        members.setdefault((start + token) // pool_size, []).append(token)
    pools = {}
    for number, tokens in members.items():
        if (start + tokens[-1] + 1) % pool_size:
            continue
        key = np.zeros(dim)
        for channel in range(dim):
            logits = [
                gates[token, channel] + wide(indexer.bias)[(start + token) % pool_size, channel] for token in tokens
            ]
            shares = np.exp(logits) / np.exp(logits).sum()
            key[channel] = shares @ small[tokens, channel]
        pools[number] = (tokens, key)
    return pools


def literal(layer: Any, x: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the output for one document, whose first token is at position `start`."""
    indexer, latent = layer.indexer, linear(x, layer.query_down)
    queries, latents = linear(latent, layer.query), linear(x, layer.latent_down)
    keys, values, output = linear(latents, layer.key_up), linear(latents, layer.value_up), wide(layer.output.weight)
    pools, pool_size = pool_keys_of(indexer, x, start), indexer.bias.shape[0]
    small_queries, weights = linear(latent, indexer.query), linear(x, indexer.weight)
    outputs = []
    for token in range(len(x)):
        seen = [key for key in range(token + 1) if (start + key) // pool_size == (start + token) // pool_size]
        seen = seen if (start + token + 1) % pool_size else []
        complete = [number for number, (tokens, _) in pools.items() if tokens[-1] <= token]
        scores = {n: weights[token] @ np.maximum(small_queries[token] @ pools[n][1], 0) for n in complete}
        for number in sorted(complete, key=lambda n: -scores[n])[: indexer.top_k]:
            seen = seen + pools[number][0]
        total = np.zeros(EMBED)
        for head in range(HEADS):
            shares = np.exp([queries[token, head] @ keys[key, head] * DIM**-0.5 for key in seen])
            total += output[:, head] @ (shares @ values[seen, head] / shares.sum())
        outputs.append(total)
    return np.array(outputs)


@BY_DEFAULT
@pytest.mark.parametrize("chunk", [64, pytest.param(5, marks=pytest.mark.grid)])
def test_packed_documents_follow_the_formula(kind, chunk):
    with jax.enable_x64(True):
        layer = to_float64(pooled(**KINDS[kind], chunk=chunk))
        x = np.random.default_rng(1).normal(size=(len(POSITIONS), EMBED))
        y = np.asarray(eqx.filter_jit(layer)(jnp.asarray(x)[None], packed())[0][0])
        expected = by_document(literal, layer, x)
        assert np.allclose(y[: len(expected)], expected, rtol=0, atol=1e-12)
        if kind != "single keys":  # The pools of the first document depend on the position at which it begins.
            other = by_document(literal, layer, x, START + 1)
            assert np.allclose(other[7:], expected[7:], atol=1e-12) and abs(other - expected).max() > 1e-2


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_slopes_and_none_passes_through_the_indexer(kind):
    with jax.enable_x64(True):
        layer, rng = to_float64(pooled(**KINDS[kind], chunk=8)), np.random.default_rng(2)
        x = jnp.asarray(rng.normal(size=(1, len(POSITIONS), EMBED)))
        check_gradients(layer, x, packed(), jnp.asarray(POSITIONS >= 0)[:, None], rng)


@pytest.mark.grid
def test_few_pools_are_all_seen_and_chunks_give_the_same():
    x = normal(1, 1, 37, EMBED)
    run = eqx.filter_jit(lambda layer: layer(x)[0])
    expected, dense = run(pooled()), run(eqx.tree_at(lambda layer: layer.indexer, pooled(), None))
    assert np.allclose(run(pooled(top_k=13)), dense, atol=1e-6) and np.allclose(run(pooled(top_k=12)), dense, atol=1e-5)
    assert np.allclose(run(pooled(chunk=8)), expected, atol=1e-5) and not np.allclose(expected, dense, atol=1e-2)


def test_chunks_of_queries_make_no_matrix_of_the_row():
    x = normal(1, 1, 37, EMBED)
    layers = pooled(), pooled(chunk=8)
    programs = [str(jax.make_jaxpr(lambda x, layer=layer: layer(x)[0])(x)) for layer in layers]
    assert ["37,37]" in program for program in programs] == [True, False]


@pytest.mark.grid
def test_a_layer_reads_the_pools_that_an_earlier_one_selected():
    first, x = pooled(), normal(1, 1, 17, EMBED)
    second = eqx.tree_at(lambda layer: layer.indexer, first, None)
    run = eqx.filter_jit(lambda layer, x, argument=None: layer(x, None, argument))
    attended, answer = run(first, x, nn.ShareRequest(None))
    assert isinstance(answer.value.selection, nn.PoolSelection) and np.array_equal(attended, run(first, x)[0])
    assert np.allclose(run(second, x, answer)[0], attended, atol=1e-6)
    assert not np.allclose(run(second, x)[0], attended, atol=1e-2)


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_and_pieces_of_any_length_decode_alike(kind):
    layer, x = pooled(**KINDS[kind], chunk=4), normal(3, 2, 17, EMBED)
    shift = np.array([2, 0])  # The first row has two tokens of padding on its left.
    positions = jnp.asarray(np.maximum(np.arange(17) - shift[:, None], -1).astype(np.int32))
    expected = [literal(layer, wide(x[row, start:])) for row, start in enumerate(shift)]
    y, cache = decode(layer, x, (9, 16, 17), layer.init_cache((2,), 24), positions)
    for row, start in enumerate(shift):
        assert np.allclose(y[row, start:], expected[row], atol=2e-5)
    # Without the small keys and gates of earlier tokens, other pools are selected.
    empty = eqx.tree_at(lambda cache: cache.rotary_keys, cache, -cache.rotary_keys)
    last, _ = decode(layer, x[:, -1:], (1,), empty, positions[:, -1:])
    assert not np.allclose(last[1, 0], expected[1][-1], atol=1e-3)
    assert nn.can_roll_back(cache)


@pytest.mark.grid
def test_tokens_that_are_replaced_leave_nothing_behind():
    check_replaced_tokens(pooled(), normal(4, 1, 17, EMBED), normal(5, 1, 17, EMBED), 24)


@pytest.mark.grid
def test_caches_of_8_bits_and_rows_that_end_at_the_capacity():
    layer, x = pooled(pool_size=2, top_k=2), normal(6, 1, 17, EMBED)
    expected = np.asarray(eqx.filter_jit(lambda x: layer(x)[0])(x))
    narrow: Any = quantize_caches(layer.init_cache((1,), 18), "int8")
    y, _ = decode(layer, x, range(1, 18), narrow)
    assert narrow.rotary_keys.dtype == jnp.int8 and 1e-6 < np.median(abs(y - expected)) < 0.05
    y, _ = decode(layer, x, (8, 9, 10, 11), layer.init_cache((1,), 10))
    assert np.isfinite(y[:, :10]).all() and np.isnan(y[:, 10]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_indexer(pool_size=0), r"PooledIndexer\(pool_size=0"),
        (lambda: make_indexer(top_k=0), r"PooledIndexer\(pool_size=3, top_k=0\)"),
        (lambda: pooled(nn.sliding_window(3))(normal(1, 1, 5, EMBED)), "without a window and without chunks"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
