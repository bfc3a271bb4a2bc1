"""FP8 products of experts, in slots, in blocks and by kernels, against float64 loops with the same rounding."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_reference import reference
from grouped_cases import linears, SIZES
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec
from nn_reference import close, normal, random_module, wide

from eqformer import kernels, nn
from eqformer.kernels import _op
from eqformer.nn.experts import _experts as _grouped, _grouped_blocks
from eqformer.nn.experts._experts import run_grouped


ROWS, INPUTS, OUTPUTS, GROUPS = 160, 12, 6, 4
HAS_MIXED = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
MIXED = pytest.mark.skipif(not HAS_MIXED, reason="JAX 0.12 multiplies factors of two formats on tensor cores")


def in_8_bits(module: Any) -> Any:
    return nn.with_fp8(module, [nn.Linear])


def given(rows: int = ROWS, inputs: int = INPUTS, outputs: int = OUTPUTS, groups: int = GROUPS) -> Any:
    """Gradients, rows and matrices of unlike sizes: rows and groups up to 20 times as large as others."""
    sizes, of_groups = np.exp(wide(normal(4, rows, 1))), np.exp(wide(normal(5, groups, 1, 1)))
    direction, x, weight = normal(1, rows, outputs), normal(2, rows, inputs), normal(3, groups, outputs, inputs)
    return wide(direction) / sizes, wide(x) * sizes, wide(weight) * of_groups


def by_loop(direction: np.ndarray, x: np.ndarray, weight: np.ndarray, sizes: Any) -> tuple:
    """What each group's map gives of its rows, and both gradients; zeros behind the last group."""
    y, to_x, to_weight = np.zeros(direction.shape), np.zeros(x.shape), np.zeros(weight.shape)
    ends = np.cumsum(sizes)
    for group, part in enumerate(map(slice, ends - np.array(sizes), ends)):
        y[part], to_x[part], to_weight[group] = reference(x[part], weight[group], direction[part])
    return y, to_x, to_weight


def both(direction: Any, x: Any, weight: Any, sizes: Any, number: Any = in_8_bits) -> tuple:
    y, pull = jax.vjp(lambda x, weight: run_grouped(number(linears(weight)), x, sizes), x, weight)
    return y, *pull(direction.astype(y.dtype))


run, run_plain = jax.jit(both), jax.jit(functools.partial(both, number=lambda maps: maps))


@pytest.mark.parametrize("name", ["even", "slots and blocks", "rows behind", "one takes all", "nobody"])
def test_slots_and_blocks_are_the_formulas(name):
    """In float64, digit by digit: a scale for each row and for each group's matrix, gradients in E5M2."""
    sizes = SIZES[name]
    with jax.enable_x64(True):
        arrays = given()
        found = run(*map(jnp.asarray, arrays), np.array(sizes))
        for one, other in zip(found, by_loop(*arrays, sizes=sizes), strict=True):
            assert one.dtype == jnp.float64 and close(one, other, 1e-8)
        if sum(sizes):  # the control: the same products in the compute dtype
            plain = run_plain(*map(jnp.asarray, arrays), np.array(sizes))
            assert not any(close(one, other, 3e-3) for one, other in zip(plain, found))


