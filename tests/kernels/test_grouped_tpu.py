"""Grouped products per platform: blocks on CPUs and GPUs, kernels on TPUs, results compared with loops."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import compiled_for_tpu
from grouped_cases import given, OUTPUTS, ROWS, SIZES, wanted, with_gradients
from nn_reference import close, normal

from eqformer.kernels import TpuGroupedMatmul
from eqformer.kernels.grouped_matmul import _tpu


KERNEL = TpuGroupedMatmul(interpret=True)


def operations(platform):
    """What the products and gradients lower to, by name."""
    traced = jax.jit(with_gradients).trace(*given(), np.array(SIZES["even"]))
    return re.findall(r"\b(?:stable|c)hlo\.(\w+)\"?(?!<)", traced.lower(lowering_platforms=(platform,)).as_text())


def test_cpus_and_gpus_get_a_loop_over_blocks_and_none_a_product_with_all_groups():
    for platform in ("cpu", "cuda"):
        found = operations(platform)
        assert "ragged_dot" not in found and found.count("while") >= 3, platform


# Rows, inputs, outputs, and groups' sizes: tiles have 512 rows, pieces up to 256, and of inputs 1,024 at once.
CASES = {
    "few rows": (5, 5, 3, [1, 0, 0, 2]),
    "no whole tile, rows behind": (130, 5, 3, [50, 0, 77, 3]),
    "whole tiles, and pieces beside": (1100, 8, 4, [700, 0, 1, 399]),
    "parts of channels, of the last some": (40, 1100, 520, [17, 23]),
    "slabs of columns": (300, 4, 512, [290, 10]),
    "nobody": (20, 5, 3, [0, 0]),
}


@pytest.mark.by_default("few rows")
@pytest.mark.parametrize("name", CASES)
def test_kernels_for_tpus_give_the_products_of_a_loop(name):
    """As plain JAX."""
    rows, inputs, outputs, sizes = CASES[name]
    direction, x, weight = arrays = (
        normal(1, rows, outputs),
        normal(2, rows, inputs),
        normal(3, len(sizes), outputs, inputs),
    )

    @jax.jit
    def run_all(direction, x, weight, sizes):
        to_weight = KERNEL.weight_grad(direction, x, sizes, jnp.float32)
        return KERNEL.forward(x, weight, sizes), KERNEL.input_grad(direction, weight, sizes), to_weight

    found = run_all(*arrays, np.array(sizes, np.int32))
    for one, other in zip(found, wanted(arrays, sizes), strict=True):
        assert close(one, other, 2e-6)
    if sum(sizes):  # the control: a border that is one row off
        moved = (
            np.array(sizes)
            + np.eye(len(sizes), dtype=int)[np.argmin(sizes)]
            - np.eye(len(sizes), dtype=int)[np.argmax(sizes)]
        )
        for one, other in zip(found, wanted(arrays, moved), strict=True):
            assert not close(one, other, 1e-4)


LOADS = {
    "few experts, evenly": ([2048] * 4, 1.0),
    "few experts": ([4000, 100, 1900, 2047, 145], 1.01),
    "512 rows of each, about": (list(np.random.default_rng(0).multinomial(8192, [1 / 16] * 16)), 1.06),
    "256 rows of each, about": (list(np.random.default_rng(0).multinomial(8192, [1 / 32] * 32)), 1.1),
}


@pytest.mark.by_default("256 rows of each, about-weight_grad")
@pytest.mark.parametrize("product", ["forward", "weight_grad"])
@pytest.mark.parametrize("name", LOADS)
def test_kernels_for_tpus_compute_little_beside(monkeypatch, name, product):
    """Counted as they run: rows that are multiplied, of those that are there. Tiles of 512 rows, each computed whole
    for every expert that has rows in it, as JAX's kernels have it, would be up to three times these."""
    sizes, max_factor = LOADS[name]
    plain, found = jax.lax.dot_general, []

    def counted(left, right, dims, **more):
        rows = left.shape[0] if product == "forward" else left.shape[dims[0][0][0]]
        jax.debug.callback(lambda: found.append(rows))
        return plain(left, right, dims, **more)

    def executed(channels):
        found.clear()
        x, weight = normal(1, sum(sizes), channels), normal(2, len(sizes), channels, channels)
        given = jnp.array(sizes, jnp.int32)
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "dot_general", counted)
            if product == "forward":
                jax.block_until_ready(KERNEL.forward(x, weight, given))
            else:
                jax.block_until_ready(KERNEL.weight_grad(x, x, given, jnp.float32))
        jax.effects_barrier()
        return sum(found) / sum(sizes)

    assert 1 <= executed(8) <= max_factor
    if name != next(iter(LOADS)):  # the control: pieces that are whole tiles
        monkeypatch.setattr(_tpu, "HEIGHTS", (512,))
        assert executed(16) > max_factor + 0.1  # of other sizes, as kernels that were traced are kept


def test_kernels_for_tpus_say_over_which_axes_they_vary():
    """In a mapped function that checks it."""
    (_, x, weight), sizes = given(), np.array([[20, 30, 0, 30], [80, 0, 0, 0]], np.int32)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")

    def shapes(out):
        product = lambda x, weight, sizes: TpuGroupedMatmul().forward(x, weight, sizes[0])
        mapped = jax.shard_map(product, mesh=mesh, in_specs=(rows,) * 3, out_specs=out)
        return jax.eval_shape(mapped, x, jnp.concatenate([weight] * 2), sizes)

    assert shapes(rows).shape == (ROWS, OUTPUTS)
    with pytest.raises(ValueError, match="rows"):
        shapes(jax.sharding.PartitionSpec())


def test_the_compiler_for_tpus_takes_the_kernels_and_copies_no_weights():
    """Where it is installed: a product with every group and row would have as many times the operations."""
    x, weight = ((4096, 512), jnp.bfloat16), ((16, 768, 512), jnp.bfloat16)
    program = compiled_for_tpu(with_gradients, ((4096, 768), jnp.bfloat16), x, weight, ((16,), jnp.int32))
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r"bf16\[16,(768,512|512,768)\]\S* (copy|transpose)\(", text)
    assert program.cost_analysis()["flops"] < 1.1 * 3 * 2 * 4096 * 512 * 768
