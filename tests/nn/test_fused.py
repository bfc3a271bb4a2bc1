"""Fused kernels of accelerators: their numbers as plain JAX, and the programs that JAX makes for each platform."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from eqformer import nn
from eqformer.nn.cores import _auto, _blockwise, _cudnn, _fused
from eqformer.nn.cores._cudnn import CudnnKernel
from eqformer.nn.cores._kernel import Call, places_of, Rows


SEQ = 384  # three blocks of splash
LENGTHS = ((100, 50, 160), (30, 354))  # of documents; the first row ends in padding


def packed_tokens(seq: int = SEQ, lengths=LENGTHS) -> nn.Tokens:
    positions, segments = np.full((2, len(lengths), seq), -1, np.int32)
    for row, sizes in enumerate(lengths):
        ends = np.cumsum(sizes)
        for number, (end, size) in enumerate(zip(ends, sizes)):
            positions[row, end - size : end], segments[row, end - size : end] = np.arange(size), number
    most = max(len(sizes) for sizes in lengths)
    return nn.packed_in_order(jnp.asarray(positions), jnp.asarray(segments), documents=most)


class Case(NamedTuple):
    mask: nn.Mask
    is_packed: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    v_dim: int = 8


CASES = {
    "everything": Case(nn.sliding_window(140), is_packed=True, softcap=0.8, has_sinks=True, v_dim=16),
    "causal": Case(nn.causal()),
    "full": Case(nn.full()),
    "full, packed": Case(nn.full(), is_packed=True),
    "window both ways, packed": Case(nn.Mask(is_causal=False, window=70), is_packed=True),
    "sinks": Case(nn.causal(), has_sinks=True),
}


def inputs(case: Case, heads: int = 4, kv_heads: int = 2, seq: int = SEQ, dtype: Any = np.float32) -> dict:
    rng = np.random.default_rng(0)
    widths = {
        "query": (heads, 8),
        "key": (kv_heads, 8),
        "value": (kv_heads, case.v_dim),
        "direction": (heads, case.v_dim),
    }
    arrays = {name: jnp.asarray(rng.normal(size=(2, seq, *width)), dtype) for name, width in widths.items()}
    return arrays | ({"sinks": jnp.asarray(rng.normal(size=heads), jnp.float32)} if case.has_sinks else {})


def tokens_of(case: Case) -> nn.Tokens:
    whole = nn.right_padded(jnp.array([SEQ, 300]), SEQ) if not case.mask.is_causal else nn.positions_like((2, SEQ))
    return packed_tokens() if case.is_packed else whole


def results(core: nn.Core, case: Case, arrays: dict, tokens: nn.Tokens) -> dict:
    """The output and the gradients, nothing of them from padding."""
    real = (tokens.positions >= 0)[..., None, None]

    def call(given: dict):
        more: dict[str, Any] = {"mask": case.mask, "tokens": tokens, "scale": 0.3, "softcap": case.softcap}
        return jnp.where(real, core(**given, **more), 0)

    output, pull = jax.vjp(call, {name: x for name, x in arrays.items() if name != "direction"})
    return pull(arrays["direction"].astype(output.dtype))[0] | {"output": output}


def sharded(core: nn.Core, case: Case, arrays: dict, tokens: nn.Tokens) -> dict:
    """`results` where rows and heads are split over devices, with types checked."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = PartitionSpec("rows", None, "heads")
    specs = {name: PartitionSpec("heads") if name == "sinks" else split for name in arrays}
    outcome = {name: spec for name, spec in specs.items() if name != "direction"} | {"output": split}
    call = lambda arrays, tokens: results(core, case, arrays, tokens)
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs, PartitionSpec("rows")), out_specs=outcome)
    return jax.jit(run)(arrays, tokens)


def distance(got: dict, want: dict) -> float:
    assert set(got) == set(want)
    largest = lambda x: max(float(jnp.abs(x).max()), 1.0)
    return max(float(jnp.abs(got[name] - want[name]).max()) / largest(want[name]) for name in want)


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.grid) for n in [*CASES][1:])])
def test_splash_attention_is_the_reference_over_devices_with_types_checked(name):
    case = CASES[name]
    arrays, tokens = inputs(case), tokens_of(case)
    want = jax.jit(lambda *given: results(nn.ReferenceCore(), case, *given))(arrays, tokens)
    got = sharded(nn.SplashCore(interpret=True), case, arrays, tokens)
    assert distance(got, want) < 2e-6
    other = case._replace(mask=nn.Mask(case.mask.is_causal, 69))  # the comparison sees another window
    wrong = jax.jit(lambda *given: results(nn.ReferenceCore(), other, *given))(arrays, tokens)
    assert distance(got, wrong) > 0.02


