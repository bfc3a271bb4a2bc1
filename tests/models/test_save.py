"""Saving in the published format: files beside the weights, and errors before anything is written."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_published import write

from eqformer import models, nn


NAME = "llama plain"


def test_a_folder_goes_back_out_with_all_it_came_with(tmp_path):
    write(tmp_path, NAME)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": [7, 9], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("a tokenizer")
    (tmp_path / "chat_template.jinja").write_text("a template")
    (tmp_path / "notes.md").write_text("nothing to do with it")
    out = tmp_path / "out"
    models.save(models.load(tmp_path), out, like=tmp_path, attributes={"bos_token_id": 5}, files={"README.md": "mine"})
    config.pop("dtype")  # the newer name of the same
    assert json.loads((out / "config.json").read_text()) == config | {"torch_dtype": "float32", "bos_token_id": 5}
    kept = {path.name: path.read_text() for path in out.iterdir() if path.suffix not in (".safetensors", ".json")}
    assert kept == {"chat_template.jinja": "a template", "README.md": "mine"}
    assert (out / "tokenizer.json").read_text() == "a tokenizer"
    assert models.read_config(out) == models.read_config(tmp_path)
    again = jax.tree.leaves(models.load(out)), jax.tree.leaves(models.load(tmp_path))
    assert all(np.array_equal(one, other) for one, other in zip(*again, strict=True))
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / "notes.md").stat().st_mode}
    (tmp_path / "model.safetensors").unlink()  # as of the copy that a run has of what it began from
    models.save(models.load(out), tmp_path / "once more", like=tmp_path)
    assert load_file(tmp_path / "once more" / "model.safetensors").keys() == load_file(out / "model.safetensors").keys()


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    write(tmp_path, NAME)
    model, numbers, out = models.load(tmp_path), models.read_config(tmp_path), tmp_path / "out"
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="this path exists already"):
        models.save(model, tmp_path / "taken", config=numbers)
    for given in ({}, {"like": tmp_path, "config": numbers}):
        with pytest.raises(ValueError, match="give either like=, the folder that the model came from, or the config="):
            models.save(model, out, **given)
    with pytest.raises(ValueError, match=r"the model is not one of LlamaConfig\(.*: \(.*\), not \(.*was built from"):
        models.save(model, out, config=models.preset("llama-byte-1m"))
    with pytest.raises(ValueError, match="no common published format"):
        models.save(model, out, config=models.preset("jaxformer-byte-1m"))
    adapted = nn.with_lora(model, ["query"], rank=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="the model has LoRAs; merge them with nn.merge_lora"):
        models.save(adapted, out, config=numbers)
    mixtral = models.preset("mixtral-byte-500k")
    for limited, words in (
        (
            dataclasses.replace(mixtral, capacity=1.25),
            r"MixtralConfig\(capacity=1.25\)\): published configurations cannot express it, and published models",
        ),
        (mixtral, "is not one of"),
    ):
        with pytest.raises(ValueError, match=words):
            models.save(model, out, config=limited)
    with pytest.raises(TypeError):  # in the middle of writing
        models.save(model, out, config=numbers, files={"a": 3})  # pyright: ignore[reportArgumentType]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "taken"]
