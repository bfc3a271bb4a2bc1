"""How far what a GPU's kernels give is from the same in float32, whose products are not rounded."""

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
from benchmarks._gpu_runs import Found
from benchmarks._measure import Row
from eqformer import explain_error, kernels, models, nn, training


GROUP, UNIT = "numbers", "1e-3 off"
ROWS = 2
OF_KERNELS, OF_MODELS, IN_8_BITS = 0.02, 0.06, 0.2  # what may be off, of a result's norm


class Check(NamedTuple):
    """Results of narrow arrays, and the same of wide ones; with how far these may be apart, of a result's norm."""

    name: str
    run: Callable[[Any], Any]
    wanted: Callable[[Any], Any]
    given: Callable[[], Any]
    most: float = OF_KERNELS


Programs = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Call(NamedTuple):
    """An attention to be checked."""

    mask: nn.Mask
    is_packed: bool = False
    softcap: float | None = None
    has_more: bool = False
    """A score of each head joins its softmax: sinks."""
    kv_heads: int = 4
    width: int = 128
    v_dim: int = 128


CALLS = {
    "causal": Call(nn.causal()),
    "all tokens": Call(nn.full()),
    "packed documents": Call(nn.causal(), is_packed=True),
    "window, packed documents, sinks": Call(nn.sliding_window(100), is_packed=True, has_more=True, width=64, v_dim=64),
    "latents": Call(nn.causal(), kv_heads=16, width=192),
    "softcap": Call(nn.sliding_window(100), softcap=50.0, width=256, v_dim=256),
}
# Of attention, of experts, which rounding lets routers choose otherwise, and of a recurrence.
MODELS = {"llama-byte-1m": OF_MODELS, "mixtral-byte-500k": IN_8_BITS, "bamba-byte-500k": OF_MODELS}
# Caches of these dtypes, of few heads, with windows and sinks, and of latents. Of one expert: rounding chooses others.
CACHED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-3-8b": (("bfloat16", "int8"), {}),
    "gpt-oss-20b": (("bfloat16",), {"experts": 1, "top_k": 1}),
    "deepseek-v3": (("bfloat16",), {"embed": 1024}),
}
SIZES = {"layers": 2, "vocab": 256, "mlp": 1024}


def numbers(seq: int = 1024, names: dict[str, float] = MODELS, sizes: dict[str, Any] = SIZES) -> Found:
    """A row for each kernel and for a model of each kind: how far results and gradients are off, the worst of them."""
    checks = itertools.chain(_attentions(seq), _caches(seq, sizes), _experts(8 * seq))
    made = [*checks, *(_model(name, min(seq, 256), most) for name, most in names.items())]
    with ThreadPoolExecutor() as pool:
        programs = [pool.submit(compiled, check) for check in made]
    # Behind all compiling, and one after another: a GPU's graph is no other's while it is recorded.
    return Found([row_of(check, its.result) for check, its in zip(made, programs)])


def compiled(check: Check) -> Programs:
    """The programs of a check: the kernel's, and that of wide arrays."""
    narrow = _program(check.run, check.given)
    with jax.default_matmul_precision("highest"):
        return narrow, _program(check.wanted, lambda: _wide(check.given()))


