"""Fused attention kernels of accelerators: results as in plain JAX, and lowered programs for each platform."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import Case, CASES, distance, inputs, results, SEQ, sharded, tokens_of
from jax.sharding import PartitionSpec

from eqformer import kernels, nn
from eqformer.kernels import _op
from eqformer.kernels.attention import _blockwise, _flash


SPLASH = kernels.RequiredKernel("tpu", kernels.SplashAttention())
CUDNN = kernels.RequiredKernel("cuda", kernels.CudnnAttention())


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_splash_attention_is_the_reference_over_devices_with_types_checked(name):
    case = CASES[name]
    arrays, tokens = inputs(case), tokens_of(case)
    want = jax.jit(lambda *given: results(kernels.ReferenceAttention(), case, *given))(arrays, tokens)
    got = sharded(kernels.RequiredKernel("any", kernels.SplashAttention(interpret=True)), case, arrays, tokens)
    assert distance(got, want) < 2e-6
    other = case._replace(mask=nn.Mask(case.mask.is_causal, 69))  # the comparison sees another window
    wrong = jax.jit(lambda *given: results(kernels.ReferenceAttention(), other, *given))(arrays, tokens)
    assert distance(got, wrong) > 0.02


def traced(core: kernels.Operation, case: Case, remat: str = "products", **sizes: Any) -> Any:
    """A gradient's program over devices, to be lowered for platforms that need not be here."""
    given: dict[str, Any] = {"dtype": jnp.bfloat16} | sizes
    arrays = inputs(case, **given)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = PartitionSpec("rows", None, "heads")
    specs = {name: PartitionSpec("heads") if name == "sinks" else split for name in arrays}

    def loss(arrays: dict, tokens: nn.Tokens):
        more: dict[str, Any] = {"mask": case.mask, "tokens": tokens, "scale": 0.3, "softcap": case.softcap}
        given = {name: x for name, x in arrays.items() if name != "direction"}
        attend = jax.checkpoint(lambda given: core(kernels.AttentionCall(**given, **more)), policy=nn.REMAT[remat])
        return jnp.sum(attend(given).astype(jnp.float32) ** 2)

    call = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs, PartitionSpec("rows")), out_specs=specs)
    return jax.jit(call).trace(arrays, tokens_of(case))


def lowered(trace: Any, platform: str) -> str:
    return trace.lower(lowering_platforms=(platform,)).as_text()


SPLASH_CALL, CUDNN_CALL = r'kernel_name = "(splash\w+)"', r"custom_call @__cudnn\$(\w+)\("


@pytest.fixture
def everywhere(monkeypatch):
    """As where the compilers of all platforms are installed."""
    for module in (_op, _blockwise):
        monkeypatch.setattr(module, "compilers", lambda: ("tpu", "cuda"))


