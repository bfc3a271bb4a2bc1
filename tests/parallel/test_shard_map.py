"""`filter_shard_map` of functions of trees that hold more than arrays: eager, jitted and differentiated."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import filter_shard_map, make_mesh, vary


WAYS = {"eager": lambda fn: fn, "jit": eqx.filter_jit}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=4)


@pytest.fixture(scope="module")
def mlp():
    return nn.MLP(embed=8, mlp=16, activation=jax.nn.relu, bias=True, key=jax.random.key(0))


def grid(rows=8, columns=8):
    return jnp.arange(float(rows * columns)).reshape(rows, columns)


def by_hand(mlp, x):
    """The MLP in float64 numpy."""
    up, down = (np.asarray(linear.weight, np.float64) for linear in (mlp.up, mlp.down))
    hidden = np.maximum(np.asarray(x, np.float64) @ up.T + np.asarray(mlp.up.bias), 0)
    return hidden @ down.T + np.asarray(mlp.down.bias)


# What in_specs and out_specs mean: split, whole, concatenate, untile.


@pytest.mark.parametrize("way", WAYS)
def test_arguments_are_cut_and_results_put_together(mesh, way):
    shapes = []

    def same(x):
        shapes.append(x.shape)
        return x

    x = grid()
    cases = {P("fsdp", "tensor"): (4, 2), P("fsdp"): (4, 8), P(None, "tensor"): (8, 2), P(("tensor", "fsdp")): (1, 8)}
    for spec, piece in cases.items():
        got = WAYS[way](filter_shard_map(same, mesh, (spec,), spec))(x)
        np.testing.assert_array_equal(got, x)
        assert shapes.pop() == piece
    numbered = filter_shard_map(lambda x: x * 0 + jax.lax.axis_index("tensor"), mesh, (P("tensor"),), P("tensor"))
    np.testing.assert_array_equal(WAYS[way](numbered)(jnp.zeros(8, int)), [0, 0, 1, 1, 2, 2, 3, 3])


def test_what_a_spec_does_not_name_is_whole_and_tiled_where_the_result_names_it(mesh):
    x = grid(2, 2)
    tiled = filter_shard_map(lambda x: vary(x, ["fsdp", "tensor"]), mesh, (P(),), P("fsdp", "tensor"))(x)
    np.testing.assert_array_equal(tiled, np.tile(x, (2, 4)))


def test_a_result_is_untiled_over_the_axes_that_were_summed(mesh):
    x = grid()
    sums = {
        P("fsdp"): ("tensor", np.sum(np.split(np.asarray(x), 4, 1), 0)),
        P(None, "tensor"): ("fsdp", np.sum(np.split(np.asarray(x), 2, 0), 0)),
        P(): (("fsdp", "tensor"), np.asarray(x).reshape(2, 4, 4, 2).sum((0, 2))),
    }
    for out, (axes, wanted) in sums.items():
        run = filter_shard_map(lambda x, axes=axes: jax.lax.psum(x, axes), mesh, (P("fsdp", "tensor"),), out)
        np.testing.assert_array_equal(run(x), wanted)


def test_what_is_closed_over_is_whole(mesh):
    x = grid(2, 2)
    np.testing.assert_array_equal(filter_shard_map(lambda: x, mesh, (), P())(), x)


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_reduction_is_refused(mesh, way):
    x = grid()
    run = lambda fn, out: WAYS[way](filter_shard_map(fn, mesh, (P("fsdp", "tensor"),), out))(x)
    run(lambda x: jax.lax.psum(x, ("fsdp", "tensor")), P())
    for fn, out, axes in [
        (lambda x: x, P(), ["fsdp", "tensor"]),
        (lambda x: jax.lax.psum(x, "tensor"), P(None, "tensor"), ["fsdp"]),
        (lambda x: (x, {"deep": jax.lax.psum(x, "fsdp")}), (P("fsdp", "tensor"), P()), ["tensor"]),
    ]:
        with pytest.raises(ValueError) as error:
            run(fn, out)
        assert str(axes) in str(error.value) and "psum" in str(error.value)
    assert "result [1]['deep']" in str(error.value)


# Trees.


@pytest.mark.parametrize("way", WAYS)
def test_other_things_than_arrays_go_in_and_come_out(mesh, way):
    x = grid()

    def body(tree, name, mlp, nothing):
        assert name == "text" and nothing is None and tree["number"] == 3 and mlp.activation.function is jax.nn.relu
        return {
            "x": tree["x"] * tree["number"],
            "name": name + "!",
            "mlp": mlp,
            "relu": mlp.activation.function,
            "none": None,
        }

    mlp = nn.MLP(embed=8, mlp=16, activation=jax.nn.relu, key=jax.random.key(0))
    tree = {"x": x, "number": 3}
    specs = ({"x": P("fsdp"), "number": "anything"}, "anything", P(), P("fsdp"))
    out = {"x": P("fsdp"), "name": None, "mlp": None, "relu": P("tensor"), "none": P()}
    got = WAYS[way](filter_shard_map(body, mesh, specs, out))(tree, "text", mlp, None)
    np.testing.assert_array_equal(got["x"], 3 * x)
    assert got["name"] == "text!" and got["relu"] is jax.nn.relu and got["none"] is None
    np.testing.assert_array_equal(got["mlp"](x), mlp(x))


def test_one_spec_stands_for_a_subtree_and_none_for_whole(mesh):
    shapes = {}

    def body(pair, linear):
        shapes.update(a=pair["a"].shape, b=pair["b"][0].shape, weight=linear.weight.shape)
        return pair, linear

    linear = nn.Linear("embed -> mlp", embed=8, mlp=8, key=jax.random.key(0))
    pair = {"a": grid(), "b": [grid(2, 3), "text"]}
    got, back = filter_shard_map(body, mesh, (P("fsdp"), None), (P("fsdp"), None))(pair, linear)
    assert shapes == {"a": (4, 8), "b": (1, 3), "weight": (8, 8)}
    assert eqx.tree_equal(jax.tree.map(np.asarray, eqx.filter(got, eqx.is_array)), eqx.filter(pair, eqx.is_array))
    assert got["b"][1] == "text" and back.outputs == ("mlp",)


def test_numpy_arrays_are_cut_too(mesh):
    got = filter_shard_map(lambda x: jnp.asarray(x.shape), mesh, (P("fsdp", "tensor"),), P())(np.ones((4, 8)))
    np.testing.assert_array_equal(got, [2, 2])


# Layers and losses.


@pytest.mark.parametrize("way", WAYS)
def test_one_linear_by_columns_and_by_rows(mesh, way):
    linear = nn.Linear("embed -> mlp", embed=8, mlp=16, bias=True, key=jax.random.key(0))
    x, weight = grid(4), np.asarray(linear.weight, np.float64)
    columns = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (P("tensor"), P("tensor")))
    call = lambda linear, x: linear(x)
    got = WAYS[way](filter_shard_map(call, mesh, (columns, P("fsdp")), P("fsdp", "tensor")))(linear, x)
    np.testing.assert_allclose(got, np.asarray(x) @ weight.T, rtol=1e-5, atol=1e-5)
    rows = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (P(None, "tensor"), P()))
    summed = lambda linear, x: jax.lax.psum(linear(x), "tensor")  # the bias is zero
    got = WAYS[way](filter_shard_map(summed, mesh, (rows, P("fsdp", "tensor")), P("fsdp")))(linear, x)
    np.testing.assert_allclose(got, np.asarray(x) @ weight.T, rtol=1e-5, atol=1e-5)


def split_mlp(mlp):
    """Specs of an MLP whose hidden features are split, and its call on a device."""
    leaves = lambda m: (m.up.weight, m.up.bias, m.down.weight, m.down.bias)
    specs = eqx.tree_at(leaves, mlp, (P("tensor"), P("tensor"), P(None, "tensor"), P()))

    def call(mlp, x):
        without = eqx.tree_at(lambda m: m.down.bias, mlp, None)
        return jax.lax.psum(without(x), "tensor") + mlp.down.bias

    return specs, call


@pytest.mark.parametrize(
    "way", [pytest.param("eager", marks=pytest.mark.grid), *(way for way in WAYS if way != "eager")]
)
def test_an_mlp_and_a_whole_loss_with_gradients(mesh, mlp, way):
    specs, call = split_mlp(mlp)
    x = jax.random.normal(jax.random.key(1), (8, 8))
    outputs = filter_shard_map(call, mesh, (specs, P("fsdp")), P("fsdp"))
    np.testing.assert_allclose(WAYS[way](outputs)(mlp, x), by_hand(mlp, x), rtol=1e-5, atol=1e-5)

    def local_loss(mlp, x):
        return jax.lax.pmean(jnp.mean(jnp.square(call(mlp, x))), "fsdp")

    loss = filter_shard_map(local_loss, mesh, (specs, P("fsdp")), P())
    want, want_gradients = eqx.filter_jit(jax.value_and_grad(lambda m, x: jnp.mean(jnp.square(m(x)))))(mlp, x)
    got, gradients = WAYS[way](eqx.filter_value_and_grad(loss))(mlp, x)
    np.testing.assert_allclose(got, np.mean(by_hand(mlp, x) ** 2), rtol=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_bias_added_before_the_sum_is_seen(mesh, mlp):
    mlp = eqx.tree_at(lambda m: m.down.bias, mlp, jnp.ones(8))
    specs, call = split_mlp(mlp)
    x, run = grid(2), lambda call: eqx.filter_jit(filter_shard_map(call, mesh, (specs, P()), P()))(mlp, grid(2))
    np.testing.assert_allclose(run(call), by_hand(mlp, x), rtol=1e-5)
    wrong = run(lambda mlp, x: jax.lax.psum(mlp(x), "tensor"))
    assert np.abs(wrong - by_hand(mlp, x)).min() > 2.9


# Errors.


@pytest.mark.parametrize(
    "specs,args,words",
    [
        ((P(),), (1, 2), ["called with 2 arguments", "in_specs has 1 entries"]),
        (P("tensor"), (1,), ["in_specs must be a tuple", "`(spec,)`"]),
        (("tensor",), (jnp.ones(4),), ["argument [0]", "no PartitionSpec"]),
        ((P("tensor"),), (jnp.ones(6),), ["argument [0]", "(6,)", "dim 0, of size 6, into 4 pieces (tensor=4)"]),
        ((P(("fsdp", "tensor")),), (jnp.ones(4),), ["into 8 pieces (fsdp=2 x tensor=4)"]),
        ((P(None, "fsdp"),), (jnp.ones(4),), ["argument [0]", "entries for 2 dims", "at most 1"]),
        ((P("rows"),), (jnp.ones(4),), ["no axis ['rows']", "'tensor'"]),
        ((P(), {"w": P()}), (1, {"v": jnp.ones(4)}), ["tree of in_specs does not fit the arguments"]),
        ((P(), P("fsdp")), (1, {"v": [jnp.ones(3)]}), ["argument [1]['v'][0]", "(3,)", "fsdp=2"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_do_not_fit_their_specs_are_refused(mesh, specs, args, words):
    with pytest.raises(ValueError) as error:
        filter_shard_map(lambda *args: args, mesh, specs, P())(*args)
    assert [word for word in words if word not in str(error.value)] == []


def test_results_that_do_not_fit_their_specs_are_refused(mesh):
    run = lambda fn, out: filter_shard_map(fn, mesh, (P("tensor"),), out)(jnp.ones(4))
    with pytest.raises(ValueError, match="result has shape .* entries for 1 dims"):
        run(jnp.sum, P("tensor"))
    with pytest.raises(ValueError, match="tree of out_specs does not fit the result"):
        run(lambda x: [x, x], {"a": P("tensor")})
