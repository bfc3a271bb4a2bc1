"""Bytes of temporaries by walking through a trace, against counts made by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqformer.parallel import _collectives as send, filter_shard_map, make_mesh, vary
from eqformer.planning._temporary_bytes import peak
from eqformer.planning._temporary_tpu import relaid_bytes
from eqformer.program import Lines, needed, of_platform, per_device


N = 256
MATRIX = N * N * 4
X = jnp.zeros((N, N))


def most(fn, *given, platform="cuda"):
    return peak(needed(of_platform(jax.make_jaxpr(fn)(*given).jaxpr, platform)), platform).size


@pytest.mark.quick
def test_what_is_only_read_by_elementwise_operations_is_never_written():
    assert most(lambda x: (jnp.sin(x) * 2 + jnp.cos(x)).sum(), X) == 4
    assert most(lambda x: jnp.sin(x) @ x, X) == 2 * MATRIX  # a product reads it from memory
    assert most(lambda x: (jnp.sin(x) @ x).T.reshape(-1), X) == 2 * MATRIX  # and views are no copies


def test_what_nothing_reads_any_more_is_overwritten_or_given_back():
    chain = lambda x: ((x @ x) @ x) @ x
    assert most(chain, X) == 2 * MATRIX
    assert most(lambda x: chain(x) + (x @ x), X) == 2 * MATRIX  # the last product is added in place
    assert most(lambda x: (x @ x, x @ x.T, chain(x)), X) == 4 * MATRIX


def test_loops_carry_in_place():
    def summed(x, rows):
        return jax.lax.scan(lambda total, row: (total + jnp.outer(row, row) @ x, row @ x), jnp.zeros_like(x), rows)

    rows = jnp.zeros((8, N))
    kept, inside = (
        MATRIX + 8 * N * 4,
        MATRIX + N * 4,
    )  # the sum and its rows; an outer product; what is added is in place
    assert most(summed, X, rows) in (kept + inside, kept + inside - N * 4)
    forgotten = lambda x, rows: summed(x, rows)[1]
    assert most(forgotten, X, rows) <= 2 * 8 * N * 4  # nothing needs the sum


def test_branches_and_platforms():
    few, many = (lambda x: x @ x), (lambda x: (x @ x.T) @ (x @ x))
    assert (
        most(lambda flag, x: jax.lax.cond(flag, few, many, x), True, X) == 3 * MATRIX + 4
    )  # and the number of the branch
    over = lambda x: x.T * (x @ x)  # written over the product, which is in the result's place
    assert most(lambda flag, x: jax.lax.cond(flag, over, lambda x: x, x), True, X) == MATRIX + 4
    after = lambda x: jnp.outer((x @ x).sum(0), x[0])  # made when the product is not needed any more
    assert MATRIX < most(lambda flag, x: jax.lax.cond(flag, after, lambda x: x, x), True, X) < 1.1 * MATRIX
    by_platform = lambda x: jax.lax.platform_dependent(x, tpu=few, default=many)
    assert most(by_platform, X, platform="tpu") // MATRIX == 1 and most(by_platform, X, platform="cuda") // MATRIX == 3
    in_loop = lambda x: jax.lax.scan(lambda y, _: (jnp.tanh(by_platform(y)), None), x, length=2)[0]
    assert most(in_loop, X, platform="cuda") == most(in_loop, X, platform="tpu") + 2 * MATRIX


def test_calls_are_written_out_and_equal_casts_made_once():
    twice = jax.jit(lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T)
    lines = Lines(jax.make_jaxpr(lambda x: twice(x))(X).jaxpr)
    assert [line.name for line in lines.lines].count("convert_element_type") == 1
    assert lines.size(lines.given[0]) == MATRIX


def test_a_cast_that_is_cast_back_is_not_made_on_tpus():
    table = lambda narrow: narrow.astype(jnp.float32)
    given = lambda narrow: (lambda wide: jax.lax.map(lambda row: row @ wide.astype(jnp.bfloat16), narrow))(
        table(narrow)
    )
    narrow = X.astype(jnp.bfloat16)
    assert most(given, narrow, platform="tpu") == MATRIX // 2 + N * 2
    assert most(given, narrow, platform="cuda") >= 2 * MATRIX
    back = lambda between: lambda narrow: narrow @ narrow.astype(between).astype(jnp.bfloat16)
    assert most(back(jnp.float32), narrow, platform="cuda") == MATRIX // 2  # nor on GPUs, but for loops
    assert most(back(jnp.float16), narrow, platform="cuda") == MATRIX  # which rounds


def test_tpus_compute_what_products_read_and_cast_what_they_give_within_them():
    """The control is a GPU."""
    found = lambda fn, given: [most(fn, given, platform=platform) / MATRIX for platform in ("tpu", "cuda")]
    assert found(lambda x: jnp.sin(x) @ x, X) == [1, 2]

    def sums(narrow):
        both = narrow @ narrow, narrow.T @ narrow
        return sum(jnp.cumsum(one.astype(jnp.float32), 0).sum() for one in both)

    assert found(sums, X.astype(jnp.bfloat16)) == pytest.approx([3, 2.5], abs=0.01)


def test_tpus_cast_before_loops_and_take_loops_of_one_turn_away():
    """All of what two loops go through is cast for both, or gathered if that is one turn's; the control is a GPU."""

    def run(x, weights):
        gathered = lambda weight: send.all_gather("parameters over fsdp", weight.astype(jnp.bfloat16), "fsdp")
        turn = lambda y, weight: ((y @ gathered(weight).astype(jnp.float32)).sum(-1, keepdims=True) * x[:1], None)
        y = jax.lax.scan(turn, vary(x[:1], ["fsdp"]), weights)[0]
        between = jnp.cumsum(jnp.cumsum(x + y, 0), 1)
        return jax.lax.scan(turn, between[:1], weights, reverse=True)[0]

    def found(turns, platform):
        mapped = filter_shard_map(run, make_mesh(fsdp=8), (P(), P(None, "fsdp")), P("fsdp"))
        (jaxpr,) = per_device(jax.make_jaxpr(mapped)(X, jnp.zeros((turns, N, N))).jaxpr)
        return peak(needed(jaxpr), platform).size / MATRIX

    assert found(16, "tpu") - found(2, "tpu") == pytest.approx((16 - 2) / 8 / 2, abs=0.01)
    assert found(1, "tpu") - 2 == pytest.approx(1 / 2, abs=0.01)
    assert found(16, "cuda") == found(2, "cuda")


