"""Cached decode against the uncached forward, position by position, for every attention kind."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import KINDS, make_model, quickly, VOCAB

from eqformer import nn


LENGTHS = (14, 9)
SEQ, CHUNK = 14, 4
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ)).astype(np.int32)
ROUNDING = 2e-5  # of logits of up to about 5
LENGTH_DEPENDENT = ("dynamic scaling", "longrope scaling", "dynamic scaling, sliding window", "latent, dynamic scaling")


def uncached(model, ids):
    """Logits of each row by itself, without padding and without a cache; what is beyond a row's length is cut off."""
    logits = jax.lax.map(lambda row: model(row[None])[0][0], ids)
    return [row[:length] for row, length in zip(logits, LENGTHS)]


def cached(model, ids, positions, chunk, capacity):
    """Logits by way of a cache, `chunk` tokens at a time, all rows at once."""

    def read(cache, piece):
        logits, cache = model(piece[0], nn.Tokens(piece[1]), cache)
        return cache, logits

    rows = ids.shape[0]
    pieces = [jnp.moveaxis(x.reshape(rows, -1, chunk), 1, 0) for x in (ids, positions)]
    _, logits = jax.lax.scan(read, model.init_cache(rows, capacity), tuple(pieces))
    return jnp.moveaxis(logits, 0, 1).reshape(rows, -1, VOCAB)


def padded(to):
    """Ids and positions of both rows, at the left of rows of `to` tokens."""
    places = np.broadcast_to(np.arange(to), (2, to))
    ids = np.pad(IDS, ((0, 0), (0, to - SEQ)))
    return jnp.asarray(ids), jnp.asarray(np.where(places < np.array(LENGTHS)[:, None], places, -1).astype(np.int32))


def every_way(model):
    ids, positions = padded(SEQ)
    forgetful = positions.at[:, 5].set(-1)  # the token of position 5 is never stored
    steps = cached(model, jnp.tile(ids, (2, 1)), jnp.concatenate([positions, forgetful]), 1, SEQ)
    return dict(
        uncached=uncached(model, ids),
        whole=cached(model, *padded(SEQ), SEQ, 20),
        chunks=cached(model, *padded(16), CHUNK, 20),
        steps=steps[:2],
        forgetful=steps[2:],
    )


def difference(logits, references, first=0):
    return max(
        np.abs(np.asarray(logits[row, first : len(reference)]) - np.asarray(reference[first:])).max()
        for row, reference in enumerate(references)
    )


# What others of these hold too, one by one.
FOR_THE_GRID = {
    *("latent", "latent with biases", "latent, sliding window", "latent without rotary", "sinks, sliding window"),
    *("latent, dynamic scaling", "longrope scaling", "dynamic scaling", "local and global", "sliding window"),
    *("multi-head", "multi-query", "query and key norm, gate", "sliding window, few slots"),
    *("local and global, few slots", "grouped-query", "learned positions"),
}


def wide(kinds):
    """The kinds, some of them for the grid alone."""
    return [pytest.param(kind, marks=pytest.mark.grid if kind in FOR_THE_GRID else ()) for kind in kinds]


@pytest.mark.parametrize("kind", wide([kind for kind in KINDS if kind not in LENGTH_DEPENDENT]))
def test_cached_logits_are_the_uncached_ones(kind):
    logits = quickly(every_way, make_model(kind))
    for way in ("whole", "chunks", "steps"):
        assert difference(logits[way], logits["uncached"]) < ROUNDING, way
    # A cache that forgets one token is found out.
    assert difference(logits["forgetful"], logits["uncached"], first=6) > 100 * ROUNDING


def test_a_window_matters():
    """The sliding-window models differ from the same weights without a window, beyond the window only."""
    model = make_model("sliding window")
    wide = eqx.tree_at(lambda m: m.stacks[0].blocks.mixer.layer.mask, model, nn.causal())
    narrow, wide = (np.asarray(quickly(lambda m: m(jnp.asarray(IDS))[0][0], m)) for m in (model, wide))
    np.testing.assert_allclose(narrow[:5], wide[:5], atol=ROUNDING)
    assert np.all(np.abs(narrow - wide)[5:].max(-1) > 100 * ROUNDING)


