"""JAX collectives, and rings of messages between neighbors, against numpy; per-device code in a partitioned program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqformer.parallel import filter_shard_map, shift
from eqformer.systems import (
    reference_all_gather,
    reference_all_to_all,
    reference_ppermute,
    reference_psum,
    reference_psum_scatter,
    ring_all_gather,
    ring_psum_scatter,
)


DEVICES, OTHER = 4, 2
PAIRS = [(0, 2), (2, 3), (3, 0)]  # device 1 is sent nothing
CASES = {
    "psum": (lambda x: jax.lax.psum(x, "axis"), reference_psum),
    "ppermute": (lambda x: jax.lax.ppermute(x, "axis", PAIRS), lambda x: reference_ppermute(x, PAIRS)),
    **{
        f"{name}, tiled={tiled}": (
            lambda x, fn=fn, tiled=tiled: fn(x, tiled),
            lambda x, reference=reference, tiled=tiled: reference(x, tiled=tiled),
        )
        for tiled in (False, True)
        for name, fn, reference in (
            ("all_gather", lambda x, tiled: jax.lax.all_gather(x, "axis", tiled=tiled), reference_all_gather),
            ("ring all_gather", lambda x, tiled: ring_all_gather(x, "axis", tiled=tiled), reference_all_gather),
            ("psum_scatter", lambda x, tiled: jax.lax.psum_scatter(x, "axis", tiled=tiled), reference_psum_scatter),
            ("ring psum_scatter", lambda x, tiled: ring_psum_scatter(x, "axis", tiled=tiled), reference_psum_scatter),
            ("all_to_all", lambda x, tiled: jax.lax.all_to_all(x, "axis", 0, 0, tiled=tiled), reference_all_to_all),
        )
    },
}


def mesh():
    return jax.make_mesh((OTHER, DEVICES), ("other", "axis"), (AxisType.Auto,) * 2)


def pieces_of(name):
    rows = 2 * DEVICES if "True" in name else DEVICES
    return np.random.default_rng(0).normal(size=(OTHER, DEVICES, rows, 3)).astype(np.float32)


def gradient_by_transpose(reference, pieces, gradients):
    """The gradient of a linear map, from its matrix: the reference applied to each unit vector of float64."""
    size, out = pieces.size, gradients.size
    matrix = np.empty((out, size))
    for column in range(size):
        unit = np.zeros(size)
        unit[column] = 1
        matrix[:, column] = reference(unit.reshape(pieces.shape)).ravel()
    return (matrix.T @ gradients.ravel().astype(np.float64)).reshape(pieces.shape)


def test_collectives_and_rings_mean_what_the_references_say():
    """Values, and gradients of the sum of each device's result times its own numbers."""
    spec, arguments, wanted, programs = P("other", "axis"), {}, {}, {}
    for name, (fn, reference) in CASES.items():
        pieces = pieces_of(name)
        values = np.stack([reference(part) for part in pieces])
        gradients = np.random.default_rng(1).normal(size=values.shape).astype(np.float32)
        arguments[name] = pieces, gradients
        back = [gradient_by_transpose(reference, part, to_part) for part, to_part in zip(pieces, gradients)]
        wanted[name] = values, np.stack(back)

        def both(x, to_y, fn=fn):
            y, back = jax.vjp(lambda x: fn(x[0, 0])[None, None] + 0 * x.ravel()[0], x)
            return y, back(to_y)[0]

        programs[name] = filter_shard_map(both, mesh(), (spec, spec), (spec, spec))
    run = jax.jit(lambda arguments: {name: programs[name](*given) for name, given in arguments.items()})
    results = run(arguments)
    for name, (values, gradient) in results.items():
        np.testing.assert_allclose(values, wanted[name][0], rtol=2e-6, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(gradient, wanted[name][1], rtol=5e-6, atol=5e-6, err_msg=name)
    assert np.abs(wanted["psum"][0] - results["ppermute"][0]).max() > 0.1  # the comparison can fail


def test_the_rings_are_rolled_and_refuse_parts_that_are_not_equal():
    x, spec = np.zeros((8 * DEVICES, 3), np.float32), P("axis")

    def text(fn):
        return jax.jit(filter_shard_map(fn, mesh(), (spec,), spec)).lower(x).compile().as_text() or ""

    for fn in (ring_all_gather, ring_psum_scatter):
        compiled = text(lambda x, fn=fn: fn(x, "axis", tiled=True))
        assert compiled.count(" collective-permute(") == 1
        assert f'"known_trip_count":{{"n":"{DEVICES - 1}"}}' in compiled
    for tiled, message in ((True, "multiple of 4"), (False, "pass tiled=True")):
        with pytest.raises(ValueError, match=message):
            text(lambda x, tiled=tiled: ring_psum_scatter(x[:7], "axis", tiled=tiled))


def test_per_device_code_inside_a_partitioned_program_and_alone_with_prints(capfd):
    """The compiler splits the products; one step between them is written for a device, and also runs eagerly."""

    def normalized(x):
        """Rows divided by their sum over all devices' features, which a device can only learn from the others."""
        total = jax.lax.psum(jnp.sum(x, axis=-1, keepdims=True), "axis")
        jax.debug.print("device {} holds {} of {}", jax.lax.axis_index("axis"), x.shape[-1], x.shape[-1] * DEVICES)
        return x / total

    spec = P("other", "axis")
    by_device = filter_shard_map(normalized, mesh(), (spec,), spec)
    x, up, down = (
        np.random.default_rng(i).uniform(size=s).astype(np.float32) for i, s in enumerate([(4, 8), (8, 12), (12, 8)])
    )

    @jax.jit
    def program(x, up, down):
        return by_device(x @ up) @ down

    place = lambda array, *dims: jax.device_put(array, NamedSharding(mesh(), P(*dims)))
    split = place(x, "other"), place(up, None, "axis"), place(down, "axis")
    hidden = x.astype(np.float64) @ up.astype(np.float64)
    wanted = hidden / hidden.sum(-1, keepdims=True)
    np.testing.assert_allclose(program(*split), wanted @ down.astype(np.float64), rtol=1e-5)
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"device {i} holds 3 of 12" for i in range(DEVICES) for _ in range(OTHER))
    np.testing.assert_allclose(by_device(hidden.astype(np.float32)), wanted, rtol=1e-5)
    jax.effects_barrier()
    assert "device 0 holds 3 of 12" in capfd.readouterr().out  # eagerly, jax prints for its first device


