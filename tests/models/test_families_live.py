"""Published families in transformers and back: fresh weights, logits, decoding and state dicts, if it is installed."""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from family_weights import ids_of, source_of, weight
from safetensors.numpy import save_file
from test_attributes import numbers_of, PUBLISHED
from test_families import shapes_of
from test_published import close, decoded, FIXTURES, float32s, RECORDED, run, WITHOUT_DECODING
from test_published_configs import meaning

from eqformer import models
from eqformer.models._attributes import Attribute
from eqformer.models._config_types import PublishedConfig
from eqformer.models._folder import Folder
from eqformer.planning import parameter_count


pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")


sys.path.append(str(FIXTURES))

import unlisted  # noqa: F401


def opened(folder: Path):
    """The model that transformers reads there; nothing is missing, left over or of another shape."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(loading.values()), loading
    return model.eval()


def made(folder: Path, name: str):
    """A case's model with weights other than the fixtures', saved by transformers."""
    (folder / "drawn").mkdir()
    arrays = {key: weight(f"fresh {key}", shape) for key, shape in RECORDED[name]["shapes"].items()}
    save_file(arrays, folder / "drawn" / "model.safetensors", metadata={"format": "pt"})
    (folder / "drawn" / "config.json").write_text(json.dumps(RECORDED[name]["config"]))
    model = opened(folder / "drawn")
    model.save_pretrained(folder / "theirs")
    return model


def logits_of(model, ids):
    with torch.no_grad():
        if not model.config.is_encoder_decoder:
            return model(torch.tensor(ids), use_cache=False).logits.numpy()
        source, mask = map(torch.tensor, source_of(ids))
        given = {"attention_mask": mask, "decoder_input_ids": torch.tensor(ids)}
        return model(source, **given, use_cache=False).logits.numpy()


def unlike(one, other) -> set[str]:
    """Names under which two models' states differ."""
    one, other = one.state_dict(), other.state_dict()
    return {
        name for name in {*one, *other} if not (name in one and name in other and torch.equal(one[name], other[name]))
    }


@pytest.mark.parametrize("name", RECORDED)
def test_from_transformers_and_back(name, tmp_path):
    theirs, ids = made(tmp_path, name), ids_of(RECORDED[name]["config"]["vocab_size"])
    ours, want = models.load(tmp_path / "theirs"), logits_of(theirs, ids)
    assert close(run(ours, jnp.asarray(ids, jnp.int32)), want, float32s(name))
    if name.split()[0] not in WITHOUT_DECODING:
        assert close(decoded(ours, ids), want, float32s(name)) and not close(decoded(ours, ids[::-1]), want, 1e-2)
    # Some families' padding token is by default one that the small vocabulary has not, and then nothing loads.
    attributes = {"pad_token_id": RECORDED[name]["config"].get("pad_token_id")}
    numbers = models.read_config(tmp_path / "theirs")
    models.save(ours, tmp_path / "back", config=numbers, attributes=attributes, shard_bytes=20_000)
    back = opened(tmp_path / "back")
    # `gelu_new` goes back out as `gelu_pytorch_tanh`, the same function, of which transformers rounds other steps.
    is_renamed, found = "gelu_new" in json.dumps(RECORDED[name]["config"]), logits_of(back, ids)
    assert unlike(theirs, back) == set() and ((found == want).all() or (is_renamed and close(found, want, 5e-6)))


def test_a_qwen4_exp_without_attention_goes_to_transformers(tmp_path):
    """It has no indexer, and no attribute of one."""
    model = {"layer_types": ["linear_attention"] * 3} | {name: None for name in SIZES_OF_INDEXER}
    config = numbers_of(RECORDED["qwen4_exp_text plain"]["config"] | model)
    ours = models.build(config, key=jax.random.key(0))
    models.save(ours, tmp_path / "model", config=config, attributes={"pad_token_id": None})
    ids = ids_of(config.vocab)
    assert close(run(ours, jnp.asarray(ids, jnp.int32)), logits_of(opened(tmp_path / "model"), ids))
    (tmp_path / "wrong").mkdir()  # the control
    wrong = json.loads((tmp_path / "model" / "config.json").read_text()) | {"indexer_kv_heads": 1}
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(Exception, match="QSA config is missing required fields"):
        transformers.AutoConfig.from_pretrained(tmp_path / "wrong")


SIZES_OF_INDEXER = tuple(f"indexer_{name}" for name in "n_heads kv_heads head_dim budget compress_ratio".split())


