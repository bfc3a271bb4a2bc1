"""An encoder's packed rows, and that nothing is decoded with it."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from test_published import close, write

from eqformer import models, nn


def test_packed_rows_of_an_encoder_are_as_each_alone_and_no_cache_is_made(tmp_path):
    """Ten and fourteen tokens in one row, and each in a row of its own: windows of seven tokens, and whole rows."""
    write(tmp_path, "modernbert biased")
    model = models.load(tmp_path)
    ids = np.random.default_rng(0).integers(1, 61, (1, 24)).astype(np.int32)
    fill = lambda values, empty: np.concatenate([values, np.full(24 - len(values), empty, np.int32)])
    rows = np.stack([ids[0], fill(ids[0, :10], 0), fill(ids[0, 10:], 0)])
    one, two = np.arange(10), np.arange(14)
    places = np.stack([np.concatenate([one, two]), fill(one, -1), fill(two, -1)]).astype(np.int32)
    segments = np.array([[1] * 10 + [2] * 14, [1] * 24, [2] * 24], np.int32)
    run = eqx.filter_jit(lambda segments: model(jnp.asarray(rows), nn.Tokens(jnp.asarray(places), segments))[0])
    logits = run(jnp.asarray(segments))
    assert close(logits[0, :10], np.asarray(logits[1, :10])) and close(logits[0, 10:], np.asarray(logits[2, :14]))
    together = run(jnp.ones((3, 24), jnp.int32))  # one document
    assert not close(together[0, :10], np.asarray(logits[1, :10]), 1e-2)
    with pytest.raises(ValueError, match=r"Attention.init_cache: with Mask\(is_causal=False.* token sees later tokens"):
        model.init_cache(1, 24)