def test_gpus_send_beside_other_lines():
    """Parameters of a loop's first turn are gathered before it; the control is a TPU, where they are not."""

    def fn(x, weights):
        small = (x @ x).sum(0)  # a matrix before the loop
        gathered = lambda weight: send.all_gather("parameters over fsdp", weight, "fsdp")
        return jax.lax.scan(lambda y, weight: (jnp.tanh(y @ gathered(weight)), None), vary(small, ["fsdp"]), weights)[0]

    mapped = filter_shard_map(fn, make_mesh(fsdp=8), (P(), P(None, "fsdp")), P("fsdp"))
    (jaxpr,) = per_device(jax.make_jaxpr(mapped)(X, jnp.zeros((2, N, N))).jaxpr)
    rows = {platform: peak(needed(jaxpr), platform).size for platform in ("tpu", "cuda")}
    assert rows["tpu"] < MATRIX + N * N and rows["cuda"] == 2 * MATRIX + N * 4


def test_gpus_scatter_each_sum_of_a_turn_beside_the_next_two_products():
    """Of four, all made before the first is scattered as they are traced, three are there; the control is a TPU."""

    def turn(x, _):
        sums = x @ x, x.T @ x, x @ x.T, x.T @ x.T
        scattered = [send.psum_scatter("gradients over fsdp", each, "fsdp", 0).sum(0) for each in sums]
        return x, jnp.stack(scattered)

    run = lambda x: jax.lax.scan(turn, vary(x, ["fsdp"]), length=2)[1]
    (jaxpr,) = per_device(jax.make_jaxpr(filter_shard_map(run, make_mesh(fsdp=8), (P(),), P(None, "fsdp")))(X).jaxpr)
    found = {platform: peak(needed(jaxpr), platform).size / MATRIX for platform in ("tpu", "cuda")}
    assert 4 < found["tpu"] < 4.3 and 3 < found["cuda"] < 3.6


