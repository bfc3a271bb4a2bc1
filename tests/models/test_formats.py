"""Formats of quantized weights: decoded values of valid folders, and errors for other folders."""

import json
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from format_cases import ALL_CASES, BF16, CASES, compressed, EXPERT_CASES, F8, OF_GPTQ, words
from format_folders import as_stored, change, is_map, plain, same_bits, SINGLE, store, write
from safetensors.numpy import load_file
from test_published import FIXTURES

from eqformer import models, nn
from eqformer.models import _published_arrays, PublishedConfig
from eqformer.models._published_arrays import PublishedArrays
from eqformer.models.formats import Format, FORMATS, read_format, UNREAD
from eqformer.parallel import make_mesh, Plan


@pytest.mark.by_default("fp8 blocks", "int4 with zeros", "gptq", "awq", "nvfp4", "int8 by row", "mxfp4", "fp8 experts")
@pytest.mark.parametrize("name", ALL_CASES)
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


@pytest.mark.by_default("fp8 blocks")
@pytest.mark.parametrize("name", ["mxfp4", "fp8 experts", "fp8 blocks", "awq"])
def test_each_device_gets_its_part_whatever_the_plan(name, tmp_path):
    write(tmp_path, name)
    whole = models.load(tmp_path, dtype="float32")
    split: dict[str, Any] = {"fsdp": 2, "tensor": 2} | ({"expert": 2} if name in EXPERT_CASES else {"pipe": 2})
    plan = Plan(make_mesh(**split), zero=3, smallest=1)
    parts = models.load(tmp_path, plan=plan, dtype="float32")
    assert all(np.array_equal(*pair) for pair in zip(*(jax.tree.leaves(m) for m in (whole, parts)), strict=True))


def test_a_part_that_no_device_holds_is_not_decoded(tmp_path, monkeypatch):
    """Of experts that lie elsewhere, no code is read."""
    write(tmp_path, "mxfp4")
    read_pieces: list[Any] = []
    read = PublishedArrays.read
    monkeypatch.setattr(
        PublishedArrays, "read", lambda self, *arguments: read_pieces.append(arguments[2]) or read(self, *arguments)
    )
    monkeypatch.setattr(
        "eqformer.models._leaf_reader._Shard.holds", lambda part, position: len(position) < 2 or position[1] != 3
    )
    models.load(tmp_path)
    assert {piece for piece in read_pieces if piece is not None} == {0, 1, 2}


DTYPES = {"bfloat16": BF16, "float8_e4m3fn": F8}
SAID: dict[str, Any] = {
    "mxfp4": EXPERT_CASES["mxfp4"].said,
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 bfloat16": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 one scale": {"quant_method": "fp8", "weight_block_size": None},
    "int4": compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32),
    "int4 with zeros": compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "int8 by row": compressed("pack-quantized", type="int", strategy="channel"),
    "mx floats": compressed("mxfp8-quantized", type="float", strategy="group", group_size=32),
    "mxfp4 of compressed-tensors": compressed(
        "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
    ),
    "nvfp4": CASES["nvfp4"].said,
    "nvfp4 of modelopt": CASES["nvfp4 of modelopt"].said,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "gptq": OF_GPTQ | {"group_size": 32},
    "gptq in another order": OF_GPTQ | {"group_size": 32, "desc_act": True},
}


def in_pieces(form: Format, parts: Any, shape: tuple[int, ...], rows: int = 1 << 30) -> np.ndarray:
    """An array in float32, so many rows at a time, as they are stored."""
    decoded = np.empty(shape[::-1] if form.transposed else shape, np.float32)
    for start in range(0, len(decoded), rows):
        piece = slice(start, min(start + rows, len(decoded)))
        form.decode(parts, piece, decoded[piece])
    return decoded.T if form.transposed else decoded


@pytest.mark.parametrize("name", SAID)
def test_what_the_formats_own_libraries_decode(name):
    with np.load(FIXTURES / "formats.npz") as file:
        found = {tuple(key.split("|")[1:]): file[key] for key in file if key.split("|")[0] == name}
    parts = {end: bits.view(DTYPES.get(dtype, dtype)) for (end, dtype), bits in found.items()}
    want, form = parts.pop("decoded"), read_format(PublishedConfig(SAID[name], "config.json"))
    shape = form.shape(parts)
    places = range(shape[0]) if len(shape) == 3 else (None,)
    of = lambda place: {end: part if place is None else part[place] for end, part in parts.items()}
    got = np.stack([in_pieces(form, of(place), shape[-2:]) for place in places])
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
        whole = in_pieces(form, parts, (272, 48))
        assert same_bits(in_pieces(form, parts, (272, 48), 96), whole) and not (whole[:96] == whole[96:192]).all(), name


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 2, "pipe": 2}])
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
    working = 4 * 3 * _published_arrays._NUMBERS_AT_ONCE * 4  # each thread's pieces in float32
    # Python's garbage is up to one array more, until it is collected.
    assert own <= shares and shares < peak < shares + 2 * largest + working, (peak - shares) / largest
    assert 2 * largest + working < own / 3


