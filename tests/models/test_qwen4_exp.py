"""Qwen4-Exp: tables of n-grams in folders, on meshes, and attributes and arrays that are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import save_file
from test_attributes import numbers_of, PUBLISHED
from test_options import back
from test_published import RECORDED, write

from eqformer import models, nn
from eqformer.parallel import make_mesh, Plan


QWEN4_EXP = PUBLISHED["qwen4_exp_text"]
PLE = "model.layers.0.ple.ple_embedding."


def recorded(case: str) -> dict[str, Any]:
    """Return a copy of the configuration of a case."""
    return dict(RECORDED[f"qwen4_exp_text {case}"]["config"])


def table_of(model: nn.Transformer) -> jax.Array:
    """Return the first layer's table."""
    return nn.modules(model, nn.NGramTable)[0].weight[0]


def test_a_table_is_joined_from_its_shards(tmp_path):
    arrays = write(tmp_path, "qwen4_exp_text plain")
    shards = [arrays[f"{PLE}ngram_embedding.shard_{number}.weight"] for number in range(4)]
    whole = np.concatenate(shards)
    assert np.array_equal(table_of(models.load(tmp_path)), whole)
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    assert np.array_equal(table_of(models.load(tmp_path, plan=Plan(mesh, zero=3, smallest=1))), whole)
    # In a folder with transformers' own names, the table is one array.
    names = [f"{PLE}ngram_embedding.shard_{number}.weight" for number in range(4)]
    one = {name: array for name, array in arrays.items() if name not in names}
    save_file(one | {f"{PLE}ngram_embedding.weight": whole[::-1].copy()}, tmp_path / "model.safetensors")
    assert np.array_equal(table_of(models.load(tmp_path)), whole[::-1])


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    arrays = write(tmp_path, "qwen4_exp_text plain")

    def load(**changes: Any) -> None:
        changed = arrays | {f"{PLE}{name}": value for name, value in changes.items()}
        save_file({name: x for name, x in changed.items() if x is not None}, tmp_path / "model.safetensors")
        models.load(tmp_path)

    multipliers = arrays[f"{PLE}layer_multipliers"]
    load(layer_multipliers=None, ngram_heads_offsets=None)  # these follow from the configuration
    with pytest.raises(ValueError, match=r"layers\.0\.ple\.ple_embedding\.layer_multipliers is \[.*follows from"):
        load(layer_multipliers=multipliers + 2)
    with pytest.raises(ValueError, match=r"layer_multipliers: it is of float32, and must hold whole numbers"):
        load(layer_multipliers=multipliers.astype(np.float32))
    with pytest.raises(ValueError, match=r"vocab_sizes is \[11, 13, 17, 20\], but \[11, 13, 17, 19\] follows"):
        load(ngram_heads_vocab_sizes=np.array([11, 13, 17, 20]))
    shard = arrays[f"{PLE}ngram_embedding.shard_3.weight"]
    with pytest.raises(ValueError, match=r"not in the folder: .*ngram_embedding\.shard_3\.weight"):
        load(**{"ngram_embedding.shard_3.weight": None})
    with pytest.raises(ValueError, match=r"shard_3\.weight: it has shape \(15, 4\), and the model's is \(16, 4\)"):
        load(**{"ngram_embedding.shard_3.weight": shard[:15].copy()})
    with pytest.raises(ValueError, match=r"in the folder, but not in the model: .*ngram_embedding\.shard_4\.weight"):
        load(**{"ngram_embedding.shard_4.weight": shard})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [0]}, r"^config.json: ple_layer_ids=\[0\]: layers are counted from 1 to 3"),
        ({"ple_layer_ids": [1, 1]}, r"ple_layer_ids=\[1, 1\]: .*each may be listed once"),
        ({"output_gate_type": "tanh"}, r"output_gate_type='tanh' is not supported"),
        ({"indexer_kv_heads": 2}, r"indexer_kv_heads=2 is not supported"),
        ({"ngram_size": 1}, r"ngram_size=1"),
        ({"eos_token_id": ["a"]}, r"eos_token_id='a'"),
    ],
)
def test_attributes_that_no_model_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        numbers_of(recorded("plain") | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"memory_layers": (1,)},
            r"memory_layers=\(1,\)\): layers \[1\] are not among the 3 layers, or have",
        ),
        ({"memory_layers": (0, 0, 2)}, "a layer has one memory; list each layer once"),
        ({"streams": 1}, r"^build\(.*\): streams=1: it must be a whole number of at least 2"),
        ({"ngram": 1}, r"^build\(.*\): ngram=1: it must be a whole number of at least 2"),
        ({"end_id": None}, r"Qwen4ExpConfig\(memory_layers=\(0, 2\), end_id=None\)"),
        ({"memory_dim": 18}, r"4 vectors have 18 channels together; give a memory_dim that is a multiple of 4"),
        ({"index_top_k": 7}, r"index_top_k=7, index_pool=3\): attention has an indexer"),
        ({"index_heads": None}, r"index_heads=None, .*give all four sizes"),
        ({"attention_layers": (), "index_heads": None}, r"index_heads=None, .*give all four sizes"),
        ({"activation": "gelu"}, r"activation='gelu', gate_activation=None\): the output gates"),
        ({"end_id": 61}, r"splitmix_hash\(vocab=61, end_id=61\): the id that ends a text must be one of the ids"),
        ({"ngram_rows": 2**30}, r"splitmix_hash\(.*give other numbers"),
        ({"ngram_heads": 2**20, "memory_dim": 2**22}, r"splitmix_hash\(.*at most 4096 heads"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        models.shapes(dataclasses.replace(numbers_of(recorded("plain")), **changes))


def test_the_first_of_several_ends_counts_and_full_attention_is_indexed():
    config = recorded("plain")
    numbers = numbers_of(config)
    assert config["eos_token_id"] == [33, 13] and numbers.end_id == 33 and back("qwen4_exp_text", numbers) == numbers
    types = [name.replace("indexed", "full") for name in config["layer_types"]]
    assert types != config["layer_types"] and numbers_of(config | {"layer_types": types}) == numbers


def test_a_config_without_indexers_states_none_of_their_attributes():
    """transformers refuses a configuration that states some of them."""
    names = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")]
    config = numbers_of(recorded("plain"))
    written = QWEN4_EXP.write(config)
    assert {name: written[name] for name in names} == {name: recorded("plain")[name] for name in names}
    sizes = dict.fromkeys(("index_heads", "index_dim", "index_top_k", "index_pool"))
    without = dataclasses.replace(config, attention_layers=(), **sizes)
    assert {QWEN4_EXP.write(without)[name] for name in names} == {None}
    assert back("qwen4_exp_text", without) == without and not nn.modules(models.shapes(without), nn.IndexedAttention)


def test_a_folder_of_the_multimodal_model_is_read(tmp_path):
    arrays = write(tmp_path, "qwen4_exp_text plain")
    expected = table_of(models.load(tmp_path))
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in arrays.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    whole = {"model_type": "qwen4_exp", "text_config": recorded("plain"), "vision_config": {}, "image_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert np.array_equal(table_of(models.load(tmp_path)), expected)


def test_an_added_end_of_text_leaves_the_hash_as_it_is(tmp_path):
    """The ids of n-grams follow from the config's `end_id`; a tokenizer may end a text with another id."""
    write(tmp_path, "qwen4_exp_text plain")
    model, config = models.load(tmp_path), models.read_config(tmp_path)
    names = iter("abc")

    def save(**options: Any) -> Path:
        models.save(model, folder := tmp_path / next(names), config=config, **options)
        return folder

    files = {"generation_config.json": '{"top_k": 3}'}
    other = save(attributes={"eos_token_id": 5, "pad_token_id": None}, files=files)
    assert models.read_config(other) == config and models.read_eos_token_ids(other) == [5]
    assert json.loads((other / "generation_config.json").read_text()) == {"top_k": 3, "eos_token_id": 5}
    assert same_trees(models.load(other), model)
    # A list whose first id is the config's stays in one file; the control is a config of the other id.
    equal = save(attributes={"eos_token_id": [33, 5]})
    assert models.read_eos_token_ids(equal) == [33, 5] and not (equal / "generation_config.json").exists()
    assert numbers_of(recorded("plain") | {"eos_token_id": 5}) != config
    with pytest.raises(ValueError, match=r"^save\(model, '.*c'\): .*ngram_size.*change the config .*\(ngram: 3 -> 4\)"):
        save(attributes={"ngram_size": 4})
    assert not (tmp_path / "c").exists()
