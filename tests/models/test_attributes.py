"""Every attribute that transformers writes is refused if it is changed, or changes the model's results."""

import dataclasses
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from haste import same_trees
from safetensors.numpy import save_file
from test_published import FIXTURES, RECORDED, write

from eqformer import models
from eqformer.models import Attribute, config_types, PublishedConfig, rotary_attributes, Unpublished


PUBLISHED = {family.model_type: family for family in models.FAMILIES.values() if family.model_type}
# How a model was trained, is stored, or is to be sampled from.
HARMLESS = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "use_cache", "output_router_logits"),
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "embed_dropout", "hidden_dropout", "resid_pdrop"),
    "initializer_range",
    *("pretraining_tp", "keys_to_ignore_at_inference", "model_type"),
}
# What transformers writes whatever the model is, by `tests/fixtures/make_generic.py`.
GENERIC = json.loads((FIXTURES / "generic_attributes.json").read_text())
TRAINED = {"unsloth_fixed": True, "_attn_implementation": "flash_attention_2"}
ANOTHER_MODEL = {
    "add_cross_attention": True,
    "is_decoder_prefix_lm": True,
    "is_encoder_decoder": True,
    "per_layer_config": {"1": {"num_attention_heads": 1}},
    "pruned_heads": {"0": [1]},
    "quantization_config": {"quant_method": "fp8"},
    "tie_encoder_decoder": True,
}
SUPERSEDED = {"max_window_layers", "no_rope_layer_interval"}  # by lists of all layers, which transformers writes too
# What a family's code in transformers does not use in a causal model, or computes from other attributes.
UNUSED = {
    "deepseek_v2": {"head_dim", "qk_head_dim"},
    "deepseek_v3": {"head_dim", "qk_head_dim", "num_nextn_predict_layers"},
    "deepseek_v32": {"head_dim", "qk_head_dim", "first_k_dense_replace"},  # the last said again by mlp_layer_types
    "deepseek_v4": {"rope_theta", "compress_rope_theta", "qk_rope_head_dim"}  # said again
    | {"num_nextn_predict_layers", "router_jitter_noise"},
    "bloom": {"slow_but_exact"},  # of rounding
    "mpt": {"emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb"},  # without effect in transformers
    "eurobert": {"classifier_pooling", "mask_token_id"},
    "mpnet": {"attention_probs_dropout_prob"},
    **dict.fromkeys(("bert", "gte", "nomic_bert", "roberta"), {"attention_probs_dropout_prob", "classifier_dropout"}),
    "distilbert": {"qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"},
    "afmoe": {"global_attn_every_n_layers"},  # said again by layer_types
    "bailing_hybrid": {"first_k_dense_replace", "layer_group_size", "short_conv_kernel_size", "head_dim"}
    | {"qk_head_dim", "num_nextn_predict_layers", "mtp_loss_scaling_factor", "rope_theta"},  # many are said again
    "axk1": {"head_dim", "qk_head_dim"},
    "cohere2_moe": {"rope_theta", "sliding_window_pattern"},  # said again
    "bamba": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "exaone4": {"sliding_window_pattern"},  # said again by layer_types
    "exaone_moe": {"first_k_dense_replace", "sliding_window_pattern"},  # said again by lists of layers
    "falcon_h1": {"mamba_chunk_size", "num_logits_to_keep"},
    "gemma3_text": {"_sliding_window_pattern", "attn_logit_softcapping"},
    "gpt2": {f"summary_{name}" for name in ("type", "first_dropout", "activation", "use_proj", "proj_to_labels")}
    | {"reorder_and_upcast_attn"},  # of rounding
    "gpt_bigcode": {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"},  # of rounding
    "gpt_neo": {"classifier_dropout"},
    "codegen": {"n_ctx"},
    "glm5_next_text": {"head_dim", "qk_head_dim"},
    "glm_moe_dsa": {"head_dim", "qk_head_dim", "first_k_dense_replace"},
    "glm4_moe": {"num_nextn_predict_layers"},
    "glm4_moe_lite": {"qk_head_dim"},
    "gpt_neox": {"classifier_dropout"},
    "granitemoehybrid": {"mamba_chunk_size"},
    "hunyuan_v1_dense": {"eod_token_id"},
    "hunyuan_v1_moe": {"eod_token_id", "sep_token_id"},
    "hy_v4": {"head_dim", "qk_head_dim", "learnable_sink_init"},  # the last of a first value
    "hy_v3": {"enable_moe_fp32_combine"},  # of rounding
    "kimi_linear": {"head_dim", "qk_head_dim"},
    "llama4_text": {"interleave_moe_layer_step"},  # said again by moe_layers
    "mellum": {"mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"},
    "minicpm3": {"head_dim", "qk_head_dim"},
    "minimax_m2": {"rotary_dim"},  # said again by partial_rotary_factor
    "minimax_m3_vl_text": {"rotary_dim", "router_jitter_noise"},  # without effect in transformers
    "mamba2": {"chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank"}
    | {"time_step_min", "time_step_max", "time_step_floor"},
    "modernbert": {
        *("classifier_dropout", "classifier_pooling", "cls_token_id", "deterministic_flash_attn", "embedding_dropout"),
        *("initializer_cutoff_factor", "mlp_dropout", "sep_token_id", "sparse_pred_ignore_index", "sparse_prediction"),
    },
    "mistral4": {"head_dim", "qk_head_dim"},
    "mistral_large4_text": {"head_dim", "qk_head_dim", "first_k_dense_replace"},
    "nemotron_h": {"chunk_size", "expand", "time_step_max", "time_step_floor", "use_mamba_kernels"}
    | {"mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "num_nextn_predict_layers"}
    | {"num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"},
    "olmo_hybrid": {f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")},
    "opt": {"init_std", "layerdrop"},
    "phimoe": {"input_jitter_noise"},
    "qwen4_exp_text": {"number_of_conv_states"},
    "sarvam_mla": {"head_dim", "num_nextn_predict_layers", "qk_head_dim"},
    "sarvam_moe": {"num_nextn_predict_layers"},
    "sdar": {"layer_types", "sliding_window"},  # of windows, which are refused
    "seed_oss": {"residual_dropout"},
    "step3p5": {"mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"},
    "starcoder2": {"embedding_dropout", "residual_dropout"},
    "t5": {"classifier_dropout", "dropout_rate", "initializer_factor"},
    "t5gemma": {"classifier_dropout_rate", "dropout_rate", "vocab_size"},
    "youtu": {"embedding_initializer_range", "head_dim", "qk_head_dim"},
    "t5gemma2": {"classifier_dropout_rate", "dropout_rate", "eoi_token_index", "image_token_index"},
}


def numbers_of(config: dict[str, Any]) -> Any:
    """The numbers of a configuration, as of a folder's."""
    given = PublishedConfig(config, "config.json")
    found = PUBLISHED[given.text("model_type")].read(given)
    given.finish()
    return found


def other(value: Any) -> Any:
    """A value of the same kind that the attribute might have and has not."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value} or not"
        case list():
            return [*value, value[0]] if value else [1]
        case dict():
            return value | {"rope_type": "helix"}
    return 3


def decides(config: dict[str, Any], name: str, numbers: Any) -> bool:
    """Whether another value of the attribute is refused, or gives other numbers than those of the configuration."""
    try:
        return numbers_of(config | {name: other(config[name])}) != numbers
    except ValueError:
        return True


@pytest.mark.parametrize("family", PUBLISHED)
def test_no_attribute_is_ignored(family):
    configs = [one["config"] for name, one in RECORDED.items() if name.split()[0] == family]
    assert configs
    pairs = [(config, numbers_of(config)) for config in configs]
    names = {name for config in configs for name in config} - HARMLESS - SUPERSEDED
    silent = {name for name in names if not any(decides(one, name, numbers) for one, numbers in pairs if name in one)}
    assert silent == UNUSED.get(family, set())


@pytest.mark.parametrize("family", PUBLISHED)
def test_an_attribute_that_nobody_knows_is_refused_unless_it_says_nothing(family):
    config = next(one["config"] for name, one in RECORDED.items() if name.split()[0] == family)
    for value in (3, 0.5, "three", [0], {"three": 3}, True):
        with pytest.raises(ValueError, match=r"config.json: attributes that this family does not know: .*doom="):
            numbers_of(config | {"doom": value})
    with pytest.raises(ValueError, match=r"does not know: doom=3, gloom='dark'\."):
        numbers_of(config | {"gloom": "dark", "doom": 3})
    numbers = numbers_of(config)
    assert all(numbers_of(config | {"doom": value}) == numbers for value in (None, False, 0, "", [], {}))


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_every_configuration_of_transformers_has_is_passed_over(family):
    config = case(family)
    generic = GENERIC["own"] | GENERIC["older"] | GENERIC["generation"] | {"unsloth_version": "2026.1", **TRAINED}
    assert len(generic) > 60
    numbers = numbers_of(config)
    assert numbers_of(config | {name: its for name, its in generic.items() if name not in config}) == numbers
    # What would be another model is refused, unless it says that it is not.
    for name, other_model in ANOTHER_MODEL.items():
        assert name in config or numbers_of(config | {name: type(other_model)()}) == numbers
        other_model = False if config.get(name) is True else other_model
        with pytest.raises(ValueError, match=name):
            numbers_of(generic | config | {name: other_model})


def test_private_attributes_are_passed_over_in_one_line(tmp_path):
    """A folder that transformers saved after it had read a GGUF, and bookkeeping that a later release may add."""
    write(tmp_path, "llama plain")
    want, config = models.load(tmp_path), json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_model_name_or_path": "A model"}))
    assert same_trees(models.load(tmp_path), want)  # known, so that nothing is told
    added = {"_zeal": 3, "_beta": {"a": 1}, "_empty": None, "id2label": {"0": "_a"}}
    (tmp_path / "config.json").write_text(json.dumps(config | added))
    told = r"config.json: private attributes are passed over: _beta, _zeal\.$"
    with pytest.warns(UserWarning, match=told) as lines:
        assert same_trees(models.load(tmp_path), want)
    assert len(lines) == 1
    assert config_types.private_names({"text_config": {"_beta": 1}, "task_specific_params": {"_gamma": 1}}) == [
        "text_config._beta"
    ]
    (tmp_path / "config.json").write_text(json.dumps(config | {"zeal_": 3}))
    with pytest.raises(ValueError, match="does not know: zeal_=3"):
        models.load(tmp_path)


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_the_recorded_bookkeeping_is_that_of_the_installed_transformers():
    """A release that writes other attributes fails here: run `tests/fixtures/make_generic.py` and see what is new."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sys.path.append(str(FIXTURES))
    import make_generic

    installed = make_generic.attributes()
    assert all(installed[kind].keys() == GENERIC[kind].keys() for kind in ("own", "older", "generation"))


# BLOOM and MPT have one activation, which no attribute states.
@pytest.mark.parametrize("family", [family for family in PUBLISHED if family not in ("bloom", "mpt")])
def test_an_activation_that_the_family_has_not_is_refused(family):
    config = next(one["config"] for name, one in RECORDED.items() if name.split()[0] == family)
    others = {"gpt2": "activation_function", "modernbert": "hidden_activation", "nemotron_h": "mlp_hidden_act"}
    others |= dict.fromkeys(("codegen", "gpt_bigcode", "gpt_neo", "gptj", "opt"), "activation_function")
    others |= {"distilbert": "activation", "falcon": "activation", "t5": "feed_forward_proj"}
    others |= {"muse_glimmer_text": "hidden_activation"}
    name = others.get(family, "hidden_activation" if "gemma" in family else "hidden_act")
    wrong = {name: "gated-helix" if family == "t5" else "helix"}
    with pytest.raises(ValueError, match=rf"config.json.*: {name}='{wrong[name]}' is not supported for this family, w"):
        numbers_of(config | ({"decoder": config["decoder"] | wrong} if "decoder" in config else wrong))


@pytest.mark.parametrize("family", PUBLISHED)
def test_presets_say_all_their_numbers(family):
    """What is written of any preset reads as the same numbers."""
    for numbers in PUBLISHED[family].presets.values():
        said = {"model_type": family} | PUBLISHED[family].write(numbers)
        assert numbers_of(said) == numbers
        vocab = dataclasses.replace(numbers, vocab=numbers.vocab + 1)
        assert numbers_of({"model_type": family} | PUBLISHED[family].write(vocab)) != numbers


def test_rotary_positions_of_an_unknown_type_of_layer_are_refused():
    config = RECORDED["gemma3_text linear"]["config"]
    with pytest.raises(ValueError, match=r"by type of layer, but \['chunked_attention'\] are not types"):
        numbers_of(config | {"rope_parameters": config["rope_parameters"] | {"chunked_attention": {"factor": 2.0}}})


def test_the_first_name_of_longrope():
    """Phi-3's first configurations call it `su`, and say what scales in `rope_scaling`."""
    config = {name: value for name, value in RECORDED["phi3 short"]["config"].items() if name != "rope_parameters"}
    given = RECORDED["phi3 short"]["config"]["rope_parameters"]
    older = {"type": "su", "short_factor": given["short_factor"], "long_factor": given["long_factor"]}
    older = config | {"rope_theta": given["rope_theta"], "partial_rotary_factor": 0.75, "rope_scaling": older}
    assert numbers_of(older) == numbers_of(RECORDED["phi3 short"]["config"])
    older["rope_scaling"] = older["rope_scaling"] | {"type": "us"}
    with pytest.raises(ValueError, match="rope_type='us' is not known"):
        numbers_of(older)


@pytest.mark.grid
def test_arrays_of_further_predictors_are_left_where_they_are(tmp_path):
    """DeepSeek-V3's layer behind its last predicts one more token; another layer than that is no such thing."""
    arrays = write(tmp_path, "deepseek_v3 plain")
    want = models.load(tmp_path)
    extra = {"model.layers.3.eh_proj.weight": np.ones((24, 48), np.float32)}
    save_file(arrays | extra, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"load\(.*are left unread: model.layers.3. \(1\)\.$"):
        assert same_trees(models.load(tmp_path), want)
    save_file(arrays | {"model.layers.4.eh_proj.weight": extra.popitem()[1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not in the model: model.layers.4.eh_proj.weight \(1\)"):
        models.load(tmp_path)


def case(family: str) -> dict[str, Any]:
    """The family's first configuration."""
    return next(one["config"] for name, one in RECORDED.items() if name.split()[0] == family)


@pytest.mark.parametrize(
    "family, name",
    [
        ("qwen3_moe", "decoder_sparse_step"),
        ("smollm3", "no_rope_layer_interval"),
        ("llama4_text", "no_rope_layer_interval"),
        ("llama4_text", "interleave_moe_layer_step"),
        ("gemma3_text", "sliding_window_pattern"),
        ("qwen3_next", "full_attention_interval"),
    ],
)
def test_what_layers_are_counted_by_is_a_count(family, name):
    """Without lists of layers, which say it too."""
    lists = ("layer_types", "no_rope_layers", "moe_layers")
    config = {key: value for key, value in case(family).items() if key not in lists}
    numbers_of(config | {name: 1})
    for value in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=rf"^config.json: {name}={value!r}: it must be a whole number"):
            numbers_of(config | {name: value})


@pytest.mark.parametrize(
    "family, changes",
    [
        ("smollm3", {"no_rope_layers": [1]}),
        ("qwen3_next", {"layer_types": ["linear_attention"]}),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "moe", "sparse"]}),
        ("deepseek_v32", {"mlp_layer_types": ["sparse"]}),
        ("llama4_text", {"no_rope_layers": [1]}),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}),
        ("mamba2", {"time_step_limit": [0.5, "inf"]}),
        ("mamba2", {"head_dim": 7}),
        ("falcon_h1", {"mamba_d_head": 7}),
        ("falcon_h1", {"mamba_d_ssm": 31}),
        ("falcon_h1", {"ssm_multipliers": [0.5] * 4}),
        ("falcon_h1", {"mlp_multipliers": [0.5, True]}),
        ("falcon_h1", {"mamba_use_mlp": False}),
        ("nemotron_h", {"layers_block_type": ["mamba", "lstm"]}),
        ("nemotron_h", {"n_shared_experts": 2}),
        ("deepseek_v3", {"num_key_value_heads": 1}),
        ("gpt_neo", {"attention_types": [[["global", "narrow"], 2]]}),
        ("nemotron", {"rope_percent": 0.25}),
        ("gptj", {"rotary_dim": None}),
        ("codegen", {"rotary_dim": 0}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}),
        ("falcon", {"num_kv_heads": 3, "multi_query": False}),
        ("falcon", {"num_kv_heads": 1, "multi_query": False}),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}),
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("mpt", {"no_bias": False}),
        ("muse_glimmer_text", {"layer_rope_theta": [0.0]}),
        ("muse_glimmer_text", {"layer_rope_theta": [0.0, 5e3, 5e3, 1e4, 0.0]}),
    ],
)
def test_a_refusal_names_the_file(family, changes):
    numbers_of(case(family))
    with pytest.raises(ValueError, match=rf"^config.json: .*{next(iter(changes))}="):
        numbers_of(case(family) | changes)


