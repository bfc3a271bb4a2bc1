"""Rows about a recurrence in the place of attention: one layer, forward and backward, against other programs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import gradient_rows, Gradients, Row
from eqformer import nn


EMBED, HEADS, HEAD_DIM, STATE, ROWS = 256, 8, 64, 128, 2


def mixers(rounds: int) -> Iterator[Row]:
    """Tokens a second of recurrences and of causal attention with as many heads, forward and backward."""
    delta = nn.GatedDeltaNet(
        embed=EMBED, heads=HEADS, kv_heads=HEADS // 2, head_dim=HEAD_DIM, v_dim=HEAD_DIM, key=jax.random.key(0)
    )
    attention = nn.Attention(
        embed=EMBED, heads=HEADS, kv_heads=HEADS // 2, head_dim=HEAD_DIM, core=nn.BlockwiseCore(), key=jax.random.key(0)
    )
    mamba = nn.Mamba2Mixer(embed=EMBED, heads=HEADS, kv_heads=1, head_dim=STATE, v_dim=HEAD_DIM, key=jax.random.key(0))
    for seq in (512, 4096):
        x = jax.random.normal(jax.random.key(1), (ROWS, seq, EMBED))
        contenders: dict[str, Callable[[], Any]] = {
            "gated delta net": Gradients(delta, x),
            "mamba2": Gradients(mamba, x),
            "attention": Gradients(attention, x),
        }
        if _peers.are_installed():
            sizes = {"heads": HEADS, "kv_heads": HEADS // 2, "head_dim": HEAD_DIM}
            contenders["gated delta net of transformers"] = _peers.delta_net(np.asarray(x), **sizes)
            sizes = {"heads": HEADS, "state": STATE, "head_dim": HEAD_DIM}
            contenders["mamba2 of transformers"] = _peers.mamba2(np.asarray(x), **sizes)
        yield from gradient_rows(f"mixer, {seq} tokens", ROWS * seq, contenders, rounds)
