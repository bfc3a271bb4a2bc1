"""Writes of tokens into caches on TPUs, by a kernel and layer by layer, equal a scatter bit for bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put

from eqformer import nn
from eqformer.kernels import _cache_write, CacheWriteCall, LayerFill, ScatterWrite, TileWrite, traced_for
from eqformer.nn import _cache as _slots


ROWS, SLOTS = 4, 128
# Channels that fill vectors, and that do not and stand before slots; heads or none; with layers or without.
CASES = {
    "latents of a stack": (3, (), 256, 1),
    "heads of narrow channels, of a stack": (3, (2,), 64, 1),
    "rotated keys": (None, (), 64, 3),
    "three tokens of heads": (None, (2,), 256, 3),
}


def call_of(name: str, dtype: Any) -> CacheWriteCall:
    """Slots of which some are one tile's and one is dropped."""
    layers, heads, width, seq = CASES[name]
    rng = np.random.default_rng(0)
    numbers = lambda *shape: put(rng.integers(-127, 128, size=shape), jnp.dtype(dtype))
    memory = numbers(*(() if layers is None else (layers,)), ROWS, *heads, SLOTS, width)
    slots = np.asarray([[5, 6, 7], [SLOTS, 0, 1], [127, SLOTS, 31], [64, 63, 32]], np.int32)[:, :seq]
    layer = None if layers is None else put(1, np.int32)
    return CacheWriteCall(memory, put(slots), numbers(ROWS, *heads, seq, width), layer, 1 + len(heads))


@pytest.mark.by_default(
    "latents of a stack-int8",
    "heads of narrow channels, of a stack-bfloat16",
    "rotated keys-int8",
    "three tokens of heads-bfloat16",
)
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_scatter_to_the_bit(name, dtype, monkeypatch):
    call = call_of(name, dtype)
    monkeypatch.setattr(_cache_write, "_TILE_BYTES", 2 * call.memory[..., :32, :].nbytes // ROWS)  # several programs
    wide = lambda x: np.asarray(x).astype(np.float32)
    scatter, kernel, fill = (jax.jit(way.run) for way in (ScatterWrite(), TileWrite(interpret=True), LayerFill()))
    wanted = wide(scatter(call))
    assert np.array_equal(wide(kernel(call)), wanted) and np.array_equal(wide(fill(call)), wanted)
    assert not np.array_equal(wide(scatter(dataclasses.replace(call, slots=call.slots + 1))), wanted)


def test_tpus_write_few_tokens_by_it():
    arrays: dict[str, Any] = {"latents": jnp.zeros((2, 64, 256)), "rotary_keys": jnp.zeros((2, 64, 64))}
    cache: Any = nn.LatentCache(positions=_slots.empty_slots((2,), 64), **arrays)
    cache = cache.with_scales("int8")

    def text(platform: str, seq: int = 1, traced: str = "tpu") -> str:
        def run(cache: Any, latents: jax.Array, rotated: jax.Array, positions: jax.Array) -> Any:
            return cache.update(latents, rotated, nn.Tokens(positions))[0]

        new = jnp.zeros((2, seq, 256)), jnp.zeros((2, seq, 64)), jnp.zeros((2, seq), jnp.int32)
        with traced_for(traced):
            return jax.jit(run).trace(cache, *new).lower(lowering_platforms=(platform,)).as_text()

    assert text("tpu").count("tpu_custom_call") == 2
    assert "custom_call" not in text("cpu") + text("tpu", traced="cpu") + text("tpu", seq=9)


def test_latents_without_rotary_keys_are_traced_for_tpus():
    """The keys have 0 channels, which the kernel's reshape would divide by."""
    arrays: dict[str, Any] = {"latents": jnp.zeros((2, 64, 256)), "rotary_keys": jnp.zeros((2, 64, 0))}
    cache: Any = nn.LatentCache(positions=_slots.empty_slots((2,), 64), **arrays)
    tokens = nn.Tokens(jnp.zeros((2, 1), jnp.int32))
    with traced_for("tpu"):
        updated, *_ = jax.eval_shape(lambda: cache.update(jnp.ones((2, 1, 256)), jnp.ones((2, 1, 0)), tokens))
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, cache)


def test_it_has_few_tokens_of_whole_tiles_and_many_are_filled_in_where_xla_changes_the_layout():
    def reasons(memory: jax.Array, dim: int, layer: jax.Array | None, seq: int) -> list[str | None]:
        slots, new = jnp.zeros((4, seq), jnp.int32), jnp.zeros((4, seq, memory.shape[-1]), memory.dtype)
        call = CacheWriteCall(memory, slots, new, layer, dim)
        return [way.supports(call) for way in (TileWrite(), LayerFill())]

    narrow = lambda *shape: jnp.zeros(shape, jnp.int8)
    few = [
        (narrow(4, 96, 256), None),
        (narrow(2, 4, 128, 64), jnp.zeros((), jnp.int32)),
        (jnp.zeros((4, 96, 128)), None),
    ]
    assert all(reasons(memory, 1, layer, 8)[0] is None for memory, layer in few)
    assert reasons(narrow(4, 100, 256), 1, None, 1)[0] == "it supports multiples of 32 slots, not 100"
    assert reasons(narrow(4, 96), 1, None, 1) == ["it writes arrays with a dim of channels after the slots"] * 2
    assert [reasons(narrow(4, 96, 0), 1, None, seq) for seq in (1, 9)] == [
        ["it writes at least one channel, not 0"] * 2
    ] * 2
    for memory in (narrow(4, 100, 128), jnp.zeros((4, 128, 64))):
        assert reasons(memory, 1, None, 9) == ["it writes up to 8 tokens a row, not 9", None]
    assert reasons(jnp.zeros((4, 128, 128)), 1, None, 9)[1] == "XLA's scatter works in the memory's own layout"
