"""Positions and segments alone decide which tokens see each other, for every attention core and for caches."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import normal, random_module

from eqformer import kernels, nn


SEQ, ROWS, KV_SEQ = 16, 8, 24
CORES = {"dot_product": kernels.DotProductAttention(), "blockwise": kernels.BlockwiseAttention(block=4)}
MASKS = [nn.causal(), nn.sliding_window(3), nn.chunked(5), nn.full(), nn.Mask(is_causal=False, window=4)]


def left_padded(draw):
    pad = draw.integers(1, SEQ)
    return np.r_[np.full(pad, -1), np.arange(SEQ - pad)], np.zeros(SEQ, int)


def right_padded(draw):
    return np.where(np.arange(SEQ) < draw.integers(1, SEQ), np.arange(SEQ), -1), np.zeros(SEQ, int)


def offset(draw):
    return draw.integers(1, 9) + np.arange(SEQ), np.zeros(SEQ, int)


def packed(draw):
    cuts = np.sort(draw.choice(np.arange(1, SEQ), 3, replace=False))
    segments = np.searchsorted(cuts, np.arange(SEQ), side="right")
    positions = np.arange(SEQ) - np.r_[0, cuts][segments]
    return np.where(segments == draw.integers(4), -1, positions), segments.max() - segments


def shuffled(draw):
    order = draw.permutation(SEQ)
    return tuple(x[order] for x in packed(draw))


def holes(draw):
    return np.where(draw.random(SEQ) < 0.4, -1, np.arange(SEQ)), np.zeros(SEQ, int)


KINDS = [left_padded, right_padded, offset, packed, shuffled, holes]


def rows_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    rows = [KINDS[row % len(KINDS)](draw) for row in range(ROWS)]
    positions, segments = (np.stack(part).astype(np.int32) for part in zip(*rows))
    return positions, segments


@jax.jit
def differences(arrays, tokens, kv_tokens):
    """Of each core from the plain one, over real queries and all masks."""
    real = (tokens.positions >= 0)[..., None, None]
    found = {}
    for name, core in CORES.items():
        worst = []
        for mask in MASKS:
            given = {"mask": mask, "tokens": tokens, "kv_tokens": kv_tokens, "scale": 0.7}
            call = kernels.AttentionCall(*arrays, **given)
            apart = core(call) - kernels.ReferenceAttention()(call)
            worst.append(jnp.max(jnp.abs(jnp.where(real, apart, 0))))
        found[name] = jnp.stack(worst)
    return found


def arrays_of(kv_seq: int):
    return normal(1, ROWS, SEQ, 2, 4), normal(2, ROWS, kv_seq, 1, 4), normal(3, ROWS, kv_seq, 1, 4)


def test_every_core_is_the_plain_one_on_any_tokens():
    for seed in range(4):
        positions, segments = (jnp.asarray(x) for x in rows_of(seed))
        found = differences(arrays_of(SEQ), nn.Tokens(positions, segments), None)
        assert all(np.max(worst) < 1e-5 for worst in found.values()), found
        # Without segments only rows of one document mean anything: the others are left out.
        alone = np.flatnonzero(np.all(np.asarray(segments) == 0, axis=1))
        chosen = jnp.asarray(np.resize(alone, ROWS))
        found = differences(arrays_of(SEQ), nn.Tokens(positions[chosen]), None)
        assert all(np.max(worst) < 1e-5 for worst in found.values()), found


@pytest.mark.grid
def test_every_core_is_the_plain_one_on_slots_of_a_cache():
    draw = np.random.default_rng(0)
    slots = np.stack([draw.permutation(np.r_[0:18, np.full(KV_SEQ - 18, -1)]) for _ in range(ROWS)])
    positions = np.where(draw.random((ROWS, SEQ)) < 0.3, -1, draw.integers(0, 30, (ROWS, SEQ)))
    tokens, kv_tokens = (nn.Tokens(jnp.asarray(x, jnp.int32)) for x in (positions, slots))
    found = differences(arrays_of(KV_SEQ), tokens, kv_tokens)
    assert all(np.max(worst) < 1e-5 for worst in found.values()), found


@pytest.mark.grid
def test_whole_rows_are_as_the_mask_says_and_a_false_word_is_found_out():
    whole = nn.right_padded(jnp.asarray(np.r_[SEQ, 1:ROWS]), SEQ)
    found = differences(arrays_of(SEQ), whole, None)
    assert all(np.max(worst) < 1e-5 for worst in found.values()), found
    positions, _ = left_padded(np.random.default_rng(0))
    other = dataclasses.replace(whole, positions=jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (ROWS, SEQ)))
    assert all(np.max(worst) < 1e-5 for worst in differences(arrays_of(SEQ), other, None).values())
    false = nn.mark_whole_rows(other, SEQ)
    assert float(differences(arrays_of(SEQ), false, None)["dot_product"][0]) > 0.1


@pytest.mark.parametrize(
    "core",
    [None, *(pytest.param(core, marks=pytest.mark.grid) for core in (kernels.ReferenceAttention(), *CORES.values()))],
    ids=["default", "reference", *CORES],
)
def test_left_padding_changes_no_logits_and_is_never_looked_at(core):
    """As prompts of unequal lengths come from elsewhere; without a cache and into one."""

    def block(key):
        one, two = jax.random.split(key)
        attention = nn.Attention(
            embed=8, heads=2, kv_heads=1, head_dim=4, rotary=nn.Rotary(4, 100.0), core=core, key=one
        )
        norm = nn.RMSNorm("embed", embed=8)
        return nn.Block(nn.Residual(attention, norm), nn.Residual(nn.GatedMLP(embed=8, mlp=12, key=two), norm))

    def build(key):
        table, stack = jax.random.split(key)
        embedding = nn.Embedding(vocab=11, embed=8, key=table)
        return nn.Transformer(embedding, (nn.Stack(block, 2, key=stack),), nn.RMSNorm("embed", embed=8))

    model = random_module(build, jax.random.key(0))
    ids, pad = np.array([[3, 1, 4, 1, 5, 9]], np.int32), 4
    positions = jnp.asarray(np.r_[np.full(pad, -1), np.arange(6)][None], jnp.int32)
    run = eqx.filter_jit(lambda model, ids, positions, cache: model(ids, nn.Tokens(positions), cache)[0][:, pad:])
    wanted = eqx.filter_jit(lambda model, ids: model(ids)[0])(model, jnp.asarray(ids))
    for cache in (None, model.init_cache(1, 8)):
        padded = [jnp.asarray(np.pad(ids, [(0, 0), (pad, 0)], constant_values=filler)) for filler in (0, 7)]
        first, second = (run(model, given, positions, cache) for given in padded)
        np.testing.assert_allclose(first, wanted, atol=1e-5)
        assert np.array_equal(first, second)
    assert np.abs(run(model, padded[0], positions + pad, None) - wanted).max() > 1e-3
