"""Every core against a literal reference in float64: forward, gradients, and controls that must fail."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_cases import arrays_of, Case, CASES
from haste import put

from eqformer.kernels import AttentionCall, BlockwiseAttention, DotProductAttention, ReferenceAttention
from eqformer.nn import causal, chunked, full, positions_like, sliding_window, Tokens


CORES = {
    "reference": lambda case: ReferenceAttention(),
    "dot_product": lambda case: DotProductAttention(),
    "blockwise": lambda case: BlockwiseAttention(block=4),
}
TABLE = [
    pytest.param(core, name, id=f"{core}-{name}")
    for name, case in CASES.items()
    for core in CORES
    if core != "dot_product" or not (case.softcap or case.sinks)
]
SCALE = 0.6


def literal(case: Case, arrays: dict, tokens: Tokens, kv_tokens: Tokens | None) -> dict:
    """Attention and its gradients by the definition, one row of one head at a time."""
    q, k, v, do = (np.asarray(arrays[name], np.float64) for name in ("query", "key", "value", "direction"))
    flat = lambda x: x.reshape(-1, *x.shape[-3:])
    q, k, v, do = flat(q), flat(k), flat(v), flat(do)
    q_pos = np.asarray(tokens.positions).reshape(len(q), -1)
    k_pos = q_pos if kv_tokens is None else np.asarray(kv_tokens.positions).reshape(len(q), -1)
    segments = None if tokens.segments is None else np.asarray(tokens.segments).reshape(len(q), -1)
    sinks = np.full(case.heads, -np.inf) if "sinks" not in arrays else np.asarray(arrays["sinks"], np.float64)
    grads = {"query": np.zeros_like(q), "key": np.zeros_like(k), "value": np.zeros_like(v)}
    out, d_sinks = np.zeros_like(do), np.zeros(case.heads)
    for b, i, h in np.ndindex(q.shape[:3]):
        g = h // (case.heads // case.kv_heads)
        shown = []
        for j in range(k.shape[1]):
            a, c = q_pos[b, i], k_pos[b, j]
            ok = c >= 0 and (segments is None or segments[b, i] == segments[b, j])
            if case.mask.block is not None:
                query_block, key_block = a // case.mask.block, c // case.mask.block
                ok &= key_block <= query_block
                if segments is not None and (segment := segments[b, j]) < 0:
                    ok &= key_block == query_block
                elif segments is not None and segments[b, i] < 0:
                    ok = c >= 0 and segment == ~segments[b, i] and key_block < query_block
            ok &= not case.mask.is_causal or c <= a
            ok &= case.mask.window is None or abs(a - c) < case.mask.window
            ok &= case.mask.chunk is None or a // case.mask.chunk == c // case.mask.chunk
            shown += [j] if ok else []
        if not shown:
            continue
        scores = k[b, shown, g] @ q[b, i, h] * SCALE
        capped = scores if case.softcap is None else case.softcap * np.tanh(scores / case.softcap)
        slope = 1 if case.softcap is None else 1 - (capped / case.softcap) ** 2
        peak = max(capped.max(), sinks[h])
        weights, sink = np.exp(capped - peak), np.exp(sinks[h] - peak)
        p, p_sink = weights / (weights.sum() + sink), sink / (weights.sum() + sink)
        out[b, i, h] = p @ v[b, shown, g]
        to_p = v[b, shown, g] @ do[b, i, h]
        to_scores = p * (to_p - p @ to_p) * slope * SCALE
        d_sinks[h] -= p_sink * (p @ to_p)
        grads["query"][b, i, h] += to_scores @ k[b, shown, g]
        grads["key"][b, shown, g] += np.outer(to_scores, q[b, i, h])
        grads["value"][b, shown, g] += np.outer(p, do[b, i, h])
    results = {name: x.reshape(arrays[name].shape) for name, x in grads.items()}
    results["output"] = out.reshape(arrays["direction"].shape)
    if "sinks" in arrays:
        results["sinks"] = d_sinks
    return results


@eqx.filter_jit
def program(core, mask, softcap, inputs: dict, direction, tokens: Tokens, kv_tokens: Tokens | None):
    """The core's output, and its gradients along the direction; one compilation for all tests of a core and a case."""

    def call(given):
        return core(AttentionCall(**given, mask=mask, tokens=tokens, kv_tokens=kv_tokens, scale=SCALE, softcap=softcap))

    output, pull = jax.vjp(call, inputs)
    return {**pull(direction)[0], "output": output}


def attended(core, case: Case, arrays: dict, tokens: Tokens, kv_tokens: Tokens | None) -> dict:
    """The core's output, and its gradients along the direction."""
    inputs = {name: put(x) for name, x in arrays.items() if name != "direction"}
    return program(core, case.mask, case.softcap, inputs, put(arrays["direction"]), tokens, kv_tokens)


