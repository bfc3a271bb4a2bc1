"""Damaged folders of quantized weights raise one error each, which names the array and the folder."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from format_cases import ALL_CASES, BF16, CASES, compressed, EXPERT_CASES, OF_GPTQ
from format_folders import change, EXPERTS, GATE, LLAMA, plain, same_bits, store, write
from safetensors.numpy import load_file

from eqformer import models
from eqformer.models import PublishedConfig
from eqformer.models.formats import read_format


# By default one of each layout; the others are of the grid.
BY_DEFAULT = {"fp8 blocks", "int4 with zeros", "gptq", "awq", *EXPERT_CASES}
NAMES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.grid) for name in ALL_CASES]
HOSTILE = {
    "codes cut short": (lambda codes, scales: (codes[:-1], scales), r"has shape|not a multiple|says"),
    "scales cut short": (lambda codes, scales: (codes, scales[:-1] if scales.ndim else np.ones(2, BF16)), "has shape"),
    "too many scales": (lambda codes, scales: (codes, np.stack([scales, scales])), r"has shape"),
    "scales of another dtype": (lambda codes, scales: (codes, scales.astype(np.int64)), "is of I64, not of"),
    "scales of 8 bits": (
        lambda codes, scales: (codes, np.ones(scales.shape, ml_dtypes.float8_e5m2)),
        "is of F8_E5M2, not of",
    ),
    "no scales": (lambda codes, scales: (codes, None), r"mean nothing without .*(scale|_scales).*must have both"),
    "no codes": (lambda codes, scales: (None, scales), r"not in the folder: .*|not in the model: .*"),
    "codes that are floats": (
        lambda codes, scales: (codes.astype(np.float32), scales),
        r"is of F32, not of|not in the model: .*scale",
    ),
    "codes of more dims": (lambda codes, scales: (codes[None], scales), "has shape .* not [24] dims"),
    "no codes in it": (lambda codes, scales: (codes[:0], scales), "has shape|says"),
    "a scale that is no number": (
        lambda codes, scales: (codes, np.full_like(scales, 255 if scales.dtype == np.uint8 else np.nan)),
        "not finite|is 255",
    ),
}


def refused(folder: Path, name: str, words_of: str) -> list[str]:
    """The messages of a load that decodes and of one that keeps, but for inputs in another order, which none keeps."""
    found = []
    for weights in ("decoded", "quantized")[: 1 if "order" in name else 2]:
        with pytest.raises(ValueError, match=words_of) as raised:
            models.load(folder, weights=weights)
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize("fault", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_that_do_not_go_together(name, fault, tmp_path):
    case, (spoil, words_of) = ALL_CASES[name], HOSTILE[fault]
    stem = EXPERTS + "down_proj" if name in EXPERT_CASES else GATE
    stored, _ = write(tmp_path, name)
    ends = case.codes, case.scales
    spoilt = dict(zip(ends, spoil(*(stored.pop(stem + end) for end in ends)), strict=True))
    stored |= {stem + end: np.ascontiguousarray(its) for end, its in spoilt.items() if its is not None}
    change(tmp_path, stored)
    for message in refused(tmp_path, name, words_of):
        assert stem in message and str(tmp_path) in message


@pytest.mark.by_default("fp8 blocks", "gptq")
@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_another_size_than_the_models(name, tmp_path):
    stem = EXPERTS + "down_proj" if name in EXPERT_CASES else GATE
    stored, _ = write(tmp_path, name)
    shape, rng = ((5, 32, 32) if name in EXPERT_CASES else (96, 32)), np.random.default_rng(0)
    parts, _ = ALL_CASES[name].make(rng, *shape)
    change(tmp_path, stored | {stem + end: part for end, part in parts.items()})
    refused(tmp_path, name, rf"{re.escape(stem)}.*: it has shape \(.*\), and the model's is \(.*\)")


@pytest.mark.by_default("int4 with zeros", "gptq")
@pytest.mark.parametrize("name", NAMES)
def test_codes_of_which_the_configuration_says_nothing(name, tmp_path):
    """With their scales too: what is missing is named, not each array."""
    stored, _ = write(tmp_path, name)
    said = json.loads((tmp_path / "config.json").read_text())
    store(tmp_path, stored, {key: its for key, its in said.items() if key != "quantization_config"})
    words_of = (
        r"^load\('.*'\): model.layers.0.* \([UIF](8|32)(_E4M3)?\) holds codes, but config.json has no quantization_"
    )
    for message in refused(tmp_path, name, words_of):
        assert len(message) < len(str(tmp_path)) + 260


@pytest.mark.by_default("fp8 blocks")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_short(name, tmp_path):
    write(tmp_path, name)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(tmp_path, name, r"model.safetensors: it is not a complete safetensors file \(")
    file.write_bytes(whole)
    assert models.load(tmp_path) is not None


SIGNLESS = ("fp8 one scale", "fp8 by row", "int8 by row", "nvfp4", "nvfp4 of modelopt")


@pytest.mark.parametrize(
    "name", ["fp8 blocks", *(pytest.param(n, marks=pytest.mark.grid) for n in CASES if n in SIGNLESS)]
)
def test_a_scale_of_a_magnitude_is_not_below_0(name, tmp_path):
    stored, _ = write(tmp_path, name)
    wrong = stored[GATE + CASES[name].scales].copy()
    wrong.reshape(-1)[-1] *= -1
    change(tmp_path, stored | {GATE + CASES[name].scales: wrong})
    for message in refused(tmp_path, name, "one of its scales is below 0"):
        assert f"{GATE}.weight" in message


def test_a_scale_of_whole_numbers_may_be_below_0(tmp_path):
    """Some programs use the whole range of four bits with either sign: all weights have the other sign then."""
    stored, _ = write(tmp_path, "int4")
    gate = lambda: models.load(tmp_path).stacks[0].blocks.feed_forward.layer.gate.weight  # pyright: ignore
    want = gate()
    change(tmp_path, stored | {GATE + ".weight_scale": -stored[GATE + ".weight_scale"]})
    found = gate()
    assert np.array_equal(found[0], -want[0]) and np.array_equal(found[1], want[1]) and want[0].any()


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
    "scales in another form": ("fp8 blocks", {"scale_fmt": "ue4m3"}, "scale_fmt='ue4m3' is not supported"),
    "experts in four bits": ("fp8 experts", {"expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported"),
    "a switch that nobody knows": ("fp8 blocks", {"doom": False}, "does not know: doom=False"),
    "groups that no strategy has": (
        "int8 by row",
        compressed("int-quantized", type="int", strategy="channel", group_size=16),
        "group_size=16 beside strategy='channel'",
    ),
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
    with pytest.raises(
        ValueError, match=r"\.weight \(F8_E4M3\) holds codes, but config.json has no quantization_config"
    ):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": [1]}))
    with pytest.raises(ValueError, match="quantization_config=.*: it must be one object"):
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
        with pytest.raises(ValueError, match=r"gate_proj.qweight: its columns are of groups .*, but it has 2"):
            models.load(tmp_path)


MX_BITS = (("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8))
MX = {form: compressed(form, type="float", num_bits=bits, strategy="group", group_size=32) for form, bits in MX_BITS}


@pytest.mark.parametrize("form", MX)
def test_powers_of_two_that_do_not_fit(form):
    """Of the 8-bit scales of groups of 32: a missing one, and one that is no number."""
    read = read_format(PublishedConfig(MX[form], "config.json"))
    is_packed = form.startswith("mxfp4")
    codes = np.zeros((4, 32 if is_packed else 64), np.uint8 if is_packed else ml_dtypes.float8_e4m3fn)
    parts = {read.codes: codes, ".weight_scale": np.full((4, 2), 127, np.uint8)}
    assert read.shape(parts) == (4, 64)
    with pytest.raises(ValueError, match=r"its .weight_scale has shape \(4, 1\), not \(4, 2\)"):
        read.shape(parts | {".weight_scale": parts[".weight_scale"][:, :1]})
    parts[".weight_scale"][3, 1] = 255
    with pytest.raises(ValueError, match="one of its scales is not finite"):
        read.decode(parts, slice(0, 4), np.empty((4, 64), np.float32))
    if is_packed:
        with pytest.raises(ValueError, match=r"has shape \(4, 24\): rows of 48 numbers are not groups of 32"):
            read.shape(parts | {read.codes: codes[:, :24]})


def test_scales_of_an_array_that_are_no_factors(tmp_path):
    for name, suffix, wrong in (
        ("nvfp4", ".weight_global_scale", (0.0, -1.0, np.inf, np.nan)),
        ("nvfp4 of modelopt", ".weight_scale_2", (-1.0, np.inf, np.nan)),
    ):
        stored, _ = write(tmp_path / name, name)
        array_scale = stored[GATE + suffix]
        for value in wrong:
            change(tmp_path / name, stored | {GATE + suffix: np.full_like(array_scale, value)})
            refused(tmp_path / name, name, rf"gate_proj.*its {suffix} is {value}, which is not a finite number above 0")
        change(tmp_path / name, stored | {GATE + suffix: np.ones(2, np.float32)})
        refused(tmp_path / name, name, rf"its {suffix} has shape \(2,\), not \(\) or \(1,\)")


def test_algorithms_of_modelopt_are_read_or_refused(tmp_path):
    """Also from the file beside a configuration that says nothing, as older folders have it."""
    stored, decoded = write(tmp_path / "folder", "nvfp4 of modelopt")
    said = json.loads((tmp_path / "folder" / "config.json").read_text())
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "folder" / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    store(tmp_path / "folder", stored, {key: its for key, its in said.items() if key != "quantization_config"})
    models.save(models.load(tmp_path / "folder"), tmp_path / "plain", like=tmp_path / "folder")
    back = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(same_bits(back[key], decoded[key]) for key in decoded)
    modelopt = CASES["nvfp4 of modelopt"].said
    for changes, words_of in (
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' is not known; there are FP8, "),
        ({"quant_algo": "MXFP8"}, "group_size=16 with quant_algo='MXFP8', whose groups have 32"),
        ({"config_groups": {"a": {}}}, "each group must have weights"),
        ({"quantized_layers": {"a": {"quant_algo": "INT4"}}}, "quantized_layers: a=.*: there are FP8, NVFP4"),
        ({"pre_quant_scale": True}, "pre_quant_scale=True is not supported"),
    ):
        with pytest.raises(ValueError, match=words_of):
            read_format(PublishedConfig(modelopt | changes, "config.json"))
