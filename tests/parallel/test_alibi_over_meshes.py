"""Attention with linear biases over meshes: each head keeps its slope, in gradients leaf by leaf and in texts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import afresh, named, of_plan, texts_over
from haste import put
from jax.sharding import PartitionSpec as P
from plan_models import filled
from plan_parity import Case, differences, of_one_device

from eqformer import kernels, nn
from eqformer.parallel import (
    context_order,
    ContextAttention,
    filter_shard_map,
    Layout,
    make_mesh,
    partition_specs,
    vary,
)


ROUNDING = 100 * float(np.finfo(np.float32).eps)
GRID = [
    Case("alibi", {"tensor": 2}, {"residual": "replicated"}),
    Case("alibi", {"context": 2, "tensor": 2}, {"context_method": "ring", "residual": "sequence"}),
    Case("alibi", {"context": 2, "tensor": 2}, {"context_method": "heads", "residual": "replicated"}),
    Case("alibi", {"context": 4}, {"context_method": "gather"}),
    Case("alibi", {"fsdp": 2, "tensor": 4}, {"zero": 3, "smallest": 1, "residual": "feature"}),
    Case("alibi", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2}),
    Case("alibi", {"pipe": 2, "context": 2}, {"schedule": "1f1b", "microbatches": 2, "context_method": "ring"}),
]


def test_split_heads_keep_their_slopes():
    """The heads of an attention are split over two devices; the control numbers the heads of each device from 0."""
    scores, draw = nn.Scores(alibi=nn.ALiBi(heads=4)), np.random.default_rng(1)
    sizes = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 2, "core": kernels.ReferenceAttention()}
    layer = filled(lambda: nn.Attention(scores=scores, key=jax.random.key(0), **sizes))
    x, direction = (put(draw.normal(size=(1, 9, 6)), "float32") for _ in range(2))
    tokens, mesh = nn.Tokens(put([range(9)], "int32")), make_mesh(tensor=2, devices=jax.devices()[:2])
    specs = partition_specs(layer, Layout({"heads": "tensor", "kv_heads": "tensor"}), mesh)
    sum_heads = lambda layer, x: jax.lax.psum(layer(vary(x, ["tensor"]), tokens)[0], "tensor")
    split = filter_shard_map(sum_heads, mesh, (specs, P()), P())

    def run(function, layer: nn.Attention) -> tuple:
        output, pull_back = eqx.filter_vjp(lambda layer: function(layer, x), layer)
        return output, pull_back(direction)[0].query.weight

    run = eqx.filter_jit(run)
    wrong = eqx.tree_at(lambda layer: layer.scores.alibi.numbers, layer, put([0, 1, 0, 1], "int32"))
    expected = run(lambda layer, x: layer(x, tokens)[0], layer)
    assert all(np.allclose(got, whole, atol=1e-6) for got, whole in zip(run(split, layer), expected))
    assert not any(np.allclose(got, whole, atol=1e-3) for got, whole in zip(run(split, wrong), expected))


@pytest.mark.grid
@pytest.mark.parametrize("case", named([], GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", named([], [GRID[0], GRID[1], GRID[2], GRID[4], GRID[5]]))
def test_slopes_that_count_the_heads_of_a_device_are_seen(case, monkeypatch):
    wanted, slopes = of_one_device(case), nn.ALiBi.slopes

    def slopes_of_first_heads(alibi, dtype):
        return slopes(nn.ALiBi(heads=alibi.heads), dtype)[: len(alibi.numbers)] + 0 * alibi.numbers.astype(dtype)

    assert jnp.any(slopes(nn.ALiBi(heads=8), "float32")[4:] != slopes(nn.ALiBi(heads=8), "float32")[:4])
    monkeypatch.setattr(nn.ALiBi, "slopes", slopes_of_first_heads)
    assert differences(afresh(case), wanted, 1e-2)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"tensor": 2, "pipe": 2}, {"context": 2, "tensor": 2}])
def test_text_is_one_devices(mesh):
    texts = texts_over("alibi", mesh)
    assert np.array_equal(texts[0].ids, texts[1].ids) and len({*texts[1].ids[0].tolist()}) > 2
    assert np.allclose(texts[0].log_probabilities, texts[1].log_probabilities, atol=2e-5)


@pytest.mark.grid
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_the_last_of_16384_split_tokens_have_exact_biases(method, window):
    """Two devices hold a row of 16,384 tokens; the last 12 tokens are compared with the formula in float64."""
    seq, order, draw = 16_384, context_order(method, 16_384, 2), np.random.default_rng(0)
    query, key, value = (draw.normal(size=(1, seq, heads, 4)).astype("float32") for heads in (2, 1, 1))
    slopes, mask = nn.ALiBi(heads=2).slopes("float32"), nn.causal() if window is None else nn.sliding_window(window)

    def attend(*arrays: jax.Array) -> jax.Array:
        options = {"mask": mask, "tokens": nn.Tokens(arrays[3]), "scale": 0.5, "alibi_slopes": slopes}
        return ContextAttention(kernels.BlockwiseAttention(), method)(kernels.AttentionCall(*arrays[:3], **options))

    mesh, row = make_mesh(context=2, devices=jax.devices()[:2]), P(None, "context")
    arrays = (put(x[:, order], x.dtype.name) for x in (query, key, value, np.arange(seq, dtype=np.int32)[None]))
    output = np.asarray(jax.jit(filter_shard_map(attend, mesh, (row,) * 4, row))(*arrays))[0, np.argsort(order)[-12:]]

    def expected(slopes: np.ndarray) -> np.ndarray:
        distances = np.arange(seq - 12, seq)[:, None] - np.arange(seq)
        scores = 0.5 * np.einsum("qhd,sd->hqs", query[0, -12:].astype(float), key[0, :, 0].astype(float))
        is_visible = (distances >= 0) & (distances < (window or seq))
        weights = np.exp(np.where(is_visible, scores - slopes[:, None, None] * distances, -np.inf))
        return np.einsum("hqs,sd->qhd", weights / weights.sum(-1, keepdims=True), value[0, :, 0])

    exact = np.array([2.0**-4, 2.0**-8])
    assert np.allclose(output, expected(exact), rtol=0, atol=2e-6)
    assert not np.allclose(output, expected(exact[::-1]), rtol=0, atol=1e-2)
