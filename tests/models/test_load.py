"""Loading onto meshes: the shards that each device holds, and the memory that loading takes."""

import functools
import json
import tracemalloc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from nn_reference import random_module
from safetensors.numpy import load_file, save_file
from test_published import RECORDED, write

from eqformer import models, nn
from eqformer.models import _folder
from eqformer.models._leaf_reader import _empty_shards
from eqformer.parallel import make_mesh, Plan


@functools.cache
def tiny(**changes):
    """A model whose arrays are large beside what loading makes otherwise: 30 of 256 KiB among them."""
    config = models.LlamaConfig(vocab=512, embed=128, layers=8, heads=4, kv_heads=2, mlp=512, **changes)
    return config, random_module(models.build, config, key=jax.random.key(0))


def write_published(folder, name, **changes):
    """Write a case's folder with changed attributes."""
    folder.mkdir()
    write(folder, name)
    (folder / "config.json").write_text(json.dumps(RECORDED[name]["config"] | changes))


def arrays_of(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_array))


def test_a_mesh_alone_splits_all_it_can(tmp_path):
    config, model = tiny()
    models.save(model, tmp_path / "published", config=config)
    mesh = make_mesh(fsdp=8)
    split = models.load(tmp_path / "published", mesh)
    assert all(np.array_equal(one, other) for one, other in zip(arrays_of(model), arrays_of(split), strict=True))
    shares = [x.nbytes // x.addressable_shards[0].data.nbytes for x in arrays_of(split) if x.size >= 1024]
    assert set(shares) == {8}
    again = models.load(tmp_path / "published", mesh, Plan(mesh))
    assert all(x.is_fully_replicated for x in arrays_of(again))
    with pytest.raises(ValueError, match="the plan is for another mesh"):
        models.load(tmp_path / "published", make_mesh(tensor=8), Plan(mesh))


def test_every_file_is_opened_once(tmp_path, monkeypatch):
    """The description of a tied model looks for a stored head, in the folder that the arrays are read from."""
    config = models.LlamaConfig(vocab=32, embed=16, layers=2, heads=2, kv_heads=2, mlp=16, tied=True)
    model = random_module(models.build, config, key=jax.random.key(0))
    models.save(model, tmp_path / "shards", config=config, shard_bytes=4000)
    opened, map_bytes = [], _folder.map_bytes
    monkeypatch.setattr(_folder, "map_bytes", lambda path: opened.append(path.name) or map_bytes(path))
    models.load(tmp_path / "shards")
    assert len(opened) == len(set(opened)) == len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def test_layers_of_bfloat16_and_float16_are_held_by_float32(tmp_path):
    config = models.LlamaConfig(vocab=32, embed=16, layers=2, heads=2, kv_heads=2, mlp=16)
    model = random_module(models.build, config, key=jax.random.key(0))
    models.save(model, tmp_path / "mixed", config=config)
    (file,) = (tmp_path / "mixed").glob("*.safetensors")
    arrays = {name: x.astype("bfloat16" if ".1." in name else "float16") for name, x in load_file(file).items()}
    save_file(arrays, file)
    mixed: Any = models.load(tmp_path / "mixed")
    query = mixed.stacks[0].blocks.mixer.layer.query.weight
    assert query.dtype == jnp.float32
    for layer, dtype in enumerate(("float16", "bfloat16")):
        published = arrays[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert published.dtype == dtype and np.array_equal(query[layer].reshape(16, 16), published.astype(np.float32))


@pytest.mark.by_default("sizes0")
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 8}, {"fsdp": 2, "pipe": 2, "tensor": 2}])
def test_beside_the_parts_little_is_held(sizes, tmp_path):
    """The most memory that arrays of the host take: the model's own, since the devices are here, and one array more."""
    config, model = tiny(tied=True)
    models.save(model, tmp_path / "published", config=config)
    own = sum(x.nbytes for x in arrays_of(model))
    largest = 512 * 128 * 4
    plan = Plan(make_mesh(**sizes), zero=3, smallest=1) if sizes else None
    models.load(tmp_path / "published", plan=plan)  # which compiles what there is to compile
    tracemalloc.start()
    kept = models.load(tmp_path / "published", plan=plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    copies = sum(shard.data.nbytes for x in arrays_of(kept) for shard in x.addressable_shards) / own
    assert copies < (1.02 if not sizes or sizes == {"fsdp": 8} else 1.3)  # beside norms over `tensor`
    # Half of a copy of the model would be 5 times the largest; Python's garbage is up to once, until it is collected.
    assert own < peak < own + 3 * largest


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "expert": 2}])
def test_the_biases_of_choice_of_deepseek_v3_are_never_rounded(sizes, tmp_path):
    """Biases of 5 +- 0.02, which bfloat16 resolves to 0.03: rounded, they would choose other experts."""
    widths: dict[str, Any] = {
        "vocab": 32,
        "embed": 16,
        "layers": 2,
        "heads": 2,
        "mlp": 16,
        "expert_mlp": 8,
        "q_latent": 8,
    }
    config = models.DeepSeekV3Config(
        **widths, latent=8, head_dim=4, rope_dim=4, v_dim=4, experts=16, first_dense=1, top_k=2
    )
    model = eqx.filter_jit(lambda: models.build(config, key=jax.random.key(0)))()
    bias_of = lambda model: nn.modules(model, nn.TopKRouter)[0].selection_bias
    exact = 5 + 0.02 * np.random.default_rng(0).normal(size=bias_of(model).shape).astype(np.float32)
    model = eqx.tree_at(bias_of, model, jnp.asarray(exact))
    models.save(model, tmp_path / "wide", config=config)
    mesh = make_mesh(**sizes, devices=jax.devices()[:4]) if sizes else None
    narrow = models.load(tmp_path / "wide", mesh, dtype="bfloat16")
    assert narrow.embedding.weight.dtype == jnp.bfloat16 and np.array_equal(bias_of(narrow), exact)
    models.save(narrow, tmp_path / "narrow", config=config)
    for again in (models.load(tmp_path / "narrow"), nn.Precision("bfloat16", "bfloat16").apply(model)):
        assert again.embedding.weight.dtype == jnp.bfloat16 and np.array_equal(bias_of(again), exact)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    assert len(np.unique(rounded)) < 8  # of 16


