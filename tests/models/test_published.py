"""Published families: each tiny configuration of transformers loads, gives its logits, and goes back out."""

import json
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, LENGTH, weight
from safetensors.numpy import load_file, save_file

from eqformer import models, nn


FIXTURES = Path(__file__).parents[1] / "fixtures"
TOLD = json.loads((FIXTURES / "families.json").read_text())
run = eqx.filter_jit(lambda model, ids: model(ids)[0])


@pytest.fixture(scope="module")
def logits():
    with np.load(FIXTURES / "families.npz") as file:
        return dict(file)


def write(folder: Path, name: str) -> dict[str, np.ndarray]:
    """A case's folder, as transformers writes it."""
    arrays = {key: weight(key, shape) for key, shape in TOLD[name]["shapes"].items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TOLD[name]["config"]))
    return arrays


def close(got, want, tolerance=2e-5):
    return np.max(np.abs(np.asarray(got) - want)) <= tolerance * np.std(want)


@pytest.mark.parametrize("name", TOLD)
def test_a_published_model_gives_its_logits_and_goes_back_out(name, logits, tmp_path):
    arrays = write(tmp_path, name)
    model, ids = models.load(tmp_path), jnp.asarray(ids_of(TOLD[name]["config"]["vocab_size"]), jnp.int32)
    found = run(model, ids)
    assert close(found, logits[name]) and not close(found, logits[name][:, ::-1], 1e-2)
    numbers = models.read_numbers(tmp_path)
    models.save(model, numbers, tmp_path / "back", shard_bytes=20_000)
    assert models.read_numbers(tmp_path / "back") == numbers
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    back = {key: array for file in files for key, array in load_file(file).items()}
    assert len(files) > 1 and set(back) == set(arrays)
    assert all(np.array_equal(back[key], array) for key, array in arrays.items())


@pytest.mark.grid
@pytest.mark.parametrize("name", TOLD)
def test_cached_decoding_gives_its_logits(name, logits, tmp_path):
    write(tmp_path, name)
    model, ids = models.load(tmp_path), jnp.asarray(ids_of(TOLD[name]["config"]["vocab_size"]), jnp.int32)
    step = eqx.filter_jit(lambda model, ids, places, cache: model(ids, nn.Tokens(places), cache))
    cache, found = model.init_cache(2, LENGTH), []
    for place in range(LENGTH):
        one, cache = step(model, ids[:, place : place + 1], jnp.full((2, 1), place, jnp.int32), cache)
        found.append(one)
    assert close(jnp.concatenate(found, axis=1), logits[name])
