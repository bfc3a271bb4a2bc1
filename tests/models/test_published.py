"""Each tiny configuration of transformers loads, gives the recorded logits, and is saved with the same arrays."""

import json
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of, LENGTH, source_of, weight
from haste import same_trees
from safetensors.numpy import load_file, save_file

from eqformer import kernels, models, nn
from eqformer.parallel import make_mesh, Plan, shardings


FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = json.loads((FIXTURES / "families.json").read_text())
compiled = eqx.filter_jit(lambda model, ids, tokens: model(ids, tokens)[0])
step = eqx.filter_jit(lambda model, ids, tokens, cache: model(ids, tokens, cache))


@pytest.fixture(scope="module")
def logits():
    with np.load(FIXTURES / "families.npz") as file:
        return dict(file)


def write(folder: Path, name: str) -> dict[str, np.ndarray]:
    """A case's folder, as transformers writes it."""
    arrays = {key: weight(key, shape) for key, shape in RECORDED[name]["shapes"].items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RECORDED[name]["config"]))
    return arrays


def read_for(model: Any, ids: Any) -> nn.Source | None:
    """What an encoder reads, where the model has one."""
    if model.encoder is None:
        return None
    source, is_there = source_of(np.asarray(ids))
    return nn.Source(jnp.asarray(source, jnp.int32), nn.right_padded(jnp.asarray(is_there.sum(1), jnp.int32), LENGTH))


def run(model: Any, ids: Any) -> jax.Array:
    """Logits of whole rows."""
    return compiled(model, ids, nn.with_source(nn.positions_like(ids.shape), read_for(model, ids)))


def decoded(model: Any, ids: np.ndarray) -> jax.Array:
    """Logits of the model given one token at a time, and a source with the first."""
    cache, found = model.init_cache(2, LENGTH), []
    for place in range(LENGTH):
        token, its = jnp.asarray(ids[:, place : place + 1], jnp.int32), nn.Tokens(jnp.full((2, 1), place, jnp.int32))
        one, cache = step(model, token, its if place else nn.with_source(its, read_for(model, ids)), cache)
        found.append(one)
    return jnp.concatenate(found, axis=1)


def close(got, want, tolerance=2e-5):
    return np.max(np.abs(np.asarray(got) - want)) <= tolerance * np.std(want)


def float32s(name):
    """How far float32 may be from these logits, made in float64: by twice what transformers' own float32 is."""
    return max(2e-5, 2 * RECORDED[name]["rounding"])


