"""Attention residuals against a literal float64 loop over blocks, in one sublayer and in a model."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, linear, normal, randomised, rms, sigmoid, wide

from eqformer import nn


KEY = jax.random.key(0)
LAYERS, BLOCK, EMBED, MLP, SEQ, BATCH, VOCAB = 4, 3, 6, 8, 5, 2, 11
SUBLAYERS = 2 * LAYERS


def gated_residual(key):
    """A gated layer with a norm."""
    return nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=key), nn.RMSNorm("embed", embed=EMBED))


def block_of(key, mixer=None):
    """A block of two sublayers; the first is a gated layer too unless a mixer is given."""
    first, second = jax.random.split(key)
    residual = gated_residual(first) if mixer is None else nn.Residual(mixer(first), nn.RMSNorm("embed", embed=EMBED))
    return nn.Block(
        nn.AttentionResidual(residual, embed=EMBED, block=BLOCK, eps=0.01),
        nn.AttentionResidual(gated_residual(second), embed=EMBED, block=BLOCK, eps=0.01),
    )


def attention(key):
    """Attention with two heads."""
    return nn.Attention(embed=EMBED, heads=2, head_dim=4, rotary=nn.Rotary(4, 1e4), key=key)


def model(mixer=None):
    """A model of four layers whose blocks have three sublayers each, so that a block may end within a layer."""

    def build():
        norm = nn.RMSNorm("embed", embed=EMBED)
        return nn.Transformer(
            nn.Embedding(vocab=VOCAB, embed=EMBED, key=KEY),
            (nn.Stack(lambda key: block_of(key, mixer), LAYERS, key=KEY),),
            nn.MergeBlocks(norm, embed=EMBED, block=BLOCK, eps=0.01),
            expand=nn.ExpandBlocks(sublayers=SUBLAYERS, block=BLOCK),
        )

    return randomised(eqx.filter_eval_shape(build))


def mix_by_hand(vectors, scores):
    """The softmax over blocks, as in the published code: normed copies are scored, and the vectors are summed."""
    query, scale = wide(scores.weight), wide(scores.norm)
    logits = [((v / np.sqrt((v**2).mean(-1, keepdims=True) + scores.eps)) * scale) @ query for v in vectors]
    exponentials = np.exp(np.stack(logits) - np.max(logits, axis=0))
    weights = exponentials / exponentials.sum(0)
    return np.einsum("nbs,nbsd->bsd", weights, np.stack(vectors))


def gated_by_hand(x, layer):
    """A gated layer with silu."""
    gate = linear(x, layer.gate)
    return linear(gate * sigmoid(gate) * linear(x, layer.up), layer.down)


def hidden_by_hand(transformer, ids, block=BLOCK):
    """The output of the final norm: a list of finished blocks, and a sum that is None where a block begins."""
    total, blocks, count = wide(transformer.embedding.weight)[np.asarray(ids)], [], 0
    for layer in transformer.stacks[0]:
        for sublayer in layer.sublayers:
            x = mix_by_hand([*blocks, total], sublayer.scores) if blocks else total
            if count % block == 0:
                blocks, total = [*blocks, total], None
            y = gated_by_hand(rms(x, sublayer.norm), sublayer.layer)
            total, count = y if total is None else total + y, count + 1
    return rms(mix_by_hand([*blocks, total], transformer.norm.scores), transformer.norm.norm)


IDS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)


def test_a_model_computes_the_softmax_over_blocks():
    transformer = model()
    hidden, _, _ = eqx.filter_jit(transformer.encode)(IDS)
    assert close(hidden, hidden_by_hand(transformer, IDS), 1e-4)
    assert transformer.streams == 2 + 3
    # Other ends of blocks are seen.
    assert not close(hidden, hidden_by_hand(transformer, IDS, block=BLOCK + 1), 1e-2)


def test_in_float64_only_rounding_is_left():
    with jax.enable_x64(True):
        transformer = jax.tree.map(
            lambda x: jnp.asarray(wide(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x, model()
        )
        transformer = dataclasses.replace(transformer, compute_dtype="float64")
        hidden, _, _ = eqx.filter_jit(transformer.encode)(IDS)
        assert close(hidden, hidden_by_hand(transformer, IDS), 1e-12)


@pytest.mark.grid
def test_empty_slots_and_the_count_change_nothing():
    transformer = model()
    wanted, _, _ = eqx.filter_jit(transformer.encode)(IDS)
    larger = dataclasses.replace(transformer, expand=nn.ExpandBlocks(sublayers=5 * SUBLAYERS, block=BLOCK))
    assert larger.streams > transformer.streams
    assert close(eqx.filter_jit(larger.encode)(IDS)[0], wanted, 1e-6)
    # A block whose sum is zero is a block: it has a weight, unlike an empty slot.
    sublayer, x = transformer.stacks[0][0].sublayers[1], jnp.zeros((1, 5, 1, EMBED)).at[:, 0].set(1.0)
    empty, filled = (sublayer(x.at[:, -1].set(count))[0][:, 0] for count in (0.0, 1.0))
    assert not close(empty, filled, 1e-2)


def test_at_first_a_sublayer_reads_the_mean_of_blocks():
    fresh = block_of(KEY).sublayers[1]
    assert isinstance(fresh, nn.AttentionResidual)
    x = jnp.concatenate([normal(1, BATCH, 3, SEQ, EMBED), jnp.full((BATCH, 1, SEQ, EMBED), 4.0)], 1)
    y, cache, aux = eqx.filter_jit(fresh)(x)
    branch = gated_by_hand(rms(wide(x)[:, :3].mean(1), fresh.norm), fresh.layer)
    assert close(y[:, 0], wide(x)[:, 0] + branch, 1e-5) and cache is None and aux is None
    assert np.array_equal(y[:, 1:3], x[:, 1:3]) and np.array_equal(y[:, 3], x[:, 3] + 1)


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        module = jax.tree.map(lambda a: jnp.asarray(wide(a)), randomised(eqx.filter_eval_shape(block_of, KEY)))
        x = jnp.asarray(wide(normal(1, BATCH, 5, SEQ, EMBED))).at[:, -1].set(3.0)  # the first sublayer begins a block
        arrays, static = eqx.partition(module, eqx.is_inexact_array)
        draw = np.random.default_rng(3)
        moves, move_x = jax.tree.map(lambda a: jnp.asarray(draw.normal(size=a.shape)), (arrays, x[:, :-1]))
        direction = jnp.asarray(draw.normal(size=x.shape))

        @jax.jit
        def value(step):
            moved = eqx.combine(jax.tree.map(lambda a, move: a + step * move, arrays, moves), static)
            return jnp.sum(moved(x.at[:, :-1].add(step * move_x))[0] * direction)

        step = 1e-5
        slope = (value(step) - value(-step)) / (2 * step)
        assert abs(jax.grad(value)(0.0) - slope) < 1e-7 * abs(slope)


@pytest.mark.grid
def test_tokens_one_by_one_are_those_of_the_whole_row():
    transformer = model(attention)
    wanted, _ = eqx.filter_jit(transformer)(IDS)
    cache, run = transformer.init_cache(BATCH, SEQ), eqx.filter_jit(transformer)
    for place in range(SEQ):
        logits, cache = run(IDS[:, place : place + 1], nn.Tokens(jnp.full((BATCH, 1), place, jnp.int32)), cache)
        assert close(logits[:, 0], wanted[:, place], 1e-4)
    assert not close(wanted[:, 1], wanted[:, 0], 1e-1)


def test_bfloat16_counts_every_sublayer():
    for count in range(256):
        assert jnp.asarray(count, jnp.bfloat16) + jnp.ones((), jnp.bfloat16) == count + 1
    narrow = nn.Precision("bfloat16", "bfloat16").apply(model())
    assert close(eqx.filter_jit(narrow.encode)(IDS)[0], hidden_by_hand(model(), IDS), 0.1)


def test_impossible_arrangements_are_refused():
    post_norm = dataclasses.replace(gated_residual(KEY), sum_norm=nn.RMSNorm("embed", embed=EMBED))
    with pytest.raises(ValueError, match=r"sum_norm=.*leave the norm out"):
        nn.AttentionResidual(post_norm, embed=EMBED, block=BLOCK)
    with pytest.raises(ValueError, match=r"AttentionResidual\(block=0\)"):
        nn.AttentionResidual(gated_residual(KEY), embed=EMBED, block=0)
    with pytest.raises(ValueError, match=r"ExpandBlocks\(sublayers=257\).*up to 256"):
        nn.ExpandBlocks(sublayers=257, block=2)
