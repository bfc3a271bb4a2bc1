"""Text encoders: packed and padded rows, token types, older folders, and the refusal to decode."""

import dataclasses
import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import load_file
from test_base_folders import load_and_list, rewrite
from test_published import close, compiled, write

from eqformer import models, nn


@pytest.mark.grid
def test_packed_rows_of_an_encoder_are_as_each_alone_and_no_cache_is_made(tmp_path):
    """Ten and fourteen tokens in one row, and each in a row of its own: windows of seven tokens, and whole rows."""
    write(tmp_path, "modernbert biased")
    model = models.load(tmp_path)
    ids = np.random.default_rng(0).integers(1, 61, (1, 24)).astype(np.int32)
    fill = lambda values, empty: np.concatenate([values, np.full(24 - len(values), empty, np.int32)])
    rows = np.stack([ids[0], fill(ids[0, :10], 0), fill(ids[0, 10:], 0)])
    one, two = np.arange(10), np.arange(14)
    places = np.stack([np.concatenate([one, two]), fill(one, -1), fill(two, -1)]).astype(np.int32)
    segments = np.array([[1] * 10 + [2] * 14, [1] * 24, [2] * 24], np.int32)
    run = eqx.filter_jit(lambda segments: model(jnp.asarray(rows), nn.Tokens(jnp.asarray(places), segments))[0])
    logits = run(jnp.asarray(segments))
    assert close(logits[0, :10], np.asarray(logits[1, :10])) and close(logits[0, 10:], np.asarray(logits[2, :14]))
    together = run(jnp.ones((3, 24), jnp.int32))  # one document
    assert not close(together[0, :10], np.asarray(logits[1, :10]), 1e-2)
    with pytest.raises(ValueError, match=r"Attention.init_cache: with Mask\(is_causal=False.* token sees later tokens"):
        model.init_cache(1, 24)


@pytest.mark.by_default("bert plain")
@pytest.mark.parametrize("name", ["bert plain", "roberta plain", "distilbert plain"])
def test_padding_changes_no_token(name, tmp_path):
    """Ids of padding count for nothing, and rows of any width have the same numbers."""
    write(tmp_path, name)
    model, ids = models.load(tmp_path), np.random.default_rng(1).integers(1, 61, (2, 24))
    lengths = jnp.asarray([17, 9])
    tokens, others = nn.right_padded(lengths, 24), np.where(np.arange(24) < np.asarray(lengths)[:, None], ids, 5)
    logits, same = compiled(model, ids, tokens), compiled(model, others, tokens)
    alone = compiled(model, ids[1:, :9], nn.positions_like((1, 9)))
    unmasked = compiled(model, ids, nn.positions_like((2, 24)))
    assert np.array_equal(logits[0, :17], same[0, :17]) and close(logits[1, :9], np.asarray(alone[0]))
    assert not close(unmasked[1, :9], np.asarray(alone[0]), 1e-2)


def test_token_types_add_their_vectors(tmp_path):
    """The second text of a pair has type 1: as a model whose only type has the other vector, where all tokens have."""
    arrays = write(tmp_path, "bert three types")
    model, ids = models.load(tmp_path), np.random.default_rng(2).integers(1, 61, (1, 12))
    of_type = lambda types: nn.positions_like((1, 12)).replace(types=jnp.asarray(types, jnp.int32)[None])
    table = model.token_types
    assert isinstance(table, nn.TokenTypes) and table.weight.shape == (3, 24)
    moved = eqx.tree_at(lambda m: m.token_types.weight, model, table.weight[jnp.asarray([1, 0, 2])])
    ones, pair = compiled(model, ids, of_type([1] * 12)), compiled(model, ids, of_type([0] * 5 + [1] * 7))
    assert np.array_equal(ones, compiled(moved, ids, None))
    assert np.array_equal(pair, compiled(moved, ids, of_type([1] * 5 + [0] * 7)))
    assert np.array_equal(compiled(model, ids, None), compiled(model, ids, of_type([0] * 12)))
    assert not close(pair, np.asarray(ones), 1e-2)
    assert np.isnan(compiled(model, ids, of_type([3] * 12))).all()
    assert np.array_equal(table.weight, arrays["bert.embeddings.token_type_embeddings.weight"])


