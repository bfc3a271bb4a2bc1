"""The mesh axes over which a value varies, and the gradient of marking a value as varying."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqformer.parallel import filter_shard_map, make_mesh, vary, vary_like, varying_axes


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=4)


def test_axes_are_added_once_and_values_stay(mesh):
    seen = {}

    def body(x, y):
        seen["in"] = varying_axes(x), varying_axes(y)
        wide = vary({"x": x, "name": "kept", "none": None}, ["tensor", "fsdp"])
        assert wide["name"] == "kept" and wide["none"] is None
        seen["out"] = varying_axes(wide["x"]), varying_axes(vary(wide["x"], ["fsdp"]))
        seen["like"] = varying_axes(vary_like(y, {"a": x, "b": "text"})), varying_axes(vary_like(y, "text"))
        return jax.lax.psum(wide["x"], "tensor")

    got = filter_shard_map(body, mesh, (P("fsdp"), P()), P("fsdp"))(jnp.arange(4.0), jnp.ones(()))
    np.testing.assert_array_equal(got, 4 * np.arange(4.0))
    assert seen == {
        "in": ({"fsdp"}, set()),
        "out": ({"fsdp", "tensor"}, {"fsdp", "tensor"}),
        "like": ({"fsdp"}, set()),
    }
    assert varying_axes(jnp.ones(2)) == set()  # outside


@pytest.mark.parametrize("said", [True, False])
def test_a_gradient_is_partial_where_the_parameter_was_said_to_vary(mesh, said):
    def body(w, x):
        w = vary(w, ["fsdp", "tensor"]) if said else w
        gradient = jax.grad(lambda w: w * x[0])(w)
        assert varying_axes(gradient) == ({"fsdp", "tensor"} if said else set())
        return vary(gradient, ["fsdp", "tensor"])[None]

    x = jnp.arange(1.0, 9.0)
    got = filter_shard_map(body, mesh, (P(), P(("fsdp", "tensor"))), P(("fsdp", "tensor")))(jnp.ones(()), x)
    np.testing.assert_array_equal(got, x if said else np.full(8, 36.0))


def test_what_a_loop_carries_needs_the_axes_of_what_it_meets(mesh):
    def total(start):
        def body(xs):
            return jax.lax.scan(lambda carry, x: (carry + x, None), start(xs), xs)[0][None]

        return filter_shard_map(body, mesh, (P("fsdp"),), P("fsdp"))(jnp.arange(8.0))

    np.testing.assert_array_equal(total(lambda xs: vary_like(jnp.zeros(()), xs)), [6.0, 22.0])
    with pytest.raises(TypeError, match="carry"):  # without it
        total(lambda xs: jnp.zeros(()))
