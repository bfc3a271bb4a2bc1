"""Products fused with an all-gather or a reduce-scatter, against float64 numpy, and their compiled programs."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import FAST
from jax.sharding import PartitionSpec as P

from eqformer.parallel import all_gather_matmul, filter_shard_map, matmul_reduce_scatter, vary


# How, and the other axis of the mesh: beside `pipe`, pieces are swapped.
WAYS = (
    ("none", "replica"),
    ("ring", "replica"),
    ("bidirectional", "replica"),
    ("ring", "pipe"),
    ("bidirectional", "pipe"),
)
BATCH, INPUTS = 4, 5
SIZES = ((3, 9), (2, 6), (3, 6), (4, 12), (8, 8))  # devices and tokens: pieces of three rows, of two, and of one


def mesh_of(devices, other="replica"):
    shape = (8 // devices, devices)
    used = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, (other, "tensor"), (jax.sharding.AxisType.Auto,) * 2, devices=used)


def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def way_back(fn, x, weights, gradients):
    """The product, and what it gives back for a gradient."""
    y, back = jax.vjp(fn, x, weights)
    return y, *back(gradients)


def cases(devices, tokens, other):
    """By name: the function of an axis, a way and its arguments, whole arrays, and their specs; y = x @ weight.T."""
    rows, features = P(other, "tensor"), P(other, None, "tensor")
    wide = [numbers(3 * devices, INPUTS), numbers(2 * devices, INPUTS)]
    deep = numbers(3 * devices, INPUTS * devices)

    def gather(x, weights, **way):
        return all_gather_matmul(x, weights, "tensor", **way)

    def scatter(x, weights, over, **way):
        return (matmul_reduce_scatter(x, weights[0], "tensor", scatter=over, **way),)

    x, long = numbers(BATCH, tokens, INPUTS), numbers(BATCH, tokens, INPUTS * devices)
    return {
        "gather": (gather, x, tuple(wide), rows, P("tensor"), features),
        "seq": (functools.partial(scatter, over="seq"), long, (deep,), features, P(None, "tensor"), rows),
        "outputs": (functools.partial(scatter, over="outputs"), long, (deep,), features, P(None, "tensor"), features),
    }


def expected(x, weights, gradients):
    x, weights, gradients = jax.tree.map(np.float64, (x, weights, gradients))
    to_x = sum(gradient @ weight for gradient, weight in zip(gradients, weights))
    to_weights = tuple(np.einsum("bso,bsi->oi", gradient, x) for gradient in gradients)
    return tuple(x @ weight.T for weight in weights), to_x, to_weights


def errors(actual, wanted):
    """Relative Frobenius error of each array."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
    return [np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in pairs]


@pytest.mark.parametrize(
    "devices,tokens", [SIZES[0], *(pytest.param(*sizes, marks=pytest.mark.grid) for sizes in SIZES[1:])]
)
def test_values_and_gradients_equal_one_device(devices, tokens):
    programs, arguments, wanted = {}, {}, {}
    for overlap, other in WAYS:
        mesh = mesh_of(devices, other)
        for name, (fn, x, weights, *specs) in cases(devices, tokens, other).items():
            gradients = tuple(numbers(BATCH, tokens, len(weight)) for weight in weights)
            arguments[name], wanted[name] = (x, weights, gradients), expected(x, weights, gradients)
            product = functools.partial(way_back, functools.partial(fn, overlap=overlap))
            ins, outs = (specs[0], specs[1], specs[2]), (specs[2], specs[0], specs[1])
            programs[name, overlap, other] = filter_shard_map(product, mesh, ins, outs)
    run = jax.jit(lambda arguments: {case: program(*arguments[case[0]]) for case, program in programs.items()})
    results = run.lower(arguments).compile(compiler_options=FAST)(arguments)
    for (name, *way), result in results.items():
        assert max(errors(result, wanted[name])) < 1e-6, (name, way)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result))