@pytest.mark.by_default("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrower_dtypes(dtype):
    """What is rounded to 8 bits are the numbers of the compute dtype, and results are rounded to it once."""
    sizes, tolerance = SIZES["slots and blocks"], {"bfloat16": 2**-8, "float32": 1e-6}[dtype]
    direction, x, weight = (jnp.asarray(one, dtype) for one in given())
    y, to_x, to_weight = run(direction, x, weight, np.array(sizes))
    wanted = by_loop(wide(direction), wide(x), wide(weight), sizes)
    assert y.dtype == to_x.dtype == dtype
    for one, other in zip((y, to_x, to_weight), wanted, strict=True):
        assert close(wide(one), other, tolerance)


CASES = [(203, 192, 128, [70, 0, 3, 65]), pytest.param(20, 64, 64, [1, 0, 2], marks=pytest.mark.grid)]


@MIXED
@pytest.mark.parametrize("rows,inputs,outputs,sizes", CASES)
def test_kernels_are_the_formulas(rows, inputs, outputs, sizes):
    """As plain JAX, of bfloat16; what rows behind the last group hold is not read."""
    arrays, own = given(rows, inputs, outputs, len(sizes)), kernels.HopperFp8GroupedMatmul(interpret=True)
    direction, x, weight = (jnp.asarray(one, jnp.bfloat16) for one in arrays)
    wanted = by_loop(wide(direction), wide(x), wide(weight), sizes)
    direction, x = (one.at[sum(sizes) :].set(jnp.nan) for one in (direction, x))

    @jax.jit
    def run_all(direction: Any, x: Any, weight: Any, sizes: Any) -> tuple:
        to_weight = own.weight_grad(direction, x, sizes, jnp.float32)
        return own.forward(x, weight, sizes), own.input_grad(direction, weight, sizes), to_weight

    found = run_all(direction, x, weight, np.array(sizes, np.int32))
    for one, other, tolerance in zip(found, wanted, (2**-8, 2**-8, 1e-6), strict=True):
        assert close(wide(one), other, tolerance)
    moved = by_loop(*(np.nan_to_num(wide(one)) for one in (direction, x, weight)), sizes=sizes[::-1])
    assert not any(close(wide(one), other, 0.1) for one, other in zip(found, moved))


def loss_and_gradients(arrays: dict[str, np.ndarray], x: np.ndarray, direction: np.ndarray, sizes: Any) -> tuple:
    """Of gated layers, one for each group: `sum(direction * y)`, and the gradients of maps and rows, in float64."""
    to_maps, to_x, total = {name: np.zeros(one.shape) for name, one in arrays.items()}, np.zeros(x.shape), 0.0
    ends = np.cumsum(sizes)
    for group, part in enumerate(map(slice, ends - np.array(sizes), ends)):
        own = {name: one[group] for name, one in arrays.items()}
        nothing = np.zeros((len(x[part]), len(own["up"])))
        gate, up = (reference(x[part], own[name], nothing)[0] for name in ("gate", "up"))
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        y, to_hidden, to_maps["down"][group] = reference(hidden, own["down"], direction[part])
        to_gate = to_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        for name, to_y in (("gate", to_gate), ("up", to_hidden * gate * sigmoid)):
            _, more, to_maps[name][group] = reference(x[part], own[name], to_y)
            to_x[part] += more
        total += np.sum(direction[part] * y)
    return total, to_maps, to_x


def experts_of(inputs: int, mlp: int) -> nn.Experts:
    return random_module(
        nn.Experts, lambda key: nn.GatedMLP(embed=inputs, mlp=mlp, key=key), GROUPS, key=jax.random.key(0)
    )


@pytest.mark.grid
@pytest.mark.parametrize("name", ["slots and blocks", "one takes all"])
def test_the_loss_and_the_gradients_of_a_layer(name):
    """In float64, and without any rounding they are others."""
    sizes = SIZES[name]
    with jax.enable_x64(True):
        experts = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), experts_of(INPUTS, 20))
        x, direction = (wide(normal(seed, ROWS, INPUTS)) for seed in (1, 2))
        arrays, static = eqx.partition(in_8_bits(experts), eqx.is_array)

        def loss(arrays: Any, x: Any, static: Any = static) -> Any:
            return jnp.sum(eqx.combine(arrays, static).sorted_rows(x, jnp.array(sizes)) * direction)

        total, (to_arrays, to_x) = jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays, x)
        maps = {name: wide(getattr(experts.mlps, name).weight) for name in ("gate", "up", "down")}
        wanted, to_maps, to_rows = loss_and_gradients(maps, x, direction, sizes)
        assert float(total) == pytest.approx(wanted, rel=1e-8) and close(to_x, to_rows, 1e-8)
        for name, one in to_maps.items():
            assert close(getattr(to_arrays.mlps, name).weight, one, 1e-8)
        plain, static = eqx.partition(experts, eqx.is_array)
        without = jax.jit(functools.partial(loss, static=static))(plain, x)
        assert float(without) != pytest.approx(wanted, rel=1e-3)


