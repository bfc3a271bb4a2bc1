"""LoRA against its formula in float64, for every kind of linear map."""

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
SIZES = {"embed": 6, "heads": 2, "head_dim": 4, "mlp": 5}
SPECS = {  # spec -> numpy's letters of W, of A and of B
    "embed -> mlp": ("...e,me->...m", "...e,re->...r", "...r,mr->...m"),
    "embed -> heads head_dim": ("...e,hde->...hd", "...e,re->...r", "...r,hdr->...hd"),
    "heads head_dim -> embed": ("...hd,ehd->...e", "...hd,rhd->...r", "...r,er->...e"),
}
factors_of = lambda lora: (lora.down.weight, lora.up.weight)


@pytest.mark.by_default("embed -> heads head_dim")
@pytest.mark.parametrize("spec", SPECS)
def test_each_form_of_spec(spec):
    sizes = {name: SIZES[name] for name in spec.replace("->", " ").split()}
    linear = randomised(nn.Linear(spec, **sizes, bias=True, key=KEY))
    fresh = nn.with_lora(linear, [nn.Linear], rank=3, alpha=6.0, key=KEY)
    x = normal(1, 2, 7, *(SIZES[name] for name in linear.inputs))
    assert np.array_equal(fresh(x), linear(x))  # B is zero
    lora = randomised(fresh)
    of_w, of_a, of_b = SPECS[spec]
    a, b = map(wide, factors_of(lora))
    plain = np.einsum(of_w, wide(x), wide(lora.linear.weight)) + wide(lora.bias)
    expected = plain + 6.0 / 3 * np.einsum(of_b, np.einsum(of_a, wide(x), a), b)
    assert close(lora(x), expected) and not close(lora(x), plain)
    merged = nn.merge_lora(lora)
    assert isinstance(merged, nn.Linear) and close(merged(x), expected)
    assert np.array_equal(merged.weight, lora.matrix()) and merged.matrix() is merged.weight


def attention(key):
    return nn.Attention(embed=6, heads=2, head_dim=4, rotary=nn.Rotary(4, 1e4), key=key)


def latents(key):
    return nn.LatentAttention(embed=6, heads=2, head_dim=4, latent=5, rotary=nn.Rotary(2, 1e4), key=key)


def block(attention, feed_forward=None):
    def make(key):
        one, two = jax.random.split(key)
        fed = nn.GatedMLP(embed=6, mlp=5, key=two) if feed_forward is None else feed_forward(two)
        return nn.Block(
            nn.Residual(attention(one), nn.RMSNorm("embed", embed=6)), nn.Residual(fed, nn.RMSNorm("embed", embed=6))
        )

    return make


def mixture(dispatch):
    def make(key):
        one, two = jax.random.split(key)
        experts = nn.Experts(lambda key: nn.GatedMLP(embed=6, mlp=5, key=key), 3, key=two)
        return nn.MoE(nn.TopKRouter(embed=6, experts=3, top_k=2, key=one), experts, dispatch=dispatch)

    return make


@functools.cache
def transformer(make):
    def build():
        one, two, three = jax.random.split(KEY, 3)
        head = nn.Linear("embed -> vocab", embed=6, vocab=11, bias=True, key=three)
        stack = nn.Stack(make, 2, key=two)
        return nn.Transformer(nn.Embedding(vocab=11, embed=6, key=one), (stack,), nn.RMSNorm("embed", embed=6), head)

    return eqx.filter_jit(build)()


PLAIN = block(attention)
BLOCKS = {
    "latents": block(latents),
    "sorted experts": block(attention, mixture(nn.Dropless())),
    "experts' slots": block(attention, mixture(nn.Capacity(1.0))),
}
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 7)), jnp.int32)
run = eqx.filter_jit(lambda model, ids: model(ids)[0])


