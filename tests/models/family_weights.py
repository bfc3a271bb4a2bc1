"""Random weights that depend only on their names, so that fixtures need not store weights."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np


LENGTH = 24
HASH_NUMBERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
HASHES = Path(__file__).parents[1] / "fixtures" / "ngram_hashes.json"  # by an array's name and length


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return normal numbers of mean 0 (of mean 1 for a norm's scale) and standard deviation 0.2.

    For a table from token ids to experts, return numbers of experts. For the numbers of a hash, return transformers'.
    """
    if name.endswith(HASH_NUMBERS):
        return np.array(json.loads(HASHES.read_text())[f"{name.removeprefix('fresh ')} {shape[0]}"], np.int64)
    if name.endswith("tid2eid"):  # `shape[1]` of eight experts for each token id
        order = np.argsort(np.random.default_rng(zlib.crc32(name.encode())).random((shape[0], 8)))
        return np.ascontiguousarray(order[:, : shape[1]])  # safetensors ignores a view's strides
    drawn = 0.2 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    is_scale = name.endswith("weight") and ("norm" in name.lower() or "_ln." in name)
    return np.asarray(drawn + is_scale, np.float32)


def ids_of(vocab: int) -> np.ndarray:
    """Return two rows of token ids, longer than the cases' windows and original lengths."""
    return np.random.default_rng(0).integers(1, vocab, (2, LENGTH))


def source_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an encoder's ids, the given rows backwards, and their mask: 0 for padding, the second row's last seven."""
    return ids[:, ::-1].copy(), (np.arange(ids.shape[1]) < [[LENGTH], [LENGTH - 7]]).astype(np.int64)


def sketch(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array's norm, and its products with eight random vectors, which change if two numbers change places."""
    wide = np.asarray(array, np.float64).ravel()
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((8, wide.size))
    return np.array([np.linalg.norm(wide), *(drawn @ wide)])
