"""Compiled attention on accelerators, if a compiler is installed: `eqformer[tpu]` or `eqformer[cuda]`.

No accelerator is needed: `TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1 pytest
tests/kernels/test_compiled_attention.py`.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import devices_for
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eqformer import kernels, nn


SEQ = 4096


class Case(NamedTuple):
    mask: nn.Mask
    documents: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    width: int = 128
    v_dim: int = 128
    kv_heads: int = 4


CASES = {
    "causal": Case(nn.causal()),
    "packed": Case(nn.causal(), documents=16),
    "window, packed, sinks": Case(nn.sliding_window(1024), documents=16, has_sinks=True, width=64, v_dim=64),
    "latent attention": Case(nn.causal(), width=192, v_dim=128, kv_heads=16),
    "softcap": Case(nn.sliding_window(1024), softcap=50.0, width=256, v_dim=256),
    "full": Case(nn.full()),
}


def mesh_of(platform: str) -> Mesh:
    devices = devices_for("v5e:2x2" if platform == "tpu" else "h100:8")
    return Mesh(np.array(devices[:4]).reshape(2, 2), ("rows", "heads"))


def compiled(platform: str, core: kernels.Operation, case: Case, dtype: Any = jnp.bfloat16) -> Any:
    """The compiled gradients of an attention under `remat="products"`, rows and heads split over four devices."""
    mesh, split = mesh_of(platform), PartitionSpec("rows", None, "heads")
    rows, heads = PartitionSpec("rows"), PartitionSpec("heads")
    shaped = lambda spec, dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    arrays = {
        "query": shaped(split, dtype, 2, SEQ, 16, case.width),
        "key": shaped(split, dtype, 2, SEQ, case.kv_heads, case.width),
        "value": shaped(split, dtype, 2, SEQ, case.kv_heads, case.v_dim),
    }
    arrays |= {"sinks": shaped(heads, jnp.float32, 16)} if case.has_sinks else {}
    places = shaped(rows, jnp.int32, 2, SEQ)
    specs = {name: heads if name == "sinks" else split for name in arrays}

    def gradients(arrays: dict, positions: jax.Array, segments: jax.Array):
        tokens = nn.positions_like(positions.shape)
        if case.documents is not None:
            tokens = nn.packed_in_order(positions, segments, documents=case.documents)
        call = lambda given: core(
            kernels.AttentionCall(**given, mask=case.mask, tokens=tokens, scale=0.09, softcap=case.softcap)
        )
        kept = jax.checkpoint(call, policy=nn.REMAT["products"])
        return jax.grad(lambda given: jnp.sum(kept(given).astype(jnp.float32) ** 2))(arrays)

    run = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, rows, rows), out_specs=specs)
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(run).lower(arrays, places, places).compile()


@pytest.mark.parametrize("name", CASES)
def test_tpus_run_splash_attention(name):
    text = compiled("tpu", kernels.ATTENTION, CASES[name]).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert len({*re.findall(r"splash_mha_(fwd|dq|dkv)", text)}) == 3
    assert f"{SEQ},{SEQ}" not in text


@pytest.mark.parametrize("name", CASES)
def test_gpus_run_cudnn_where_it_can(name):
    case = CASES[name]
    text = compiled("cuda", kernels.ATTENTION, case).as_text()
    fused = re.findall(r'custom_call_target="__cudnn\$(fmha\w+)"', text)
    assert sorted(fused) == ([] if case.softcap else ["fmhaSoftmax", "fmhaSoftmaxBackward"])
    assert f"{SEQ},{SEQ}" not in text


OF_OTHERS = {
    "tpu": kernels.RequiredKernel("cuda", kernels.CudnnAttention()),
    "cuda": kernels.RequiredKernel("tpu", kernels.SplashAttention()),
}


@pytest.mark.parametrize("platform,other", OF_OTHERS.items())
def test_a_kernel_of_another_platform_is_an_error(platform, other):
    with pytest.raises(ValueError, match=f"its kernel runs on .* is compiled for {platform!r}; pass kernels.ATTENTION"):
        compiled(platform, other, CASES["causal"])


def test_larger_blocks_take_fewer_cycles_on_a_tpu():
    def cycles(block: int) -> int:
        """The estimate for all pairs of blocks under the causal mask; each loop's body stands once in the program."""
        text = compiled("tpu", kernels.BlockwiseAttention(block), CASES["causal"]).as_text()
        each = sum(int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', text))
        return each * (SEQ // block) * (SEQ // block + 1) // 2

    assert cycles(512) < 0.7 * cycles(128)
