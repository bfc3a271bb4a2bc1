"""Products of few rows with quantized weights on CPUs, against a float64 formula; gradients and refused calls."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eqformer import kernels, nn
from eqformer.kernels import _native


FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ROWS, OUTPUTS = 3, 256
CASES = {  # form, bytes of a row, groups of a row, whether there are zeros
    "int8": ("int8", 4096, 1, False),
    "int8, groups, zeros": ("int8", 4096, 32, True),
    "int4": ("int4", 512, 1, False),
    "int4, groups, zeros": ("int4", 512, 32, True),
    "fp8": ("fp8", 4096, 4, False),
    "fp4": ("fp4", 512, 32, False),
}


@pytest.fixture(autouse=True)
def no_native_kernel(monkeypatch):
    """Leave calls to the implementations of this file, although another test may have built the kernel in C++."""
    monkeypatch.setattr(_native, "_load_library", lambda: None)


def draw_call(name: str, dtype: str = "float32") -> tuple[kernels.QuantizedMatmulCall, np.ndarray]:
    """Return a call of random arrays, and its matrix in float64."""
    form, width, groups, has_zeros = CASES[name]
    draw, is_half = np.random.default_rng(0), form in ("int4", "fp4")
    codes = draw.integers(0, 256, (OUTPUTS, width)).astype(np.uint8)
    if form == "fp8":
        codes[codes % 128 == 127] = 0  # These codes are no numbers.
    each = np.stack([codes & 15, codes >> 4], -1).reshape(OUTPUTS, -1) if is_half else codes
    zeros = draw.integers(0, 16 if is_half else 256, (OUTPUTS, groups)).astype(np.uint8) if has_zeros else None
    exponents, scales = draw.integers(115, 125, (OUTPUTS, groups)), draw.random((OUTPUTS, groups), np.float32)
    repeat = lambda array: np.repeat(array.astype(np.float64), each.shape[1] // groups, -1)
    if form == "fp8":
        numbers = each.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif form == "fp4":
        numbers = FP4[each % 8] * np.where(each > 7, -1.0, 1.0)
    else:
        numbers = each.astype(np.float64) - ((8.0 if is_half else 128.0) if zeros is None else repeat(zeros))
    matrix = numbers * (2.0 ** repeat(exponents - 127) if form == "fp4" else repeat(scales))
    x = jnp.asarray(draw.normal(size=(ROWS, each.shape[1])), dtype)
    arrays = (codes, exponents.astype(np.uint8) if form == "fp4" else scales, zeros)
    codes, scales, zeros = jax.tree.map(jnp.asarray, arrays)
    return kernels.QuantizedMatmulCall(x, codes, scales, zeros, form), matrix


def distance(y, expected) -> float:
    """Return the largest distance as a share of the largest number."""
    return float(np.max(np.abs(np.asarray(y, np.float64) - expected)) / np.max(np.abs(expected)))


@pytest.mark.parametrize("name", CASES)
def test_products_in_blocks_are_those_of_the_formula(name):
    call, matrix = draw_call(name)
    assert kernels.BlockwiseMatmul().supports(call) is None
    expected = np.asarray(call.x, np.float64) @ matrix.T
    assert distance(jax.jit(kernels.BlockwiseMatmul())(call), expected) < 2e-6
    swapped = dataclasses.replace(call, x=call.x.reshape(ROWS, -1, 2)[..., ::-1].reshape(call.x.shape))
    assert distance(jax.jit(kernels.BlockwiseMatmul())(swapped), expected) > 0.1  # the order of inputs matters


def test_sixteen_bits_round_the_matrix_as_the_definition_does():
    call, matrix = draw_call("int4, groups, zeros", "bfloat16")
    expected = np.asarray(jax.jit(kernels.DecodedMatmul())(call), np.float64)
    y = jax.jit(kernels.BlockwiseMatmul())(call)
    assert y.dtype == jnp.bfloat16 and distance(y, expected) < 2**-7
    # Each number is rounded once, to 8 bits of mantissa.
    rounded_matrix = np.asarray(jnp.asarray(matrix, jnp.bfloat16), np.float64)
    exact = np.asarray(call.x, np.float64) @ rounded_matrix.T
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-5 * np.max(np.abs(exact)))


def test_a_map_takes_blocks_on_cpus_and_has_the_gradients_of_its_matrix():
    linear = nn.Linear("embed -> heads head_dim", embed=1024, heads=4, head_dim=64, key=jax.random.key(0))
    linear = nn.quantize(linear, "int4", group=32)
    x = jax.random.normal(jax.random.key(1), (2, 3, 1024))
    (line,) = kernels.explain(linear, x, platform="cpu")
    assert line.implementation == "BlockwiseMatmul"
    loss = lambda call: lambda scales, x: jnp.sum(jnp.sin(call(eqx.tree_at(lambda m: m.scales, linear, scales), x)))
    gradients = jax.jit(jax.grad(loss(lambda m, x: m(x)), (0, 1)))(linear.scales, x)
    plain = loss(lambda m, x: jnp.einsum("bsi,hdi->bshd", x, m.matrix()))
    expected = jax.jit(jax.grad(plain, (0, 1)))(linear.scales, x)
    assert max(distance(*pair) for pair in zip(gradients, expected)) < 1e-5
    assert distance(gradients[1], 1.1 * expected[1]) > 0.05
    many = jnp.zeros((129, 1024))
    assert not kernels.explain(linear, many, platform="cpu")  # The decoded matrix serves many rows.


def test_calls_that_are_left_to_the_definition():
    call, _ = draw_call("int4, groups, zeros")
    pad = lambda array, rows: jnp.resize(array, (rows, array.shape[1]))
    few = lambda rows: dataclasses.replace(call, codes=pad(call.codes, rows), scales=pad(call.scales, rows), zeros=None)
    assert "fits into the cache when it is decoded as a whole" in str(kernels.BlockwiseMatmul().supports(few(64)))
    assert "rows of the matrix have no divisor from 64 to 512" in str(kernels.BlockwiseMatmul().supports(few(521)))
    (line,) = kernels.explain(kernels.QUANTIZED_MATMUL, few(521), platform="cpu")
    assert line.implementation == "DecodedMatmul" and "no divisor" in str(line)
