"""Attention to an earlier layer's keys, and per-layer vectors of tokens, against float64 formulas."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import attend, close, linear, normal, random_module, randomised, rms, wide

from eqformer import kernels, nn


KEY = jax.random.key(0)
EMBED, SEQ, LAYERS, VOCAB = 6, 9, 4, 11
SIZES: dict[str, Any] = {"embed": EMBED, "heads": 4, "head_dim": 3, "kv_heads": 2}
CORE = kernels.ReferenceAttention()


def norm():
    return nn.RMSNorm("embed", embed=EMBED)


def reading(**options):
    return nn.CrossLayerAttention(**SIZES, rotary=nn.Rotary(3 - 1, 50.0), core=CORE, bias=True, **options, key=KEY)


def leaving(**options):
    return nn.Attention(**SIZES, rotary=nn.Rotary(3 - 1, 50.0), core=CORE, **options, key=KEY)


def model_of(remat="none", inputs=True):
    """A window's layer and one that sees all, which leave keys; then periods of two that read them."""

    def block(mask, first, key):
        name = "all" if mask == nn.causal() else "window"
        own: dict[str, Any]
        mixer, own = (leaving, {"shares": name}) if first else (reading, {"reads": name})
        gate = nn.Residual(nn.PerLayerGate(embed=EMBED, mlp=4, key=key), output_norm=norm(), reads="layer_input")
        mlp = nn.Residual(nn.GatedMLP(embed=EMBED, mlp=5, key=key), norm())
        return nn.Block(nn.Residual(mixer(mask=mask), norm(), **own), mlp, *([gate] if inputs else []))

    masks = (nn.sliding_window(4), nn.causal())
    period = lambda first: lambda key: nn.SuperBlock(tuple(block(mask, first, key) for mask in masks))
    sizes = {"vocab": VOCAB, "embed": EMBED}

    def build():
        stacks = nn.Stack(period(True), 1, key=KEY), nn.Stack(period(False), 2, key=KEY)
        vectors = nn.PerLayerInputs(**sizes, depth=6, mlp=4, key=KEY) if inputs else None
        return nn.Transformer(nn.Embedding(**sizes, key=KEY), stacks, norm(), layer_inputs=vectors)

    return nn.with_execution(randomised(eqx.filter_eval_shape(build)), remat=remat)


def test_it_attends_to_what_an_attention_has_left():
    first, second = randomised(leaving(query_norm=nn.RMSNorm("head_dim", head_dim=3))), randomised(reading())
    one, two = normal(1, 2, SEQ, EMBED), normal(2, 2, SEQ, EMBED)
    run = eqx.filter_jit(lambda mixer, *given: mixer(*given))
    y, left = run(first, one, None, nn.ShareRequest(None))
    assert isinstance(left, nn.SharedValue) and left.wrapped is None
    assert isinstance(left.value, nn.SharedKV) and left.value.positions is None
    assert np.array_equal(y, run(first, one)[0])
    found, _ = run(second, two, None, left)
    query = wide(
        eqx.filter_jit(second.rotary)(
            put(linear(wide(two), second.query), np.float32), put(np.tile(np.arange(SEQ), (2, 1)), np.int32)
        )
    )
    visible = np.tril(np.ones((2, SEQ, SEQ), bool))
    want = linear(attend(query, wide(left.value.keys), wide(left.value.values), visible, 3**-0.5), second.output)
    assert close(found, want, 1e-5) and not close(found, want[:, ::-1], 1e-2)


def test_vectors_of_each_layer_are_those_of_the_formula():
    module = random_module(nn.PerLayerInputs, vocab=VOCAB, embed=EMBED, depth=3, mlp=4, eps=0.1, key=KEY)
    x, ids = normal(1, 2, SEQ, EMBED), jnp.arange(2 * SEQ).reshape(2, SEQ) % VOCAB
    projected = linear(wide(x), module.project).swapaxes(-1, -2) * EMBED**-0.5
    table = wide(module.embedding.weight).reshape(VOCAB, 4, 3).swapaxes(1, 2)
    want = (rms(projected, module.norm) + 2 * table[np.asarray(ids)]) / np.sqrt(2)
    vectors = eqx.filter_jit(module)(x, ids)
    assert vectors.shape == (2, SEQ, 3, 4) and close(vectors, want, 1e-5)
    gate = random_module(nn.PerLayerGate, embed=EMBED, mlp=4, activation=jnp.tanh, key=KEY)
    by_hand = linear(np.tanh(linear(wide(x), gate.gate)) * want[..., 1, :], gate.down)
    assert close(eqx.filter_jit(gate)(x, vectors[..., 1, :]), by_hand, 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_layers_that_read_have_no_cache_and_decode_alike(dtype):
    model, ids = model_of(), jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, SEQ)), jnp.int32)
    call = eqx.filter_jit(lambda model, ids, tokens, cache: model(ids, tokens, cache))
    want, cache = call(model, ids, None, None)[0], eqx.filter_jit(lambda model: model.init_cache(2, SEQ, dtype))(model)
    assert len(jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, nn.KVCache))) == 2
    assert cache[1] == (None, None) and cache[0][0].keys.shape[-2] == 4 < cache[0][1].keys.shape[-2]
    found, start = [], 0
    for stop in (6, 7, 8, 9):  # a prompt longer than the window, and one token at a time
        places = put(np.broadcast_to(np.arange(start, stop), (2, stop - start)), np.int32)
        logits, cache = call(model, put(np.asarray(ids)[:, start:stop]), nn.Tokens(places), cache)
        found, start = [*found, logits], stop
    assert close(np.concatenate(found, axis=1), want, 1e-5 if dtype is None else 0.1)


