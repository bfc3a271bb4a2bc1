"""GGUF files: arrays as the package `gguf` and transformers read them, and errors for other files."""

import dataclasses
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from format_folders import same_bits
from safetensors.numpy import load_file
from test_published import FIXTURES

from eqformer import models, nn
from eqformer.data import FileTokenizer, has_chat_template
from eqformer.models._gguf_file import GGUF
from eqformer.models._gguf_mixtures import ARCHITECTURES
from eqformer.models.formats import BLOCKS, PACKAGED
from eqformer.nn import Llama3Scaling
from eqformer.parallel import make_mesh, Plan


RECORDED = json.loads((FIXTURES / "gguf.json").read_text())
CONVERTED = json.loads((FIXTURES / "gguf_models.json").read_text())
OF_CONVERTER = json.loads((FIXTURES / "gguf_converted.json").read_text())
FILES = {name: (FIXTURES / f"{name}.gguf").read_bytes() for name in RECORDED}


def checksum(array: np.ndarray) -> int:
    assert array.dtype == np.float32
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


@pytest.mark.by_default("qwen3")
@pytest.mark.parametrize("name", RECORDED)
def test_a_file_is_the_model_that_transformers_reads(name, tmp_path):
    """Bit for bit, under the published names; without a dtype in float32, which holds all that is decoded."""
    path = FIXTURES / f"{name}.gguf"
    model, config = models.load(path, dtype="float32"), models.read_config(path)
    models.save(model, tmp_path / "plain", config=config)
    back = load_file(tmp_path / "plain" / "model.safetensors")
    want = {key: its for key, its in RECORDED[name]["transformers"].items() if key in back}
    assert {key: checksum(array) for key, array in back.items()} == want
    assert RECORDED[name]["transformers"].keys() - want.keys() == ({"lm_head.weight"} if name == "qwen3" else set())
    plan = Plan(make_mesh(replica=2, fsdp=2, tensor=2), zero=3, smallest=1)
    split = models.load(path, plan=plan, dtype="float32")
    assert all(np.array_equal(*pair) for pair in zip(*(jax.tree.leaves(m) for m in (model, split)), strict=True))
    narrow, wide = models.load(path, dtype="bfloat16"), models.load(path)
    assert same_bits(np.asarray(narrow.embedding.weight), np.asarray(model.embedding.weight.astype("bfloat16")))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide) if leaf.dtype != "int32"} == {"float32"}
    assert wide.compute_dtype == "float32"
    with pytest.raises(ValueError, match=r"is one file, not a folder; give config=read_config\("):
        models.save(model, tmp_path / "x", like=path)


def test_every_type_of_block_is_decoded_as_the_package_does():
    seen = set()
    for name in RECORDED:
        file = GGUF(FIXTURES / f"{name}.gguf")
        for key, tensor in file.tensors.items():
            found = file.read(key)
            assert checksum(found) == RECORDED[name]["package"][key] and checksum(found[..., ::-1]) != checksum(found)
            seen.add(tensor.form.name)
    seen |= {tensor.form.name for name in CONVERTED for tensor in GGUF(FIXTURES / f"{name}.gguf").tensors.values()}
    assert seen == {form.name for form in BLOCKS.values()} - {name for name, *_ in PACKAGED.values()}


def random_blocks(kind: int) -> np.ndarray:
    """Eight rows of two blocks of random bytes, of which each is a number of its type."""
    quants = pytest.importorskip("gguf", reason="the extra `gguf` is not installed").quants
    octets = np.random.default_rng(kind).integers(0, 256, (256, PACKAGED[kind][2])).astype(np.uint8)
    with np.errstate(all="ignore"):
        decoded = quants.dequantize(octets, quants.GGMLQuantizationType(kind))
    finite = octets[np.isfinite(decoded).all(axis=-1) & (np.abs(decoded) < 1e30).all(axis=-1)]
    return finite[:16].reshape(8, -1)


