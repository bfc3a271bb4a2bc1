"""The whole model: the order of its parts, tied heads, dtypes, caches and randomness."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import close, random_module, replaced, wide

from eqformer import kernels, nn


KEY = jax.random.key(0)
IDS = jnp.array([[3, 1, 4, 1, 5], [6, 0, 6, 5, 3]])
run = eqx.filter_jit(lambda model, ids, tokens=None, cache=None: model(ids, tokens, cache))


def block(key, core=None):
    one, two = jax.random.split(key)
    return nn.Block(
        nn.Residual(
            nn.Attention(embed=4, heads=2, head_dim=2, rotary=nn.Rotary(2, 100.0), core=core, key=one),
            nn.RMSNorm("embed", embed=4),
            dropout=nn.Dropout(0.2),
        ),
        nn.Residual(nn.MLP(embed=4, mlp=6, key=two), nn.RMSNorm("embed", embed=4), dropout=nn.Dropout(0.2)),
    )


def make(tied=True, positions=False, bias=False, core=None):
    return nn.Transformer(
        nn.Embedding(vocab=7, embed=4, key=KEY),
        tuple(nn.Stack(lambda key: block(key, core), layers, key=KEY) for layers in (2, 1)),
        nn.LayerNorm("embed", embed=4),
        None if tied else nn.Linear("embed -> vocab", embed=4, vocab=7, bias=bias, key=KEY),
        positions=nn.LearnedPositions(max_seq=6, embed=4, key=KEY) if positions else None,
        dropout=nn.Dropout(0.2),
    )


@pytest.fixture(scope="module")
def tied():
    return random_module(
        make, core=kernels.ReferenceAttention()
    )  # jax's own core mixes dtypes, which strict promotion refuses


@pytest.fixture(scope="module")
def untied():
    return random_module(make, tied=False, positions=True, bias=True)


@eqx.filter_jit
def parts(model, ids):
    x = model.embedding(ids)
    x = x if model.positions is None else x + model.positions(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
    for stack in model.stacks:
        x = stack(x)[0]
    return model.norm(x)


def by_parts(model, ids):
    hidden = wide(parts(model, ids))
    if model.head is None:
        return hidden @ wide(model.embedding.weight).T
    return hidden @ wide(model.head.weight).T + wide(model.head.bias)


def test_embed_run_normalise_unembed(tied, untied):
    for model in (tied, untied):
        logits, cache = run(model, IDS)
        assert cache is None and logits.shape == (2, 5, 7)
        assert close(logits, by_parts(model, IDS))
    assert not close(run(replaced(untied, positions=None), IDS)[0], run(untied, IDS)[0], 1e-3)
    assert not close(run(replaced(untied, head=None), IDS)[0], run(untied, IDS)[0], 1e-3)
    assert (tied.vocab, tied.depth) == (7, 3)


@pytest.mark.parametrize(
    "scale,softcap",
    [*(pytest.param(*both, marks=pytest.mark.grid) for both in ((0.125, None), (None, 0.5))), (3.0, 0.5)],
)
def test_logits_are_scaled_and_then_capped(tied, untied, scale, softcap):
    for model in (tied, untied):
        plain = by_parts(model, IDS)
        expected = plain if scale is None else plain * scale
        expected = expected if softcap is None else softcap * np.tanh(expected / softcap)
        found = run(replaced(model, logit_scale=scale, logit_softcap=softcap), IDS)[0]
        assert close(found, expected) and not close(found, plain, 1e-2)


@pytest.mark.quick
def test_one_row_without_a_batch(tied):
    assert np.allclose(run(tied, IDS[1])[0], run(tied, IDS)[0][1], atol=1e-6)


def test_mixed_precision_keeps_parameters_and_logits_in_float32(tied):
    model = nn.Precision(compute="bfloat16").apply(tied)
    hidden, _, _ = eqx.filter_eval_shape(model.encode, IDS)
    logits, _ = run(model, IDS)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))} == {jnp.dtype("float32")}
    full = run(tied, IDS)[0]
    assert close(logits, full, 5e-2) and not close(logits, full, 1e-5)
    gradient = eqx.filter_eval_shape(eqx.filter_grad(lambda m: jnp.sum(m(IDS)[0] ** 2)), model)
    shapes = [leaf for leaf in jax.tree.leaves(gradient) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert {leaf.dtype for leaf in shapes} == {jnp.dtype("float32")}


def test_bfloat16_parameters(tied):
    model = nn.Precision("bfloat16", "bfloat16").apply(tied)
    logits, _ = run(model, IDS)
    assert logits.dtype == jnp.float32 and close(logits, run(tied, IDS)[0], 1e-1)
    assert model.stacks[0].numbers.dtype == jnp.int32


@pytest.mark.grid
def test_cached_calls_equal_the_uncached_pass(untied):
    whole, _ = run(untied, IDS)
    cache = eqx.filter_jit(lambda model: model.init_cache(2, 6))(untied)
    assert cache[0].keys.shape == (2, 2, 2, 6, 2) and cache[1].keys.shape == (1, 2, 2, 6, 2)
    places, given = jnp.array([[0, 1, 2], [0, -1, -1]]), np.asarray(IDS)
    first, cache = run(untied, jnp.asarray(given[:, :3]), nn.Tokens(places), cache)
    first, whole = np.asarray(first), np.asarray(whole)
    assert close(first[0], whole[0, :3]) and close(first[1, :1], whole[1, :1])
    for step in range(2):
        ids = jnp.array([[given[0, 3 + step]], [given[1, 1 + step]]])
        logits, cache = run(untied, ids, nn.Tokens(jnp.array([[3 + step], [1 + step]])), cache)
        logits = np.asarray(logits)
        assert close(logits[0, 0], whole[0, 3 + step]) and close(logits[1, 0], whole[1, 1 + step])
        assert not close(logits[1, 0], whole[1, 3 + step], 1e-3)
    half = eqx.filter_eval_shape(replaced(untied, compute_dtype="bfloat16").init_cache, (2, 3), 5)
    assert half[0].keys.dtype == jnp.bfloat16 and half[0].keys.shape == (2, 2, 3, 2, 5, 2)


def test_dropout_follows_the_example_and_differs_by_place(tied):
    places, keys = put(np.broadcast_to(np.arange(5), (2, 5)), np.int32), jax.jit(nn.token_keys)
    tokens = lambda rows: nn.Tokens(places, keys=keys(KEY, np.array(rows), places))
    both, _ = run(tied, IDS, tokens([8, 9]))
    swapped, _ = run(tied, put(np.asarray(IDS)[::-1]), tokens([9, 8]))
    assert np.array_equal(both, np.asarray(swapped)[::-1])
    assert not close(run(tied, IDS, tokens([9, 8]))[0], both, 1e-3)
    assert not close(both, run(tied, IDS)[0], 1e-3)
    same = np.asarray(run(tied, put(np.asarray(IDS)[[0, 0]]), tokens([8, 9]))[0])
    assert not close(same[0], same[1], 1e-3)


def test_every_parameter_has_a_gradient(untied):
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(jnp.sin(m(IDS)[0]))))(untied)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all() and np.any(leaf), jax.tree_util.keystr(path)


def test_ids_outside_the_vocabulary_are_nan(tied):
    logits, _ = run(tied, IDS.at[0, 4].set(7))
    assert bool(jnp.isnan(logits[0, 4]).all()) and bool(jnp.isfinite(logits[1]).all())


def test_messages(untied):
    with pytest.raises(ValueError, match=r"has a cache and tokens=None"):
        untied(IDS, None, untied.init_cache(2, 6))
    with pytest.raises(ValueError, match=r"init_cache\(capacity=7\): the model has 6 learned positions"):
        untied.init_cache(2, 7)
    with pytest.raises(ValueError, match=r"Transformer\(ids of float32 .* must hold integers"):
        untied(IDS.astype(jnp.float32))


def test_a_table_of_fewer_channels_is_mapped_to_the_stream_and_back():
    """`LN(E[ids] A^T + P) B^T E^T`, in float64; another map back is seen."""
    keys = iter(jax.random.split(jax.random.key(3), 5))
    to_table = nn.Linear("hidden -> embed", hidden=6, embed=4, key=next(keys))
    to_stream = nn.Linear("embed -> hidden", hidden=6, embed=4, key=next(keys))
    embedding = nn.Embedding(vocab=7, embed=4, key=next(keys))
    learned = nn.LearnedPositions(max_seq=5, embed=6, key=next(keys))
    norm = nn.MappedNorm(nn.LayerNorm("embed", embed=6), to_table)
    model = nn.Transformer(embedding, (), norm, positions=learned, embedding_map=to_stream)
    ids = np.array([[3, 0, 6, 2]])
    arrays = embedding.weight, to_stream.weight, learned.weight, to_table.weight
    table, enter, positions, leave = (np.asarray(x, np.float64) for x in arrays)
    x = table[ids] @ enter.T + positions[:4]
    centered = x - x.mean(-1, keepdims=True)
    want = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) @ leave.T @ table.T
    call = eqx.filter_jit(lambda model: model(jnp.asarray(ids, jnp.int32))[0])
    logits = call(model)
    assert model.stream_channels == 6 and np.allclose(logits, want, rtol=1e-5, atol=1e-6)
    other = eqx.tree_at(lambda m: m.norm, model, nn.MappedNorm(norm.norm, replaced(to_table, weight=-to_table.weight)))
    assert not np.allclose(call(other), want, rtol=1e-2)
