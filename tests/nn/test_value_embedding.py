"""Values by token id, and the skip from the embedding, against float64 formulas."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import attend, close, linear, normal, randomised, wide

from eqformer import models, nn


KEY = jax.random.key(0)
VOCAB, EMBED, SEQ = 11, 6, 9
MODEL = models.SpeedrunConfig(VOCAB, EMBED, 3, 2, 2, 8, head_dim=4, window=3)


def attention():
    build = lambda: nn.ValueEmbeddedAttention(vocab=VOCAB, embed=EMBED, heads=4, kv_heads=2, head_dim=3, key=KEY)
    return randomised(eqx.filter_eval_shape(build))


def token_ids(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, shape), jnp.int32)


def tokens_with(ids):
    return nn.positions_like(ids.shape).replace(ids=ids)


def test_values_have_a_part_that_depends_on_the_id():
    layer, x, ids = attention(), normal(1, 2, SEQ, EMBED), token_ids(2, SEQ)
    query, key, value = (linear(wide(x), part) for part in (layer.query, layer.key, layer.value))
    gate = 2 / (1 + np.exp(-linear(wide(x), layer.value_gate)))
    table = wide(layer.value_embedding.weight)[np.asarray(ids)]
    visible = np.tril(np.ones((2, SEQ, SEQ), bool))

    def by_hand(value):
        return linear(attend(query, key, value, visible, 3**-0.5), layer.output)

    run = eqx.filter_jit(layer)
    attended, _ = run(x, tokens_with(ids))
    assert close(attended, by_hand(value + gate[..., None] * table), 1e-5)
    assert not close(attended, by_hand(value + table), 1e-2) and not close(attended, by_hand(value), 1e-2)
    assert np.isnan(run(x, tokens_with(ids.at[0, 0].set(VOCAB)))[0]).any()


def test_the_gate_is_one_at_the_beginning():
    layer = nn.ValueEmbeddedAttention(vocab=VOCAB, embed=EMBED, heads=2, head_dim=4, key=KEY)
    assert not np.any(layer.value_gate.matrix())
    # 2 sigmoid(0) = 1: the value is the projection plus the table's row.
    x, ids = normal(1, 1, 1, EMBED), token_ids(1, 1)
    row = wide(layer.value_embedding.weight)[np.asarray(ids)]
    wanted = linear(linear(wide(x), layer.value) + row, layer.output)
    assert close(eqx.filter_jit(layer)(x, tokens_with(ids))[0], wanted, 1e-5)


def test_the_skip_is_a_weighted_sum_with_the_embedded_tokens():
    skip, x, embedded = nn.EmbeddingSkip(0.5, 3.0), normal(1, 2, SEQ, EMBED), normal(2, 2, SEQ, EMBED)
    shared = nn.SharedValue(embedded, name="embedding")
    y, cache, aux = skip(x, nn.Tokens(jnp.zeros((2, SEQ), jnp.int32), shared=(shared,)))
    assert close(y, 0.5 * wide(x) + 3 * wide(embedded), 1e-6) and cache is None and aux is None
    same = nn.EmbeddingSkip()(x, nn.Tokens(jnp.zeros((2, SEQ), jnp.int32), shared=(shared,)))[0]
    assert np.array_equal(same, x)


def numbers(model):
    """The model with random weights, so that no map into the stream is zero."""
    return randomised(eqx.filter_eval_shape(lambda: models.build(model, key=KEY)))


@pytest.mark.grid
def test_every_layer_reads_the_first_layers_input():
    model, ids = numbers(MODEL), token_ids(2, SEQ)
    hidden, _, _ = eqx.filter_jit(model.encode)(ids)
    tokens = tokens_with(ids)
    x = embedded = model.embed(ids, tokens)
    tokens = tokens.replace(shared=(nn.SharedValue(embedded, name="embedding"),))
    unshared = tokens.replace(shared=(nn.SharedValue(jnp.zeros_like(embedded), name="embedding"),))
    without, run_layer = embedded, eqx.filter_jit(lambda layer, x, tokens: layer(x, tokens)[0])
    for stack in model.stacks:
        for number in range(len(stack)):
            x, without = run_layer(stack[number], x, tokens), run_layer(stack[number], without, unshared)
    assert close(hidden, model.norm(x), 1e-5) and not close(hidden, model.norm(without), 1e-2)


@pytest.mark.grid
def test_decoding_by_a_cache_is_the_whole_call():
    model, ids = numbers(MODEL), token_ids(2, SEQ)
    call = eqx.filter_jit(lambda ids, tokens, cache: model(ids, tokens, cache))
    whole, cache, logits, start = call(ids, None, None)[0], model.init_cache(2, SEQ), [], 0
    for stop in (4, 5, 6, 7, 8, 9):
        positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (2, stop - start))
        part, cache = call(ids[:, start:stop], nn.Tokens(positions), cache)
        logits, start = [*logits, part], stop
    assert close(np.concatenate(logits, axis=1), whole, 1e-5)


@pytest.mark.parametrize(
    "fields, windows, tables",
    [
        ({"layers": 8}, (0, 1, 2, 4, 5, 6), (1, 3, 5, 7)),
        ({"layers": 5}, (0, 1, 2), (0, 2, 4)),
        ({"layers": 2, "window": None}, (), (1,)),
        ({"layers": 1}, (), (0,)),
        ({"layers": 3, "value_embeddings": False, "skips": False}, (0, 1), ()),
    ],
)
def test_which_layers_have_windows_and_tables(fields, windows, tables):
    config = dataclasses.replace(MODEL, **fields)
    model = eqx.filter_eval_shape(lambda: models.build(config, key=KEY))
    blocks = [block for stack in model.stacks for number in range(len(stack)) for block in stack[number].members]
    mixers = [nn.modules(block, nn.Mixer)[0] for block in blocks]
    assert len(mixers) == config.layers
    assert tuple(n for n, mixer in enumerate(mixers) if mixer.mask.window is not None) == windows
    assert tuple(n for n, mixer in enumerate(mixers) if isinstance(mixer, nn.ValueEmbeddedAttention)) == tables
    assert all(bool(nn.modules(block, nn.EmbeddingSkip)) == config.skips for block in blocks)


def test_what_a_layer_cannot_read_is_refused():
    with pytest.raises(ValueError, match=r"ValueEmbeddedAttention\(x\): the layer reads the ids of its tokens"):
        attention()(normal(1, 1, SEQ, EMBED))
    with pytest.raises(ValueError, match=r"reads='embedding'"):
        nn.EmbeddingSkip()(normal(1, 1, SEQ, EMBED))
    with pytest.raises(ValueError, match=r"SpeedrunConfig\(embed=6, heads=2, head_dim=3\): .* an even head_dim"):
        models.build(dataclasses.replace(MODEL, head_dim=3), key=KEY)
