"""The C++ kernel for CPUs: its matrix bit for bit, sums against float64, gradients, threads and builds."""

import dataclasses
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from test_quantized_matmul import CASES, distance, draw_call

from eqformer import kernels, nn
from eqformer.kernels import _native


WITHOUT_COMPILER = pytest.mark.skipif(kernels.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """Compile the kernels to a folder of this file's own; they are chosen until its tests have ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQFORMER_KERNELS", str(tmp_path_factory.mktemp("kernels")))
        _native._load_library.cache_clear()
        kernels.build_native()
        yield kernels.NativeQuantizedMatmul()
    _native._load_library.cache_clear()


def resized(call: kernels.QuantizedMatmulCall, outputs: int, **arrays) -> kernels.QuantizedMatmulCall:
    """Return the call with the first rows of its matrix, and other arrays."""
    first = jax.tree.map(lambda array: array[:outputs], (call.codes, call.scales, call.zeros))
    call = dataclasses.replace(call, codes=first[0], scales=first[1], zeros=first[2])
    return dataclasses.replace(call, **arrays)


@WITHOUT_COMPILER
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_formula(name, native):
    call, matrix = draw_call(name)
    assert native.supports(call) is None
    expected = np.asarray(call.x, np.float64) @ matrix.T
    run = jax.jit(native)
    assert distance(run(call), expected) < 1e-6
    assert distance(run(dataclasses.replace(call, x=call.x[:1])), expected[:1]) < 1e-6  # one vector, in registers
    swapped = dataclasses.replace(call, x=call.x.reshape(3, -1, 2)[..., ::-1].reshape(call.x.shape))
    assert distance(run(swapped), expected) > 0.1  # the order of inputs matters


def widths(name: str) -> kernels.QuantizedMatmulCall:
    """Return a call with another layout of groups and other dtypes than those of `CASES`."""
    draw, pad = (
        np.random.default_rng(1),
        lambda array, columns: jnp.asarray(np.resize(np.asarray(array), (37, columns))),
    )
    if name == "long groups":  # of more bytes than are decoded at a time, and no multiple of these
        call, columns, groups = draw_call("int8")[0], 2080, 2
    elif name in ("half scales", "bfloat scales"):
        call, columns, groups = draw_call("int4")[0], 96, 6
    elif name == "float zeros":
        call, columns, groups = draw_call("int4, groups, zeros")[0], 96, 2
    else:
        call, columns, groups = draw_call("fp4")[0], 96, 6
    scales = {
        "half scales": draw.choice([6e-8, 3e-5, 0.0, -1.5, 65504.0], (37, groups)).astype(np.float16),
        "bfloat scales": draw.normal(size=(37, groups)).astype(jnp.bfloat16),
        "smallest exponents": draw.integers(0, 3, (37, groups)).astype(np.uint8),
    }.get(name, draw.random((37, groups), np.float32))
    zeros = jnp.asarray(draw.normal(8, 3, (37, groups)), jnp.float32) if name == "float zeros" else None
    x = jnp.zeros((1, columns * (1 if call.form == "int8" else 2)))
    return dataclasses.replace(call, x=x, codes=pad(call.codes, columns), scales=jnp.asarray(scales), zeros=zeros)


@WITHOUT_COMPILER
@pytest.mark.parametrize("name", ["long groups", "half scales", "bfloat scales", "float zeros", "smallest exponents"])
def test_numbers_of_the_matrix_are_those_of_the_definition_bit_for_bit(name, native):
    call = widths(name)
    matrix = np.asarray(
        jax.jit(lambda call: kernels.decode_matrix(call.codes, call.form, call.scales, call.zeros))(call)
    )
    columns = np.random.default_rng(2).choice(call.x.shape[-1], 4, replace=False)
    picks = jnp.asarray(np.eye(call.x.shape[-1], dtype=np.float32)[columns])  # each output is one number of the matrix
    many, one = jax.jit(native), jax.jit(native)
    assert np.array_equal(many(dataclasses.replace(call, x=picks)), matrix[:, columns].T)
    for place in (0, 1):
        assert np.array_equal(one(dataclasses.replace(call, x=picks[place : place + 1]))[0], matrix[:, columns[place]])
    changed = dataclasses.replace(call, x=picks, scales=jnp.roll(call.scales, 1, axis=1))
    assert not np.array_equal(many(changed), matrix[:, columns].T)


@WITHOUT_COMPILER
def test_codes_that_are_no_numbers_give_no_numbers(native):
    call = resized(draw_call("fp8")[0], 5)
    bad = dataclasses.replace(call, codes=call.codes.at[2, 7].set(0x7F).at[4, 0].set(0xFF))
    y = np.asarray(jax.jit(native)(bad))
    assert np.array_equal(np.isnan(y), np.isin(np.arange(5), (2, 4))[None].repeat(3, 0))


@WITHOUT_COMPILER
def test_a_map_takes_the_kernel_and_has_the_gradients_of_its_matrix(native):
    linear = nn.Linear("embed -> heads head_dim", embed=64, heads=3, head_dim=6, key=jax.random.key(0))
    linear = nn.quantize(linear, "int4", group=32)
    x = jax.random.normal(jax.random.key(1), (2, 2, 64))
    (line,) = kernels.explain(linear, x, platform="cpu")
    assert line.implementation == "NativeQuantizedMatmul"
    loss = lambda call: lambda scales, x: jnp.sum(jnp.sin(call(eqx.tree_at(lambda m: m.scales, linear, scales), x)))
    gradients = jax.jit(jax.grad(loss(lambda m, x: m(x)), (0, 1)))(linear.scales, x)
    plain = loss(lambda m, x: jnp.einsum("bsi,hdi->bshd", x, m.matrix()))
    expected = jax.jit(jax.grad(plain, (0, 1)))(linear.scales, x)
    assert max(distance(*pair) for pair in zip(gradients, expected)) < 1e-5
    assert distance(gradients[1], 1.1 * expected[1]) > 0.05
    # A batch of matrices, one by one.
    stacked = jax.tree.map(lambda array: jnp.stack([array, array[::-1]]), linear)
    both = jax.jit(jax.vmap(lambda m: m(x)))(stacked)
    assert distance(both[0], linear(x)) < 1e-6 and distance(both[1], linear(x)) > 0.1


@WITHOUT_COMPILER
def test_devices_and_threads_compute_at_once(native):
    call = draw_call("int4, groups, zeros")[0]
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",))
    specs = jax.tree.map(lambda array: P() if array is call.x else P("tensor"), call)

    def many(call: kernels.QuantizedMatmulCall) -> jax.Array:
        """Compute more independent products than there are threads."""
        calls = [dataclasses.replace(call, x=call.x * factor) for factor in range(1, 17)]
        return jnp.stack([native(each) / factor for factor, each in enumerate(calls, 1)])

    split = jax.jit(jax.shard_map(many, mesh=mesh, in_specs=(specs,), out_specs=P(None, None, "tensor")))
    y, expected = split(call), jax.jit(kernels.DecodedMatmul())(call)
    assert y.shape == (16, *expected.shape) and all(distance(each, expected) < 1e-6 for each in y)


@WITHOUT_COMPILER
def test_calls_that_are_left_to_others(native):
    call = draw_call("int4, groups, zeros")[0]
    replaced = lambda **arrays: native.supports(dataclasses.replace(call, **arrays))
    assert "computes in float32, not bfloat16" in str(replaced(x=call.x.astype(jnp.bfloat16)))
    assert "takes up to 4 vectors, not 5" in str(replaced(x=jnp.zeros((5, call.x.shape[1]))))
    assert "groups of a multiple of 16 bytes of codes, not of 8" in str(
        replaced(scales=jnp.zeros((256, 64)), zeros=None)
    )


def test_without_a_compiled_kernel_blocks_are_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("EQFORMER_KERNELS", str(tmp_path))
    _native._load_library.cache_clear()
    call = draw_call("int4, groups, zeros")[0]
    (line,) = kernels.explain(kernels.QUANTIZED_MATMUL, call, platform="cpu")
    assert line.implementation == "BlockwiseMatmul" and "build_native() has not compiled it" in str(line)
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"^build_native\(\): no C\+\+ compiler was found; install g\+\+ or clang"):
        kernels.build_native()
    failing = tmp_path / "compiler"
    failing.write_text("#!/bin/sh\necho 'x.cc:1: error: no such thing' >&2; exit 3\n", encoding="utf-8")
    failing.chmod(0o700)
    with pytest.raises(RuntimeError, match="compiler failed: x.cc:1: error: no such thing; choose a compiler for"):
        kernels.build_native(str(failing))
    assert os.listdir(tmp_path) == ["compiler"]
    monkeypatch.setenv("EQFORMER_KERNELS", str(failing / "below"))  # no folder can be made below a file
    with pytest.raises(RuntimeError, match=r"compiler/below cannot be used \(.*\); set EQFORMER_KERNELS to another"):
        kernels.build_native(str(failing))
    assert not kernels.find_compiler()
    _native._load_library.cache_clear()
