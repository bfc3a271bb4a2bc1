"""`explain` names the implementation of each operation that the program lowered for a platform contains."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqformer import kernels, models, nn


MODEL = dataclasses.replace(models.preset("llama-byte-1m"), layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=32)
IDS = jax.ShapeDtypeStruct((2, 128), jnp.int32)
CUDNN = kernels.RequiredKernel("cuda", kernels.CudnnAttention())


def shapes_of(config=MODEL, core: kernels.Operation = kernels.ATTENTION, compute: str = "bfloat16") -> nn.Transformer:
    make = lambda: nn.Precision(compute=compute).apply(
        nn.with_execution(models.build(config, key=jax.random.key(0)), core=core)
    )
    return eqx.filter_eval_shape(make)


def explained(platform: str, ids=IDS, tokens: nn.Tokens | None = None, **how) -> set[str]:
    tokens = nn.positions_like(ids.shape) if tokens is None else tokens
    lines = kernels.explain(shapes_of(**how).encode, ids, tokens, platform=platform)
    return {str(line) for line in lines if line.operation == "attention"}


@pytest.mark.by_default("bfloat16-True")
@pytest.mark.parametrize("compute, has_kernel", [("bfloat16", True), ("float32", False)])
def test_what_is_said_is_what_is_lowered(compute, has_kernel):
    """A kernel that runs in the program for GPUs is a call of cuDNN's."""
    arrays, rest = eqx.partition(shapes_of(compute=compute), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    forward = lambda arrays, ids: eqx.combine(arrays, rest).encode(ids, nn.positions_like(IDS.shape))[0]
    with kernels.traced_for("cuda"):
        text = jax.jit(forward).trace(arrays, IDS).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__cudnn$fmha" in text) == has_kernel
    (line,) = explained("cuda", compute=compute)
    assert line.startswith("attention: CudnnAttention") == has_kernel
    assert has_kernel or "not CudnnAttention: it computes in bfloat16 or float16, not float32" in line


def test_each_reason_is_given_once():
    assert explained("tpu") == {"attention: SplashAttention"}
    assert explained("cpu") == {"attention: BlockwiseAttention"}
    assert explained("tpu", core=kernels.BlockwiseAttention()) == {"attention: BlockwiseAttention"}
    assert explained("cuda", core=CUDNN) == {"attention: CudnnAttention"}
    bare = nn.Tokens(jnp.broadcast_to(jnp.arange(128), (2, 128)))
    (line,) = explained("cuda", tokens=bare)
    assert "BlockwiseAttention; not CudnnAttention: it needs rows of one text" in line
    (line,) = explained("tpu", ids=jax.ShapeDtypeStruct((2, 100), jnp.int32))
    assert "multiple of 128 tokens, not 100" in line


def test_layers_of_two_kinds_have_a_reason_each():
    """Gemma 2's softcap is what cuDNN lacks; splash has it, in windows and without."""
    config = models.preset("gemma2-byte-500k")
    assert explained("tpu", config=config) == {"attention: SplashAttention"}
    assert explained("cuda", config=config) == {"attention: BlockwiseAttention; not CudnnAttention: it has no softcap"}


def test_a_kernel_can_be_limited_to_some_gpus():
    """An H100 is assumed where there is no GPU."""
    limited = kernels.ATTENTION.with_implementation("cuda", kernels.CudnnAttention(capabilities=(8.0,)))
    assert explained("cuda", core=limited) == {
        "attention: BlockwiseAttention; not CudnnAttention: it is limited to GPUs of compute capability 8.0, not 9.0"
    }


def test_each_operation_of_a_step_with_a_cache_has_its_line():
    """A newest token is cached and attends to the cache, a recurrence takes one step, and experts multiply rows."""

    def run(key: jax.Array, x: jax.Array, rows: jax.Array) -> None:
        positions = jnp.zeros((2, 1), jnp.int32)
        attention = nn.Attention(embed=32, heads=4, kv_heads=2, head_dim=128, key=key)
        recurrence = nn.Mamba2Mixer(embed=32, heads=4, kv_heads=1, head_dim=128, v_dim=64, key=key)
        experts = nn.Experts(lambda key: nn.GatedMLP(embed=128, mlp=128, key=key), 4, key=key)
        attention(x, nn.Tokens(positions), attention.init_cache((2,), 2048, "bfloat16"))
        recurrence(x.astype(jnp.float32), nn.Tokens(positions), recurrence.init_cache((2,), 8))
        experts.sorted_rows(rows, jnp.full(4, 16, jnp.int32))

    def lines(platform: str) -> dict[str, str]:
        shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 32), (64, 128)))
        explained_lines = kernels.explain(run, jax.random.key(0), *shapes, platform=platform)
        return {
            line.operation: line.implementation for line in explained_lines if "TileWrite" not in dict(line.refusals)
        }

    assert lines("tpu") == {
        "cache write": "TileWrite",
        "decode attention": "FlashDecodingTpu",
        "recurrent step": "StepTpu",
        "grouped matmul": "TpuGroupedMatmul",
    }
    assert lines("cuda") == {
        "cache write": "ScatterWrite",
        "decode attention": "FlashDecodingGpu",
        "recurrent step": "ReferenceStep",
        "grouped matmul": "HopperGroupedMatmul",
    }
