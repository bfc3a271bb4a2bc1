"""Gated connections of several residual streams, against float64 formulas."""

import equinox as eqx
import jax
import numpy as np
from nn_reference import close, linear, normal, random_module, sigmoid, wide

from eqformer import nn


KEY = jax.random.key(0)
STREAMS, EMBED, RANK, MLP, SEQ = 3, 6, 4, 8, 5


def mean_by_hand(gates, x):
    """The gated mean and the normalized streams of rows of `seq streams embed`."""
    scale = gates.norm.offset + wide(gates.norm.weight)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + gates.norm.eps) * scale
    hidden = linear(normed, gates.down) / STREAMS
    factors = sigmoid(linear(hidden * sigmoid(hidden), gates.up))
    return (factors * normed).mean(-2), normed


def test_a_gated_connection_reads_a_mean_and_writes_to_each_stream():
    def make():
        branch = nn.Residual(nn.GatedMLP(embed=EMBED, mlp=MLP, key=KEY))
        return nn.GatedConnection(branch, streams=STREAMS, embed=EMBED, rank=RANK, key=KEY)

    layer, x = random_module(make), normal(1, 2, STREAMS, SEQ, EMBED)
    y, cache, aux = eqx.filter_jit(layer)(x)
    streams = wide(x).swapaxes(1, 2)
    mean, normed = mean_by_hand(layer.gates, streams)
    gate = linear(mean, layer.layer.gate)
    branch = linear(gate * sigmoid(gate) * linear(mean, layer.layer.up), layer.layer.down)
    write = 2 * sigmoid(linear(normed, layer.write) / STREAMS)
    expected = (streams + write[..., None] * branch[..., None, :]).swapaxes(1, 2)
    assert close(y, expected, 1e-5) and cache is None and aux is None
    plain = (streams + branch[..., None, :]).swapaxes(1, 2)
    assert not close(y, plain, 1e-2)  # the control: weights of 1


def test_the_end_of_the_streams_is_the_gated_mean():
    merge = random_module(lambda: nn.GatedMerge(nn.StreamGates(streams=STREAMS, embed=EMBED, rank=RANK, key=KEY)))
    x = normal(2, 2, STREAMS, SEQ, EMBED)
    mean, normed = mean_by_hand(merge.gates, wide(x).swapaxes(1, 2))
    assert close(eqx.filter_jit(merge)(x), mean, 1e-5) and not close(normed.mean(-2), mean, 1e-2)
