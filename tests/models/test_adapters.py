"""Adapters of peft load into each family with peft's logits, and are saved again with the same arrays."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, weight
from safetensors.numpy import load_file, save_file
from test_published import close, run, write

from eqformer import models, nn


FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = json.loads((FIXTURES / "adapters.json").read_text())
CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def logits():
    with np.load(FIXTURES / "adapters.npz") as file:
        return dict(file)


def adapter(folder: Path, name: str, **changes: Any) -> dict[str, np.ndarray]:
    """The case's adapter, as peft writes it but for `changes` of its configuration."""
    arrays = {key: weight(key, shape) for key, shape in RECORDED[name]["shapes"].items()}
    folder.mkdir()
    save_file(arrays, folder / ARRAYS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(RECORDED[name]["config"] | changes))
    return arrays


@functools.cache
def based(name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The case's model without the adapter, its numbers, and its arrays as they are published."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = write(Path(folder), name)
        return models.load(folder), models.read_config(folder), arrays


def product(name: str, module: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """`scale * B A` by the file and the configuration, in float64; inputs first where peft says so."""
    config = RECORDED[name]["config"]
    a, b = (arrays[f"base_model.model.{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
    alphas = [alpha for end, alpha in config["alpha_pattern"].items() if module.endswith(end)]
    scale = (alphas or [config["lora_alpha"]])[0] / len(a) ** (0.5 if config["use_rslora"] else 1)
    return scale * (b @ a).T if config["fan_in_fan_out"] else scale * b @ a


@pytest.mark.by_default("gpt2 plain", "llama llama3")
@pytest.mark.parametrize("name", RECORDED)
def test_the_merged_model_is_published_with_the_products_added(name, tmp_path):
    model, numbers, before = based(name)
    arrays = adapter(tmp_path / "adapter", name)
    adapted = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    models.save(merged(adapted), tmp_path / "merged", config=numbers)
    after = load_file(tmp_path / "merged" / "model.safetensors")
    wanted = {key.split(".model.", 1)[1].rsplit(".", 2)[0] for key in arrays}
    changed = {key.removesuffix(".weight") for key in before if not np.array_equal(before[key], after[key])}
    assert changed == wanted
    for module in wanted:
        change = after[f"{module}.weight"] - np.float64(before[f"{module}.weight"])
        expected = product(name, module, arrays)
        assert np.allclose(change, expected, 0, 1e-5) and not np.allclose(change, np.flip(expected), 0, 1e-2)


@pytest.mark.by_default("phi3 window")
@pytest.mark.parametrize("name", RECORDED)
def test_an_adapter_gives_pefts_logits(name, logits, tmp_path):
    model, numbers, _ = based(name)
    ids = jnp.asarray(ids_of(model.vocab), jnp.int32)
    adapter(tmp_path / "adapter", name)
    adapted = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    assert close(run(adapted, ids), logits[name])
    assert not close(run(model, ids), logits[name], 1e-2)


@pytest.mark.by_default("phi3 window")
@pytest.mark.parametrize("name", RECORDED)
def test_an_adapter_goes_back_out(name, tmp_path):
    model, numbers, _ = based(name)
    arrays = adapter(tmp_path / "adapter", name)
    adapted = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    models.save_adapter(adapted, tmp_path / "back", config=numbers, base="somewhere")
    again = models.load_adapter(model, tmp_path / "back", config=numbers)
    assert are_close(nn.lora_factors(again), nn.lora_factors(adapted), 1e-6)
    back = load_file(tmp_path / "back" / ARRAYS)
    # Layers without factors come back as zeros, and factors narrower than other layers' as wide as those.
    assert set(arrays) <= set(back) and not any(back[key].any() for key in set(back) - set(arrays))
    same = [key for key, array in arrays.items() if array.shape == back[key].shape and "lora_A" in key]
    assert same and all(np.array_equal(back[key], arrays[key]) for key in same)
    assert json.loads((tmp_path / "back" / CONFIG).read_text())["base_model_name_or_path"] == "somewhere"


def with_factors(model: Any, where: Any, **options: Any) -> Any:
    """The model with random factors, B's too."""
    adapted = eqx.filter_jit(lambda model: nn.with_lora(model, where, **options, key=jax.random.key(1)))(model)
    draw = np.random.default_rng(0)
    new = jax.tree.map(lambda x: jnp.asarray(0.3 * draw.normal(size=x.shape), x.dtype), nn.lora_factors(adapted))
    return eqx.combine(new, adapted)


merged = eqx.filter_jit(nn.merge_lora)


def are_close(one: Any, other: Any, rtol: float, atol: float = 0.0) -> bool:
    """Whether two trees of arrays are of one structure and close, leaf by leaf."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(np.allclose(*pair, rtol, atol) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.mark.by_default("phi3 window-where0-self_attn.qkv_proj")
@pytest.mark.parametrize(
    "name, where, fused",
    [
        ("phi3 window", ["query", "value", "down"], "self_attn.qkv_proj"),
        ("gpt2 plain", [nn.Attention], "attn.c_attn"),
        ("deepseek_v3 plain", ["value_up", "query_rope", "latent_down"], "self_attn.kv_b_proj"),
        ("mamba2 grouped", ["query", "step", "output"], "mixer.in_proj"),
    ],
)
def test_maps_published_as_one_are_written_as_blocks(name, where, fused, tmp_path):
    """Each has an A of its own: what is read back, with one wider A for all, computes the same."""
    model, numbers, _ = based(name)
    adapted = with_factors(model, where, rank=2, alpha=3.0)
    models.save_adapter(adapted, tmp_path / "out", config=numbers)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    arrays = load_file(tmp_path / "out" / ARRAYS)
    rows = {len(array) for key, array in arrays.items() if f"{fused}.lora_A" in key}
    assert rows == {{"phi3 window": 4, "gpt2 plain": 6, "deepseek_v3 plain": 2, "mamba2 grouped": 4}[name]}
    assert config["r"] == 2 or config["rank_pattern"]
    again = models.load_adapter(model, tmp_path / "out", config=numbers)
    found, wanted = (eqx.filter(merged(each), eqx.is_array) for each in (again, adapted))
    assert are_close(found, wanted, 1e-5, 1e-5)
    assert not are_close(eqx.filter(model, eqx.is_array), wanted, 1e-2, 1e-2)


def test_ranks_and_scales_of_one_model_may_differ(tmp_path):
    model, numbers, _ = based("llama plain")
    adapted = with_factors(model, ["query", "key", "value"], rank=2, alpha=3.0)
    adapted = nn.with_lora(
        adapted, ["sublayers[1].layer.up"], rank=3, alpha=5.0, rank_stabilized=True, key=jax.random.key(2)
    )
    write(tmp_path, "llama plain")
    models.save_adapter(adapted, tmp_path / "out", like=tmp_path)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(tmp_path)
    assert config["target_modules"] == [f"{x}_proj" for x in ("mlp.up", "self_attn.k", "self_attn.q", "self_attn.v")]
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (2, 3, {r"mlp\.up_proj": 3})
    assert config["alpha_pattern"] == {r"mlp\.up_proj": pytest.approx(5 * 3**0.5)}
    again: Any = models.load_adapter(model, tmp_path / "out", config=numbers, dtype="bfloat16")
    assert again.stacks[0].blocks.feed_forward.layer.up.scale == pytest.approx(5 / 3**0.5)
    assert {str(x.dtype) for x in jax.tree.leaves(nn.lora_factors(again))} == {"bfloat16"}


def test_factors_of_bfloat16_and_float16_are_held_by_float32(tmp_path):
    """From layer to layer, and side by side in one array, on the way in and out."""
    model, numbers, _ = based("gpt2 plain")
    arrays = adapter(tmp_path / "adapter", "gpt2 plain")
    dtype_of = lambda name: "bfloat16" if "h.1." in name else "float16"
    mixed = {name: array.astype(dtype_of(name)) for name, array in arrays.items()}
    save_file(mixed, tmp_path / "adapter" / ARRAYS)
    adapted: Any = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    wide = eqx.filter(adapted, eqx.is_array)
    assert {str(x.dtype) for x in jax.tree.leaves(nn.lora_factors(adapted))} == {"float32"}
    models.save_adapter(adapted, tmp_path / "back", config=numbers)
    back = load_file(tmp_path / "back" / ARRAYS)
    same = [name for name, array in mixed.items() if array.shape == back[name].shape]
    assert len(same) > len(mixed) / 2
    assert all(np.array_equal(back[name], mixed[name].astype(np.float32)) for name in same)

    where = lambda m: [getattr(m.stacks[0].blocks.mixer.layer, name).up.weight for name in ("query", "key")]
    narrow = [x.astype(dtype) for x, dtype in zip(where(adapted), ("bfloat16", "float16"))]
    models.save_adapter(eqx.tree_at(where, adapted, narrow), tmp_path / "beside", config=numbers)
    again = models.load_adapter(model, tmp_path / "beside", config=numbers)
    assert jax.tree.structure(eqx.filter(again, eqx.is_array)) == jax.tree.structure(wide)


def test_each_factor_keeps_its_own_dtype(tmp_path):
    """Of one that differs from layer to layer, one that holds them all."""
    model, numbers, _ = based("gpt2 plain")
    config: Any = RECORDED["gpt2 plain"]["config"]
    arrays = adapter(tmp_path / "adapter", "gpt2 plain")
    is_wide = lambda name: "lora_B" in name or "h.1." in name or "c_attn" not in name
    mixed = {name: array if is_wide(name) else array.astype("bfloat16") for name, array in arrays.items()}
    narrow = {name: array for name, array in mixed.items() if array.dtype != np.float32}
    assert min(mixed) in narrow and len(narrow) < len(mixed) / 2
    save_file(mixed, tmp_path / "adapter" / ARRAYS)
    adapted = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    assert {str(x.dtype) for x in jax.tree.leaves(nn.lora_factors(adapted))} == {"float32"}
    models.save_adapter(adapted, tmp_path / "back", config=numbers)
    back = load_file(tmp_path / "back" / ARRAYS)
    same = [name for name, array in mixed.items() if array.shape == back[name].shape]
    assert config["r"] and len(same) > len(mixed) / 2
    assert all(np.array_equal(back[name], mixed[name].astype(np.float32)) for name in same)

    halves = {name: array.astype("bfloat16" if "lora_A" in name else "float32") for name, array in arrays.items()}
    save_file(halves, tmp_path / "adapter" / ARRAYS)
    adapted: Any = models.load_adapter(model, tmp_path / "adapter", config=numbers)
    query = adapted.stacks[0].blocks.mixer.layer.query
    assert (str(query.down.weight.dtype), str(query.up.weight.dtype)) == ("bfloat16", "float32")
    models.save_adapter(adapted, tmp_path / "halves", config=numbers)
    back = load_file(tmp_path / "halves" / ARRAYS)
    assert {name: str(array.dtype) for name, array in back.items() if name in halves} == {
        name: str(array.dtype) for name, array in halves.items()
    }
    same = [name for name, array in halves.items() if array.shape == back[name].shape]
    assert all(np.array_equal(back[name], halves[name]) for name in same)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"use_dora": True}, "use_dora=True; a plain LoRA has none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all' is not supported; it must be one of 'none'"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": "many"}, "r='many' is not supported; it must be a positive number"),
        ({"target_modules": []}, r"target_modules=\(\); list the modules"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear'"),
        ({"target_modules": "(q_proj"}, "a pattern for modules cannot be read"),
        ({"rank_pattern": {"[": 4}}, r"adapter_config.json: a pattern for modules cannot be read"),
        ({"r": 5}, r"0.self_attn.qkv_proj: A has shape \(4, 24\) and B \(48, 4\); the configured rank is 5"),
        (
            {"target_modules": ["qkv_proj"]},
            r"for no linear map that the configuration names: base_model\.model\..*\(12\)",
        ),
        ({"exclude_modules": ["o_proj"]}, r"for no linear map that the configuration names: .*o_proj.*\(6\)"),
        ({"target_modules": ["nothing"]}, "for no linear map"),
        ({"layers_to_transform": [0, 1]}, r"for no linear map that the configuration names: .*layers\.2.*\(6\)"),
        ({"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}, "not in the file: .*down_proj"),
    ],
)
def test_what_is_no_plain_lora_is_refused(changes, words, tmp_path):
    model, numbers, _ = based("phi3 window")
    adapter(tmp_path / "adapter", "phi3 window", **changes)
    with pytest.raises(ValueError, match=words):
        models.load_adapter(model, tmp_path / "adapter", config=numbers)


def test_what_cannot_be_is_refused(tmp_path):
    model, numbers, _ = based("llama tied")
    adapted = with_factors(model, ["query"], rank=2)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"anything")
    with pytest.raises(
        ValueError, match=r"load_adapter\(.* no adapter_model.safetensors .* Pickled weights .* are never read"
    ):
        models.load_adapter(model, pickled, config=numbers)
    models.save_adapter(adapted, tmp_path / "out", config=numbers)
    (tmp_path / "out" / "adapter_model.bin").write_bytes(b"anything")
    with pytest.warns(UserWarning, match=r"load_adapter\(.*that are not read: adapter_model.bin\.$"):
        models.load_adapter(model, tmp_path / "out", config=numbers)
    (tmp_path / "out" / "adapter_model.bin").unlink()
    for call in (models.save_adapter, models.load_adapter):
        with pytest.raises(ValueError, match="this path exists already|has LoRAs already"):
            call(adapted, tmp_path / "out", config=numbers)
        with pytest.raises(ValueError, match="give either like=, the folder that the model came from, or the config="):
            call(adapted, tmp_path / "out" / "side") if call is models.save_adapter else call(model, tmp_path / "out")
    with pytest.raises(ValueError, match="the model is not one of"):
        models.load_adapter(model, tmp_path / "out", config=models.preset("llama-byte-1m"))
    with pytest.raises(ValueError, match="the model has no LoRA"):
        models.save_adapter(model, tmp_path / "none", config=numbers)
    experts, of_experts, _ = based("gpt_oss plain")
    with pytest.raises(ValueError, match=r"mlps.up are not published as modules of their own"):
        models.save_adapter(with_factors(experts, ["mlps.up"], rank=2), tmp_path / "none", config=of_experts)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [CONFIG, ARRAYS]
    assert not (tmp_path / "none").exists()
