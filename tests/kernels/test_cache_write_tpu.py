"""How TPUs write tokens into caches, by a kernel and layer by layer: as a scatter, to the bit, as plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn
from eqformer.kernels import _platform
from eqformer.kernels.cache_write import _tpu as _slots_tpu
from eqformer.kernels.cache_write._tpu import fill, write_by_kernel, writer_of
from eqformer.nn import _slots


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


@pytest.mark.parametrize(
    "dtype",
    ["int8", "bfloat16", *(pytest.param(name, marks=pytest.mark.grid) for name in ("float8_e4m3fn", "float32"))],
)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_scatter_to_the_bit(name, dtype, monkeypatch):
    memory, slots, new, layer = given_of(name, dtype)
    monkeypatch.setattr(_slots_tpu, "_BYTES", 2 * memory[..., :32, :].nbytes // ROWS)  # several programs
    dim = memory.ndim - (2 if layer is None else 3)
    wide = lambda x: np.asarray(x, np.float32)
    wanted = wide(_slots._scattered(dim, memory, slots, new, layer))
    assert np.array_equal(wide(write_by_kernel(memory, slots, new, layer, interpret=True)), wanted)
    assert np.array_equal(wide(jax.jit(fill)(memory, slots, new, layer)), wanted)
    assert not np.array_equal(wide(_slots._scattered(dim, memory, slots + 1, new, layer)), wanted)


def test_tpus_write_few_tokens_by_it(monkeypatch):
    arrays: dict[str, Any] = {"latents": jnp.zeros((2, 64, 256)), "rotary_keys": jnp.zeros((2, 64, 64))}
    cache: Any = nn.LatentCache(positions=_slots.empty_slots((2,), 64), **arrays)
    cache = cache.with_scales("int8")

    def text(platform: str, seq: int = 1, cache: Any = cache) -> str:
        def run(cache: Any, latents: jax.Array, rotated: jax.Array, positions: jax.Array) -> Any:
            return cache.update(latents, rotated, nn.Tokens(positions))[0]

        new = jnp.zeros((2, seq, 256)), jnp.zeros((2, seq, 64)), jnp.zeros((2, seq), jnp.int32)
        return jax.jit(run).trace(cache, *new).lower(lowering_platforms=(platform,)).as_text()

    monkeypatch.setattr(_platform, "compilers", lambda: ())
    plain = text("tpu")
    monkeypatch.setattr(_platform, "compilers", lambda: ("tpu",))
    assert text("tpu").count("tpu_custom_call") == 2
    assert "custom_call" not in text("cpu") + plain + text("tpu", seq=9)


def test_it_has_few_tokens_of_whole_tiles_and_many_are_filled_in_where_xla_changes_the_layout():
    narrow = functools.partial(jnp.zeros, dtype=jnp.int8)
    layer = jnp.zeros((), jnp.int32)
    few = [(narrow((4, 96, 256)), 1, None), (narrow((2, 4, 128, 64)), 1, layer), (jnp.zeros((4, 96, 128)), 1, None)]
    assert all(writer_of(*given, seq=8) is write_by_kernel for given in few)
    assert writer_of(narrow((4, 100, 256)), 1, None, 1) is None  # no whole tiles of 32 slots
    assert writer_of(narrow((4, 96)), 1, None, 1) is None  # scales have no channels
    many = [narrow((4, 100, 128)), jnp.zeros((4, 128, 64))]
    assert all(writer_of(memory, 1, None, 9) is fill for memory in many)
    assert writer_of(jnp.zeros((4, 128, 128)), 1, None, 9) is None  # XLA's layout is the same one