class Emulated:
    """In place of a primitive of cuDNN: what its documentation says of packed rows, one document after another."""

    def __init__(self, backward: bool = False):
        self.backward = backward

    def bind(self, query, key, value, *rest, **given):
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        outcome = [shape(*x.shape) for x in (query, key, value)]
        if not self.backward:
            batch, seq, heads, _ = query.shape
            outcome = [shape(batch, seq, heads, value.shape[-1]), shape(rest[1].size, heads, seq)]
        return jax.pure_callback(partial(self._compute, **given), outcome, query, key, value, *rest)

    def _compute(self, query, key, value, bias, sizes, kv_sizes, starts, kv_starts, *rest, scale, mask_type, **given):
        rows, seq, heads, _ = query.shape
        empty = lambda *shape: np.full(shape, np.nan)
        if self.backward:
            outputs: list[Any] = [empty(rows * seq, *x.shape[2:]) for x in (query, key, value)]
        else:
            outputs = [empty(rows * seq, heads, value.shape[-1])]
        statistics: Any = empty(sizes.size, heads, seq)
        flat = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[2:])
        q, k, v = flat(query), flat(key), flat(value)
        per_token, per_key = query.shape[2] * query.shape[3], key.shape[2] * key.shape[3]
        places = zip(*(np.asarray(x).reshape(-1) for x in (sizes, kv_sizes, starts, kv_starts)))
        for number, (size, kv_size, start, kv_start) in enumerate(places):
            if not size:
                continue
            assert size == kv_size and start % per_token == 0 and kv_start % per_key == 0
            own, keys = (
                slice(start // per_token, start // per_token + size),
                slice(kv_start // per_key, kv_start // per_key + size),
            )
            mask = nn.Mask("CAUSAL" in mask_type.name, given["sliding_window_length"])
            if self.backward:
                logsum = np.asarray(rest[-3])[number, :, :size]
                results = flat(rest[-1])[own], flat(rest[-2])[own], logsum
                parts = literal_gradients(q[own], k[keys], v[keys], *results, scale, mask)
                for whole, part in zip(outputs, parts, strict=True):
                    whole[own] = part
            else:
                part, logsum = literal(q[own], k[keys], v[keys], scale, mask)
                outputs[0][own], statistics[number, :, :size] = part, logsum
        shaped = [x.reshape(rows, seq, *x.shape[1:]).astype(np.float32) for x in outputs]
        return shaped if self.backward else [*shaped, statistics.astype(np.float32)]


def visible(seq, mask):
    """Which keys of a document a query sees, without JAX, which must not run inside of a callback."""
    behind = np.arange(seq)[:, None] - np.arange(seq)
    return (behind < mask.window) & ((behind >= 0) | (not mask.is_causal))


def literal(q, k, v, scale, mask):
    """The attention of one document and the logarithms of its sums, by the definition."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(visible(len(q), mask), np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    logsum = np.log(np.sum(np.exp(scores), -1))
    return np.einsum("hqk,khd->qhd", np.exp(scores - logsum[..., None]), v), logsum


def literal_gradients(q, k, v, to_output, output, logsum, scale, mask) -> tuple[Any, Any, Any]:
    """The backward pass of FlashAttention-2 of one document, from the forward pass's output and statistics."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    weights = np.where(visible(len(q), mask), np.exp(np.einsum("qhd,khd->hqk", q, k) * scale - logsum[:, :, None]), 0)
    to_weights = np.einsum("qhd,khd->hqk", to_output, v)
    to_scores = weights * (to_weights - np.sum(to_output * output, -1).T[:, :, None]) * scale
    fold = lambda x: x.reshape(len(x), -1, group, x.shape[-1]).sum(2)
    to_key, to_value = np.einsum("hqk,qhd->khd", to_scores, q), np.einsum("hqk,qhd->khd", weights, to_output)
    return np.einsum("hqk,khd->qhd", to_scores, k), fold(to_key), fold(to_value)


def test_packed_documents_reach_cudnn_by_the_places_where_they_begin(monkeypatch):
    real = _cudnn._cudnn()
    primitives = {
        "_dot_product_attention_fwd_p": Emulated(),
        "_dot_product_attention_bwd_p": Emulated(backward=True),
    }
    monkeypatch.setattr(_cudnn, "_cudnn", lambda: SimpleNamespace(**vars(real) | primitives))
    case = Case(nn.sliding_window(4), is_packed=True)
    arrays, tokens = inputs(case, seq=16), packed_tokens(16, ((5, 3, 6), (16,)))
    call, places = Call(Rows(True, 4, 3), 0.3, None), places_of(tokens, (2,))
    given = arrays["query"], arrays["key"], arrays["value"]
    merged = places._replace(positions=jnp.where(jnp.arange(16) == 5, 5, places.positions))  # two documents as one

    @jax.jit
    def computed():
        output, logsum = CudnnKernel().forward(call, *given, places, places)
        gradients = CudnnKernel().backward(call, *given, places, places, output, logsum, direction)
        return output, *gradients, CudnnKernel().forward(call, *given, merged, merged)[0]

    want = jax.jit(lambda *given: results(nn.ReferenceCore(), case, *given))(arrays, tokens)
    direction = jnp.where((tokens.positions >= 0)[..., None, None], arrays["direction"], 0)
    *got, wrong = computed()
    assert distance(dict(zip(("output", "query", "key", "value"), got)), want) < 2e-6
    assert distance({"output": wrong}, {"output": want["output"]}) > 0.02


def traced(core: nn.Core, case: Case, remat: str = "products", **sizes: Any) -> Any:
    """A gradient's program over devices, to be lowered for platforms that need not be here."""
    given: dict[str, Any] = {"dtype": jnp.bfloat16} | sizes
    arrays = inputs(case, **given)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = PartitionSpec("rows", None, "heads")
    specs = {name: PartitionSpec("heads") if name == "sinks" else split for name in arrays}

    def loss(arrays: dict, tokens: nn.Tokens):
        more: dict[str, Any] = {"mask": case.mask, "tokens": tokens, "scale": 0.3, "softcap": case.softcap}
        given = {name: x for name, x in arrays.items() if name != "direction"}
        attend = jax.checkpoint(lambda given: core(**given, **more), policy=nn.REMAT[remat])
        return jnp.sum(attend(given).astype(jnp.float32) ** 2)

    call = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs, PartitionSpec("rows")), out_specs=specs)
    return jax.jit(call).trace(arrays, tokens_of(case))


