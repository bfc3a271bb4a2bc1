"""GGUF files that state sizes beyond their bytes, or that have unknown contents, are refused."""

import os
import random
import resource
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_attributes import numbers_of
from test_gguf import made, SAID, text
from test_published import FIXTURES, RECORDED

from eqformer import models
from eqformer.models._gguf_conversions import (
    read_growing_latents,
    read_latents,
    read_llama4,
    read_mamba2,
    read_nemotron_layers,
    read_nemotron_rotary,
    read_pure_mamba2,
    read_windows,
)
from eqformer.models._gguf_encoders import ENCODERS
from eqformer.models._gguf_file import GGUF
from eqformer.models._gguf_models import (
    _is_without_effect,
    _NEUTRAL,
    coded_of,
    configuration_of,
    plain_of,
    table_names_of,
)
from eqformer.models._gguf_older_decoders import (
    OLDER as OLDER_DECODERS,
    order_joined_heads,
    read_falcon,
    read_mpt,
    read_starcoder,
)


ONES = np.ones((8, 8), np.float32)
YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 1.5}
YARN = {f"llama.rope.scaling.{name}": value for name, value in YARN.items()}
OF_LLAMA = {name: value for name, value in SAID.items() if name.startswith("llama.")}
LONG: dict[str, Any] = {"general.architecture": "phi3"} | dict.fromkeys(OF_LLAMA)
LONG |= {f"phi3.{name.removeprefix('llama.')}": value for name, value in OF_LLAMA.items()}


