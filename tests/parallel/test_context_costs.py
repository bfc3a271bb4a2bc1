"""Context parallelism: bytes sent, memory, skipped work, the order of rows, and refused layouts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import call, Case, CASES, compiled, drawn, METHODS, SEQ, Unknown
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from eqformer import kernels, nn
from eqformer.parallel import (
    check_context,
    CONTEXT,
    context_order,
    ContextAttention,
    filter_shard_map,
    make_mesh,
    zigzag,
    zigzag_inverse,
)


def sent(jaxpr: Any, size: int, times: int = 1) -> dict[str, float]:
    """Numbers that a device sends, by collective, loops counted; positions and segments are left out."""
    factors = {"ppermute": 1.0, "all_gather": size - 1, "reduce_scatter": 1 - 1 / size, "all_to_all": 1 - 1 / size}
    found: dict[str, float] = dict.fromkeys(factors, 0.0)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in factors and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
            found[name] += times * factors[name] * sum(x.aval.size for x in equation.invars)
        inner = times * equation.params["length"] if name == "scan" else times
        for part in jaxprs_in_params(equation.params):
            for key, more in sent(part, size, inner).items():
                found[key] += more
    return found


def programs(method: str, context: int, seq: int, core: Any = None, **sizes: Any):
    """The jaxpr and the compiled program of an attention's gradients, with their sizes: batch 1, float32."""
    case = Case(core=core or kernels.BlockwiseAttention(32), **sizes)
    shape = lambda heads, dim: jax.ShapeDtypeStruct((1, seq, heads, dim), jnp.float32)
    arrays = shape(case.heads, case.head_dim), shape(case.kv_heads, case.head_dim), shape(case.kv_heads, case.v_dim)
    row = P(None, CONTEXT)
    mapped = jax.shard_map(
        lambda arrays, positions, direction: call(
            ContextAttention(case.core, method), case, (*arrays, None), nn.Tokens(positions), direction
        )[1][:3],
        mesh=make_mesh(context=context, devices=jax.devices()[:context]),
        in_specs=((row, row, row), row, row),
        out_specs=(row, row, row),
    )
    given = arrays, jax.ShapeDtypeStruct((1, seq), jnp.int32), shape(case.heads, case.v_dim)
    numbers = {"query": seq * case.heads * case.head_dim, "output": seq * case.heads * case.v_dim}
    numbers["held"] = seq * case.kv_heads * (case.head_dim + case.v_dim)
    return jax.make_jaxpr(mapped)(*given), jax.jit(mapped).lower(*given).compile(), numbers


@pytest.mark.parametrize("method", METHODS)
def test_what_travels_is_what_the_formula_says(method):
    jaxpr, program, numbers = programs(method, 8, 64, heads=8, kv_heads=8, head_dim=16, v_dim=8)
    traffic, text, held = sent(jaxpr.jaxpr, 8), str(program.as_text()), numbers["held"]
    share = 7 / 8
    if method == "ring":
        want = {"ppermute": 3 * share * held}
        assert "all-gather" not in text and "collective-permute" in text
    elif method == "gather":
        want = {"all_gather": 2 * share * held, "reduce_scatter": share * held}
        assert "collective-permute" not in text
    else:
        want = {"all_to_all": share / 8 * 2 * (numbers["query"] + numbers["output"] + held)}
        assert "collective-permute" not in text
    assert {name: number for name, number in traffic.items() if number} == pytest.approx(want)


@pytest.mark.grid
def test_in_a_ring_memory_does_not_grow_with_the_devices():
    """64 tokens a device: on four devices or on eight, while who gathers holds all keys and values."""

    def temporary(method: str, context: int) -> tuple[int, int]:
        _, program, numbers = programs(method, context, 64 * context, heads=2, kv_heads=2, head_dim=32, v_dim=32)
        memory: Any = program.memory_analysis()
        return memory.temp_size_in_bytes, 4 * numbers["held"]

    (few, _), (many, held) = temporary("ring", 4), temporary("ring", 8)
    assert many < 1.02 * few
    assert temporary("gather", 8)[0] > many + held / 2


