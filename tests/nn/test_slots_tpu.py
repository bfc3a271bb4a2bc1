"""The kernel for TPUs by which few tokens are written into caches of 8 bits: as a scatter, to the bit, as plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn
from eqformer.nn import _slots, _slots_tpu
from eqformer.nn._slots_tpu import kernel_has, write_by_kernel


ROWS, SLOTS = 4, 128
# Channels that fill vectors, and that do not and stand before slots; heads or none; with layers or without.
CASES = {
    "latents of a stack": (3, (), 256, 1),
    "heads of narrow channels, of a stack": (3, (2,), 64, 1),
    "rotated keys": (None, (), 64, 3),
    "three tokens of heads": (None, (2,), 256, 3),
}


def given_of(name: str, dtype: Any) -> tuple[Any, ...]:
    """A memory, slots of which some are one tile's and one is dropped, new tokens, and the layer."""
    layers, heads, width, seq = CASES[name]
    rng = np.random.default_rng(0)
    numbers = lambda *shape: jnp.asarray(rng.integers(-127, 128, size=shape), jnp.int32).astype(dtype)
    memory = numbers(*(() if layers is None else (layers,)), ROWS, *heads, SLOTS, width)
    slots = jnp.asarray([[5, 6, 7], [SLOTS, 0, 1], [127, SLOTS, 31], [64, 63, 32]], jnp.int32)[:, :seq]
    layer = None if layers is None else jnp.asarray(1, jnp.int32)
    return memory, slots, numbers(ROWS, *heads, seq, width), layer


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_scatter_to_the_bit(name, dtype, monkeypatch):
    memory, slots, new, layer = given_of(name, dtype)
    monkeypatch.setattr(_slots_tpu, "_BYTES", 2 * memory[..., :32, :].nbytes // ROWS)  # several programs
    dim = memory.ndim - (2 if layer is None else 3)
    wide = lambda x: np.asarray(x, np.float32)
    found = wide(write_by_kernel(memory, slots, new, layer, interpret=True))
    assert np.array_equal(found, wide(_slots._scattered(dim, memory, slots, new, layer)))
    assert not np.array_equal(found, wide(_slots._scattered(dim, memory, slots + 1, new, layer)))


def test_tpus_write_few_tokens_of_8_bits_by_it(monkeypatch):
    arrays: dict[str, Any] = {"latents": jnp.zeros((2, 64, 256)), "rotary_keys": jnp.zeros((2, 64, 64))}
    cache: Any = nn.LatentCache(positions=_slots.empty_slots((2,), 64), **arrays)
    cache = cache.with_scales("int8")

    def text(platform: str, seq: int = 1, cache: Any = cache) -> str:
        def run(cache: Any, latents: jax.Array, rotated: jax.Array, positions: jax.Array) -> Any:
            return cache.update(latents, rotated, nn.Tokens(positions))[0]

        new = jnp.zeros((2, seq, 256)), jnp.zeros((2, seq, 64)), jnp.zeros((2, seq), jnp.int32)
        return jax.jit(run).trace(cache, *new).lower(lowering_platforms=(platform,)).as_text()

    monkeypatch.setattr(_slots, "compilers", lambda: ())
    plain = text("tpu")
    monkeypatch.setattr(_slots, "compilers", lambda: ("tpu",))
    assert text("tpu").count("tpu_custom_call") == 2
    assert "custom_call" not in text("cpu") + plain + text("tpu", seq=9)


def test_it_has_whole_tiles_of_8_bits_whose_layout_xla_changes():
    memory = functools.partial(jnp.zeros, dtype=jnp.int8)
    assert kernel_has(memory((4, 96, 256)), 1, None, 1) and kernel_has(memory((2, 4, 128, 64)), 1, jnp.zeros(()), 8)
    assert not kernel_has(memory((4, 100, 256)), 1, None, 1)  # no whole tiles of 32 slots
    assert not kernel_has(memory((4, 96, 128)), 1, None, 1)  # one vector: XLA's layout is the same one
    assert not kernel_has(jnp.zeros((4, 96, 256)), 1, None, 1)
    assert not kernel_has(memory((4, 96)), 1, None, 1)  # scales have no channels