@pytest.mark.parametrize("is_packed", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_each_platform_has_its_own_kernel_once_and_no_matrix_of_scores(everywhere, is_packed):
    case = Case(nn.sliding_window(100), is_packed=is_packed, has_sinks=True)
    trace = traced(kernels.ATTENTION, case)
    texts = {platform: lowered(trace, platform) for platform in ("cpu", "tpu", "cuda")}
    kind = "_segmented" if is_packed else ""
    names = [f"splash_mha_fwd{kind}_residuals", *(f"splash_mha_{part}{kind}_no_residuals" for part in ("dq", "dkv"))]
    assert sorted(re.findall(SPLASH_CALL, texts["tpu"])) == sorted(names)
    assert re.findall(CUDNN_CALL, texts["cuda"]) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert {"PADDING_CAUSAL" if is_packed else "CAUSAL"} == set(re.findall(r"mask_type.{8}(\w+)", texts["cuda"]))
    assert set(re.findall(r"sliding_window_length.{5}(\d+)", texts["cuda"])) == {"100"}
    for platform, text in texts.items():
        assert f"{SEQ}x{SEQ}" not in text, platform
        assert (platform == "cpu") == (
            "stablehlo.while" in text and "custom_call @" not in text.replace("@Sharding", "")
        )


def test_what_remat_keeps_of_a_kernel_is_not_computed_again(everywhere):
    kept, recomputed = (traced(kernels.ATTENTION, Case(nn.causal()), remat=name) for name in ("products", "full"))
    for platform, pattern, count in (("tpu", SPLASH_CALL, 3), ("cuda", CUDNN_CALL, 2)):
        assert len(re.findall(pattern, lowered(kept, platform))) == count
        assert len(re.findall(pattern, lowered(recomputed, platform))) == count + 1


@pytest.mark.grid
@pytest.mark.parametrize("is_packed", [True, False])
def test_examples_under_vmap_are_one_call_of_the_kernel(everywhere, is_packed):
    case = Case(nn.causal(), is_packed=is_packed, v_dim=16)
    arrays, tokens = inputs(case, dtype=jnp.bfloat16), tokens_of(case)
    given = {name: x for name, x in arrays.items() if name != "direction"}

    def loss(given: dict, tokens: nn.Tokens):
        one = lambda given, tokens: kernels.ATTENTION(
            kernels.AttentionCall(**given, mask=case.mask, tokens=tokens, scale=0.3)
        )
        return jnp.sum(jax.vmap(one)(given, tokens).astype(jnp.float32) ** 2)

    trace = jax.jit(jax.grad(loss)).trace(given, tokens)
    assert re.findall(CUDNN_CALL, lowered(trace, "cuda")) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert len(re.findall(SPLASH_CALL, lowered(trace, "tpu"))) == 3


def test_a_batch_under_vmap_is_a_larger_batch():
    call = _flash._over_batch(lambda x, pair: (x + pair[0], x * pair[1][:, :1]))
    x, one, other = (jnp.arange(float(np.prod(shape))).reshape(shape) for shape in ((3, 2, 4), (2, 4), (3, 2, 2)))
    got = jax.vmap(call, in_axes=(0, (None, 0)))(x, (one, other))
    assert np.array_equal(got[0], x + one) and np.array_equal(got[1], x * other[..., :1])


def test_blocks_are_larger_on_tpus(everywhere):
    case, odd = Case(nn.causal()), {"seq": 1000}  # no kernel takes such rows in float32
    tokens = nn.positions_like((2, 1000))
    call = lambda x: kernels.ATTENTION(kernels.AttentionCall(**x, mask=case.mask, tokens=tokens, scale=0.3))
    arrays = {name: x for name, x in inputs(case, **odd).items() if name != "direction"}
    of = lambda platform: jax.jit(call).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    assert "512x512x" in of("tpu") and "512x512x" not in of("cpu") and "128x128x" in of("cpu")


def test_where_no_other_compiler_is_installed_blocks_are_all_that_is_traced(monkeypatch):
    monkeypatch.setattr(_op, "compilers", lambda: ())
    monkeypatch.setattr(_blockwise, "compilers", lambda: ())
    case = Case(nn.causal())
    text = lambda core: str(jax.make_jaxpr(lambda *given: results(core, case, *given))(inputs(case), tokens_of(case)))
    assert text(kernels.ATTENTION) == text(kernels.BlockwiseAttention(128)) and "platform_index" not in text(
        kernels.ATTENTION
    )


@pytest.mark.parametrize(
    ("core", "case", "sizes", "words"),
    [
        (CUDNN, Case(nn.causal()), {"dtype": np.float32}, "float16, not float32.*kernels.ATTENTION"),
        (CUDNN, Case(nn.causal(), softcap=0.5), {}, "no softcap"),
        (CUDNN, Case(nn.causal(), v_dim=260), {}, "up to 256 channels, in multiples of 8, not 8 and 260"),
        (CUDNN, Case(nn.Mask(False, 9)), {}, "windows only under a causal mask"),
        (SPLASH, Case(nn.chunked(64)), {}, "without chunks"),
        (SPLASH, Case(nn.block_causal(64)), {}, "without chunks and blocks"),
        (CUDNN, Case(nn.block_causal(64)), {}, "without chunks and blocks"),
        (SPLASH, Case(nn.causal()), {"dtype": np.float16}, "not float16"),
        (SPLASH, Case(nn.causal()), {}, r"SplashAttention\(\)\): its kernel runs on tpu.*compiled for 'cpu'"),
        (CUDNN, Case(nn.causal()), {}, r"CudnnAttention\(\)\): its kernel runs on cuda.*compiled for 'cpu'"),
    ],
)
def test_a_kernel_asked_for_by_name_is_there_or_an_error_says_why(core, case, sizes, words):
    with pytest.raises(ValueError, match=words):
        lowered(traced(core, case, **sizes), "cpu")


def test_a_kernel_s_error_says_how_rows_must_be_known():
    arrays = inputs(Case(nn.causal()))
    tokens = nn.Tokens(nn.positions_like((2, SEQ)).positions)
    with pytest.raises(
        ValueError, match=r"rows of one text .nn.positions_like. or documents in order .Batch.documents"
    ):
        query, key, value = arrays["query"], arrays["key"], arrays["value"]
        SPLASH(kernels.AttentionCall(query, key, value, mask=nn.causal(), tokens=tokens, scale=1.0))
    with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
        short = {name: arrays[name][:, :100] for name in ("query", "key", "value")}
        SPLASH(kernels.AttentionCall(**short, mask=nn.causal(), tokens=nn.positions_like((2, 100)), scale=1.0))