def test_the_oldest_names_of_bert_and_its_second_names_of_the_table(tmp_path):
    """Norms of gamma and beta, the table again as the head, buffers, and parts beside the head for masked tokens."""
    arrays = write(tmp_path, "bert plain")
    want = models.load(tmp_path)
    rename = lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    second = {
        "cls.predictions.decoder.weight": arrays["bert.embeddings.word_embeddings.weight"].copy(),
        "cls.predictions.decoder.bias": arrays["cls.predictions.bias"].copy(),
        "bert.embeddings.position_ids": np.arange(64)[None],
        "cls.seq_relationship.weight": np.ones((2, 24), np.float32),
    }
    rewrite(tmp_path, arrays | second, rename)
    model, told = load_and_list(tmp_path)
    assert same_trees(model, want) and told == ["arrays that are not part of the text model are left unread: cls. (1)."]
    changed = dataclasses.replace(model, logit_bias=model.logit_bias + 1)
    models.save(changed, tmp_path / "back", like=tmp_path, whole=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {rename(key) for key in arrays | second}
    assert np.array_equal(back["cls.predictions.decoder.bias"], arrays["cls.predictions.bias"] + 1)
    rewrite(tmp_path, arrays | second | {"cls.predictions.decoder.bias": np.ones(61, np.float32)}, rename)
    with pytest.raises(
        ValueError, match=r"ties the head to the table, but cls.predictions.decoder.bias differs from cls"
    ):
        models.load(tmp_path)


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert"])
def test_other_names_of_roberta(kind, tmp_path):
    write(tmp_path, "roberta plain")
    want, config = models.load(tmp_path), (tmp_path / "config.json").read_text()
    assert '"model_type": "roberta"' in config
    (tmp_path / "config.json").write_text(config.replace('"roberta"', f'"{kind}"'))
    assert same_trees(models.load(tmp_path), want)
    with pytest.raises(ValueError, match=r"max_position_embeddings=1: it must be a whole number of at least 2"):
        (tmp_path / "config.json").write_text(
            config.replace('"max_position_embeddings": 25', '"max_position_embeddings": 1')
        )
        models.read_config(tmp_path)


OLDER = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
OLDER |= {"intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon"}
OLDER |= {"max_position_embeddings": "max_trained_positions"}


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_the_publishers_own_names_of_nomic_bert(prefix, tmp_path):
    """Attributes of GPT-2's kind, and arrays without a prefix or with BERT's."""
    arrays = write(tmp_path, "nomic_bert plain")
    want, config = models.load(tmp_path), json.loads((tmp_path / "config.json").read_text())
    rotary = config.pop("rope_parameters")
    config = {OLDER.get(name, name): value for name, value in config.items() if name not in ("head_dim", "hidden_act")}
    config |= {"rotary_emb_base": rotary["rope_theta"], "activation_function": "swiglu", "n_positions": 8192}
    config |= {"prenorm": False, "qkv_proj_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None}
    config |= {"use_flash_attn": True, "summary_type": "cls_index", "rotary_scaling_factor": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewrite(tmp_path, arrays, lambda key: key.replace("nomic_bert.", prefix))
    model, notes = load_and_list(tmp_path)
    assert same_trees(model, want) and notes == []
    models.save(model, tmp_path / "back", like=tmp_path, whole=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {key.replace("nomic_bert.", prefix) for key in arrays}
    rewrite(tmp_path, arrays, lambda key: key.replace("nomic_bert.", "nomic."))
    with pytest.raises(ValueError, match=r"nomic\.embeddings\.word_embeddings\.weight"):
        models.load(tmp_path)
    for name, value in (("prenorm", True), ("rotary_emb_fraction", 0.5), ("activation_function", "gelu")):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(ValueError, match=f"{name}={value!r} is not supported for this family"):
            models.load(tmp_path)


def test_a_whole_folder_keeps_the_modules_behind_the_model(tmp_path):
    """Pooling and dense layers of sentence-transformers; a folder of another program's weights is left out."""
    source, modules = tmp_path / "source", [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    source.mkdir()
    write(source, "bert plain")
    contents = {"1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": b"weights", "onnx/model.onnx": b"other"}
    for name, content in contents.items():
        (source / name).parent.mkdir()
        (source / name).write_bytes(content)
    (source / "modules.json").write_text(json.dumps(modules))
    model = models.load(source)
    models.save(model, tmp_path / "whole", like=source, whole=True)
    for name, content in contents.items():
        back = tmp_path / "whole" / name
        assert back.exists() == (name != "onnx/model.onnx") and (not back.exists() or back.read_bytes() == content)
    models.save(model, tmp_path / "text", like=source)
    assert not (tmp_path / "text" / "2_Dense").exists()  # the control
    (source / "modules.json").write_text("[")
    with pytest.raises(ValueError, match=r"modules\.json: it cannot be read as JSON"):
        models.save(model, tmp_path / "other", like=source, whole=True)
    assert not (tmp_path / "other").exists()


def test_the_publishers_own_names_of_gte(tmp_path):
    """Another prefix, scores of tokens beside the model, and a scaling of positions by `ntk`."""
    arrays = write(tmp_path, "gte plain")
    want, config = models.load(tmp_path), json.loads((tmp_path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"model_type": "new", "rope_theta": theta, "position_embedding_type": "rope", "pack_qkv": True}
    config |= {"architectures": ["NewModel", "NewForTokenClassification"], "layer_norm_type": "layer_norm"}
    config |= {"logn_attention_scale": False, "unpad_inputs": False, "use_memory_efficient_attention": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scores = {"classifier.weight": np.ones((1, 24), np.float32), "classifier.bias": np.ones(1, np.float32)}
    rename = lambda key: key.replace("gte.", "new.")
    rewrite(tmp_path, arrays | scores, rename)
    model, notes = load_and_list(tmp_path)
    assert same_trees(model, want) and len(notes) == 1 and "left unread: classifier." in notes[0]
    models.save(model, tmp_path / "back", like=tmp_path, whole=True)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == {rename(key) for key in arrays | scores}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "ntk", "factor": 8.0}}))
    rotary = load_and_list(tmp_path)[0].stacks[0].blocks.members[0].mixer.layer.rotary
    pairs = np.arange(2)  # 24 channels in 6 heads
    expected = (theta * 8.0) ** (-pairs / 2) / 8.0 ** (2 / 4)
    frequencies = rotary.scaling.frequencies(4, rotary.theta, jnp.ones((1, 1, 1), jnp.int32))[0]
    assert np.allclose(np.ravel(frequencies), expected, rtol=1e-6)
    assert not np.allclose(np.ravel(frequencies), expected * 8.0 ** (2 / 4), rtol=1e-2)
    mixed = {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": mixed}))
    with pytest.raises(ValueError, match=r"mixed_b=0.6 is not supported for this family"):
        models.load(tmp_path)
