"""Counts of parameters and FLOPs against counts by hand."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn
from eqformer.models import build, GPT2Config, JAXformerConfig, LlamaConfig, SDARConfig, shapes as models_shapes
from eqformer.nn import block_causal, causal, chunked, full, positions_like, sliding_window
from eqformer.planning import flops_per_token, parameter_count, topology, visible_keys
from eqformer.recipes import plan_training_step, Recipe


NUMBERS = LlamaConfig(vocab=100, embed=16, layers=3, heads=4, kv_heads=2, mlp=40)
KEY = jax.random.key(0)


def shapes_of(numbers):
    return eqx.filter_eval_shape(lambda key: build(numbers, key=key), jax.random.key(0))


def test_a_llama_by_hand():
    model = shapes_of(NUMBERS)
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    products = 3 * (attention + 3 * 16 * 40)
    assert parameter_count(model) == products + 3 * 2 * 16 + 16 + 2 * 100 * 16
    assert parameter_count(model, embeddings=False) == products + 3 * 2 * 16 + 16
    seq = 10
    linear = 2 * (products + 16 * 100)
    scores = 3 * 2 * 2 * 16  # operations a visible key: three layers, scores and sums, all heads' channels
    assert flops_per_token(model, seq, backward=False, attention="full") == linear + scores * seq
    assert flops_per_token(model, seq, backward=False) == linear + scores * (seq + 1) / 2
    assert flops_per_token(model, seq) == 3 * (linear + scores * (seq + 1) / 2)


def test_frozen_weights_have_no_gradient():
    """Under LoRA four operations a weight and token, not six; factors, scores and whole models have all."""
    plain = shapes_of(NUMBERS)
    model = eqx.filter_eval_shape(
        lambda: nn.with_lora(build(NUMBERS, key=KEY), [nn.Linear], rank=2, alpha=1.0, key=KEY)
    )
    (of_plain, of_all) = (flops_per_token(each, 10, backward=False) for each in (plain, model))
    factors = of_all - of_plain
    scores = 3 * 2 * 2 * 16 * 11 / 2
    frozen = of_plain - scores
    assert factors > 0
    assert flops_per_token(model, 10, trained=nn.lora_factors) == 2 * frozen + 3 * (factors + scores)
    assert flops_per_token(model, 10) == 3 * of_all


def test_a_gpt2_by_hand():
    model = shapes_of(GPT2Config(vocab=50, embed=8, layers=2, heads=2, max_seq=12))
    layer = 4 * (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 2 * 2 * 8
    assert parameter_count(model) == 2 * layer + 2 * 8 + 50 * 8 + 12 * 8
    products = 2 * (4 * 8 * 8 + 2 * 8 * 32) + 50 * 8
    assert flops_per_token(model, 12, backward=False, attention="full") == 2 * products + 2 * 2 * 2 * 8 * 12


def test_latent_attention_by_hand():
    numbers = JAXformerConfig(vocab=50, embed=8, blocks=3, layers_per_block=2, heads=2, latent=6, rope_dim=4)
    model = shapes_of(numbers)
    shared = 8 * 6 + 6 * 8 + 8 * 6 + 6 * 8 + 6 * 8 + 8 * 8  # down and up for queries, keys and values, then out
    rotated = 6 * 8 + 8 * 4  # two heads of four rotated channels, and the shared key
    products = 3 * (2 * shared + rotated + 2 * 2 * 8 * 32) + 50 * 8
    scores = 3 * 2 * ((8 + 8) + (8 + 8 + 8))  # a layer without rotary, and one with
    assert flops_per_token(model, 9, backward=False, attention="full") == 2 * products + scores * 9


@pytest.mark.parametrize(
    "mask", [causal(), full(), sliding_window(4), sliding_window(40), chunked(4), chunked(7), block_causal(4)]
)
@pytest.mark.parametrize("seq", [1, 4, 11])
def test_visible_keys_is_the_mean_of_the_mask(mask, seq):
    tokens = positions_like((seq,))
    assert visible_keys(mask, seq) == pytest.approx(float(np.asarray(mask(tokens, tokens)).sum()) / seq)
    if mask.block is None:
        assert visible_keys(dataclasses.replace(mask, source=True), seq) == seq + visible_keys(mask, seq)


@pytest.mark.parametrize("seq", [8, 11])
def test_rows_with_noisy_copies_cost_twice_as_much(seq):
    """The visible pairs are counted in the mask's own matrix over a row of copies and tokens."""
    model, mask = nn.with_blocks(shapes_of(NUMBERS), 4), block_causal(4)
    positions = np.tile(np.arange(seq), (1, 2))
    doubled = nn.Tokens(jnp.asarray(positions), jnp.repeat(jnp.asarray([-1, 0]), seq)[None])
    keys = float(np.asarray(mask(doubled, doubled)).sum()) / seq  # of a token and its copy
    channels = 3 * 2 * 4 * 4  # layers, queries and values, heads, channels of a head
    products = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40) + 16 * 100
    expected = 3 * (2 * 2 * products + 2 * keys * channels)
    assert flops_per_token(model, seq, noisy_copies=True) == pytest.approx(expected)
    assert flops_per_token(model, 2 * seq) * 2 > 1.01 * expected  # a plain row of so many tokens sees more keys
    assert flops_per_token(model, seq) == pytest.approx(expected / 2)


def test_a_step_over_noisy_copies_is_planned_by_the_keys_that_they_see():
    """The operations of a plan are those of a text's tokens and copies, not of a text of twice as many tokens."""
    config = SDARConfig(256, 16, 2, 2, 1, 24, head_dim=8, block=4)
    recipe = Recipe(config, data="none", seq=64, batch=2, loss="block-diffusion")
    model = models_shapes(config)
    step = plan_training_step(recipe, model, topology("h100:1"))
    assert recipe.batch_shapes().ids.shape == (2, 128)
    expected = flops_per_token(model, 64, noisy_copies=True) * 2 * 64
    assert step.forecast.operations == pytest.approx(expected)
    assert step.forecast.time.of_model == pytest.approx(expected / topology("h100:1").accelerator.peak("float32"))
    # The control: plain rows of 128 tokens see twice as many keys.
    assert flops_per_token(model, 128) * 2 * 128 > 1.05 * expected


def test_an_unknown_custom_of_counting_is_refused():
    model = shapes_of(LlamaConfig(vocab=10, embed=8, layers=1, heads=2, kv_heads=1, mlp=8))
    with pytest.raises(ValueError, match="give 'half' .* or 'full'"):
        flops_per_token(model, 4, attention="causal")
