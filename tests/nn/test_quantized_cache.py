"""Int8 caches: rounding errors, and equal results for all ways of writing the same tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import normal, random_module

from eqformer import nn
from eqformer.nn._cache import quantize_caches
from eqformer.nn._dtype import dequantize_rows, parse_cache_dtype, quantize_rows


@pytest.mark.parametrize(("dtype", "step"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2.0**-4)])
def test_rows_are_off_by_a_step_of_their_largest(dtype, step):
    rows = np.array(normal(1, 5, 3, 32)) * np.logspace(-3, 3, 5)[:, None, None].astype(np.float32)
    rows[0, 0] = 0
    both = jax.jit(lambda x: (made := quantize_rows(x, dtype), dequantize_rows(*made, jnp.dtype("float32"))))
    (rounded, scales), back = both(rows)
    assert rounded.dtype == dtype and scales.shape == (5, 3)
    back = np.asarray(back, np.float64)
    off = np.abs(back - rows) / np.maximum(np.abs(rows).max(-1, keepdims=True), 1e-30)
    assert step / 8 < off.max() <= step * (1 + 1e-6) and (back[0, 0] == 0).all()
    np.testing.assert_allclose(np.asarray(scales) * (127 if dtype == "int8" else 448), np.abs(rows).max(-1), rtol=1e-6)
    spoiled = both(np.array([[1.0, np.inf], [np.nan, 2.0]], np.float32))[1]
    assert np.isnan(spoiled).any(axis=-1).all()


SIZES = dict(embed=6, heads=4, head_dim=4, rotary=nn.Rotary(4, 100.0), key=jax.random.key(0))
MODULES = {
    "grouped": lambda **more: random_module(nn.Attention, kv_heads=2, **SIZES, **more),
    "latent": lambda **more: random_module(nn.LatentAttention, latent=5, **SIZES, **more),
}


# How far attention may be off, and is at least, relative to its largest output.
OFF = {"int8": (1e-4, 0.02), "float8_e4m3fn": (1e-3, 0.15)}


@pytest.mark.parametrize(
    ("kind", "mask"), [("grouped", nn.sliding_window(5)), pytest.param("latent", nn.causal(), marks=pytest.mark.grid)]
)
def test_what_is_seen_is_what_was_rounded(kind, mask):
    """At once, in pieces or one by one, in slots that roll or not, beside what a wide cache and no cache give."""
    module, x = MODULES[kind](mask=mask), normal(1, 2, 8, 6)
    places = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))

    @jax.jit
    def ways(x):
        def cached(sizes, dtype):
            memory, outputs, start = quantize_caches(module.init_cache((2,), 8), dtype), [], 0
            for size in sizes:
                part = slice(start, start + size)
                y, memory = module(x[:, part], nn.Tokens(places[:, part]), memory)
                outputs, start = [*outputs, y], start + size
            return jnp.concatenate(outputs, axis=1)

        return module(x)[0], {
            dtype: [cached(s, dtype) for s in ((8,), (3, 4, 1))] for dtype in ("int8", "float8_e4m3fn")
        }

    wanted, outputs = ways(x)
    for dtype, least, most in (("int8", 1e-4, 0.02), ("float8_e4m3fn", 1e-3, 0.15)):
        whole, pieces = outputs[dtype]
        np.testing.assert_allclose(whole, pieces, atol=2e-6)
        off = np.abs(whole - wanted).max() / np.abs(wanted).max()
        assert least < off < most, (dtype, off)


def test_recurrences_keep_their_state_and_names_are_checked():
    net = nn.GatedDeltaNet(embed=8, heads=2, kv_heads=1, head_dim=4, v_dim=4, key=jax.random.key(0))
    attention = MODULES["grouped"]()
    caches = eqx.filter_eval_shape(
        lambda: quantize_caches((net.init_cache((2,), 8), attention.init_cache((2,), 8)), "int8")
    )
    assert caches[0].state.dtype == jnp.float32 and caches[1].keys.dtype == caches[1].values.dtype == jnp.int8
    assert caches[1].key_scales.shape == (2, 2, 8) and nn.dims(caches[1]).key_scales == "batch kv_heads kv_seq"
    assert parse_cache_dtype("FP8", "f") == ("float8_e4m3fn", True)
    assert parse_cache_dtype("bf16", "f") == ("bfloat16", False)
    with pytest.raises(ValueError, match=r"f: 'int4' is no .* int8 and float8_e4m3fn"):
        parse_cache_dtype("int4", "f")
