"""Weight-stationary layouts in one and two dims, and gathered weights: text and logits equal one device's."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from plan_blocks import Int8Map
from plan_models import filled
from weight_stationary_cases import gathered, logits, palm, PROMPT, ROWS, serial, stationary, step, VOCAB

from eqformer import generation, nn
from eqformer.parallel import make_mesh, SplitNorm
from eqformer.systems import _two_dim, _weight_stationary, WeightStationary


PROMPTS = [[3, 5, 7, 9, 11], [4, 8, 15, 16, 23, 42, 1], [2]]
IDS = put(np.random.default_rng(1).integers(0, VOCAB, (ROWS, PROMPT + 1)), np.int32)


class Made:
    """A model, and its logits after a prompt and after one more token on one device, each when it is asked for."""

    def __init__(self, make):
        self.make = make

    @functools.cached_property
    def model(self):
        """The model."""
        return filled(self.make)

    @functools.cached_property
    def logits(self):
        """Its logits."""
        return logits(self.model, IDS)


@pytest.fixture(scope="module")
def models():
    """Each by its name."""
    return {"palm": Made(palm), "serial": Made(serial)}


def error(got, want) -> float:
    got, want = np.asarray(got), np.asarray(want)
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


CASES = [(2, 4, "heads", "ring")]
ALL = [
    (x, 8 // x, attention, overlap)
    for x in (1, 2, 4, 8)
    for attention in ("rows", "heads")
    for overlap in ("none", "ring", "bidirectional")
]


@pytest.mark.grid
@pytest.mark.parametrize("x,y,attention,overlap", CASES + ALL)
def test_logits_are_one_devices(models, x, y, attention, overlap):
    """Of the prompt's next token and of the one after it, out of the cache."""
    model, want = models["palm"].model, models["palm"].logits
    assert error(logits(stationary(model, x, y, attention=attention, overlap=overlap), IDS), want) < 2e-6


