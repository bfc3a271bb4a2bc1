"""What each platform compiles of grouped products: blocks on CPUs and GPUs, kernels on TPUs, compared with loops."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import compiled_for_tpu
from grouped_cases import given, OUTPUTS, product, ROWS, SIZES, wanted, with_gradients
from nn_reference import close, wide

from eqformer.nn.experts import _grouped_kernels


def operations(platform):
    """What the products and gradients lower to, by name."""
    traced = jax.jit(with_gradients).trace(*given(), np.array(SIZES["even"]))
    return re.findall(r"\b(?:stable|c)hlo\.(\w+)\"?(?!<)", traced.lower(lowering_platforms=(platform,)).as_text())


def test_cpus_and_gpus_get_a_loop_over_blocks_and_none_a_product_with_all_groups():
    for platform in ("cpu", "cuda"):
        found = operations(platform)
        assert "ragged_dot" not in found and found.count("while") >= 3, platform


@pytest.mark.parametrize("rows,sizes", [pytest.param(130, [50, 0, 77, 3], marks=pytest.mark.grid), (5, [1, 0, 0, 2])])
def test_kernels_for_tpus_give_the_products_of_a_loop(rows, sizes):
    """As plain JAX; rows fill no whole tile, and some are behind the last group."""
    direction, x, weight = given(rows)
    outer = lambda gradient, x, sizes, **how: _grouped_kernels.outer(gradient, x, sizes, jnp.float32, **how)
    kernels: Any = (_grouped_kernels.times, _grouped_kernels.back, outer)
    pairs = (x, weight), (direction, weight), (direction, x)

    @jax.jit
    def run_all(pairs, sizes):
        return [kernel(*pair, sizes, interpret=True) for kernel, pair in zip(kernels, pairs, strict=True)]

    found = run_all(pairs, np.array(sizes, np.int32))
    for one, other in zip(found, wanted((direction, x, weight), sizes), strict=True):
        assert close(one, other, 1e-6)
    assert not close(found[0], product(wide(x), wide(weight), sizes[::-1]), 1e-3)


def test_kernels_for_tpus_say_over_which_axes_they_vary():
    """In a mapped function that checks it; JAX's own are refused there."""
    (_, x, weight), sizes = given(), np.array([[20, 30, 0, 30], [80, 0, 0, 0]], np.int32)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows, plain = jax.sharding.PartitionSpec("rows"), _grouped_kernels._kernels().gmm

    def shapes(kernel):
        mapped = jax.shard_map(kernel, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        return jax.eval_shape(mapped, x, jnp.concatenate([weight] * 2), sizes)

    assert shapes(lambda x, weight, sizes: _grouped_kernels.times(x, weight, sizes[0])).shape == (ROWS, OUTPUTS)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="vma|manual_axis_type"):
        shapes(lambda x, weight, sizes: plain(x, weight, sizes[0], tiling=(8, 5, 3), transpose_rhs=True))


def test_the_compiler_for_tpus_takes_the_kernels_and_copies_no_weights():
    """Where it is installed: a product with every group and row would have as many times the operations."""
    x, weight = ((4096, 512), jnp.bfloat16), ((16, 768, 512), jnp.bfloat16)
    program = compiled_for_tpu(with_gradients, ((4096, 768), jnp.bfloat16), x, weight, ((16,), jnp.int32))
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r"bf16\[16,(768,512|512,768)\]\S* (copy|transpose)\(", text)
    assert program.cost_analysis()["flops"] < 1.1 * 3 * 2 * 4096 * 512 * 768
