"""Context parallelism: a row split over devices has the outputs and gradients of the whole row on one device."""

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import BATCH, call, Case, CASES, compiled, distance, drawn, METHODS, SEQ
from jax.sharding import PartitionSpec as P

from eqformer import kernels, nn
from eqformer.parallel import (
    _ring_attention,
    CONTEXT,
    context_order,
    ContextAttention,
    filter_shard_map,
    make_mesh,
    PIPE,
    TENSOR,
    vary,
    zigzag,
)


grid = pytest.mark.grid
NARROW = 50 * float(np.finfo(np.float32).eps)


@cache
def whole(name: str):
    """In float64 on one device, by the core that writes the formula down."""
    case = CASES[name]
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compiled(partial(call, kernels.ReferenceAttention(), case), *drawn(case)))


def split(case: Case, method: str, dtype: str = "float64", context: int = 4, order=None):
    """The same, in pieces: stored in the method's order, and put back."""
    mesh = make_mesh(context=context, tensor=8 // context)
    order = context_order(method, SEQ, context) if order is None else order
    arrays, tokens, direction = drawn(case, dtype)
    stored = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:, order]), tree)
    read = lambda x: np.asarray(x)[:, np.argsort(order)]
    row = P(None, CONTEXT, TENSOR)
    specs = (row, row, row, P(TENSOR))
    run = filter_shard_map(
        partial(call, ContextAttention(case.core, method), case),
        mesh,
        (specs, P(None, CONTEXT), row),
        (row, specs if case.has_sinks else (*specs[:3], None)),
    )
    arrays = (*stored(arrays[:3]), arrays[3])
    # jax's own attention relies on its standard promotion of dtypes.
    with jax.numpy_dtype_promotion("standard" if isinstance(case.core, kernels.DotProductAttention) else "strict"):
        output, gradients = compiled(run, arrays, stored(tokens), stored(direction))
    return read(output), (*map(read, gradients[:3]), gradients[3])


def everything() -> list:
    """Each method with each case; of the wider grid, the default run takes those that differ most."""
    few = {"ring": {"documents"}, "gather": {"documents"}, "heads": {"all at once"}}
    return [
        pytest.param(name, method, marks=[] if name in few[method] else grid) for name in CASES for method in METHODS
    ]


@pytest.mark.parametrize(("name", "method"), everything())
def test_split_rows_are_as_whole_ones(name, method):
    with jax.enable_x64(True):
        # The softmax of jax's own attention is float32, whatever it is given; the ring never runs it.
        is_exact = method == "ring" or not isinstance(CASES[name].core, kernels.DotProductAttention)
        assert distance(split(CASES[name], method), whole(name)) < (1e-12 if is_exact else NARROW)


@pytest.mark.parametrize(
    ("method", "context", "dtype", "tolerance"),
    [
        pytest.param("ring", 8, "float32", NARROW, marks=grid),
        pytest.param("ring", 2, "float32", NARROW, marks=grid),
        pytest.param("gather", 8, "float32", NARROW, marks=grid),
        ("heads", 8, "float32", NARROW),  # fewer key heads than devices
        pytest.param("ring", 8, "bfloat16", 3e-2, marks=grid),
        pytest.param("ring", 4, "bfloat16", 3e-2, marks=grid),
        pytest.param("heads", 2, "float32", NARROW, marks=grid),
        pytest.param("gather", 2, "bfloat16", 3e-2, marks=grid),
    ],
)
def test_other_sizes_and_dtypes(method, context, dtype, tolerance):
    case = CASES["window"]
    if dtype == "bfloat16":  # judged by the numbers that are left after rounding
        assert tolerance / 30 < distance(split(case, method, dtype, context), whole("window")) < tolerance
    else:
        assert distance(split(case, method, dtype, context), whole("window")) < tolerance


