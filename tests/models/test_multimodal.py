"""Text models within multimodal folders: loaded, saved alone, and saved within the whole folder."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, weight
from format_cases import CASES
from format_folders import same_bits
from haste import same_trees
from safetensors.numpy import load_file, save_file
from test_published import close, FIXTURES, RECORDED as FAMILIES, run

from eqformer import models


RECORDED = json.loads((FIXTURES / "multimodal.json").read_text())
UNREAD = {
    "cohere2_vision": r"model\.multi_modal_projector\. \(4\), model\.vision_tower\. \(32\)\.$",
    "gemma3": r"multi_modal_projector\. \(2\), vision_tower\. \(32\)\.$",
    "gemma4": r"",
    "kimi_k25": r"model\.mm_projector\. \(\d+\), model\.vision_tower\. \(\d+\)\.$",
    "minimax_m3_vl": r"multi_modal_projector\. \(4\), patch_merge_mlp\. \(4\), vision_tower\. \(\d+\)\.$",
    "muse_glimmer": r"model\.vision_adapter\. \(2\), model\.vision_projection\. \(1\), model\.vision_tower\. \(22\)\.$",
    "qwen3_5": r"model\.visual\. \(\d+\)\.$",
    "qwen3_5_moe": r"model\.visual\. \(\d+\)\.$",
    "llama4": r"multi_modal_projector\. \(1\), vision_model\. \(25\)\.$",
    "mistral3": r"multi_modal_projector\. \(4\), vision_tower\. \(11\)\.$",
    "mistral_large4": r"",
    "qwen3_vl_moe": r"model\.visual\. \(27\)\.$",
    "step3p7": r"",
    "qwen3_vl": r"model\.visual\. \(27\)\.$",
}
TEXTS = "language_model.", "model.language_model.", "lm_head."
# The folder of Mistral Large 4 has its publisher's names of arrays, which test_mistral_large4.py compares.
USUAL_NAMES = [name for name in RECORDED if name != "mistral_large4"]
SMALLEST, TIED = "mistral3", "tie_word_embeddings"


def write(folder: Path, name: str, changes: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A case's folder, as transformers writes it, with some attributes of the whole changed, those of None left out."""
    folder.mkdir(exist_ok=True)
    arrays = {key: weight(key, shape) for key, shape in RECORDED[name]["shapes"].items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    said = {key: its for key, its in (RECORDED[name]["config"] | (changes or {})).items() if its is not None}
    (folder / "config.json").write_text(json.dumps(said))
    return arrays


def store(folder: Path, arrays: dict[str, np.ndarray], said: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said))


def loaded(folder: Path, told: str = "are left unread") -> Any:
    with pytest.warns(UserWarning, match=told):
        return models.load(folder)


MULTIMODAL = {
    f"{multimodal.model_type} {family.model_type}": (family, multimodal)
    for family in models.FAMILIES.values()
    for multimodal in family.multimodal
}


def test_every_case_is_of_a_tower():
    assert set(RECORDED) == set(UNREAD) <= {multimodal.model_type for _, multimodal in MULTIMODAL.values()}


@pytest.mark.by_default("gemma3 gemma3_text", "mistral3 ministral3")
@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_tower_is_its_family_under_any_of_its_names(name, tmp_path):
    """A case of the family, put into a whole by hand, is the same model as by itself."""
    family, multimodal = MULTIMODAL[name]
    case = next(each for each in FAMILIES if each.split()[0] == family.model_type)
    arrays = {key: weight(key, shape) for key, shape in FAMILIES[case]["shapes"].items()}
    text_config = FAMILIES[case]["config"] | multimodal.fixed
    store(tmp_path / "alone", arrays, text_config)
    want = models.load(tmp_path / "alone")
    config = {
        "model_type": multimodal.model_type,
        "text_config": text_config | {"model_type": multimodal.text_type or family.model_type},
    }
    config |= {"image_token_id": 3, "vision_config": {"depth": 2}, "tie_word_embeddings": text_config.get(TIED)}
    other_arrays = {"visual.x.weight": np.ones(2, np.float32), "mtp.y.weight": np.ones(2, np.float32)}
    for prefix, text_prefix in multimodal.prefixes:
        renamed = {
            prefix + key.removeprefix(text_prefix) if key.startswith(text_prefix) else key: array
            for key, array in arrays.items()
        }
        assert renamed.keys() != arrays.keys()
        store(tmp_path / prefix, renamed | other_arrays, config)
        assert same_trees(loaded(tmp_path / prefix, r"mtp\. \(1\), visual\. \(1\)\.$"), want)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "qwen3_vl" else pytest.mark.grid) for each in RECORDED]
)
def test_the_text_model_of_a_whole_gives_its_logits(name, tmp_path):
    write(tmp_path, name)
    with np.load(FIXTURES / "multimodal.npz") as file:
        want = file[name]
    found = run(loaded(tmp_path), jnp.asarray(ids_of(61), jnp.int32))
    tolerance = max(2e-5, 2 * RECORDED[name]["rounding"])
    assert close(found, want, tolerance) and not close(found, want[:, ::-1], 1e-2)


