"""Folders of quantized weights, loaded as codes and scales, against the same folders decoded."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_cases import CASES, EXPERT_CASES, F8
from format_folders import as_stored, change, EXPERTS, GATE, same_bits, store, write
from safetensors.numpy import load_file
from test_published import ENCODERS, FIXTURES

from eqformer import models, nn
from eqformer.parallel import make_mesh, Plan
from eqformer.planning import abstract_mesh, decode_forecast, topology


IN_ORDER = [name for name in CASES if "order" not in name]
NAMES = [*IN_ORDER, *EXPERT_CASES]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (one, other)), strict=True))


def spoiled(model: Any) -> Any:
    """The model with a bit of each code turned over."""
    change = lambda one: eqx.tree_at(lambda m: m.codes, one, one.codes ^ 1) if hasattr(one, "codes") else one
    return nn.map_linears(change, model)


@pytest.mark.by_default("fp8 blocks")
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_the_decoded_ones(name, tmp_path):
    """Every weight, bit for bit, from codes in few bytes; also where each device reads its part."""
    write(tmp_path, name)
    decoded, quantized = (
        models.load(tmp_path, dtype="float32"),
        models.load(tmp_path, dtype="float32", weights="quantized"),
    )
    maps = [linear for linear in nn.linear_maps(quantized) if isinstance(linear, nn.QuantizedLinear)]
    assert len(maps) == (6 if name in EXPERT_CASES else 7)
    assert same(eqx.filter_jit(nn.dequantize)(quantized), decoded)
    for weights, loaded in (("decoded", decoded), ("quantized", quantized)):
        shapes = models.load_shapes(tmp_path, dtype="float32", weights=weights)
        assert eqx.tree_equal(shapes, eqx.filter_eval_shape(lambda loaded=loaded: loaded))
    number_of_codes = sum(2 * np.prod(linear.shape) for linear in maps)
    assert sum(linear.codes.nbytes for linear in maps) == number_of_codes / (
        4 if maps[0].form in ("int4", "fp4") else 2
    )
    split: dict[str, Any] = {"fsdp": 2, "replica" if "16" in str(CASES.get(name)) else "tensor": 2}
    split |= {"expert": 2} if name in EXPERT_CASES else {"pipe": 2}
    placed = models.load(
        tmp_path, plan=Plan(make_mesh(**split), zero=3, smallest=1), dtype="float32", weights="quantized"
    )
    assert same(placed, quantized) and not same(nn.dequantize(spoiled(quantized)), decoded)


@pytest.mark.by_default("qwen2")
@pytest.mark.parametrize("name", ["qwen2", "mistral3", "qwen3", "glm4moe", "lfm2", "deepseek2 Q8_0", "gemma4 Q8_0"])
def test_blocks_of_a_file_stay_quantized(name, tmp_path):
    """To rounding of float zero points; arrays of floats and experts are decoded, and each device reads its part."""
    path = FIXTURES / f"{name}.gguf"
    if "Q8_0" in name:
        path = tmp_path / "a.gguf"
        with np.load(FIXTURES / "gguf_converted.npz") as files:
            path.write_bytes(files[name].tobytes())
    decoded, quantized = models.load(path), models.load(path, weights="quantized")
    assert any(isinstance(linear, nn.QuantizedLinear) for linear in nn.linear_maps(quantized))

    def is_equal(model: Any) -> bool:
        pairs = zip(*map(jax.tree.leaves, (eqx.filter_jit(nn.dequantize)(model), decoded)), strict=True)
        return all(np.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in pairs)

    assert is_equal(quantized) and not is_equal(spoiled(quantized))
    assert eqx.tree_equal(models.load_shapes(path, weights="quantized"), eqx.filter_eval_shape(lambda: quantized))
    placed = models.load(path, plan=Plan(make_mesh(fsdp=2, replica=4), zero=3, smallest=1), weights="quantized")
    assert same(placed, quantized)


def test_formats_of_a_model_are_plain_data(tmp_path):
    """From which the shapes of the maps are made again."""
    write(tmp_path, "awq")
    shapes = models.load_shapes(tmp_path, weights="quantized")
    formats = json.loads(json.dumps(nn.quantized_formats(shapes)))
    plain = models.load_shapes(tmp_path)
    assert eqx.tree_equal(eqx.filter_eval_shape(nn.with_quantized_formats, plain, formats), shapes)
    assert nn.quantized_formats(plain) == {} and not eqx.tree_equal(plain, shapes)
    with pytest.raises(ValueError, match=r"formats\): stacks\[0\].nothing is no plain linear map of the model"):
        nn.with_quantized_formats(plain, {"stacks[0].nothing": {}})
    name, entry = next(iter(formats.items()))
    with pytest.raises(ValueError, match="an entry is not as quantized_formats wrote it: KeyError"):
        eqx.filter_eval_shape(nn.with_quantized_formats, plain, {name: {"form": entry["form"]}})


@pytest.mark.grid
def test_a_plan_counts_the_bytes_of_codes(tmp_path):
    """As two devices hold them; the control is the model in bfloat16."""
    write(tmp_path, "fp8 one scale")
    plan = Plan(abstract_mesh({"tensor": 2}))
    weight_bytes, parameters = {}, set()
    for weights in ("quantized", "decoded"):
        shapes = models.load_shapes(tmp_path, dtype="bfloat16", weights=weights)
        forecast = decode_forecast(plan, shapes, topology("h100:2"), rows=2, capacity=32)
        weight_bytes[weights], parameters = forecast.held["weights"], parameters | {forecast.parameters}
        placed = models.load(
            tmp_path, plan=Plan(make_mesh(tensor=2, devices=jax.devices()[:2])), dtype="bfloat16", weights=weights
        )
        device_bytes = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(eqx.filter(placed, eqx.is_array))]
        assert weight_bytes[weights] == sum(device_bytes)
    assert weight_bytes["quantized"] < 0.8 * weight_bytes["decoded"] and len(parameters) == 1


def test_exponents_are_those_of_the_decoded_weights_up_to_the_least_and_the_largest(tmp_path):
    """With every code; but for what float32 holds as a subnormal number, which CPUs take for 0 wherever it is used."""
    stored, _ = write(tmp_path, "mxfp4")
    name, pairs = EXPERTS + "down_proj", np.arange(0, 256, 16, dtype=np.uint8) | np.arange(16, dtype=np.uint8)
    exponents = np.resize(np.array([0, 1, 254], np.uint8), stored[name + "_scales"].shape)
    change(tmp_path, stored | {name + "_scales": exponents, name + "_blocks": np.tile(pairs, (*exponents.shape, 1))})
    quantized, decoded = (
        models.load(tmp_path, dtype="float32", weights="quantized"),
        models.load(tmp_path, dtype="float32"),
    )
    below, above = 0, 0
    for dequantized, want in zip(
        *(jax.tree.leaves(model) for model in (jax.jit(nn.dequantize)(quantized), decoded)), strict=True
    ):
        want = np.asarray(want)
        tiny = (np.abs(want) < 2.0**-126) & (want != 0)
        assert np.array_equal(dequantized, np.where(tiny, 0, want))
        below, above = below + np.count_nonzero(tiny), above + np.count_nonzero(np.isinf(want))
    # Of 128 blocks a third has each exponent. Either sign of 0.5, 1 and 1.5, twice in a block, or of 0.5; of 2 to 6.
    assert (below, above) == (43 * 12 + 43 * 4, 42 * 16)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*IN_ORDER, *EXPERT_CASES])
def test_logits_are_those_of_the_decoded_model(name, dtype, tmp_path):
    """And it is saved as that is, once decoded."""
    write(tmp_path, name)
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    ids = jnp.arange(12)[None] % 24
    want, quantized = (
        run(models.load(tmp_path, dtype=dtype), ids),
        models.load(tmp_path, dtype=dtype, weights="quantized"),
    )
    assert np.array_equal(run(quantized, ids), want)
    assert not np.array_equal(run(spoiled(quantized), ids), want)
    models.save(nn.cast(nn.dequantize(quantized), dtype), tmp_path / "plain", like=tmp_path)
    assert same(models.load(tmp_path / "plain"), models.load(tmp_path, dtype=dtype))


def test_folders_that_cannot_stay_quantized_are_refused_by_name(tmp_path):
    stored, _ = write(tmp_path / "order", "gptq in another order")
    fix = r"load with weights='decoded'"
    with pytest.raises(ValueError, match=rf"proj.qweight: the inputs of a group are not neighbors .*g_idx .*; {fix}"):
        models.load(tmp_path / "order", weights="quantized")
    stored, decoded = write(tmp_path / "some", "fp8 blocks")
    stored = {key: array for key, array in stored.items() if key != f"{GATE}.weight_scale_inv"}
    change(tmp_path / "some", stored | {f"{GATE}.weight": decoded[f"{GATE}.weight"]})
    with pytest.raises(
        ValueError, match=rf"quantized': .*layers.1.mlp.gate_proj.weight is .* {GATE}.weight is not.*{fix}"
    ):
        models.load(tmp_path / "some", weights="quantized")
    for name, words in {
        "gemma": r"blk.0.attn_q.weight and blk.1.attn_q.weight are stored in two formats",
        "gemma3": r"blk.0.attn_q.weight is stored in fewer bits and .*layers.3.self_attn.q_proj.weight is not",
        "llama": r"blk.0.attn_k.weight is stored in a block format that no linear map supports",
    }.items():
        with pytest.raises(ValueError, match=rf"quantized': {words}.*; {fix}"):
            models.load(FIXTURES / f"{name}.gguf", weights="quantized")
    with pytest.raises(ValueError, match=rf"blk.0.ssm_out.weight: its columns are stored in another order.*; {fix}"):
        models.load(FIXTURES / "qwen35.gguf", weights="quantized")
    plan = Plan(make_mesh(tensor=2, replica=4))
    write(tmp_path / "groups", "int4")  # three in 48 inputs
    with pytest.raises(ValueError, match=r"splits dim 'mlp' over axis 'tensor', but .* size 3 in .*down.scales"):
        models.load(tmp_path / "groups", plan=plan, weights="quantized")
    with pytest.raises(ValueError, match=r"weights='codes': weights must be 'decoded' or 'quantized'"):
        models.load(tmp_path / "some", weights="codes")
    models.save(models.load(tmp_path / "order"), tmp_path / "plain", like=tmp_path / "order")
    with pytest.raises(
        ValueError, match=r"weights='quantized': none of its linear maps is stored in fewer bits; .* nn.quantize"
    ):
        models.load(tmp_path / "plain", weights="quantized")


@pytest.mark.by_default("fp8 blocks")
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_saved_as_they_came(name, tmp_path):
    """Shapes, dtypes and bits, with another table; a model of other codes is not, and by itself none is."""
    write(tmp_path / "folder", name)
    quantized = models.load(tmp_path / "folder", weights="quantized")
    with_other_table = eqx.tree_at(lambda m: m.embedding.weight, quantized, quantized.embedding.weight + 1)
    models.save(with_other_table, tmp_path / "again", like=tmp_path / "folder", whole=True)
    want, back = as_stored(tmp_path / "folder"), as_stored(tmp_path / "again")
    assert back.keys() == want.keys()
    assert [key for key in want if back[key] != want[key]] == ["model.embed_tokens.weight"]
    assert same(models.load(tmp_path / "again", weights="quantized"), with_other_table)
    with pytest.raises(ValueError, match=r"the model's codes and scales differ from model\..*nn.dequantize"):
        models.save(spoiled(quantized), tmp_path / "other", like=tmp_path / "folder", whole=True)
    with pytest.raises(ValueError, match=r"the model holds codes of 8 or 4 bits \(stacks.*nn.dequantize it or, if"):
        models.save(quantized, tmp_path / "other", like=tmp_path / "folder")


def test_factors_beside_codes_are_written_and_read_like_any(tmp_path):
    write(tmp_path / "folder", "int4")
    quantized, decoded = models.load(tmp_path / "folder", weights="quantized"), models.load(tmp_path / "folder")
    add = lambda model: nn.with_lora(model, ["query", "gate", "up"], rank=2, alpha=1.0, key=jax.random.key(0))
    for name, model in (("quantized", quantized), ("decoded", decoded)):
        models.save_adapter(add(model), tmp_path / name, like=tmp_path / "folder", base="base")
    of = lambda name: load_file(tmp_path / name / "adapter_model.safetensors")
    assert of("quantized").keys() == of("decoded").keys() and all(
        same_bits(array, of("quantized")[n]) for n, array in of("decoded").items()
    )
    back = models.load_adapter(quantized, tmp_path / "decoded", like=tmp_path / "folder")
    assert same(back, add(quantized)) and jax.tree.structure(back) == jax.tree.structure(add(quantized))


# How names of maps end: in T5, ModernBERT and GPT-NeoX otherwise than in all others.
_NAMES = ("q", "k", "v", "o", "wi", "wo", "Wqkv", "Wi", "Wo", "dense", "q_lin", "k_lin", "v_lin", "out_lin")
MAPS = ("proj.weight", *(f".{name}.weight" for name in _NAMES))
FIRST = {family.name: next(iter(family.presets)) for family in models.FAMILIES.values() if family.model_type}


@pytest.mark.grid
@pytest.mark.parametrize("family", FIRST)
def test_every_family_runs_with_codes(family):
    """Without and with a cache: nothing asks for a map's weight. Shapes alone."""
    config = models.preset(FIRST[family])

    def run() -> Any:
        model = nn.quantize(models.build(config, key=jax.random.key(0)), "int4")
        ids = jnp.zeros((1, 4), jnp.int32)
        cache = None if family in ENCODERS else model.init_cache(1, 8)  # which sees whole rows
        tokens = nn.positions_like((1, 4))
        tokens = tokens if model.encoder is None else nn.with_source(tokens, nn.Source(ids, tokens))
        return model(ids, tokens)[0], model(ids, tokens, cache)[0]

    for logits in eqx.filter_eval_shape(run):
        assert logits.shape == (1, 4, config.vocab)


@pytest.mark.grid
@pytest.mark.parametrize("family", FIRST)
def test_every_family_stays_quantized(family, tmp_path):
    """However its table joins, splits and turns arrays: of its maps in FP8, as many as hold matrices of their own."""
    config, rng = models.preset(FIRST[family]), np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(lambda: models.build(config, key=jax.random.key(0)))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, shapes)
    models.save(zeros, tmp_path / "plain", config=config)
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    for name, array in [*stored.items()]:
        if array.ndim != 2 or not name.endswith(MAPS):
            continue
        codes = rng.integers(0, 120, array.shape).astype(np.uint8).view(F8)
        scales = rng.random([-(-size // 16) for size in array.shape], np.float32)
        stored |= {name: codes, f"{name}_scale_inv": scales}
    config_json = json.loads((tmp_path / "plain" / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "fp8").mkdir()
    store(tmp_path / "fp8", stored, config_json | {"quantization_config": fp8})
    quantized = models.load(tmp_path / "fp8", dtype="float32", weights="quantized")
    assert any(isinstance(linear, nn.QuantizedLinear) for linear in nn.linear_maps(quantized))
    assert same(eqx.filter_jit(nn.dequantize)(quantized), models.load(tmp_path / "fp8", dtype="float32"))
