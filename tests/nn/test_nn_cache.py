"""Slots of caches: where tokens are written, which tokens are dropped, and that memory is updated in place."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put as moved
from nn_reference import close, normal, random_module

from eqformer import nn
from eqformer.nn._cache import with_rollback


def cache(slots=4, rolling=False, batch=(2,)):
    shape = (*batch, 1, slots, 2)
    empty, zeros = moved(np.full((*batch, slots), -1), np.int32), moved(np.zeros(shape), np.float32)
    return nn.KVCache(keys=zeros, values=zeros, positions=empty, rolling=rolling)


@eqx.filter_jit
def stored(memory, keys, places):
    after, seen_keys, _, seen = memory.update(keys, -keys, nn.Tokens(places))
    return after, seen_keys, seen, seen.positions is after.positions


def put(memory, places):
    """Store keys that are 100 * row + position and values that are their negatives.

    The last of what is returned is whether the positions that are seen are the memory's own, and no copy.
    """
    places = np.asarray(places, np.int32)
    numbers = np.where(places < 0, 777, 100 * np.arange(len(places))[:, None] + places).astype(np.float32)
    keys = np.broadcast_to(numbers[..., None, None], (*places.shape, 1, 2))
    return stored(memory, moved(keys), moved(places))


def test_a_slot_is_the_position_and_rows_fill_at_their_own_pace():
    memory, _, _, is_same = put(cache(), [[0, 1, 2], [0, -1, -1]])
    assert memory.positions.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]
    assert memory.keys[..., 0, :, 0].tolist() == [[0, 1, 2, 0], [100, 0, 0, 0]]
    assert np.array_equal(memory.values, -np.asarray(memory.keys))
    assert is_same
    memory, *_ = put(memory, [[3], [1]])
    assert memory.positions.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert memory.keys[..., 0, :, 0].tolist() == [[0, 1, 2, 3], [100, 101, 0, 0]]


def test_padding_alone_changes_nothing():
    memory, *_ = put(cache(), [[0, 1], [0, 1]])
    after, *_ = put(memory, [[-1], [2]])
    assert np.array_equal(after.keys[0], memory.keys[0]) and not np.array_equal(after.keys[1], memory.keys[1])


def test_rewinding_writes_over_what_was_there():
    memory, *_ = put(cache(), [[0, 1, 2, 3], [0, 1, 2, 3]])
    after, *_ = put(memory, [[1], [-1]])
    assert after.positions.tolist() == [[0, 1, 2, 3]] * 2 and np.array_equal(after.keys, memory.keys)


def test_a_rolling_cache_keeps_the_last_tokens():
    memory, *_ = put(cache(3, rolling=True), [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]])
    assert memory.positions.tolist() == [[3, 4, 2], [0, 1, -1]]
    assert memory.keys[..., 0, :, 0].tolist() == [[3, 4, 2], [100, 101, 0]]
    memory, _, _, is_same = put(memory, [[5], [2]])
    assert memory.positions.tolist() == [[3, 4, 5], [0, 1, 2]] and is_same


def test_several_new_tokens_see_what_they_push_out():
    memory, *_ = put(cache(3, rolling=True), [[0, 1, 2], [0, 1, -1]])
    memory, keys, seen, is_same = put(memory, [[3, 4], [2, -1]])
    assert not is_same and seen.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, 2, -1]]
    assert keys[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert memory.positions.tolist() == [[3, 4, 2], [0, 1, 2]]


SIZES = dict(embed=6, heads=2, head_dim=4, rotary=nn.Rotary(4, 100.0), key=jax.random.key(0))
MODULES = {
    "grouped": lambda **more: random_module(nn.Attention, **SIZES, **more),
    "latent": lambda **more: random_module(nn.LatentAttention, latent=5, **SIZES, **more),
}


@pytest.mark.by_default("latent")
@pytest.mark.parametrize("kind", MODULES)
def test_tokens_beyond_the_capacity_are_nan_and_spoil_nothing(kind):
    """Whole calls beyond it and calls that begin within it; what has room is as without a cache, in each row."""
    module, x = MODULES[kind](), np.asarray(normal(1, 2, 9, 6))
    run = jax.jit(lambda x, places, cache: module(x, nn.Tokens(places), cache))
    wanted = np.asarray(jax.jit(lambda x: module(x)[0])(x))
    places = np.stack([np.arange(9, dtype=np.int32)] * 2)
    for calls in ((9,), (4, 5)):
        memory, found, start = module.init_cache((2,), 6), [], 0
        for count in calls:
            part = slice(start, start + count)
            y, memory = run(x[:, part], places[:, part], memory)
            found, start = [*found, y], start + count
        y = np.concatenate(found, axis=1)
        np.testing.assert_allclose(y[:, :6], wanted[:, :6], atol=1e-6)
        assert np.isnan(y[:, 6:]).all()
        assert memory.positions.tolist() == [list(range(6))] * 2
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(memory))
    ahead = np.where([[True], [False]] | (places < 6), places, -1).astype(np.int32)
    y = np.asarray(run(x, ahead, module.init_cache((2,), 6))[0])
    assert np.isnan(y[0, 6:]).all() and np.isfinite(y[1]).all()


@pytest.mark.by_default("grouped")
@pytest.mark.parametrize("kind", MODULES)
def test_tokens_known_to_lie_beyond_the_capacity_are_refused(kind):
    module, x = MODULES[kind](), normal(1, 1, 4, 6)
    tokens = [nn.Tokens(jnp.array([places], jnp.int32)) for places in ([3, 4, 5, 6], [3, 4, -1, -1])]
    # Only the cache is traced: positions are as known as outside of a trace, and nothing need be computed.
    traced = lambda module, tokens: jax.eval_shape(
        lambda cache: module(x, tokens, cache)[0], module.init_cache((1,), 5)
    )
    words = r"reach position 6, but kv_seq of the cache is 5, .* capacity of at least 7"
    for call in (traced, lambda module, tokens: module(x, tokens, module.init_cache((1,), 5))):
        with pytest.raises(ValueError, match=words):
            call(module, tokens[0])
    traced(module, tokens[1])
    traced(MODULES[kind](mask=nn.sliding_window(3)), tokens[0])


@pytest.mark.by_default("grouped-mask0")
@pytest.mark.parametrize(("kind", "mask"), [("grouped", nn.sliding_window(3)), ("latent", nn.chunked(3))])
def test_calls_longer_than_a_rolling_cache_are_the_uncached_pass(kind, mask):
    """Early tokens of a call see what its later ones overwrite, and rows end at their own places."""
    module, x = MODULES[kind](mask=mask), np.asarray(normal(1, 2, 14, 6))
    places = np.where(np.arange(14) < [[14], [9]], np.arange(14), -1).astype(np.int32)
    run = jax.jit(lambda x, places, cache: module(x, nn.Tokens(places), cache))
    wanted, real = np.asarray(jax.jit(lambda x: module(x)[0])(x)), places >= 0
    for calls in ((14,), (4, 10)):
        memory, found, start = module.init_cache((2,), 14), [], 0
        assert memory.rolling and memory.positions.shape[-1] == 3
        for count in calls:
            part = slice(start, start + count)
            y, memory = run(x[:, part], places[:, part], memory)
            found, start = [*found, y], start + count
        assert np.abs(np.concatenate(found, axis=1) - wanted)[real].max() < 1e-6
    forgetful, _ = run(x[:, part], places[:, part], module.init_cache((2,), 14))  # the control
    assert np.abs(forgetful[0, 0] - wanted[0, part.start]).max() > 1e-3


def test_a_step_back_in_a_rolling_cache_writes_over_what_was_there():
    memory, *_ = put(cache(4, rolling=True), [[0, 1, 2, 3], [0, 1, 2, -1]])
    _, _, seen, _ = put(memory, [[2, 3], [3, -1]])
    assert seen.positions.tolist() == [[0, 1, -1, -1, 2, 3], [0, 1, 2, -1, 3, -1]]


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_leading_dims(batch):
    places, keys = np.broadcast_to(np.arange(2), (*batch, 2)), np.ones((*batch, 2, 1, 2), np.float32)
    memory, *_ = stored(cache(batch=batch), moved(keys), moved(places, np.int32))
    assert np.array_equal(memory.positions, np.broadcast_to([0, 1, -1, -1], (*batch, 4)))
    assert np.array_equal(memory.keys[..., :2, :], np.swapaxes(keys, -3, -2))


def test_a_latent_cache_stores_both_of_its_parts():
    arrays: dict[str, Any] = {"latents": jnp.zeros((1, 3, 2)), "rotary_keys": jnp.zeros((1, 3, 4))}
    empty = nn.LatentCache(**arrays, positions=jnp.full((1, 3), -1, jnp.int32))
    latents, rotated = normal(1, 1, 1, 2), normal(2, 1, 1, 4)

    @eqx.filter_jit
    def run(memory, *new):
        after, c, r, seen = memory.update(*new, nn.Tokens(jnp.array([[1]])))
        return after, seen, c is after.latents and r is after.rotary_keys

    memory, seen, are_same = run(empty, latents, rotated)
    assert np.array_equal(np.asarray(memory.latents)[:, 1:2], latents)
    assert np.array_equal(np.asarray(memory.rotary_keys)[:, 1:2], rotated)
    assert are_same and seen.positions.tolist() == [[-1, 1, -1]]


def test_stored_in_the_caches_dtype():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, cache(3, rolling=True))
    memory, keys, *_ = put(half, [[0, 1], [0, 1]])
    assert memory.keys.dtype == keys.dtype == jnp.bfloat16


def test_segments_are_refused():
    tokens = nn.Tokens(jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match="one document, but the tokens have segments"):
        cache().update(jnp.ones((2, 1, 1, 2)), jnp.ones((2, 1, 1, 2)), tokens)


@pytest.mark.parametrize(
    "mask, slots, rolling",
    [
        (nn.causal(), 9, False),
        (nn.sliding_window(4), 4, True),
        (nn.chunked(3), 3, True),
        (nn.sliding_window(9), 9, False),
    ],
)
def test_a_cache_is_as_short_as_the_mask_allows(mask, slots, rolling):
    sizes = dict(embed=6, heads=4, kv_heads=2, head_dim=3)
    memory = random_module(nn.Attention, **sizes, mask=mask, key=jax.random.key(0)).init_cache((2,), 9, "bfloat16")
    assert memory.keys.shape == memory.values.shape == (2, 2, slots, 3) and memory.rolling == rolling
    assert memory.keys.dtype == jnp.bfloat16 and np.all(memory.positions == -1)


@pytest.mark.parametrize("rolling", [False, True])
def test_a_donated_cache_is_updated_in_place(rolling):
    def step(memory, keys, places):
        return memory.update(keys, keys, nn.Tokens(places))[0]

    memory = jax.tree.map(lambda leaf: moved(np.array(leaf)), cache(1024, rolling))  # no array twice
    keys, places = jnp.ones((2, 1, 1, 2)), jnp.zeros((2, 1), jnp.int32)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    compiled = jax.jit(step, donate_argnums=0).lower(memory, keys, places).compile()
    kept = compiled.memory_analysis()
    assert kept is not None
    assert kept.alias_size_in_bytes == size and kept.temp_size_in_bytes < size / 8
    apart = jax.jit(step).lower(memory, keys, places).compile().memory_analysis()
    assert apart is not None and apart.alias_size_in_bytes == 0
    after = compiled(memory, keys, places)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(memory))
    assert after.positions[0, 0] == 0


def test_a_donated_cache_of_latents_is_updated_in_place():
    arrays: dict[str, Any] = {"latents": jnp.zeros((2, 1024, 8)), "rotary_keys": jnp.zeros((2, 1024, 4))}
    memory = nn.LatentCache(**arrays, positions=jnp.full((2, 1024), -1))
    new = jnp.ones((2, 1, 8)), jnp.ones((2, 1, 4)), jnp.zeros((2, 1), jnp.int32)
    step = lambda memory, latents, keys, places: memory.update(latents, keys, nn.Tokens(places))[0]
    compiled = jax.jit(step, donate_argnums=0).lower(memory, *new).compile()
    kept, size = compiled.memory_analysis(), sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    assert kept is not None and kept.alias_size_in_bytes == size and kept.temp_size_in_bytes < size / 8
    after = compiled(memory, *new)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(memory))
    assert after.latents[0, 0, 0] == 1 and after.latents[0, 1, 0] == 0


def test_layers_of_a_stack_write_their_tokens_alone():
    """In the whole stack's arrays: no layer's part of them is put back, as that of a recurrence's state is."""

    def operations(mixer):
        stack = random_module(nn.Stack, lambda key: nn.Block(nn.Residual(mixer(key))), 3, key=jax.random.key(0))
        memory = eqx.filter_eval_shape(stack.init_cache, (2,), 16)
        given = memory, *(jax.ShapeDtypeStruct(*one) for one in (((2, 1, 8), jnp.float32), ((2, 1), jnp.int32)))
        text = str(jax.make_jaxpr(lambda memory, x, places: stack(x, nn.Tokens(places), memory)[1])(*given))
        return text.count(" scatter["), text.count(" dynamic_update_slice")

    assert operations(lambda key: nn.Attention(embed=8, heads=2, head_dim=4, key=key)) == (3, 0)
    net = lambda key: nn.GatedDeltaNet(embed=8, heads=2, kv_heads=1, head_dim=4, v_dim=4, key=key)
    assert operations(net)[1] > 0  # the control


@pytest.mark.grid
@pytest.mark.parametrize("kind", MODULES)
def test_a_long_window_has_slots_of_whole_vectors(kind):
    """TPUs read them in place. What is kept beyond the window is not seen."""
    seq, window = 400, 130
    module = MODULES[kind](mask=nn.sliding_window(window))
    cache = module.init_cache((1,), seq)
    assert cache.rolling and cache.positions.shape == (1, 256)
    assert with_rollback(cache, 3).positions.shape == (1, 384)
    x, places = normal(5, 1, seq, 6), jnp.arange(seq, dtype=jnp.int32)[None]
    read = eqx.filter_jit(lambda module, x, places, cache: module(x, nn.Tokens(places), cache))
    first, kept = read(module, x[:, :300], places[:, :300], cache)
    second, _ = read(module, x[:, 300:], places[:, 300:], kept)
    found = jnp.concatenate([first, second], axis=1)
    assert close(found, read(module, x, places, None)[0], 1e-4)
    wider = MODULES[kind](mask=nn.sliding_window(window + 20))  # the control: one that sees what is kept
    assert not close(found, read(wider, x, places, None)[0], 1e-3)
