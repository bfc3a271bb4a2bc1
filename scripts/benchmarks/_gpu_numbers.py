"""Errors of a GPU's kernels: the distance of their results from results in float32 with exact products."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _ours
from benchmarks._gpu_runs import Result
from benchmarks._measure import Row
from eqformer import explain_error, kernels, models, nn, training


GROUP, UNIT = "numbers", "1e-3 off"
ROWS = 2
OF_KERNELS, OF_MODELS, IN_8_BITS = 0.02, 0.06, 0.2  # The largest allowed errors, as shares of a result's norm.


class Check(NamedTuple):
    """A function of 16-bit arrays, and the same function of float32 arrays.

    `max_error` is the largest allowed distance of their results, as a share of the result's norm.
    """

    name: str
    run: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    make_inputs: Callable[[], Any]
    max_error: float = OF_KERNELS


Programs = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Call(NamedTuple):
    """A call of attention to check."""

    mask: nn.Mask
    is_packed: bool = False
    softcap: float | None = None
    has_head_scores: bool = False
    """Whether a learned score of each head joins the softmax (attention sinks)."""
    kv_heads: int = 4
    width: int = 128
    v_dim: int = 128


CALLS = {
    "causal": Call(nn.causal()),
    "all tokens": Call(nn.full()),
    "packed documents": Call(nn.causal(), is_packed=True),
    "window, packed documents, sinks": Call(
        nn.sliding_window(100), is_packed=True, has_head_scores=True, width=64, v_dim=64
    ),
    "latents": Call(nn.causal(), kv_heads=16, width=192),
    "softcap": Call(nn.sliding_window(100), softcap=50.0, width=256, v_dim=256),
}
# Models with attention, with experts, and with a recurrence. Routers may choose other experts because of rounding.
MODELS = {"llama-byte-1m": OF_MODELS, "mixtral-byte-500k": IN_8_BITS, "bamba-byte-500k": OF_MODELS}
# Models whose caches are checked, with the caches' dtypes: models with few heads, with windows and sinks, with latents.
# The second model has a single expert, because rounding could choose other experts.
CACHED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-3-8b": (("bfloat16", "int8"), {}),
    "gpt-oss-20b": (("bfloat16",), {"experts": 1, "top_k": 1}),
    "deepseek-v3": (("bfloat16",), {"embed": 1024}),
}
SIZES = {"layers": 2, "vocab": 256, "mlp": 1024}


def numbers(seq: int = 1024, names: dict[str, float] = MODELS, sizes: dict[str, Any] = SIZES) -> Result:
    """Measure the largest error of results and gradients, with a row for each kernel and kind of model."""
    checks = itertools.chain(_attentions(seq), _caches(seq, sizes), _experts(8 * seq))
    all_checks = [*checks, *(_model(name, min(seq, 256), max_error) for name, max_error in names.items())]
    with ThreadPoolExecutor() as pool:
        programs = [pool.submit(compile_check, check) for check in all_checks]
    # Programs run one after another, after all are compiled, because a GPU records one graph at a time.
    return Result([check_row(check, program.result) for check, program in zip(all_checks, programs)])


def compile_check(check: Check) -> Programs:
    """Compile the two programs of a check: with the kernel, and the reference with float32 arrays."""
    program = _compile(check.run, check.make_inputs)
    with jax.default_matmul_precision("highest"):
        return program, _compile(check.reference, lambda: _in_float32(check.make_inputs()))


def _compile(run: Callable[[Any], Any], make_inputs: Callable[[], Any]) -> Callable[[Any], Any]:
    """Compile a function for the shapes of its inputs."""
    shapes, static = eqx.partition(
        eqx.filter_eval_shape(make_inputs), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    program = jax.jit(lambda arrays: run(eqx.combine(arrays, static))).lower(shapes).compile()
    return lambda inputs: program(eqx.filter(inputs, eqx.is_array))


def check_row(check: Check, programs: Callable[[], Programs]) -> Row:
    """Return the error of a check's results, in thousandths of their norms, with a note if the error is too large."""
    try:
        inputs, (run, reference) = check.make_inputs(), programs()
        off = distance(run(inputs), reference(_in_float32(inputs)))
    except Exception as error:
        return Row(GROUP, check.name, note=f"{type(error).__name__}: {explain_error(error)[0]}")
    if not math.isfinite(off):
        return Row(GROUP, check.name, note="WRONG: some results are not finite")
    note = (
        f"WRONG: more than {1e3 * check.max_error:.0f}"
        if off > check.max_error
        else f"at most {1e3 * check.max_error:.0f}"
    )
    return Row(GROUP, check.name, 1e3 * off, UNIT, None, note)