def _program(run: Callable[[Any], Any], given: Callable[[], Any]) -> Callable[[Any], Any]:
    """A function compiled for the shapes of what is given."""
    shapes, static = eqx.partition(eqx.filter_eval_shape(given), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    program = jax.jit(lambda arrays: run(eqx.combine(arrays, static))).lower(shapes).compile()
    return lambda given: program(eqx.filter(given, eqx.is_array))


def row_of(check: Check, programs: Callable[[], Programs]) -> Row:
    """How far off a check's results are, in thousandths of their norms; a note where that is too far, or cannot be."""
    try:
        given, (run, wanted) = check.given(), programs()
        off = distance(run(given), wanted(_wide(given)))
    except Exception as error:
        return Row(GROUP, check.name, note=f"{type(error).__name__}: {explain_error(error)[0]}")
    if not math.isfinite(off):
        return Row(GROUP, check.name, note="WRONG: some of it is not finite")
    note = f"WRONG: more than {1e3 * check.most:.0f}" if off > check.most else f"at most {1e3 * check.most:.0f}"
    return Row(GROUP, check.name, 1e3 * off, UNIT, None, note)


def distance(got: Any, want: Any) -> float:
    """The largest distance of two arrays, of the second's norm; NaN where any is."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    exact = ((np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)
    return float(np.max([np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0) for x, y in exact]))


def _wide(given: Any) -> Any:
    is_narrow = lambda x: isinstance(x, jax.Array) and x.dtype == jnp.bfloat16
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, given)


def _narrow(number: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), jnp.bfloat16)


def _with_gradients(call: Callable[[Any], Any], given: Any) -> Any:
    """The result of a call and the gradients of its product with a direction."""
    y, pull = jax.vjp(call, given)
    return y, pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))


def _attentions(seq: int) -> Iterator[Check]:
    """The attention that runs on a GPU, forward and backward."""
    for name, its in CALLS.items():
        core = kernels.ATTENTION if its.softcap else kernels.RequiredKernel("cuda", kernels.CudnnAttention())
        run = partial(_attended, its)
        yield Check(
            f"attention, {name}",
            partial(run, core),
            partial(run, kernels.ReferenceAttention()),
            partial(_asked, its, seq),
        )


def _asked(its: Call, seq: int) -> dict[str, jax.Array]:
    sizes = {"query": (16, its.width), "key": (its.kv_heads, its.width), "value": (its.kv_heads, its.v_dim)}
    given = {name: _narrow(number, ROWS, seq, *size) for number, (name, size) in enumerate(sizes.items())}
    return given | ({"sinks": jnp.linspace(-1, 1, 16)} if its.has_more else {})


def _attended(its: Call, core: kernels.Operation, given: dict[str, jax.Array]) -> Any:
    """What a core gives, nothing of it from padding, and its gradients."""
    seq = given["query"].shape[1]
    tokens = _documents(seq) if its.is_packed else nn.positions_like((ROWS, seq))
    how: dict[str, Any] = {"mask": its.mask, "tokens": tokens, "softcap": its.softcap, "scale": its.width**-0.5}
    real = (tokens.positions >= 0)[..., None, None]
    return _with_gradients(lambda given: jnp.where(real, core(kernels.AttentionCall(**given, **how)), 0), given)


def _documents(seq: int) -> nn.Tokens:
    """Rows of three documents, the first with padding behind them."""
    return packed(((seq // 8, seq // 2, seq // 4), (1, seq // 3, seq - seq // 3 - 1)), seq)


def packed(lengths: Sequence[Sequence[int]], seq: int) -> nn.Tokens:
    """Rows of documents of these lengths, one behind another, and padding behind them."""
    positions, segments = np.full((2, len(lengths), seq), -1, np.int32)
    for row, sizes in enumerate(lengths):
        for number, (end, size) in enumerate(zip(np.cumsum(sizes), sizes)):
            positions[row, end - size : end], segments[row, end - size : end] = np.arange(size), number
    most = max(map(len, lengths))
    return nn.packed_in_order(jnp.asarray(positions), jnp.asarray(segments), documents=most)


def _caches(slots: int, sizes: dict[str, Any]) -> Iterator[Check]:
    """Logits of the newest tokens by a cache of 16 and of 8 bits, or of latents: what the model gives without one."""
    for name, (dtypes, own) in CACHED.items():
        config: Any = dataclasses.replace(models.preset(name), **own | sizes)
        given = partial(_built, config, nn.Precision("bfloat16", "bfloat16"))
        for dtype in dtypes:
            by_cache, without = partial(_by_cache, dtype, slots), partial(_without, slots)
            yield Check(f"cache in {dtype}, {name}", by_cache, without, given, OF_MODELS)


def _by_cache(dtype: str, slots: int, model: nn.Transformer) -> Any:
    ids = _ids(model.vocab, slots)
    places = nn.positions_like(ids.shape).positions
    _, cache, _ = model.encode(ids[:, :-1], nn.Tokens(places[:, :-1]), model.init_cache(ROWS, slots, dtype))
    return model(ids[:, -1:], nn.Tokens(places[:, -1:]), cache)[0][:, 0]


def _without(slots: int, model: nn.Transformer) -> Any:
    wide = nn.Precision().apply(model)
    return wide.unembed(wide.encode(_ids(model.vocab, slots))[0][:, -1])


def _ids(vocab: int, slots: int) -> Any:
    """Tokens that leave some slots empty."""
    return _ours.random_batch(vocab, ROWS, slots - 8).ids


def _built(config: Any, precision: nn.Precision) -> nn.Transformer:
    return eqx.filter_jit(lambda key: precision.apply(models.build(config, key=key)))(jax.random.key(0))


def _experts(rows: int) -> Iterator[Check]:
    """Eight gated experts on rows sorted by expert, of which one has none and some are of no expert."""
    run = partial(_sorted, jnp.asarray([rows // 4, 0, 3, rows // 8, rows // 3, 65, 1, rows // 9], jnp.int32))
    weight = lambda number, *dims: _narrow(number, 8, *dims) / dims[-1] ** 0.5
    given = lambda: (weight(0, 768, 512), weight(1, 768, 512), weight(2, 512, 768), _narrow(3, rows, 512))
    plain, in_8_bits = (
        partial(run, lambda experts: experts),
        partial(run, lambda experts: nn.with_fp8(experts, [nn.Linear])),
    )
    maps = lambda: (_narrow(0, 768, 512) / 512**0.5, _narrow(1, rows, 512))
    yield Check("map in fp8", partial(_mapped, lambda one: one), partial(_mapped, nn.without_fp8), maps, IN_8_BITS)
    yield Check("experts", plain, plain, given)
    yield Check("experts in fp8", in_8_bits, plain, given, IN_8_BITS)


def _mapped(change: Callable[[Any], Any], given: Any) -> Any:
    """What a map of this weight gives of rows, with a change, and its gradients."""
    made = lambda weight: change(nn.Fp8Linear(("mlp",), ("embed",), weight=weight, bias=None))
    return _with_gradients(lambda given: made(given[0])(given[1]), given)


def _sorted(sizes: jax.Array, change: Callable[[nn.Experts], nn.Experts], given: Any) -> Any:
    """What experts of these arrays give of sorted rows, and their gradients."""
    one = lambda key: nn.GatedMLP(embed=512, mlp=768, bias=False, key=key)
    shapes = eqx.filter_eval_shape(lambda key: nn.Experts(one, 8, key=key), jax.random.key(0))
    weights = lambda experts: [getattr(experts.mlps, name).weight for name in ("gate", "up", "down")]
    made = lambda given: eqx.tree_at(weights, shapes, list(given[:3]))
    return _with_gradients(lambda given: change(made(given)).sorted_rows(given[3], sizes), given)


def _model(name: str, seq: int, most: float) -> Check:
    """A model's loss and gradients, computed in bfloat16 and in float32."""
    mixed, wide = (partial(_gradients, seq, its) for its in (nn.Precision(compute="bfloat16"), nn.Precision()))
    return Check(f"gradients, {name}", mixed, wide, partial(_built, models.preset(name), nn.Precision()), most)


def _gradients(seq: int, precision: nn.Precision, model: nn.Transformer) -> Any:
    def loss(model: nn.Transformer) -> Any:
        its = nn.Execution(core="auto").apply(precision.apply(model))
        return training.next_token_loss(its, _ours.random_batch(model.vocab, ROWS, seq))[0]

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    return value, jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(gradients)])
