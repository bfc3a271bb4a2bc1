"""Costs and peak memory that are read from traced programs, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqformer.parallel import _collectives as send, filter_shard_map, make_mesh, vary
from eqformer.program import (
    bytes_sent,
    count_flops,
    count_host_bytes,
    estimate_peak,
    FURTHER_ROUNDS,
    list_transfers,
    read_hlo,
    read_jaxpr,
    read_traced,
    Transfer,
)


N = 256
MATRIX = N * N * 4
X = jnp.zeros((N, N))


def read(fn, *arguments, platform="cuda"):
    return read_jaxpr(jax.make_jaxpr(fn)(*arguments).jaxpr, platform)


def most(fn, *arguments, platform="cuda"):
    return estimate_peak(read(fn, *arguments, platform=platform)).size


def on_devices(fn, specs, out, *arguments):
    """The program of each of eight devices over `fsdp`."""
    mapped = filter_shard_map(fn, make_mesh(fsdp=8), specs, out)
    (program,) = read_traced(jax.make_jaxpr(mapped)(*arguments).jaxpr)
    return program


@pytest.mark.quick
def test_results_that_only_elementwise_operations_read_are_never_written():
    assert most(lambda x: (jnp.sin(x) * 2 + jnp.cos(x)).sum(), X) == 4
    assert most(lambda x: jnp.sin(x) @ x, X) == 2 * MATRIX  # a product reads it from memory
    assert most(lambda x: (jnp.sin(x) @ x).T.reshape(-1), X) == 2 * MATRIX  # and views are no copies


def test_arrays_that_nothing_reads_any_more_are_overwritten_or_freed():
    chain = lambda x: ((x @ x) @ x) @ x
    assert most(chain, X) == 2 * MATRIX
    assert most(lambda x: chain(x) + (x @ x), X) == 2 * MATRIX  # the last product is added in place
    assert most(lambda x: (x @ x, x @ x.T, chain(x)), X) == 4 * MATRIX


def test_loops_carry_in_place():
    def summed(x, rows):
        return jax.lax.scan(lambda total, row: (total + jnp.outer(row, row) @ x, row @ x), jnp.zeros_like(x), rows)

    rows = jnp.zeros((8, N))
    results, inside = MATRIX + 8 * N * 4, MATRIX + N * 4  # inside an outer product; what is added is in place
    assert most(summed, X, rows) in (results + inside, results + inside - N * 4)
    without_sum = lambda x, rows: summed(x, rows)[1]
    assert most(without_sum, X, rows) <= 2 * 8 * N * 4  # nothing needs the sum


def test_branches_and_platforms():
    one_product, several = (lambda x: x @ x), (lambda x: (x @ x.T) @ (x @ x))
    choose = lambda first, second: most(lambda flag, x: jax.lax.cond(flag, first, second, x), True, X)
    assert choose(one_product, several) == 3 * MATRIX + 4  # and the number of the branch
    in_place = lambda x: x.T * (x @ x)  # written over the product, which is in the result's place
    assert choose(in_place, lambda x: x) == MATRIX + 4
    outer = lambda x: jnp.outer((x @ x).sum(0), x[0])  # made when the product is not needed any more
    assert MATRIX < choose(outer, lambda x: x) < 1.1 * MATRIX
    by_platform = lambda x: jax.lax.platform_dependent(x, tpu=one_product, default=several)
    assert most(by_platform, X, platform="tpu") // MATRIX == 1 and most(by_platform, X, platform="cuda") // MATRIX == 3
    in_loop = lambda x: jax.lax.scan(lambda y, _: (jnp.tanh(by_platform(y)), None), x, length=2)[0]
    assert most(in_loop, X, platform="cuda") == most(in_loop, X, platform="tpu") + 2 * MATRIX


def test_calls_are_written_out_and_equal_casts_made_once():
    twice = jax.jit(lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T)
    program = read(lambda x: twice(x), X)
    assert [operation.kind for operation in program.operations].count("convert_element_type") == 1
    assert program.sizes[program.inputs[0]] == MATRIX


def test_a_cast_that_is_cast_back_is_not_made():
    back = lambda between: lambda narrow: narrow @ narrow.astype(between).astype(jnp.bfloat16)
    narrow = X.astype(jnp.bfloat16)
    assert most(back(jnp.float32), narrow) == MATRIX // 2
    assert most(back(jnp.float16), narrow) == MATRIX  # the control: it rounds


@pytest.mark.quick
def test_a_convolution_that_several_operations_read_is_written():
    read_twice = lambda y: (jnp.sin(y) * jnp.cos(y)).sum()
    taps = lambda rows: rows[1:] * 2 + rows[:-1]
    rows = jnp.zeros((N + 1, N))
    assert most(lambda rows: read_twice(taps(rows)), rows) == MATRIX + 4
    assert most(lambda rows: jnp.sin(taps(rows)).sum(), rows) == 4  # the control: one operation reads it
    assert most(lambda rows: read_twice(rows[: N // 2] * 2 + rows[N // 2 :]), X) == 4  # each row is read once


def test_the_next_iterations_parameters_are_gathered_while_an_iteration_runs():
    """The control gathers what the iteration before it has made, which is not known ahead."""

    def run(x, weights, *, ahead):
        def iteration(y, weight):
            source = weight if ahead else weight + y[:1, : N // 8].T @ y[:1]
            return jnp.tanh(y @ send.all_gather("weights over fsdp", source, "fsdp")), None

        return jax.lax.scan(iteration, vary(x, ["fsdp"]), weights)[0]

    def peak(ahead, layers=2):
        fn = lambda x, weights: run(x, weights, ahead=ahead)
        program = on_devices(fn, (P(), P(None, "fsdp")), P("fsdp"), X, jnp.zeros((layers, N, N)))
        return estimate_peak(program)

    assert peak(ahead=True).by_cause["sent beside a layer's work"] == MATRIX
    assert peak(ahead=False).by_cause["sent beside a layer's work"] == 0
    assert peak(ahead=True, layers=1).size == peak(ahead=True).size - MATRIX  # there is no next layer


def test_the_largest_scattered_array_is_still_sent_while_an_iteration_runs():
    def iteration(x, _):
        large, small = x @ x, (x @ x)[:8]
        return x, [send.psum_scatter("gradients over fsdp", y, "fsdp", 0) for y in (large, small)]

    run = lambda x: jax.lax.scan(iteration, vary(x, ["fsdp"]), length=2)[1]
    program = on_devices(run, (P(),), [P(None, "fsdp")] * 2, X)
    assert estimate_peak(program).by_cause["sent beside a layer's work"] == MATRIX


def test_flops_and_transfers_of_a_traced_program_are_those_of_the_compiled_one():
    """Loops are multiplied out, of a conditional the branch with more counts; the control runs the loop once."""

    def run(x, weights, flag):
        def layer(y, weight):
            gathered = send.all_gather("weights over fsdp", weight, "fsdp")
            y = jax.lax.cond(flag, lambda y: jnp.tanh(y @ gathered), lambda y: y, y)
            return y, None

        y = jax.lax.scan(layer, vary(x, ["fsdp"]), weights)[0]
        return send.psum_scatter("gradients over fsdp", y @ x, "fsdp", 0)

    mapped = filter_shard_map(run, make_mesh(fsdp=8), (P(), P(None, "fsdp"), P()), P("fsdp"))
    arguments = X, jnp.zeros((3, N, N)), True
    (traced,) = read_traced(jax.make_jaxpr(mapped)(*arguments).jaxpr)
    compiled = read_hlo(jax.jit(mapped).lower(*arguments).compile(), mesh=make_mesh(fsdp=8))
    assert count_flops(traced) == count_flops(compiled) == (3 + 1) * 2 * N**3
    gather = Transfer("all-gather", ("fsdp",), 8, 7 / 8 * MATRIX, 3)
    scatter = Transfer("reduce-scatter", ("fsdp",), 8, 7 / 8 * MATRIX, 1)
    for program in (traced, compiled):
        sent = [(x.kind, x.axes, x.devices, x.sent, x.times) for x in list_transfers(program)]
        assert sent == [(x.kind, x.axes, x.devices, x.sent, x.times) for x in (gather, scatter)]
    names = {"weights over fsdp", "gradients over fsdp"}
    assert {x.named(names) for x in list_transfers(traced)} == names
    once = dataclasses.replace(gather, times=1)
    assert bytes_sent(list_transfers(traced)) == bytes_sent((gather, scatter)) > bytes_sent((once, scatter))


def test_loops_of_further_rounds_count_as_none_and_others_once():
    def run(x, stop):
        with jax.named_scope(FURTHER_ROUNDS):
            x = jax.lax.while_loop(lambda y: y[0, 0] < stop, lambda y: vary(jax.lax.psum(y @ y, "fsdp"), ["fsdp"]), x)
        return jax.lax.while_loop(lambda y: y[0, 0] < stop, lambda y: vary(jax.lax.psum(y @ y, "fsdp"), ["fsdp"]), x)

    fn = lambda x, stop: run(vary(x, ["fsdp"]), stop)
    program = on_devices(fn, (P(), P()), P("fsdp"), X, jnp.zeros(()))
    assert [x.times for x in list_transfers(program)] == [None] and count_flops(program) == 2 * N**3


def test_arrays_that_a_loop_leaves_on_the_host_are_counted_there():
    def run(x):
        offloaded = lambda y: jax.device_put(y, jax.memory.Space.Host)
        return jax.lax.scan(lambda y, _: (y @ y, offloaded(y)), x, length=3)[1]

    program = read(run, X)
    assert count_host_bytes(program) == 3 * MATRIX and estimate_peak(program).size <= 3 * MATRIX
    assert count_host_bytes(read(lambda x: jax.lax.scan(lambda y, _: (y @ y, y), x, length=3)[1], X)) == 0
