"""Captured values equal transformers' `output_hidden_states` and `output_attentions`, for six families."""

import json
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, weight
from inside_cases import layer_paths
from safetensors.numpy import save_file

from eqformer import models
from eqformer.interpretability import capture


FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = json.loads((FIXTURES / "families.json").read_text())
with np.load(FIXTURES / "inside.npz") as file:
    EXPECTED = dict(file)
CASES = sorted({name.split("/")[0] for name in EXPECTED})


def load(folder: Path, case: str, prefix: str = ""):
    """Write a case's folder as transformers writes it, with weights by their names behind a prefix, and load it."""
    arrays = {key: weight(prefix + key, shape) for key, shape in RECORDED[case]["shapes"].items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RECORDED[case]["config"]))
    return models.load(folder)


def published_values(model, ids):
    """The model's values in transformers' order: the input of each layer and the norm's output; attention weights."""
    layers = layer_paths(model)
    streams, weights = (
        [f"{layer}.input" for layer in layers],
        [f"{layer}.sublayers[0].layer.core.weights" for layer in layers],
    )
    captured = eqx.filter_jit(capture(model, [*streams, "norm", *weights]))(ids)
    return jnp.stack([captured[path] for path in (*streams, "norm")]), jnp.stack([captured[path] for path in weights])


def row_of(case: str):
    """The tokens that `make_inside.py` gave the case's model."""
    return ids_of(RECORDED[case]["config"]["vocab_size"])[:1, : EXPECTED[f"{case}/hidden"].shape[2]]


def check_values(case: str, model, expected_hidden, expected_attention):
    hidden, attention = published_values(model, jnp.asarray(row_of(case), jnp.int32))
    tolerance = max(2e-5, 2 * RECORDED[case]["rounding"])
    for index, (values, expected) in enumerate(zip(hidden, expected_hidden, strict=True)):
        assert np.max(np.abs(values - expected)) <= tolerance * np.max(np.abs(expected)), index
    np.testing.assert_allclose(attention, expected_attention, atol=tolerance)
    assert np.max(np.abs(hidden[1] - expected_hidden[2])) > 0.1  # layers differ
    assert np.max(np.abs(attention[0] - expected_attention[1])) > 0.01


@pytest.mark.by_default("gemma2 odd")
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_attentions_are_those_of_transformers(case, tmp_path):
    check_values(case, load(tmp_path, case), EXPECTED[f"{case}/hidden"], EXPECTED[f"{case}/attention"])


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_installed_transformers(case, tmp_path):
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model = load(tmp_path, case, "fresh ")
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with torch.no_grad():
        ids, asked = torch.tensor(row_of(case)), {"output_hidden_states": True, "output_attentions": True}
        output = published(ids, use_cache=False, **asked)
    check_values(case, model, *(torch.stack(values).numpy() for values in (output.hidden_states, output.attentions)))


def test_six_families_are_compared():
    assert len({case.split()[0] for case in CASES}) == 6
