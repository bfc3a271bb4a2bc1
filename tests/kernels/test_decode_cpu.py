"""Decoding on CPUs reads only the filled part of a cache: results, gradients, and calls that it does not support."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from eqformer import kernels
from eqformer.kernels import FilledSlotsDecoding
from eqformer.kernels._decode_attention import ReferenceDecoding


SLOTS, LAYERS = 1024, 3
CPU = FilledSlotsDecoding(ReferenceDecoding())


class Case(NamedTuple):
    """Filled slots, the slots that are read for them, and what a call has beside queries and keys."""

    filled: int
    read: int
    is_stacked: bool = True
    is_scaled: bool = False
    is_latent: bool = False
    has_bias: bool = False


CASES = {
    "an eighth, in a stack": Case(128, 128),
    "half, 8 bits in a stack": Case(400, 512, is_scaled=True),
    "a quarter, latents in a stack": Case(200, 256, is_latent=True),
    "a quarter, of one layer": Case(129, 256, is_stacked=False),
    "an eighth, with a bias": Case(3, 128, has_bias=True),
    "all": Case(513, 1024),
}


def call_of(case: Case, unread: float = 0.0) -> kernels.DecodeCall:
    """The call of two rows, the second with half of the tokens; slots that are not read hold the number `unread`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    kv_heads, last = 1 if case.is_latent else 2, np.array([case.filled, case.filled // 2])
    visible = np.arange(SLOTS) < last[:, None]

    def slots(width: int) -> np.ndarray:
        return np.where((np.arange(SLOTS) < case.read)[:, None, None], draw(2, SLOTS, kv_heads, width), unread)

    key, value, rotated_key = slots(8), slots(4), slots(2)
    given: dict[str, Any] = {"sinks": jnp.asarray(draw(4)), "softcap": 5.0, "scale": 0.3}
    if case.is_scaled:
        key, value = (np.nan_to_num(20 * x, nan=127).astype(np.int8) for x in (key, value))
        given |= {name: jnp.asarray(np.abs(slots(1)[..., 0])) / 20 for name in ("key_scales", "value_scales")}
    if case.is_latent:
        given["rotated"] = kernels.RotatedChannels(jnp.asarray(draw(2, 1, 4, 2)), jnp.asarray(rotated_key))
    if case.has_bias:
        given["bias"] = jnp.asarray(draw(2, 4, 1, SLOTS))

    def stored(x: np.ndarray) -> jax.Array:
        x = x[:, :, 0] if case.is_latent else x.swapaxes(1, 2)
        others = np.full_like(x, 99)
        return jnp.asarray(np.stack([others, x, others]) if case.is_stacked else x)

    layer = jnp.asarray(1, jnp.int32) if case.is_stacked else None
    return kernels.DecodeCall(
        jnp.asarray(draw(2, 1, 4, 8)),
        jnp.asarray(key),
        None if case.is_latent else jnp.asarray(value),
        visible=jnp.asarray(visible[:, None]),
        stored=kernels.StoredArrays(
            layer,
            stored(key),
            None if case.is_latent else stored(value),
            stored(rotated_key) if case.is_latent else None,
        ),
        **given,
    )


@eqx.filter_jit
def attend(operation: kernels.Operation, call: kernels.DecodeCall) -> jax.Array:
    return operation(call)


def run(operation: kernels.Operation, call: kernels.DecodeCall) -> np.ndarray:
    return np.asarray(attend(operation, call))


@pytest.mark.by_default("half, 8 bits in a stack", "a quarter, latents in a stack")
@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_definition(name):
    """The definition is spoiled by a NaN in the slots that this operation does not read."""
    case = CASES[name]
    call = call_of(case)
    right = run(ReferenceDecoding(), call)
    assert np.allclose(run(CPU, call), right, rtol=1e-5, atol=1e-6)
    fewer = dataclasses.replace(call, visible=call.visible.at[..., 0].set(False))
    assert not np.allclose(run(CPU, fewer), right, rtol=1e-3)
    spoiled = call_of(case, np.nan)
    assert np.isnan(run(ReferenceDecoding(), spoiled)).any() == (name != "all")
    assert np.array_equal(run(CPU, spoiled), run(CPU, call))


def test_without_a_stored_cache_it_reads_the_calls_own_arrays():
    call = dataclasses.replace(call_of(CASES["a quarter, of one layer"], np.nan), stored=None)
    clean = call_of(CASES["a quarter, of one layer"])
    assert np.allclose(run(CPU, call), run(ReferenceDecoding(), clean), rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero():
    call = call_of(CASES["all"])
    call = dataclasses.replace(call, visible=call.visible.at[1].set(False))
    rows = run(CPU, call)
    assert rows[0].any() and not rows[1].any()


def explained(call: kernels.DecodeCall, platform: str) -> kernels.Explanation:
    (line,) = kernels.explain(kernels.DECODE_ATTENTION, call, platform=platform)
    return line


def test_it_is_chosen_for_large_caches_on_cpus_alone():
    call = call_of(CASES["a quarter, of one layer"])
    names = {platform: explained(call, platform).implementation for platform in ("cpu", "cuda", "tpu")}
    assert names == {"cpu": "FilledSlotsDecoding", "cuda": "ReferenceDecoding", "tpu": "ReferenceDecoding"}
    parts = {name: getattr(call, name)[:, :1023] for name in ("key", "value")}
    smaller = dataclasses.replace(call, **parts, visible=call.visible[..., :1023], stored=None)
    line = explained(smaller, "cpu")
    reason = "it supports caches of at least 1024 slots, not of 1023"
    assert line.implementation == "ReferenceDecoding" and ("FilledSlotsDecoding", reason) in line.refusals


def test_its_gradients_are_those_of_the_definition():
    call = call_of(CASES["an eighth, in a stack"])

    def slope(operation: kernels.Operation, call: kernels.DecodeCall) -> np.ndarray:
        def total(value: jax.Array) -> jax.Array:
            return jnp.sum(operation(dataclasses.replace(call, value=value)) ** 2)

        return np.asarray(jax.jit(jax.grad(total))(call.value))

    wanted = slope(ReferenceDecoding(), call)
    assert wanted.any() and np.allclose(slope(kernels.DECODE_ATTENTION, call), wanted, rtol=1e-5, atol=1e-6)
    louder = dataclasses.replace(call, query=2 * call.query)
    assert not np.allclose(slope(kernels.DECODE_ATTENTION, louder), wanted, rtol=1e-2)


def test_each_device_reads_as_many_slots_as_its_own_rows_have():
    """Over two devices with a row each, with types checked."""
    call = dataclasses.replace(call_of(CASES["all"]), stored=None)
    arrays = {name: getattr(call, name) for name in ("query", "key", "value", "visible")}
    mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("rows")
    on_device = lambda arrays: CPU.run(dataclasses.replace(call, **arrays))
    program = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(dict.fromkeys(arrays, rows),), out_specs=rows))
    whole = {"value": arrays["value"].at[1, 300:].set(np.nan)}  # The second row has 256 tokens, so it reads 256 slots.
    results = np.asarray(program(arrays | whole))
    assert np.allclose(results, run(ReferenceDecoding(), call), rtol=1e-5, atol=1e-6)
    assert np.isnan(run(CPU, dataclasses.replace(call, **whole))).any()  # One device reads both rows' 1,024 slots.