@pytest.mark.by_default("gemma3", "gemma4", "mistral3", "qwen3_vl")
@pytest.mark.parametrize("name", USUAL_NAMES)
def test_what_is_left_unread_is_told_and_the_rest_is_a_model_by_itself(name, tmp_path):
    """Saved by itself it is a folder of its family, with the very arrays and the same numbers."""
    arrays = write(tmp_path / "whole", name, {"eos_token_id": 7})
    (tmp_path / "whole" / "tokenizer.json").write_text("a tokenizer")
    model, numbers = loaded(tmp_path / "whole", UNREAD[name]), models.read_config(tmp_path / "whole")
    models.save(model, tmp_path / "text", like=tmp_path / "whole")
    said = json.loads((tmp_path / "text" / "config.json").read_text())
    families = {family.model_type: family for family in models.FAMILIES.values()}
    assert said["architectures"] == [families[said["model_type"]].architecture] and said["eos_token_id"] in (1, 2, 7)
    assert models.read_config(tmp_path / "text") == numbers and (tmp_path / "text" / "tokenizer.json").exists()
    back = load_file(tmp_path / "text" / "model.safetensors")
    texts = {key: array for key, array in arrays.items() if key.startswith(TEXTS)}
    own = {
        key.replace("model.language_model.", "model.").removeprefix("language_model."): array
        for key, array in BY_ITSELF.get(name, dict)(texts).items()
    }
    assert back.keys() == own.keys() and len(texts) < len(arrays)
    assert all(np.array_equal(back[key], array) for key, array in own.items())
    assert same_trees(models.load(tmp_path / "text"), model)  # and nothing is told