@pytest.mark.hf
@pytest.mark.parametrize("kind", PACKAGED, ids=lambda kind: PACKAGED[kind][0])
def test_further_types_are_decoded_by_the_package(kind, tmp_path):
    octets, numbers, path = random_blocks(kind), 2 * PACKAGED[kind][1], tmp_path / "a.gguf"
    quants = pytest.importorskip("gguf").quants
    assert quants.GGML_QUANT_SIZES[quants.GGMLQuantizationType(kind)] == PACKAGED[kind][1:]
    name = "blk.0.attn_x.weight"
    path.write_bytes(made(arrays={name: octets}, kinds={name: kind}, columns={name: numbers}))
    file, want = GGUF(path), quants.dequantize(octets, quants.GGMLQuantizationType(kind))
    found = file.read(name)
    assert found.shape == (8, numbers) and same_bits(found, want) and not same_bits(found[::-1].copy(), want)


@pytest.mark.hf
def test_numbers_of_the_package_that_are_not_finite_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    octets, name = np.full((8, 18), 255, np.uint8), "blk.0.attn_x.weight"  # IQ4_NL, whose scale is no number
    (tmp_path / "a.gguf").write_bytes(made(arrays={name: octets}, kinds={name: 20}, columns={name: 32}))
    with pytest.raises(ValueError, match="one of its numbers is not finite"), np.errstate(all="ignore"):
        GGUF(tmp_path / "a.gguf").read(name)


def test_a_further_type_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    octets, name = np.zeros((8, 18), np.uint8), "blk.0.attn_x.weight"
    (tmp_path / "a.gguf").write_bytes(made(arrays={name: octets}, kinds={name: 20}, columns={name: 32}))
    with pytest.raises(ImportError, match=r"type IQ4_NL in a GGUF file needs the package gguf.*eqformer\[gguf\]"):
        GGUF(tmp_path / "a.gguf").read(name)


@pytest.mark.by_default("gemma3", "qwen3moe", "apertus", "llama4", "mamba2")
@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_the_one_before(name, tmp_path):
    """Its config, and its arrays bit for bit: as they were, or as the package decodes them."""
    path, kept = FIXTURES / f"{name}.gguf", CONVERTED[name]
    (tmp_path / "config.json").write_text(json.dumps(kept["config"]))
    config = models.read_config(path)
    assert config == models.read_config(tmp_path)
    models.save(models.load(path, dtype="float32"), tmp_path / "plain", config=config)
    back = load_file(tmp_path / "plain" / "model.safetensors")
    assert {key: checksum(array) for key, array in back.items()} == kept["arrays"]


def with_list(path: Path, kind: int, numbers: bytes, name: bytes = b"xielu.alpha_p") -> Path:
    """The file of Apertus with another list in the place of the two layers' `xielu.alpha_p`."""
    octets = (FIXTURES / "apertus.gguf").read_bytes()
    start = octets.index(b"xielu.alpha_p")
    assert octets[start + 13 : start + 29] == struct.pack("<IIQ", 9, 6, 2)  # a list of two float32s
    path.write_bytes(octets[:start] + name + struct.pack("<IIQ", 9, kind, 2) + numbers + octets[start + 37 :])
    return path


@pytest.mark.grid
def test_parameters_of_an_activation_are_read_from_lists_of_the_header(tmp_path):
    """The file's logits are those of the folder; with other numbers of the second layer, they are others."""
    file, ids = FIXTURES / "apertus.gguf", LLAMA_CPP_IDS
    models.save(models.load(file), tmp_path / "plain", config=models.read_config(file))
    logits = np.asarray(models.load(tmp_path / "plain")(ids)[0])
    assert np.array_equal(np.asarray(models.load(file)(ids)[0]), logits)
    parameters = load_file(tmp_path / "plain" / "model.safetensors")
    numbers = [parameters[f"model.layers.{layer}.mlp.act_fn.alpha_p"].item() for layer in range(2)]
    same = with_list(tmp_path / "a.gguf", 6, struct.pack("<2f", *numbers))
    assert np.array_equal(np.asarray(models.load(same)(ids)[0]), logits)
    other = with_list(tmp_path / "b.gguf", 6, struct.pack("<2f", numbers[0], numbers[1] + 1))
    assert np.abs(np.asarray(models.load(other)(ids)[0]) - logits).max() > 1e-2 * logits.std()