@pytest.mark.grid
def test_inside_a_scan_under_a_checkpoint_and_a_branch_that_other_devices_do_not_take():
    """Two layers of gather, activation, scatter; the second half of the mesh returns its input doubled."""
    mesh = mesh_of(4, "pipe")
    x, up, down = numbers(2, 8, 4), numbers(2, 12, 4), numbers(2, 4, 12)

    def layer(x, weights, **way):
        hidden = jnp.tanh(all_gather_matmul(x, weights[0], "tensor", **way))
        return x + matmul_reduce_scatter(hidden, weights[1], "tensor", scatter="seq", **way), None

    def loss(x, up, down, alike, **way):
        x, up, down = vary((x, up, down), ["pipe"])  # jax does not type the result of a cond by its predicate
        run = jax.checkpoint(functools.partial(layer, **way))
        taken = lambda x: jax.lax.scan(run, x, (up, down))[0]
        y = taken(x) if alike else jax.lax.cond(jax.lax.axis_index("pipe") == 0, taken, lambda x: x * 2, x)
        return jax.lax.psum(jnp.sum(y**2), ("pipe", "tensor"))

    def one_device(x, up, down, alike):
        y = x
        for one, two in zip(up, down):
            y = y + jnp.tanh(y @ one.T) @ two.T
        return 2 * jnp.sum(y**2) if alike else jnp.sum(y**2) + jnp.sum((2 * x) ** 2)

    specs = P(None, "tensor"), P(None, "tensor"), P(None, None, "tensor")
    of_one = jax.jit(jax.value_and_grad(one_device, (0, 1, 2)), static_argnums=3)
    for alike, way in (
        (False, {"overlap": "none"}),
        (False, {"overlap": "bidirectional"}),
        (True, {"overlap": "ring"}),
    ):
        wanted = of_one(x, up, down, alike)
        mapped = filter_shard_map(functools.partial(loss, alike=alike, **way), mesh, specs, P())
        compiled = jax.jit(jax.value_and_grad(mapped, (0, 1, 2))).lower(x, up, down).compile(compiler_options=FAST)
        assert max(errors(compiled(x, up, down), wanted)) < 2e-6, way


@pytest.mark.by_default("none", "bidirectional")
@pytest.mark.parametrize("overlap", ["none", "ring", "bidirectional"])
def test_sixteen_bits_are_summed_in_float32(overlap):
    mesh = mesh_of(4)
    x, weight = jnp.asarray(numbers(4, 8, 256), jnp.bfloat16), jnp.asarray(numbers(12, 256), jnp.float32)

    def both(x, weight):
        gathered = all_gather_matmul(x, weight, "tensor", overlap=overlap)
        return gathered, matmul_reduce_scatter(gathered, weight.T, "tensor", scatter="seq", overlap=overlap)

    specs = P("replica", "tensor"), P("tensor")
    mapped = filter_shard_map(both, mesh, specs, (P("replica", None, "tensor"), P("replica", "tensor")))
    gathered, reduced = jax.jit(mapped)(x, weight)
    assert gathered.dtype == reduced.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.bfloat16), np.float64).T
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    assert errors(gathered, exact)[0] < 1.01 * errors(rounded, exact)[0]
    again = np.asarray(gathered, np.float64) @ np.asarray(weight.astype(jnp.bfloat16), np.float64)
    assert errors(reduced, again)[0] < 2**-8  # rounded each time the sum is passed on


def compiled_text(devices, overlap, stages=1, gradient=True, scatter=None):
    x, weight = numbers(2, 3 * devices, 4 * devices), numbers(3 * devices, 4 * devices)
    rows, features = P(None, "tensor"), P(None, None, "tensor")
    way = {"axis": "tensor", "overlap": overlap}
    if scatter:
        product = functools.partial(matmul_reduce_scatter, scatter=scatter, **way)
        ins, out = (features, P(None, "tensor")), rows if scatter == "seq" else features
    else:
        product = functools.partial(all_gather_matmul, **way)
        ins, out = (rows, P("tensor")), features

    def fn(x, weight):
        if not gradient:
            return product(x, weight)
        y, back = jax.vjp(product, x, weight)
        return y, *back(y)

    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((stages, devices), ("pipe", "tensor"), kinds, devices=jax.devices()[: stages * devices])
    outs = (out, *ins) if gradient else out
    return jax.jit(filter_shard_map(fn, mesh, ins, outs)).lower(x, weight).compile().as_text() or ""


def operations(text):
    """How often each operation but constants stands in a compiled program."""
    found = collections.Counter(re.findall(r"^\s*(?:ROOT )?%[\w.-]+ = .*? ([a-z][a-z-]*)\(", text, re.MULTILINE))
    del found["constant"]
    return found