def distance(got: Any, want: Any) -> float:
    """Return the largest distance between arrays of two trees, as a share of the second norm; NaN for NaN in a tree."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    exact = ((np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)
    return float(np.max([np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0) for x, y in exact]))


def _in_float32(inputs: Any) -> Any:
    is_narrow = lambda x: isinstance(x, jax.Array) and x.dtype == jnp.bfloat16
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, inputs)


def _random_bfloat16(number: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), jnp.bfloat16)


def _with_gradients(call: Callable[[Any], Any], inputs: Any) -> Any:
    """Return the result of a call, and the gradients of its inner product with a fixed array."""
    y, pull = jax.vjp(call, inputs)
    return y, pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))


def _attentions(seq: int) -> Iterator[Check]:
    """Yield checks of the attention that runs on a GPU, forward and backward."""
    for name, call in CALLS.items():
        core = kernels.ATTENTION if call.softcap else kernels.RequiredKernel("cuda", kernels.CudnnAttention())
        run = partial(_attend, call)
        yield Check(
            f"attention, {name}",
            partial(run, core),
            partial(run, kernels.ReferenceAttention()),
            partial(_attention_inputs, call, seq),
        )


def _attention_inputs(call: Call, seq: int) -> dict[str, jax.Array]:
    sizes = {"query": (16, call.width), "key": (call.kv_heads, call.width), "value": (call.kv_heads, call.v_dim)}
    arrays = {name: _random_bfloat16(number, ROWS, seq, *size) for number, (name, size) in enumerate(sizes.items())}
    return arrays | ({"sinks": jnp.linspace(-1, 1, 16)} if call.has_head_scores else {})


def _attend(call: Call, core: kernels.Operation, inputs: dict[str, jax.Array]) -> Any:
    """Return the result of an attention core, with zeros at padding, and its gradients."""
    seq = inputs["query"].shape[1]
    tokens = _documents(seq) if call.is_packed else nn.positions_like((ROWS, seq))
    options: dict[str, Any] = {"mask": call.mask, "tokens": tokens, "softcap": call.softcap, "scale": call.width**-0.5}
    is_token = (tokens.positions >= 0)[..., None, None]
    attend = lambda inputs: jnp.where(is_token, core(kernels.AttentionCall(**inputs, **options)), 0)
    return _with_gradients(attend, inputs)


def _documents(seq: int) -> nn.Tokens:
    """Return two rows of three documents each; the first row ends with padding."""
    return packed(((seq // 8, seq // 2, seq // 4), (1, seq // 3, seq - seq // 3 - 1)), seq)


def packed(lengths: Sequence[Sequence[int]], seq: int) -> nn.Tokens:
    """Return rows of documents with these lengths, followed by padding."""
    positions, segments = np.full((2, len(lengths), seq), -1, np.int32)
    for row, sizes in enumerate(lengths):
        for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes)):
            positions[row, end - size : end], segments[row, end - size : end] = np.arange(size), number
    documents = max(map(len, lengths))
    return nn.packed_in_order(jnp.asarray(positions), jnp.asarray(segments), documents=documents)


def _caches(slots: int, sizes: dict[str, Any]) -> Iterator[Check]:
    """Yield checks of the newest token's logits, computed with a cache (16 bits, 8 bits, latents) and without one."""
    for name, (dtypes, changes) in CACHED.items():
        config: Any = dataclasses.replace(models.preset(name), **changes | sizes)
        build = partial(_build, config, nn.Precision("bfloat16", "bfloat16"))
        for dtype in dtypes:
            by_cache, without_cache = partial(_by_cache, dtype, slots), partial(_without_cache, slots)
            yield Check(f"cache in {dtype}, {name}", by_cache, without_cache, build, OF_MODELS)


