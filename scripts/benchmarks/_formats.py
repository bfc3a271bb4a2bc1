"""Folders in fewer bits: how fast their files are decoded, or kept, while they are loaded."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import models, read_json


Stored = dict[str, np.ndarray]
_GROUP, _BLOCK = 32, 128
_GROUPS: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": _GROUP}
_INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": {"weights": _GROUPS}}}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _BLOCK}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": _BLOCK, "version": "gemm", "zero_point": True}
DENSE = models.LlamaConfig(vocab=1024, embed=2048, layers=4, heads=16, kv_heads=4, mlp=5632)
MIXED = models.GPTOSSConfig(1024, 2048, 2, 16, 4, 2048, window_layers=(0,), experts=8, top_k=2, head_dim=128)


def formats(folder: Path, rounds: int) -> Iterator[Row]:
    """Megabytes of file a second, decoded to bfloat16 and kept, beside reading the file's bytes into memory."""
    for name in FORMATS:
        size = write(folder / name, name) / 1e6
        contenders: dict[str, Callable[[], Any]] = {
            "kept": lambda name=name: load(folder / name, "quantized"),
            "decoded": lambda name=name: load(folder / name, "decoded"),
            "the file's bytes, read into memory": lambda name=name: (folder / name / _FILE).read_bytes(),
        }
        yield from rate_rows(f"load {name}, {size:.0f} MB", "MB/s", size, seconds_in_turn(contenders, rounds))


def load(folder: Path, weights: str) -> None:
    """A folder, to the end."""
    jax.block_until_ready(eqx.filter(models.load(folder, weights=weights), eqx.is_array))


def write(folder: Path, name: str) -> int:
    """A folder of random codes and scales in a format, and its file's bytes."""
    said, coded = FORMATS[name]
    config, rng = MIXED if name == "MXFP4" else DENSE, np.random.default_rng(0)
    shapes = models.shapes(config)
    zeros = lambda leaf: np.zeros(leaf.shape, ml_dtypes.bfloat16) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    models.save(jax.tree.map(zeros, shapes), folder, config=config)
    stored: Stored = {}
    for key, array in load_file(folder / _FILE).items():
        is_map = array.ndim == 3 if name == "MXFP4" else "_proj" in key
        drawn = rng.standard_normal(array.shape, np.float32).astype(array.dtype)
        stored |= coded(rng, key.removesuffix(".weight"), *array.shape) if is_map else {key: drawn}
    save_file(stored, folder / _FILE, metadata={"format": "pt"})
    its = read_json(folder / "config.json")
    its |= {"quantization_config": said, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(its), encoding="utf-8")
    return (folder / _FILE).stat().st_size


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.random(shape, np.float32) / 100).astype(ml_dtypes.bfloat16)


def _octets(rng: np.random.Generator, *shape: int, least: int = 0) -> np.ndarray:
    return rng.integers(least, 120, shape, np.uint8)


def _mxfp4(rng: np.random.Generator, name: str, experts: int, inputs: int, outputs: int) -> Stored:
    blocks = experts, outputs, inputs // _GROUP
    return {f"{name}_blocks": _octets(rng, *blocks, _GROUP // 2), f"{name}_scales": _octets(rng, *blocks, least=112)}


def _fp8(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Stored:
    codes, scales = _octets(rng, outputs, inputs), _scales(rng, outputs // _BLOCK, inputs // _BLOCK)
    return {f"{name}.weight": codes.view(ml_dtypes.float8_e4m3fn), f"{name}.weight_scale_inv": scales}


def _int4(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Stored:
    codes, scales = _octets(rng, outputs, inputs // 2), _scales(rng, outputs, inputs // _GROUP)
    shape = np.array([outputs, inputs])
    return {
        f"{name}.weight_packed": codes.view(np.int32),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": shape,
    }


def _gptq(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Stored:
    codes, zeros = _octets(rng, inputs // 8, outputs * 4), _octets(rng, inputs // _BLOCK, outputs // 2)
    scales, words = _scales(rng, inputs // _BLOCK, outputs), {"qweight": codes, "qzeros": zeros}
    return {f"{name}.scales": scales} | {f"{name}.{end}": its.view(np.int32) for end, its in words.items()}


def _awq(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Stored:
    codes, zeros = _octets(rng, inputs, outputs // 2), _octets(rng, inputs // _BLOCK, outputs // 2)
    scales, words = _scales(rng, inputs // _BLOCK, outputs), {"qweight": codes, "qzeros": zeros}
    return {f"{name}.scales": scales} | {f"{name}.{end}": its.view(np.int32) for end, its in words.items()}


_FILE = "model.safetensors"
# By a format's name its `quantization_config`, and the arrays of one map.
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Stored]]] = {
    "MXFP4": ({"quant_method": "mxfp4"}, _mxfp4),
    "INT4": (_INT4, _int4),
    "GPTQ": (_GPTQ, _gptq),
    "AWQ": (_AWQ, _awq),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}, _fp8),
}
