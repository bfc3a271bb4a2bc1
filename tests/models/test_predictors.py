"""Predictors for multi-token prediction: loaded on request, equal to their paper's formulas, and saved again."""

import json
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import weight
from haste import same_trees
from safetensors.numpy import load_file, save_file
from test_published import RECORDED, write

from eqformer import generation, models, nn
from eqformer.parallel import make_mesh, Plan, ShardedModel


# Of each case: its predictor's arrays beside the layer (the embedding's norm, the hidden vector's, the matrix, the
# last norm), what these names begin with, what the layer's do, and what is added to norms' scales.
BEHIND = ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "model.layers.{depth}.", "model.layers.{depth}.", 0.0
BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.", "mtp.layers.0.", 1.0
FORMS: dict[str, Any] = dict.fromkeys(("qwen3_next plain", "qwen3_5_text plain", "qwen3_5_moe_text plain"), BESIDE)
FORMS |= dict.fromkeys(("deepseek_v3 plain", "glm4_moe plain"), BEHIND)
FORMS |= dict.fromkeys(("deepseek_v32 chosen keys", "glm_moe_dsa chosen keys"), BEHIND)
WIDE = [name if name == "qwen3_5_text plain" else pytest.param(name, marks=pytest.mark.grid) for name in FORMS]
IDS = np.random.default_rng(0).integers(1, 61, (2, 9)).astype(np.int32)


def names_of(case: str) -> tuple[tuple[str, ...], str, str, float]:
    """What `FORMS` has of a case, with its number of layers put in."""
    names, prefix, layer, offset = FORMS[case]
    depth = RECORDED[case]["config"]["num_hidden_layers"]
    return names, prefix.format(depth=depth), layer.format(depth=depth), offset