def layer_by_layer(model, ids):
    """What one token at a time must give where frequencies depend on the length, without a cache.

    Each layer reads every prefix of its inputs, and of what it makes only each prefix's last token is passed on: the
    vector that this token had when it was the newest.
    """
    (stack,) = model.stacks
    count = ids.shape[0]
    x, places = model.embedding(ids), jnp.arange(count, dtype=jnp.int32)
    positions = jnp.where(places <= places[:, None], places, -1)
    for number in range(len(stack)):
        after = stack[number](jnp.broadcast_to(x, (count, *x.shape)), nn.Tokens(positions))[0]
        x = after[places, places]
    return model.unembed(model.norm(x))


def ways_by_length(model):
    """One row, read in each way."""
    ids, positions = (x[:1] for x in padded(SEQ))
    places = jnp.arange(SEQ, dtype=jnp.int32)
    prefixes = jnp.where(places <= places[:, None], places, -1)
    uncached = model(jnp.broadcast_to(ids[0], (SEQ, SEQ)), nn.Tokens(prefixes))[0]
    return dict(
        layers=layer_by_layer(model, ids[0]),
        prefixes=uncached[places, places],
        uncached=uncached[-1],
        steps=cached(model, ids, positions, 1, 20)[0],
        whole=cached(model, ids, positions, SEQ, 20)[0],
    )


@pytest.mark.grid
@pytest.mark.parametrize("kind", wide(LENGTH_DEPENDENT))
def test_frequencies_that_depend_on_the_length(kind):
    logits = {way: np.asarray(x) for way, x in quickly(ways_by_length, make_model(kind)).items()}
    np.testing.assert_allclose(logits["whole"], logits["uncached"], atol=ROUNDING)
    np.testing.assert_allclose(logits["steps"], logits["layers"], atol=ROUNDING)
    # Deeper than one layer no cache gives the logits of each prefix read afresh, nor those of the whole text: vectors
    # of earlier tokens were made when the text was shorter. Up to the original length it does.
    assert np.abs(logits["steps"] - logits["prefixes"])[8:].max() > 100 * ROUNDING
    assert np.abs(logits["steps"] - logits["uncached"]).max() > 100 * ROUNDING
    np.testing.assert_allclose(logits["steps"][:5], logits["prefixes"][:5], atol=ROUNDING)


@pytest.mark.grid
def test_in_a_single_layer_each_prefix_read_afresh_is_met_at_any_length():
    model = make_model("dynamic scaling", layers=1)
    logits = {way: np.asarray(x) for way, x in quickly(ways_by_length, model).items()}
    np.testing.assert_allclose(logits["steps"], logits["prefixes"], atol=ROUNDING)
    assert np.abs(logits["steps"] - logits["uncached"]).max() > 100 * ROUNDING


@pytest.mark.by_default("latent")
@pytest.mark.parametrize("kind", ["grouped-query", "latent"])
def test_tokens_beyond_the_capacity_turn_their_row_to_nan(kind):
    ids, positions = padded(SEQ)
    logits = np.asarray(quickly(lambda model: cached(model, ids, positions, 1, 9), make_model(kind)))
    assert np.isfinite(logits[:, :9]).all()
    assert np.isnan(logits[0, 9:]).all()
    assert np.isfinite(logits[1, 9:]).all()  # the row of nine tokens never overflows


@pytest.mark.quick
def test_a_rolling_cache_holds_its_window_alone():
    model = make_model("local and global")
    local, whole = model.init_cache(2, 20)[0]
    assert local.keys.shape == (2, 2, 2, 3, 8) and local.rolling
    assert whole.keys.shape == (2, 2, 2, 20, 8) and not whole.rolling