def distance(got: dict, want: dict, tokens: Tokens) -> float:
    """The largest difference of any array, rows of padding left out of the output, over that array's largest entry."""
    assert set(got) == set(want)
    worst = 0.0
    for name, x in want.items():
        y = np.asarray(got[name], np.float64)
        assert y.shape == x.shape and np.isfinite(y).all(), name
        if name == "output":
            real = np.asarray(tokens.positions)[..., None, None] >= 0
            x, y = x * real, y * real
        worst = max(worst, np.abs(x - y).max() / max(np.abs(x).max(), 1))
    return worst


def without_padding(case: Case, arrays: dict, tokens: Tokens) -> dict:
    """No gradient comes from rows of padding, as in a loss."""
    real = np.asarray(tokens.positions)[..., None, None] >= 0
    return {**arrays, "direction": arrays["direction"] * real.astype(arrays["direction"].dtype)}


def differences(core: str, case: Case, reference: Case | None = None, dtype: str = "float32") -> float:
    arrays, tokens, kv_tokens = arrays_of(case, dtype)
    arrays = without_padding(case, arrays, tokens)
    got = attended(CORES[core](case), case, arrays, tokens, kv_tokens)
    return distance(got, literal(case if reference is None else reference, arrays, tokens, kv_tokens), tokens)


@pytest.mark.by_default(
    "reference-multi-query, narrow values, two batch dims",
    "dot_product-multi-head, wide values, no batch dim",
    "blockwise-multi-query, narrow values, two batch dims",
    "reference-full with padding",
    "reference-window, packed",
    "dot_product-window, one document",
    "blockwise-window, packed",
    "dot_product-chunk, packed",
    "blockwise-window both ways",
    "blockwise-blocks, packed, with noisy copies",
    "reference-everything",
    "blockwise-everything",
    "dot_product-cache",
    "reference-cache, window, sinks, a row of nothing",
    "blockwise-cross, a row of nothing",
    "dot_product-cross, a row of nothing",
)
@pytest.mark.parametrize(("core", "name"), TABLE)
def test_equals_the_definition(core, name):
    assert differences(core, CASES[name]) < 2e-6


@pytest.mark.by_default("blockwise")
@pytest.mark.parametrize("core", ["reference", "blockwise"])
def test_equals_the_definition_in_float64(core):
    with jax.enable_x64(True):
        assert differences(core, CASES["everything"], dtype="float64") < 1e-13


@pytest.mark.parametrize("core", CORES)
def test_comparison_sees_a_window_that_is_off_by_one(core):
    case = CASES["window, packed"]
    assert differences(core, case, reference=case._replace(mask=sliding_window(4))) > 0.05


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("everything", {"softcap": None}),
        ("chunk, packed", {"mask": chunked(4)}),
        ("multi-query, narrow values, two batch dims", {"mask": full()}),
        ("window both ways", {"mask": sliding_window(2)}),
    ],
)
def test_comparison_sees_another_rule(name, change):
    case = CASES[name]
    assert differences("blockwise", case, reference=case._replace(**change)) > 0.02


@pytest.mark.parametrize("core", CORES)
def test_padding_and_rows_of_nothing(core):
    case = CASES["cross, a row of nothing"]
    arrays, tokens, kv_tokens = arrays_of(case)
    got = attended(CORES[core](case), case, arrays, tokens, kv_tokens)
    assert not np.any(got["output"][-1]) and not np.any(got["query"][-1]) and np.any(got["output"][0])

    case = CASES["full with padding"]
    arrays, tokens, _ = arrays_of(case)
    got = attended(CORES[core](case), case, arrays, tokens, None)  # padding's own rows carry gradients here
    assert all(np.isfinite(x).all() for x in got.values())


@pytest.mark.parametrize("core", CORES)
def test_bfloat16_in_and_out_with_float32_sums(core):
    case = Case(causal(), seq=600, batch=(1,), head_dim=2, v_dim=2)
    arrays, tokens, _ = arrays_of(case)
    inputs = {name: put(x, jnp.bfloat16) for name, x in arrays.items()}
    inputs["query"] = jnp.zeros_like(inputs["query"])
    inputs["value"] = jnp.ones_like(inputs["value"])
    # jax.nn.dot_product_attention mixes dtypes inside and cannot be traced under strict promotion.
    with jax.numpy_dtype_promotion("standard" if core == "dot_product" else "strict"):
        built = BlockwiseAttention(block=64) if core == "blockwise" else CORES[core](case)
        output = attended(built, case, inputs, tokens, None)
    assert all(x.dtype == jnp.bfloat16 for x in output.values())
    # Averages of ones: a sum in bfloat16 would stop at 256.
    np.testing.assert_allclose(np.asarray(output["output"], np.float32), 1, atol=1e-2)


