"""Blocks with recurrences and short convolutions, for the tests of plans."""

from typing import Any

import jax
from plan_parts import attention, EMBED, HEAD_DIM, HEADS, MLP, norm

from eqformer import nn


def recurrence(key: Any, kv_heads: int = 4) -> nn.SuperBlock:
    """Like Qwen3-Next: a gated delta net, then attention with gated heads; norms store their scales less one."""
    one, two = jax.random.split(key)
    sizes: dict[str, Any] = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "v_dim": 6}
    net = nn.GatedDeltaNet(embed=EMBED, **sizes, chunk=5, key=one)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    mixers = net, attention(two, kv_heads=kv_heads, gate=True)
    return nn.SuperBlock(
        tuple(
            nn.Block(
                nn.Residual(mixer, norm(1.0), dropout=nn.Dropout(0.1)),
                nn.Residual(mlp, norm(1.0), dropout=nn.Dropout(0.1)),
            )
            for mixer in mixers
        )
    )


def state_space(key: Any, kv_heads: int = 4) -> nn.SuperBlock:
    """Like Granite 4: a Mamba-2 layer, whose outputs are normalised by key head, then attention."""
    one, two = jax.random.split(key)
    net = nn.Mamba2Mixer(embed=EMBED, heads=HEADS, kv_heads=kv_heads, head_dim=5, v_dim=6, chunk=5, bias=True, key=one)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    return nn.SuperBlock(
        (nn.Block(nn.Residual(net, norm())), nn.Block(nn.Residual(attention(two), norm()), nn.Residual(mlp)))
    )


def mixers_side_by_side(key: Any) -> nn.Block:
    """Like Falcon-H1: attention and Mamba-2 with different head counts on one input, with multipliers and biases."""
    one, two, three = jax.random.split(key, 3)
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 5, "v_dim": 6}
    scales: dict[str, Any] = {"multipliers": (0.9, 0.8, 0.7, 0.6, 0.5), "gate_norm": nn.GateNorm(before_gate=True)}
    net = nn.Mamba2Mixer(embed=EMBED, **sizes, chunk=5, bias=True, **scales, key=two)
    mixers = (
        nn.Residual(attention(one, kv_heads=2, bias=True), scale=0.6, input_scale=0.7, dropout=nn.Dropout(0.1)),
        nn.Residual(net, scale=0.9, input_scale=1.3, dropout=nn.Dropout(0.1)),
    )
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, activation=nn.ScaledActivation(nn.silu, 0.8), key=three)
    return nn.Block(nn.ParallelResidual(mixers, norm()), nn.Residual(mlp, norm()))


def short_convolutions(key: Any) -> nn.SuperBlock:
    """Like LFM2: a gated short convolution with biases, then attention."""
    one, two = jax.random.split(key)
    mlp = nn.GatedMLP(embed=EMBED, mlp=MLP, key=two)
    mixers = nn.GatedShortConv(embed=EMBED, mlp=24, taps=4, bias=True, key=one), attention(two)
    return nn.SuperBlock(tuple(nn.Block(nn.Residual(mixer, norm()), nn.Residual(mlp, norm())) for mixer in mixers))


def channel_recurrence(key: Any) -> nn.Block:
    """Like Kimi Linear: a delta net whose channels each have their own decay."""
    one, two = jax.random.split(key)
    net = nn.ChannelDeltaNet(embed=EMBED, heads=HEADS, head_dim=HEAD_DIM, v_dim=6, rank=5, chunk=8, key=one)
    return nn.Block(nn.Residual(net, norm()), nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=two), norm()))