def apart(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each expert's own arrays, as its family publishes them, of those of all experts."""
    found = {}
    for key, array in arrays.items():
        stem, _, last = key.rpartition("experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ()) if stem else ()
        for number, its in enumerate(array if names else ()):
            parts = zip(names, np.split(its, len(names)), strict=True)
            found |= {f"{stem}experts.{number}.{part}.weight": values for part, values in parts}
        found |= {} if names else {key: array}
    return found


def joined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """MiniMax-M3's arrays by their names in a folder of the text model alone, with gates before what they multiply."""
    renamed, experts = {}, {}
    for key, array in arrays.items():
        name = key.replace("self_attn.index_", "self_attn.indexer.").replace("block_sparse_moe.", "mlp.")
        name = name.replace("mlp.e_score", "mlp.gate.e_score")
        stem, _, last = name.rpartition("experts.")
        if stem and last[0].isdigit():
            experts.setdefault(f"{stem}experts.", {})[last.removesuffix(".weight")] = array
        elif "gate_proj" in name:
            both = [array, arrays[key.replace("gate_proj", "up_proj")]]
            renamed[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both)
        elif "up_proj" not in name:
            renamed[name] = array
    for stem, its in experts.items():
        first, second, down = (
            np.stack([its[f"{number}.{part}"] for number in range(5)]) for part in ("w1", "w3", "w2")
        )
        renamed |= {f"{stem}gate_up_proj": np.concatenate([first, second], axis=1), f"{stem}down_proj": down}
    return renamed


BY_ITSELF = {"minimax_m3_vl": joined, "qwen3_vl_moe": apart}


def turned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts' arrays with inputs before outputs."""
    return {key: array.swapaxes(1, 2).copy() if ".experts." in key else array for key, array in arrays.items()}


def test_experts_of_a_whole_are_read_with_inputs_or_outputs_first(tmp_path):
    """As Qwen3-VL's mixtures are published, and as transformers saves them again; put back as they came."""
    arrays = write(tmp_path / "whole", "qwen3_vl_moe")
    model = loaded(tmp_path / "whole")
    write(tmp_path / "published", "qwen3_vl_moe")
    save_file(turned(arrays), tmp_path / "published" / "model.safetensors")
    assert same_trees(loaded(tmp_path / "published"), model)
    models.save(model, tmp_path / "out", like=tmp_path / "published", whole=True)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(back[key], array) for key, array in turned(arrays).items())
    cut = {
        key: array[..., :-1].copy() if "down_proj" in key and array.ndim == 3 else array for key, array in back.items()
    }
    save_file(cut, tmp_path / "published" / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp.experts.down_proj: it has shape \(7, 10, 23\), and the model's is"):
        loaded(tmp_path / "published")


def test_what_a_whole_always_is_may_not_be_said_otherwise(tmp_path):
    """Weights of a token's experts add up to 1, whatever its configuration has transformers think of it."""
    text = RECORDED["qwen3_vl_moe"]["config"]["text_config"]
    for said in (True, None):
        write(tmp_path, "qwen3_vl_moe", {"text_config": text | {"norm_topk_prob": said}})
        assert models.read_config(tmp_path).normalize  # pyright: ignore[reportAttributeAccessIssue]
    write(tmp_path, "qwen3_vl_moe", {"text_config": text | {"norm_topk_prob": False}})
    with pytest.raises(ValueError, match=r"text_config: norm_topk_prob=False: in 'qwen3_vl_moe' it must be"):
        models.read_config(tmp_path)


@pytest.mark.by_default("gemma3", "mistral3", "qwen3_vl")
@pytest.mark.parametrize("name", USUAL_NAMES)
def test_back_in_the_whole_folder_all_else_is_untouched(name, tmp_path):
    arrays, whole = write(tmp_path / "whole", name), tmp_path / "whole"
    kept = {"preprocessor_config.json": "{}", "notes.md": "kept too", "README": "and this"}
    for file, text in kept.items():
        (whole / file).write_text(text)
    others = {"visual.order": np.arange(3), "visual.scale": np.array(2.5, np.float16), "visual.bias": np.ones((1, 1))}
    save_file(arrays | others, whole / "model.safetensors")
    model = loaded(whole)
    changed = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight + 1)
    models.save(changed, tmp_path / "out", like=whole, whole=True, shard_bytes=10_000)
    back = {key: x for file in (tmp_path / "out").glob("*.safetensors") for key, x in load_file(file).items()}
    tables = [key for key in arrays if key.endswith("embed_tokens.weight") and "visual" not in key]
    assert len(tables) == 1 and back.keys() == {*arrays, *others}
    assert [key for key, its in (arrays | others).items() if not same_bits(back[key], its)] == tables
    assert same_bits(back[tables[0]], arrays[tables[0]] + 1)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == RECORDED[name]["config"]
    assert {file: (tmp_path / "out" / file).read_text() for file in kept} == kept
    assert same_trees(loaded(tmp_path / "out"), changed)


def test_a_stored_head_of_a_tied_whole_goes_with_its_table(tmp_path):
    arrays = write(tmp_path / "whole", "qwen3_vl")
    table = arrays["model.language_model.embed_tokens.weight"]
    save_file(arrays | {"lm_head.weight": table.copy()}, tmp_path / "whole" / "model.safetensors")
    model = loaded(tmp_path / "whole")
    changed = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight + 1)
    models.save(changed, tmp_path / "out", like=tmp_path / "whole", whole=True)
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], table + 1)


def test_newer_and_older_names_are_the_same_arrays(tmp_path):
    arrays = write(tmp_path, SMALLEST)
    want = loaded(tmp_path)
    newer = lambda key: "model." + key.replace("language_model.model.", "language_model.")
    newer_head = lambda key: key.removeprefix("language_model.") if "lm_head" in key else newer(key)
    save_file({newer_head(key): array for key, array in arrays.items()}, tmp_path / "model.safetensors")
    assert same_trees(loaded(tmp_path, r"model.multi_modal_projector. \(4\), model.vision_tower. \(11\)\."), want)
    twice = {newer_head(key): array for key, array in arrays.items() if "embed_tokens" in key}
    save_file(arrays | twice, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"language_model.model.embed_tokens.weight and model.language_model.emb"):
        models.load(tmp_path)


