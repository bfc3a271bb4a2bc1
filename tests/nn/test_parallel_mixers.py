"""Parallel mixers equal the sum of the single mixers; their caches, keys and errors."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, randomised

from eqformer import nn


KEY = jax.random.key(0)
EMBED, SEQ = 6, 7


def norm(seed):
    return randomised(nn.RMSNorm("embed", embed=EMBED), seed=seed)


def mixers(**options):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 3}
    attention = random_module(nn.Attention, embed=EMBED, heads=3, kv_heads=1, head_dim=2, bias=True, key=KEY)
    net = random_module(nn.Mamba2Mixer, embed=EMBED, **sizes, v_dim=5, chunk=3, bias=True, key=KEY)
    first = nn.Residual(attention, scale=0.5, input_scale=0.7, **options)
    return nn.ParallelResidual((first, nn.Residual(net, norm(2), output_norm=norm(3), scale=2.0, **options)), norm(1))


@pytest.mark.grid
def test_they_add_what_each_gives_of_one_input():
    module, x = mixers(), normal(1, 2, SEQ, EMBED)

    @eqx.filter_jit
    def by_hand(module, x, first=0.7):
        normed, (attention, net) = module.norm(x), module.branches
        attended, recurrent = attention.layer(first * normed)[0], net.layer(net.norm(normed))[0]
        return x + 0.5 * attended + 2.0 * net.output_norm(recurrent)

    y, cache, aux = eqx.filter_jit(module)(x)
    assert cache is None and aux is None and close(y, by_hand(module, x), 1e-6)
    assert not close(y, by_hand(module, x, 1.0), 1e-3)  # biases, so that no scale of the output is as good


@pytest.mark.quick
def test_each_has_a_cache_of_its_own():
    """Token by token as all at once; the positions of the one and the state of the other are their own."""
    module, x = mixers(), normal(1, 2, SEQ, EMBED)
    step = eqx.filter_jit(module)
    whole, cache = step(x)[0], module.init_cache((2,), SEQ)
    assert [type(one) for one in cache] == [nn.KVCache, nn.RecurrentCache]
    found, kept = [], cache
    for place in range(SEQ):
        y, kept, _ = step(x[:, place : place + 1], nn.Tokens(jnp.full((2, 1), place)), kept)
        found.append(y)
    assert close(jnp.concatenate(found, axis=1), whole, 1e-5)
    assert kept[0].positions.tolist() == [[*range(SEQ)]] * 2 and kept[1].lengths.tolist() == [SEQ] * 2
    forgotten = (kept[0], cache[1])  # the one remembers, the other does not
    last = lambda cache: step(x[:, :1], nn.Tokens(jnp.full((2, 1), SEQ - 1)), cache)[0]
    assert not close(last(forgotten), last(kept), 1e-3)


@pytest.mark.grid
def test_dropout_has_masks_of_their_own():
    x, dropout = normal(1, 2, SEQ, EMBED), nn.Dropout(0.5)
    module, positions = mixers(dropout=dropout), jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    tokens = nn.Tokens(positions, keys=nn.token_keys(jax.random.key(0), jnp.arange(2), positions))

    @eqx.filter_jit
    def by_hand(module, x, number):
        normed = module.norm(x)
        added = [dataclasses.replace(branch, dropout=None).run_branch(normed, tokens)[0] for branch in module.branches]
        keys = [tokens.fold_in(number).fold_in(branch_number).keys for branch_number in range(2)]
        return x + sum(dropout(y, branch_keys) for y, branch_keys in zip(added, keys, strict=True))

    run = eqx.filter_jit(lambda module, x, number: module(x, tokens, index=number)[0])
    for number in (0, 1):
        assert close(run(module, x, number), by_hand(module, x, number), 1e-5)
    assert not np.allclose(run(module, x, 0), run(module, x, 1))


def test_a_sum_of_ones_own_is_refused():
    branch = mixers().branches[0]
    with pytest.raises(ValueError, match=r"^ParallelResidual\(branches\[1\]=Residual\(sum_norm=...\)\): there is one"):
        nn.ParallelResidual((branch, nn.Residual(branch.layer, sum_norm=norm(1))))
