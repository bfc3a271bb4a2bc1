"""Predictors (multi-token prediction) in quantized folders, as codes and decoded, also in models over devices."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from format_cases import CASES
from format_folders import change, same_bits, SINGLE
from test_predictors import folder_of, IDS, predicted

from eqformer import generation, models, nn
from eqformer.models._folder import Folder
from eqformer.parallel import make_mesh, Plan, ShardedModel


GIVEN: dict[str, Any] = {"max_new_tokens": 12, "transforms": generation.sampling(temperature=0)}
GIVEN |= {"key": jax.random.key(0)}


def in_fewer_bits(folder: Path, case: str, name: str) -> dict[str, np.ndarray]:
    """A case's folder with a predictor, of which each map of layers, and that which merges, is in a format."""
    stored, rng = {}, np.random.default_rng(1)
    for key, array in folder_of(folder, case).items():
        is_map = key.endswith("_proj.weight") or key == "mtp.fc.weight"
        parts = CASES[name].make(rng, *array.shape)[0] if is_map else {".weight": array}
        stored |= {key.removesuffix(".weight") + end: its for end, its in parts.items()} if is_map else {key: array}
    (folder / SINGLE).unlink()
    said = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(f'{said}, "quantization_config": {{}}}}')
    change(folder, stored, **CASES[name].said)
    return stored


@pytest.mark.grid
@pytest.mark.parametrize("case", ["glm4_moe plain", "qwen3_5_text plain"])
@pytest.mark.parametrize("name", ["fp8 blocks"])
def test_a_predictor_stays_quantized_with_its_model(case, name, tmp_path):
    """Logits and proposals of the decoded model, codes where its maps are, and the folder as it came."""
    stored = in_fewer_bits(tmp_path / "in", case, name)
    load = lambda weights, **more: models.load(
        tmp_path / "in", weights=weights, predictor=True, dtype="float32", **more
    )
    decoded, quantized = load("decoded"), load("quantized")
    quantized_maps = [
        linear for linear in nn.linear_maps(quantized.predictor) if isinstance(linear, nn.QuantizedLinear)
    ]
    assert (
        quantized.predictor is not None
        and isinstance(quantized.predictor.merge, nn.QuantizedLinear)
        and len(quantized_maps) > 4
    )
    for from_codes, from_decoded in zip(predicted(quantized, IDS), predicted(decoded, IDS), strict=True):
        assert np.array_equal(from_codes, from_decoded)
    spoiled = eqx.tree_at(lambda m: m.predictor.merge.codes, quantized, quantized.predictor.merge.codes ^ 1)
    assert not np.array_equal(predicted(spoiled, IDS)[0], predicted(quantized, IDS)[0])
    models.save(quantized, tmp_path / "out", like=tmp_path / "in", whole=True)
    back = Folder(tmp_path / "out")
    assert back.names == stored.keys() and all(same_bits(back.read_any(key), array) for key, array in stored.items())


@pytest.mark.grid
def test_a_quantized_predictor_drafts(tmp_path):
    """Text of the decoded model without a draft."""
    in_fewer_bits(tmp_path, "glm4_moe plain", "fp8 blocks")
    decoded, quantized = (
        models.load(tmp_path, weights=w, predictor=True, dtype="float32") for w in ("decoded", "quantized")
    )
    text: Any = generation.generate(quantized, IDS, draft="mtp", draft_tokens=2, **GIVEN)
    assert np.array_equal(text.ids, generation.generate(decoded, IDS, **GIVEN).ids)


@pytest.mark.grid
def test_a_model_that_is_split_drafts_for_itself(tmp_path):
    """`ShardedModel`, and the compiler's own division of a program: tokens and acceptances are one device's."""
    folder_of(tmp_path / "in", "glm4_moe plain")
    plan = Plan(make_mesh(fsdp=4, tensor=2), zero=3, smallest=1)
    alone, split = (models.load(tmp_path / "in", plan=its, predictor=True) for its in (None, plan))
    assert not split.embedding.weight.sharding.is_fully_replicated
    one, *others = (
        generation.generate(model, IDS, draft="mtp", draft_tokens=2, **GIVEN)
        for model in (alone, split, ShardedModel(split, plan))
    )
    for other in others:
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.draft.accepted, other.draft.accepted)  # pyright: ignore[reportOptionalMemberAccess]
