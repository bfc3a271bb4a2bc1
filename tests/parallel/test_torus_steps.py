"""Reduce-scatters and all-gathers over a torus, one dim after another, equal a single collective."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import tpus
from jax.sharding import NamedSharding, PartitionSpec as P
from plan_parity import Case, differences, of_one_device, of_plan

from eqformer.parallel import _collectives as send, _placement, filter_shard_map, make_mesh
from eqformer.parallel._mesh import TorusSteps


ROUNDING = 64 * float(np.finfo(np.float32).eps)
CASE = Case("llama", {"fsdp": 8}, {"zero": 3}, "products")


def moved(steps: tuple[int, ...], x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """In one program: what eight devices with a row of `x` each have of their sum, put together, and what each of them
    has of the first row, which they share out, once it is gathered; along the last dim, and along the
    second of `x.T[None]`.
    """

    def one(x: jax.Array, row: jax.Array, turned: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        add = lambda x, dim: send.psum_scatter("gradients over fsdp", x, "fsdp", dim, steps=steps)
        gather = lambda x, dim: send.all_gather("weights over fsdp", x, "fsdp", dim, steps=steps)[None]
        return [(add(x[0], 1), gather(row, 1)), (add(x[0].T[None], 1)[0], gather(turned, 0))]

    by_columns, by_rows = P(None, "fsdp"), P("fsdp")
    given, out = (P("fsdp"), by_columns, by_rows), [(by_columns, P("fsdp")), (by_rows, P("fsdp"))]
    mapped = jax.jit(filter_shard_map(one, make_mesh(fsdp=8), given, out))
    return jax.tree.map(np.asarray, mapped(x, x[0], x[0].T))


@pytest.mark.quick
def test_steps_give_each_device_the_slice_that_is_its_own():
    x = np.random.default_rng(0).integers(-9, 9, (8, 3, 16)).astype(np.float32)  # sums without rounding
    for steps in ((), (4, 2), (2, 4), (2, 2, 2)):
        for (total, whole), row, wanted in zip(moved(steps, x), (x[0], x[0].T), (x.sum(0), x.sum(0).T), strict=True):
            np.testing.assert_array_equal(total, wanted)
            np.testing.assert_array_equal(whole, np.stack([row] * 8))


def test_steps_in_another_order_and_a_step_too_few_are_seen(monkeypatch):
    x = np.random.default_rng(0).integers(-9, 9, (8, 3, 16)).astype(np.float32)
    groups = send._step_groups
    monkeypatch.setattr(send, "_step_groups", lambda steps: groups(steps)[::-1])
    found, (whole, *_) = moved((4, 2), x)[0]
    assert not np.array_equal(found, x.sum(0)) and np.array_equal(np.sort(found), np.sort(x.sum(0)))
    assert not np.array_equal(whole, x[0]) and np.array_equal(np.sort(whole), np.sort(x[0]))
    monkeypatch.setattr(send, "_step_groups", lambda steps: groups(steps)[1:])
    found, (whole, *_) = moved((4, 2), x)[0]
    assert found.shape != x.sum(0).shape and whole.shape != x[0].shape


def gradients(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]) -> dict[str, float]:
    """What differs from one device, where eight are said to scatter and to gather in such steps."""
    asked = []
    monkeypatch.setattr(_placement, "torus_steps", lambda devices, axis: asked.append(axis) or TorusSteps(steps, steps))
    found = differences(of_plan(CASE), of_one_device(CASE), ROUNDING)
    assert set(asked) == {"fsdp"}
    return found


@pytest.mark.grid  # by default slices and programs are those of one step
def test_a_plan_over_a_torus_has_one_devices_gradients(monkeypatch):
    """As if eight simulated devices were a box of 4 x 2; the control puts slices where they do not belong."""
    assert gradients(monkeypatch, (4, 2)) == {}


@pytest.mark.grid
def test_a_plan_whose_steps_are_in_another_order_has_not(monkeypatch):
    groups = send._step_groups
    monkeypatch.setattr(send, "_step_groups", lambda steps: groups(steps)[::-1])
    assert {"embedding.weight", "stacks[0].blocks.sublayers[0].layer.query.weight"} < set(
        gradients(monkeypatch, (4, 2))
    )


def test_a_program_takes_two_steps_and_sends_no_more():
    from eqformer.program import bytes_sent, list_transfers, read_hlo

    def of(collective: Callable[..., jax.Array], steps: tuple[int, ...]) -> tuple[list[tuple[str, int, float]], float]:
        one = lambda x: collective("over fsdp", x, "fsdp", steps=steps)
        mapped = jax.jit(filter_shard_map(one, make_mesh(fsdp=8), (P("fsdp"),), P("fsdp")))
        sent = list_transfers(read_hlo(mapped.lower(jnp.ones((8 * 64, 4))).compile(), mesh=make_mesh(fsdp=8)))
        return [(one.kind, one.devices, one.sent) for one in sent], bytes_sent(sent)

    whole = 64 * 4 * 4
    assert of(send.psum_scatter, ()) == ([("reduce-scatter", 8, whole * 7 / 8)], whole * 7 / 8)
    steps, total = of(send.psum_scatter, (4, 2))
    assert steps == [("reduce-scatter", 4, whole * 3 / 4), ("reduce-scatter", 2, whole / 4 / 2)]
    assert total == whole * 7 / 8
    steps, total = of(send.all_gather, (4, 2))
    assert steps == [("all-gather", 2, whole), ("all-gather", 4, 2 * whole * 3)]
    assert total == whole * 7


@pytest.mark.parametrize("name,expected", [("v5p:4x4x4", (16, 4)), ("tpu7x:4x4x4", (64, 2))])
def test_a_program_for_a_box_gathers_in_steps_and_sums_nothing(name, expected):
    """At once, its compiler sums what is zero but for a device's own (the control)."""
    devices = tpus(name)
    mesh = make_mesh(fsdp=len(devices), devices=devices)

    def compiled(steps: tuple[int, ...]) -> Any:
        one = lambda x, weight: x @ send.all_gather("weights over fsdp", weight, "fsdp", steps=steps)
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
        mapped = filter_shard_map(one, mesh, (P("fsdp"), P("fsdp")), P("fsdp"))
        return jax.jit(mapped).lower(shape(len(devices) * 512, 4096), shape(4096, 4096)).compile().as_text()

    steps = _placement.torus_steps(mesh.devices, "fsdp").gather
    assert steps == expected
    assert " all-gather" in compiled(steps) and " all-reduce" not in compiled(steps)
    assert " all-reduce" in compiled(())


@pytest.mark.parametrize("name", ["v5p:4x4x8", "v5e:8x16"])
def test_a_program_scatters_behind_a_dim_of_one_entry(name):
    """Of the gradients of one expert; its compiler sums the whole on every device instead (the control)."""
    devices = tpus(name)
    mesh = make_mesh(fsdp=16, expert=8, devices=devices)

    def compiled(scatter: Callable[[jax.Array], jax.Array]) -> Any:
        given, out = P(("fsdp", "expert")), P(None, ("expert", "fsdp"))
        mapped = filter_shard_map(lambda x: scatter(x[0].astype(jnp.float32)), mesh, (given,), out)
        shape = jax.ShapeDtypeStruct((128, 1, 2048, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, given))
        return jax.jit(mapped).lower(shape).compile().as_text()

    text = compiled(lambda x: send.psum_scatter("gradients over fsdp", x, "fsdp", 1))
    assert " reduce-scatter" in text and " all-reduce" not in text
    assert " all-reduce" in compiled(lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True))