def config_of(folder: Path, said: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> Any:
    (folder / "a.gguf").write_bytes(made(said, arrays))
    return models.read_config(folder / "a.gguf")


def refused(folder: Path, said: dict[str, Any], words: str, arrays: dict[str, np.ndarray] | None = None) -> None:
    with pytest.raises(ValueError, match=rf"a\.gguf.*{words}"):
        config_of(folder, said, arrays)


def test_a_scaling_is_what_llama_cpp_takes_it_for(tmp_path):
    scaling = lambda **said: config_of(tmp_path, {f"llama.rope.{name}": its for name, its in said.items()}).scaling
    linear = scaling(**{"scaling.type": "linear", "scaling.factor": 4.0})
    assert linear is not None and linear == scaling(**{"scaling.factor": 4.0}) == scaling(scale_linear=4.0)
    assert scaling(**{"scaling.type": "none", "scaling.factor": 4.0}) is None
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
    plain, sharper = scaling(**yarn), scaling(**yarn, **{"scaling.attn_factor": 1.5})
    assert plain.magnitude is None and sharper.magnitude == pytest.approx(1.5 * (1 + 0.1 * np.log(4.0)))
    assert scaling(**yarn, **{"scaling.yarn_beta_fast": 32.0, "scaling.yarn_beta_slow": 1.0}) == plain
    for beside in ({"scaling.type": "linear", "scaling.factor": 4.0}, {}):
        named = {f"llama.rope.{name}": its for name, its in beside.items()}
        refused(tmp_path, named | {"llama.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5: .* it must be 1")


def test_what_asks_for_another_model_is_refused(tmp_path):
    refused(tmp_path, {"llama.attention.causal": False}, "does not know: llama.attention.causal=False")
    assert config_of(tmp_path, {"llama.attention.causal": True}) == config_of(tmp_path, {})
    factors = {name: np.full(2, 2.0, np.float32) for name in ("rope_factors_long.weight", "rope_factors_short.weight")}
    for name, array in factors.items():
        refused(tmp_path, {}, "it has some of rope_freqs", {name: array})
    lengths = {"phi3.rope.scaling.original_context_length": 32}
    assert config_of(tmp_path, LONG | lengths, factors).scaling.long_divisors == (2.0, 2.0)
    refused(tmp_path, LONG | lengths | {"phi3.rope.scaling.factor": 2.0}, "factor=2.0 beside divisors", factors)


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    return "doom" if isinstance(value, str) else value * 2 if isinstance(value, float) else value + 1


def test_every_key_is_used_or_has_one_value_or_is_listed_as_unread(tmp_path):
    """If one key is changed, the config changes, or the file is refused, or the key is listed as unread."""
    neutral = {f"llama.{name}": values[0] for name, values in _NEUTRAL.items()}
    unread = {"general.name": "a", "tokenizer.ggml.pre": "gpt-2", "quantize.imatrix.file": "b", "split.no": 0}
    unread |= {"llama.tensor_data_layout": "reference", "llama.rope.scaling.finetuned": True}
    said = SAID | YARN | neutral | unread | {"llama.vocab_size": 12, "llama.attention.head_count_kv": 1}
    said |= {"llama.attention.key_length": 4, "llama.attention.value_length": 4, "split.count": 1}
    arrays = {f"blk.0.attn_{name}.weight": np.ones((4, 8), np.float32) for name in "kv"}
    # llama.cpp rounds the size of a context; which floats are unread without YARN is held above.
    whole = config_of(tmp_path, said, arrays)
    assert whole.scaling is not None
    for name, value in said.items():
        is_listed = _is_without_effect(name.removeprefix("llama."), changed(value))
        try:
            is_used = config_of(tmp_path, said | {name: changed(value)}, arrays) != whole
        except ValueError:
            is_used = True
        assert is_used != is_listed or name == "general.architecture", name
        assert not is_listed or name in SAID | unread or changed(value) in _NEUTRAL[name.removeprefix("llama.")], name
    refused(tmp_path, said | {"llama.unheard_of": 0}, "does not know: llama.unheard_of=0", arrays)


def test_arrays_that_share_bytes_are_refused(tmp_path):
    """A small file with many arrays at the same bytes would be decoded to many times the file's size."""
    count, size = 300, 1 << 14
    header = b"GGUF" + struct.pack("<IQQ", 3, count, 1) + text("a") + struct.pack("<II", 4, 0)
    for number in range(count):
        header += text(f"array.{number}") + struct.pack("<IQIQ", 1, size // 4, 0, 0)
    path = tmp_path / "a.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(size))
    with pytest.raises(ValueError, match=r"array.0 ends at byte \d+, and array.1 begins at byte \d+"):
        GGUF(path)
    path.write_bytes(made(arrays={"blk.0.attn_x.weight": ONES}))
    assert "blk.0.attn_x.weight" in GGUF(path).names


def test_counts_are_bounded_by_the_bytes_that_are_left(tmp_path):
    """Counts of values, texts of a list, arrays, experts and the model's sizes are checked before memory is taken."""
    path, largest = tmp_path / "a.gguf", 2**62
    start = lambda arrays, values: b"GGUF" + struct.pack("<IQQ", 3, arrays, values)
    lists = [start(0, 1) + text("a") + struct.pack("<IIQ", 9, kind, largest) + bytes(100) for kind in (0, 8, 12)]
    tracemalloc.start()
    for content in (start(largest, 0), start(0, largest), start(largest, 0) + bytes(1000), *lists):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="ends within its header"):
            GGUF(path)
    name = "blk.0.ffn_gate_exps.weight"
    path.write_bytes(start(1, 0) + text(name) + struct.pack("<I3QIQ", 3, 1, 2, 1 << 18, 0, 0) + bytes(3 << 20))
    with pytest.raises(ValueError, match="262144 arrays, counted for each expert, but at most 131072"):
        GGUF(path)
    for size in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        refused(tmp_path, {f"llama.{size}": 10**9}, f"llama.{size}=1000000000, but the largest array of the file")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    for path in (tmp_path / "a.gguf", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="only regular files are read"):
            models.gguf_companion_files(path)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Return the file cut short, or with some bytes changed in its header or anywhere."""
    if rng.random() < 0.2:
        return whole[: rng.randrange(len(whole))]
    octets, end = bytearray(whole), rng.choice((200, 1500, 4000, len(whole)))
    for _ in range(rng.choice((1, 1, 2, 8))):
        octets[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(octets)


GRID = [pytest.param(name, marks=pytest.mark.grid) for name in ("mixtral", "phi3")]


@pytest.mark.parametrize("name", ["qwen3", *GRID])
def test_a_damaged_file_is_loaded_or_refused(name, tmp_path):
    """Each of 200 damaged files gives a ValueError or a model, and the process grows by less than 100 MB.

    By default the test reads the configuration of each file, and the arrays of some files; in the grid, it also reads
    all shapes and, for Mixtral, the tokenizer.
    """
    whole = (FIXTURES / f"{name}.gguf").read_bytes()
    rng, path, counts = random.Random(0), tmp_path / "a.gguf", {"read": 0, "refused": 0}
    calls = {"mixtral": (models.load_shapes, models.gguf_companion_files), "phi3": (models.load_shapes,)}
    calls = calls.get(name, (models.read_config,))
    models.load(FIXTURES / f"{name}.gguf")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(200):
        path.write_bytes(damaged(whole, rng))
        for call in (*calls, models.load) if number % 40 == 0 else calls:
            try:
                call(path)
                counts["read"] += 1
            except ValueError as error:
                assert "a.gguf" in str(error) and len(str(error)) < 20_000, error
                counts["refused"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert min(counts.values()) >= 5 and grown < 100_000, (counts, grown)


def test_what_the_converter_of_qwen35_cannot_have_written_is_refused(monkeypatch):
    file = GGUF(FIXTURES / "qwen35.gguf")
    monkeypatch.setitem(file.values, "qwen35.ssm.group_count", 3)
    with pytest.raises(ValueError, match=r"attn_gate.weight has shape \(64, 64\), which does not fit 4 heads of 16"):
        coded_of(file, "blk.0.attn_gate.weight")
    monkeypatch.setitem(file.values, "qwen35.ssm.group_count", 2)
    assert plain_of(file, "blk.0.ssm_a").shape == (4,) and plain_of(file, "blk.0.ssm_conv1d.weight").shape == (
        128,
        1,
        4,
    )
    monkeypatch.setattr(file, "read", lambda name: np.array([-1.0, 0.0, -1.0, -1.0], np.float32))
    with pytest.raises(ValueError, match=r"load\('.*qwen35.gguf'\): blk.0.ssm_a holds a number that is not below 0"):
        plain_of(file, "blk.0.ssm_a")


def test_other_choices_of_experts_and_too_many_predictors_are_refused(monkeypatch):
    file = GGUF(FIXTURES / "glm4moe.gguf")
    config = configuration_of(file)
    assert config["use_qk_norm"] and config["attention_bias"] and config["norm_topk_prob"]
    for name, value, words in (
        ("expert_gating_func", 1, "expert_gating_func=1 is not supported"),
        ("nextn_predict_layers", -1, "nextn_predict_layers=-1: it must be a whole number"),
        ("expert_count", 1 << 30, "expert_count=1073741824, but the largest array"),
    ):
        with monkeypatch.context() as changed, pytest.raises(ValueError, match=words):
            changed.setitem(file.values, f"glm4moe.{name}", value)
            configuration_of(file)


def test_predictors_of_a_file_are_left_unread(monkeypatch):
    """A file counts its predictors among its layers; llama.cpp does not read them either."""
    file = GGUF(FIXTURES / "glm4moe.gguf")
    assert None not in table_names_of(file).values() and configuration_of(file)["num_hidden_layers"] == 2
    monkeypatch.setitem(file.values, "glm4moe.nextn_predict_layers", 1)
    names = table_names_of(file)
    assert {name.split(".")[1] for name in names if names[name] is None} == {"1"}
    assert configuration_of(file)["num_hidden_layers"] == 1


def test_key_heads_by_layer_must_be_of_each_layer(monkeypatch):
    file = GGUF(FIXTURES / "lfm2.gguf")
    assert configuration_of(file)["layer_types"] == ["conv", "full_attention"]
    for heads in ([], [2], [0, 0], [2, 4], [0, -2], [True, 2], ["2", 0]):
        monkeypatch.setattr(file, "listed", lambda name, heads=heads: heads)
        with pytest.raises(ValueError, match="head_count_kv=.*: it must have 2 (whole )?numbers"):
            configuration_of(file)


def header(kind: str, **values: Any) -> Any:
    """Return a file without arrays that has these values; the names of the arguments leave out the architecture."""
    named = {f"{kind}.{name.replace('__', '.')}": value for name, value in values.items()}
    file: Any = object.__new__(GGUF)
    file.call, file.values, file.tensors = "a.gguf", named | {"general.architecture": kind}, {}
    return file


SIZES = {"num_hidden_layers": 2, "sliding_window": 4, "hidden_size": 8, "mamba_n_heads": 3, "mamba_d_head": 16}
LATENTS = {"qk_rope_head_dim": 4, "qk_nope_head_dim": None, "v_head_dim": None, "rope_scaling": None}
GROWING = LATENTS | {"qk_nope_head_dim": 6, "v_head_dim": 4, "num_attention_heads": 2, "llama_4_scaling_beta": 0.5}
GROWING |= {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4}, "norm_topk_prob": None}
GROWING |= dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "mscale_all_dim"))
GROWING |= {"first_k_dense_replace": 0}
OLDER = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
OLDER |= {"alibi_bias_max": None, "clip_qkv": None, "head_dim": 6}


def joined_heads(rows: int) -> Any:
    """Return the order of joined rows of 4 query heads and 2 key heads, of which the file has this many rows."""
    file, name = header("falcon", attention__head_count=4, attention__head_count_kv=2), "blk.0.attn_qkv.weight"
    file.tensors = {name: SimpleNamespace(shape=(rows, 32))}
    return order_joined_heads(file, name)[0]


UNFIT = {
    "a Falcon 2 of unknown base": (
        lambda: read_falcon(OLDER, header("falcon")),
        "falcon.rope.freq_base is missing. Layers with one norm and 2 key heads are those of Falcon 2",
    ),
    "a nomic-bert without token types": (
        lambda: ENCODERS["nomic-bert"].implied({}, header("nomic-bert")),
        "the array token_types.weight is missing",
    ),
    "an MPT with learned positions": (
        lambda: read_mpt(OLDER | {"num_key_value_heads": 4}, header("mpt")),
        "mpt.attention.max_alibi_bias is missing or 0: only models with ALiBi can be read",
    ),
    **{
        f"a {kind} of two key heads": (
            lambda kind=kind: OLDER_DECODERS[kind].implied(OLDER | {"alibi_bias_max": 8.0}, header(kind)),
            f"{kind}.attention.head_count_kv=2: it must be 4, the number of query heads",
        )
        for kind in ("gpt2", "gptneox", "bloom", "mpt")
    },
    "an MPT with wide layers": (
        lambda: read_mpt(OLDER | {"num_key_value_heads": 4, "alibi_bias_max": 8.0, "hidden_size": 16}, header("mpt")),
        "mpt.feed_forward_length=128: it must be 4 x embedding_length=16",
    ),
    "a StarCoder of two key heads": (
        lambda: read_starcoder(OLDER, header("starcoder")),
        "starcoder.attention.head_count_kv=2: it must be 1",
    ),
    "a Nemotron whose heads have other widths": (
        lambda: read_nemotron_rotary(OLDER, header("nemotron")),
        "nemotron.attention.key_length=6: it must be embedding_length / head_count = 32 / 4",
    ),
    "joined rows of heads of no width": (
        lambda: joined_heads(60),
        "blk.0.attn_qkv.weight has 60 rows, which must be a multiple of 8",
    ),
    "a pattern that is no number": (
        lambda: read_windows(SIZES, header("cohere2", attention__sliding_window_pattern=True)),
        "cohere2.attention.sliding_window_pattern=True: it must be a whole number or a list",
    ),
    "heads of no width": (
        lambda: read_mamba2(SIZES, header("granitehybrid")),
        "granitehybrid.ssm.inner_size=16: it must be a multiple of ssm.time_step_rank=3 and of embedding_length=8",
    ),
    "heads of no width, without attention": (
        lambda: read_pure_mamba2({"num_heads": 3, "head_dim": 16, "hidden_size": 8}, header("mamba2")),
        "mamba2.ssm.inner_size=16: it must be a multiple of ssm.time_step_rank=3 and of embedding_length=8",
    ),
    "a Llama 4 without chunks": (
        lambda: read_llama4(SIZES, header("llama4", attention__sliding_window=0)),
        "llama4.attention.sliding_window=0: a model without chunks is not supported",
    ),
    "layers of two kinds at once": (
        lambda: read_nemotron_layers(
            {"mamba_num_heads": 2, "mamba_head_dim": 8, "num_hidden_layers": 2},
            header("nemotron_h", block_count=2, attention__head_count_kv=2, feed_forward_length=8),
        ),
        r"nemotron_h.attention.head_count_kv=\[2, 2\], feed_forward_length=\[8, 8\], ssm.inner_size=8: each layer",
    ),
    "widths of an older DeepSeek": (
        lambda: read_latents(LATENTS, header("deepseek2", attention__key_length=4, attention__value_length=4)),
        "deepseek2.attention.key_length=4, value_length=4: they must be whole numbers",
    ),
    "a growth of another length than the scaling": (
        lambda: read_growing_latents(GROWING, header("mistral4", attention__temperature_length=8)),
        "mistral4.attention.temperature_length=8: it must be rope.scaling.original_context_length=4",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_numbers_that_do_not_fit_a_family_are_named(name):
    convert, words = UNFIT[name]
    with pytest.raises(ValueError, match=f"a.gguf: {words}"):
        convert()


@pytest.mark.parametrize(("stated", "theta"), [({"rope_theta": 5e5}, 5e5), ({}, 1e4)])
def test_a_gpt_neox_has_the_rotary_base_of_its_file(stated, theta):
    sizes = OLDER | {"num_key_value_heads": 4} | stated
    attributes = OLDER_DECODERS["gptneox"].implied(sizes, header("gptneox"))
    config = RECORDED["gpt_neox plain"]["config"] | attributes
    assert numbers_of({name: value for name, value in config.items() if name != "rope_parameters"}).theta == theta


def test_joined_rows_are_ordered_by_key_heads():
    queries, keys, values = np.split(np.arange(16).reshape(8, 2), [4, 6])  # heads of two rows
    groups = [(queries[:2], keys[:1], values[:1]), (queries[2:], keys[1:], values[1:])]
    rows = np.concatenate([part.reshape(-1) for group in groups for part in group])
    assert np.array_equal(joined_heads(16), rows) and not np.array_equal(rows, np.arange(16))


def test_windows_follow_a_list_or_a_period():
    types = read_windows(SIZES | {"num_hidden_layers": 4}, header("cohere2"), 4)["layer_types"]
    assert types == ["sliding_attention"] * 3 + ["full_attention"]
    stated = read_windows(SIZES, header("cohere2", attention__sliding_window_pattern=2), 4)["layer_types"]
    assert stated == ["sliding_attention", "full_attention"]
    assert {*read_windows(SIZES | {"sliding_window": None}, header("afmoe"), 4)["layer_types"]} == {"full_attention"}
