"""Rows about published folders: how fast (quantized) weights are read, and how fast families run."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import generation, models, nn, read_json


FILE = "model.safetensors"
LARGE = models.LlamaConfig(vocab=32_000, embed=1024, layers=18, heads=16, kv_heads=8, mlp=2816, tied=True)
SHAPE: dict[str, Any] = {"vocab": 8192, "embed": 512, "layers": 6, "heads": 8, "kv_heads": 4}
FAMILIES: dict[str, models.ModelConfig] = {
    "Llama": models.LlamaConfig(**SHAPE, mlp=1536),
    "Qwen3": models.Qwen3Config(**SHAPE, mlp=1536, head_dim=64),
    "Gemma 2": models.Gemma2Config(
        **SHAPE, mlp=1536, head_dim=64, query_scalar=64, window_layers=(0, 2, 4), window=128
    ),
    "Mixtral": models.MixtralConfig(**SHAPE, mlp=768, experts=8, top_k=2),
}
ROWS, SEQ = 4, 256
Arrays = dict[str, np.ndarray]
_GROUP, _BLOCK = 32, 128
_GROUPS: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": _GROUP}
_INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": {"weights": _GROUPS}}}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _BLOCK}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": _BLOCK, "version": "gemm", "zero_point": True}
DENSE = models.LlamaConfig(vocab=1024, embed=2048, layers=4, heads=16, kv_heads=4, mlp=5632)
MIXED = models.GPTOSSConfig(1024, 2048, 2, 16, 4, 2048, window_layers=(0,), experts=8, top_k=2, head_dim=128)


def zoo(rounds: int) -> Iterator[Row]:
    """Megabytes of safetensors read a second (also quantized), tokens of forward passes a second, first tokens."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _load_rows(Path(folder), rounds)
        yield from _format_rows(Path(folder), rounds)
        for name, config in FAMILIES.items():
            yield from _family_rows(Path(folder) / name, name, config, rounds)


def _load_rows(folder: Path, rounds: int) -> Iterator[Row]:
    models.save(models.build(LARGE, key=jax.random.key(0)), folder / "large", config=LARGE)
    (file,) = (folder / "large").glob("*.safetensors")
    size = file.stat().st_size

    def read_bytes() -> None:
        with open(file, "rb", buffering=0) as opened:
            opened.readinto(np.empty(size, np.uint8).data)

    contenders: dict[str, Callable[[], Any]] = {
        "eqformer": lambda: jax.block_until_ready(eqx.filter(models.load(folder / "large"), eqx.is_array)),
        "the file's bytes, read into memory": read_bytes,
    }
    if _peers.are_installed():
        contenders["transformers, from_pretrained"] = lambda: _peers.read(folder / "large")
    yield from rate_rows(f"load {size / 1e9:.2f} GB", "MB/s", size / 1e6, seconds_in_turn(contenders, rounds))
    file.unlink()


def _family_rows(folder: Path, name: str, config: models.ModelConfig, rounds: int) -> Iterator[Row]:
    models.save(models.build(config, key=jax.random.key(0)), folder, config=config)
    model = models.load(folder)
    ids = np.random.default_rng(0).integers(1, SHAPE["vocab"], (ROWS, SEQ), dtype=np.int32)
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    unstacked = generation.unstack_layers(model)
    forward: dict[str, Callable[[], Any]] = {
        "eqformer": lambda: run(model, jnp.asarray(ids)).block_until_ready(),
        "eqformer, layers apart": lambda: run(unstacked, jnp.asarray(ids)).block_until_ready(),
    }
    latency: dict[str, Callable[[], Any]] = {
        "eqformer": _first_token(model, ids),
        "eqformer, layers apart": _first_token(unstacked, ids),
    }
    if _peers.are_installed():
        theirs, their_first = _peers.forward(_peers.read(folder), ids)
        forward["transformers"], latency["transformers"] = theirs, their_first
        distance = np.max(np.abs(np.asarray(run(model, jnp.asarray(ids))) - theirs()))
        assert distance < 1e-3, f"{name}: logits differ by {distance}"
    yield from rate_rows(f"forward, {name}", "tokens/s", ROWS * SEQ, seconds_in_turn(forward, rounds))
    yield from rate_rows(f"first token, {name}", "a second", 1, seconds_in_turn(latency, rounds))


def _first_token(model: nn.LanguageModel, ids: np.ndarray) -> Callable[[], int]:
    greedy = generation.sampling(temperature=0)
    return lambda: next(
        generation.stream(model, ids[0], max_new_tokens=8, stride=1, transforms=greedy, key=jax.random.key(0))
    )