def test_other_lists_of_the_layers_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a.gguf: .* xielu.alpha_p is not a list of float32s"):
        models.load(with_list(tmp_path / "a.gguf", 4, struct.pack("<2I", 1, 2)))
    with pytest.raises(ValueError, match=r"a.gguf.* does not know: xielu.alpha_q='a list of 2'"):
        models.load(with_list(tmp_path / "a.gguf", 6, struct.pack("<2f", 1, 2), b"xielu.alpha_q"))


def with_stated_heads(config: Any) -> Any:
    """The config with the channels of a head, which a file states and folders of some families leave out."""
    return dataclasses.replace(config, head_dim=config.head_size) if hasattr(config, "head_size") else config


@pytest.fixture(scope="module")
def converted() -> Iterator[Any]:
    """The files that llama.cpp's converter made, by case."""
    with np.load(FIXTURES / "gguf_converted.npz") as files:
        yield files


def test_files_of_all_architectures_have_the_configs_before(converted, tmp_path):
    kinds = set()
    for name, recorded in OF_CONVERTER.items():
        (tmp_path / "a.gguf").write_bytes(converted[name].tobytes())
        (tmp_path / "config.json").write_text(json.dumps(recorded["config"]))
        config, expected = models.read_config(tmp_path / "a.gguf"), models.read_config(tmp_path)
        assert config == expected or with_stated_heads(config) == with_stated_heads(expected), name
        assert config != dataclasses.replace(config, vocab=config.vocab + 1)
        kinds.add(name.split()[0])
    kinds |= {name.split()[0] for name in json.loads((FIXTURES / "gguf_encoders.json").read_text())["cases"]}
    tested = kinds | {
        GGUF(FIXTURES / f"{name}.gguf").values["general.architecture"] for name in (*RECORDED, *CONVERTED)
    }
    assert tested == ARCHITECTURES.keys()


@pytest.mark.by_default("deepseek2 v3")
@pytest.mark.parametrize("name", OF_CONVERTER)
def test_a_file_of_llama_cpps_converter_is_the_model_before(name, converted, tmp_path):
    """Its arrays bit for bit; logarithms, which are computed from their exponentials, are rounded as those before."""
    recorded = OF_CONVERTER[name]
    (tmp_path / "a.gguf").write_bytes(converted[name].tobytes())
    config = models.read_config(tmp_path / "a.gguf")
    model = models.load(tmp_path / "a.gguf")
    models.save(model, tmp_path / "plain", config=config)
    back = load_file(tmp_path / "plain" / "model.safetensors")
    for key in [key for key in back if key.endswith("A_log")]:
        array = back[key]
        back[key] = np.round(array * 8) / np.float32(8) + np.float32(0)  # 0 instead of -0
        assert np.abs(array - back[key]).max() < 1e-6
    assert {key: checksum(array) for key, array in back.items()} == recorded["arrays"]
    reversed_arrays = [array[..., ::-1] for array in back.values() if array.ndim > 1 and array.shape[-1] > 1]
    assert {*map(checksum, reversed_arrays)}.isdisjoint(recorded["arrays"].values())


LLAMA_CPP = np.load(FIXTURES / "gguf_logits.npz")
LLAMA_CPP_IDS = jax.numpy.array([[3, 7, 1, 20, 9, 9, 14, 2, 30, 5, 11, 28]])
# llama.cpp rounds the inputs of a GELU to 16 bits. T5's attention scores are not scaled, so they round more.
BOUNDS = {"gemma4": 0.05, "gemma4 experts": 0.05, "gpt2": 3e-3, "gptneox": 3e-3, "starcoder2": 3e-3}
BOUNDS |= dict.fromkeys(("bloom", "falcon", "falcon norms", "falcon one norm", "starcoder"), 3e-3)
BOUNDS |= dict.fromkeys(("mpt", "mpt bias", "mpt clip"), 3e-3)
BOUNDS |= {"t5 gates of transformers": 3e-5}