# A case of each family, the smallest one with all kinds of its layers; the others are of the grid.
BY_DEFAULT = {
    "granite_swa bases",
    "granitemoe_swa shared",
    "hy_v3 chosen dense layers",
    "deepseek_v4 plain",
    "glm5_next_text plain",
    "qwen4_exp_text plain",
    "hy_v4 plain",
    "olmo_hybrid chosen layers",
    "cwm windows",
    "glm plain",
    "jais2 plain",
    "olmo clipped",
    "solar_open plain",
    "dots1 late windows",
    "exaone_moe windows",
    "afmoe windows",
    "granitemoe plain",
    "granitemoeshared shared",
    "flex_olmo normalised",
    "apertus biased",
    "arcee biased",
    "cohere2 windows",
    "glm4_moe_lite plain",
    "gpt_neox plain",
    "helium plain",
    "starcoder2 window",
    "stablelm side by side",
    "lfm3 windows",
    "mellum some dense",
    "vaultgemma odd",
    "laguna gates of channels",
    "step3p5 padded lists",
    "mimo_v2_flash some dense",
    "bailing_hybrid unbounded",
    "bamba biased",
    "bert plain",
    "distilbert narrow",
    "eurobert tied",
    "gte plain",
    "mpnet plain",
    "nomic_bert wide heads",
    "roberta plain",
    "cohere normed",
    "deepseek_v2 groups",
    "deepseek_v32 chosen keys",
    "deepseek_v3 yarn",
    "gemma narrow heads",
    "gemma2 odd",
    "gemma3_text both scaled",
    "glm4 wide",
    "gpt2 plain",
    "gpt_oss no scaling",
    "granite untied",
    "granitemoehybrid experts",
    "llama llama3",
    "llama4_text chosen layers",
    "mamba2 one group, steps within limits",
    "mistral wide heads",
    "mixtral window",
    "nanochat tied",
    "nemotron_h experts of a latent",
    "olmo2 grouped",
    "olmo3 yarn, layers left over",
    "olmoe normalised",
    "phi3 long",
    "phimoe biased",
    "qwen2 last layers' window",
    "qwen2_moe some dense",
    "qwen3 tied",
    "qwen3_moe yarn",
    "qwen3_next chosen layers",
    "smollm3 period of four",
    "ernie4_5 biased",
    "ernie4_5_moe some dense",
    "exaone4 chosen layers",
    "falcon_h1 groups normed",
    "gemma4_text vectors of layers, shared keys",
    "glm4_moe plain",
    "glm_moe_dsa shared choices",
    "hunyuan_v1_dense alpha",
    "hunyuan_v1_moe each layer's own",
    "kimi_k3_text groups",
    "kimi_linear groups",
    "lfm2 chosen layers",
    "lfm2_moe some dense",
    "minimax_m2 plain",
    "minimax_m3_vl_text chosen layers",
    "ministral3 plain",
    "muse_glimmer_text chosen layers",
    "modernbert untied and biased",
    "mistral4 plain",
    "mistral_large4_text shared latents",
    "qwen3_5_moe_text yarn",
    "qwen3_5_text chosen layers",
    "internlm3 biased",
    "sdar plain",
    "opt narrow table",
    "phi tied",
    "codegen plain",
    "gpt_bigcode all key heads",
    "gpt_neo chosen layers",
    "gptj tied",
    "falcon two norms",
    "bloom plain",
    "mpt clipped",
    "nemotron biased",
    "axk1 chosen layers",
    "cohere2_moe summed",
    "flint biased",
    "exaone biased",
    "hyperclovax plain",
    "iquestcoder biased",
    "ministral all windows",
    "minicpm3 plain",
    "youtu halves",
    "sarvam_moe plain",
    "sarvam_mla yarn",
    "seed_oss biased",
    "t5 a head of its own",
    "t5gemma unlike halves",
    "t5gemma2 even window",
}
# The default run compares the logits of these cases, which together have layers of nearly all kinds. It only reads and
# writes the other cases, and leaves their logits to the grid.
LOGITS_BY_DEFAULT = {
    "bert plain",
    "deepseek_v3 yarn",
    "deepseek_v4 plain",
    "falcon_h1 groups normed",
    "gemma2 odd",
    "gemma3_text both scaled",
    "gpt2 plain",
    "gpt_oss no scaling",
    "granite untied",
    "lfm2 chosen layers",
    "llama llama3",
    "mamba2 one group, steps within limits",
    "mixtral window",
    "modernbert untied and biased",
    "nemotron_h experts of a latent",
    "phi3 long",
    "qwen2 last layers' window",
    "qwen3 tied",
    "qwen3_next chosen layers",
    "t5 a head of its own",
}


def test_each_family_has_a_case_by_default():
    families = [name.split()[0] for name in BY_DEFAULT]
    assert set(RECORDED) >= BY_DEFAULT >= LOGITS_BY_DEFAULT and sorted(families) == sorted(
        {name.split()[0] for name in RECORDED}
    )


