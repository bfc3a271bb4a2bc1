"""Adapters of peft: they load into each family with peft's logits, and go back out as they were."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, weight
from safetensors.numpy import load_file, save_file
from test_published import close, run, write

from eqformer import models, nn


FIXTURES = Path(__file__).parents[1] / "fixtures"
TOLD = json.loads((FIXTURES / "adapters.json").read_text())
CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def logits():
    with np.load(FIXTURES / "adapters.npz") as file:
        return dict(file)


def adapter(folder: Path, name: str, **changes: Any) -> dict[str, np.ndarray]:
    """The case's adapter, as peft writes it but for `changes` of its configuration."""
    arrays = {key: weight(key, shape) for key, shape in TOLD[name]["shapes"].items()}
    folder.mkdir()
    save_file(arrays, folder / ARRAYS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(TOLD[name]["config"] | changes))
    return arrays


def based(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """The case's model without the adapter, its numbers, and tokens."""
    write(folder, name)
    ids = jnp.asarray(ids_of(json.loads((folder / "config.json").read_text())["vocab_size"]), jnp.int32)
    return models.load(folder), models.read_numbers(folder), ids


@pytest.mark.parametrize("name", TOLD)
def test_an_adapter_gives_pefts_logits_and_goes_back_out(name, logits, tmp_path):
    model, numbers, ids = based(tmp_path, name)
    arrays = adapter(tmp_path / "adapter", name)
    adapted = models.load_adapter(model, numbers, tmp_path / "adapter")
    assert close(run(adapted, ids), logits[name])
    assert not close(run(model, ids), logits[name], 1e-2)
    models.save_adapter(adapted, numbers, tmp_path / "back")
    again = models.load_adapter(model, numbers, tmp_path / "back")
    assert eqx.tree_equal(nn.lora_factors(again), nn.lora_factors(adapted), rtol=1e-6)
    back = load_file(tmp_path / "back" / ARRAYS)
    # Layers without factors come back as zeros, and factors narrower than other layers' as wide as those.
    assert set(arrays) <= set(back)
    same = [key for key, array in arrays.items() if array.shape == back[key].shape]
    assert same and all(np.allclose(back[key], arrays[key], 1e-6, 0) for key in same if "lora_A" in key)
    assert not any(array.any() for key, array in back.items() if key not in arrays)
