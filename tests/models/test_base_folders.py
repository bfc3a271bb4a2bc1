"""Folders of base models, of wrapped modules and without a head load, with warnings about unusual contents."""

import json
import warnings
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import save_file
from test_attributes import PUBLISHED
from test_published import close, RECORDED, write

from eqformer import models, nn


FAMILIES = [family for family in PUBLISHED if PUBLISHED[family].base_prefix]


def rewrite(folder, arrays, rename):
    """Write arrays again by other names; those that get an empty name are left out."""
    renamed = {rename(name): array for name, array in arrays.items()}
    save_file({name: array for name, array in renamed.items() if name}, folder / "model.safetensors")


def load_and_list(folder, **options):
    """A model and the warnings of loading it, without what comes before the first colon and space."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = models.load(folder, **options)
    return model, [str(one.message).split(": ", 1)[1] for one in caught]


def named(model):
    """A model's arrays by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {nn.path_name(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.by_default("llama", "mistral")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_models_folder_is_the_model_but_for_its_head(family, tmp_path):
    """Names without the prefix and without the head, as `AutoModel` saves them; wrappers' prefixes before all names."""
    name, prefix = next(name for name in RECORDED if name.split()[0] == family), PUBLISHED[family].base_prefix
    arrays = write(tmp_path, name)
    want, usual = load_and_list(tmp_path)
    rewrite(tmp_path, arrays, lambda key: f"module._orig_mod.{key}".replace(".0.", ".0._checkpoint_wrapped_module."))
    wrapped, told = load_and_list(tmp_path)
    assert same_trees(wrapped, want)
    assert [line for line in told if line.startswith(f"prefixes of wrappers are left out of {len(arrays)} names")]

    rewrite(tmp_path, arrays, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else "")
    base, told = load_and_list(tmp_path)
    again, _ = load_and_list(tmp_path, dtype="float32")
    head = [key for key in arrays if not key.startswith(prefix)]
    lines = [line for line in told if line not in usual]
    assert any(f"{prefix} is put before them" in line for line in lines) != PUBLISHED[family].is_bare
    assert any("initialized by a fixed key" in line and all(key in line for key in head) for line in lines) == bool(
        head
    )
    own, its, fixed = named(base), named(want), named(again)
    differing = {path for path, array in own.items() if not np.array_equal(array, its[path])}
    assert own.keys() == its.keys() and len(differing) <= len(head)
    assert all(path.startswith(("head.", "norm.dense", "norm.output_norm", "logit_bias")) for path in differing)
    assert all(np.array_equal(fixed[path], own[path].astype(np.float32)) for path in differing)
    assert not differing or all(own[path].std() > 0 or own[path].ndim == 1 for path in differing)
    models.save(base, tmp_path / "again", like=tmp_path)
    assert same_trees(load_and_list(tmp_path / "again")[0], base)


def test_only_a_heads_arrays_may_be_missing(tmp_path):
    """The head of an untied model is initialized, as transformers does; shapes and meshes know of it too."""
    arrays = write(tmp_path, "llama plain")
    rewrite(tmp_path, arrays, lambda key: "" if key == "lm_head.weight" else key)
    model, (told,) = load_and_list(tmp_path)
    assert told.startswith("the folder has no lm_head.weight, like the folder of a base model")
    with pytest.warns(UserWarning, match="initialized by a fixed key"):
        shapes = models.load_shapes(tmp_path)
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    assert kinds(shapes) == kinds(model)
    of_t5 = write(tmp_path, "t5 a head of its own")  # has no prefix to lack
    rewrite(tmp_path, of_t5, lambda key: "" if key == "lm_head.weight" else key)
    config = json.loads((tmp_path / "config.json").read_text())
    for tied, notes in ((True, 0), (False, 1)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        model, told = load_and_list(tmp_path)
        assert len(told) == notes and (model.head is None) == tied
    assert told[0].startswith("the folder has no lm_head.weight")
    write(tmp_path, "llama plain")
    rewrite(tmp_path, arrays, lambda key: "" if key in ("lm_head.weight", "model.norm.weight") else key)
    with pytest.raises(ValueError, match=r"not in the folder: model.norm.weight \(1\)\.$"):
        models.load(tmp_path)
    rewrite(tmp_path, arrays, lambda key: key.replace("model.norm", "norm"))
    with pytest.raises(
        ValueError,
        match=r"not in the folder: model.norm.weight \(1\); in the folder, but not in the model: norm.weight \(1\)",
    ):
        models.load(tmp_path)


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "modernbert"])
def test_what_transformers_base_models_encode(family, tmp_path):
    """`AutoModel` saves the folder; its last hidden states are what we encode."""
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    name = next(name for name in RECORDED if name.split()[0] == family)
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", name)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["architectures"][0].endswith("Model")
    model, told = load_and_list(tmp_path / "base")
    assert told
    ids = np.arange(24).reshape(2, 12) % model.vocab
    with torch.no_grad():
        want = theirs(torch.tensor(ids)).last_hidden_state.numpy()
    bare: Any = eqx.tree_at(lambda m: m.norm, model, model.norm.norm) if family == "modernbert" else model
    got = eqx.filter_jit(lambda model, ids: model.encode(ids)[0])(bare, ids)
    assert close(got, want) and not close(got, want[:, ::-1])


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_transformers_logits_where_a_tie_is_said_beside_two_tables(tmp_path):
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    write(tmp_path, "llama plain")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model, (told,) = load_and_list(tmp_path)
    ids = np.arange(24).reshape(2, 12) % model.vocab
    with torch.no_grad():
        want = theirs(torch.tensor(ids)).logits.numpy()
    logits = eqx.filter_jit(lambda model, ids: model(ids)[0])
    assert "both are read" in told and close(logits(model, ids), want)
    assert not close(logits(eqx.tree_at(lambda m: m.head, model, None), ids), want)