@pytest.mark.grid
@pytest.mark.parametrize("name", BLOCKS)
def test_the_model_with_loras_everywhere_is_the_merged_model(name):
    """Router and head among them; the router's own choice must not hang on rounding, so its factors stay small."""
    model = transformer(BLOCKS[name])
    fresh = eqx.filter_jit(lambda model: nn.with_lora(model, [nn.Linear], rank=2, key=KEY))(model)
    assert np.array_equal(run(fresh, IDS), run(model, IDS))
    adapted = randomised(fresh)
    merged = eqx.filter_jit(nn.merge_lora)(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert close(run(adapted, IDS), wide(run(merged, IDS)), 1e-4)
    without = nn.without_lora(adapted)
    assert np.array_equal(run(without, IDS), run(model, IDS))
    assert not close(run(adapted, IDS), wide(run(without, IDS)), 1e-2)


def is_lora(node):
    return isinstance(node, nn.LoRA)


def test_cached_decoding_sees_the_change_of_absorbed_weights():
    """A LatentAttention contracts key_up and value_up with what is on either side of them."""
    shapes = lambda: nn.with_lora(transformer(BLOCKS["latents"]), ["key_up", "value_up"], rank=2, key=KEY)
    model = randomised(eqx.filter_eval_shape(shapes))
    step = eqx.filter_jit(lambda model, ids, places, cache: model(ids, nn.Tokens(places), cache))
    cache, found, ids = model.init_cache(2, 7), [], np.asarray(IDS)
    for place in range(7):
        at = jnp.asarray(np.full((2, 1), place, np.int32))
        one, cache = step(model, jnp.asarray(ids[:, place : place + 1]), at, cache)
        found.append(np.asarray(one))
    whole = wide(run(model, IDS))
    assert close(np.concatenate(found, 1), whole, 1e-4) and not close(found[-1], whole[:, :1], 1e-2)


@pytest.mark.grid
def test_layers_and_experts_have_factors_of_their_own():
    model = nn.with_lora(transformer(BLOCKS["sorted experts"]), ["gate", "query"], rank=2, key=KEY)
    gate = model.stacks[0].blocks.feed_forward.layer.experts.mlps.gate
    assert gate.down.weight.shape == (2, 3, 2, 6) and gate.up.weight.shape == (2, 3, 5, 2)
    assert len(np.unique(gate.down.weight)) == gate.down.weight.size
    query = nn.dims(model).stacks[0].blocks.mixer.layer.query
    assert (query.down.weight, query.up.weight) == ("layers rank embed", "layers heads head_dim rank")
    assert abs(float(jnp.std(gate.down.weight)) * 6**0.5 - 1) < 0.2 and not gate.up.weight.any()
    marks = nn.matrices(model).stacks[0].blocks.mixer.layer.query
    assert marks.up.weight == nn.Matrix(1, 2, 1, False) and marks.down.weight == nn.Matrix(1, 1, 1, False)


@pytest.mark.parametrize(
    "where, expected",
    [
        (["query", "value"], {"sublayers[0].layer.query", "sublayers[0].layer.value"}),
        (["sublayers[1].layer.up"], {"sublayers[1].layer.up"}),
        ([nn.GatedMLP], {"sublayers[1].layer.gate", "sublayers[1].layer.up", "sublayers[1].layer.down"}),
        (lambda path, linear: linear.inputs == ("mlp",), {"sublayers[1].layer.down"}),
        (lambda path, linear: "sublayers[0].layer.o" in path, {"sublayers[0].layer.output"}),
    ],
)
def test_where(where, expected):
    model = eqx.filter_eval_shape(lambda: nn.with_lora(transformer(PLAIN), where, rank=2, key=KEY))
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_lora)
    found = {nn.path_name(path).removeprefix("stacks[0].blocks.") for path, node in nodes if is_lora(node)}
    assert found == expected


def test_scales():
    linear = nn.Linear("embed -> mlp", embed=4, mlp=4, key=KEY)
    scale = lambda **options: nn.with_lora(linear, [nn.Linear], rank=4, **options, key=KEY).scale
    assert (scale(), scale(alpha=8.0), scale(alpha=8.0, rank_stabilized=True)) == (1.0, 2.0, 4.0)


def test_factors_are_marked_alone():
    model = nn.with_lora(transformer(PLAIN), ["query"], rank=2, key=KEY)
    query = model.stacks[0].blocks.mixer.layer.query
    assert list(map(id, jax.tree.leaves(nn.lora_factors(model)))) == list(map(id, factors_of(query)))


def test_a_classifier_has_no_lora_and_is_trained_whole():
    head = nn.ClassificationHead(nn.Pooling(("cls",)), None, nn.Linear("embed -> labels", embed=8, labels=3, key=KEY))
    model = nn.with_lora((transformer(PLAIN), head), ["query", "output"], rank=2, key=KEY)
    names = [name for name, _ in nn.named_modules(model, nn.LoRA)]
    assert len(names) == 2 and all(name.startswith("[0]") for name in names)  # `output` is also a map of the head
    assert jax.tree.leaves(nn.lora_factors(model)[1])[0] is jax.tree.leaves(head)[0]
    with pytest.raises(ValueError, match="no linear map is chosen"):
        nn.with_lora((head,), ["output"], rank=2, key=KEY)


def test_refusals():
    model = transformer(PLAIN)
    query = r"stacks\[0\].blocks.sublayers\[0\].layer.query"
    with pytest.raises(ValueError, match=rf"no linear map is chosen; .* are {query}, "):
        nn.with_lora(model, ["q_proj"], rank=2, key=KEY)
    with pytest.raises(ValueError, match=rf"{query} has a LoRA already; merge_lora first"):
        nn.with_lora(nn.with_lora(model, ["query"], rank=2, key=KEY), ["query", "key"], rank=2, key=KEY)
    with pytest.raises(ValueError, match="rank=0"):
        nn.with_lora(model, ["query"], rank=0, key=KEY)
    several: list[Any] = ["query", nn.Attention]
    for where in several:
        with pytest.raises(ValueError, match="names and types come in a list"):
            nn.with_lora(model, where, rank=2, key=KEY)
    with pytest.raises(ValueError, match="the model has no LoRA"):
        nn.lora_factors(model)


@pytest.mark.parametrize("is_named", [True, False])
def test_products_keeps_the_sum_of_each_map(is_named, monkeypatch):
    """Of the maps to `mlp`, gate and up, one array each is kept; without the name both terms of each sum are kept."""
    if not is_named:
        monkeypatch.setattr(nn._lora, "checkpoint_name", lambda x, name: x)  # type: ignore[attr-defined]
    stack = nn.with_execution(random_module(nn.Stack, block(attention), layers=2, key=KEY), remat="products")
    adapted = random_module(nn.with_lora, stack, ["gate", "up"], rank=3, key=KEY)
    factors = nn.lora_factors(adapted)

    def output(factors: Any, x: Any) -> Any:
        return eqx.combine(factors, adapted)(x)[0]

    pull_back = jax.eval_shape(lambda factors, x: jax.vjp(output, factors, x)[1], factors, normal(1, 2, 7, 6))
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.shape == (2, 2, 7, 5)]
    assert len(kept) == (2 if is_named else 4)
