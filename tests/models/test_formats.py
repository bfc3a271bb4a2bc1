"""Weights stored in fewer bits: what each format decodes, from folders that are what they say and from others."""

import functools
import json
import re
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from format_cases import BF16, CASES, compressed, F8, MXFP4, OF_GPTQ, words
from safetensors.numpy import load_file, save_file
from test_published import FIXTURES

from eqformer import models
from eqformer.models import _arrays
from eqformer.models._arrays import Arrays
from eqformer.models._config import PublishedConfig
from eqformer.models.formats import FORMATS, read_format
from eqformer.parallel import make_mesh, Plan


SINGLE = "model.safetensors"
GATE = "model.layers.0.mlp.gate_proj"
EXPERTS = "model.layers.1.mlp.experts."
LLAMA = models.LlamaConfig(vocab=24, embed=32, layers=2, heads=2, kv_heads=1, mlp=48, head_dim=16)
OSS = models.GPTOSSConfig(24, 32, 2, 2, 1, 32, window_layers=(0,), experts=4, top_k=2, head_dim=16, scaling=None)


@functools.cache
def plain(config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A model's configuration and its arrays as published, random numbers that bfloat16 holds; nothing is compiled."""
    shapes = eqx.filter_eval_shape(lambda: models.build(config, key=jax.random.key(0)))
    made = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, shapes
    )
    with tempfile.TemporaryDirectory() as folder:
        models.save(made, Path(folder) / "plain", config=config)
        said = json.loads((Path(folder) / "plain" / "config.json").read_text())
        arrays = load_file(Path(folder) / "plain" / SINGLE)
    rng = np.random.default_rng(0)
    return said | {"torch_dtype": "bfloat16"}, {
        name: rng.standard_normal(its.shape).astype(BF16) for name, its in arrays.items()
    }


def is_map(name: str) -> bool:
    return "_proj" in name and "bias" not in name