def test_hidden_pieces_are_not_computed():
    """A key that is NaN would spoil, as 0 * NaN, every product that it is part of."""
    case, order = Case(core=kernels.BlockwiseAttention(SEQ // 8)), zigzag(SEQ, 4)
    (query, key, value, _), tokens, _ = drawn(case, "float32")
    last = slice(SEQ - SEQ // 8, None)
    key, value = key.at[:, last].set(jnp.nan), value.at[:, last].set(jnp.nan)
    row = P(None, CONTEXT)

    def outputs(block: int) -> np.ndarray:
        core = ContextAttention(kernels.BlockwiseAttention(block), "ring")
        run = filter_shard_map(
            lambda q, k, v, tokens: core(kernels.AttentionCall(q, k, v, mask=case.mask, tokens=tokens, scale=1.0)),
            make_mesh(context=4, devices=jax.devices()[:4]),
            (row, row, row, row),
            row,
        )
        given = jax.tree.map(lambda x: x[:, order], (query, key, value, tokens))
        return np.asarray(compiled(run, *given)[:, zigzag_inverse(SEQ, 4)])

    assert np.isfinite(outputs(SEQ // 8)[:, : last.start]).all()
    assert not np.isfinite(outputs(SEQ)[:, : last.start]).all()


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_zigzag_pairs_early_and_late_parts_and_balances(pieces):
    order = zigzag(SEQ, pieces)
    parts = order.reshape(pieces, 2, -1) // (SEQ // (2 * pieces))
    assert (parts == np.array([[i, 2 * pieces - 1 - i] for i in range(pieces)])[:, :, None]).all()
    assert (order[zigzag_inverse(SEQ, pieces)] == np.arange(SEQ)).all()

    def work(order: np.ndarray) -> np.ndarray:
        """Visible pairs of each device's queries with each device's keys."""
        positions = nn.Tokens(jnp.asarray(order))
        visible = np.asarray(nn.causal()(positions, positions))
        return visible.reshape(pieces, SEQ // pieces, pieces, SEQ // pieces).sum((1, 3))

    assert len(set(work(order).sum(1))) == 1
    turns = [[work(order)[i, (i - turn) % pieces] for i in range(pieces)] for turn in range(pieces)]
    # At a turn, devices behind and ahead of their keys' owner differ by the diagonal of a part at most.
    assert all(max(turn) - min(turn) <= SEQ // (2 * pieces) for turn in turns)
    if pieces > 1:
        assert len(set(work(np.arange(SEQ)).sum(1))) == pieces  # in reading order the last has the most work


def test_orders_by_method():
    assert (context_order("ring", 16, 2) == zigzag(16, 2)).all() and (
        context_order("gather", 16, 2) == zigzag(16, 2)
    ).all()
    assert (context_order("heads", 12, 4) == np.arange(12)).all() and (
        context_order("ring", 7, 1) == np.arange(7)
    ).all()


SIZES: Any = {"seq": 32, "heads": 8, "kv_heads": 8}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zigzag(20, 4), r"zigzag\(seq=20, pieces=4\).*= 8 equal parts.*seq=16"),
        (lambda: zigzag(20, 0), r"pieces=0"),
        (lambda: context_order("heads", 10, 4), r"context_order\('heads', seq=10, pieces=4\).*multiple of 4.*12"),
        (lambda: ContextAttention(kernels.BlockwiseAttention(), "star"), r"method='star'.*ring, gather, heads"),
        (lambda: ContextAttention(Unknown(), "ring"), r"Unknown.*method='ring'.*core=kernels.BlockwiseAttention\(\)"),
        (
            lambda: check_context("gather", 4, kernels.BlockwiseAttention(), **SIZES | {"seq": 30}),
            r"zigzag\(seq=30, pieces=4\)",
        ),
        (
            lambda: check_context("heads", 4, kernels.BlockwiseAttention(), **SIZES | {"heads": 6}),
            r"6 query heads.*over 4 devices",
        ),
        (
            lambda: check_context("heads", 4, kernels.BlockwiseAttention(), seq=32, heads=12, kv_heads=6),
            r"6 key heads.*neither a multiple nor a divisor of the 4 devices.*'ring' or 'gather'",
        ),
        (
            lambda: check_context("gather", 4, kernels.DotProductAttention(), **SIZES | {"needs": ("sinks",)}),
            r"does not support sinks.*kernels.BlockwiseAttention\(\), or method='ring'",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_before_compiling(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_what_can_be_split_is_not_refused():
    for method in METHODS:
        check_context(method, 4, kernels.BlockwiseAttention(), seq=32, heads=8, kv_heads=8, needs=("sinks",))
        check_context(method, 4, kernels.DotProductAttention(), seq=32, heads=8, kv_heads=2)
    check_context("ring", 4, kernels.DotProductAttention(), seq=32, heads=8, kv_heads=8, needs=("sinks",))


def test_a_cache_is_refused():
    (query, key, value, _), tokens, _ = drawn(CASES["causal"], "float32")
    with pytest.raises(ValueError, match=r"kv_tokens of shape \(2, 32\).*wrap the model in ShardedModel"):
        core = ContextAttention(kernels.BlockwiseAttention(), "ring")
        core(kernels.AttentionCall(query, key, value, mask=nn.causal(), tokens=tokens, kv_tokens=tokens, scale=1.0))
