"""MiniMax-M3's attributes as its publishers write them, and transformers' attributes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eqformer import models


INDEXER: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 64,
    "sparse_num_index_heads": 2,
    "sparse_topk_blocks": 8,
    "sparse_block_size": 32,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 2,
    "sparse_attention_freq": [0, 1, 1],
    "sparse_disable_index_value": [0, 1, 1],
}
PUBLISHED: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0, 1, 0],
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "sparse_attention_config": INDEXER,
}


def read(folder: Path, **attributes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | attributes))
    return models.read_config(folder)


def test_the_publishers_attributes_are_read(tmp_path):
    config = read(tmp_path)
    assert (config.sparse_layers, config.first_dense, config.dense_layers) == ((1, 2), 1, (2,))
    assert (config.index_dim, config.block, config.top_blocks, config.local_blocks) == (64, 32, 8, 2)
    assert (config.rotary_fraction, config.activation) == (0.5, "quick_gelu")
    # Lists of types take precedence over flags; without both, all layers attend to whole rows and have experts.
    types = ["full_attention", "full_attention", "minimax_m3_sparse"]
    config = read(tmp_path, layer_types=types, mlp_layer_types=["sparse", "sparse", "dense"])
    assert (config.sparse_layers, config.first_dense, config.dense_layers) == ((2,), 0, (2,))
    default = read(tmp_path, sparse_attention_config=None, moe_layer_freq=None)
    assert (default.sparse_layers, default.mixtures, default.block) == ((), (True,) * 3, 128)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types=.* must have 3 items"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.* must have 3 items, each one of"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types=.* must have 3 items"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq=.* must have a flag for each of the model's 3 layers"),
        ({"moe_layer_freq": 1}, "moe_layer_freq"),
        ({"sparse_attention_config": [3]}, "sparse_attention_config"),
        (
            {"sparse_attention_config": INDEXER | {"sparse_attention_freq": [1] * 4}},
            "sparse_attention_freq=.* 3 layers",
        ),
        ({"sparse_attention_config": INDEXER | {"sparse_num_index_heads": 4}}, "index_n_heads=4: .* there are 2"),
        (
            {"sparse_attention_config": INDEXER | {"sparse_block_size": 0}},
            r"sparse_attention_config.sparse_block_size=0",
        ),
        ({"sparse_attention_config": INDEXER | {"sparse_local_block": -1}}, "sparse_local_block=-1"),
        ({"sparse_attention_config": INDEXER | {"sparse_index_dim": "64"}}, "sparse_index_dim"),
        ({"sparse_attention_config": INDEXER | {"sparse_score_type": "mean"}}, "sparse_score_type='mean'"),
        ({"sparse_attention_config": INDEXER | {"sparse_init_block": 1}}, "sparse_init_block=1"),
        (
            {"sparse_attention_config": INDEXER | {"sparse_disable_index_value": [0, 0, 1]}},
            "sparse_disable_index_value",
        ),
        ({"sparse_attention_config": INDEXER | {"strange": 1}}, r"not known: \['strange'\]"),
        ({"sparse_attention_config": None, "layer_types": ["minimax_m3_sparse"] * 3}, "index_n_heads=4: .* are 2"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
    ],
)
def test_attributes_that_the_family_does_not_support_are_refused(attributes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **attributes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_local_block": 9}, r"BlockIndexer\(.*top_k=8, local=9"),
        ({"sparse_index_dim": 8}, r"BlockIndexer\(dim=8, rotary=.*at most dim channels"),
    ],
)
def test_sizes_of_the_indexer_that_do_not_fit_are_refused_before_weights_are_read(changes, message, tmp_path):
    config = read(tmp_path, sparse_attention_config=INDEXER | changes)
    with pytest.raises(ValueError, match=message):
        models.shapes(config)
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")  # of another size
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)
