"""Quantized linear maps against their formula in float64, and their gradients."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haste import put
from nn_reference import close, normal, random_module, randomised, wide

from eqformer import nn, training


KEY = jax.random.key(0)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CASES = {  # form, whether there are zeros, the dims of scales for a map of 2 heads of 8 channels to 3
    "int8": ("int8", False, (3, 1, 1)),
    "int8 with zeros": ("int8", True, (3, 2, 2)),
    "int4": ("int4", False, (3, 2, 1)),
    "int4 with zeros": ("int4", True, (3, 2, 4)),
    "fp8": ("fp8", False, (3, 1, 1)),
    "fp4": ("fp4", False, (3, 2, 2)),
}


def value(form: str, code: int, zero: int) -> float:
    """What one code stands for."""
    if form == "fp8":
        return float(np.uint8(code).view(ml_dtypes.float8_e4m3fn))
    return (FP4[code % 8] * (-1) ** (code // 8)) if form == "fp4" else code - zero


def stored(name: str) -> tuple[nn.QuantizedLinear, np.ndarray]:
    """A map of random codes, and its weight number by number."""
    form, has_zeros, groups = CASES[name]
    rng, is_half = np.random.default_rng(0), form in ("int4", "fp4")
    codes = rng.integers(0, 256, (3, 2, 4 if is_half else 8)).astype(np.uint8)
    if form == "fp8":
        codes[codes % 128 == 127] = 0  # which are no numbers
    exponents, scales = rng.integers(115, 125, groups).astype(np.uint8), rng.random(groups, np.float32)
    zeros = rng.integers(0, 16 if is_half else 256, groups).astype(np.uint8)
    weight = np.empty((3, 2, 8))
    for out, head, channel in np.ndindex(weight.shape):
        at = (out, min(head, groups[1] - 1), channel * groups[2] // 8)
        code = codes[out, head, channel] if not is_half else codes[out, head, channel // 2] >> 4 * (channel % 2) & 15
        zero = int(zeros[at]) if has_zeros else 8 if is_half else 128
        scale = 2.0 ** (int(exponents[at]) - 127) if form == "fp4" else float(scales[at])
        weight[out, head, channel] = value(form, int(code), zero) * scale
    parts = dict(codes=codes, scales=exponents if form == "fp4" else scales, zeros=zeros if has_zeros else None)
    arrays: Any = jax.tree.map(jnp.asarray, parts | {"bias": normal(2, 3)})
    return nn.QuantizedLinear(("heads", "head_dim"), ("embed",), form=form, **arrays), weight


run = eqx.filter_jit(lambda linear, x: (linear(x), linear.matrix()))


@pytest.mark.parametrize("name", CASES)
def test_each_form_is_its_formula(name):
    linear, weight = stored(name)
    assert linear.shape == (3, 2, 8) and linear.sizes == {"embed": 3, "heads": 2, "head_dim": 8}
    groups = ("embed", *(dim if size > 1 else "_" for dim, size in zip(linear.inputs, CASES[name][2][1:])))
    assert linear.scale_dims == groups and nn.dims(linear).codes == "embed heads head_dim"
    x = normal(1, 5, 2, 8)
    found, matrix = run(linear, x)
    assert np.array_equal(matrix, weight.astype(np.float32))
    expected = np.einsum("nhd,ehd->ne", wide(x), weight) + wide(linear.bias)
    assert close(found, expected)
    swapped = eqx.tree_at(lambda m: m.codes, linear, put(np.asarray(linear.codes)[..., ::-1]))
    assert not close(run(swapped, x)[0], expected)
    with pytest.raises(ValueError, match=r"QuantizedLinear\('heads head_dim -> embed'\)\(x\): .* shape \(5, 8\)"):
        linear(put(np.asarray(x)[:, 0]))


def test_each_code_has_its_number_by_the_least_and_the_largest_exponent():
    """0 among them, whose power float32 holds as a subnormal number alone; products that are such themselves are 0."""
    exponents, codes = (0, 1, 2, 127, 254), np.arange(16, dtype=np.uint8)
    with np.errstate(over="ignore"):
        values = [[value("fp4", code, 0) * 2.0 ** (e - 127) for code in range(16)] for e in exponents]
        want = np.array(values).astype(np.float32)
    pairs, scales = np.tile(codes[::2] | codes[1::2] << 4, (5, 1)), np.array(exponents, np.uint8)[:, None]
    linear = nn.QuantizedLinear(("embed",), ("mlp",), form="fp4", codes=put(pairs), scales=put(scales))
    found = np.asarray(jax.jit(nn.QuantizedLinear.matrix)(linear))
    tiny = np.abs(want) < 2.0**-126
    assert np.array_equal(found, np.where(tiny, 0, want)) and tiny[0].sum() == 8 and np.isinf(want[-1]).sum() == 8
    assert np.count_nonzero(found[0]) == 8


def test_a_product_in_sixteen_bits_is_that_of_the_rounded_weight():
    linear, _ = stored("int4 with zeros")
    x, plain = normal(1, 5, 2, 8).astype(jnp.bfloat16), nn.cast(nn.dense(linear), "bfloat16")
    run = jax.jit(lambda linear, x: linear.product(x, jnp.float32))
    assert np.array_equal(run(linear, x), run(plain, x))
    assert not np.array_equal(run(linear, x), jnp.einsum("nhd,ehd->ne", x.astype(jnp.float32), linear.matrix()))


def test_codes_are_neither_trained_nor_cast_and_factors_beside_them_are():
    """Gradients are those beside the decoded weight, whose own gradient a scale's is the sum of."""
    linear, x = stored("int4")[0], normal(1, 5, 2, 8)
    adapted = randomised(nn.with_lora(linear, [nn.QuantizedLinear], rank=2, key=KEY))
    plain = eqx.tree_at(lambda m: m.linear, adapted, nn.dense(adapted.linear))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))
    got, want = gradient(adapted, x), gradient(plain, x)
    assert got.linear.codes is None and training.trainable(adapted).linear.codes is None
    for part in (lambda m: m.down.weight, lambda m: m.up.weight, lambda m: m.linear.bias):
        assert close(part(got), wide(part(want)))
    of_weight = wide(want.linear.weight) * wide(linear.matrix()) / wide(linear.scales)
    assert close(got.linear.scales, of_weight.sum(-1, keepdims=True))
    narrow = nn.cast(adapted, "bfloat16")
    assert narrow.linear.codes.dtype == jnp.uint8 and narrow.linear.scales.dtype == jnp.float32
    assert narrow.down.weight.dtype == jnp.bfloat16


def test_layers_are_kept_for_the_backward_pass_as_codes():
    """What a stack of maps keeps has no array of the size of all their weights but codes; of plain maps it has."""

    def kept(stack: Any) -> set:
        run = lambda x: jax.vjp(lambda x: stack(x)[0], x)[1]
        residuals = jax.eval_shape(run, jax.ShapeDtypeStruct((1, 2, 8), jnp.float32))
        return {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(residuals)}

    def layer(key):
        mlp = nn.MLP(embed=8, mlp=32, key=key)
        return nn.Block(nn.Residual(mlp, nn.RMSNorm("embed", embed=8)))

    stack = random_module(nn.Stack, layer, 3, key=KEY)
    rounded = eqx.filter_jit(lambda stack: nn.quantize(stack, "int8"))(stack)
    assert ((3, 32, 8), "float32") in kept(stack)
    assert {shape for shape, dtype in kept(rounded) if shape[-2:] in ((32, 8), (8, 32))} == {
        (3, 32, 8),
        (3, 8, 32),
    }
