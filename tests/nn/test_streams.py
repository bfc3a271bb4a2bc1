"""Several residual streams: hyper-connections against float64 formulas, and in a model."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, linear, normal, random_module, randomised, rms, sigmoid, wide

from eqformer import nn


KEY = jax.random.key(0)
STREAMS, EMBED, MLP, SEQ, BATCH, VOCAB = 3, 6, 8, 5, 2, 11
MIXED = {"mixing": nn.Sinkhorn(iterations=4), "eps": 0.01}
INDEPENDENT = {"mixing": None, "eps": 0.01, "write_scale": 1.5, "write_eps": 0.02}


def connection(layer=None, **options):
    """A sublayer with a norm, around a gated layer unless another is given."""

    def build():
        gated = nn.GatedMLP(embed=EMBED, mlp=MLP, key=KEY) if layer is None else layer()
        branch = nn.Residual(gated, nn.RMSNorm("embed", embed=EMBED))
        return nn.HyperConnection(branch, streams=STREAMS, embed=EMBED, key=KEY, **options)

    return randomised(eqx.filter_eval_shape(build))


def weights_by_hand(x, module):
    """The weights of each token, by loops over rows and tokens."""
    matrix, base, scale = (wide(array) for array in (module.weight, module.base, module.scale))
    factors = np.repeat(scale, module.sizes)
    y = np.zeros((x.shape[0], x.shape[2], len(base)))
    for row, token in np.ndindex(*y.shape[:2]):
        vector = x[row, :, token].reshape(-1)
        normed = vector / np.sqrt((vector**2).mean() + module.eps)
        y[row, token] = matrix.reshape(len(base), -1) @ normed * factors + base
    return y


def sinkhorn_by_hand(logits, iterations, eps):
    """Rows, then columns, of one matrix."""
    exponentials = np.exp(logits)
    matrix = exponentials / exponentials.sum(1, keepdims=True) + eps
    matrix = matrix / (matrix.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdims=True) + eps)
    return matrix


def gated_by_hand(x, layer):
    """A gated layer with silu."""
    gate = linear(x, layer.gate)
    return linear(gate * sigmoid(gate) * linear(x, layer.up), layer.down)


def connection_by_hand(x, module):
    """The streams after the sublayer, by loops over rows and tokens."""
    weights, output = weights_by_hand(x, module.weights), np.zeros_like(x)
    for row, token in np.ndindex(x.shape[0], x.shape[2]):
        streams, numbers = x[row, :, token], weights[row, token]
        read = sigmoid(numbers[:STREAMS]) + module.eps
        write = module.write_scale * sigmoid(numbers[STREAMS : 2 * STREAMS]) + module.write_eps
        matrix = np.eye(STREAMS)
        if module.mixing is not None:
            logits = numbers[2 * STREAMS :].reshape(STREAMS, STREAMS)
            matrix = sinkhorn_by_hand(logits, module.mixing.iterations, module.mixing.eps)
        y = gated_by_hand(rms(read @ streams, module.norm)[None, None], module.layer)[0, 0]
        output[row, :, token] = matrix.T @ streams + np.outer(write, y)
    return output


@pytest.mark.parametrize("options", [MIXED, INDEPENDENT], ids=["mixed", "independent"])
def test_a_connection_computes_the_formula(options):
    module, x = connection(**options), normal(1, BATCH, STREAMS, SEQ, EMBED)
    wanted = connection_by_hand(wide(x), module)
    y, cache, aux = eqx.filter_jit(module)(x)
    assert close(y, wanted, 1e-5) and cache is None and aux is None
    # A permutation of the streams is seen, and so is the direction in which they are mixed.
    assert not close(eqx.filter_jit(module)(x[:, ::-1])[0], wanted, 1e-2)


def test_mixtures_are_mixed_in_one_direction_only():
    module, x = connection(**MIXED), normal(1, BATCH, STREAMS, SEQ, EMBED)
    rows = np.arange(STREAMS * STREAMS).reshape(STREAMS, STREAMS).T.reshape(-1)
    order = np.concatenate([np.arange(2 * STREAMS), 2 * STREAMS + rows])
    swapped = eqx.tree_at(
        lambda m: (m.weights.weight, m.weights.base), module, (module.weights.weight[order], module.weights.base[order])
    )
    assert not close(eqx.filter_jit(swapped)(x)[0], eqx.filter_jit(module)(x)[0], 1e-2)


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        module = jax.tree.map(lambda a: jnp.asarray(wide(a)), connection(**MIXED))
        x, direction = (jnp.asarray(wide(normal(seed, BATCH, STREAMS, SEQ, EMBED))) for seed in (1, 2))
        arrays, static = eqx.partition((module, x), eqx.is_inexact_array)
        moves = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(3).normal(size=a.shape)), arrays)

        @jax.jit
        def value(step):
            moved = jax.tree.map(lambda a, move: a + step * move, arrays, moves)
            module, x = eqx.combine(moved, static)
            return jnp.sum(module(x)[0] * direction)

        step = 1e-5
        slope = (value(step) - value(-step)) / (2 * step)
        assert abs(jax.grad(value)(0.0) - slope) < 1e-7 * abs(slope)


def test_sinkhorn_makes_rows_and_columns_add_up_to_one():
    logits = normal(1, BATCH, STREAMS, STREAMS)
    matrix = wide(nn.Sinkhorn(iterations=40)(logits))
    assert np.all(matrix > 0) and close(matrix.sum(-1), np.ones((BATCH, STREAMS)), 1e-5)
    assert close(matrix.sum(-2), np.ones((BATCH, STREAMS)), 1e-5)
    assert close(nn.Sinkhorn(3, 0.1)(logits)[0], sinkhorn_by_hand(wide(logits)[0], 3, 0.1), 1e-5)
    assert not close(nn.Sinkhorn(1)(logits).sum(-1), np.ones((BATCH, STREAMS)), 1e-2)


def test_at_first_equal_streams_stay_nearly_equal_and_read_their_mean():

    @jax.jit
    def run(x):
        layer = nn.GatedMLP(embed=EMBED, mlp=MLP, key=KEY)
        residual = nn.Residual(layer, nn.RMSNorm("embed", embed=EMBED))
        module = nn.HyperConnection(residual, streams=STREAMS, embed=EMBED, key=KEY)
        return module(nn.ExpandStreams(STREAMS)(x))[0], residual(x)[0]

    x = normal(1, BATCH, SEQ, EMBED)
    y, wanted = run(x)
    assert y.shape == (BATCH, STREAMS, SEQ, EMBED)
    assert all(close(y[:, stream], wanted, 0.05) for stream in range(STREAMS)) and not close(y[:, 0], x, 0.05)


def attention():
    """Attention with two heads."""
    return nn.Attention(embed=EMBED, heads=2, head_dim=4, rotary=nn.Rotary(4, 1e4), key=KEY)


def block(key):
    """A block of two hyper-connections, of both kinds."""
    one, two, three, four = jax.random.split(key, 4)
    norm = nn.RMSNorm("embed", embed=EMBED)
    mixer = nn.Attention(embed=EMBED, heads=2, head_dim=4, rotary=nn.Rotary(4, 1e4), key=one)
    gated = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    sizes = {"streams": STREAMS, "embed": EMBED}
    return nn.Block(
        nn.HyperConnection(nn.Residual(mixer, norm), **sizes, **MIXED, key=three),
        nn.HyperConnection(nn.Residual(gated, norm), **sizes, **INDEPENDENT, key=four),
    )


@functools.cache
def model():
    """A model of three layers with several streams."""

    def build():
        norm = nn.RMSNorm("embed", embed=EMBED)
        return nn.Transformer(
            nn.Embedding(vocab=VOCAB, embed=EMBED, key=KEY),
            (nn.Stack(block, 3, key=KEY),),
            nn.MergeStreams(norm, streams=STREAMS, embed=EMBED, eps=0.01, key=KEY),
            expand=nn.ExpandStreams(STREAMS),
        )

    return randomised(eqx.filter_eval_shape(build))


def test_a_model_expands_runs_its_layers_and_merges():
    transformer, ids = model(), jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)
    x = np.repeat(wide(transformer.embedding.weight)[np.asarray(ids)][:, None], STREAMS, axis=1)
    assert close(transformer.embed(ids, nn.positions_like(ids.shape)), x, 1e-6) and transformer.streams == STREAMS
    run_layer = eqx.filter_jit(lambda layer, x: layer(x)[0])
    for layer in transformer.stacks[0]:
        # A block's own call is tested by its sublayers; the stack runs the blocks in order.
        x = wide(run_layer(layer, jnp.asarray(x, jnp.float32)))
    numbers = weights_by_hand(x, transformer.norm.weights)
    read = sigmoid(numbers) + transformer.norm.eps
    merged = np.einsum("bsn,bnsd->bsd", read, x)
    hidden, _, _ = eqx.filter_jit(transformer.encode)(ids)
    assert close(hidden, rms(merged, transformer.norm.norm), 1e-4)
    assert not close(hidden, rms(x.mean(1), transformer.norm.norm), 1e-2)


def test_a_mean_of_streams_is_normed():
    merge, x = (
        randomised(eqx.filter_eval_shape(lambda: nn.MeanStreams(nn.RMSNorm("embed", embed=EMBED)))),
        normal(1, BATCH, STREAMS, SEQ, EMBED),
    )
    expected = rms(wide(x).mean(1), merge.norm)
    assert close(merge(x), expected, 1e-5) and not close(merge(x), rms(wide(x).sum(1), merge.norm) * 2, 1e-2)
    # The mean of many 16-bit numbers is not rounded on the way.
    narrow = jnp.full((1, 300, 1, EMBED), 1.0, jnp.bfloat16)
    assert np.array_equal(merge(narrow), merge(narrow[:, :1]))


def test_tokens_one_by_one_are_those_of_the_whole_row():
    transformer, ids = model(), jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)
    wanted, _ = eqx.filter_jit(transformer)(ids)
    cache, run = transformer.init_cache(BATCH, SEQ), eqx.filter_jit(transformer)
    for place in range(SEQ):
        logits, cache = run(ids[:, place : place + 1], nn.Tokens(jnp.full((BATCH, 1), place, jnp.int32)), cache)
        assert close(logits[:, 0], wanted[:, place], 1e-4)
    assert not close(wanted[:, 1], wanted[:, 0], 1e-1)


def test_a_mixer_without_tokens_numbers_those_of_a_stream():
    module, x = connection(attention, **MIXED), normal(1, BATCH, STREAMS, SEQ, EMBED)
    wanted = eqx.filter_jit(module)(x, nn.positions_like((BATCH, SEQ)))[0]
    assert close(eqx.filter_jit(nn.Block(module))(x)[0], wanted, 1e-6)
    assert not close(eqx.filter_jit(module)(x, nn.Tokens(jnp.zeros((BATCH, SEQ), jnp.int32)))[0], wanted, 1e-2)


def test_in_bfloat16_weights_stay_float32():
    transformer = nn.Precision("bfloat16", "bfloat16").apply(model())
    sublayer = transformer.stacks[0].blocks.sublayers[0]
    assert sublayer.weights.weight.dtype == sublayer.weights.base.dtype == jnp.float32
    assert sublayer.layer.query.weight.dtype == jnp.bfloat16
    ids = jnp.zeros((BATCH, SEQ), jnp.int32)
    assert transformer.embed(ids, nn.positions_like(ids.shape)).dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(transformer.encode, ids)[0].dtype == jnp.bfloat16


@pytest.mark.grid
def test_maps_of_layers_alone_are_quantized_and_adapted():
    quantized = eqx.filter_jit(nn.quantize)(model(), "int8")
    assert isinstance(quantized.stacks[0].blocks.sublayers[1].layer.up, nn.QuantizedLinear)
    adapted = eqx.filter_jit(nn.with_lora)(model(), [nn.Linear], rank=2, alpha=1.0, key=KEY)
    assert len(nn.modules(adapted, nn.LoRA)) == 7
    weights = [nn.modules(tree, nn.StreamWeights)[0].weight for tree in (quantized, adapted, model())]
    assert all(np.array_equal(array, weights[-1]) for array in weights)


def test_impossible_arrangements_are_refused():
    norm = nn.RMSNorm("embed", embed=EMBED)
    post_norm = nn.Residual(random_module(nn.GatedMLP, embed=EMBED, mlp=MLP, key=KEY), sum_norm=norm)
    with pytest.raises(ValueError, match=r"sum_norm=.*leave the norm out"):
        nn.HyperConnection(post_norm, streams=STREAMS, embed=EMBED, key=KEY)
    with pytest.raises(ValueError, match=r"Sinkhorn\(iterations=0\)"):
        nn.Sinkhorn(0)
    with pytest.raises(ValueError, match=r"ExpandStreams\(streams=0\)"):
        nn.ExpandStreams(0)
    with pytest.raises(ValueError, match=r"Transformer\(expand=..., encoder=...\)"):
        dataclasses.replace(model(), encoder=nn.Encoder((random_module(nn.Stack, block, 1, key=KEY),), norm))