def store(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def folder_of(folder: Path, case: str) -> dict[str, np.ndarray]:
    """A case's folder with a predictor, whose layer is like the model's last."""
    names, prefix, layer, _ = names_of(case)
    folder.mkdir(exist_ok=True)
    arrays = write(folder, case)
    last = f"model.layers.{RECORDED[case]['config']['num_hidden_layers'] - 1}."
    embed = arrays["model.norm.weight"].size
    shapes = {layer + key.removeprefix(last): its.shape for key, its in arrays.items() if key.startswith(last)}
    shapes |= {f"{prefix}{name}.weight": (embed, 2 * embed) if name == names[2] else (embed,) for name in names}
    arrays |= {name: weight(name, shape) for name, shape in shapes.items()}
    if FORMS[case] is BEHIND:  # which publishes what is shared once more
        copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
        arrays |= {f"{prefix}{name}.weight": arrays[own] for name, own in copies.items()}
    store(folder, arrays)
    return arrays


def alone(folder: Path, case: str, arrays: dict[str, np.ndarray]) -> nn.Transformer:
    """An ordinary model of the same table and head whose only layer is the predictor's."""
    folder.mkdir()
    layer, said = names_of(case)[2], json.loads((folder.parent / "in" / "config.json").read_text())
    said |= {"num_hidden_layers": 1} | ({"first_k_dense_replace": 0} if FORMS[case] is BEHIND else {})
    kinds = ("layer_types", "mlp_layer_types", "indexer_types")
    said |= {name: said[name][-1:] for name in kinds if name in said}
    own = {key: its for key, its in arrays.items() if "layers." not in key and not key.startswith("mtp.")}
    kept = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    names = {key: key.removeprefix(layer) for key in arrays if key.startswith(layer)}
    own |= {f"model.layers.0.{name}": arrays[key] for key, name in names.items() if name.startswith(kept)}
    store(folder, own)
    (folder / "config.json").write_text(json.dumps(said))
    return models.load(folder)


@eqx.filter_jit
def predicted(model, ids):
    """Logits of the tokens from the third on, and the model's vectors before each second."""
    hidden = model.encode(ids)[0][:, :-1]
    tokens = nn.Tokens(jnp.broadcast_to(jnp.arange(1, ids.shape[1], dtype=jnp.int32), ids[:, 1:].shape))
    return model.unembed(model.predict(ids[:, 1:], hidden, tokens, None)[0]), hidden


@pytest.mark.parametrize("case", WIDE)
def test_a_predictor_is_that_of_the_paper(case, tmp_path):
    """Equations 21 and 23 in float64 from the published arrays, 22 by an ordinary model with this layer."""
    (one, two, matrix, last), prefix, _, offset = names_of(case)
    arrays = folder_of(tmp_path / "in", case)
    found, hidden = map(np.asarray, predicted(models.load(tmp_path / "in", predictor=True), jnp.asarray(IDS)))
    layer, eps = alone(tmp_path / "alone", case, arrays), RECORDED[case]["config"]["rms_norm_eps"]
    of = lambda name: arrays[f"{prefix}{name}.weight"].astype(np.float64)
    run = eqx.filter_jit(lambda x: layer.stacks[0](x)[0])

    def normed(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (offset + scale)

    def wanted(ids, matrix):
        embedded = arrays["model.embed_tokens.weight"].astype(np.float64)[ids]
        both = np.concatenate([normed(embedded, of(one)), normed(hidden.astype(np.float64), of(two))], axis=-1)
        after = np.asarray(run(jnp.asarray((both @ matrix.T).astype(np.float32)))).astype(np.float64)
        return normed(after, of(last)) @ arrays["lm_head.weight"].astype(np.float64).T

    np.testing.assert_allclose(found, wanted(IDS[:, 1:], of(matrix)), atol=2e-5)
    # The controls: each token's own embedding in the place of the next one's, and the two sides exchanged.
    for other in (wanted(IDS[:, :-1], of(matrix)), wanted(IDS[:, 1:], np.roll(of(matrix), 24, axis=1))):
        assert np.abs(found - other).max() > 0.01


@pytest.mark.parametrize("case", WIDE)
def test_a_model_goes_back_out_with_its_predictor(case, tmp_path):
    arrays, into = folder_of(tmp_path / "in", case), tmp_path / "in"
    model = models.load(into, predictor=True)
    config = models.read_config(into)
    models.save(model, tmp_path / "like", like=into)
    models.save(model, tmp_path / "config", config=config)
    models.save(model, tmp_path / "whole", like=into, whole=True)
    for name in ("like", "config", "whole"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == arrays.keys() and all(np.array_equal(found[key], its) for key, its in arrays.items())
        assert same_trees(models.load(tmp_path / name, predictor=True), model)
    if FORMS[case] is BEHIND:
        assert json.loads((tmp_path / "config" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.warns(UserWarning, match=rf"left unread: {re.escape(names_of(case)[1])} "):
        assert models.load(into).predictor is None


@pytest.mark.grid
def test_predictors_that_are_not_there_or_not_the_models_own(tmp_path):
    arrays, into = folder_of(tmp_path / "in", "deepseek_v3 plain"), tmp_path / "in"
    store(into, arrays | {"model.layers.3.embed_tokens.weight": arrays["lm_head.weight"]})
    with pytest.raises(
        ValueError, match=r"shares the model's table and head, but model.layers.3.embed_tokens.weight differs"
    ):
        models.load(into, predictor=True)
    without = {name: its for name, its in arrays.items() if "hnorm" not in name}
    store(into, without)
    with pytest.raises(ValueError, match=r"not in the folder: model.layers.3.hnorm.weight \(1\)"):
        models.load(into, predictor=True)
    write(tmp_path, "llama plain")
    for make in (
        lambda: models.load(tmp_path, predictor=True),
        lambda: models.build("llama-byte-1m", predictor=True, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="the family llama has no predictor, .*; only .*deepseek_v3,"):
            make()


@pytest.mark.grid
def test_a_predictor_is_loaded_under_a_plan(tmp_path):
    folder_of(tmp_path / "in", "glm4_moe plain")
    plan = Plan(make_mesh(fsdp=4, tensor=2), zero=3, smallest=1)
    given: dict[str, Any] = {"max_new_tokens": 4, "key": jax.random.key(0)}
    alone: Any
    split: Any
    alone, split = (models.load(tmp_path / "in", plan=its, predictor=True) for its in (None, plan))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (split, alone))))
    assert not split.predictor.merge.weight.sharding.is_fully_replicated
    model = ShardedModel(split, plan)
    assert np.array_equal(generation.generate(model, IDS, **given).ids, generation.generate(alone, IDS, **given).ids)
