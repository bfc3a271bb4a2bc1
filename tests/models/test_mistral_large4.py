"""Mistral Large 4's lists of layers: lists that transformers reads in the same way, and lists that are refused."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import save_file
from test_attributes import numbers_of
from test_options import back
from test_published import RECORDED, write

from eqformer import models, nn
from eqformer.models.families._decoder import Together
from eqformer.models.families._mistral_large4 import _kinds, MISTRAL_LARGE4


def recorded(**changes: Any) -> dict[str, Any]:
    """The configuration of the case of shared latents, with some attributes changed; those of None are left out."""
    config = RECORDED["mistral_large4_text shared latents"]["config"] | changes
    return {name: value for name, value in config.items() if value is not None}


def transformers_config(config: dict[str, Any]) -> Any:
    """The configuration as transformers reads it; None where transformers is not imported."""
    config = dict(config)
    library = sys.modules.get("transformers")
    return library.AutoConfig.for_model(config.pop("model_type"), **config) if library else None


def test_layers_lack_what_they_read():
    numbers = numbers_of(recorded())
    assert (numbers.no_rotary_layers, numbers.latent_sources) == ((1, 4), (0, 1, 0, 0, 1, 5))
    layers: list[nn.LatentAttention] = nn.modules(models.shapes(numbers), nn.LatentAttention)
    assert [layer.latent_down is None for layer in layers] == [False, False, True, True, True, False]
    assert [layer.shares_latents for layer in layers] == [True, True, False, False, False, False]
    assert [layer.indexer is None for layer in layers] == [False, False, True, False, True, False]
    assert [layer.rotary is None for layer in layers] == [False, True, False, False, True, False]
    assert back("mistral_large4_text", numbers) == numbers


@pytest.mark.parametrize(
    "sources, modes",
    [
        (None, [None] * 6),
        ([0, 1, 2, 3, 4, 5], [None] * 6),
        ([0, 1, 0, 0, 1, 0], ["store", "store", "reuse", "reuse_but_indexer", "reuse", "reuse_but_indexer"]),
        ([0, 1, 2, 2, 4, 5], [None, None, "store", "reuse_but_indexer", None, None]),
        # Layers 0 and 2 share latents of one kind; each layer reads those of the last one before it.
        ([0, 1, 0, 3, 1, 3], ["store", "store", "reuse", "store", "reuse", "reuse_but_indexer"]),
    ],
)
def test_sources_are_those_of_transformers(sources, modes):
    config = recorded(kv_source_layers=sources)
    numbers = numbers_of(config)
    assert numbers.latent_sources == (() if sources in (None, list(range(6))) else tuple(sources))
    assert back("mistral_large4_text", numbers) == numbers
    groups = [kind.kinds if isinstance(kind, Together) else (kind,) for kind in _kinds(numbers)]
    layers = [layer for group in groups for layer in group]
    assert [layer.shares_latents for layer in layers] == [mode == "store" for mode in modes]
    assert [layer.reads_latents for layer in layers] == [mode not in (None, "store") for mode in modes]
    if theirs := transformers_config(config):
        assert theirs.kv_sharing_modes == modes


def test_without_a_list_of_layers_the_first_layers_are_dense():
    for attributes, expected in (({"first_k_dense_replace": 3}, 3), ({"first_k_dense_replace": 0}, 0), ({}, 1)):
        config = recorded(**{"mlp_layer_types": None, "first_k_dense_replace": None, **attributes})
        numbers = numbers_of(config)
        assert (numbers.first_dense, numbers.dense_layers) == (expected, ())
        if theirs := transformers_config(config):
            assert theirs.mlp_layer_types == ["sparse" if mixed else "dense" for mixed in numbers.mixtures]


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"kv_source_layers": [0, 1, 0]}, "3 items for 6 layers"),
        ({"kv_source_layers": [0, 1, 0, 0, 1, 6]}, "layer 5 cannot read the latents of layer 6: layer 6 is a later"),
        ({"kv_source_layers": [1, 1, 2, 3, 4, 5]}, "layer 0 cannot read the latents of layer 1: layer 1 is a later"),
        ({"kv_source_layers": [0, 1, 0, 2, 4, 5]}, "layer 3 .* of layer 2: layer 2 is a later layer, or itself reads"),
        # Transformers would read the latents of layer 2, or none at all.
        ({"kv_source_layers": [0, 1, 2, 2, 4, 0]}, "layer 5 cannot read the latents of layer 0: a layer reads"),
        ({"kv_source_layers": [0, 0, 2, 3, 4, 5]}, "layer 1 cannot read the latents of layer 0: a layer reads"),
        ({"kv_source_layers": [0, 1, 2, 3, 3, 5]}, "layer 4 cannot read the latents of layer 3: a layer reads"),
        ({"kv_source_layers": ["0", 1, 2, 3, 4, 5]}, "kv_source_layers"),
        ({"indexer_types": ["shared", *["full"] * 5]}, "must have 6 items, 'full' or 'shared', and begin with 'full'"),
        ({"indexer_types": ["full"] * 5}, "must have 6 items"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"layer_types": ["full_attention"] * 6}, "in this family, all 6 layers must be 'indexed_attention'"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0"),
        ({"index_topk": 0}, "index_topk=0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"rope_parameters": None}, "the configuration has no 'rope_parameters', which this family needs"),
    ],
)
def test_what_does_not_fit_is_refused(changes, refusal):
    with pytest.raises(ValueError, match=rf"^config.json: .*{refusal}"):
        numbers_of(recorded(**changes))


def test_a_config_of_sources_or_readers_that_do_not_fit_is_refused():
    numbers = numbers_of(recorded())
    for sources in ((0, 1), (0, 1, 0, 0, 1, 6), (0, 0, 2, 3, 4, 5)):
        with pytest.raises(
            ValueError, match=r"^MistralLarge4Config\(latent_sources=.*(layer \d cannot|give the index)"
        ):
            models.shapes(dataclasses.replace(numbers, latent_sources=sources))
    with pytest.raises(ValueError, match=r"^MistralLarge4Config\(reading_layers=\(0,\)\): no layer before layer 0"):
        models.shapes(dataclasses.replace(numbers, reading_layers=(0,), latent_sources=()))
    with pytest.raises(ValueError, match=r"MistralLarge4Config\(rope_dim=5\): channels are rotated in pairs"):
        models.shapes(dataclasses.replace(numbers, rope_dim=5))


def test_patterns_are_those_of_transformers():
    for changes, reading in (
        ({"index_topk_pattern": "FFSFSF"}, (2, 4)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1, 2, 4, 5)),
    ):
        config = recorded(**changes, indexer_types=None, kv_source_layers=None)
        assert numbers_of(config).reading_layers == reading
        if theirs := transformers_config(config):
            assert tuple(n for n, kind in enumerate(theirs.indexer_types) if kind == "shared") == reading
    numbers = numbers_of(recorded(no_rope_layers=None, no_rope_layer_interval=3, kv_source_layers=None))
    assert numbers.no_rotary_layers == (2, 5)


def test_layers_that_read_nothing_from_before_are_one_loop():
    """Seventy-two layers of four kinds are traced as few; a group of layers that share is one block."""
    sizes = MISTRAL_LARGE4.presets["mistral-large4"]
    assert [len(stack) for stack in models.shapes(sizes).stacks] == [1, 17, 2, 1]
    sources = tuple(n - n % 2 if n % 4 < 2 else n for n in range(72))
    shared = dataclasses.replace(sizes, latent_sources=sources, first_dense=0)
    (stack,) = models.shapes(shared).stacks
    assert len(stack) == 18 and len(stack.blocks.members) == 4


WHOLE = (("model.layers.", "layers."), ("model.norm.", "norm."), ("model.embed_tokens.", "tok_embeddings."))
WHOLE += (("model.rotary_emb.", "lerope."), (".o_proj.", ".wo."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."))
WHOLE += ((".down_proj.", ".w2."),)


def test_a_whole_folder_of_the_publishers_names_has_the_text_model(tmp_path):
    """The names that transformers' `MistralLarge4ForConditionalGeneration` writes, with other parts beside."""
    arrays = write(tmp_path, "mistral_large4_text shared latents")
    config = {"model_type": "mistral_large4", "text_config": recorded(), "spatial_merge_size": 2}
    whole = {"mtp_dspark.x.weight": np.ones(2, np.float32), "pre_mm_projector_norm.weight": np.ones(2, np.float32)}
    for name, array in arrays.items():
        for old, new in WHOLE:
            name = name.replace(old, new)
        whole[name] = array
    assert "layers.0.experts.0.w1.weight" in whole and "layers.1.feed_forward.w3.weight" in whole
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"left unread: mtp_dspark. \(1\), pre_mm_projector_norm. \(1\)\.$"):
        model = models.load(tmp_path / "whole")
    assert same_trees(model, models.load(tmp_path))