def lowered(trace: Any, platform: str) -> str:
    return trace.lower(lowering_platforms=(platform,)).as_text()


SPLASH, CUDNN = r'kernel_name = "(splash\w+)"', r"custom_call @__cudnn\$(\w+)\("


@pytest.fixture
def everywhere(monkeypatch):
    """As where the compilers of all platforms are installed."""
    for module in (_auto, _blockwise):
        monkeypatch.setattr(module, "compilers", lambda: ("tpu", "cuda"))


@pytest.mark.parametrize("is_packed", [True, False])
def test_each_platform_has_its_own_kernel_once_and_no_matrix_of_scores(everywhere, is_packed):
    case = Case(nn.sliding_window(100), is_packed=is_packed, has_sinks=True)
    trace = traced(nn.AutoCore(), case)
    texts = {platform: lowered(trace, platform) for platform in ("cpu", "tpu", "cuda")}
    kind = "_segmented" if is_packed else ""
    names = [f"splash_mha_fwd{kind}_residuals", *(f"splash_mha_{part}{kind}_no_residuals" for part in ("dq", "dkv"))]
    assert sorted(re.findall(SPLASH, texts["tpu"])) == sorted(names)
    assert re.findall(CUDNN, texts["cuda"]) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert {"PADDING_CAUSAL" if is_packed else "CAUSAL"} == set(re.findall(r"mask_type.{8}(\w+)", texts["cuda"]))
    assert set(re.findall(r"sliding_window_length.{5}(\d+)", texts["cuda"])) == {"100"}
    for platform, text in texts.items():
        assert f"{SEQ}x{SEQ}" not in text, platform
        assert (platform == "cpu") == (
            "stablehlo.while" in text and "custom_call @" not in text.replace("@Sharding", "")
        )