def check_round_trip(model: Any, arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Check that a model read from a folder is written to another one with the same arrays and configuration."""
    numbers = models.read_config(folder)
    models.save(model, folder / "back", config=numbers, shard_bytes=20_000)
    assert models.read_config(folder / "back") == numbers
    files = sorted((folder / "back").glob("*.safetensors"))
    back = {key: array for file in files for key, array in load_file(file).items()}
    assert len(files) > 1 and set(back) == set(arrays)
    assert all(np.array_equal(back[key], array) for key, array in arrays.items())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in LOGITS_BY_DEFAULT else pytest.mark.grid) for name in RECORDED],
)
def test_a_published_model_gives_its_logits_and_goes_back_out(name, logits, tmp_path, record_property):
    arrays = write(tmp_path, name)
    model, ids = models.load(tmp_path), jnp.asarray(ids_of(RECORDED[name]["config"]["vocab_size"]), jnp.int32)
    found = run(model, ids)
    assert close(found, logits[name], float32s(name)) and not close(found, logits[name][:, ::-1], 1e-2)
    record_property("difference", float(np.max(np.abs(found - logits[name])) / np.std(logits[name])))
    check_round_trip(model, arrays, tmp_path)


@pytest.mark.parametrize("name", sorted(BY_DEFAULT - LOGITS_BY_DEFAULT))
def test_a_published_model_goes_back_out(name, tmp_path):
    arrays = write(tmp_path, name)
    check_round_trip(models.load(tmp_path), arrays, tmp_path)


ENCODERS = {
    "bert",
    "distilbert",
    "eurobert",
    "gte",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
}  # of which a token sees later ones
WITHOUT_DECODING = {name for name, family in models.FAMILIES.items() if not family.decodes_tokens}


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in RECORDED if name.split()[0] not in WITHOUT_DECODING])
def test_cached_decoding_gives_its_logits(name, logits, tmp_path):
    write(tmp_path, name)
    found = decoded(models.load(tmp_path), ids_of(RECORDED[name]["config"]["vocab_size"]))
    assert close(found, logits[name], float32s(name))


def test_each_device_reads_its_own_part(tmp_path):
    """Straight onto a mesh: the arrays are those of one device, where a plan wants them."""
    write(tmp_path, "mixtral plain")
    plan = Plan(make_mesh(pipe=3, tensor=2, devices=jax.devices()[:6]))
    where = lambda shapes: shardings(plan.parameter_specs(shapes), plan.mesh)
    whole, split = models.load(tmp_path), models.load(tmp_path, plan=plan)
    specs = jax.tree.leaves(where(eqx.filter(whole, eqx.is_array)))
    for one, other, sharding in zip(*(jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (whole, split)), specs):
        assert other.sharding == sharding and np.array_equal(one, other)
    block: Any = split.stacks[0].blocks
    experts = block.feed_forward.layer.experts.mlps.up.weight
    assert experts.addressable_shards[0].data.shape == (1, 5, 10, 24)  # of 3 layers and 20 hidden features


def test_parameters_keep_their_dtype_or_get_another(tmp_path):
    arrays = {name: array.astype("bfloat16") for name, array in write(tmp_path, "llama tied").items()}
    save_file(arrays, tmp_path / "model.safetensors")
    half, wide = models.load(tmp_path), models.load(tmp_path, dtype="float32")
    assert half.compute_dtype == "bfloat16" and wide.compute_dtype == "float32"
    for model, dtype in ((half, "bfloat16"), (wide, "float32")):
        assert {str(x.dtype) for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))} == {dtype}
    models.save(half, tmp_path / "back", config=models.read_config(tmp_path))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[name].dtype == array.dtype and np.array_equal(back[name], array) for name, array in arrays.items())


def test_dtypes_of_one_folder_may_differ(tmp_path):
    """As in DeepSeek-V3, whose biases of the choice of experts are wider than its weights."""
    is_wide, arrays = lambda name: name.endswith("e_score_correction_bias"), write(tmp_path, "deepseek_v3 plain")
    mixed = {name: array if is_wide(name) else array.astype("bfloat16") for name, array in arrays.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    progress = []
    model = models.load(tmp_path, progress=lambda *bytes_of: progress.append(bytes_of))
    model = nn.with_execution(model, core=kernels.ReferenceAttention())  # the default one takes no steps of four tokens
    assert progress[-1] == (sum(array.nbytes for array in mixed.values()),) * 2 and model.compute_dtype == "bfloat16"
    assert eqx.filter_eval_shape(model, jnp.zeros((1, 4), jnp.int32))[0].dtype == "float32"
    models.save(model, tmp_path / "back", config=models.read_config(tmp_path))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[name].dtype == array.dtype and np.array_equal(back[name], array) for name, array in mixed.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    narrow: Any = models.load(tmp_path, dtype="bfloat16")
    models.save(narrow, tmp_path / "narrow", config=models.read_config(tmp_path))
    kept = load_file(tmp_path / "narrow" / "model.safetensors")  # the biases stay float32 whatever dtype is asked for
    assert all(kept[name].dtype == array.dtype and np.array_equal(kept[name], array) for name, array in mixed.items())


def test_experts_are_read_one_by_one_or_as_one_array_of_a_layer(tmp_path):
    """Qwen3.5 is published with the second, and transformers writes the first; saved again they are as they were."""
    arrays = write(tmp_path, "qwen3_5_moe_text yarn")
    want, layer, fused = models.load(tmp_path), "model.layers.{}.mlp.experts.", dict(arrays)
    of = lambda prefix, name: np.stack([fused.pop(f"{prefix}{number}.{name}_proj.weight") for number in range(7)])
    for prefix in map(layer.format, range(2)):
        fused[f"{prefix}gate_up_proj"] = np.concatenate([of(prefix, "gate"), of(prefix, "up")], axis=1)
        fused[f"{prefix}down_proj"] = of(prefix, "down")
    save_file(fused, tmp_path / "model.safetensors")
    assert same_trees(models.load(tmp_path), want)
    models.save(want, tmp_path / "back", like=tmp_path)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == fused.keys() and all(np.array_equal(back[name], array) for name, array in fused.items())
    half = {name: array for name, array in fused.items() if name != f"{layer.format(1)}gate_up_proj"}
    save_file(half, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not in the folder: model.layers.1.mlp.experts"):
        models.load(tmp_path)


def test_dense_layers_of_mixtures_are_read_by_either_name(tmp_path):
    """Kimi Linear's are published as `mlp`, and transformers writes them as `block_sparse_moe`."""
    arrays = write(tmp_path, "kimi_linear plain")
    want = models.load(tmp_path)
    theirs = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): array for name, array in arrays.items()}
    assert theirs.keys() != arrays.keys()
    save_file(theirs, tmp_path / "model.safetensors")
    assert same_trees(models.load(tmp_path), want)
    models.save(want, tmp_path / "back", like=tmp_path)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == theirs.keys()