def test_an_encoders_vectors_are_those_of_transformers(tmp_path):
    theirs, ids = made(tmp_path, "modernbert biased"), ids_of(61)
    ours = models.load(tmp_path / "theirs")
    encoder: Any = eqx.tree_at(lambda m: m.norm, ours, ours.norm.norm)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    with torch.no_grad():
        want = theirs.model(torch.tensor(ids)).last_hidden_state.numpy()
    found = encoder.encode(jnp.asarray(ids, jnp.int32))[0]
    assert close(found, want) and not close(ours.encode(jnp.asarray(ids, jnp.int32))[0], want, 1e-2)


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(family):
    chosen = (
        CHOSEN[family] if family in ("deepseek_v2", "dots1", "kimi_k3_text") else {}
    )  # whose defaults are of no use
    said = transformers.AutoConfig.for_model(family, **chosen).to_dict() | {"model_type": family}
    want, unlike = meaning(numbers_of(said)), set()
    # The longest rows change nothing, and Ling 3's `head_dim` is written with the number of rotated channels.
    for name in said.keys() - {"model_type", "max_position_embeddings", "linear_head_dim"}:
        with contextlib.suppress(ValueError):  # of attributes that must be said
            if meaning(numbers_of({key: value for key, value in said.items() if key != name})) != want:
                unlike.add(name)
    assert unlike == set()


