"""Blockwise attention: its memory, program size, skipped blocks, partial results and mesh types."""

import math
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from jax.sharding import AxisType, PartitionSpec as P

from eqformer.kernels import AttentionCall, blockwise, BlockwiseAttention, ReferenceAttention, TokenPositions
from eqformer.nn import causal, Mask, positions_like, sliding_window


def normal(seed: int, *shape: int) -> jax.Array:
    return put(np.random.default_rng(seed).normal(size=shape), np.float32)


def inputs(
    seq: int, *, batch: int = 1, heads: int = 2, kv_heads: int = 1, head_dim: int = 4, kv_seq: int | None = None
):
    shapes = (seq, heads), (kv_seq or seq, kv_heads), (kv_seq or seq, kv_heads), (seq, heads)
    return [normal(seed, batch, *shape, head_dim) for seed, shape in enumerate(shapes)]


def compiled(core, seq: int, mask: Mask):
    """The executable of the core's output and gradients over one row of `seq` tokens."""

    def run(query, key, value, direction, tokens):
        call = lambda *arrays: core(AttentionCall(*arrays, mask=mask, tokens=tokens, scale=1.0))
        output, pull = jax.vjp(call, query, key, value)
        return output, pull(direction)

    return jax.jit(run).lower(*inputs(seq), positions_like((1, seq))).compile()


def transposed(text: str) -> list[int]:
    """The entries of each array that a compiled program transposes."""
    return [math.prod(map(int, dims.split(","))) for dims in re.findall(r" = \w+\[([\d,]+)\]\S* transpose\(", text)]


def test_no_scores_are_transposed():
    seq, block, heads = 512, 128, 2
    largest = max(transposed(compiled(BlockwiseAttention(block), seq, causal()).as_text() or ""))
    assert largest < heads * block * block
    control = lambda scores: jnp.swapaxes(scores, -1, -2) + 1
    scores = normal(0, heads, block, block)
    assert max(transposed(jax.jit(control).lower(scores).compile().as_text() or "")) == scores.size


def test_memory_is_linear_and_the_program_of_one_size():
    programs = [compiled(BlockwiseAttention(block=32), seq, sliding_window(100)) for seq in (512, 1024)]
    whole = [compiled(ReferenceAttention(), seq, sliding_window(100)) for seq in (512, 1024)]
    temporary = lambda x: x.memory_analysis().temp_size_in_bytes
    assert temporary(programs[1]) < 2.1 * temporary(programs[0])
    assert temporary(whole[1]) > 3.5 * temporary(whole[0])
    assert temporary(programs[1]) < 1024**2 / 2  # an eighth of one matrix of float32 scores, of which there are two
    lines = [str(x.as_text()).count("\n") for x in programs]
    assert lines[1] < 1.01 * lines[0]


@pytest.mark.parametrize(
    "block", [pytest.param(1, marks=pytest.mark.grid), 5, 16, pytest.param(64, marks=pytest.mark.grid)]
)
def test_any_block_gives_one_result(block):
    query, key, value, _ = inputs(16, batch=2)
    given = {"mask": causal(), "tokens": positions_like((2, 16)), "scale": 0.5}
    got = jax.jit(lambda *arrays: BlockwiseAttention(block)(AttentionCall(*arrays, **given)))(query, key, value)
    wanted = jax.jit(lambda *arrays: ReferenceAttention()(AttentionCall(*arrays, **given)))(query, key, value)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_a_block_holds_a_token():
    with pytest.raises(ValueError, match="block=0"):
        BlockwiseAttention(block=0)


@pytest.mark.by_default("mask1-poisoned1-clean1")
@pytest.mark.parametrize(
    ("mask", "poisoned", "clean"),
    [(causal(), slice(8, 16), slice(0, 8)), (sliding_window(4), slice(0, 4), slice(8, 16))],
)
def test_hidden_blocks_are_not_computed(mask, poisoned, clean):
    """Keys that are NaN would spoil, as 0 * NaN, every product that they are part of."""
    query, key, value, direction = inputs(16)
    key, value = key.at[:, poisoned].set(jnp.nan), value.at[:, poisoned].set(jnp.nan)
    direction = jnp.zeros_like(direction).at[:, clean].set(direction[:, clean])

    @partial(jax.jit, static_argnums=0)
    def run(core):
        call = lambda query: core(
            AttentionCall(query, key, value, mask=mask, tokens=positions_like((1, 16)), scale=1.0)
        )
        output, pull = jax.vjp(call, query)
        return output, pull(direction)[0]

    for core, skips in (
        (BlockwiseAttention(block=4), True),
        (BlockwiseAttention(block=16), False),
        (ReferenceAttention(), False),
    ):
        assert [np.isfinite(x[:, clean]).all() for x in run(core)] == [skips, skips]