def test_layers_of_unlike_dtypes_lose_nothing(tmp_path):
    is_wide, arrays = lambda name: "layers.1." in name, write(tmp_path, "llama plain")
    mixed = {name: array if is_wide(name) else array.astype("bfloat16") for name, array in arrays.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    models.save(models.load(tmp_path), tmp_path / "back", config=models.read_config(tmp_path))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(back[name], array) for name, array in mixed.items())
    assert {str(back[name].dtype) for name in mixed if "layers.2." in name} == {"float32"}


@pytest.mark.parametrize("dtype", ["int8", "bfloat"])
def test_a_dtype_that_no_weights_have_is_refused(dtype, tmp_path):
    write(tmp_path, "llama tied")
    with pytest.raises(ValueError, match=rf"load\(.*dtype='{dtype}'.* is no floating-point dtype of weights; give one"):
        models.load(tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", ["llama tied", pytest.param("gemma2 alternating", marks=pytest.mark.grid)])
def test_a_stored_head_of_a_tied_model_is_its_table_or_a_head_of_its_own(name, tmp_path):
    """As in transformers: a flag that says tied beside two different tables does not tie, and a warning says so."""
    arrays = write(tmp_path, name)
    want, table = models.load(tmp_path), arrays["model.embed_tokens.weight"]
    save_file(arrays | {"lm_head.weight": table.copy()}, tmp_path / "model.safetensors")
    assert same_trees(models.load(tmp_path), want)
    other = table.copy()
    other[-1, -1] += 1
    config = json.loads((tmp_path / "config.json").read_text())
    save_file(arrays | {"lm_head.weight": other}, tmp_path / "model.safetensors")
    told = "ties the head to the table, but lm_head.weight differs from model.embed_tokens.weight; both are read"
    with pytest.warns(UserWarning, match=told):
        flagged: Any = models.load(tmp_path)
    assert not models.read_config(tmp_path).tied  # type: ignore[attr-defined]
    assert np.array_equal(flagged.head.weight, other) and np.array_equal(flagged.embedding.weight, table)
    models.save(flagged, tmp_path / "again", like=tmp_path)
    with pytest.warns(UserWarning, match="both are read"):
        assert same_trees(models.load(tmp_path / "again"), flagged)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert same_trees(models.load(tmp_path), flagged)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(arrays | {"lm_head.weight": table[:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight: it has shape"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        models.load(tmp_path)
    without = {key: array for key, array in arrays.items() if key != "model.embed_tokens.weight"}
    save_file(without | {"lm_head.weight": table}, tmp_path / "model.safetensors")  # the one table, by the other name
    assert same_trees(models.load(tmp_path), want)


@pytest.mark.grid
def test_keys_of_layers_that_read_others_are_left_where_they_are(tmp_path):
    """They are published and never used; those of a layer that has its own are another matter."""
    arrays = write(tmp_path, "gemma4_text vectors of layers, shared keys")
    want = models.load(tmp_path)
    extra = {
        f"model.layers.{layer}.self_attn.{part}": np.ones(3, np.float32)
        for layer, part in ((3, "k_proj.weight"), (5, "v_proj.weight"), (5, "k_norm.weight"))
    }
    save_file(arrays | extra, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"load\(.*are left unread: model.layers.3. \(1\), model.layers.5. \(2\)\.$"):
        assert same_trees(models.load(tmp_path), want)
    save_file(arrays | {"model.layers.2.self_attn.k_bias": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not in the model: model.layers.2.self_attn.k_bias \(1\)"):
        models.load(tmp_path)