# What transformers' own models lack by default.
CHOSEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **dict.fromkeys(("glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 128}),
    "nemotron": {"num_key_value_heads": 8},
    "kimi_k3_text": dict.fromkeys(("mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm"), True)
    | {"num_hidden_layers": 3, "attn_res_block_size": 1, "num_experts": 16, "routed_expert_hidden_size": 32}
    | {"activation_situ_beta": 4.0}
    | {"linear_attn_config": RECORDED["kimi_k3_text plain"]["config"]["linear_attn_config"]},
    "qwen4_exp_text": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
    | {"indexer_compress_ratio": 16, "ple_layer_ids": [2], "eos_token_id": 248_046}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
    "lfm2_moe": {"num_hidden_layers": 24}
    | {"layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]},
}
# Presets of the sizes that transformers takes where nothing is said.
DEFAULTS = {
    "bert": "bert-base-uncased",
    "distilbert": "distilbert-base-uncased",
    "cohere": "command-r",
    "falcon": "falcon-7b",
    "nemotron": "nemotron-4-15b",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v32": "deepseek-v3.2",
    "ernie4_5": "ernie4.5-0.3b",
    "ernie4_5_moe": "ernie4.5-21b-a3b",
    "gemma": "gemma-7b",
    "gemma2": "gemma2-2b",
    "cwm": "cwm-32b",
    "axk1": "a.x-k1",
    "flint": "flint",
    "exaone": "exaone-3.0-7.8b",
    "iquestcoder": "iquest-coder-v1-40b",
    "flex_olmo": "flex-olmo-7x7b",
    "glm": "glm-4-9b",
    "glm4": "glm4-9b",
    "jais2": "jais-2-8b",
    "olmo": "olmo-7b",
    "olmo_hybrid": "olmo-hybrid-7b",
    "solar_open": "solar-open-100b",
    "glm4_moe_lite": "glm-4.7-flash",
    "gpt_neox": "gpt-neox-20b",
    "helium": "helium-1-preview-2b",
    "glm_moe_dsa": "glm-5",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss-120b",
    "laguna": "laguna-xs.2",
    "lfm2_moe": "lfm2-8b-a1b",
    "lfm3": "lfm3-1.7b",
    "stablelm": "stablelm-3b-4e1t",
    "llama": "llama-2-7b",
    "mamba2": "mamba-codestral-7b",
    "mimo_v2_flash": "mimo-v2-flash",
    "minimax_m2": "minimax-m2",
    "mistral": "mistral-7b-v0.1",
    "mistral4": "mistral4-119b",
    "mistral_large4_text": "mistral-large4",
    "modernbert": "modernbert-base",
    "muse_glimmer_text": "muse-glimmer-30b",
    "phi3": "phi3-mini-4k",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen4_exp_text": "qwen4-exp",
    "smollm3": "smollm3-3b",
    "t5": "t5-small",
}


_READ = ("layer_scalar", "correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps")


def alternatives(family: models.Family) -> Iterator[tuple[Attribute, str, str]]:
    """The pairs of names of each entry that reads one of several attributes, the name that is read first in front."""
    for entry in family.attributes:
        if isinstance(entry, Attribute):
            for other in entry.published_names[1:]:
                yield entry, entry.published_names[0], other


@pytest.mark.parametrize("model_type", [name for name, family in PUBLISHED.items() if any(alternatives(family))])
def test_of_two_names_of_an_attribute_transformers_name_is_read(model_type, tmp_path):
    """If transformers has two names of one attribute, and a configuration gives them different values."""
    config = next(case["config"] for case in RECORDED.values() if case["config"]["model_type"] == model_type)
    for entry, first, other in alternatives(PUBLISHED[model_type]):
        value = config.get(first, config.get(other, entry.default))
        values = (not value, value) if isinstance(value, bool) else (value, 2 * value)
        for both in ({first: values[0], other: values[1]}, {other: values[1], first: values[0]}):
            rest = {name: value for name, value in config.items() if name not in entry.published_names}
            (tmp_path / "config.json").write_text(json.dumps(rest | both))
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            if getattr(theirs, first, None) == getattr(theirs, other, None):  # one attribute
                assert entry.read(PublishedConfig(both, "config.json"))[entry.name] == getattr(theirs, first), both


def counted(config) -> int:
    """The parameters of transformers' model, and the buffers that are read like weights."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    read = [x for name, x in model.named_buffers() if name.endswith(_READ)]
    return sum({id(x): x.numel() for x in [*model.parameters(), *read]}.values())


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_model_of_the_default_sizes_has_as_many_parameters(family):
    config = transformers.AutoConfig.for_model(family, **CHOSEN.get(family, {}))
    said = config.to_dict() | {"model_type": family}
    ours = parameter_count(shapes_of(numbers_of(said)))
    assert ours == counted(config)
    if family in DEFAULTS:
        assert ours == parameter_count(shapes_of(DEFAULTS[family]))
    assert ours != parameter_count(shapes_of(dataclasses.replace(numbers_of(said), vocab=12_345)))


def test_a_changed_number_is_seen(tmp_path):
    """The comparison of state dicts is of bits, and by name."""
    theirs = made(tmp_path, "llama plain")
    ours = models.load(tmp_path / "theirs")
    other = ours.embedding.weight.at[3, 4].set(jnp.nextafter(ours.embedding.weight[3, 4], 1.0))
    changed = eqx.tree_at(lambda m: m.embedding.weight, ours, other)
    models.save(changed, tmp_path / "back", like=tmp_path / "theirs")
    assert unlike(theirs, opened(tmp_path / "back")) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("name", RECORDED)
def test_in_bfloat16_those_arrays_stay_float32_that_do_in_transformers(name, tmp_path):
    made(tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    state, shapes = theirs.state_dict(), RECORDED[name]["shapes"]
    wide = {_published(key, shapes) for key, x in state.items() if x.dtype == torch.float32}
    # Routers' weights are as asked for, and so are OLMo Hybrid's rates of decay, as Qwen3-Next's are in transformers.
    as_asked = ("gate.weight", "gate.wg.weight", "linear_attn.A_log")
    # So are Hy4's head, its sinks, and its indexer's weights of heads and norm of keys.
    as_asked += ("lm_head.weight", ".sinks", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
    # So are Ling 3's convolutions and rates of decay.
    as_asked += ("conv1d.weight", "attention.A_log")
    if name.startswith("glm5_next_text "):  # rates of decay
        as_asked += ("self_attn.A_log",)
    if name.startswith("deepseek_v4 "):  # all norms, and sinks
        as_asked += ("norm.weight", "attn_sink")
    kept = {name for name in wide if not name.endswith(as_asked)}
    numbers, ours = models.read_config(tmp_path / "theirs"), models.load(tmp_path / "theirs", dtype="bfloat16")
    models.save(ours, tmp_path / "ours", config=numbers)
    folder = Folder(tmp_path / "ours")
    biases = {name for name in folder.names if name.endswith("e_score_correction_bias")}  # MiniMax-M2's here alone
    if name.startswith("glm5_next_text "):  # maps of streams, here alone
        kept |= {name for name in folder.names if name.endswith(("hc_attn_fn", "hc_ffn_fn"))}
    assert {name for name in folder.names if folder.dtype_in_file(name) == "F32"} == kept | biases
    assert bool(biases) == any(key.endswith("correction_bias") for key in shapes)


_DEEPSEEK_V4 = (
    *((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"), (".self_attn.", ".attn."), (".mlp.", ".ffn.")),
    *((".compressor.indexer.", ".indexer.compressor."), ("position_bias", "ape"), ("kv_norm", "norm")),
    *((".sinks", ".attn_sink"), ("e_score_correction_bias", "bias"), ("q_a_norm", "q_norm")),
    *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")),
)


def _published(name: str, shapes: dict[str, Any]) -> str:
    """The name in a folder of what transformers gives another while it runs."""
    found = re.sub(r"^model(?=\..*\.mixer\.)", "backbone", name.replace("gate.moe", "moe")).replace("forget_gate.", "")
    if any(key.endswith("indexer.index_kpool_compress_ape") for key in shapes):
        return found.replace("attn_hc.", "hc_attn_").replace("ffn_hc.", "hc_ffn_")  # GLM-5.3-Flash
    if any(key.endswith("hc_attn_fn") for key in shapes):  # DeepSeek-V4
        for old, new in _DEEPSEEK_V4:
            found = found.replace(old, new)
        return found
    found = found.replace("attn_hc.", "hc_pre.hc_attn_layer.hc_").replace("ffn_hc.", "hc_pre.hc_mlp_layer.hc_")
    found = found.replace("model.hc_head.hc_", "model.hc_pre.hc_head.hc_head_")
    older = (found.replace(".mlp.", ".block_sparse_moe."), found.replace(".gate.e_score", ".e_score"))
    older += (found.replace("e_score_correction_bias", "expert_bias"), found.replace(".self_attn.", ".attention."))
    return next((name for name in older if name in shapes), found)
