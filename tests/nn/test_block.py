"""Each arrangement of a block against its formula."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, drawn, normal, randomised, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED = 4
NORMS = (
    "attention_norm",
    "feed_forward_norm",
    "attention_output_norm",
    "feed_forward_output_norm",
    "attention_sum_norm",
    "feed_forward_sum_norm",
)
# The formula in terms of a (attention), f (feed-forward) and n, the norms in the order of NORMS.
ARRANGEMENTS = {
    "pre-norm": ((0, 1), False, lambda x, a, f, n: (h := x + a(n[0](x))) + f(n[1](h))),
    "output norms alone": ((2, 3), False, lambda x, a, f, n: (h := x + n[2](a(x))) + n[3](f(h))),
    "sandwich": ((0, 1, 2, 3), False, lambda x, a, f, n: (h := x + n[2](a(n[0](x)))) + n[3](f(n[1](h)))),
    "post-norm": ((4, 5), False, lambda x, a, f, n: n[5]((h := n[4](x + a(x))) + f(h))),
    "no norm": ((), False, lambda x, a, f, n: (h := x + a(x)) + f(h)),
    "parallel, one norm": ((0,), True, lambda x, a, f, n: x + a(n[0](x)) + f(n[0](x))),
    "parallel, two norms": ((0, 1), True, lambda x, a, f, n: x + a(n[0](x)) + f(n[1](x))),
    "parallel, all": ((0, 1, 2, 3, 5), True, lambda x, a, f, n: n[5](x + n[2](a(n[0](x))) + n[3](f(n[1](x))))),
}


def norm(place):
    return randomised(nn.RMSNorm("embed", embed=EMBED), seed=place)


def attention(**options):
    return drawn(nn.Attention, embed=EMBED, heads=2, head_dim=2, **options, key=KEY)


def block(norms=(0, 1), **options):
    feed_forward = drawn(nn.MLP, embed=EMBED, mlp=6, key=KEY)
    return nn.Block(attention(), feed_forward, **{NORMS[place]: norm(place) for place in norms}, **options)


def outputs():
    x = normal(1, 2, 3, EMBED)
    return x, {
        name: eqx.filter_jit(block(norms, parallel=parallel))(x)[0]
        for name, (norms, parallel, _) in ARRANGEMENTS.items()
    }


def test_every_arrangement_is_its_formula_and_no_other():
    x, found = outputs()
    attend = eqx.filter_jit(lambda x: attention()(x)[0])
    feed = drawn(nn.MLP, embed=EMBED, mlp=6, key=KEY)
    norms = [norm(place) for place in range(len(NORMS))]
    for name, (_, _, formula) in ARRANGEMENTS.items():
        expected = formula(x, attend, feed, norms)
        assert {other for other, y in found.items() if close(y, expected, 1e-5)} == {name}


def keyed(x, seed=0):
    rows = jnp.arange(x.shape[0])
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return nn.Tokens(places, keys=nn.token_keys(jax.random.key(seed), rows, places))


def test_dropout_acts_on_both_sublayers_with_masks_of_their_own():
    x, dropout = normal(1, 2, 3, EMBED), nn.Dropout(0.5)
    module = block(dropout=dropout)
    assert module.attention_norm is not None and module.feed_forward_norm is not None
    tokens = keyed(x)
    attended = module.attention(module.attention_norm(x), tokens)[0]
    h = x + dropout(attended, tokens.fold_in(0).keys)
    expected = h + dropout(module.feed_forward(module.feed_forward_norm(h)), tokens.fold_in(1).keys)
    assert close(module(x, tokens)[0], expected, 1e-6)
    same = h + dropout(module.feed_forward(module.feed_forward_norm(h)), tokens.fold_in(0).keys)
    assert not close(module(x, tokens)[0], same, 1e-3)
    assert close(module(x)[0], block()(x)[0], 1e-6)  # without keys nothing is dropped


def test_a_residual_scale_multiplies_what_each_sublayer_adds():
    x, module = normal(1, 2, 3, EMBED), block((0, 1, 2, 3), residual_scale=0.22)
    n = [lambda x, place=place: wide(norm(place)(x)) for place in range(4)]
    narrow = lambda x: jnp.asarray(x, jnp.float32)
    h = wide(x) + 0.22 * n[2](module.attention(narrow(n[0](x)))[0])
    expected = h + 0.22 * n[3](module.feed_forward(narrow(n[1](narrow(h)))))
    assert close(module(x)[0], expected, 1e-6)
    assert not close(block((0, 1, 2, 3))(x)[0], expected, 1e-2)


def test_a_parallel_block_has_one_sum():
    with pytest.raises(ValueError, match=r"Block\(parallel=True, attention_sum_norm=...\).*feed_forward_sum_norm"):
        block(norms=(0, 4), parallel=True)


def test_a_period_runs_its_blocks_in_turn_with_caches_and_keys_of_their_own():
    one, two = block(dropout=nn.Dropout(0.3)), block((2, 3), dropout=nn.Dropout(0.3))
    period, x = nn.Period((one, two)), normal(1, 2, 3, EMBED)
    tokens = keyed(x)
    y, cache, _ = period(x, tokens)
    h, _, _ = one(x, tokens.fold_in(0))
    assert cache is None and close(y, two(h, tokens.fold_in(1))[0], 1e-6)
    assert not close(y, two(h, tokens.fold_in(0))[0], 1e-3)
    empty = period.init_cache((2,), 5)
    assert [part.keys.shape for part in empty] == [(2, 5, 2, 2)] * 2
    _, filled, _ = period(x, nn.positions_like((2, 3)), empty)
    assert not np.array_equal(filled[0].keys, filled[1].keys) and filled[1].positions[:, :3].tolist() == [[0, 1, 2]] * 2


def test_a_blocks_cache_is_its_attentions():
    module = block()
    cache = module.init_cache((2,), 5)
    y, cache, _ = module(normal(1, 2, 3, EMBED), nn.positions_like((2, 3)), cache)
    assert close(y, module(normal(1, 2, 3, EMBED))[0], 1e-6) and cache.positions[:, :3].tolist() == [[0, 1, 2]] * 2