# As `FineGrainedFP8Config().to_dict()` of transformers 5.24 says it, its blocks but for their size.
OF_TRANSFORMERS: dict[str, Any] = {"quant_method": "fp8", "modules_to_not_convert": None, "modules_to_convert": None}
OF_TRANSFORMERS |= {"activation_scheme": "dynamic", "weight_block_size": [16, 24], "dequantize": False}
OF_TRANSFORMERS |= {"scale_fmt": "float", "expert_dtype": "fp8"}


BLOCKS = pytest.param("fp8 blocks", ".weight", ".weight_scale_inv", marks=pytest.mark.grid)


@pytest.mark.parametrize("name,codes,scales", [BLOCKS, ("fp8 experts", "", "_scale_inv")])
def test_scales_that_are_powers_of_two_are_decoded_exactly(name, codes, scales, tmp_path):
    """As E8M0, and as bytes where the configuration says so; kept, they give the decoded model's weights too."""
    stored, _ = write(tmp_path, name)
    stems = sorted(key.removesuffix(scales) for key in stored if key.endswith(scales))
    rng, decoded = np.random.default_rng(2), {}
    for stem in stems:
        exponents = rng.integers(120, 131, stored[stem + scales].shape).astype(np.uint8)
        exponents.flat[0] = 0  # 2**-127, which is no normal float32
        stored[stem + scales] = exponents.view(ml_dtypes.float8_e8m0fnu)
        values = np.repeat(np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 16, axis=-2), 24, axis=-1)
        code = stored[stem + codes].astype(np.float64)
        decoded[stem + codes] = (code * values[..., : code.shape[-2], : code.shape[-1]]).astype(BF16)
    change(tmp_path, stored, **OF_TRANSFORMERS)
    model = models.load(tmp_path)
    models.save(model, tmp_path / "plain", like=tmp_path)
    back = load_file(tmp_path / "plain" / SINGLE)
    assert all(same_bits(back[key], values) for key, values in decoded.items()) and len(decoded) >= 4
    quantized = models.load(tmp_path, weights="quantized")
    assert {str(its.scales.dtype) for its in nn.modules(quantized, nn.QuantizedLinear)} == {"uint8"}
    plain = zip(jax.tree.leaves(nn.dequantize(quantized)), jax.tree.leaves(model), strict=True)
    # XLA takes numbers below the least normal float32 for 0.
    wide = lambda array: np.asarray(array, np.float64)
    assert all(np.allclose(wide(one), wide(other), rtol=0, atol=2.0**-126) for one, other in plain)
    models.save(quantized, tmp_path / "again", like=tmp_path, whole=True)
    assert as_stored(tmp_path / "again") == as_stored(tmp_path)
    as_bytes = {key: its.view(np.uint8) if key.endswith(scales) else its for key, its in stored.items()}
    change(tmp_path, as_bytes, scale_fmt="ue8m0")
    assert all(
        np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (models.load(tmp_path), model)), strict=True)
    )
    change(tmp_path, as_bytes, scale_fmt="float")
    with pytest.raises(ValueError, match="scale_inv is of U8, not of F32 or BF16 or F16 or F8_E8M0"):
        models.load(tmp_path)
    as_bytes[stems[0] + scales].flat[-1] = 255
    change(tmp_path, as_bytes, scale_fmt="ue8m0")
    for weights in ("decoded", "quantized"):
        with pytest.raises(ValueError, match="one of its scales is not finite"):
            models.load(tmp_path, weights=weights)


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    return {str: "doom", list: [1, 2, 3], dict: {"doom": 1}}.get(type(value)) or value + 1


@pytest.mark.parametrize("name", [*ALL_CASES, "fp8 of transformers"])
def test_every_attribute_is_used_or_has_one_value_or_is_listed_as_unread(name):
    """Each is changed by itself: the format differs, or it is refused, or the attribute is on the list."""
    said = OF_TRANSFORMERS if name == "fp8 of transformers" else ALL_CASES[name].said
    unread = UNREAD[said["quant_method"]]
    full = dict.fromkeys(unread, "something") | said
    read = lambda its: read_format(PublishedConfig(its, "config.json"))
    whole = read(full)
    for key, value in full.items():
        try:
            is_used = read(full | {key: changed(value)}) != whole
        except ValueError:
            is_used = True
        assert is_used != (key in unread), key
    for value in (False, 0, "a"):
        with pytest.raises(ValueError, match=f"does not know: unheard_of={value!r}"):
            read(full | {"unheard_of": value})
    assert read(full | {"unheard_of": None}) == whole


def test_every_format_has_cases():
    assert {case.said["quant_method"] for case in ALL_CASES.values()} == set(FORMATS)