@pytest.mark.parametrize("core", CORES)
def test_float16_runs_on_a_cpu_that_has_no_such_products(core):
    case = CASES["causal"]
    arrays, tokens, _ = arrays_of(case)
    half = {name: put(x, jnp.float16) for name, x in arrays.items()}
    exact = literal(case, {name: np.asarray(x, np.float64) for name, x in half.items()}, tokens, None)
    with jax.numpy_dtype_promotion("standard" if core == "dot_product" else "strict"):
        got = attended(CORES[core](case), case, half, tokens, None)
    assert all(x.dtype == jnp.float16 for x in got.values())
    assert distance({name: np.asarray(x, np.float64) for name, x in got.items()}, exact, tokens) < 2e-3


def test_a_gpu_s_program_in_float16_is_the_kernel_s_own():
    half = jnp.ones((1, 4, 2, 8), jnp.float16)
    ours = lambda x: DotProductAttention()(
        AttentionCall(x, x, x, mask=causal(), tokens=positions_like((1, 4)), scale=1.0)
    )
    plain = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True, scale=1.0)

    def products(call, platform: str) -> list[str]:
        with jax.numpy_dtype_promotion("standard"):
            text = jax.jit(call).trace(half).lower(lowering_platforms=(platform,)).as_text()
        return [line.split("dot_general")[1].split(",", 2)[2] for line in text.splitlines() if "dot_general" in line]

    assert products(ours, "cuda") == products(plain, "cuda") != products(ours, "cpu")
    assert len(products(ours, "cpu")) == 2 and not any("f16" in line for line in products(ours, "cpu"))


@pytest.mark.parametrize("core", CORES)
def test_is_traced_once_for_any_positions(core):
    case, traces = CASES["window, packed"], 0
    arrays, tokens, _ = arrays_of(case)
    given = {name: put(arrays[name]) for name in ("query", "key", "value")}

    @eqx.filter_jit
    def call(core, tokens):
        nonlocal traces
        traces += 1
        return core(AttentionCall(**given, mask=case.mask, tokens=tokens, scale=SCALE, softcap=case.softcap))

    first = call(CORES[core](case), tokens)
    second = call(CORES[core](case), Tokens(tokens.positions, jnp.zeros_like(tokens.positions)))
    assert traces == 1 and not np.allclose(first, second)


def only_traced(core, heads: int, kv_heads: int, **more):
    shapes = {"query": (1, 4, heads, 8), "key": (1, 4, kv_heads, 8), "value": (1, 4, kv_heads, 8)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in shapes.items()}
    call = lambda given: core(AttentionCall(**given, mask=causal(), tokens=positions_like((1, 4)), scale=1.0, **more))
    return jax.eval_shape(call, arrays)


@pytest.mark.parametrize("core", CORES)
def test_heads_must_be_a_multiple_of_kv_heads(core):
    with pytest.raises(ValueError, match="3 query heads and 2 key/value heads"):
        only_traced(CORES[core](CASES["causal"]), 3, 2)


def test_what_jax_s_own_attention_lacks_is_refused():
    with pytest.raises(ValueError, match="sinks"):
        only_traced(DotProductAttention(), 2, 2, sinks=jnp.zeros(2))


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("causal", {"is_causal": True}),
        ("causal, not known to be whole", None),
        ("full with padding, not known to be whole", None),
        ("window, one document", {"is_causal": True, "local_window_size": (2, 0)}),
        ("full with padding", {"key_value_seq_lengths": [9, 6]}),
        ("chunk, packed", None),
        ("cache", None),
    ],
)
def test_kernels_are_given_the_rule_instead_of_a_mask(name, rules, monkeypatch):
    rows, _, is_unknown = name.partition(", not known")
    case, seen, kernel = CASES[rows]._replace(is_known=not is_unknown), {}, jax.nn.dot_product_attention

    def spy(*arrays, scale, implementation, **rules):
        seen.update(rules)
        return kernel(*arrays, scale=scale, implementation=implementation, **rules)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    arrays, tokens, kv_tokens = arrays_of(case)
    given = {"mask": case.mask, "tokens": tokens, "kv_tokens": kv_tokens, "scale": SCALE}
    call = lambda *arrays: DotProductAttention()(AttentionCall(*arrays, **given))
    arrays = [put(arrays[n]) for n in ("query", "key", "value")]
    if rules is None or "key_value_seq_lengths" not in rules:  # lengths alone must be known here
        jax.eval_shape(call, *arrays)
    else:
        call(*arrays)
    if rules is None:
        assert list(seen) == ["mask"]
    else:
        assert {n: x.tolist() if isinstance(x, jax.Array) else x for n, x in seen.items()} == rules
