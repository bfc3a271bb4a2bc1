"""The GPU kernel for quantized weights equals plain JAX in float64; its gradients, and the calls that it supports."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haste import put

from eqformer import kernels, nn
from eqformer.kernels import _quantized_matmul as quantized
from eqformer.kernels._op import dispatch_with_derivative


class Case(NamedTuple):
    """A call; outputs and vectors fill no whole blocks, and inputs are several blocks of several chunks."""

    form: str = "int8"
    groups: int = 1
    has_zeros: bool = False
    has_exponents: bool = False
    rows: int = 5
    dtype: Any = jnp.bfloat16


CASES = {
    "int8": Case(),
    "int4 in groups, with zeros": Case("int4", groups=4, has_zeros=True),
    "fp4, exponents": Case("fp4", groups=8, has_exponents=True),
    "fp8": Case("fp8"),
    "int8 in groups, with zeros": Case(groups=4, has_zeros=True, dtype=jnp.float16),
    "int4, many vectors": Case("int4", rows=70),
}
OUTPUTS, INPUTS = 37, 256
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def call_of(case: Case) -> kernels.QuantizedMatmulCall:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (OUTPUTS, INPUTS // kernels.codes_in_a_byte(case.form))).astype(np.uint8)
    if case.form == "fp8":
        codes[codes % 128 == 127] = 0  # which are no numbers
    groups = OUTPUTS, case.groups
    scales = rng.integers(115, 125, groups).astype(np.uint8) if case.has_exponents else rng.random(groups, np.float32)
    zeros = rng.integers(0, 2 ** kernels.BITS[case.form], groups).astype(np.uint8) if case.has_zeros else None
    return kernels.QuantizedMatmulCall(
        put(rng.normal(size=(case.rows, INPUTS)).astype(np.float32), case.dtype),
        put(codes),
        put(scales),
        None if zeros is None else put(zeros),
        form=case.form,
    )


def wanted(call: kernels.QuantizedMatmulCall, *, reads_high_bits: bool = True) -> np.ndarray:
    """The product in float64."""
    codes, bits = np.asarray(call.codes), kernels.BITS[call.form]
    if bits == 4:
        high = codes >> 4 if reads_high_bits else codes & 15
        codes = np.stack([codes & 15, high], -1).reshape(OUTPUTS, INPUTS)
    repeat = lambda x: np.repeat(np.asarray(x, np.float64), INPUTS // x.shape[1], 1)
    if call.form == "fp8":
        numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif call.form == "fp4":
        numbers = FP4[codes % 8] * np.where(codes > 7, -1, 1)
    else:
        numbers = codes.astype(np.float64) - (2 ** (bits - 1) if call.zeros is None else repeat(call.zeros))
    scales = 2.0 ** (repeat(call.scales) - 127) if call.scales.dtype == jnp.uint8 else repeat(call.scales)
    return np.asarray(call.x, np.float64) @ (numbers * scales).T


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(quantized, "_BLOCK_BYTES", 32)
    monkeypatch.setattr(quantized, "_OUTPUTS", 16)
    monkeypatch.setattr(quantized, "_PROGRAMS", 6)


@pytest.mark.by_default("int8", "int4 in groups, with zeros", "fp4, exponents")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_product_in_float64(name):
    call = call_of(CASES[name])
    assert kernels.QuantizedMatmulGpu().supports(call) is None
    product = eqx.filter_jit(kernels.QuantizedMatmulGpu(interpret=True).run)(call)
    assert product.dtype == call.x.dtype and product.shape == (CASES[name].rows, OUTPUTS)
    right = wanted(call)
    distance = lambda y: np.linalg.norm(np.asarray(y, np.float64) - right) / np.linalg.norm(right)
    assert distance(product) < 0.005 and distance(eqx.filter_jit(kernels.DecodedMatmul().run)(call)) < 0.005
    # The comparison sees one byte of an output, and the high bits.
    changed = eqx.tree_at(lambda c: c.codes, call, call.codes.at[3, 200 % call.codes.shape[1]].add(64))
    assert distance(wanted(changed)) > 1e-4
    assert kernels.codes_in_a_byte(call.form) == 1 or distance(wanted(call, reads_high_bits=False)) > 0.1


def test_gradients_are_the_definitions():
    call = call_of(CASES["int4 in groups, with zeros"])
    branches = {"cpu": kernels.QuantizedMatmulGpu(interpret=True).run}

    def total(run: Any, x: jax.Array, scales: jax.Array) -> jax.Array:
        changed = eqx.tree_at(lambda c: (c.x, c.scales), call, (x, scales))
        return jnp.sum(jnp.sin(run(changed).astype(jnp.float32)))

    definition = kernels.DecodedMatmul().run
    by_kernel = lambda call: dispatch_with_derivative(branches, definition, call)
    compute = lambda run: jax.jit(jax.grad(lambda *arrays: total(run, *arrays), (0, 1)))(call.x, call.scales)
    grads = [compute(run) for run in (by_kernel, definition)]
    for grad, right in zip(*grads):
        norm = np.linalg.norm(np.asarray(right, np.float64))
        assert norm > 0 and np.linalg.norm(np.asarray(grad, np.float64) - np.asarray(right, np.float64)) < 0.1 * norm


def test_it_says_which_calls_it_leaves_to_the_definition(monkeypatch):
    supports, call = kernels.QuantizedMatmulGpu().supports, call_of(Case())
    with_x = lambda x: eqx.tree_at(lambda c: c.x, call, x)
    assert "not float32" in str(supports(with_x(call.x.astype(jnp.float32))))
    assert "1 to 128 vectors, not 129" in str(supports(with_x(jnp.zeros((129, INPUTS), jnp.bfloat16))))
    assert "1 to 128 vectors, not 0" in str(supports(with_x(call.x[:0])))
    assert "multiple of 16 bytes of codes, not of 8" in str(supports(call_of(Case("int4", groups=16))))
    monkeypatch.setattr(quantized, "gpu_capability", lambda: 8.0)
    assert supports(call) is None and "compute capability 8.9" in str(supports(call_of(Case("fp8"))))


def test_linear_maps_call_it_for_few_vectors():
    """With outputs and inputs of several dims, whose scales serve all heads or one; many vectors decode the weight."""
    make = lambda spec, **sizes: nn.Linear(spec, **sizes, key=jax.random.key(0))
    output = make("heads head_dim -> embed", heads=4, head_dim=64, embed=32)
    for group in (None, 32):
        linear = nn.quantize(output, "int4", group=group)
        for rows, name in ((8, "QuantizedMatmulGpu"), (200, None)):
            x = jax.ShapeDtypeStruct((rows, 4, 64), jnp.bfloat16)
            names = [line.implementation for line in kernels.explain(linear, x, platform="cuda")]
            assert names == ([] if name is None else [name])
        x = jax.random.normal(jax.random.key(1), (8, 4, 64))
        right = jnp.einsum("bhd,ehd->be", x, linear.matrix())
        assert np.abs(jax.jit(lambda x, linear=linear: linear(x))(x) - right).max() < 1e-4
