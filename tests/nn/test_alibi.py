"""ALiBi: slopes by the paper's rule, attention against loops and rows of 16,384 tokens against numpy, in float64."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import attend, close, linear, normal, random_module, wide

from eqformer import kernels, nn


KEY = jax.random.key(0)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, -1]])
SEGMENTS = np.array([[0] * 8, [0] * 5 + [1] * 3])


def paper_slopes(heads: int, max_bias: float = 8.0) -> list[float]:
    """Return the slopes by the recursion of the paper's code."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-max_bias * head / heads) for head in range(1, heads + 1)]
    power = 2 ** (heads.bit_length() - 1)
    return paper_slopes(power, max_bias) + paper_slopes(2 * power, max_bias)[::2][: heads - power]


@pytest.mark.parametrize("heads, max_bias", [(1, 8.0), (3, 8.0), (32, 16.0), (71, 8.0), (112, 8.0)])
def test_slopes_follow_the_papers_rule(heads, max_bias):
    alibi = nn.ALiBi(heads=heads, max_bias=max_bias, scale=0.5)
    expected = 0.5 * np.array(paper_slopes(heads, max_bias))
    assert np.allclose(alibi.slopes("bfloat16"), expected, rtol=1e-7, atol=0)
    other = 0.5 * np.array(paper_slopes(heads, max_bias + 1))
    assert not np.allclose(alibi.slopes("float32"), other, rtol=1e-2, atol=0)
    # A slice of the heads keeps the heads' own slopes.
    some = eqx.tree_at(lambda a: a.numbers, alibi, alibi.numbers[heads // 2 :])
    assert np.array_equal(some.slopes("float32"), alibi.slopes("float32")[heads // 2 :])


def test_attention_in_packed_rows_equals_loops():
    scores = nn.Scores(0.7, alibi=nn.ALiBi(heads=4, scale=2.0))
    core = kernels.BlockwiseAttention(block=3)
    sizes = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 3, "core": core, "key": KEY}
    module, x = random_module(nn.Attention, scores=scores, **sizes), normal(1, 2, 8, 6)
    tokens = nn.Tokens(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
    visible = np.asarray(nn.causal()(tokens, tokens))
    distances = POSITIONS[:, None, :, None] - POSITIONS[:, None, None, :]

    def by_loops(slopes: np.ndarray) -> np.ndarray:
        query, key, value = (linear(wide(x), part) for part in (module.query, module.key, module.value))
        bias = -slopes[:, None, None] * distances
        return linear(attend(query, key, value, visible, 0.7, bias=bias), module.output)

    found, is_real, slopes = eqx.filter_jit(module)(x, tokens)[0], POSITIONS >= 0, 2 * np.array(paper_slopes(4))
    assert close(found[is_real], by_loops(slopes)[is_real])
    assert not close(found[is_real], by_loops(slopes[::-1])[is_real], 1e-2)


def call_of(queries: np.ndarray, keys: np.ndarray, heads: int, dtype: str = "float32") -> kernels.AttentionCall:
    """Return a call of random queries and keys at these positions, with one key head for two query heads."""
    draw = np.random.default_rng(0)
    arrays = (draw.normal(size=(1, len(at), count, 4)) for at, count in ((queries, heads), (keys, 1), (keys, 1)))
    query, key, value = (jnp.asarray(x, dtype) for x in arrays)
    tokens, kv_tokens = (nn.Tokens(jnp.asarray(at[None], jnp.int32)) for at in (queries, keys))
    options = {"mask": nn.causal(), "tokens": tokens, "kv_tokens": kv_tokens, "scale": 0.5}
    return kernels.AttentionCall(query, key, value, alibi_slopes=nn.ALiBi(heads=heads).slopes(dtype), **options)


def expected_output(call: kernels.AttentionCall, slopes: np.ndarray) -> np.ndarray:
    """Return the output of a call of one row with one key head, in float64."""
    query, key, value = (wide(x)[0] for x in (call.query, call.key, call.value))
    positions, kv_positions = (np.asarray(tokens.positions[0]) for tokens in (call.tokens, call.key_tokens))
    distances = positions[:, None] - kv_positions
    scores = np.einsum("qhd,sd->hqs", query, key[:, 0]) * call.scale - slopes[:, None, None] * distances
    scores = np.where(distances >= 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqs,sd->qhd", weights / weights.sum(-1, keepdims=True), value[:, 0])[None]


@pytest.mark.parametrize("queries", [1, 12])
def test_the_last_queries_of_16384_tokens_are_exact(queries):
    """Distances, not positions, are multiplied by slopes, so near keys have exact biases at the end of long rows."""
    seq, heads = 16_384, 2
    call = call_of(np.arange(seq - queries, seq), np.arange(seq), heads)
    found, slopes = jax.jit(kernels.BlockwiseAttention())(call), np.array(paper_slopes(heads))
    assert close(found, expected_output(call, slopes), 1e-6)
    # The control: biases by key positions, rounded to float32.
    bias = np.broadcast_to(slopes[:, None, None] * np.arange(seq), (heads, queries, seq))
    by_position = dataclasses.replace(call, alibi_slopes=None, bias=jnp.asarray(bias, jnp.float32))
    assert not close(kernels.ReferenceAttention()(by_position), expected_output(call, slopes), 1e-6)


def test_gradients_of_blocks_are_those_of_the_definition():
    call = call_of(np.arange(9), np.arange(9), 4)
    call = dataclasses.replace(call, kv_tokens=None)
    weights = normal(3, *call.query.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(core: kernels.Operation, call: kernels.AttentionCall) -> tuple[jax.Array, ...]:
        def total(arrays: tuple[jax.Array, ...]) -> jax.Array:
            names = ("query", "key", "value", "alibi_slopes")
            return jnp.sum(weights * core(dataclasses.replace(call, **dict(zip(names, arrays)))))

        return jax.grad(total)((call.query, call.key, call.value, call.alibi_slopes))

    expected = gradients(kernels.ReferenceAttention(), call)
    found = gradients(kernels.BlockwiseAttention(block=4), call)
    assert all(close(x, y, 1e-5) for x, y in zip(found, expected)) and not np.any(found[3])
    call = dataclasses.replace(call, alibi_slopes=nn.ALiBi(heads=4).slopes("float32")[::-1])
    other = gradients(kernels.BlockwiseAttention(block=4), call)
    assert not any(close(x, y, 1e-3) for x, y in zip(other[:3], expected[:3]))


def test_layers_without_a_place_for_alibi_refuse_it():
    scores = nn.Scores(alibi=nn.ALiBi(heads=2))
    sizes = {"embed": 6, "heads": 2, "head_dim": 4, "key": KEY}
    attention = eqx.filter_eval_shape(nn.Attention, scores=scores, **sizes)
    with pytest.raises(ValueError, match=r"LatentAttention\(scores=.*no alibi_slopes; leave it out"):
        nn.LatentAttention(latent=3, scores=scores, **sizes)
    with pytest.raises(ValueError, match=r"MergedAttention\(Attention\): score bias cannot be merged"):
        nn.MergedAttention(attention)
    with pytest.raises(ValueError, match=r"model has alibi_slopes, which this core does not compute"):
        nn.with_execution(attention, core=kernels.DotProductAttention())
    with pytest.raises(ValueError, match=r"ALiBi\(heads=0\): give the number"):
        nn.ALiBi(heads=0)