@pytest.mark.grid
def test_the_program_does_not_grow_with_the_axis_and_gathers_nothing_whole():
    for overlap, ways in (("ring", 1), ("bidirectional", 2)):
        four, eight = (operations(compiled_text(devices, overlap)) for devices in (4, 8))
        assert four == eight and four["while"] == 3
        assert four["collective-permute"] == 3 * ways  # x, the gradient of x, x again
        assert not four["all-gather"] and not four["reduce-scatter"] and not four["all-reduce"]
        for scatter in ("seq", "outputs"):
            four, eight = (operations(compiled_text(devices, overlap, scatter=scatter)) for devices in (4, 8))
            assert four == eight and four["while"] == 2
            assert four["collective-permute"] == 2 * ways  # the sums, and their gradient
            assert not four["all-gather"] and not four["reduce-scatter"] and not four["all-reduce"]
    swaps = operations(compiled_text(4, "bidirectional", stages=2))
    assert swaps["all-to-all"] == 3 * 2 and not swaps["collective-permute"]
    plain = operations(compiled_text(4, "none"))
    assert plain["all-gather"] >= 1 and not plain["collective-permute"]


@pytest.mark.quick
def test_no_piece_is_passed_on_in_vain():
    text = compiled_text(8, "ring", gradient=False)
    assert re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text) == ["7"]
    assert len(re.findall(r" collective-permute\(", text)) == 1


def test_an_axis_of_one_device_is_a_product():
    x, weight = numbers(8, 3, 5), numbers(4, 5)
    ways: list[Any] = [{"overlap": overlap} for overlap in ("none", "ring", "bidirectional")]

    def every_way(x, weight):
        gathers = [all_gather_matmul(x, weight, "tensor", **way) for way in ways]
        return gathers + [matmul_reduce_scatter(x, weight, "tensor", scatter="seq", **way) for way in ways]

    run = filter_shard_map(every_way, mesh_of(1), (P("replica"), P()), P("replica", "tensor"))
    assert max(errors(jax.jit(run)(x, weight), [x @ weight.T] * 2 * len(ways))) < 1e-6


def test_controls_a_wrong_ring_gives_wrong_numbers(monkeypatch):
    from eqformer.parallel import _ring

    mesh, x, weight = mesh_of(4), numbers(4, 8, 5), numbers(12, 5)
    specs = (P("replica", "tensor"), P("tensor")), P("replica", None, "tensor")

    def error():
        fn = lambda x, weight: all_gather_matmul(x, weight, "tensor", overlap="ring")
        return errors(jax.jit(filter_shard_map(fn, mesh, *specs))(x, weight), x @ weight.T)[0]

    assert error() < 1e-6
    right = _ring.send_to_neighbors
    monkeypatch.setattr(_ring, "send_to_neighbors", lambda parts, axis, dim, **_: parts)
    assert error() > 0.1  # nothing passed on
    backwards = lambda parts, *rest, **how: right((parts[0], *parts), *rest, **how)[1:]
    monkeypatch.setattr(_ring, "send_to_neighbors", backwards)
    assert error() > 0.1  # the other way round


def test_controls_a_weight_gets_the_sum_over_the_devices_that_share_it():
    mesh, x, weight = mesh_of(4), numbers(4, 8, 5), numbers(12, 5)

    def to_weight(x, weight, apart):
        weight = vary(weight, ["replica"] if apart else [])
        y, back = jax.vjp(lambda weight: all_gather_matmul(x, weight, "tensor", overlap="ring"), weight)
        return back(y)[0]

    wanted = np.einsum("bso,bsi->oi", x @ weight.T, x)
    for apart, spec in ((False, P("tensor")), (True, P(("replica", "tensor")))):
        fn = functools.partial(to_weight, apart=apart)
        result = jax.jit(filter_shard_map(fn, mesh, (P("replica", "tensor"), P("tensor")), spec))(x, weight)
        assert (errors(result[:12], wanted)[0] > 0.1) == apart  # each device's part alone is not the gradient


def test_bad_arguments_are_refused():
    x, weight = numbers(4, 8, 5), numbers(6, 5)

    def call(fn, specs=(P(None, None), P(None, None))):
        return jax.eval_shape(filter_shard_map(fn, mesh_of(4), specs, P("tensor")), x, weight)

    with pytest.raises(ValueError, match="choose one of 'none', 'ring', 'bidirectional'"):
        call(lambda x, weight: all_gather_matmul(x, weight, "tensor", overlap="both"))
    with pytest.raises(ValueError, match="6 outputs cannot be split evenly over the 4 devices of 'tensor'"):
        call(lambda x, weight: matmul_reduce_scatter(x, weight, "tensor", scatter="outputs", overlap="ring"))
