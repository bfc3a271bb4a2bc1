"""The stack is traced once, equals a loop over layers, can be sliced and recomputed, and its program is small."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import close, normal, random_module

from eqformer import nn


KEY = jax.random.key(0)
EMBED = 4


def block(key, dropout=0.3):
    one, two = jax.random.split(key)
    return nn.Block(
        nn.Residual(
            nn.Attention(embed=EMBED, heads=2, head_dim=2, rotary=nn.Rotary(2, 100.0), key=one),
            nn.RMSNorm("embed", embed=EMBED),
            dropout=nn.Dropout(dropout),
        ),
        nn.Residual(
            nn.GatedMLP(embed=EMBED, mlp=6, key=two), nn.RMSNorm("embed", embed=EMBED), dropout=nn.Dropout(dropout)
        ),
    )


@pytest.fixture(scope="module")
def stack():
    return random_module(nn.Stack, block, 4, key=KEY)


def tokens_for(x, seed=0):
    places = np.broadcast_to(np.arange(x.shape[1], dtype=np.int32), x.shape[:2])
    keys = jax.jit(nn.token_keys)(jax.random.key(seed), np.arange(x.shape[0], dtype=np.int32), places)
    return nn.Tokens(put(places), keys=keys)


run = eqx.filter_jit(lambda module, x, tokens=None, cache=None: module(x, tokens, cache))


def test_one_trace_builds_any_depth():
    traces = []

    def counted(key):
        traces.append(key)
        return block(key)

    for layers in (4, 64):
        traces.clear()
        deep = eqx.filter_eval_shape(nn.Stack, counted, layers, key=KEY)
        assert len(traces) == 1
        assert {leaf.shape[0] for leaf in jax.tree.leaves(deep) if isinstance(leaf, jax.ShapeDtypeStruct)} == {layers}


def test_each_layer_is_what_its_own_key_makes():
    make: Any = lambda key: nn.Block(
        nn.Residual(nn.Attention(embed=EMBED, heads=2, head_dim=2, key=key)), nn.Residual(jnp.zeros_like)
    )
    built: Any = eqx.filter_jit(lambda: nn.Stack(make, 3, key=KEY))()
    weights = [eqx.filter_jit(make)(key).mixer.layer.output.weight for key in jax.random.split(KEY, 3)]
    for number, weight in enumerate(weights):
        assert np.array_equal(built[number].mixer.layer.output.weight, weight)
    assert not np.array_equal(weights[0], weights[1])


def loop(stack, x, tokens, numbers):
    for place, number in enumerate(numbers):
        x, _, _ = run(stack[place], x, tokens.fold_in(number))
    return x


def test_the_scan_equals_a_loop_over_layers(stack):
    x = normal(1, 2, 3, EMBED)
    tokens = tokens_for(x)
    y, cache, _ = run(stack, x, tokens)
    assert cache is None and close(y, loop(stack, x, tokens, range(4)), 1e-5)
    assert not close(y, loop(stack, x, tokens, [3, 2, 1, 0]), 1e-3)  # other keys for the dropout
    assert not close(y, loop(stack[::-1], x, tokens, range(4)), 1e-3)


@pytest.mark.by_default("place0", "place3")
@pytest.mark.parametrize("place", [slice(1, 3), slice(None, None, 2), slice(-1, None), slice(3, 0, -1)])
def test_slices_are_stacks_that_keep_their_layers_numbers(stack, place):
    part, numbers = stack[place], list(range(4))[place]
    assert isinstance(part, nn.Stack) and len(part) == len(numbers) and part.numbers.tolist() == numbers
    x = normal(1, 2, 3, EMBED)
    tokens = tokens_for(x)
    assert close(run(part, x, tokens)[0], loop(part, x, tokens, numbers), 1e-5)


def test_two_halves_in_turn_are_the_whole(stack):
    x = normal(1, 2, 3, EMBED)
    tokens = tokens_for(x)
    half = run(stack[:2], x, tokens)[0]
    assert close(run(stack[2:], half, tokens)[0], run(stack, x, tokens)[0], 1e-5)


def test_indices(stack):
    assert len(stack) == 4 and isinstance(stack[0], nn.Block)
    assert np.array_equal(stack[-1].mixer.layer.query.weight, stack.blocks.mixer.layer.query.weight[3])
    for place in (4, -5):
        with pytest.raises(IndexError, match=rf"stack\[{place}\]: the stack has 4 layers"):
            stack[place]
    with pytest.raises(ValueError, match=r"stack\[2:2\]: no layer is left of 4"):
        stack[2:2]
    assert len(list(stack)) == 4


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Stack\(layers=0\): a stack holds at least one block"):
        nn.Stack(block, 0, key=KEY)


@pytest.mark.parametrize(
    "names", [("none", "products", "full"), pytest.param(tuple(nn.REMAT), id="all", marks=pytest.mark.grid)]
)
def test_remat_keeps_gradients_and_saves_memory(stack, names):
    """Temporary bytes of the compiled gradient must fall from policy to policy; the gradients must not move."""
    x = normal(1, 2, 32, EMBED)
    tokens = tokens_for(x)
    deep = jax.tree.map(lambda leaf: put(np.concatenate([leaf] * 3)), stack)

    def measured(name):
        module = nn.with_execution(deep, remat=name)
        arrays, static = eqx.partition(module, eqx.is_inexact_array)
        loss = lambda arrays: jnp.sum(eqx.combine(arrays, static)(x, tokens)[0] ** 2)
        compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return compiled(arrays), analysis.temp_size_in_bytes

    gradients, sizes = zip(*map(measured, names))
    for other in gradients[1:]:
        for one, two in zip(jax.tree.leaves(gradients[0]), jax.tree.leaves(other)):
            assert close(one, two, 1e-5)
    size = dict(zip(names, sizes))
    assert size["full"] < 0.5 * size["none"]
    between = set(names) - {"none", "full", "full_on_host"}
    assert all(size["full"] < size[name] < size["none"] for name in between)


def test_unrolling_changes_nothing(stack):
    x = normal(1, 2, 3, EMBED)
    assert close(run(nn.with_execution(stack, unroll=2), x)[0], run(stack, x)[0], 1e-6)


def test_what_is_recomputed_is_no_part_of_the_forward_pass(stack):
    """Without a loop, XLA would find the same in the forward pass, and keep it: a barrier is between them."""

    def barriers(unroll):
        arrays, static = eqx.partition(nn.with_execution(stack, remat="full", unroll=unroll), eqx.is_inexact_array)
        loss = lambda arrays: jnp.sum(eqx.combine(arrays, static)(normal(1, 2, 3, EMBED))[0])
        lowered = jax.jit(jax.grad(loss)).lower(arrays)
        return lowered.as_text().count("stablehlo.optimization_barrier")  # of the function that each layer calls

    assert barriers(len(stack)) > barriers(2)


def test_what_is_compiled_does_not_grow_with_depth():
    x = jax.ShapeDtypeStruct((2, 3, EMBED), jnp.float32)

    def size(layers):
        module = eqx.filter_eval_shape(nn.Stack, block, layers, key=KEY)
        arrays, static = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        loss = lambda arrays, x: jnp.sum(eqx.combine(arrays, static)(x)[0])
        lowered = jax.jit(jax.value_and_grad(loss, allow_int=True)).lower(arrays, x)
        return len(lowered.as_text().splitlines())

    assert size(2) == size(16)

    def unrolled(layers):
        blocks = eqx.filter_eval_shape(lambda: block(KEY))
        arrays, static = eqx.partition(blocks, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

        def apply(arrays, x):
            for _ in range(layers):
                x = eqx.combine(arrays, static)(x)[0]
            return x

        return len(jax.jit(apply).lower(arrays, x).as_text().splitlines())

    assert unrolled(4) > 1.3 * unrolled(2)


def test_a_stack_of_periods():
    def period(key):
        one, two = jax.random.split(key)
        local = lambda key: nn.Block(
            nn.Residual(nn.Attention(embed=EMBED, heads=1, head_dim=4, mask=nn.sliding_window(2), key=key)),
            nn.Residual(nn.MLP(embed=EMBED, mlp=4, key=key)),
        )
        return nn.SuperBlock((local(one), block(two, dropout=0.0)))

    built = random_module(nn.Stack, period, 2, key=KEY)
    x = normal(1, 2, 6, EMBED)
    y, _, _ = run(built, x)
    h = x
    for layer in range(2):
        for number in range(2):
            h, _, _ = run(built[layer].blocks[number], h)
    assert close(y, h, 1e-5)
    cache, x = eqx.filter_jit(lambda built: built.init_cache((2,), 8))(built), np.asarray(x)
    assert cache[0].keys.shape == (2, 2, 1, 2, 4) and cache[1].keys.shape == (2, 2, 2, 8, 2)
    places = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    first, cache, _ = run(built, jnp.asarray(x[:, :3]), nn.Tokens(jnp.asarray(places[:, :3])), cache)
    rest, cache, _ = run(built, jnp.asarray(x[:, 3:]), nn.Tokens(jnp.asarray(places[:, 3:])), cache)
    assert close(np.concatenate([first, rest], axis=1), y, 1e-5)


def test_a_donated_cache_is_not_copied(stack):
    """Decoding writes into the donated memory: what else it takes is one layer's part of it, not a second cache."""
    cache = stack.init_cache((2,), 2048)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    arrays, static = eqx.partition(stack, eqx.is_array)
    step = lambda x, places, cache: eqx.combine(arrays, static)(x, nn.Tokens(places), cache)[1]
    given = (normal(1, 2, 1, EMBED), jnp.zeros((2, 1), jnp.int32), cache)
    analysis = jax.jit(step, donate_argnums=2).lower(*given).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == size and analysis.temp_size_in_bytes < 0.6 * size
    apart = jax.jit(step).lower(*given).compile().memory_analysis()
    assert apart is not None and apart.alias_size_in_bytes == 0
