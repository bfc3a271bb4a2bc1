"""Arguments that cuDNN gets for packed documents, checked by a stand-in that computes attention by its definition."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from benchmarks._gpu_numbers import packed
from fused_cases import Case, distance, inputs, results

from eqformer import kernels, nn
from eqformer.kernels.attention import _cudnn


class Emulated:
    """In place of a primitive of cuDNN: what its documentation says of packed rows, one document after another."""

    def __init__(self, backward: bool = False):
        self.backward = backward

    def bind(self, query, key, value, *rest, **given):
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        outcome = [shape(*x.shape) for x in (query, key, value)]
        if not self.backward:
            batch, seq, heads, _ = query.shape
            outcome = [shape(batch, seq, heads, value.shape[-1]), shape(rest[1].size, heads, seq)]
        return jax.pure_callback(partial(self._compute, **given), outcome, query, key, value, *rest)

    def _compute(self, query, key, value, bias, sizes, kv_sizes, starts, kv_starts, *rest, scale, mask_type, **given):
        rows, seq, heads, _ = query.shape
        empty = lambda *shape: np.full(shape, np.nan)
        if self.backward:
            outputs: list[Any] = [empty(rows * seq, *x.shape[2:]) for x in (query, key, value)]
        else:
            outputs = [empty(rows * seq, heads, value.shape[-1])]
        statistics: Any = empty(sizes.size, heads, seq)
        flat = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[2:])
        q, k, v = flat(query), flat(key), flat(value)
        per_token, per_key = query.shape[2] * query.shape[3], key.shape[2] * key.shape[3]
        places = zip(*(np.asarray(x).reshape(-1) for x in (sizes, kv_sizes, starts, kv_starts)))
        for number, (size, kv_size, start, kv_start) in enumerate(places):
            if not size:
                continue
            assert size == kv_size and start % per_token == 0 and kv_start % per_key == 0
            own, keys = (
                slice(start // per_token, start // per_token + size),
                slice(kv_start // per_key, kv_start // per_key + size),
            )
            mask = nn.Mask("CAUSAL" in mask_type.name, given["sliding_window_length"])
            if self.backward:
                logsum = np.asarray(rest[-3])[number, :, :size]
                results = flat(rest[-1])[own], flat(rest[-2])[own], logsum
                parts = literal_gradients(q[own], k[keys], v[keys], *results, scale, mask)
                for whole, part in zip(outputs, parts, strict=True):
                    whole[own] = part
            else:
                part, logsum = literal(q[own], k[keys], v[keys], scale, mask)
                outputs[0][own], statistics[number, :, :size] = part, logsum
        shaped = [x.reshape(rows, seq, *x.shape[1:]).astype(np.float32) for x in outputs]
        return shaped if self.backward else [*shaped, statistics.astype(np.float32)]


def visible(seq, mask):
    """Which keys of a document a query sees, without JAX, which must not run inside of a callback."""
    behind = np.arange(seq)[:, None] - np.arange(seq)
    return (behind < mask.window) & ((behind >= 0) | (not mask.is_causal))


def literal(q, k, v, scale, mask):
    """The attention of one document and the logarithms of its sums, by the definition."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(visible(len(q), mask), np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    logsum = np.log(np.sum(np.exp(scores), -1))
    return np.einsum("hqk,khd->qhd", np.exp(scores - logsum[..., None]), v), logsum


def literal_gradients(q, k, v, to_output, output, logsum, scale, mask) -> tuple[Any, Any, Any]:
    """The backward pass of FlashAttention-2 of one document, from the forward pass's output and statistics."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    weights = np.where(visible(len(q), mask), np.exp(np.einsum("qhd,khd->hqk", q, k) * scale - logsum[:, :, None]), 0)
    to_weights = np.einsum("qhd,khd->hqk", to_output, v)
    to_scores = weights * (to_weights - np.sum(to_output * output, -1).T[:, :, None]) * scale
    fold = lambda x: x.reshape(len(x), -1, group, x.shape[-1]).sum(2)
    to_key, to_value = np.einsum("hqk,qhd->khd", to_scores, q), np.einsum("hqk,qhd->khd", weights, to_output)
    return np.einsum("hqk,khd->qhd", to_scores, k), fold(to_key), fold(to_value)


def test_packed_documents_reach_cudnn_by_the_places_where_they_begin(monkeypatch):
    real = _cudnn._cudnn()
    primitives = {
        "_dot_product_attention_fwd_p": Emulated(),
        "_dot_product_attention_bwd_p": Emulated(backward=True),
    }
    monkeypatch.setattr(_cudnn, "_cudnn", lambda: SimpleNamespace(**vars(real) | primitives))
    case = Case(nn.sliding_window(4), is_packed=True)
    arrays, tokens = inputs(case, seq=16), packed(((5, 3, 6), (16,)), 16)
    given = arrays["query"], arrays["key"], arrays["value"]
    call = kernels.AttentionCall(*given, mask=nn.sliding_window(4), tokens=tokens, scale=0.3)
    positions = jnp.where(jnp.arange(16) == 5, 5, tokens.positions)  # two documents as one
    merged = eqx.tree_at(lambda call: call.tokens.positions, call, positions)

    @jax.jit
    def computed():
        cudnn = kernels.CudnnAttention()
        output, logsum = cudnn.forward(call)
        gradients = cudnn.backward(call, output, logsum, direction)
        return output, *gradients, cudnn.forward(merged)[0]

    want = jax.jit(lambda *given: results(kernels.ReferenceAttention(), case, *given))(arrays, tokens)
    direction = jnp.where((tokens.positions >= 0)[..., None, None], arrays["direction"], 0)
    *got, wrong = computed()
    assert distance(dict(zip(("output", "query", "key", "value"), got)), want) < 2e-6
    assert distance({"output": wrong}, {"output": want["output"]}) > 0.02
