"""Each arrangement of residual sublayers against its formula."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, randomised, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED = 4
NORMS = (
    ("mixer", "norm"),
    ("feed_forward", "norm"),
    ("mixer", "output_norm"),
    ("feed_forward", "output_norm"),
    ("mixer", "sum_norm"),
    ("feed_forward", "sum_norm"),
    ("block", "norm"),
    ("block", "sum_norm"),
)


def side_by_side(mixer, feed_forward, **options):
    return nn.ParallelResidual((mixer, feed_forward), **options)


# The formula in terms of a (attention), f (feed-forward) and n, the norms in the order of NORMS.
ARRANGEMENTS = {
    "pre-norm": ((0, 1), nn.Block, lambda x, a, f, n: (h := x + a(n[0](x))) + f(n[1](h))),
    "output norms alone": ((2, 3), nn.Block, lambda x, a, f, n: (h := x + n[2](a(x))) + n[3](f(h))),
    "sandwich": ((0, 1, 2, 3), nn.Block, lambda x, a, f, n: (h := x + n[2](a(n[0](x)))) + n[3](f(n[1](h)))),
    "post-norm": ((4, 5), nn.Block, lambda x, a, f, n: n[5]((h := n[4](x + a(x))) + f(h))),
    "no norm": ((), nn.Block, lambda x, a, f, n: (h := x + a(x)) + f(h)),
    "parallel, one norm": ((6,), side_by_side, lambda x, a, f, n: x + a(n[6](x)) + f(n[6](x))),
    "parallel, two norms": ((0, 1), side_by_side, lambda x, a, f, n: x + a(n[0](x)) + f(n[1](x))),
    "parallel, all": (
        (0, 1, 2, 3, 6, 7),
        side_by_side,
        lambda x, a, f, n: n[7](x + n[2](a(n[0](n[6](x)))) + n[3](f(n[1](n[6](x))))),
    ),
}


@functools.cache
def norm(place):
    return randomised(nn.RMSNorm("embed", embed=EMBED), seed=place)


@functools.cache
def attention():
    return random_module(nn.Attention, embed=EMBED, heads=2, head_dim=2, key=KEY)


@functools.cache
def perceptron():
    return random_module(nn.MLP, embed=EMBED, mlp=6, key=KEY)


def block(norms: Any = (0, 1), kind: Any = nn.Block, **options: Any) -> Any:
    own: dict[str, dict[str, Any]] = {"mixer": dict(options), "feed_forward": dict(options), "block": {}}
    for place in norms:
        part, name = NORMS[place]
        own[part][name] = norm(place)
    feed_forward = nn.Residual(perceptron(), **own["feed_forward"])
    return kind(nn.Residual(attention(), **own["mixer"]), feed_forward, **own["block"])


run = eqx.filter_jit(lambda module, x, tokens=None, cache=None: module(x, tokens, cache))


def outputs():
    x = normal(1, 2, 3, EMBED)
    modules = {name: block(norms, kind) for name, (norms, kind, _) in ARRANGEMENTS.items()}
    return x, eqx.filter_jit(lambda modules, x: {name: one(x)[0] for name, one in modules.items()})(modules, x)


def test_every_arrangement_is_its_formula_and_no_other():
    x, found = outputs()
    attend = lambda x: attention()(x)[0]
    feed = perceptron()
    norms = [norm(place) for place in range(len(NORMS))]
    formulas = {name: formula for name, (_, _, formula) in ARRANGEMENTS.items()}
    every = jax.jit(lambda x: {name: formula(x, attend, feed, norms) for name, formula in formulas.items()})
    for name, expected in every(x).items():
        assert {other for other, y in found.items() if close(y, expected, 1e-5)} == {name}


def keyed(x, seed=0):
    rows = jnp.arange(x.shape[0])
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return nn.Tokens(places, keys=nn.token_keys(jax.random.key(seed), rows, places))


def test_dropout_acts_on_both_sublayers_with_masks_of_their_own():
    x, dropout = normal(1, 2, 3, EMBED), nn.Dropout(0.5)
    module, side, tokens = block(dropout=dropout), block(kind=side_by_side, dropout=dropout), keyed(x)

    @jax.jit
    def by_hand(x, tokens):
        attended = module.mixer.layer(module.mixer.norm(x), tokens)[0]
        h = x + dropout(attended, tokens.fold_in(0).keys)
        fed, beside = (module.feed_forward.layer(module.feed_forward.norm(y)) for y in (h, x))
        ours, theirs = (tokens.fold_in(place).keys for place in (1, 0))
        return h + dropout(fed, ours), h + dropout(fed, theirs), h + dropout(beside, ours)

    run_layers, same_keys, beside = by_hand(x, tokens)
    found = run(module, x, tokens)[0]
    assert close(found, run_layers, 1e-6) and not close(found, same_keys, 1e-3)
    assert close(run(module, x)[0], run(block(), x)[0], 1e-6)  # without keys nothing is dropped
    assert close(run(side, x, tokens)[0], beside, 1e-6)


def test_a_scale_multiplies_what_each_sublayer_adds():
    x, module = normal(1, 2, 3, EMBED), block((0, 1, 2, 3), scale=0.22)
    n = [lambda x, place=place: formula_of_norm(norm(place).weight, wide(x)) for place in range(4)]
    narrow = lambda x: jnp.asarray(x, jnp.float32)
    attended, fed = (eqx.filter_jit(part.layer) for part in (module.mixer, module.feed_forward))
    h = wide(x) + 0.22 * n[2](attended(narrow(n[0](x)))[0])
    expected = h + 0.22 * n[3](fed(narrow(n[1](h))))
    assert close(run(module, x)[0], expected, 1e-6)
    assert not close(run(block((0, 1, 2, 3)), x)[0], expected, 1e-2)


@pytest.mark.parametrize("norm_number,number", [(4, 0), (5, 1)])
def test_branches_have_one_sum(norm_number, number):
    branch = rf"ParallelResidual\(branches\[{number}\]=Residual\(sum_norm=...\)\)"
    with pytest.raises(ValueError, match=rf"{branch}: there is one sum, of the input and all branches"):
        block((0, norm_number), side_by_side)


def test_a_period_runs_its_blocks_in_turn_with_caches_and_keys_of_their_own():
    one, two = block(dropout=nn.Dropout(0.3)), block((2, 3), dropout=nn.Dropout(0.3))
    period, x = nn.SuperBlock((one, two)), normal(1, 2, 3, EMBED)
    tokens = keyed(x)
    y, cache, _ = run(period, x, tokens)
    h, _, _ = run(one, x, tokens.fold_in(0))
    assert cache is None and close(y, run(two, h, tokens.fold_in(1))[0], 1e-6)
    assert not close(y, run(two, h, tokens.fold_in(0))[0], 1e-3)
    empty = period.init_cache((2,), 5)
    assert [part.keys.shape for part in empty] == [(2, 2, 5, 2)] * 2
    _, filled, _ = run(period, x, nn.positions_like((2, 3)), empty)
    assert not np.array_equal(filled[0].keys, filled[1].keys) and filled[1].positions[:, :3].tolist() == [[0, 1, 2]] * 2


@pytest.mark.by_default("side_by_side")
@pytest.mark.parametrize("kind", [pytest.param(nn.Block, marks=pytest.mark.quick), side_by_side])
def test_a_blocks_cache_is_its_mixers(kind):
    module = block(kind=kind)
    cache = module.init_cache((2,), 5)
    y, cache, _ = run(module, normal(1, 2, 3, EMBED), nn.positions_like((2, 3)), cache)
    assert close(y, run(module, normal(1, 2, 3, EMBED))[0], 1e-6) and cache.positions[:, :3].tolist() == [[0, 1, 2]] * 2


class Smooth(nn.Mixer):
    """A recurrence of one's own, `h_t = decay h_(t-1) + x_t`, that remembers `h` however long the rows are."""

    decay: nn.Linear

    def __call__(self, x, tokens=None, cache=None):
        rate = jax.nn.sigmoid(self.decay(x))
        start = jnp.zeros_like(x[..., 0, :]) if cache is None else cache
        step = lambda h, given: (given[0] * h + given[1],) * 2
        last, y = jax.lax.scan(step, start, (jnp.moveaxis(rate, -2, 0), jnp.moveaxis(x, -2, 0)))
        return jnp.moveaxis(y, 0, -2), None if cache is None else last

    def init_cache(self, batch, capacity, dtype="float32"):
        return jnp.zeros((*batch, EMBED), dtype)


