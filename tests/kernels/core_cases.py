"""Inputs and masks with which the tests call attention cores."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from eqformer.nn import block_causal, causal, chunked, full, mark_whole_rows, Mask, sliding_window, Tokens


class Case(NamedTuple):
    mask: Mask
    heads: int = 4
    kv_heads: int = 2
    seq: int = 9
    v_dim: int = 4
    batch: tuple[int, ...] = (2,)
    softcap: float | None = None
    sinks: bool = False
    segments: bool = False
    padding: int = 0  # number of padding tokens at the end of the last row
    kv_seq: int | None = None  # number of keys if they are a cache's slots, in no order and two of them empty
    blind: bool = False  # whether all keys of the last row are padding
    head_dim: int = 4
    is_noisy: bool = False  # whether noisy copies of the tokens stand in front of them, under a mask of blocks
    is_known: bool = True  # whether rows that are whole are marked so while tracing


CASES = {
    "causal": Case(causal()),
    "one head, one token": Case(causal(), heads=1, kv_heads=1, seq=1),
    "multi-query, narrow values, two batch dims": Case(causal(), kv_heads=1, v_dim=3, batch=(2, 1)),
    "multi-head, wide values, no batch dim": Case(causal(), kv_heads=4, v_dim=6, batch=()),
    "full with padding": Case(full(), padding=3),
    "window, packed": Case(sliding_window(3), segments=True, padding=2, seq=12),
    "window, one document": Case(sliding_window(3), seq=12),
    "window both ways": Case(Mask(is_causal=False, window=2), kv_heads=4),
    "chunk, packed": Case(chunked(3), segments=True, seq=12),
    "blocks": Case(block_causal(4), seq=11),
    "blocks, packed, with noisy copies": Case(block_causal(3), segments=True, is_noisy=True, padding=2, seq=18),
    "softcap": Case(causal(), softcap=0.7),
    "sinks": Case(causal(), sinks=True, padding=2),
    "everything": Case(sliding_window(4), softcap=0.7, sinks=True, segments=True, seq=11, heads=6, v_dim=3),
    "cache": Case(causal(), seq=3, kv_seq=10),
    "cache, window, sinks, a row of nothing": Case(sliding_window(3), seq=2, kv_seq=10, sinks=True, blind=True),
    "cross, a row of nothing": Case(full(), seq=3, kv_seq=10, blind=True),
}


def arrays_of(case: Case, dtype: str = "float32") -> tuple[dict, Tokens, Tokens | None]:
    """Return a case's arrays by name (inputs, and the output's cotangent as `direction`), the queries' tokens, and the
    keys' tokens if the keys are a cache's slots."""
    rng = np.random.default_rng(0)
    kv_seq = case.seq if case.kv_seq is None else case.kv_seq
    shapes = {
        "query": (*case.batch, case.seq, case.heads, case.head_dim),
        "key": (*case.batch, kv_seq, case.kv_heads, case.head_dim),
        "value": (*case.batch, kv_seq, case.kv_heads, case.v_dim),
        "direction": (*case.batch, case.seq, case.heads, case.v_dim),
    }
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    if case.sinks:
        arrays["sinks"] = rng.normal(size=case.heads).astype(dtype)
    rows = int(np.prod(case.batch))
    positions = np.tile(np.arange(case.seq), (rows, 1))
    segments = np.zeros((rows, case.seq), int)
    if case.segments:  # a second document begins at another place in each row
        for row in range(rows):
            segments[row, 4 + row :] += 1
            positions[row, 4 + row :] -= 4 + row
    if case.is_noisy:
        half = case.seq // 2
        positions, segments = np.tile(positions[:, :half], 2), np.hstack([~segments[:, :half], segments[:, :half]])
    if case.padding:
        positions[-1, -case.padding :] = -1
    kv_tokens = None
    if case.kv_seq is not None:
        slots = np.stack([rng.permutation(np.r_[np.arange(case.kv_seq - 2), -1, -1]) for _ in range(rows)])
        positions += np.arange(rows)[:, None] + case.kv_seq - 2 - case.seq - rows  # rows of unequal length
        if case.blind:
            slots[-1] = -1
        kv_tokens = Tokens(jnp.asarray(slots.reshape(*case.batch, -1), jnp.int32))
    shaped = lambda x: jnp.asarray(x.reshape(*case.batch, case.seq), jnp.int32)
    is_whole = not case.segments and case.kv_seq is None
    whole_rows = case.seq if is_whole and case.is_known else None
    tokens = mark_whole_rows(Tokens(shaped(positions), shaped(segments) if case.segments else None), whole_rows)
    return arrays, tokens, kv_tokens