@MIXED
def test_kernels_of_8_bits_where_there_are_any():
    """A module by ragged products: without such kernels in the compute dtype, with them what slots and blocks give."""
    experts, sizes = in_8_bits(experts_of(64, 64)), jnp.array([30, 0, 47, 3], jnp.int32)
    x, direction = normal(1, 90, 64), normal(2, 90, 64)

    def both_of(way: Any, experts: Any, **more: Any) -> Any:
        arrays, static = eqx.partition(experts.mlps, eqx.is_array)
        forward, backward = way
        y, kept = forward(static, arrays, x, sizes, **more)
        return y, backward(static, arrays, x, sizes, (*kept, y), direction, **more)

    blocks = _grouped_blocks.blocks_forward, _grouped_blocks.blocks_backward
    ragged = _grouped.kernels_forward, _grouped.kernels_backward
    in_8, in_16 = kernels.HopperFp8GroupedMatmul(interpret=True), kernels.TpuGroupedMatmul(interpret=True)
    ways: Any = {
        "blocks": functools.partial(both_of, blocks, experts),
        "kernels": functools.partial(both_of, ragged, experts, kernel_for=lambda call: in_8 if call.in_fp8 else in_16),
        "none": functools.partial(both_of, ragged, experts, kernel_for=lambda call: in_16),
        "plain": functools.partial(both_of, blocks, nn.without_fp8(experts)),
    }
    found = jax.jit(lambda: {name: jax.tree.leaves(way()) for name, way in ways.items()})()
    like = lambda one, other, tolerance: [close(*pair, tolerance) for pair in zip(found[one], found[other])]
    assert all(like("kernels", "blocks", 1e-3)) and all(like("none", "plain", 1e-5))
    assert not any(like("kernels", "plain", 3e-3))


@pytest.fixture
def with_compilers(monkeypatch):
    """As where the compilers for TPUs and GPUs are installed."""
    for module in (_grouped, _op):
        monkeypatch.setattr(module, "compilers", lambda: ("tpu", "cuda"))
    _grouped._grouped_function.cache_clear()
    yield
    _grouped._grouped_function.cache_clear()


def factors(platform: str, kind: str, experts: nn.Experts, **load: int) -> list[list[str]]:
    """Of the kernels of a layer's gradients, lowered for chips of this kind: the formats of 8 bits in each."""
    arrays, static = eqx.partition(experts, eqx.is_array)
    arrays = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays)

    def run(arrays: Any, x: Any, sizes: Any) -> Any:
        total = lambda *given: jnp.sum(eqx.combine(given[0], static).sorted_rows(given[1], sizes, **load) ** 2)
        return jax.grad(total, (0, 1))(arrays, x)

    device = AbstractDevice(kind, 132, {"cuda": "gpu"}.get(platform, platform))
    mesh = AbstractMesh((1,), ("one",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    traced = jax.jit(mapped).trace(arrays, normal(1, 256, 64).astype(jnp.bfloat16), np.full(4, 64, np.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(r"custom_call @(?:tpu_custom_call|mosaic_gpu_v2)\(.*?\n?.*? : \((.*?)\) ->", text)
    return sorted(re.findall(r"f8E\w+", call) for call in calls)


IN_8_BITS = sorted([["f8E4M3FN", "f8E4M3FN"]] * 3 + [["f8E5M2", "f8E4M3FN"]] * 6)


@pytest.mark.grid
def test_hopper_gpus_have_them(with_compilers):
    """Three products forward and six of gradients."""
    narrow = in_8_bits(experts_of(64, 64))
    assert factors("cuda", "NVIDIA H100", narrow) == (IN_8_BITS if HAS_MIXED else [[]] * 9)


@pytest.mark.grid
def test_other_chips_have_kernels_of_16_bits_and_groups_of_equal_sizes_those_of_8(with_compilers):
    experts = experts_of(64, 64)
    narrow = in_8_bits(experts)
    hopper = factors("cuda", "NVIDIA H100", narrow)
    assert factors("tpu", "TPU7x", narrow) == factors("cuda", "NVIDIA H100", experts) == [[]] * 9
    assert (
        factors("cuda", "NVIDIA H200", narrow, even_rows=8) == hopper
        and factors("tpu", "TPU7x", narrow, max_group_rows=64) == []
    )


@pytest.mark.grid
def test_adapters_stay_in_the_compute_dtype():
    """Of a LoRA beside an expert's map the map alone is of 8 bits, and its factors have gradients."""
    experts = nn.with_lora(experts_of(INPUTS, 20), ["up"], rank=2, key=jax.random.key(1))
    narrow = nn.with_fp8(experts, ["gate", "up"])
    kinds = [type(one).__name__ for one in nn.linear_maps(narrow)]
    assert sorted(kinds) == ["Fp8Linear", "Fp8Linear", "Linear", "Linear", "Linear"]
    arrays, static = eqx.partition(narrow, eqx.is_array)
    x, sizes = normal(1, ROWS, INPUTS), jnp.array(SIZES["slots and blocks"])
    total = lambda arrays: jnp.sum(eqx.combine(arrays, static).sorted_rows(x, sizes) ** 2)
    found = jax.jit(jax.grad(total))(arrays)
    assert jnp.any(found.mlps.up.up.weight) and jnp.any(found.mlps.up.linear.weight)