@pytest.mark.grid
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_logits_of_a_file_are_those_of_llama_cpp_and_transformers(name, converted, tmp_path):
    """Names that end in " of transformers" are logits of the model from which the file was made.

    A decoder with an encoder reads the ids in reverse order.
    """
    (tmp_path / "a.gguf").write_bytes(converted[name.removesuffix(" of transformers")].tobytes())
    model: Any = models.load(tmp_path / "a.gguf")
    ids, tokens = LLAMA_CPP_IDS, nn.positions_like(LLAMA_CPP_IDS.shape)
    with jax.default_matmul_precision("highest"):
        if model.encoder is not None:
            ids, tokens = ids[:, ::-1], nn.with_source(tokens, nn.Source(ids, tokens))
        logits = np.asarray(model(ids, tokens)[0][0])
    expected, bound = LLAMA_CPP[name], BOUNDS.get(name, 1e-5)
    assert np.abs(logits - expected).max() < bound * expected.std()
    assert np.abs(logits[::-1] - expected).max() > 0.5 * expected.std()


@pytest.mark.parametrize("name", ("qwen3moe", "mixtral"))
def test_a_tokenizer_gives_the_ids_of_the_one_before(name, tmp_path):
    expected = CONVERTED[name]["tokenizer"]
    for file, content in models.gguf_companion_files(FIXTURES / f"{name}.gguf").items():
        (tmp_path / file).write_text(content)
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", end_of_text=models.read_eos_token_ids(tmp_path)[0])
    assert tokenizer.vocab == expected["vocab"]
    for add_special_tokens, ids in zip((False, True), expected["ids"], strict=True):
        encode = partial(tokenizer.encode_prompt, add_special_tokens=add_special_tokens)
        assert [encode(text).tolist() for text in expected["texts"]] == ids
    assert [tokenizer.decode(ids_of_text) for ids_of_text in expected["ids"][0]] == expected["decoded"]
    assert has_chat_template(tmp_path) == (name == "qwen3moe")
    assert len(models.read_eos_token_ids(tmp_path)) == 1 + (name == "qwen3moe")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(its: Any) -> bytes:
    """A number or a text with its type."""
    if isinstance(its, str):
        return struct.pack("<I", 8) + text(its)
    if isinstance(its, list) and isinstance(its[0], str):
        return struct.pack("<IIQ", 9, 8, len(its)) + b"".join(map(text, its))
    if isinstance(its, list):
        return struct.pack("<IIQ", 9, 4, len(its)) + struct.pack(f"<{len(its)}I", *its)
    if isinstance(its, bool):
        return struct.pack("<I?", 7, its)
    return struct.pack("<If", 6, its) if isinstance(its, float) else struct.pack("<II", 4, its)


SAID = {"general.architecture": "llama", "general.name": "a model", "tokenizer.ggml.model": "gpt2"}
SAID |= {
    f"llama.{name}": size for name, size in {"embedding_length": 8, "block_count": 1, "context_length": 64}.items()
}
SAID |= {"llama.feed_forward_length": 8, "llama.attention.head_count": 2, "llama.rope.freq_base": 5e5}
SAID |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 4}
MAPS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SHAPES = {f"blk.0.{name}.weight": (8, 8) for name in MAPS} | {"token_embd.weight": (12, 8), "output_norm.weight": (8,)}
SHAPES |= {"blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,)}
ONES = np.ones((8, 8), np.float32)


def made(
    said: dict[str, Any] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    kinds: dict[str, int] | None = None,
    shift: int = 0,
    columns: dict[str, int] | None = None,
) -> bytes:
    """A file of float32 arrays with some numbers and arrays changed, those of None left out.

    Arrays of other `kinds` are bytes, and `columns` says how many numbers a row of them has.
    """
    values = {key: its for key, its in (SAID | (said or {})).items() if its is not None}
    its = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()} | (arrays or {})
    header, data = b"GGUF" + struct.pack("<IQQ", 3, len(its), len(values)), b""
    header += b"".join(text(key) + value(one) for key, one in values.items())
    for key, array in its.items():
        shape = (*array.shape[:-1], (columns or {}).get(key, array.shape[-1]))
        header += text(key) + struct.pack(f"<I{array.ndim}Q", array.ndim, *shape[::-1])
        header += struct.pack("<IQ", (kinds or {}).get(key, 0), len(data) + shift)
        data += array.tobytes() + bytes(-array.nbytes % 32)
    return header + bytes(-len(header) % 32) + data


