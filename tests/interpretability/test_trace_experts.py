"""`trace_experts` returns every router's choices, compared with passes of single layers and with formulas."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside_cases import KEY, make_block, make_model, make_model_with_encoder

from eqformer import nn
from eqformer.interpretability import expert_layers, trace_experts


EXPERTS, TOP_K = 5, 2
TEXT = [3, 1, 4, 1, 5, 6, 2]


def make_expert(key):
    return nn.MLP(embed=4, mlp=6, key=key)


def make_mixture(key):
    router_key, experts_key = jax.random.split(key)
    router = nn.TopKRouter(embed=4, experts=EXPERTS, top_k=TOP_K, std=1.0, key=router_key)
    return nn.MoE(router, nn.Experts(make_expert, EXPERTS, key=experts_key))


def make_super_block(key):
    """A dense layer and a mixture."""
    return nn.SuperBlock((make_block(key), make_block(jax.random.fold_in(key, 1), make_mixture)))


@functools.cache
def make_mixed_model():
    """Layers 1, 3 and 5 are mixtures: two groups of two layers, and a stack of two whose last layer is another kind."""
    first = make_model((2,), make_super_block).stacks[0]
    dense, mixture = make_model((1,)), make_model((1,), functools.partial(make_block, feed_forward=make_mixture))
    return eqx.tree_at(lambda m: m.stacks, dense, (first, dense.stacks[0], mixture.stacks[0]))


def routed_layer_by_layer(model, ids):
    """The experts and their weights in float64, from the inputs of each router."""
    blocks: list[Any] = [block for number in range(2) for block in model.stacks[0][number].blocks]
    blocks += [model.stacks[1][0], model.stacks[2][0]]
    tokens = nn.positions_like((1, len(ids)))
    x, layers = model.embedding(jnp.asarray([ids])), {}
    for number, block in enumerate(blocks):
        attention, feed_forward = block.sublayers
        x = attention(x, tokens)[0]
        if hasattr(feed_forward.layer, "router"):
            weight = np.asarray(feed_forward.layer.router.linear.weight, np.float64)
            logits = np.asarray(feed_forward.norm(x), np.float64)[0] @ weight.T
            shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            experts = np.argsort(-shares, axis=-1)[:, :TOP_K]
            layers[number] = experts, np.take_along_axis(shares, experts, -1)
        x = feed_forward(x, tokens)[0]
    return layers


@pytest.mark.grid
def test_the_choices_are_those_of_single_layers():
    model = make_mixed_model()
    expected, chosen = routed_layer_by_layer(model, TEXT), trace_experts(model, TEXT)
    assert expert_layers(model) == [layer.layer for layer in chosen] == [*expected] == [1, 3, 5]
    for layer in chosen:
        experts, weights = expected[layer.layer]
        np.testing.assert_array_equal(layer.experts, experts)
        np.testing.assert_allclose(layer.weights, weights, rtol=1e-4)
    assert not np.array_equal(chosen[0].experts, chosen[1].experts)  # the layers of a stack differ
    other = trace_experts(model, [2, *TEXT[1:]])
    assert not np.array_equal(other[0].experts, chosen[0].experts)


@pytest.mark.grid
def test_padding_and_later_tokens_change_nothing():
    model = make_mixed_model()
    long = (TEXT * 20)[:80]  # is padded to another width
    for short, layer in zip(trace_experts(model, TEXT), trace_experts(model, long)):
        np.testing.assert_array_equal(layer.experts[: len(TEXT)], short.experts)
        np.testing.assert_allclose(layer.weights[: len(TEXT)], short.weights, rtol=1e-4)


def test_models_that_cannot_be_read_say_so():
    assert expert_layers(make_model()) == [] == expert_layers(object())
    with pytest.raises(ValueError, match="choose no experts"):
        trace_experts(make_model(), TEXT)
    router = nn.ExpertChoiceRouter(embed=4, experts=EXPERTS, factor=1.0, key=KEY)
    router = jax.tree.map(lambda x: x[None], router)  # of one layer
    taking = eqx.tree_at(lambda m: m.stacks[2].blocks.sublayers[1].layer.router, make_mixed_model(), router)
    assert expert_layers(taking) == [1, 3]


@pytest.mark.grid
def test_a_decoder_reads_its_source():
    plain = make_model_with_encoder()
    layer = jax.tree.map(lambda x: x[None] if eqx.is_array(x) else x, make_mixture(KEY))
    model = eqx.tree_at(lambda m: m.stacks[0].blocks.sublayers[1].layer, plain, layer)
    (chosen,) = trace_experts(model, TEXT, [1, 2, 3])
    (other,) = trace_experts(model, TEXT, [6, 0])
    assert expert_layers(model) == [chosen.layer] == [0]

    @eqx.filter_jit
    def route(model, source):
        tokens = nn.with_source(nn.positions_like((1, len(TEXT))), nn.Source(source, nn.positions_like(source.shape)))
        return nn.first_experts(model, jnp.asarray([TEXT]), tokens)[0, 0]

    np.testing.assert_array_equal(chosen.experts[:, 0], route(model, jnp.asarray([[1, 2, 3]])))
    assert not np.allclose(chosen.weights, other.weights)