@pytest.mark.quick
def test_a_process_makes_the_parts_of_its_own_devices_alone():
    leaf, sharding = jax.ShapeDtypeStruct((8, 512, 128), "float32"), NamedSharding(make_mesh(fsdp=8), P(None, "fsdp"))
    indices = sharding.devices_indices_map(leaf.shape)
    parts = _empty_shards(leaf, dict([*indices.items()][:1]))  # as a process that has the first of eight devices
    assert [part.values.shape for part in parts.values()] == [(8, 64, 128)]
    sharded = _empty_shards(leaf, indices).values()
    assert len({id(part) for part in sharded}) == 8 and all(part.holds((3,)) for part in sharded)
    replicated = _empty_shards(leaf, NamedSharding(make_mesh(fsdp=8), P()).devices_indices_map(leaf.shape)).values()
    assert len(replicated) == 8 and len({id(part) for part in replicated}) == 1


@pytest.mark.grid
def test_a_config_of_no_model_is_refused_by_its_folder_and_attributes(tmp_path):
    """A number of another part of the model is not named: a delta net's heads are not those of the attention."""
    write_published(tmp_path / "mixture", "deepseek_v3 kimi k2", n_group=4, topk_group=1)
    stated = "config.json states n_routed_experts=8, num_experts_per_tok=3: "
    with pytest.raises(ValueError, match=rf"^load\('.*'\): {stated}TopKRouter\(experts=8, top_k=3, .*choose more"):
        models.load_shapes(tmp_path / "mixture")
    write_published(tmp_path / "net", "qwen3_next plain", linear_num_key_heads=16)
    with pytest.raises(ValueError, match=r"^load\('.*'\): GatedDeltaNet\(heads=4, kv_heads=16\)"):
        models.load_shapes(tmp_path / "net")
