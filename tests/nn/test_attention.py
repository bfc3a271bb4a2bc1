"""Attention against loops in float64, for all options."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import attend, close, linear, normal, random_module, replaced, rms, rotate, wide

from eqformer import kernels, nn


KEY = jax.random.key(0)
EMBED, HEAD_DIM, SEQ = 6, 4, 5
PLACES = np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])


JITTED = eqx.filter_jit(lambda module, x, tokens: module(x, tokens)[0])


def make(heads=4, kv_heads=2, **options: Any):
    sizes = dict(embed=EMBED, heads=heads, kv_heads=kv_heads)
    options = {"head_dim": HEAD_DIM, "rotary": nn.Rotary(HEAD_DIM, 100.0), **options}
    return random_module(nn.Attention, **sizes, **options, key=KEY)


def head_norms() -> dict[str, Any]:
    return dict(query_norm=nn.RMSNorm("head_dim", head_dim=4), key_norm=nn.RMSNorm("head_dim", head_dim=4))


def full_norms() -> dict[str, Any]:
    return dict(
        query_norm=nn.RMSNorm("heads head_dim", heads=4, head_dim=4),
        key_norm=nn.RMSNorm("kv_heads head_dim", kv_heads=2, head_dim=4),
    )


CORNERS = {
    "multi-head": lambda: make(kv_heads=4),
    "grouped-query": lambda: make(),
    "multi-query": lambda: make(kv_heads=1),
    "one head": lambda: make(heads=1, kv_heads=1),
    "no rotary": lambda: make(rotary=None),
    "partial rotary": lambda: make(rotary=nn.Rotary(2, 100.0)),
    "interleaved": lambda: make(rotary=nn.Rotary(4, 100.0, interleaved=True)),
    "query and key norm per head": lambda: make(**head_norms()),
    "query and key norm full width": lambda: make(**full_norms()),
    "biases": lambda: make(bias=True),
    "input biases alone": lambda: make(bias=True, output_bias=False),
    "scale": lambda: make(scores=nn.Scores(1.3)),
    "gate": lambda: make(gate=True),
    "gate of heads": lambda: make(gate="heads"),
    "gate of softplus": lambda: make(bias=True).with_gate(activation="softplus", key=jax.random.key(1)),
    "gate of heads by softplus": lambda: make().with_gate(by_heads=True, activation="softplus", key=jax.random.key(1)),
    "values of fewer channels": lambda: make(head_dim=(HEAD_DIM, 3), gate=True, bias=True),
    "temperature": lambda: make(scores=nn.Scores(temperature=nn.LogTemperature(2, 0.7))),
    "norms after the rotation": lambda: make(
        rotary=nn.RotaryThenNorm(**head_norms(), rotary=nn.Rotary(HEAD_DIM, 100.0)),
        scores=nn.Scores(temperature=nn.LogTemperature(2, 0.7, offset=0)),
    ),
    "keys as values": lambda: replaced(
        make(value_norm=nn.RMSNorm("head_dim", head_dim=4, scale=False), **head_norms()), value=None
    ),
    "sinks": lambda: make(scores=nn.Scores(sinks=jnp.zeros(4)), core=kernels.ReferenceAttention()),
    "softcap": lambda: make(scores=nn.Scores(softcap=0.7)),
    "window": lambda: make(mask=nn.sliding_window(2)),
    "chunks": lambda: make(mask=nn.chunked(2)),
    "both ways": lambda: make(mask=nn.full()),
    "all at once": lambda: make(
        bias=True,
        gate=True,
        scores=nn.Scores(softcap=0.2, temperature=nn.LogTemperature(3, 0.9), sinks=jnp.zeros(4)),
        core=kernels.ReferenceAttention(),
        **head_norms(),
    ),
}


def normed(norms, query, key):
    query = query if norms.query_norm is None else rms(query, norms.query_norm)
    return query, key if norms.key_norm is None else rms(key, norms.key_norm)


def literal(module, x, places, visible):
    """Project, normalize, rotate, attend, gate, project back: in float64, by loops."""
    query, key = linear(x, module.query), linear(x, module.key)
    value = key if module.value is None else linear(x, module.value)
    value = value if module.value_norm is None else rms(value, module.value_norm)
    query, key = normed(module, query, key)
    if module.rotary is not None:
        rotary = module.rotary.rotary if isinstance(module.rotary, nn.RotaryThenNorm) else module.rotary
        dim, theta, interleaved = rotary.dim, rotary.theta, rotary.interleaved
        turns = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
        query, key = (rotate(z, places, turns, interleaved) for z in (query, key))
    query, key = normed(module.rotary, query, key) if isinstance(module.rotary, nn.RotaryThenNorm) else (query, key)
    scores = module.scores
    if scores.temperature is not None:
        every, strength, offset = (getattr(scores.temperature, name) for name in ("every", "strength", "offset"))
        for place in np.ndindex(places.shape):
            query[place] *= 1 + strength * math.log(1 + (places[place] + offset) // every)
    sinks = None if scores.sinks is None else wide(scores.sinks)
    y = attend(query, key, value, visible, scores.scale_of(HEAD_DIM), sinks, scores.softcap)
    if module.gate is not None:
        logits = linear(x, module.gate)
        is_softplus = float(module.gate_activation(jnp.ones(()))) > 1
        factors = np.log1p(np.exp(logits)) if is_softplus else 1 / (1 + np.exp(-logits))
        y = y * (factors if factors.ndim == 4 else factors[..., None])
    return linear(y, module.output)


def run(module, x, places=PLACES, segments=None):
    tokens = nn.Tokens(jnp.asarray(places), None if segments is None else jnp.asarray(segments))
    return JITTED(module, x, tokens)


# What "all at once" has too, and what others of these have, is for the grid alone.
GRID = ("input biases alone", "one head", "multi-head", "scale", "sinks", "softcap", "gate", "temperature", "window")
GRID += ("gate of heads by softplus",)


@pytest.mark.parametrize(
    "corner", [pytest.param(name, marks=[pytest.mark.grid] if name in GRID else []) for name in CORNERS]
)
def test_every_corner_is_its_loops(corner):
    module, x = CORNERS[corner](), normal(1, 2, SEQ, EMBED)
    tokens = nn.Tokens(jnp.asarray(PLACES))
    expected = literal(module, wide(x), PLACES, np.asarray(module.mask(tokens, tokens)))
    assert close(run(module, x), expected)
    if corner == "grouped-query":
        # Neighbouring query heads share a key head; h % kv_heads would share it with every second.
        crossed = eqx.tree_at(
            lambda m: (m.query.weight, m.output.weight),
            module,
            (module.query.weight[jnp.array([0, 2, 1, 3])], module.output.weight[:, jnp.array([0, 2, 1, 3])]),
        )
        assert not close(run(crossed, x), expected, 1e-3)


def test_the_corners_differ():
    """Each option changes the output, so that the loops above do test it."""
    module, x = CORNERS["all at once"](), normal(1, 2, SEQ, EMBED)
    norms_last = nn.RotaryThenNorm(module.query_norm, module.key_norm, module.rotary)
    scores = (
        {"sinks": None},
        {"temperature": None},
        {"temperature": nn.LogTemperature(3, 0.9, offset=0)},
        {"scale": 0.4},
        {"softcap": None},
    )
    changes = [
        {"gate": None},
        {"query_norm": None},
        {"key_norm": None},
        {"rotary": None},
        {"query_norm": None, "key_norm": None, "rotary": norms_last},
        {"mask": nn.full()},
        *({"scores": replaced(module.scores, **change)} for change in scores),
    ]
    modules, tokens = [module, *(replaced(module, **change) for change in changes)], nn.Tokens(jnp.asarray(PLACES))
    every = eqx.filter_jit(lambda modules: [module(x, tokens)[0] for module in modules])
    y, *others = map(np.asarray, every(modules))
    for change, other in zip(changes, others, strict=True):
        assert not close(other, y, 1e-3), change


def test_default_positions_and_leading_dims():
    module, x = make(), normal(1, 3, SEQ, EMBED)
    whole, cache = eqx.filter_jit(module)(x)
    assert cache is None
    assert np.allclose(whole, run(module, x, np.tile(np.arange(SEQ), (3, 1))), atol=1e-6)
    assert np.allclose(JITTED(module, x[1], None), whole[1], atol=1e-6)
    assert np.allclose(JITTED(module, x[:, None], None)[:, 0], whole, atol=1e-6)


def test_packed_documents_are_as_separate_ones():
    module = make(bias=True)
    one, two = normal(1, 1, 3, EMBED), normal(2, 1, 2, EMBED)
    packed = put(np.concatenate([one, two], axis=1))
    places = np.array([[0, 1, 2, 0, 1]])
    y = run(module, packed, places, np.array([[5, 5, 5, 8, 8]]))
    apart = np.concatenate([run(module, one, places[:, :3]), run(module, two, places[:, :2])], axis=1)
    assert close(y, apart, 1e-6)
    assert not close(run(module, packed, places, np.array([[5, 5, 5, 5, 5]])), apart, 1e-3)


def test_padding_is_never_attended_to():
    module, x = make(), normal(1, 1, SEQ, EMBED)
    places = np.array([[0, 1, 2, -1, -1]])
    y = run(module, x, places)
    other = run(module, x.at[:, 3:].set(9.0), places)
    assert np.array_equal(y[:, :3], other[:, :3]) and bool(jnp.isfinite(y).all())


def test_padding_has_finite_gradients_beside_a_temperature():
    """The position of padding is -1, whose logarithm is not finite if `offset` is 0."""
    temperature = nn.LogTemperature(3, 0.9, offset=0)
    places = np.array([[0, 1, 4, -1, -1]], np.int32)
    factors = temperature.factors(jnp.asarray(places), jnp.float32)[0, :, 0]
    np.testing.assert_allclose(factors, [1, 1, 1 + 0.9 * np.log(2), 1, 1], rtol=1e-6)
    module = make(scores=nn.Scores(temperature=temperature))
    gradients = eqx.filter_grad(lambda module, x: jnp.sum(run(module, x, places)[:, :3] ** 2))
    leaves = jax.tree.leaves(gradients(module, normal(1, 1, SEQ, EMBED)))
    assert leaves and all(bool(jnp.isfinite(leaf).all()) and bool(jnp.any(leaf)) for leaf in leaves)


@pytest.mark.by_default("2")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_shards_of_the_heads_give_partial_sums(kv_heads):
    norms = head_norms()
    scores = nn.Scores(sinks=jnp.zeros(4))
    module = make(kv_heads=kv_heads, bias=True, output_bias=False, gate=True, scores=scores, **norms)
    module = replaced(module, core=kernels.ReferenceAttention())
    x = normal(1, 2, SEQ, EMBED)

    def shard(part):
        def cut(name, leaf):
            for dim, word in enumerate(name.split() if isinstance(name, str) else ()):
                if word in ("heads", "kv_heads"):
                    size = leaf.shape[dim] // 2
                    leaf = put(np.take(np.asarray(leaf), np.arange(part * size, (part + 1) * size), axis=dim))
            return leaf

        return jax.tree.map(cut, nn.dims(module), module)

    first, second = run(shard(0), x), run(shard(1), x)
    assert shard(0).query.weight.shape[0] == 2
    assert close(first + second, run(module, x), 1e-6)
    assert not close(first, run(module, x), 1e-3)


def test_gradients_reach_every_parameter_and_agree_with_differences():
    module, x = CORNERS["all at once"](), normal(1, 1, 2, EMBED)
    places = PLACES[:1, :2]
    tokens = nn.Tokens(jnp.asarray(places))
    visible = np.asarray(module.mask(tokens, tokens))
    gradients = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(run(m, x, places) ** 2)))(module)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        get = lambda tree, path=path: {p: v for p, v in jax.tree_util.tree_leaves_with_path(tree)}[path]
        leaf, place = wide(get(module)), tuple(n // 2 for n in gradient.shape)

        def loss(step, path=path, leaf=leaf, place=place):
            moved = leaf.copy()
            moved[place] += step
            swapped = jax.tree_util.tree_map_with_path(lambda p, v: moved if p == path else v, module)
            return np.sum(literal(swapped, wide(x), places, visible) ** 2)

        expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert np.isclose(gradient[place], expected, rtol=2e-3, atol=2e-4), jax.tree_util.keystr(path)


def test_initial_deviations():
    module = nn.Attention(embed=64, heads=4, head_dim=16, output_std=0.3, key=KEY)
    assert abs(float(jnp.std(module.query.matrix())) * 8 - 1) < 0.05
    assert abs(float(jnp.std(module.output.matrix())) / 0.3 - 1) < 0.05
    assert module.scores.scale_of(16) == 0.25
    assert not np.array_equal(module.query.matrix(), module.key.matrix())


def test_kv_heads_must_divide_heads():
    with pytest.raises(ValueError, match=r"Attention\(heads=6, kv_heads=4\).*must divide.*\[1, 2, 3, 6\]"):
        nn.Attention(embed=4, heads=6, kv_heads=4, head_dim=2, key=KEY)


def test_wrong_shapes_are_refused():
    module = make()
    with pytest.raises(ValueError, match=r"Attention\(x of shape \(2, 3, 5\)\): with the weights .* shape \(2, 3, 6\)"):
        module(normal(1, 2, 3, 5))
    with pytest.raises(ValueError, match=r"Attention\(x of shape \(6,\)\): .* at least 2 of them"):
        module(normal(1, 6))
