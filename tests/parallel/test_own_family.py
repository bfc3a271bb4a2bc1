"""A user's family (`docs/extending.md`) is built, published, loaded and laid out like the package's families."""

import dataclasses
import json
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extending import beside
from plan_models import batch_of, filled, plan_over
from plan_parity import alone, differences, program_under
from safetensors.numpy import load_file, save_file

from eqformer import models, nn, parallel, planning


ROUNDING = 50 * float(np.finfo(np.float32).eps)


@pytest.fixture
def page():
    """The page's names, its family registered."""
    page = beside("persimmon")
    if "persimmon" not in models.FAMILIES:
        models.register(page.PERSIMMON)
    return page


def tiny(page, **more):
    return page.PersimmonConfig(61, 32, 4, 4, 4, 20, theta=1e4, max_seq=64, **more)


# What transformers says of a tiny model, and its first four logits at the last token.
SAID = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2}
SAID |= {"num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-5}
SAID |= {"hidden_act": "relu2", "qk_layernorm": True, "tie_word_embeddings": False}
SAID |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
SAID |= {"model_type": "persimmon", "architectures": ["PersimmonForCausalLM"]}
THEIRS = [-1.1212452, -0.62165099, -2.6276150, -0.98654252]


def drawn(name, shape):
    """A weight that is a function of its name, as when transformers' logits were taken."""
    scale = "norm" in name and name.endswith("weight")
    return np.random.default_rng(zlib.crc32(name.encode())).normal(scale, 0.2, shape).astype(np.float32)


def published(page, folder):
    """A folder as transformers writes it, of the two layers above."""
    config = dataclasses.replace(tiny(page), layers=2)
    models.save(filled(lambda: models.build(config, key=jax.random.key(0))), folder / "shapes", config=config)
    shapes = load_file(folder / "shapes" / "model.safetensors")
    assert len(shapes) == 36  # as many as transformers saves
    arrays = {name: drawn(name, array.shape) for name, array in shapes.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SAID))
    return config


def test_it_gives_the_logits_of_transformers(page, tmp_path):
    config = published(page, tmp_path)
    assert models.read_config(tmp_path) == config
    model, ids = models.load(tmp_path), jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    run = eqx.filter_jit(lambda model: model(ids)[0][0, -1, :4])
    assert np.allclose(run(model), THEIRS, atol=2e-5)
    whole = eqx.tree_at(lambda m: m.stacks[0].blocks.mixer.layer.rotary, model, nn.Rotary(8, 1e4))  # all of a head
    assert not np.allclose(run(whole), THEIRS, atol=1e-2)
    (tmp_path / "config.json").write_text(json.dumps(SAID | {"qk_layernorm": False}))
    with pytest.raises(ValueError, match="qk_layernorm=False is not supported"):
        models.load(tmp_path)


def test_it_is_saved_and_loaded_alone_and_under_a_plan_bit_by_bit(page, tmp_path):
    config = tiny(page)
    model = filled(lambda: models.build(config, key=jax.random.key(1)))
    models.save(model, tmp_path / "saved", config=config)
    mesh = parallel.make_mesh(fsdp=2, pipe=2, tensor=2)
    plan = parallel.Plan(mesh, zero=3, smallest=1, microbatches=2)
    alone, cut = models.load(tmp_path / "saved"), models.load(tmp_path / "saved", plan=plan)
    arrays = lambda model: eqx.filter(model, eqx.is_array)
    same = lambda one, other: jax.tree.all(jax.tree.map(np.array_equal, arrays(one), arrays(other)))
    assert same(alone, model) and same(cut, model)
    query = cut.stacks[0].blocks.mixer.layer.query.weight  # type: ignore[attr-defined]
    assert query.shape == (4, 4, 8, 32) and query.addressable_shards[0].data.shape == (2, 2, 8, 16)
    bias: Any = lambda m: m.norm.bias
    other = eqx.tree_at(bias, model, bias(model) + 1)
    assert not same(other, model)


MESHES = [
    ({"fsdp": 2, "pipe": 2, "tensor": 2}, {"zero": 2, "microbatches": 2, "residual": "feature", "smallest": 1}),
    ({"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "residual": "sequence", "smallest": 1}),
    ({"replica": 2, "fsdp": 2, "tensor": 2}, {"zero": 1, "smallest": 1}),
    ({"pipe": 4, "context": 2}, {"schedule": "zb-h1", "microbatches": 4}),
]


@pytest.mark.grid
@pytest.mark.parametrize("mesh,choices", MESHES)
def test_it_trains_over_any_mesh(page, mesh, choices):
    model = filled(lambda: models.build(tiny(page), key=jax.random.key(1)))
    batch = batch_of(model)
    want = alone(model, batch)
    run = program_under(plan_over(mesh, **choices), model, batch)
    assert differences(run(model), want, ROUNDING) == {}
    turned = lambda m: m.stacks[0].blocks.mixer.norm.bias
    other = eqx.tree_at(turned, model, turned(model) + 1e-3)
    assert differences(run(other), want, ROUNDING) != {}


@pytest.mark.quick
def test_it_is_counted(page):
    preset = lambda name: eqx.filter_eval_shape(lambda: models.build(name, key=jax.random.key(0)))
    assert planning.parameter_count(preset("persimmon-8b")) == 9_397_175_296  # as transformers counts
    small = preset("persimmon-byte-500k")
    config: Any = models.preset("persimmon-byte-500k")
    maps = config.layers * (96 * 16 * 4 * 6 + 2 * 96 * 384) + 256 * 96
    scores = config.layers * 2 * 96 * (64 + 1) / 2
    assert planning.flops_per_token(small, 64, backward=False) == pytest.approx(2 * (maps + scores))


CHANGES = {
    "name": {"name": "llama"},
    "model_type": {"model_type": "llama"},
    "architecture": {"architecture": "LlamaForCausalLM"},
    "class of configs": {"config": models.LlamaConfig},
    "name of a preset": {"presets": {"llama-3-8b": models.preset("llama-byte-1m")}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_another_family_has_is_refused(page, what):
    own = {
        "name": "other",
        "model_type": "other",
        "architecture": "Other",
        "config": type("C", (models.ModelConfig,), {}),
        "presets": {},
    }
    with pytest.raises(ValueError, match=rf"the family 'llama' has the same {what}, .*; give the new family another"):
        models.register(dataclasses.replace(page.PERSIMMON, **own | CHANGES[what]))
    assert "other" not in models.FAMILIES
    models.register(dataclasses.replace(page.PERSIMMON, **own))
    assert "other" in models.FAMILIES


def test_a_family_is_let_go_after_its_test(page):
    assert "other" not in models.FAMILIES  # see `listed_families` in conftest.py
    with pytest.raises(TypeError):
        models.FAMILIES["other"] = page.PERSIMMON  # type: ignore[index]