@pytest.mark.grid
@pytest.mark.parametrize("x", [1, 2, 8])
@pytest.mark.parametrize("overlap", ["ring", "none"])
def test_blocks_whose_layers_follow_each_other(models, x, overlap):
    """With biases, grouped keys, norms of queries, a window, learned positions, a scaled sum and a head of its own."""
    model, want = models["serial"].model, models["serial"].logits
    assert error(logits(stationary(model, x, 8 // x, overlap=overlap), IDS), want) < 2e-6


@pytest.mark.grid
def test_two_norms_side_by_side(models):
    """A parallel block whose layers read norms of their own shares no gather."""
    model = models["serial"].model
    model = eqx.tree_at(lambda m: m.stacks[0].blocks, model, as_parallel(model.stacks[0].blocks))
    assert error(logits(stationary(model, 4, 2), IDS), logits(model, IDS)) < 2e-6


def as_parallel(block):
    return nn.ParallelResidual(
        tuple(nn.Residual(part.layer, part.norm, scale=0.7) for part in (block.mixer, block.feed_forward))
    )


def write(model):
    options = {"max_new_tokens": 12, "log_probabilities": True, "key": jax.random.key(1), "end_of_text": 5}
    return generation.generate(model, PROMPTS, **options)


@pytest.mark.grid
@pytest.mark.parametrize("split", [stationary, gathered])
def test_text_is_one_devices(models, split):
    """Three rows of unequal lengths: where rows are split they are filled up, and finished ones are left alone."""
    model = models["palm"].model
    alone = write(model)
    assert alone.log_probabilities is not None and len(set(alone.ids[0].tolist())) > 8
    text = write(split(model, 2, 4))
    assert np.array_equal(text.ids, alone.ids) and np.array_equal(text.lengths, alone.lengths)
    np.testing.assert_allclose(text.log_probabilities, alone.log_probabilities, atol=2e-5)  # type: ignore


@pytest.mark.quick
def test_each_device_keeps_its_share(models):
    """A fraction of every matrix, but for key and value, which one axis splits; keys of its own rows, or one head's."""
    model = models["palm"].model
    mesh = make_mesh(fsdp=2, tensor=4)
    specs = WeightStationary.parameter_specs(model, mesh)
    blocks = specs.stacks[0].blocks
    assert tuple(blocks.mixer.layer.query.weight) == (None, "tensor", None, "fsdp")
    assert tuple(blocks.mixer.layer.key.weight) == (None, None, None, "fsdp")
    assert tuple(blocks.mixer.layer.output.weight) == (None, "fsdp", "tensor", None)
    assert tuple(blocks.feed_forward.layer.down.weight) == (None, "fsdp", "tensor")
    for attention, share in ("rows", 8), ("heads", 1):
        keys = stationary(model, 2, 4, attention=attention).init_cache(ROWS, 16)[0].keys
        assert keys.addressable_shards[0].data.size * share == 5 * ROWS * 16 * 8


@pytest.mark.grid
@pytest.mark.parametrize("what", ["order of heads", "sum over fsdp", "norm over fsdp", "own parts"])
def test_controls(models, monkeypatch, what):
    """Without any one of these the comparison fails."""
    if what == "sum over fsdp":
        unsummed = lambda x, weight, axis, **_: _two_dim.take_local_slice(_two_dim._multiply(x, weight), axis, -1)
        monkeypatch.setattr(_two_dim, "matmul_reduce_scatter", unsummed)
    elif what == "norm over fsdp":
        monkeypatch.setattr(_weight_stationary, "SplitNorm", lambda norm, axes: SplitNorm(norm, "tensor"))
    elif what == "order of heads":
        monkeypatch.setattr(_two_dim, "HEADS", _two_dim.STREAM)
    else:
        first = lambda x, axis, dim: jax.lax.slice_in_dim(x, 0, x.shape[dim] // jax.lax.axis_size(axis), axis=dim)
        monkeypatch.setattr(_two_dim, "take_local_slice", first)
    model, want = models["serial"].model, models["serial"].logits
    traced_anew = eqx.filter_jit(lambda model, ids: step(model, ids))
    assert error(traced_anew(stationary(model, 2, 4), IDS), want) > 1e-3


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda m: stationary(m, 2, 4, attention="keys"), r"attention='keys'\): choose one of 'rows', 'heads'"),
        (lambda m: stationary(m, 2, 4, overlap="both"), r"overlap='both'\): choose one of 'none'"),
        (lambda m: WeightStationary(m, make_mesh(replica=2, tensor=4)), r"the mesh also has \{'replica': 2\}"),
        (
            lambda m: stationary(eqx.tree_at(lambda m: m.embedding.weight, m, jnp.ones((63, 64))), 2, 4),
            "vocab=63, which 8 devices do not split evenly",
        ),
        (
            lambda m: stationary(
                eqx.tree_at(lambda m: m.stacks[0].blocks.norm, m, None, is_leaf=lambda x: x is None), 2, 4
            ),
            "must read its input through a norm of eqformer.nn",
        ),
        (
            lambda m: stationary(
                eqx.tree_at(
                    lambda m: m.stacks[0].blocks.mixer.layer.scores.sinks, m, jnp.ones(8), is_leaf=lambda x: x is None
                ),
                2,
                4,
            ),
            "a gate, sinks or ALiBi",
        ),
        (
            lambda m: stationary(of_block(m, lambda b: nn.Block(b.mixer)), 2, 4),
            "a block has the sublayers Residual; the layout is made for two",
        ),
        (
            lambda m: stationary(of_block(m, lambda b: nn.SuperBlock((b,))), 2, 4),
            "nn.Block or nn.ParallelResidual",
        ),
        (
            lambda m: stationary(
                of_block(m, lambda b: nn.Block(nn.ParallelResidual((b.mixer,)), b.feed_forward)), 2, 4
            ),
            "a block has the sublayers ParallelResidual, Residual; the layout is made for two",
        ),
        (
            lambda m: stationary(of_block(m, scaled_input), 2, 4),
            "mixer has an input_scale, which this layout does not support",
        ),
        (
            lambda m: stationary(of_block(m, unlike_scales), 2, 4),
            "layers are scaled by 0.5 and None, but the layout sums their outputs",
        ),
        (
            lambda m: stationary(of_block(m, lambda b: dataclasses.replace(b, sum_norm=b.norm)), 2, 4),
            "a block has sum_norm; the layout is made for blocks that normalize only the inputs",
        ),
        (
            lambda m: stationary(of_block(m, lambda b: nn.Block(normed(b.mixer, b), normed(b.feed_forward, b))), 2, 4),
            "a block has mixer.output_norm; the layout is made for blocks that normalize only the inputs",
        ),
    ],
)
def test_what_does_not_fit(models, make, message):
    with pytest.raises(ValueError, match=message):
        make(models["palm"].model)


def of_block(model, change):
    return eqx.tree_at(lambda m: m.stacks[0].blocks, model, change(model.stacks[0].blocks))


def unlike_scales(block):
    return dataclasses.replace(block, branches=(dataclasses.replace(block.mixer, scale=0.5), block.feed_forward))


def scaled_input(block):
    return dataclasses.replace(block, branches=(dataclasses.replace(block.mixer, input_scale=0.5), block.feed_forward))


def normed(sublayer, block):
    return dataclasses.replace(sublayer, norm=block.norm, output_norm=block.norm)


@pytest.mark.grid
def test_maps_with_factors_and_maps_of_eight_bits(models):
    """Matrices are put together of the slices that a device holds."""
    model = with_factors_and_eight_bits(models["serial"].model)
    want = logits(model, IDS)
    assert error(logits(stationary(model, 2, 4), IDS), want) < 2e-6 < error(models["serial"].logits, want)


@eqx.filter_jit
def with_factors_and_eight_bits(model):
    model = nn.with_lora(model, [nn.Attention, "up", "head"], rank=2, key=jax.random.key(2))
    linears: Callable[[nn.Transformer], list[Any]] = lambda m: list(nn.linear_maps(m))
    drawn = lambda m: [linear.weight for linear in linears(m) if linear.inputs == ("rank",)]
    model = eqx.tree_at(drawn, model, [0.2 + x for x in drawn(model)])
    return eqx.tree_at(lambda m: m.stacks[0].blocks.feed_forward, model, replace_fn=lambda m: nn.map_linears(of_8, m))


def of_8(linear):
    return linear if "rank" in linear.sizes else Int8Map.of(linear)


def test_packed_rows_are_refused(models):
    """As by one device's caches; without segments the same tokens are read."""
    model = models["palm"].model
    tokens = nn.positions_like(IDS.shape)
    packed = dataclasses.replace(tokens, segments=jnp.zeros(IDS.shape, jnp.int32))
    encode = lambda model, tokens: model.encode(IDS, tokens, model.init_cache(ROWS, 16))[0]
    for split in (model, stationary(model, 2, 4), gathered(model, 2, 4)):
        assert eqx.filter_eval_shape(encode, split, tokens).shape == (*IDS.shape, 64)
        with pytest.raises(ValueError, match="a row of a cache keeps one document"):
            eqx.filter_eval_shape(encode, split, packed)


@pytest.mark.grid
def test_one_key_head_alone_is_held_whole(models):
    with pytest.raises(ValueError, match="there are 2; take attention='rows'"):
        stationary(models["serial"].model, 2, 4, attention="heads")
