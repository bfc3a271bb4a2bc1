"""Small published folders whose linear maps are stored in each quantized format."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from format_cases import ALL_CASES, BF16, EXPERT_CASES
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from eqformer import models


SINGLE = "model.safetensors"
GATE = "model.layers.0.mlp.gate_proj"
EXPERTS = "model.layers.1.mlp.experts."
LLAMA = models.LlamaConfig(vocab=24, embed=32, layers=2, heads=2, kv_heads=1, mlp=48, head_dim=16)
OSS = models.GPTOSSConfig(24, 32, 2, 2, 1, 32, window_layers=(0,), experts=4, top_k=2, head_dim=16, scaling=None)


@functools.cache
def plain(config: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a model's published configuration, and random bfloat16 arrays under their published names.

    Nothing is compiled.
    """
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
    """Write a folder whose linear maps are all in the named format; return its arrays as stored, and decoded."""
    folder.mkdir(exist_ok=True)
    case, rng = ALL_CASES[name], np.random.default_rng(1)
    said, arrays = plain(OSS if name in EXPERT_CASES else LLAMA)
    stored: dict[str, np.ndarray] = {}
    decoded: dict[str, np.ndarray] = {}
    for key, array in arrays.items():
        parts: dict[str, np.ndarray] = {"": array}
        decoded[key], stem = array, key
        if is_map(key) and (array.ndim == 3 or name not in EXPERT_CASES):
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
    """Replace the arrays of a folder, and attributes of its `quantization_config`."""
    said = json.loads((folder / "config.json").read_text())
    store(folder, stored, said | {"quantization_config": said["quantization_config"] | attributes})


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def as_stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each array of a folder, as its files hold them."""
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, its in deserialize(file.read_bytes()):
            found[name] = its["dtype"], tuple(its["shape"]), bytes(its["data"])
    return found