def test_gpus_take_a_sum_of_a_turn_that_is_scattered_last():
    """What is summed waits for all products; the control is a TPU."""

    def turn(x, _):
        total = jnp.tanh(x @ x).sum(0).reshape(1, N).sum(0)  # a sum over a dim of one entry is a view
        scattered = send.psum_scatter("gradients over fsdp", total, "fsdp", 0)
        return x, (scattered, jnp.tanh((x @ x.T) @ x.T).sum())

    run = lambda x: jax.lax.scan(turn, vary(x, ["fsdp"]), length=2)[1][0]
    (jaxpr,) = per_device(jax.make_jaxpr(filter_shard_map(run, make_mesh(fsdp=8), (P(),), P(None, "fsdp")))(X).jaxpr)
    found = {platform: peak(jaxpr, platform).size // MATRIX for platform in ("tpu", "cuda")}
    assert found == {"tpu": 2, "cuda": 3}


def test_gpus_run_a_kernel_that_gives_a_gradient_before_its_scatter():
    """Of three, all made before the first is scattered as they are traced, two are there; the control is a TPU."""
    kernel = jax.custom_batching.custom_vmap(lambda x, y: x @ y)
    kernel.def_vmap(lambda _, batched, x, y: (x @ y, True))

    def turn(x, _):
        sums = kernel(x, x), kernel(x, x.T), kernel(x.T, x)
        scattered = [send.psum_scatter("gradients over fsdp", each, "fsdp", 0).sum(0) for each in sums]
        return x, jnp.stack(scattered)

    run = lambda x: jax.lax.scan(turn, vary(x, ["fsdp"]), length=2)[1]
    (jaxpr,) = per_device(jax.make_jaxpr(filter_shard_map(run, make_mesh(fsdp=8), (P(),), P(None, "fsdp")))(X).jaxpr)
    found = {platform: peak(needed(jaxpr), platform).size / MATRIX for platform in ("tpu", "cuda")}
    assert 3 < found["tpu"] < 3.3 and 2 < found["cuda"] < 2.3


@pytest.mark.quick
def test_what_a_convolution_gives_to_more_than_one_line_is_written():
    both = lambda y: (jnp.sin(y) * jnp.cos(y)).sum()
    taps = lambda rows: rows[1:] * 2 + rows[:-1]
    rows = jnp.zeros((N + 1, N))
    assert most(lambda rows: both(taps(rows)), rows) == MATRIX + 4
    assert most(lambda rows: jnp.sin(taps(rows)).sum(), rows) == 4  # the control: one line reads it
    assert most(lambda rows: both(rows[: N // 2] * 2 + rows[N // 2 :]), X) == 4  # each row is read once


def test_gpus_make_zeros_of_one_shape_at_once():
    """Those that a table's gradient is added to are there during what comes before; the control is a TPU."""

    def run(ids, rows, x):
        first = jnp.zeros_like(x).at[ids].add(rows)
        after = jnp.tanh((x @ x) @ (first @ x)).sum()
        return first, jnp.zeros_like(x).at[ids].add(rows * after)

    ids, rows = jnp.zeros(4, int), jnp.zeros((4, N))
    found = {platform: most(run, ids, rows, X, platform=platform) // MATRIX for platform in ("tpu", "cuda")}
    assert found == {"tpu": 4, "cuda": 5}


def test_what_the_last_turn_of_a_loop_keeps_waits_on_gpus_until_it_is_read():
    """Products are there twice in a loss behind the loop, elementwise results are not; the control is a TPU."""

    def run(x, weights, keep):
        gathered = lambda weight: send.all_gather("parameters over fsdp", weight, "fsdp")
        last, kept = jax.lax.scan(lambda y, weight: (y * gathered(weight).sum(), keep(y)), vary(x, ["fsdp"]), weights)
        loss = (last @ last).sum() + jnp.tanh((last.T @ last) @ last).sum()
        return jax.lax.scan(lambda total, row: (total + row.sum(), None), loss, kept)[0]

    def held(keep, platform):
        fn = lambda x, weights: run(x, weights, keep)[None]
        mapped = filter_shard_map(fn, make_mesh(fsdp=8), (P(), P(None, "fsdp")), P("fsdp"))
        (jaxpr,) = per_device(jax.make_jaxpr(mapped)(X, jnp.zeros((3, 8))).jaxpr)
        return peak(needed(jaxpr), platform).size // MATRIX

    assert held(lambda y: y @ y, "cuda") == held(lambda y: y @ y, "tpu") + 1
    assert held(jnp.tanh, "cuda") == held(jnp.tanh, "tpu")


@pytest.mark.quick
def test_parts_of_other_than_eight_rows_are_laid_out_anew_on_tpus():
    def relaid(rows, moments=2, dtype=jnp.float32):
        parts = lambda x: jax.lax.map(lambda part: part * 2, x).reshape(-1, 128)
        given = jnp.zeros((4, rows, 128), dtype)
        return (
            relaid_bytes(jax.make_jaxpr(lambda x, y: (parts(x), parts(y)))(given, given).jaxpr, moments) / given.nbytes
        )

    # Of two arrays four that a moment adds, the last two beside a gradient.
    assert relaid(12) == 3 and relaid(12, moments=1) == 1 and relaid(12, moments=0) == 0
    assert relaid(16) == 0 and relaid(8, dtype=jnp.bfloat16) == 3
