"""Rows about a recurrence in the place of attention: one layer, forward and backward, against other programs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import gradient_rows, Gradients, Row, seconds_in_turn
from eqformer import kernels, nn


EMBED, HEADS, HEAD_DIM, STATE, ROWS = 256, 8, 64, 128, 2
LARGE = 4096, "channel delta net"  # in PyTorch: an array of 1 GB, of which a gradient keeps several, so of one row
PEERS: dict[str, Callable[[np.ndarray], Callable[[], None]]] = {
    "gated delta net": lambda x: _peers.delta_net(x, heads=HEADS, kv_heads=HEADS // 2, head_dim=HEAD_DIM),
    "channel delta net": lambda x: _peers.channel_delta_net(x, heads=HEADS, head_dim=HEAD_DIM),
    "mamba2": lambda x: _peers.mamba2(x, heads=HEADS, state=STATE, head_dim=HEAD_DIM),
    "short convolution": _peers.short_conv,
}


def mixers(rounds: int) -> Iterator[Row]:
    """Tokens a second of recurrences, forward and backward, beside causal attention and transformers' layers."""
    sizes: dict[str, Any] = {"embed": EMBED, "heads": HEADS}
    key = jax.random.key(0)
    attention = nn.Attention(
        **sizes, kv_heads=HEADS // 2, head_dim=HEAD_DIM, core=kernels.BlockwiseAttention(), key=key
    )
    layers: dict[str, nn.Mixer] = {
        "gated delta net": nn.GatedDeltaNet(**sizes, kv_heads=HEADS // 2, head_dim=HEAD_DIM, v_dim=HEAD_DIM, key=key),
        "channel delta net": nn.ChannelDeltaNet(**sizes, head_dim=HEAD_DIM, key=key),
        "mamba2": nn.Mamba2Mixer(**sizes, kv_heads=1, head_dim=STATE, v_dim=HEAD_DIM, key=key),
        "short convolution": nn.GatedShortConv(embed=EMBED, key=key),
    }
    for seq in (512, 4096):
        x = jax.random.normal(jax.random.key(1), (ROWS, seq, EMBED))
        ours = {name: Gradients(layer, x) for name, layer in {**layers, "attention": attention}.items()}
        compared = [name for name in PEERS if _peers.are_installed() and (seq, name) != LARGE]
        theirs = {name: PEERS[name](np.asarray(x)) for name in compared}
        of = "{} of transformers".format
        contenders: dict[str, Callable[[], Any]] = {**ours, **{of(name): peer for name, peer in theirs.items()}}
        times = seconds_in_turn(contenders, rounds)
        for name in layers:  # one turn of all, and beside each mixer those that it is compared with
            beside = [one for one in (name, "attention", of(name)) if one in times]
            group = f"{name}, {seq} tokens"
            yield from gradient_rows(group, ROWS * seq, contenders, {one: times[one] for one in beside})
            if _peers.are_installed() and (seq, name) == LARGE:
                alone = {name: Gradients(layers[name], x[:1]), of(name): PEERS[name](np.asarray(x[:1]))}
                yield from gradient_rows(f"{group}, one row", seq, alone, seconds_in_turn(alone, rounds))