def divisors(factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """Of two frequencies, as llama.cpp's converter writes them: of Llama 3's scaling, written out."""
    found = []
    for number in range(2):
        length = 2 * np.pi * 5e5 ** (number / 2)
        smooth = (8192 / length - low) / (high - low)
        part = 1.0 if length < 8192 / high else 0.0 if length > 8192 / low else smooth
        found.append(1 / ((1 - part) / factor + part))
    return np.array(found, np.float32)


def test_numbers_become_a_config(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(made())
    config = models.LlamaConfig(12, 8, 1, 2, 2, 8, head_dim=4, theta=5e5, eps=1e-5, tied=True, max_seq=64)
    assert models.read_config(path) == config
    models.load(path)
    path.write_bytes(made({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}))
    scaling: Any = models.read_config(path)
    assert scaling.scaling.factor == 4.0
    base = 5e2  # of which the second frequency lies between Llama 3's two lengths
    assert 2 * np.pi * base**0.5 < 8192 / 4
    path.write_bytes(made(arrays={"rope_freqs.weight": divisors(32.0)}))
    scaled: Any = models.read_config(path)
    assert scaled.scaling == Llama3Scaling(
        factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
    )
    models.load(path)


def twice(name: str) -> bytes:
    """A file that has an array twice."""
    whole = made(arrays={"blk.0.attn_x.weight": ONES})
    return whole.replace(b"blk.0.attn_x.weight", name.encode())


WRONG = {
    "another architecture": (
        made({"general.architecture": "mamba"}),
        "'mamba' is not known; there are llama",
    ),
    "no architecture": (made({"general.architecture": None}), "no 'general.architecture'"),
    "a number missing": (made({"llama.block_count": None}), "no 'llama.block_count', which this architecture needs"),
    "a number that nobody knows": (
        made({"llama.doom": 3}),
        "that this architecture does not know: llama.doom",
    ),
    "experts of another family": (made({"llama.expert_shared_count": 8}), "does not know: llama.expert_shared_count=8"),
    "experts without their arrays": (made({"llama.expert_count": 8}), "not in the folder: .*experts.0.w1"),
    "heads by layer": (
        made({"llama.attention.head_count_kv": [1, 2]}),
        "kv='a list of 2': it must be a whole",
    ),
    "values of another width": (
        made({"llama.attention.key_length": 4, "llama.attention.value_length": 6}),
        r"are \[4, 6\]; both must be equal",
    ),
    "another scaling": (made({"llama.rope.scaling.type": "longrope"}), "type='longrope' is not known"),
    "other divisors": (
        made(arrays={"rope_freqs.weight": np.full(2, 3, np.float32)}),
        "not the divisors of Llama 3.1 to 3.3",
    ),
    "one of several": (made({"split.count": 2}), "one of several files; join them"),
    "no table": (
        made(arrays={"token_embd.weight": np.ones(3, np.float32)}).replace(b"token_embd", b"token_abcd"),
        "no token_embd",
    ),
    "another size": (made({"llama.feed_forward_length": 16}), r"it has shape \(8, 8\), and the model's is"),
    "more layers": (made({"llama.block_count": 2}), "not in the folder: model.layers.1"),
    "an array of no rule": (
        made(arrays={"blk.0.attn_x.weight": np.ones((8, 8), np.float32)}),
        "not in the model: blk.0.attn_x",
    ),
    "a bias of what stands in another order": (
        made(arrays={"blk.0.attn_q.bias": np.ones(8, np.float32)}),
        "not in the model",
    ),
    "heads that do not divide": (
        made({"llama.attention.head_count": 3, "llama.rope.dimension_count": None}),
        "has 8 rows, which must be a multiple of 6",
    ),
    "a type that is not known": (
        made(kinds={"output_norm.weight": 99}),
        "type 99, which is not known; there are F32",
    ),
    "rows of half a block": (made(kinds={"blk.0.attn_q.weight": 2}), "must have rows of whole blocks of 32 numbers"),
    "arrays behind the end": (made(shift=1 << 40), "ends at byte .*, and the file at"),
    "an array twice": (twice("blk.0.attn_q.weight"), "has blk.0.attn_q.weight twice"),
    "five dims": (made(arrays={"a": np.ones((1, 1, 1, 1, 8), np.float32)}), "a has 5 dims"),
    "an array of nothing": (made(arrays={"a": np.ones((0, 8), np.float32)}), "must have rows of whole blocks"),
    "another version": (made()[:4] + struct.pack("<I", 1) + made()[8:], "its version is 1, not 2 or 3"),
    "no alignment": (made({"general.alignment": 0}), "general.alignment=0"),
    "another file": (b"PK\x03\x04" + bytes(100), "does not begin with 'GGUF'"),
    "nothing": (b"", "cannot be read"),
    "a text of 2^63 bytes": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "ends within its header"),
    "lists in lists": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) * 9,
        "a list of li",
    ),
    "so many arrays": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "ends within its header"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_not_what_it_says(name, tmp_path):
    content, words = WRONG[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a.gguf.*{words}"):
        models.load(tmp_path / "a.gguf")


_TOKENS = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "gpt-2"}
WRONG_TOKENIZERS = {
    "none": ({"tokenizer.ggml.model": None}, "no 'tokenizer.ggml.model'"),
    "another kind": ({"tokenizer.ggml.model": "rwkv"}, "model='rwkv' is not known; there are gpt2, llama, gemma4"),
    "other words": ({"tokenizer.ggml.pre": "doom"}, "pre='doom' is not known; there are a.x-4.0, afmoe"),
    "tokens that are no texts": ({"tokenizer.ggml.tokens": [1, 2]}, "tokens must be texts"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "it has 0 tokens"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "2 tokens, 1 of them distinct"),
    "other types": ({"tokenizer.ggml.token_type": [1, 1]}, "3 tokens, 3 of them distinct, and 2 types"),
    "no pair": ({"tokenizer.ggml.merges": ["a b", "ab"]}, "merges: 'ab' is not a pair"),
    "a setting that nobody knows": ({"tokenizer.ggml.doom": False}, "does not know: tokenizer.ggml.doom=False"),
    "a separator": ({"tokenizer.ggml.add_sep_token": True}, "does not know: tokenizer.ggml.add_sep_token=True"),
    "a template that is no text": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template=3: it must be a text"),
    "a piece without end": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b" * 513]},
        "tokens: a token has 513 characters, more than 512",
    ),
    "an id beyond": (
        {"tokenizer.ggml.eos_token_id": 3},
        "3 tokens, but some special tokens have ids outside of these: {'eos': 3}",
    ),
}


