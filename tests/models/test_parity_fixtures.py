"""Tiny models of transformers with weights mapped by hand have the recorded logits."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from parity_helpers import close, FIXTURES, gpt2, llama, run, SETTINGS

from eqformer import nn


@pytest.fixture(scope="module")
def arrays():
    with np.load(FIXTURES / "models.npz") as file:
        return dict(file)


@pytest.mark.by_default("default", "dynamic", "yarn_mscale", "llama3", "longrope")
@pytest.mark.parametrize("name", SETTINGS)
def test_llama_has_the_logits_of_transformers(name, arrays):
    """With every scaling of the rotary frequencies, within the original length and beyond it."""
    # One call for both: the short rows are padded to the long one's length, each row scaled by its own.
    short, long = arrays["ids"], arrays["long_ids"]
    ids, places = np.zeros((3, long.shape[1]), np.int32), np.full((3, long.shape[1]), -1)
    ids[:2, : short.shape[1]], ids[2:] = short, long
    places[:2, : short.shape[1]], places[2] = np.arange(short.shape[1]), np.arange(long.shape[1])
    logits = run(llama(arrays, name), jnp.asarray(ids), nn.Tokens(jnp.asarray(places)))
    assert close(logits[:2, : short.shape[1]], arrays[f"{name}/logits"])
    assert close(logits[2:, -4:], arrays[f"{name}/long_logits"], 1e-4)


def test_the_logits_tell_the_models_apart(arrays):
    plain = SETTINGS["default"]["rope_parameters"]
    unscaled = run(llama(arrays, "default", plain), jnp.asarray(arrays["long_ids"], jnp.int32))[:, -4:]
    for name, settings in SETTINGS.items():
        if name not in ("default", "biased"):
            assert settings["rope_parameters"] == plain or not close(unscaled, arrays[f"{name}/long_logits"], 1e-3)
    assert not close(arrays["tied/logits"], arrays["default/logits"], 1e-3)


def test_gpt2_has_the_logits_of_transformers(arrays):
    model, ids = gpt2(arrays), jnp.asarray(arrays["ids"], jnp.int32)
    assert close(run(model, ids), arrays["gpt2/logits"])
    untold = eqx.tree_at(lambda m: m.positions.weight, model, model.positions.weight[::-1])
    assert not close(run(untold, ids), arrays["gpt2/logits"], 1e-3)