def smooth(seed=0):
    return Smooth(
        randomised(nn.Linear("embed -> features", embed=EMBED, features=EMBED, bias=True, key=KEY), seed=seed)
    )


def formula_of_smooth(module, x):
    """In float64, a token at a time."""
    weight, bias, x = (np.asarray(leaf, np.float64) for leaf in (module.decay.weight, module.decay.bias, x))
    h, found = np.zeros((x.shape[0], EMBED)), []
    for token in np.moveaxis(x, 1, 0):
        h = h / (1 + np.exp(-(token @ weight.T + bias))) + token
        found.append(h)
    return np.stack(found, 1)


def formula_of_norm(weight, x):
    return np.asarray(weight, np.float64) * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm(0).eps)


def test_a_mixer_without_a_feed_forward_layer():
    """As in Mamba: the formula in float64, a cache that is the mixer's, a stack of them."""
    x, module = normal(1, 2, 5, EMBED), nn.Block(nn.Residual(smooth(), norm(0)))
    y, cache, aux = run(module, x)
    normed = formula_of_norm(norm(0).weight, wide(x))
    expected = wide(x) + formula_of_smooth(smooth(), normed)
    assert cache is None and aux is None and close(y, expected, 1e-6)
    assert not close(x + formula_of_smooth(smooth(1), normed), expected, 1e-2)
    memory, found = module.init_cache((2,), 5), []
    for place in range(5):
        one, memory, _ = run(module, x[:, place : place + 1], nn.Tokens(jnp.full((2, 1), place)), memory)
        found.append(one)
    assert memory.shape == (2, EMBED) and close(jnp.concatenate(found, 1), expected, 1e-6)


