"""Dtypes of parameters and computation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from nn_reference import random_module

from eqformer import nn
from eqformer.nn import at_least_float32, lossless_dtype


KEY = jax.random.key(0)


def test_what_holds_dtypes_holds_every_number_of_theirs():
    floats = ("bfloat16", "float16", "float32", "float64")
    for own in floats:
        for other in floats:
            wide, edges = lossless_dtype(own, other), [jnp.finfo(own), jnp.finfo(other)]
            assert wide == lossless_dtype(other, own) and wide.itemsize <= max(
                4, *(jnp.dtype(x).itemsize for x in (own, other))
            )
            for edge in edges:
                for x in (edge.max, edge.tiny, 1 + edge.eps):
                    x = np.asarray(x, edge.dtype)
                    assert np.isfinite(x) and x.astype(wide).astype(np.float64) == x.astype(np.float64)
    assert lossless_dtype("bfloat16", "float16") == np.float32 and lossless_dtype("bfloat16") == jnp.bfloat16


def test_cast_touches_floating_point_arrays_alone():
    tree = {"a": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0), "f": jnp.sin, "none": None, "x": 1.5}
    half = nn.cast(tree, "bfloat16")
    assert half["a"].dtype == jnp.bfloat16 and half["n"] is tree["n"] and half["key"] is tree["key"]
    assert half["f"] is jnp.sin and half["none"] is None and half["x"] == 1.5


class Chooses(eqx.Module):
    """A user's own module."""

    wide: Float[Array, "n"] = nn.float32_field()
    narrow: Float[Array, "n"]  # type: ignore[misc]  # no field has a default


def test_a_field_that_says_so_stays_float32():
    x = jnp.asarray([5.01, 5.02])
    make: Any = lambda key: Chooses(x, x)
    tree = {"many": [nn.Stack(make, 3, key=jax.random.key(0)), Chooses(x, x)], "wide": x}
    flags = nn.float32_flags(tree)
    assert flags["many"][0].blocks.wide and flags["many"][1].wide and not flags["wide"] and not flags["many"][1].narrow
    for dtype in ("bfloat16", "float16"):
        one, stacked = (nn.cast(tree, dtype)["many"][n] for n in (1, 0))
        for module in (one, stacked.blocks):
            assert module.wide.dtype == jnp.float32 and module.narrow.dtype == dtype
        assert np.array_equal(one.wide, x) and not np.array_equal(one.narrow.astype(jnp.float32), x)
    with jax.enable_x64(True):
        assert nn.cast(tree, "float64")["many"][1].wide.dtype == jnp.float64


def test_rounding_weights_changes_no_bias_by_which_experts_are_chosen():
    router = nn.TopKRouter(embed=8, experts=16, top_k=1, score="sigmoid", balanced=True, key=jax.random.key(0))
    bias = 5 + 0.02 * jax.random.normal(jax.random.key(1), (16,))
    router = eqx.tree_at(lambda r: r.selection_bias, router, bias)
    x, tokens = jax.random.normal(jax.random.key(2), (1, 256, 8)), nn.positions_like((1, 256))
    rounded = eqx.tree_at(lambda r: r.selection_bias, router, bias.astype(jnp.bfloat16))
    experts = eqx.filter_jit(lambda router, x, tokens: router(x, tokens).experts)
    chosen = np.asarray(experts(router, x, tokens))
    unlike = lambda other: float(np.mean(np.asarray(experts(other, x, tokens)) != chosen))
    weight = nn.cast(router, "bfloat16")
    assert weight.linear.weight.dtype == jnp.bfloat16 and np.array_equal(weight.selection_bias, bias)
    assert unlike(rounded) > 0.02 > unlike(weight)


@pytest.mark.parametrize("field", ["parameters", "compute"])
def test_dtypes_are_floating_point(field):
    with pytest.raises(
        ValueError, match=rf"Precision\({field}='int32'\): 'int32' is no floating-point dtype of weights; give one"
    ):
        nn.Precision(**{field: "int32"})
    assert nn.Precision() == nn.Precision("float32", "float32")


def test_dtypes_go_by_the_names_that_people_type():
    typed = {"float32": "float32 fp32 f32 float FP32 jnp.float32", "bfloat16": "bfloat16 bf16 torch.bfloat16"}
    typed |= {"float16": "float16 fp16 f16 half"}
    for full, names in typed.items():
        assert {nn.float_dtype(name, "") for name in [*names.split(), jnp.dtype(full), jnp.dtype(full).type]} == {full}
    assert nn.Precision("half", "bf16") == nn.Precision("float16", "bfloat16")
    for refused in ("int8", "bf", "", "float8_e4m3fn", None, object()):
        with pytest.raises(ValueError, match=r"^--dtype: .* give one of float32 \(fp32\), bfloat16 \(bf16\)"):
            nn.float_dtype(refused, "--dtype")
    for name in ("float64", "double"):
        with pytest.raises(ValueError, match="JAX_ENABLE_X64=1"):
            nn.float_dtype(name, "")
    with jax.enable_x64(True):
        assert nn.float_dtype("double", "") == "float64"


def test_models_and_caches_take_short_names():
    attention = lambda key: nn.Attention(embed=8, heads=2, head_dim=4, key=key)
    norm = nn.RMSNorm("embed", embed=8)
    block = lambda key: nn.Block(nn.Residual(attention(key), norm), nn.Residual(nn.MLP(embed=8, mlp=8, key=key), norm))
    model = random_module(
        lambda: nn.Transformer(
            nn.Embedding(vocab=8, embed=8, key=KEY), (nn.Stack(block, 1, key=KEY),), norm, compute_dtype="bf16"
        )
    )
    assert model.compute_dtype == "bfloat16"
    latent = random_module(nn.LatentAttention, embed=8, heads=2, latent=4, head_dim=4, v_dim=4, key=KEY)
    for keeper in (model, random_module(attention, KEY), latent):
        caches = [eqx.filter_eval_shape(keeper.init_cache, (1,), 4, *dtype) for dtype in ((), ("half",))]
        found = [
            {x.dtype.name for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating)} for cache in caches
        ]
        assert found == [{"bfloat16" if keeper is model else "float32"}, {"float16"}]
        with pytest.raises(ValueError, match=r"init_cache\(dtype='int4'\)"):
            keeper.init_cache((1,), 4, "int4")


def test_reductions_are_float32_at_least():
    found = {name: str(at_least_float32(jnp.dtype(name))) for name in ("bfloat16", "float16", "float32", "float64")}
    assert found == {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