def packed_row():
    """A row of two documents."""
    places, segments = np.array([[*range(4), *range(5)]]), np.array([[0] * 4 + [1] * 5])
    ids = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (1, SEQ)), jnp.int32)
    return ids, nn.Tokens(jnp.asarray(places, jnp.int32), jnp.asarray(segments, jnp.int32))


@pytest.mark.grid
def test_documents_of_a_row_do_not_see_each_other():
    model, (ids, packed) = model_of(), packed_row()
    alone = [eqx.filter_jit(model)(part)[0] for part in (ids[:, :4], ids[:, 4:])]
    assert close(eqx.filter_jit(model)(ids, packed)[0], jnp.concatenate(alone, axis=1), 1e-5)


@pytest.mark.grid
def test_remat_changes_nothing():
    ids, packed = packed_row()
    gradients = [
        eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(model(ids, packed)[0] ** 2)))(model_of(remat))
        for remat in ("none", "full")
    ]
    one, other = (jax.tree.leaves(gradient) for gradient in gradients)
    assert all(close(x, y, 1e-4) and np.any(x) for x, y in zip(one, other, strict=True))


def test_what_does_not_fit_is_refused():
    model, ids = model_of(), jnp.zeros((1, SEQ), jnp.int32)
    with pytest.raises(ValueError, match=r"Residual\(reads='window'\): layers before it share .* under no name"):
        eqx.filter_eval_shape(dataclasses.replace(model, stacks=model.stacks[1:], layer_inputs=None), ids)
    with pytest.raises(ValueError, match=r"PerLayerInputs\(depth=6\): the model has 2 sublayers that read a vector"):
        eqx.filter_eval_shape(dataclasses.replace(model, stacks=model.stacks[:1]), ids)
    with pytest.raises(ValueError, match=r"Residual\(PerLayerGate, reads='layer_input'\): .* no such input"):
        eqx.filter_eval_shape(dataclasses.replace(model, layer_inputs=None), ids)
    with pytest.raises(ValueError, match=r"CrossLayerAttention\(x\): the layer reads keys of an earlier layer"):
        reading()(normal(1, 1, SEQ, EMBED))
    with pytest.raises(ValueError, match=r"CrossLayerAttention\(heads=4, kv_heads=3\)"):
        nn.CrossLayerAttention(embed=EMBED, heads=4, head_dim=3, kv_heads=3, key=KEY)
    with pytest.raises(ValueError, match=r"Residual\(shares='a', reads='b'\)"):
        nn.Residual(reading(), shares="a", reads="b")

    class Still(nn.Mixer):
        def __call__(self, x, tokens=None, cache=None):
            return x, cache

        def init_cache(self, batch, capacity, dtype="float32"):
            return None

    with pytest.raises(
        ValueError, match=r"Residual\(Still, shares='a'\): given ShareRequest\(cache\), the mixer returns ShareReq"
    ):
        nn.Residual(Still(), shares="a")(normal(1, 1, SEQ, EMBED))
    left = nn.Tokens(jnp.zeros((1, SEQ), jnp.int32), shared=(nn.SharedValue(None, name="a"),))

    class Forgets(Still):
        def __call__(self, x, tokens=None, cache=None):
            return x, None

    with pytest.raises(
        ValueError, match=r"Residual\(Forgets, reads='a'\): given a SharedValue, the mixer returns NoneType"
    ):
        nn.Residual(Forgets(), reads="a")(normal(1, 1, SEQ, EMBED), left)
    with pytest.raises(ValueError, match=r"CrossLayerAttention\(x\): the layer reads keys of an earlier layer"):
        nn.Residual(reading(), reads="a")(normal(1, 1, SEQ, EMBED), left)
