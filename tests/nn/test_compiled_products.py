"""Compiled FP8 products on accelerators, if a compiler is installed: `eqformer[tpu]` or `eqformer[cuda]`.

In kernels for experts, both factors of an FP8 product have 8 bits too.

No accelerator is needed: `TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1 pytest
tests/nn/test_compiled_products.py`.
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices_for
from haste import keep_known
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eqformer import nn


def compiled(name: str, options: dict[str, Any], *, fp8: bool = True) -> str:
    """The program of a feed-forward layer's gradients, of its input's too, for one device."""
    mesh = Mesh(np.array(devices_for(name)[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    make = lambda key: nn.MLP(embed=512, mlp=1024, key=key)
    shapes = eqx.filter_eval_shape(lambda key: nn.with_fp8(make(key)) if fp8 else make(key), jax.random.key(0))
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
    arrays, rest = eqx.partition(jax.tree.map(placed, shapes), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def gradients(arrays: Any, x: Any) -> Any:
        total = lambda arrays, x: jnp.sum(eqx.combine(arrays, rest)(x).astype(jnp.float32) ** 2)
        return jax.grad(total, (0, 1))(arrays, x)

    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=whole)
    return jax.jit(gradients).lower(arrays, x).compile(compiler_options=options).as_text() or ""


def test_gpus_call_cublas_for_all_six():
    """As they do where Triton's products, which compete with these on a device, are switched off."""
    options = keep_known({"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False})
    calls = lambda text: re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
    assert calls(compiled("h100:8", options)) == ["__cublas$lt$matmul$f8"] * 6
    assert not any("f8" in call for call in calls(compiled("h100:8", options, fp8=False)))


def test_tpu7x_multiplies_numbers_of_8_bits():
    """Of each product both factors are of 8 bits, two of the six with a gradient, and two more; none is cast up."""
    text = compiled("tpu7x:2x2x1", {})
    kinds = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    factors = re.findall(r" convolution\(%([\w.-]+), %([\w.-]+)\)", text)
    found = sorted(tuple(sorted(kinds[factor] for factor in pair)) for pair in factors)
    assert found == [("f8e4m3fn", "f8e4m3fn")] * 2 + [("f8e4m3fn", "f8e5m2")] * 4


def factors_of_experts(name: str) -> list[tuple[str, ...]]:
    """Of each kernel in the program of experts' gradients, its factors of 8 bits."""
    mesh = Mesh(np.array(devices_for(name)[:1]), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    make = lambda key: nn.Experts(lambda key: nn.GatedMLP(embed=256, mlp=512, key=key), 4, key=key)
    shapes = eqx.filter_eval_shape(lambda key: nn.with_fp8(make(key)), jax.random.key(0))
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
    arrays, rest = eqx.partition(jax.tree.map(placed, shapes), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def gradients(arrays: Any, x: Any, sizes: Any) -> Any:
        total = lambda arrays, x: jnp.sum(eqx.combine(arrays, rest).sorted_rows(x, sizes).astype(jnp.float32) ** 2)
        return jax.grad(total, (0, 1))(arrays, x)

    x, sizes = ((2048, 256), jnp.bfloat16), ((4,), jnp.int32)
    given = [jax.ShapeDtypeStruct(*one, sharding=whole) for one in (x, sizes)]
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    options = keep_known({"xla_gpu_autotune_level": 0}) if name.startswith("h100") else {}
    text = jax.jit(mapped).lower(arrays, *given).compile(compiler_options=options).as_text() or ""
    kinds = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    calls = re.findall(r'custom-call\((.*?)\), custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"', text)
    factors = [[kinds.get(one, "") for one in re.findall(r"%([\w.-]+)", call)] for call in calls]
    return sorted(tuple(sorted(kind for kind in one if kind.startswith("f8"))) for one in factors)


@pytest.mark.parametrize("name", ["h100:8", "tpu7x:2x2x1"])
def test_experts_kernels(name):
    """Three products forward and six of gradients; TPUs have kernels of 16 bits, as old JAX has for H100s."""
    found = factors_of_experts(name)
    narrow = [("f8e4m3fn", "f8e4m3fn")] * 3 + [("f8e4m3fn", "f8e5m2")] * 6
    is_wide = name.startswith("tpu") or (name.startswith("h100") and jax.__version_info__ < (0, 12))
    assert found == ([()] * 9 if is_wide else narrow)
