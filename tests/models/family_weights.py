"""Weights that are functions of their names: made alike wherever they are asked for, they need not be kept."""

import zlib
from collections.abc import Sequence

import numpy as np


LENGTH = 24


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """Numbers of deviation 0.2, those of a norm's scale around one; whole numbers for a table of experts."""
    if name.endswith("tid2eid"):  # the experts of each id, of eight
        order = np.argsort(np.random.default_rng(zlib.crc32(name.encode())).random((shape[0], 8)))
        return np.ascontiguousarray(order[:, : shape[1]])  # safetensors writes the memory of a view as it lies
    drawn = 0.2 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    is_scale = name.endswith("weight") and ("norm" in name.lower() or "_ln." in name)
    return np.asarray(drawn + is_scale, np.float32)


def ids_of(vocab: int) -> np.ndarray:
    """Two rows of tokens, longer than the cases' windows and original lengths."""
    return np.random.default_rng(0).integers(1, vocab, (2, LENGTH))


def source_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What an encoder reads for rows of tokens, and which of it is no padding: the same backwards, the second cut."""
    return ids[:, ::-1].copy(), (np.arange(ids.shape[1]) < [[LENGTH], [LENGTH - 7]]).astype(np.int64)


def sketch(name: str, array: np.ndarray) -> np.ndarray:
    """An array's norm, and eight sums of its numbers times others drawn from its name, which see where each stands."""
    wide = np.asarray(array, np.float64).ravel()
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((8, wide.size))
    return np.array([np.linalg.norm(wide), *(drawn @ wide)])
