"""DeepSeek-V4's older attributes and array names, as its publishers write them, and transformers' names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_base_folders import load_and_list, named
from test_published import write

from eqformer import models, nn


OLDER = {
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "qk_rope_head_dim": 64,
    "o_groups": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "compress_rate_csa": 8,
    "num_hash_layers": 2,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def read(folder: Path, **attributes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(OLDER | attributes))
    return models.read_config(folder)


def test_older_attributes_are_read(tmp_path):
    config = read(tmp_path)
    assert (config.sparse_layers, config.heavy_layers, config.hash_layers) == ((2, 4), (3, 5), (0, 1))
    assert (config.sparse_block_size, config.heavy_block_size, config.rope_dim) == (8, 128, 64)
    assert (config.theta, config.compressed_theta) == (10_000.0, 160_000.0)
    assert config.scaling == nn.YarnScaling(16.0, 256, magnitude=1.0)
    default = read(tmp_path, compress_ratios=None, num_hash_layers=None, rope_scaling=None)
    assert (default.heavy_layers, default.sparse_layers) == ((0, 1, 2, 4), (3, 5))
    assert (default.hash_layers, default.scaling) == ((0, 1, 2), None)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"compress_ratios": [0, 0, 4, 64, 4, 128]}, r"compress_ratios=.*\[64\] is none of"),
        ({"compress_ratios": [0, 4]}, "layer_types=.* must have 6 items"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types=.* must have 6 items, each one of"),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types=.* must have 6 items"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "have no 'heavily_compressed_attention'"),
        ({"compress_rates": {"sliding_attention": 4, "other": 3}}, "are not types of layer"),
        ({"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}, "rope_scaling": None}, "main"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "strange": 1}}, "strange"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
    ],
)
def test_what_the_family_has_not_is_refused(attributes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **attributes)


def test_heads_fall_into_equal_groups(tmp_path):
    with pytest.raises(ValueError, match=r"DeepSeekV4Config\(heads=16, groups=3\)"):
        models.shapes(read(tmp_path, o_groups=3))


def test_the_publishers_names_are_read(tmp_path):
    """No prefix, other names of the embedding and of the last streams, and predictors that are passed over."""
    arrays = write(tmp_path, "deepseek_v4 plain")
    expected, _ = load_and_list(tmp_path)
    bare = {name.removeprefix("model.").replace("hc_head.hc_", "hc_head_"): x for name, x in arrays.items()}
    bare["embed.weight"] = bare.pop("embed_tokens.weight")
    assert {"hc_head_fn", "layers.0.attn.wkv.weight", "head.weight"} < {*bare}
    save_file(bare | {"mtp.0.norm.weight": bare["norm.weight"]}, tmp_path / "model.safetensors")
    model, notes = load_and_list(tmp_path)
    leaves = named(expected)
    assert [note for note in notes if "mtp. (1)" not in note] == [] and all(
        (leaf == leaves[path]).all() for path, leaf in named(model).items()
    )
    save_file(bare | {"layers.0.attn.strange": bare["norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="strange"):
        models.load(tmp_path)


@pytest.mark.parametrize("table", [np.full((61, 3), 8), np.full((61, 3), -1), np.zeros((61, 3), np.float32)])
def test_a_table_of_experts_that_are_not_there_is_refused(table, tmp_path):
    arrays = write(tmp_path, "deepseek_v4 plain")
    name = "model.layers.0.ffn.gate.tid2eid"
    save_file(arrays | {name: table}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: it is of .*, and must hold whole numbers from 0 to 7"):
        models.load(tmp_path)
