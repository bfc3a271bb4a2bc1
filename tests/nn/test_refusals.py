"""Which attentions of a model a platform's kernel computes, against what is in the program lowered for it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqformer import models, nn
from eqformer.nn.cores import _auto


MODEL = dataclasses.replace(models.preset("llama-byte-1m"), layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=32)
IDS = jax.ShapeDtypeStruct((2, 128), jnp.int32)


def shapes_of(config=MODEL, core: nn.Core = nn.AutoCore(), compute: str = "bfloat16") -> nn.Transformer:
    make = lambda: nn.Precision(compute=compute).apply(
        nn.run_with(models.build(config, key=jax.random.key(0)), core=core)
    )
    return eqx.filter_eval_shape(make)


def refusals(platform: str, **how) -> tuple[str | None, ...]:
    return nn.attention_refusals(shapes_of(**how), IDS, nn.positions_like(IDS.shape), platform)


@pytest.mark.parametrize("compute, has_kernel", [("bfloat16", True), ("float32", False)])
def test_what_is_said_is_what_is_lowered(monkeypatch, compute, has_kernel):
    """A kernel that runs in the program for GPUs is a call of cuDNN's."""
    monkeypatch.setattr(_auto, "compilers", lambda: ("cuda",))
    arrays, rest = eqx.partition(shapes_of(compute=compute), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    forward = lambda arrays, ids: eqx.combine(arrays, rest).encode(ids, nn.positions_like(IDS.shape))[0]
    text = jax.jit(forward).trace(arrays, IDS).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__cudnn$fmha" in text) == has_kernel
    (reason,) = refusals("cuda", compute=compute)
    assert (reason is None) == has_kernel and (has_kernel or "not float32" in str(reason))


def test_each_reason_is_given_once():
    assert refusals("tpu") == (None,) and refusals("cpu") == ("the platform has none",)
    assert refusals("tpu", core=nn.BlockwiseCore()) == ("BlockwiseCore is asked for",)
    assert refusals("cuda", core=nn.CudnnCore()) == (None,)
    bare = nn.Tokens(jnp.broadcast_to(jnp.arange(128), (2, 128)))
    (reason,) = nn.attention_refusals(shapes_of(), IDS, bare, "cuda")
    assert "known to be whole" in str(reason)
    odd = jax.ShapeDtypeStruct((2, 100), jnp.int32)
    (reason,) = nn.attention_refusals(shapes_of(), odd, nn.positions_like(odd.shape), "tpu")
    assert "multiple of 128 tokens, not 100" in str(reason)


def test_layers_of_two_kinds_have_a_reason_each():
    """Gemma 2's softcap is what cuDNN has not; splash has it, in windows and without."""
    config = models.preset("gemma2-byte-500k")
    assert set(refusals("tpu", config=config)) == {None}
    assert set(refusals("cuda", config=config)) == {"it has no softcap"}