@pytest.mark.grid
def test_three_sublayers_in_a_row():
    """Each kind of layer alone beside the stream, as a `SuperBlock` of `Residual`s: caches, keys and gradients."""
    dropout, x = nn.Dropout(0.4), normal(1, 2, 5, EMBED)
    layers = smooth(), attention(), perceptron()
    period = nn.SuperBlock(
        tuple(nn.Residual(layer, norm(place), dropout=dropout) for place, layer in enumerate(layers))
    )

    def by_hand(period, x, tokens, swapped=False):
        for number, one in enumerate(period.blocks):
            y = one.layer(one.norm(x))
            keys = tokens.fold_in(2 - number if swapped else number).fold_in(0).keys
            x = x + dropout(y[0] if isinstance(y, tuple) else y, keys)
        return x

    tokens = keyed(x)

    def gradient(run):
        return eqx.filter_jit(eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(run(m, x, tokens)))))(period)

    found, wanted = gradient(lambda m, *given: m(*given)[0]), gradient(by_hand)
    assert all(close(*pair, 1e-5) for pair in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    swapped = eqx.filter_jit(lambda period: by_hand(period, x, tokens, swapped=True))(period)
    assert not close(run(period, x, tokens)[0], swapped, 1e-2)
    caches = period.init_cache((2,), 5)
    assert caches[0].shape == (2, EMBED) and caches[1].keys.shape == (2, 2, 5, 2) and caches[2] is None
    whole, found = run(period, x)[0], []
    for place in range(5):
        one, caches, _ = run(period, x[:, place : place + 1], nn.Tokens(jnp.full((2, 1), place)), caches)
        found.append(one)
    assert close(jnp.concatenate(found, 1), whole, 1e-5)


class Doubled(nn.Sublayer):
    """A sublayer of one's own, without a layer or a cache."""

    def __call__(self, x, tokens=None, cache=None, *, index=None):
        return 2 * x, cache, None

    def init_cache(self, batch, capacity, dtype="float32"):
        return None


def with_vector(x, vector):
    return jnp.sin(x) * vector


def test_each_branch_reads_its_own_layer_input():
    """Branches side by side read one vector each, in order, as the sublayers of a block do."""
    x, vectors = normal(1, 2, 3, EMBED), normal(4, 2, 3, 2, EMBED)
    module = nn.ParallelResidual(tuple(nn.Residual(with_vector, norm(place), reads="layer_input") for place in (0, 1)))
    y = run(module, x, nn.positions_like((2, 3)).replace(inputs=vectors))[0]

    @jax.jit
    def by_hand(x, vectors):
        return x + jnp.sin(norm(0)(x)) * vectors[..., 0, :] + jnp.sin(norm(1)(x)) * vectors[..., 1, :]

    assert close(y, by_hand(x, vectors), 1e-6)
    assert not close(y, by_hand(x, vectors[..., ::-1, :]), 1e-3)


def test_a_sublayer_reads_one_more_input_by_its_name():
    """A source, a vector of each token and what an earlier sublayer shares; caches of those with mixers alone."""
    sizes = {"embed": EMBED, "heads": 2, "head_dim": 2, "key": KEY}
    vectors, source = normal(4, 2, 3, 2, EMBED), nn.Source(normal(5, 2, 4, EMBED), nn.positions_like((2, 4)))
    cross, again = random_module(nn.CrossAttention, **sizes), random_module(nn.CrossLayerAttention, **sizes, kv_heads=2)
    first, second = (nn.Residual(with_vector, norm(place), reads="layer_input") for place in (0, 1))
    module = nn.Block(
        nn.Residual(attention(), shares="keys"),
        nn.Residual(cross, norm(2), reads="source"),
        first,
        nn.Residual(again, norm(3), reads="keys"),
        Doubled(),
        second,
        nn.StreamScale(jnp.array(0.5)),
    )
    x, tokens = normal(1, 2, 3, EMBED), nn.positions_like((2, 3)).replace(inputs=vectors, source=source)
    assert module.mixer is module.sublayers[0] and module.feed_forward is None

    @eqx.filter_jit
    def by_hand(x, vectors, source):
        attended, keys = attention()(x, None, nn.ShareRequest(None))
        x = x + attended
        x = x + cross(norm(2)(x), nn.with_source(nn.positions_like((2, 3)), source))[0]
        x = x + jnp.sin(norm(0)(x)) * vectors[..., 0, :]
        x = 2 * (x + again(norm(3)(x), None, keys)[0])
        return 0.5 * (x + jnp.sin(norm(1)(x)) * vectors[..., 1, :])

    y, cache, aux = run(module, x, tokens)
    assert cache is None and isinstance(aux, nn.SharedValue) and aux.name == "keys"
    assert close(y, by_hand(x, vectors, source), 1e-5)
    assert not close(y, by_hand(x, vectors[..., ::-1, :], source), 1e-3)
    empty = module.init_cache((2,), 5)
    assert [type(part) for part in empty] == [nn.KVCache, nn.KVCache, type(None)]
    decoded, cache, _ = run(module, x, tokens, empty)
    assert close(decoded, y, 1e-5) and cache[0].positions[:, :3].tolist() == [[0, 1, 2]] * 2 and cache[2] is None
    with pytest.raises(ValueError, match=r"a call of 3 sublayers with mixers .* but cache is a tuple of 2"):
        module(x, tokens, empty[:2])
    with pytest.raises(
        ValueError, match=r"Residual\(function, reads='layer_input'\): the model provides no such input"
    ):
        first(x)
    with pytest.raises(ValueError, match=r"CrossAttention: there is neither a source nor a cache"):
        nn.Residual(cross)(x, tokens)  # it has not asked for the source
    with pytest.raises(ValueError, match=r"Residual\(shares='source'\): this is the name of an input of the whole"):
        nn.Residual(attention(), shares="source")
