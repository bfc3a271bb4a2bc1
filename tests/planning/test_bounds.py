"""Closed formulas of communication against worked numbers, and against the bytes that compiled programs send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqformer.parallel import all_gather_matmul, filter_shard_map, matmul_reduce_scatter
from eqformer.planning import (
    context_bytes,
    expert_bytes,
    gather_bytes,
    pipeline_bytes,
    sharded_state_bytes,
    tensor_bytes,
)
from eqformer.program import bytes_sent, list_transfers, read_hlo
from eqformer.systems import (
    ffn_activation_bytes,
    ffn_gradient_bytes,
    gpipe_activations,
    gpipe_idle_share,
    transfer_seconds,
)


LLAMA3_8B = 8.03e9


def test_an_eight_billion_model_over_eight_devices():
    by_stage = [sharded_state_bytes(LLAMA3_8B, 8, zero=zero) for zero in range(4)]
    assert by_stage[3] == pytest.approx(42.2e9, rel=2e-3)
    assert by_stage[0] == by_stage[1] == by_stage[2] == pytest.approx(2 / 3 * by_stage[3])
    assert sharded_state_bytes(LLAMA3_8B, 8, zero=3, gradient_bytes=4) == pytest.approx(56.2e9, rel=1e-3)
    assert sharded_state_bytes(LLAMA3_8B, 8, zero=0, gradient_bytes=4) == pytest.approx(2 * 7 / 8 * 4 * LLAMA3_8B)
    layer = tensor_bytes(8192, 4096, 8)
    assert layer == pytest.approx(470e6, rel=1e-3) and 32 * layer == pytest.approx(15.0e9, rel=3e-3)
    assert tensor_bytes(8192, 4096, 8, regathered=True) == pytest.approx(587e6, rel=1e-3)


def test_microbatches_and_replicas():
    two = {"microbatches": 5, "weight_bytes": 2, "gradient_bytes": 4}
    assert sharded_state_bytes(100, 4, zero=0, **two) == 0.75 * 100 * 8  # gradients are added up first
    assert sharded_state_bytes(100, 4, zero=1, **two) == 0.75 * 100 * 6
    assert sharded_state_bytes(100, 4, zero=2, **two) == 0.75 * 100 * 22
    assert sharded_state_bytes(100, 4, zero=3, **two) == 0.75 * 100 * 40
    assert sharded_state_bytes(100, 4, zero=3, gathers=3, **two) == 0.75 * 100 * 50
    extra = sharded_state_bytes(100, 4, zero=3, replicas=2, **two) - sharded_state_bytes(100, 4, zero=3, **two)
    assert extra == 2 * 0.5 * 25 * 4
    assert sharded_state_bytes(100, 1, zero=3) == sharded_state_bytes(100, 1, zero=0) == 0


def test_pipelines_and_contexts():
    assert gather_bytes(80, 4) == 60 and gather_bytes(80, 1) == 0
    assert pipeline_bytes(1024, 64, 8) == 8 * 2 * 1024 * 64 * 2
    assert pipeline_bytes(1024, 64, 8, chunks=3, tensor=2) == 1.5 * pipeline_bytes(1024, 64, 8)
    sent = expert_bytes(4096, 2048, 8, top_k=6, method="exchange")  # a layer's, of 16-bit numbers
    assert sent == 4 * 6 * 7 / 8 * 4096 * 2048 * 2
    assert expert_bytes(4096, 2048, 8, top_k=6, method="exchange", factor=1.25) == 1.25 * sent
    assert expert_bytes(4096, 2048, 8, top_k=6, method="gather") == 4 * 7 * 4096 * 2048 * 2
    assert expert_bytes(4096, 2048, 1, top_k=6, method="gather") == 0
    ring = context_bytes(8192, 1024, 4, method="ring")
    assert ring == context_bytes(8192, 1024, 4, method="gather") == 6 * 0.75 * 8192 * 1024 * 2
    assert context_bytes(8192, 1024, 4, method="gather", saved=True) == pytest.approx(ring * 4 / 6)
    assert context_bytes(8192, 1024, 4, method="heads", embed=4096) == 2 * 0.75 * 2048 * (8192 + 2048) * 2


def test_the_ffn_gradient_of_gpt3_takes_90_ms():
    embed = 12 * 1024
    sent = ffn_gradient_bytes(embed, 4 * embed)
    assert transfer_seconds(sent, 400, gigabit=2**30) == pytest.approx(0.090, rel=1e-12)
    assert transfer_seconds(sent, 400) == pytest.approx(0.0966, rel=1e-3)
    assert 96 * transfer_seconds(sent, 400, gigabit=2**30) == pytest.approx(9, rel=0.05)
    assert ffn_activation_bytes(2048, embed) == 2048 * embed * 4 < sent


def test_gpipe():
    assert gpipe_idle_share(4, 8) == 3 / 11 and gpipe_idle_share(1, 5) == 0
    assert gpipe_activations(64, 32, 4, 16) == 64 + 8 * 4
    assert gpipe_activations(64, 32, 4, 16, recompute=False) == 512
    assert gpipe_activations(64, 32, 4, 64) < gpipe_activations(64, 32, 4, 16)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="stages are 0, 1, 2 and 3"):
        sharded_state_bytes(100, 4, zero=4)
    with pytest.raises(ValueError, match="choose 'exchange' or 'gather'"):
        expert_bytes(1, 1, 2, top_k=1, method="ring")
    with pytest.raises(ValueError, match="choose 'ring', 'gather' or 'heads'"):
        context_bytes(8, 8, 2, method="zigzag")
    with pytest.raises(ValueError, match="give embed"):
        context_bytes(8, 8, 2, method="heads")
    with pytest.raises(ValueError, match="a ring holds no gathered keys"):
        context_bytes(8, 8, 2, method="ring", saved=True)


def mesh():
    return jax.make_mesh((4,), ("axis",), (AxisType.Auto,), devices=jax.devices()[:4])


def sent_by(fn, specs, outs, *args):
    return bytes_sent(
        list_transfers(read_hlo(jax.jit(filter_shard_map(fn, mesh(), specs, outs)).lower(*args).compile()))
    )


def test_an_ffn_over_data_sends_its_gradients_and_over_features_its_output():
    """Row D of the source: O(d h) against O(B d)."""
    batch, embed, hidden = 20, 8, 32
    x, up, down = np.ones((batch, embed), "f"), np.ones((embed, hidden), "f"), np.ones((hidden, embed), "f")
    ffn = lambda x, up, down: jax.nn.relu(x @ up) @ down
    step = lambda x, up, down: jax.grad(lambda weights: jnp.sum(ffn(x, *weights)), 0)((up, down))
    over_data = sent_by(step, (P("axis"), P(), P()), P(), x, up, down)
    assert over_data == 2 * 3 / 4 * ffn_gradient_bytes(embed, hidden)
    assert over_data == sharded_state_bytes(2 * embed * hidden, 4, zero=0, gradient_bytes=4)
    output = lambda x, up, down: jax.lax.psum(ffn(x, up, down), "axis")
    over_features = sent_by(output, (P(), P(None, "axis"), P("axis")), P(), x, up, down)
    assert over_features == 2 * 3 / 4 * ffn_activation_bytes(batch, embed)


@pytest.mark.by_default("none-False", "ring-True")
@pytest.mark.parametrize("overlap,regathered", [("none", False), ("ring", True), ("bidirectional", True)])
def test_an_mlp_of_collective_matmuls_sends_half_a_layers_bound(overlap, regathered):
    """Attention is the other half; gate and up share one gather."""
    tokens, embed, hidden = 24, 8, 32

    def step(x, gate, up, down):
        def mlp(x, gate, up, down):
            gated, raised = all_gather_matmul(x, (gate, up), "axis", overlap=overlap)
            return matmul_reduce_scatter(jax.nn.silu(gated) * raised, down, "axis", scatter="seq", overlap=overlap)

        y, back = jax.vjp(mlp, x, gate, up, down)
        return y, *back(y)

    x, wide = np.ones((1, tokens, embed), "f"), np.ones((hidden, embed), "f")
    specs = P(None, "axis"), P("axis"), P("axis"), P(None, "axis")
    sent = sent_by(step, specs, (P(None, "axis"), *specs), x, wide, wide, wide.T)
    assert sent == tensor_bytes(tokens, embed, 4, regathered=regathered, activation_bytes=4) / 2
