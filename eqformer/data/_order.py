"""A random order that is computed, not stored: which row is the n-th of a run."""

import hashlib
from math import isqrt

import numpy as np
from jaxtyping import Int, UInt


_ROUNDS = 8


def shuffled(places: Int[np.ndarray, "batch"], *, rows: int, seed: int) -> Int[np.ndarray, "batch"]:
    """The row number at each place of an endless shuffled sequence over `rows` rows.

    Places 0 to `rows - 1` are the first epoch, a permutation of all rows; the next `rows` places are the second epoch,
    in another order; and so on. Each row number depends on its place and the seed alone. The permutation is a Feistel
    network over pairs (row // b, row % b) with cycle walking: it is applied again until the result is below `rows`
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). So it takes no memory, and any place is as cheap
    as the first.
    """
    if rows < 1 or np.any(places < 0):
        raise ValueError(
            f"shuffled(places, rows={rows}, seed={seed}): places count from 0 and rows from 1, but the smallest place "
            f"is {places.min(initial=0)}; pass a step that is not negative and data that is not empty."
        )
    epochs, values = np.divmod(places.astype(np.uint64), np.uint64(rows))
    start = np.frombuffer(hashlib.blake2b(str(int(seed)).encode(), digest_size=8).digest(), np.uint64)
    keys = _mix(_mix(start ^ epochs) + np.arange(_ROUNDS, dtype=np.uint64)[:, None])
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], keys[:, walking], rows)
        walking = walking[values[walking] >= rows]
    return values.astype(np.int64)


def _feistel(
    values: UInt[np.ndarray, "batch"], keys: UInt[np.ndarray, "_ batch"], rows: int
) -> UInt[np.ndarray, "batch"]:
    """A permutation of 0 to a * b - 1, where a and b are about the square root of `rows` and a * b is at least it."""
    a = isqrt(rows - 1) + 1
    a, b = np.uint64(a), np.uint64(-(-rows // a))
    left, right = np.divmod(values, b)
    for even, odd in zip(keys[::2], keys[1::2]):
        left = (left + _mix(right ^ even) % a) % a
        right = (right + _mix(left ^ odd) % b) % b
    return left * b + right


def _mix(values: UInt[np.ndarray, "*shape"]) -> UInt[np.ndarray, "*shape"]:
    """The finaliser of SplitMix64, a hash in which every bit of the result depends on every bit of the value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
