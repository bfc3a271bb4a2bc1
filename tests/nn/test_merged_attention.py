"""Attention to a row's own keys and a source's keys in one softmax, against loops in float64, and its cache."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import attend, close, linear, normal, randomised, rms, rotate, wide

from eqformer import kernels, nn


SIZES: dict[str, Any] = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 4}
THERE = np.array([[0, 1, 2, 3, 4, 5, -1], [0, 1, 2, 0, 1, -1, -1]])  # the source's positions
OF_WHICH = np.array([[0] * 7, [0] * 3 + [1] * 4])
PLACES, OWN = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]), np.array([[0] * 5, [0, 0, 0, 1, 1]])
called = eqx.filter_jit(lambda module, *given: module(*given))


def made(mask: nn.Mask, core: kernels.Operation | None = None) -> Any:
    """Of shared key heads, with norms, rotary positions and a bound of scores."""
    norms = {name: nn.RMSNorm("head_dim", head_dim=4) for name in ("query_norm", "key_norm")}
    options: dict[str, Any] = {
        "mask": mask,
        "core": core,
        "scores": nn.Scores(softcap=2.0),
        "rotary": nn.Rotary(4, 100.0),
        **norms,
    }
    make = lambda: nn.MergedAttention(nn.Attention(**SIZES, **options, bias=True, key=jax.random.key(0)))
    return randomised(eqx.filter_eval_shape(make))


def by_loops(module: Any, x: Any, vectors: Any, own: np.ndarray, source: np.ndarray) -> np.ndarray:
    """The formula, of which keys of the row and of the source each token sees."""
    turned = lambda y: rotate(y, PLACES, 100.0 ** -np.array([0, 0.5]))
    query = rms(linear(wide(x), module.query), module.query_norm)
    key, other = (rms(linear(wide(y), module.key), module.key_norm) for y in (x, vectors))
    key = np.concatenate([turned(key), other], axis=1)
    value = np.concatenate([linear(wide(y), module.value) for y in (x, vectors)], axis=1)
    visible = np.concatenate([own, source], axis=2)
    return linear(attend(turned(query), key, value, visible, 4**-0.5, softcap=2.0), module.output)


@pytest.mark.parametrize("core", [kernels.ReferenceAttention(), kernels.BlockwiseAttention(block=2)])
def test_one_softmax_runs_over_both(core):
    """With padding and, in the second row, two documents; the window is of the row's own tokens."""
    module, x, vectors = made(nn.sliding_window(2), core), normal(0, 2, 5, 6), normal(1, 2, 7, 6)
    source = nn.Source(vectors, nn.Tokens(jnp.asarray(THERE), jnp.asarray(OF_WHICH)))
    tokens = nn.Tokens(jnp.asarray(PLACES), jnp.asarray(OWN), source=source)
    distance = PLACES[:, :, None] - PLACES[:, None]
    before = (OWN[:, :, None] == OWN[:, None]) & (distance >= 0)
    there = np.broadcast_to(THERE[:, None] >= 0, (2, 5, 7))
    its = there & (OWN[:, :, None] == OF_WHICH[:, None])
    found = called(module, x, tokens)[0]
    assert close(found, by_loops(module, x, vectors, before & (distance < 2), its))
    for own, other in ((before, its), (before & (distance < 2), there), (before & (distance < 2), its & False)):
        assert not close(found, by_loops(module, x, vectors, own, other), 1e-2)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.grid)])
def test_caches_keep_the_row_and_its_source(dtype):
    """A window's cache rolls; the source is given once."""
    module, x = made(nn.sliding_window(3)), normal(0, 2, 6, 6)
    source = nn.Source(normal(1, 2, 7, 6), nn.right_padded(jnp.array([7, 4]), 7))
    whole = called(module, x, nn.with_source(nn.positions_like((2, 6)), source))[0]

    def written(source: Any) -> jax.Array:
        cache, found = module.init_cache((2,), 8), []
        cache = tuple(one.with_scales(dtype) for one in cache) if dtype == "int8" else cache
        assert [one.rolling for one in cache] == [True, False]
        for first, last in ((0, 3), (3, 4), (4, 5), (5, 6)):
            places = jnp.broadcast_to(jnp.arange(first, last), (2, last - first))
            one, cache = called(module, x[:, first:last], nn.Tokens(places, source=None if first else source), cache)
            found.append(one)
        return jnp.concatenate(found, axis=1)

    rounding = 2e-5 if dtype == "float32" else 5e-2
    assert close(written(source), whole, rounding)
    assert not close(written(nn.Source(source.values[::-1], source.tokens)), whole, 4 * rounding)


@pytest.mark.grid
def test_caches_are_not_put_together_for_few_tokens():
    module, cache = made(nn.causal()), made(nn.causal()).init_cache((2,), 64)
    source = nn.Source(normal(1, 2, 7, 6), nn.positions_like((2, 7)))
    _, cache = module(normal(0, 2, 3, 6), nn.with_source(nn.positions_like((2, 3)), source), cache)

    def shapes(seq: int) -> str:
        tokens = nn.Tokens(jnp.broadcast_to(jnp.arange(3, 3 + seq), (2, seq)))
        return str(jax.make_jaxpr(lambda x, cache: module(x, tokens, cache))(normal(2, 2, seq, 6), cache))

    assert "f32[2,128,2,4]" in shapes(9) and "f32[2,128,2,4]" not in shapes(8)


def test_what_does_not_fit_is_refused():
    module, x = made(nn.causal()), normal(0, 2, 5, 6)
    with pytest.raises(ValueError, match="MergedAttention: there is neither a source nor a cache that holds a source"):
        eqx.filter_eval_shape(module, x)
    source = nn.Source(normal(1, 2, 7, 6), nn.positions_like((2, 7)))
    with pytest.raises(ValueError, match="MergedAttention: the row has segments and its source has none; give nn.So"):
        eqx.filter_eval_shape(module, x, nn.Tokens(jnp.asarray(PLACES), jnp.asarray(OWN), source=source))
    with pytest.raises(
        ValueError, match="the source has 7 tokens, but the cache that must hold its keys has the capacity 6"
    ):
        with_source = nn.with_source(nn.positions_like((2, 5)), source)
        eqx.filter_eval_shape(lambda x, tokens: module(x, tokens, module.init_cache((2,), 6)), x, with_source)
    build = lambda: nn.MergedAttention(
        nn.Attention(**SIZES, gate=True, scores=nn.Scores(sinks=jnp.zeros(4)), key=jax.random.key(0))
    )
    with pytest.raises(ValueError, match=r"MergedAttention\(Attention\): gate and sinks cannot be merged; build"):
        eqx.filter_eval_shape(build)