def test_what_remat_keeps_of_a_kernel_is_not_computed_again(everywhere):
    kept, recomputed = (traced(nn.AutoCore(), Case(nn.causal()), remat=name) for name in ("products", "full"))
    for platform, pattern, kernels in (("tpu", SPLASH, 3), ("cuda", CUDNN, 2)):
        assert len(re.findall(pattern, lowered(kept, platform))) == kernels
        assert len(re.findall(pattern, lowered(recomputed, platform))) == kernels + 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_examples_under_vmap_are_one_call_of_the_kernel(everywhere, is_packed):
    case = Case(nn.causal(), is_packed=is_packed, v_dim=16)
    arrays, tokens = inputs(case, dtype=jnp.bfloat16), tokens_of(case)
    given = {name: x for name, x in arrays.items() if name != "direction"}

    def loss(given: dict, tokens: nn.Tokens):
        one = lambda given, tokens: nn.AutoCore()(**given, mask=case.mask, tokens=tokens, scale=0.3)
        return jnp.sum(jax.vmap(one)(given, tokens).astype(jnp.float32) ** 2)

    trace = jax.jit(jax.grad(loss)).trace(given, tokens)
    assert re.findall(CUDNN, lowered(trace, "cuda")) == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert len(re.findall(SPLASH, lowered(trace, "tpu"))) == 3


def test_a_batch_under_vmap_is_a_larger_batch():
    call = _fused._over_batch(lambda x, pair: (x + pair[0], x * pair[1][:, :1]))
    x, one, other = (jnp.arange(float(np.prod(shape))).reshape(shape) for shape in ((3, 2, 4), (2, 4), (3, 2, 2)))
    got = jax.vmap(call, in_axes=(0, (None, 0)))(x, (one, other))
    assert np.array_equal(got[0], x + one) and np.array_equal(got[1], x * other[..., :1])


def test_blocks_are_larger_on_tpus(everywhere):
    case, odd = Case(nn.causal()), {"seq": 1000}  # no kernel takes such rows in float32
    tokens = nn.positions_like((2, 1000))
    call = lambda x: nn.AutoCore()(**x, mask=case.mask, tokens=tokens, scale=0.3)
    arrays = {name: x for name, x in inputs(case, **odd).items() if name != "direction"}
    of = lambda platform: jax.jit(call).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    assert "512x512x" in of("tpu") and "512x512x" not in of("cpu") and "128x128x" in of("cpu")


def test_where_no_other_compiler_is_installed_blocks_are_all_that_is_traced(monkeypatch):
    monkeypatch.setattr(_auto, "compilers", lambda: ())
    monkeypatch.setattr(_blockwise, "compilers", lambda: ())
    case = Case(nn.causal())
    text = lambda core: str(jax.make_jaxpr(lambda *given: results(core, case, *given))(inputs(case), tokens_of(case)))
    assert text(nn.AutoCore()) == text(nn.BlockwiseCore(128)) and "platform_index" not in text(nn.AutoCore())


@pytest.mark.parametrize(
    ("core", "case", "sizes", "words"),
    [
        (nn.CudnnCore(), Case(nn.causal()), {"dtype": np.float32}, "float16, not float32.*AutoCore"),
        (nn.CudnnCore(), Case(nn.causal(), softcap=0.5), {}, "no softcap"),
        (nn.CudnnCore(), Case(nn.causal(), v_dim=260), {}, "up to 256 channels in eights, not 8 and 260"),
        (nn.CudnnCore(), Case(nn.Mask(False, 9)), {}, "windows under a causal mask alone"),
        (nn.SplashCore(), Case(nn.chunked(64)), {}, "no chunks"),
        (nn.SplashCore(), Case(nn.causal()), {"dtype": np.float16}, "not float16"),
        (nn.SplashCore(), Case(nn.causal()), {}, r"SplashCore\(\): its kernel runs on tpu.*compiled for 'cpu'"),
        (nn.CudnnCore(), Case(nn.causal()), {}, r"CudnnCore\(\): its kernel runs on cuda.*compiled for 'cpu'"),
    ],
)
def test_a_kernel_asked_for_by_name_is_there_or_an_error_says_why(core, case, sizes, words):
    with pytest.raises(ValueError, match=words):
        lowered(traced(core, case, **sizes), "cpu")


def test_a_kernel_s_error_says_how_rows_must_be_known():
    arrays = inputs(Case(nn.causal()))
    tokens = nn.Tokens(nn.positions_like((2, SEQ)).positions)
    with pytest.raises(
        ValueError, match=r"rows known to be whole or packed in order.*nn.positions_like, Batch.documents"
    ):
        nn.SplashCore()(arrays["query"], arrays["key"], arrays["value"], mask=nn.causal(), tokens=tokens, scale=1.0)
    with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
        short = {name: arrays[name][:, :100] for name in ("query", "key", "value")}
        nn.SplashCore()(**short, mask=nn.causal(), tokens=nn.positions_like((2, 100)), scale=1.0)
