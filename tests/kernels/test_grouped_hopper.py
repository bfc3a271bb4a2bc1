"""Grouped products on Hopper GPUs: results in Mosaic's interpreter, tiles, and the calls that use the kernels."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices_for
from grouped_cases import linears, wanted
from haste import keep_known, put
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from nn_reference import close, normal

from eqformer import nn
from eqformer.kernels import _op, GroupedMatmulCall, HopperGroupedMatmul
from eqformer.kernels.grouped_matmul._hopper import choose_tile, make_row_tiles
from eqformer.nn.experts import _experts as _grouped


CASES = {
    "uneven, an empty group, rows behind": (203, 128, 192, [70, 0, 3, 65]),
    "few rows": (20, 64, 64, [1, 0, 2]),
    "nobody": (64, 64, 64, [0, 0]),
    "whole tiles": (256, 64, 64, [64, 192]),
}
# The interpreter of older ones multiplies no factor that is transposed where it lies.
IS_WHOLE = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
TRANSPOSES = pytest.mark.skipif(not IS_WHOLE, reason="JAX 0.12 has an interpreter of transposed factors")
AUTO = jax.sharding.AxisType.Auto


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.grid) for n in [*CASES][1:])])
@pytest.mark.parametrize(
    "product",
    [pytest.param("forward", marks=TRANSPOSES), "input_grad", pytest.param("weight_grad", marks=TRANSPOSES)],
)
def test_kernels_give_the_products_of_a_loop(product, name):
    rows, inputs, outputs, sizes = CASES[name]
    arrays = normal(1, rows, outputs), normal(2, rows, inputs), normal(3, len(sizes), outputs, inputs)
    direction, x, weight = narrow = tuple(array.astype(jnp.bfloat16) for array in arrays)
    kernel = HopperGroupedMatmul(interpret=True)
    found = {
        "forward": lambda sizes: kernel.forward(x, weight, sizes),
        "input_grad": lambda sizes: kernel.input_grad(direction, weight, sizes),
        "weight_grad": lambda sizes: kernel.weight_grad(direction, x, sizes, jnp.float32),
    }[product]
    y = jax.jit(found)(np.array(sizes, np.int32))
    place = ("forward", "input_grad", "weight_grad").index(product)
    tolerance = 1e-6 if product == "weight_grad" else 4e-3
    exact = tuple(array.astype(jnp.float32) for array in narrow)
    assert close(y.astype(jnp.float32), wanted(exact, sizes)[place], tolerance)
    if sum(sizes):  # the control: a border that is one row off
        big, other = int(np.argmax(sizes)), int(np.argmin(sizes))
        moved = np.array(sizes)
        moved[big], moved[other] = moved[big] - 1, moved[other] + 1
        assert not close(y.astype(jnp.float32), wanted(exact, moved)[place], 10 * tolerance)


LOADS = {
    "16,384 rows of 8": (16384, [2048] * 8, 1.04),
    "16,384 unevenly": (16384, [4000, 100, 2900, 2047, 1, 3000, 1336, 3000], 1.04),
    "32,768 rows of 64": (32768, [512] * 64, 1.01),
    "32,768 unevenly": (32768, [300, 724] * 32, 1.1),
    "16 rows of 4": (16, [4, 0, 1, 2], 27.5),  # in decoding: 64 rows of each group that has some
}


@pytest.mark.parametrize("name", LOADS)
def test_tiles_have_each_row_once_and_few_beside(name):
    """What is computed, of what the rows need: tiles times their rows."""
    rows, sizes, max_factor = LOADS[name]
    height = choose_tile(rows, len(sizes), 1024).rows
    make = jax.jit(lambda sizes: make_row_tiles(sizes, max(rows, height), height))
    tiles = jax.device_get(make(put(sizes, np.int32)))
    used = int(tiles.used[0])
    ends, owner = np.cumsum(sizes), np.full(max(rows, height), -1)
    for group, begin, start, size in zip(*(column[:used] for column in tiles[:4])):
        own = slice(start, start + size)
        assert size and begin % 8 == 0 and begin <= start and start + size <= begin + height
        assert np.all(owner[own] == -1)
        owner[own] = group
    row = np.arange(len(owner))
    assert np.array_equal(owner, np.minimum(np.sum(row[:, None] >= ends, axis=1), len(sizes)))
    computed = height * np.count_nonzero(tiles.group[:used] < len(sizes))
    assert computed <= max_factor * sum(sizes)
    assert computed > 0.8 * max_factor * sum(sizes)  # the control: the bound is near


def gated(embed=128, mlp=192, dtype: Any = jnp.bfloat16):
    """Four experts' shapes."""
    make = lambda key: nn.Experts(lambda key: nn.GatedMLP(embed=embed, mlp=mlp, bias=True, key=key), 4, key=key)
    its = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    return jax.tree.map(its, eqx.filter_eval_shape(make, jax.random.key(0)))