def test_a_text_model_in_fewer_bits_is_decoded_within_the_whole(tmp_path):
    """As Ministral 3 is published: maps of float8 with one scale, beside plain parts that see images."""
    arrays = write(tmp_path, SMALLEST, {"quantization_config": CASES["fp8 one scale"].said})
    rng, stored, decoded = np.random.default_rng(0), {}, {}
    for key, array in arrays.items():
        if key.startswith("language_model.") and "_proj" in key:
            parts, values = CASES["fp8 one scale"].make(rng, *array.shape)
            stored |= {key.removesuffix(".weight") + end: part for end, part in parts.items()}
            decoded[key.removeprefix("language_model.")] = values.astype(np.float32)
        else:
            stored[key] = array
    save_file(stored, tmp_path / "model.safetensors")
    models.save(loaded(tmp_path, UNREAD[SMALLEST]), tmp_path / "text", like=tmp_path)
    back = load_file(tmp_path / "text" / "model.safetensors")
    assert len(decoded) == 21 and all(np.array_equal(back[key], array) for key, array in decoded.items())
    assert "quantization_config" not in json.loads((tmp_path / "text" / "config.json").read_text())


def test_an_array_of_no_known_part_is_refused(tmp_path):
    arrays = write(tmp_path, SMALLEST)
    save_file(arrays | {"smell_tower.weight": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not in the model: smell_tower.weight \(1\)"):
        models.load(tmp_path)


def test_what_gemma_leaves_out_is_what_transformers_takes(tmp_path):
    """As Gemma 3 4B is published."""
    text: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    said = {"model_type": "gemma3", "mm_tokens_per_image": 256, "boi_token_index": 255999, "eoi_token_index": 256000}
    said |= {"image_token_index": 262144, "vision_config": {"image_size": 896}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert models.read_config(tmp_path) == models.preset("gemma3-4b")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_base_that_qwen_leaves_out_is_what_transformers_takes(name, tmp_path):
    """Of the text models in wholes another than of those that stand alone."""
    write(tmp_path, name)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["text_config"].pop("rope_parameters")["rope_theta"] != 5e5
    for base, want in (({}, 5e5), ({"rope_theta": 77.0}, 77.0)):
        (tmp_path / "config.json").write_text(json.dumps(said | {"text_config": said["text_config"] | base}))
        assert models.read_config(tmp_path).theta == want  # pyright: ignore[reportAttributeAccessIssue]


def test_heads_whose_size_a_mixture_of_qwen_leaves_out_share_the_width(tmp_path):
    write(tmp_path, "qwen3_vl_moe")
    said = json.loads((tmp_path / "config.json").read_text())
    text = said["text_config"]
    assert text.pop("head_dim") != text["hidden_size"] // text["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    config: Any = models.read_config(tmp_path)
    assert config.head_size == text["hidden_size"] // text["num_attention_heads"]


TEXT = RECORDED[SMALLEST]["config"]["text_config"]
WRONG = {
    "an attribute of no part": (
        {"window_of_doom": 3},
        r"config.json: attributes that .* not know: window_of_doom",
    ),
    "one of the text": ({"text_config": TEXT | {"doom": 3}}, r"config.json: text_config: attributes .*: doom=3"),
    "no text": (
        {"text_config": None},
        r"model_type='mistral3': .* there is no text_config; .*, 'ministral3' or 'mistral' or",
    ),
    "a text whose attributes are beside the image part's": (
        {"text_config": None} | TEXT | {"model_type": "mistral3"},
        r"config.json: model_type='mistral3': .* there is no text_config; move the attributes there",
    ),
    "a text that is a list": ({"text_config": [1]}, r"text_config=\[1\]: it must be an object"),
    "another text": ({"text_config": TEXT | {"model_type": "gpt2"}}, r"text_config: model_type='gpt2' .* mistral"),
    "a text that is named by a list": ({"text_config": TEXT | {"model_type": [1]}}, r"model_type=\[1\] is not known"),
    "a whole that is named by a list": ({"model_type": ["mistral3"]}, r"model_type=\['mistral3'\]: it must be a text"),
    "another whole": (
        {"model_type": "mistral9"},
        r"model_type='mistral9' is not known.*whose text model can be read are co",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_does_not_fit(name, tmp_path):
    changes, words = WRONG[name]
    write(tmp_path, SMALLEST, changes)
    with pytest.raises(ValueError, match=words):
        models.load(tmp_path)


def test_a_whole_needs_a_folder(tmp_path):
    write(tmp_path / "whole", SMALLEST)
    model = loaded(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"whole=True writes the folder that the model came from.*give it as like="):
        models.save(model, tmp_path / "out", config=models.read_config(tmp_path / "whole"), whole=True)
    save_file({"visual.order": np.arange(3)}, tmp_path / "whole" / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not hold all of the model .*; give the whole folder as like="):
        models.save(model, tmp_path / "out", like=tmp_path / "whole", whole=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]