@pytest.mark.parametrize("said", [{"num_heads": "4"}, {"full_attn_layers": 3}, {"gloom": 1}])
def test_what_is_said_of_nets_is_checked_too(said):
    with pytest.raises(ValueError, match=rf"^config.json, linear_attn_config: .*{next(iter(said))}="):
        numbers_of(case("kimi_linear") | {"linear_attn_config": said})


@pytest.mark.parametrize(
    "settings", [{"qk_ln": True}, {"alibi": False}, {"attn_type": "multiquery_attention"}, {"gloom": 1}]
)
def test_settings_of_mpts_attention_are_checked(settings):
    with pytest.raises(ValueError, match=rf"^config.json, attn_config: .*{next(iter(settings))}="):
        numbers_of(case("mpt") | {"attn_config": settings})


def test_a_rotary_fraction_is_read_whenever_it_is_asked_for():
    part, positions = rotary_attributes.RotaryFraction(), rotary_attributes.RotaryPositions()
    want = {"rotary_fraction": 0.5, "theta": 10_000.0, "scaling": None}
    for inside in (True, False):
        said = {"partial_rotary_factor": 0.5}
        for entries in ((part, positions), (positions, part)):
            config = PublishedConfig({"rope_parameters": {"rope_theta": 1e4} | said} if inside else said, "config.json")
            assert entries[0].read(config) | entries[1].read(config) == want
            config.finish()
    config = PublishedConfig({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "config.json")
    positions.read(config)
    with pytest.raises(ValueError, match="does not know: partial_rotary_factor=0.5"):
        config.finish()


@pytest.mark.parametrize(
    "family, name",
    [
        ("qwen3", "layer_types"),
        ("qwen3_next", "layer_types"),
        ("qwen3_moe", "mlp_only_layers"),
        ("smollm3", "no_rope_layers"),
        ("llama4_text", "moe_layers"),
    ],
)
def test_what_lists_layers_is_a_list(family, name):
    for value in (3, True, "full_attention", {"0": 1}):
        with pytest.raises(ValueError, match=rf"^config.json: {name}=.*: it must be a list"):
            numbers_of(case(family) | {name: value})


def test_what_no_configuration_says_is_not_written():
    entry = Unpublished("capacity", None, "without one no token is dropped")
    config = models.preset("mixtral-byte-500k")
    assert entry.write(config) == {} and entry.read(PublishedConfig({}, "config.json")) == {"capacity": None}
    with pytest.raises(
        ValueError, match=r"MixtralConfig\(capacity=2.0\)\): published configurations cannot express it"
    ):
        entry.write(dataclasses.replace(config, capacity=2.0))  # pyright: ignore[reportCallIssue]


def test_of_several_names_the_first_that_is_there_counts():
    entry = Attribute("balance", ("new", "old"), 0.5, written=("old",))
    read = lambda **said: entry.read(PublishedConfig(said, "config.json"))["balance"]
    assert [read(), read(old=1.0), read(new=2.0), read(new=2.0, old=1.0), read(new=None, old=1.0)] == [0.5, 1, 2, 2, 1]
    assert entry.write(models.preset("olmoe-byte-500k")) == {"old": 0.01}
    assert Attribute("balance", ("new", "old")).write(models.preset("olmoe-byte-500k")) == {"new": 0.01}


def test_the_least_step_of_nemotron_is_read_and_written():
    """Transformers applies it to whole rows; a limit that it does not read is refused."""
    config = case("nemotron_h")
    numbers = numbers_of(config | {"time_step_min": 0.05})
    assert numbers.step_limits == (0.05, math.inf) != numbers_of(config).step_limits
    assert PUBLISHED["nemotron_h"].write(numbers)["time_step_min"] == 0.05
    with pytest.raises(ValueError, match=r"^config.json: time_step_limit=\(0.0, 0.1\): transformers does not read it"):
        numbers_of(config | {"time_step_limit": [0.0, 0.1]})
    with pytest.raises(ValueError, match=r"step_limits=\(0.0, 1.0\)\)\): published configurations cannot state"):
        PUBLISHED["nemotron_h"].write(dataclasses.replace(numbers, step_limits=(0.0, 1.0)))


def test_the_bound_of_ling_3s_decays_is_negative():
    config = case("bailing_hybrid")
    assert numbers_of(config).lowest_log_decay == -2.0
    assert numbers_of(config | {"kda_safe_gate": False}).lowest_log_decay is None
    for bound in (0.0, 3.0):
        with pytest.raises(ValueError, match=rf"^config.json: kda_lower_bound={bound}: it must be negative"):
            numbers_of(config | {"kda_lower_bound": bound})


@pytest.mark.parametrize("names", [("attention_bias", "mlp_bias"), ("qkv_bias", "bias")])
def test_internlm3_has_biases_of_all_maps_or_none(names):
    config = {name: value for name, value in RECORDED["internlm3 dynamic"]["config"].items() if "bias" not in name}
    assert numbers_of(config | dict.fromkeys(names, True)).bias and not numbers_of(config).bias
    with pytest.raises(ValueError, match="^config.json: attention_bias=True, mlp_bias=False: in this family both"):
        numbers_of(config | {names[0]: True})