def gradients_of(experts, rows=256, even_rows=None):
    """The gradients of experts and rows, and what they take."""
    arrays, static = eqx.partition(experts, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    x = jax.ShapeDtypeStruct((rows, experts.mlps.down.shape[-2]), jax.tree.leaves(arrays)[0].dtype)

    def run(arrays, x, sizes):
        def total(arrays, x):
            y = eqx.combine(arrays, static).sorted_rows(x, sizes, even_rows=even_rows)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(total, (0, 1))(arrays, x)

    return run, (arrays, x, jax.ShapeDtypeStruct((4,), jnp.int32))


@pytest.fixture
def with_compiler(monkeypatch):
    """As where the compiler for GPUs is installed."""
    for module in (_grouped, _op):
        monkeypatch.setattr(module, "compilers", lambda: ("cuda",))
    _grouped._grouped_function.cache_clear()
    yield
    _grouped._grouped_function.cache_clear()


def kernels(experts, platform="cuda", gpu="NVIDIA H100", **load):
    """How many kernels a program has that is lowered for GPUs of this name."""
    run, given = gradients_of(experts, **load)
    mesh = AbstractMesh((1,), ("one",), (AUTO,), abstract_device=AbstractDevice(gpu, 132, "gpu"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    text = jax.jit(mapped).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    return len(re.findall("@mosaic_gpu", text))


@pytest.mark.grid
def test_programs_for_hopper_have_kernels_and_no_others(with_compiler):
    """Of a gated layer two products forward, as its output is not read, and six of their gradients."""
    assert kernels(gated()) == 9 and kernels(gated(), gpu="NVIDIA B200") == 0


@pytest.mark.grid
def test_other_platforms_widths_and_dtypes_have_none(with_compiler):
    assert kernels(gated(), platform="cpu") == kernels(gated(), gpu="NVIDIA A100-SXM4-80GB") == 0
    assert kernels(gated(embed=96)) == kernels(gated(dtype=jnp.float32)) == 0
    assert kernels(gated(), rows=1024, even_rows=8) == 9  # however much room there is that an even load does not fill


def test_results_vary_over_the_axes_that_rows_vary_over():
    """In a mapped function that checks it; JAX's kernels for GPUs say that they are the same everywhere."""
    x, weight, sizes = normal(1, 256, 64), normal(2, 8, 128, 64), np.array([[20, 30, 0, 30], [80, 0, 0, 0]], np.int32)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(AUTO,))
    rows = PartitionSpec("rows")
    narrow = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), sizes

    def shapes(out):
        product = lambda x, weight, sizes: HopperGroupedMatmul().forward(x, weight, sizes[0])
        return jax.eval_shape(jax.shard_map(product, mesh=mesh, in_specs=(rows,) * 3, out_specs=out), *narrow)

    assert shapes(rows).shape == (256, 128)
    with pytest.raises(ValueError, match="rows"):
        shapes(PartitionSpec())


def test_maps_that_are_put_together_have_none(with_compiler):
    """Adapters and codes are computed group by group, where they are not written out."""
    x, sizes = normal(2, 128, 64).astype(jnp.bfloat16), jnp.full(4, 32, jnp.int32)

    def platforms(maps: Any, x: jax.Array) -> tuple[str, ...]:
        arrays, static = eqx.partition(maps, eqx.is_array)
        return _grouped._kernel_platforms(static, arrays, x, sizes, None)

    maps = linears(normal(1, 4, 64, 64).astype(jnp.bfloat16))
    assert platforms(maps, x) == ("cuda",) and platforms(maps, x[:0]) == ()
    assert platforms(nn.quantize(maps, "int8"), x) == ()


def test_each_refusal_has_its_reason():
    def reason(rows: int = 64, dtype: Any = jnp.bfloat16, width: int = 64, **options: Any) -> str | None:
        x, weight = jnp.zeros((rows, width), dtype), jnp.zeros((4, 64, width), dtype)
        return HopperGroupedMatmul().supports(GroupedMatmulCall(x, weight, jnp.zeros(4, jnp.int32), **options))

    assert reason() is None and reason(rows=0) == "there are no rows"
    assert reason(dtype=jnp.float32) == "it computes in bfloat16 or float16, not float32"
    assert reason(width=96) == "it takes a multiple of 64 channels, not [64, 96]"
    assert "cheaper one group at a time" in str(reason(is_stored=False))


def test_the_compiler_for_h100_takes_the_kernels_and_copies_no_weights():
    """Where it is installed; slots for all experts would be batched products, and their float32 gradients copies."""
    mesh = Mesh(np.array(devices_for("h100:8")[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    run, given = gradients_of(gated(embed=512, mlp=768), rows=8192)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), given)
    program = jax.jit(run).lower(*placed).compile(compiler_options=keep_known({"xla_gpu_autotune_level": 0}))
    text = program.as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 9 and "__cublas" not in text
    assert not re.search(r"\[4,(768,512|512,768)\]\S* (copy|transpose|convert)\(", text)