@pytest.mark.grid
def test_a_ring_that_does_not_turn_is_found_out_and_rows_may_be_in_any_order(monkeypatch):
    case, want = CASES["documents"], whole("documents")
    assert distance(split(case, "heads", "float32", order=zigzag(SEQ, 4)), want) < 1e-5
    unread = lambda x: x if x is None else x[:, zigzag(SEQ, 4)]  # as stored, and not put back
    assert distance(jax.tree.map(unread, want), want) > 0.1
    monkeypatch.setattr(_ring_attention, "shift", lambda tree, axis, **_: tree)
    assert distance(split(case, "ring", "float32"), want) > 0.1


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "method"), [("grouped", "ring"), ("grouped", "gather"), ("grouped", "heads"), ("latent", "ring")]
)
def test_whole_modules_and_their_weights(kind, method):
    """Frequencies hang on the rows' lengths, which a piece cannot know by itself."""
    with jax.enable_x64(True):
        key, rotary = jax.random.key(1), nn.Rotary(4, 100.0, scaling=nn.DynamicScaling(2.0, 9))
        given = {
            "embed": 6,
            "heads": 4,
            "head_dim": 4,
            "rotary": rotary,
            "core": kernels.BlockwiseAttention(4),
            "key": key,
        }
        make = (
            partial(nn.Attention, kv_heads=2, scores=nn.Scores(sinks=jnp.zeros(4)))
            if kind == "grouped"
            else partial(nn.LatentAttention, latent=5)
        )
        wide = lambda: jax.tree.map(lambda x: x.astype("float64") if eqx.is_array(x) else x, make(**given))
        module: Any = eqx.filter_jit(wide)()
        _, tokens, _ = drawn(CASES["documents"])
        x, direction = np.random.default_rng(0).normal(size=(2, BATCH, SEQ, 6))
        direction = jnp.asarray(direction * np.asarray(tokens.positions >= 0)[..., None])
        lengths = eqx.filter_jit(nn.document_lengths)(tokens)
        assert len(np.unique(lengths)) > 2  # documents' own, and padding's
        tokens = eqx.tree_at(lambda t: t.lengths, tokens, lengths, is_leaf=lambda x: x is None)

        def gradients(is_partial: bool, given: tuple, tokens: nn.Tokens, direction: jax.Array):
            given = vary(given, (CONTEXT,)) if is_partial else given
            return eqx.filter_grad(lambda given: jnp.sum(given[0](given[1], tokens)[0] * direction))(given)

        want = compiled(partial(gradients, False), (module, jnp.asarray(x)), tokens, direction)

        def run(is_partial: bool, tokens: nn.Tokens):
            order, row = context_order(method, SEQ, 4), P(None, CONTEXT)
            specs = jax.tree.map(lambda x: row, tokens)
            pieces = eqx.tree_at(lambda m: m.core, module, ContextAttention(kernels.BlockwiseAttention(4), method))
            mapped = filter_shard_map(
                partial(gradients, is_partial),
                make_mesh(context=4, devices=jax.devices()[:4]),
                ((P(), row), specs, row),
                (P(CONTEXT) if is_partial else P(), row),
            )
            moved = lambda x: jnp.asarray(np.asarray(x)[:, order])
            of_module, of_x = compiled(mapped, (pieces, moved(x)), jax.tree.map(moved, tokens), moved(direction))
            return of_module, np.asarray(of_x)[:, np.argsort(order)]

        # Compiled in haste, XLA's exponentials and sines are right to 1e-8 in float64 too.
        assert distance(run(False, tokens), want) < 1e-7
        if method == "gather":
            assert distance(run(False, eqx.tree_at(lambda t: t.lengths, tokens, None)), want) > 1e-4
        if kind == "latent":
            partial_gradients = run(True, tokens)[0].output.weight.reshape(4, *module.output.weight.shape)
            assert distance(partial_gradients.sum(0), want[0].output.weight) < 1e-7
            assert distance(partial_gradients[0], want[0].output.weight) > 0.1


@pytest.mark.grid
@pytest.mark.parametrize("method", ["ring", *(pytest.param(method, marks=grid) for method in METHODS[1:])])
def test_in_a_branch_that_not_all_devices_take(method):
    """As in a pipeline: in a scan, recomputed, and at other times, and more often, in one stage than in the next."""
    with jax.enable_x64(True):
        case = CASES["window"]
        (query, key, value, _), tokens, direction = drawn(case._replace(kv_heads=8))
        twice = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.stack([x, x])), tree)

        def gradients(core: Any, times: Any, arrays: tuple, tokens: nn.Tokens, direction: jax.Array) -> tuple:
            @jax.checkpoint
            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                return core(kernels.AttentionCall(query, key, value, mask=case.mask, tokens=tokens, scale=0.6))

            def loss(arrays: tuple) -> jax.Array:
                tick = lambda x, turn: (jax.lax.cond(turn < times(), attend, lambda x, *_: x, x, *arrays[1:]), None)
                return jnp.sum(jax.lax.scan(tick, arrays[0], jnp.arange(3))[0] * direction)

            return jax.grad(loss)(arrays)

        row = P(PIPE, None, CONTEXT)
        order = context_order(method, SEQ, 4)
        mapped = filter_shard_map(
            partial(
                gradients, ContextAttention(case.core, method), lambda: 1 + 2 * jax.lax.axis_index(PIPE).astype(int)
            ),
            make_mesh(pipe=2, context=4),
            (row, row, row),
            row,
        )
        given = (query, key, value), tokens, direction
        got = compiled(mapped, *twice(jax.tree.map(lambda x: np.asarray(x)[:, order], given)))
        got = [np.asarray(x)[:, :, np.argsort(order)] for x in got]
        one = lambda times, *given: gradients(kernels.ReferenceAttention(), lambda: times, *given)
        each = lambda times, *given: jax.lax.map(lambda times: one(times, *given), times)
        want = compiled(each, jnp.asarray(np.array([1, 3])), *given)
        for stage in range(2):
            assert distance([x[stage] for x in got], [x[stage] for x in want]) < 1e-12