def _by_cache(dtype: str, slots: int, model: nn.Transformer) -> Any:
    ids = _ids(model.vocab, slots)
    positions = nn.positions_like(ids.shape).positions
    _, cache, _ = model.encode(ids[:, :-1], nn.Tokens(positions[:, :-1]), model.init_cache(ROWS, slots, dtype))
    return model(ids[:, -1:], nn.Tokens(positions[:, -1:]), cache)[0][:, 0]


def _without_cache(slots: int, model: nn.Transformer) -> Any:
    wide = nn.Precision().apply(model)
    return wide.unembed(wide.encode(_ids(model.vocab, slots))[0][:, -1])


def _ids(vocab: int, slots: int) -> Any:
    """Return random ids that leave 8 slots of a cache empty."""
    return _ours.random_batch(vocab, ROWS, slots - 8).ids


def _build(config: Any, precision: nn.Precision) -> nn.Transformer:
    return eqx.filter_jit(lambda key: precision.apply(models.build(config, key=key)))(jax.random.key(0))


def _experts(rows: int) -> Iterator[Check]:
    """Yield checks of eight experts on rows sorted by expert; one expert has no rows, and some rows have no expert."""
    run = partial(_apply_experts, jnp.asarray([rows // 4, 0, 3, rows // 8, rows // 3, 65, 1, rows // 9], jnp.int32))
    weight = lambda number, *dims: _random_bfloat16(number, 8, *dims) / dims[-1] ** 0.5
    make_inputs = lambda: (
        weight(0, 768, 512),
        weight(1, 768, 512),
        weight(2, 512, 768),
        _random_bfloat16(3, rows, 512),
    )
    plain, in_8_bits = (
        partial(run, lambda experts: experts),
        partial(run, lambda experts: nn.with_fp8(experts, [nn.Linear])),
    )
    linear_inputs = lambda: (_random_bfloat16(0, 768, 512) / 512**0.5, _random_bfloat16(1, rows, 512))
    in_fp8, in_bfloat16 = partial(_apply_linear, lambda linear: linear), partial(_apply_linear, nn.without_fp8)
    yield Check("map in fp8", in_fp8, in_bfloat16, linear_inputs, IN_8_BITS)
    yield Check("experts", plain, plain, make_inputs)
    yield Check("experts in fp8", in_8_bits, plain, make_inputs, IN_8_BITS)


def _apply_linear(change: Callable[[Any], Any], inputs: Any) -> Any:
    """Apply a linear map, changed by `change`, to rows; return the result and its gradients."""
    linear = lambda weight: change(nn.Fp8Linear(("mlp",), ("embed",), weight=weight, bias=None))
    return _with_gradients(lambda inputs: linear(inputs[0])(inputs[1]), inputs)


def _apply_experts(sizes: jax.Array, change: Callable[[nn.Experts], nn.Experts], inputs: Any) -> Any:
    """Apply experts, changed by `change`, to sorted rows; return the result and its gradients."""
    expert = lambda key: nn.GatedMLP(embed=512, mlp=768, bias=False, key=key)
    shapes = eqx.filter_eval_shape(lambda key: nn.Experts(expert, 8, key=key), jax.random.key(0))
    weights = lambda experts: [getattr(experts.mlps, name).weight for name in ("gate", "up", "down")]
    experts = lambda inputs: eqx.tree_at(weights, shapes, list(inputs[:3]))
    return _with_gradients(lambda inputs: change(experts(inputs)).sorted_rows(inputs[3], sizes), inputs)


def _model(name: str, seq: int, max_error: float) -> Check:
    """Return a check of a model's loss and gradients, computed in bfloat16, against float32."""
    mixed, wide = (
        partial(_gradients, seq, precision) for precision in (nn.Precision(compute="bfloat16"), nn.Precision())
    )
    return Check(f"gradients, {name}", mixed, wide, partial(_build, models.preset(name), nn.Precision()), max_error)


def _gradients(seq: int, precision: nn.Precision, model: nn.Transformer) -> Any:
    def loss(model: nn.Transformer) -> Any:
        computed = nn.Execution(core="auto").apply(precision.apply(model))
        return training.next_token_loss(computed, _ours.random_batch(model.vocab, ROWS, seq))[0]

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    return value, jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(gradients)])