def test_calls_over_parts_of_the_keys_combine():
    query, key, value, direction = inputs(8, kv_seq=12)
    tokens, places = TokenPositions(jnp.arange(4, 12)[None]), jnp.arange(12)[None]

    def part(query, keys: slice):
        seen = key[:, keys], value[:, keys], tokens, TokenPositions(places[:, keys])
        return blockwise.attend(blockwise.BlockwiseSettings(causal(), 0.5, None, 4), query, *seen)

    def halves(query):
        (left, left_sum), (right, right_sum) = part(query, slice(0, 5)), part(query, slice(5, 12))
        share = jax.nn.sigmoid(left_sum - right_sum)[..., None]
        return share * left + (1 - share) * right

    @jax.jit
    def run(query):
        whole, pull = jax.vjp(lambda query: part(query, slice(0, 12))[0], query)
        parts, pull_parts = jax.vjp(halves, query)
        return (whole, pull(direction)[0]), (parts, pull_parts(direction)[0]), part(query, slice(0, 5))[0]

    whole, parts, half = run(query)
    for want, got in zip(whole, parts):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(half - whole[0]).max() > 0.1


@pytest.mark.quick
def test_under_vmap():
    query, key, value, _ = inputs(8, batch=3)
    positions = jnp.stack([jnp.arange(8), jnp.arange(8) - 1, jnp.arange(8)])
    call = lambda core, q, k, v, p: core(
        AttentionCall(q, k, v, mask=causal(), tokens=TokenPositions(p), kv_tokens=TokenPositions(p), scale=0.5)
    )
    one = lambda *row: call(BlockwiseAttention(block=4), *row)
    got = jax.jit(jax.vmap(one))(query, key, value, positions)
    wanted = jax.jit(lambda *arrays: call(ReferenceAttention(), *arrays))(query, key, value, positions)
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.by_default("tensor")
@pytest.mark.parametrize("kv_split", ["tensor", None])
def test_gradients_in_shard_map_are_those_of_one_device(kv_split):
    """Query heads split over `tensor`; key heads split alike, or (one key head) held whole by every device."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    query, key, value, direction = inputs(8, batch=2, heads=4, kv_heads=2 if kv_split else 1)
    sinks, positions = jnp.arange(4.0), positions_like((2, 8)).positions

    def gradients(query, key, value, sinks, direction, positions):
        def loss(arrays):
            *qkv, sinks = arrays
            output = BlockwiseAttention(block=4)(
                AttentionCall(*qkv, mask=causal(), tokens=TokenPositions(positions), scale=0.5, sinks=sinks)
            )
            return jnp.sum(output * direction)

        return jax.grad(loss)((query, key, value, sinks))

    queries, keys, heads = P("fsdp", None, "tensor"), P("fsdp", None, kv_split), P("tensor")
    specs = (queries, keys, keys, heads)
    split = jax.shard_map(gradients, mesh=mesh, in_specs=(*specs, queries, P("fsdp")), out_specs=specs, check_vma=True)
    arrays = query, key, value, sinks, direction, positions
    for got, want in zip(jax.jit(split)(*arrays), jax.jit(gradients)(*arrays)):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(("queries", "block", "kv_block"), [(1, 1, 16), (2, 2, 8), (3, 3, 4), (4, 4, 4), (100, 4, 4)])
def test_few_queries_take_many_keys_at_a_time(queries, block, kv_block):
    """As many scores as a pair of full blocks has, so that decoding is not a loop over short blocks of its cache."""
    places, kv_places = (TokenPositions(positions_like((1, seq)).positions) for seq in (queries, 100))
    arrays = (jax.ShapeDtypeStruct((1, 1, *shape, 2), jnp.float32) for shape in ((1, queries), (100,)))
    cut_rows, cut_columns, here, there, _ = eqx.filter_eval_shape(
        blockwise.split_into_blocks, 4, *arrays, places, kv_places
    )
    assert (cut_rows.shape[4], cut_columns.shape[3]) == (block, kv_block)
    assert (here.positions.shape[2], there.positions.shape[2]) == (block, kv_block)