def write(folder: Path, name: str, dtype: Any = BF16) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A folder of which every map is stored in a format: what is stored, and what a plain one would hold."""
    folder.mkdir(exist_ok=True)
    case, rng = (MXFP4 if name == "mxfp4" else CASES[name]), np.random.default_rng(1)
    said, arrays = plain(OSS if name == "mxfp4" else LLAMA)
    stored: dict[str, np.ndarray] = {}
    decoded: dict[str, np.ndarray] = {}
    for key, array in arrays.items():
        parts: dict[str, np.ndarray] = {"": array}
        decoded[key], stem = array, key
        if is_map(key) and (array.ndim == 3 or name != "mxfp4"):
            stem = key.removesuffix(".weight")
            shape = (array.shape[0], *array.shape[:0:-1]) if name == "mxfp4" else array.shape
            parts, values = case.make(rng, *shape)
            decoded[key] = values.astype(np.float32).astype(dtype)
        stored |= {stem + end: part for end, part in parts.items()}
    store(folder, stored, said | {"quantization_config": case.said})
    return stored, decoded


def store(folder: Path, stored: dict[str, np.ndarray], said: dict[str, Any]) -> None:
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(said))


def change(folder: Path, stored: dict[str, np.ndarray], **attributes: Any) -> None:
    """Other arrays, or another `quantization_config`."""
    said = json.loads((folder / "config.json").read_text())
    store(folder, stored, said | {"quantization_config": said["quantization_config"] | attributes})


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", [*CASES, "mxfp4"])
def test_a_folder_is_the_model_that_a_plain_formula_decodes(name, tmp_path):
    """Saved again, it is a folder of plain arrays, bit for bit those of the formula, rounded once."""
    _, decoded = write(tmp_path / "folder", name)
    models.save(models.load(tmp_path / "folder"), tmp_path / "plain", like=tmp_path / "folder")
    back = load_file(tmp_path / "plain" / SINGLE)
    assert back.keys() == decoded.keys()
    assert [key for key in back if not same_bits(back[key], decoded[key])] == []
    said = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in said and said["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"is stored in fewer bits, and whole=True would mix it with the model's"):
        models.save(models.load(tmp_path / "plain"), tmp_path / "x", like=tmp_path / "folder", whole=True)


@pytest.mark.parametrize("name", ["mxfp4", "fp8 blocks", pytest.param("awq", marks=pytest.mark.grid)])
def test_each_device_gets_its_part_whatever_the_plan(name, tmp_path):
    write(tmp_path, name)
    whole = models.load(tmp_path, dtype="float32")
    split: dict[str, Any] = {"fsdp": 2, "tensor": 2} | ({"expert": 2} if name == "mxfp4" else {"pipe": 2})
    plan = Plan(make_mesh(**split), zero=3, smallest=1)
    parts = models.load(tmp_path, plan=plan, dtype="float32")
    assert all(np.array_equal(*pair) for pair in zip(*(jax.tree.leaves(m) for m in (whole, parts)), strict=True))


def test_a_part_that_no_device_holds_is_not_decoded(tmp_path, monkeypatch):
    """Of experts that lie elsewhere, no code is read."""
    write(tmp_path, "mxfp4")
    seen: list[Any] = []
    read = Arrays.read
    monkeypatch.setattr(Arrays, "read", lambda self, *given: seen.append(given[2]) or read(self, *given))
    monkeypatch.setattr("eqformer.models._filled._Part.holds", lambda part, place: len(place) < 2 or place[1] != 3)
    models.load(tmp_path)
    assert {piece for piece in seen if piece is not None} == {0, 1, 2}


DTYPES = {"bfloat16": BF16, "float8_e4m3fn": F8}
SAID: dict[str, Any] = {
    "mxfp4": MXFP4.said,
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 bfloat16": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 one scale": {"quant_method": "fp8", "weight_block_size": None},
    "int4": compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32),
    "int4 with zeros": compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "int8 by row": compressed("pack-quantized", type="int", strategy="channel"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "gptq": OF_GPTQ | {"group_size": 32},
    "gptq in another order": OF_GPTQ | {"group_size": 32, "desc_act": True},
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_formats_own_libraries_decode(name):
    with np.load(FIXTURES / "formats.npz") as file:
        found = {tuple(key.split("|")[1:]): file[key] for key in file if key.split("|")[0] == name}
    parts = {end: bits.view(DTYPES.get(dtype, dtype)) for (end, dtype), bits in found.items()}
    want, form = parts.pop("decoded"), read_format(PublishedConfig(SAID[name], "config.json"))
    shape = form.shape(parts)
    places = range(shape[0]) if len(shape) == 3 else (None,)
    of = lambda place: {end: part if place is None else part[place] for end, part in parts.items()}
    got = np.stack([form.decode(of(place), slice(0, shape[-2])) for place in places])
    assert same_bits(got.reshape(shape).astype(want.dtype), np.ascontiguousarray(want))
    assert not same_bits(np.ascontiguousarray(got.reshape(shape)[..., ::-1].astype(want.dtype)), want)


def test_an_array_is_decoded_alike_in_one_piece_and_in_many():
    rng = np.random.default_rng(0)
    for name, case in CASES.items():
        parts, _ = case.make(rng, 16, 48)
        tall = {"gptq": (6, 272), "awq": (48, 34)}  # more rows than a piece: as many random codes
        form = read_format(PublishedConfig(case.said, "config.json"))
        if name.split()[0] in tall:
            parts |= {".qweight": words(rng, *tall[name.split()[0]]), ".qzeros": words(rng, 3, 34)}
            parts |= {".scales": rng.random((3, 272)).astype(np.float16)}
        elif name == "int4 with zeros":
            parts |= {".weight_zero_point": words(rng, 34, 3)}
        if not name.startswith(("gptq", "awq")):
            parts |= {case.codes: np.repeat(parts[case.codes], 17, axis=0)}
            many = 17 if parts[case.scales].ndim else 1
            parts |= {case.scales: np.repeat(parts[case.scales], many, axis=0) if many > 1 else parts[case.scales]}
            parts |= {".weight_shape": np.array([272, 48])} if ".weight_shape" in parts else {}
        assert form.shape(parts) == (272, 48)
        whole = form.decode(parts, slice(0, 272))
        pieces = [form.decode(parts, slice(start, min(start + 96, 272))) for start in (0, 96, 192)]
        assert same_bits(np.concatenate(pieces), np.ascontiguousarray(whole)), name


@pytest.mark.parametrize("sizes", [pytest.param({}, marks=pytest.mark.grid), {"fsdp": 2, "tensor": 2, "pipe": 2}])
def test_beside_the_model_one_array_is_decoded_at_a_time(sizes, tmp_path):
    """The most memory of the host is the model's share and one array; all of it decoded at once would be its double."""
    config = models.LlamaConfig(vocab=64, embed=512, layers=4, heads=4, kv_heads=4, mlp=2048)
    said, arrays = plain(config)
    rng = np.random.default_rng(0)
    stored = {}
    for name, array in arrays.items():
        stored[name] = array
        if is_map(name):
            stored[name] = rng.integers(0, 120, array.shape).astype(np.uint8).view(F8)
            stored[f"{name}_scale_inv"] = rng.random([-(-size // 128) for size in array.shape]).astype(np.float32)
    store(tmp_path, stored, said | {"quantization_config": SAID["fp8 blocks"]})
    own, largest = sum(array.nbytes for array in arrays.values()), 512 * 2048 * 2
    given = Plan(make_mesh(**sizes), zero=3, smallest=1) if sizes else None
    models.load(tmp_path, plan=given)
    tracemalloc.start()
    kept = models.load(tmp_path, plan=given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shares = sum(shard.data.nbytes for x in jax.tree.leaves(kept) for shard in x.addressable_shards)
    working = 4 * 3 * _arrays._AT_ONCE * 4  # each thread's pieces in float32
    # Python's garbage is up to one array more, until it is collected.
    assert own <= shares and shares < peak < shares + 2 * largest + working, (peak - shares) / largest
    assert 2 * largest + working < own / 3


# By default one of each layout; the others are of the grid.
BY_DEFAULT = {"fp8 blocks", "int4 with zeros", "gptq", "awq", "mxfp4"}
NAMES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.grid) for name in (*CASES, "mxfp4")]
HOSTILE = {
    "codes cut short": (lambda codes, scales: (codes[:-1], scales), r"has shape|is no multiple|says"),
    "scales cut short": (lambda codes, scales: (codes, scales[:-1] if scales.ndim else np.ones(2, BF16)), "has shape"),
    "too many scales": (lambda codes, scales: (codes, np.stack([scales, scales])), r"has shape"),
    "scales of another dtype": (lambda codes, scales: (codes, scales.astype(np.int64)), "is of I64, not of"),
    "no scales": (lambda codes, scales: (codes, None), r"mean nothing without .*(scale|_scales).*must have both"),
    "no codes": (lambda codes, scales: (None, scales), r"not in the folder: .*|in no rule: .*"),
    "codes that are floats": (
        lambda codes, scales: (codes.astype(np.float32), scales),
        r"is of F32, not of|in no rule: .*scale",
    ),
    "codes of more dims": (lambda codes, scales: (codes[None], scales), "has shape .* not [24] dims"),
    "no codes in it": (lambda codes, scales: (codes[:0], scales), "has shape|says"),
    "a scale that is no number": (
        lambda codes, scales: (codes, np.full_like(scales, 255 if scales.dtype == np.uint8 else np.nan)),
        "not finite|is 255",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_that_do_not_go_together(name, fault, tmp_path):
    case, (spoil, words_of) = (MXFP4 if name == "mxfp4" else CASES[name]), HOSTILE[fault]
    stem = EXPERTS + "down_proj" if name == "mxfp4" else GATE
    stored, _ = write(tmp_path, name)
    ends = case.codes, case.scales
    spoilt = dict(zip(ends, spoil(*(stored.pop(stem + end) for end in ends)), strict=True))
    stored |= {stem + end: np.ascontiguousarray(its) for end, its in spoilt.items() if its is not None}
    change(tmp_path, stored)
    with pytest.raises(ValueError, match=words_of) as raised:
        models.load(tmp_path)
    assert stem in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_another_size_than_the_models(name, tmp_path):
    stem = EXPERTS + "down_proj" if name == "mxfp4" else GATE
    stored, _ = write(tmp_path, name)
    shape, rng = ((5, 32, 32) if name == "mxfp4" else (96, 32)), np.random.default_rng(0)
    parts, _ = (MXFP4 if name == "mxfp4" else CASES[name]).make(rng, *shape)
    change(tmp_path, stored | {stem + end: part for end, part in parts.items()})
    with pytest.raises(ValueError, match=rf"{re.escape(stem)}.*: it has shape \(.*\), and the model's is \(.*\)"):
        models.load(tmp_path)


WRONG = {
    "another method": (
        "awq",
        {"quant_method": "bitsandbytes"},
        "'bitsandbytes' is not known; the formats are awq, com",
    ),
    "a method that is a list": ("awq", {"quant_method": ["awq"]}, r"quant_method=\['awq'\]: it must be a text"),
    "a format that is a list": ("int4", {"format": ["pack-quantized"]}, r"format=.*: it must be a text"),
    "three bits": ("gptq", {"bits": 3}, "quantization_config: bits=3 is not supported"),
    "groups of none": ("awq", {"group_size": 0}, "group_size=0: it must be a whole number"),
    "groups of other sizes": ("gptq", {"group_size": 32}, r"its .qzeros has shape \(3, 4\), not \(2, 4\)"),
    "an attribute that nobody knows": (
        "mxfp4",
        {"doom": 3},
        "quantization_config: attributes that this format does not know: doom=3",
    ),
    "some layers otherwise": ("gptq", {"dynamic": {"a": {"bits": 8}}}, "attributes .* not know: dynamic"),
    "another float": ("fp8 blocks", {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    "blocks of one dim": ("fp8 blocks", {"weight_block_size": [128]}, "must be two whole numbers"),
    "other blocks": ("fp8 blocks", {"weight_block_size": [128, 128]}, "its .weight_scale_inv has shape"),
    "blocks, not one scale": (
        "fp8 one scale",
        {"weight_block_size": [128, 128]},
        r"its .weight_scale_inv has shape \(\)",
    ),
    "another layout": ("awq", {"version": "gemv"}, "version='gemv' is not supported"),
    "another of compressed-tensors'": (
        "int4",
        {"format": "nvfp4-pack-quantized"},
        "'nvfp4-pack-quantized' with int of 4",
    ),
    "groups that differ": (
        "int4",
        {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
        "there must be groups with weights, all stored alike",
    ),
    "no zeros": ("int4", CASES["int4 with zeros"].said, "mean nothing without .*weight_zero_point"),
    "what is another format's": (
        "awq",
        OF_GPTQ | {"version": None, "zero_point": None},
        r"in GPTQ: its (4 outputs|.qzeros has shape)",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_configuration_that_says_another_format(fault, tmp_path):
    name, attributes, words_of = WRONG[fault]
    stored, _ = write(tmp_path, name)
    change(tmp_path, stored, **attributes)
    with pytest.raises(ValueError, match=words_of):
        models.load(tmp_path)


def test_codes_of_which_nothing_is_said_are_refused_by_name(tmp_path):
    stored, _ = write(tmp_path, "fp8 blocks")
    said = json.loads((tmp_path / "config.json").read_text())
    del said["quantization_config"]
    only = {name: array for name, array in stored.items() if not name.endswith("_scale_inv")}
    store(tmp_path, only, said)
    with pytest.raises(ValueError, match=r"\.weight is of F8_E4M3 \(codes without scales: no quantization_config of"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": [1]}))
    with pytest.raises(ValueError, match="quantization_config: it must be one object"):
        models.load(tmp_path)
    both = {GATE + ".weight": plain(LLAMA)[1][GATE + ".weight"]}
    four, _ = write(tmp_path, "int4")
    change(tmp_path, four | both)
    with pytest.raises(
        ValueError, match=r"gate_proj.weight_packed and .*gate_proj.weight are both .*gate_proj.weight;"
    ):
        models.load(tmp_path)


def test_a_group_that_there_is_not(tmp_path):
    stored, _ = write(tmp_path, "gptq in another order")
    for wrong in (-1, 2):
        places = stored[GATE + ".g_idx"].copy()
        places[5] = wrong
        change(tmp_path, stored | {GATE + ".g_idx": places})
        with pytest.raises(ValueError, match=r"gate_proj.qweight: a column of it is of group .*, and it has 2"):
            models.load(tmp_path)


def test_every_format_has_cases():
    assert {case.said["quant_method"] for case in (*CASES.values(), MXFP4)} == set(FORMATS)