def _format_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield megabytes a second of loading quantized files, decoded to bfloat16 or kept, and of reading their bytes."""
    for name in FORMATS:
        size = write_quantized_folder(folder / name, name) / 1e6
        contenders: dict[str, Callable[[], Any]] = {
            "kept": lambda name=name: _load(folder / name, "quantized"),
            "decoded": lambda name=name: _load(folder / name, "decoded"),
            "the file's bytes, read into memory": lambda name=name: (folder / name / FILE).read_bytes(),
        }
        yield from rate_rows(f"load {name}, {size:.0f} MB", "MB/s", size, seconds_in_turn(contenders, rounds))


def _load(folder: Path, weights: str) -> None:
    """Load a folder, and wait until all arrays are loaded."""
    jax.block_until_ready(eqx.filter(models.load(folder, weights=weights), eqx.is_array))


def write_quantized_folder(folder: Path, name: str) -> int:
    """Write a folder with random codes and scales in a format, and return the size of its file in bytes."""
    quantization, make_arrays = FORMATS[name]
    config, rng = MIXED if name == "MXFP4" else DENSE, np.random.default_rng(0)
    shapes = models.shapes(config)
    zeros = lambda leaf: np.zeros(leaf.shape, ml_dtypes.bfloat16) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    models.save(jax.tree.map(zeros, shapes), folder, config=config)
    arrays: Arrays = {}
    for key, array in load_file(folder / FILE).items():
        is_map = array.ndim == 3 if name == "MXFP4" else "_proj" in key
        numbers = rng.standard_normal(array.shape, np.float32).astype(array.dtype)
        arrays |= make_arrays(rng, key.removesuffix(".weight"), *array.shape) if is_map else {key: numbers}
    save_file(arrays, folder / FILE, metadata={"format": "pt"})
    attributes = read_json(folder / "config.json")
    attributes |= {"quantization_config": quantization, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(attributes), encoding="utf-8")
    return (folder / FILE).stat().st_size


def _random_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.random(shape, np.float32) / 100).astype(ml_dtypes.bfloat16)


def _random_bytes(rng: np.random.Generator, *shape: int, least: int = 0) -> np.ndarray:
    return rng.integers(least, 120, shape, np.uint8)


def _mxfp4(rng: np.random.Generator, name: str, experts: int, inputs: int, outputs: int) -> Arrays:
    blocks = experts, outputs, inputs // _GROUP
    return {
        f"{name}_blocks": _random_bytes(rng, *blocks, _GROUP // 2),
        f"{name}_scales": _random_bytes(rng, *blocks, least=112),
    }


def _fp8(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Arrays:
    codes, scales = _random_bytes(rng, outputs, inputs), _random_scales(rng, outputs // _BLOCK, inputs // _BLOCK)
    return {f"{name}.weight": codes.view(ml_dtypes.float8_e4m3fn), f"{name}.weight_scale_inv": scales}


def _int4(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Arrays:
    codes, scales = _random_bytes(rng, outputs, inputs // 2), _random_scales(rng, outputs, inputs // _GROUP)
    shape = np.array([outputs, inputs])
    return {
        f"{name}.weight_packed": codes.view(np.int32),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": shape,
    }


def _gptq(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Arrays:
    codes, zeros = _random_bytes(rng, inputs // 8, outputs * 4), _random_bytes(rng, inputs // _BLOCK, outputs // 2)
    scales, words = _random_scales(rng, inputs // _BLOCK, outputs), {"qweight": codes, "qzeros": zeros}
    return {f"{name}.scales": scales} | {f"{name}.{end}": array.view(np.int32) for end, array in words.items()}


def _awq(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Arrays:
    codes, zeros = _random_bytes(rng, inputs, outputs // 2), _random_bytes(rng, inputs // _BLOCK, outputs // 2)
    scales, words = _random_scales(rng, inputs // _BLOCK, outputs), {"qweight": codes, "qzeros": zeros}
    return {f"{name}.scales": scales} | {f"{name}.{end}": array.view(np.int32) for end, array in words.items()}


# Each format has a `quantization_config`, and a function that makes the arrays of one linear map.
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Arrays]]] = {
    "MXFP4": ({"quant_method": "mxfp4"}, _mxfp4),
    "INT4": (_INT4, _int4),
    "GPTQ": (_GPTQ, _gptq),
    "AWQ": (_AWQ, _awq),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}, _fp8),
}