@pytest.mark.parametrize("name", WRONG_TOKENIZERS)
def test_a_tokenizer_that_is_not_what_it_says(name, tmp_path):
    path, (said, words) = tmp_path / "a.gguf", WRONG_TOKENIZERS[name]
    path.write_bytes(made(_TOKENS))
    assert '"ab": 2' in models.gguf_companion_files(path)["tokenizer.json"]
    path.write_bytes(made(_TOKENS | said))
    with pytest.raises(ValueError, match=rf"a.gguf.*{words}"):
        models.gguf_companion_files(path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    whole, path = FILES["qwen3"], tmp_path / "a.gguf"
    for length in [*range(0, 3000, 61), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a.gguf: it cannot be read"):
            GGUF(path)
    path.write_bytes(whole)
    assert len(GGUF(path).names) == 13


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    tensor = GGUF(FIXTURES / "qwen3.gguf").tensors["blk.0.attn_q.weight"]
    row = np.asarray(tensor.rows[7]).tobytes()
    assert tensor.form.name == "Q8_0" and FILES["qwen3"].count(row) == 1
    path.write_bytes(FILES["qwen3"].replace(row, struct.pack("<e", np.inf) + row[2:]))
    with pytest.raises(ValueError, match=r"blk.0.attn_q.weight: one of its scales is not finite"):
        models.load(path)


# Where a block of each type has its numbers of 16 bits, as ggml lays them out.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def test_a_scale_of_each_type_of_block_that_is_no_number_is_refused():
    plain = {"F32", "F16", "BF16"}
    packaged = {name for name, *_ in PACKAGED.values()}
    assert SCALES.keys() | plain | packaged == {form.name for form in BLOCKS.values()}
    for form in (form for form in BLOCKS.values() if form.name not in plain | packaged):
        out = np.ones((2, 3 * form.numbers), np.float32)
        octets = np.zeros((2, 3 * form.octets), np.uint8)
        form.decode({"": octets}, slice(0, 2), out)
        assert not out.any()
        for place in SCALES[form.name]:
            for wrong in (np.inf, -np.inf, np.nan):
                spoilt = octets.copy()
                spoilt[1, form.octets + place :][:2] = np.frombuffer(struct.pack("<e", wrong), np.uint8)
                with pytest.raises(ValueError, match="one of its scales is not finite"):
                    form.decode({"": spoilt}, slice(0, 2), out)


# Types of blocks whose codes a map holds, by their numbers in files, and whether their zero points are integers.
HELD = {2: True, 3: False, 8: True, 12: False}


def held_and_decoded(form: Any, octets: np.ndarray, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a map that holds the codes of blocks, in scales of 16 numbers, and the decoder's."""
    rows, columns = len(octets), octets.shape[1] // form.octets * form.numbers
    codes, scales, zeros = form.read_codes({"": octets} | parts, (1, 16))
    linear = nn.QuantizedLinear(
        ("inputs",), ("outputs",), form=form.groups.form, **jax.tree.map(jax.numpy.asarray, named(codes, scales, zeros))
    )
    out = np.empty((rows, columns), np.float32)
    form.decode({"": octets} | parts, slice(0, rows), out)
    assert scales.shape == (rows, columns // 16) and str(scales.dtype) == form.groups.scale_dtype
    return np.asarray(linear.matrix()), out


def named(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> dict[str, np.ndarray | None]:
    return {"codes": codes, "scales": scales, "zeros": zeros}


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: BLOCKS[kind].name)
def test_codes_of_a_map_are_the_decoded_numbers(kind):
    """Bit for bit where zero points are integers, else to rounding; also of a group whose scale is 0."""
    form: Any = BLOCKS[kind]
    octets = np.random.default_rng(kind).integers(0, 256, (6, 2 * form.octets)).astype(np.uint8)
    halves = np.random.default_rng(0).random((6, 2, len(SCALES[form.name]))).astype(np.float16)
    halves[0, 0, 0] = 0  # the factor of the first block
    for number, place in enumerate(SCALES[form.name]):
        for block in range(2):
            octets[:, block * form.octets + place :][:, :2] = halves[:, block, number, None].view(np.uint8)
    for parts in ({}, {"order": np.array([5, 0, 3, 1, 2, 4])}):
        kept, decoded = held_and_decoded(form, octets, parts)
        assert np.array_equal(kept, decoded) if HELD[kind] else np.allclose(kept, decoded, rtol=1e-6, atol=2e-6)
        spoilt = octets.copy()
        spoilt[2, -1] ^= 1
        assert not np.allclose(held_and_decoded(form, spoilt, parts)[0], decoded, rtol=1e-6, atol=2e-6)
    with pytest.raises(ValueError, match="its columns are stored in another order, so its codes cannot be kept"):
        form.read_codes({"": octets, "columns": np.arange(2)}, (1, 16))


def test_a_convolution_of_three_dims_is_no_array_of_experts(tmp_path):
    arrays = {"blk.0.ssm_conv1d_q.weight": np.zeros((8, 1, 3)), "blk.0.ffn_up_exps.weight": np.zeros((2, 4, 3))}
    path = tmp_path / "a.gguf"
    path.write_bytes(made({}, {name: array.astype(np.float32) for name, array in arrays.items()}))
    names = {name for name in GGUF(path).names if "conv1d" in name or "exps" in name}
    experts = {f"blk.0.ffn_up_exps.weight.{number}" for number in range(2)}
    assert names == {"blk.0.ssm_conv1d_q.weight"} | experts


def test_only_paths_that_are_files_are_of_gguf(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        models.load(Path(tmp_path / "nothing.gguf"))