@pytest.mark.by_default("1", "3", "8")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_device_gets_what_the_one_before_it_has_even_where_others_do_not_ask(size):
    mesh = jax.make_mesh(
        (8 // size, size), ("pipe", "axis"), (AxisType.Auto,) * 2, devices=jax.devices()[: 8 // size * size]
    )
    rows = np.arange(8 // size * size).reshape(-1, size)

    def each(x, ask):
        tree = {"float": x[0, 0].astype(jnp.bfloat16), "bool": x[0] % 2 == 0, "int": x}
        sent = lambda tree: shift(tree, "axis")
        tree = jax.lax.cond(ask[0], sent, lambda tree: tree, tree)
        return jax.tree.map(lambda leaf: leaf.reshape(1, 1), tree | {"always": shift(x, "axis")})

    ask = np.arange(8 // size) % 2 == 0  # every other group of devices
    specs = P("pipe", "axis"), P("pipe")
    result = jax.jit(filter_shard_map(each, mesh, specs, P("pipe", "axis")))(jnp.asarray(rows), jnp.asarray(ask))
    before = np.roll(rows, 1, axis=1)
    want = np.where(ask[:, None], before, rows)
    np.testing.assert_array_equal(result["always"], before)
    np.testing.assert_array_equal(result["int"], want)
    np.testing.assert_array_equal(result["float"].astype(int), want)
    np.testing.assert_array_equal(result["bool"], want % 2 == 0)
