"""Ring attention by fused kernels equals attention over the whole row on one device."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import call, Case, compiled, compiled_for, distance, drawn, SEQ
from jax.sharding import PartitionSpec as P

from eqformer import kernels, nn
from eqformer.kernels import _op
from eqformer.parallel import CONTEXT, context_order, ContextAttention, filter_shard_map, make_mesh, TENSOR


class Literal(kernels.FlashAttention):
    """Takes each call at its word: it knows of indices and documents, and of no positions."""

    def supports(self, call):
        return None

    def _scores(self, call, query, key):
        seq, kv_seq = query.shape[1], key.shape[1]
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        visible = jnp.ones((seq, kv_seq), bool) if call.piece == "past" else jnp.tri(seq, kv_seq, dtype=bool)
        if call.documents is not None:
            kv_tokens = call.tokens if call.kv_tokens is None else call.kv_tokens
            visible = visible & (call.tokens.segments[:, None, :, None] == kv_tokens.segments[:, None, None])
        return jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", query, key) * call.scale, -1e30)

    def forward(self, call):
        scores = self._scores(call, call.query, call.key)
        value = jnp.repeat(call.value, call.query.shape[2] // call.value.shape[2], axis=2)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value), jax.nn.logsumexp(scores, axis=-1)

    def backward(self, call, output, logsum, output_grad):
        row_sums = jnp.einsum("bqhd,bqhd->bhq", output, output_grad)

        def product(query, key, value):  # whose gradients are those of FlashAttention-2
            scores = self._scores(call, query, key)
            wide = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
            weights = jax.lax.stop_gradient(jnp.exp(scores - logsum[..., None]))
            to_weights = jnp.einsum("bqhd,bkhd->bhqk", output_grad, wide)
            slopes = jax.lax.stop_gradient(weights * (to_weights - row_sums[..., None]))
            return jnp.sum(scores * slopes) + jnp.sum(weights * to_weights)

        return jax.grad(product, argnums=(0, 1, 2))(call.query, call.key, call.value)


BY_INDICES = kernels.ATTENTION.with_implementation("any", Literal())
SPLASH = kernels.RequiredKernel("tpu", kernels.SplashAttention())
CUDNN = kernels.RequiredKernel("cuda", kernels.CudnnAttention())


CASES = {
    "everything": Case(kv_heads=4, v_dim=6, has_sinks=True, is_packed=True, is_padded=True),
    "causal": Case(kv_heads=4),
}


def pieces_of(tokens: nn.Tokens, documents: int | None, size: int) -> nn.Tokens:
    return nn.with_row_layout_of(tokens, nn.mark_whole_rows(tokens, SEQ, documents), size)


def in_pieces(core, case: Case, size: int, *orders, dtype: str = "float64"):
    """The output and gradients in pieces of the ring, put back, for each order in which rows are stored."""
    mesh = make_mesh(context=size, tensor=8 // size)
    arrays, tokens, direction = drawn(case, dtype)
    row = P(None, CONTEXT, TENSOR)
    specs = (row, row, row, P(TENSOR) if case.has_sinks else None)
    run = filter_shard_map(
        partial(call, ContextAttention(core, "ring"), case), mesh, (specs, P(None, CONTEXT), row), (row, specs)
    )

    def ordered(order):
        put = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:, order]), tree)
        known = pieces_of(put(tokens), 3 if case.is_packed else None, size)
        return (*put(arrays[:3]), arrays[3]), known, put(direction)

    def restored(order, output, gradients):
        read = lambda x: np.asarray(x)[:, np.argsort(order)]
        return read(output), (*map(read, gradients[:3]), gradients[3])

    program = compiled_for(run, *ordered(orders[0]))
    return [restored(order, *program(*ordered(order))) for order in orders]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "size"),
    [("everything", 4), ("causal", 2), ("causal", 8)],
)
def test_a_ring_of_kernels_is_the_whole_row(name, size):
    case = CASES[name]
    with jax.enable_x64(True):
        want = compiled(partial(call, kernels.ReferenceAttention(), case), *drawn(case))
        # Rows in the ring's order, and as a control in another than the one in which they are said to be.
        right, wrong = in_pieces(BY_INDICES, case, size, context_order("ring", SEQ, size), np.arange(SEQ))
        assert distance(right, want) < 1e-12 and distance(wrong, want) > 0.1


def test_a_tpu_s_ring_runs_splash_and_a_gpu_s_cudnn(monkeypatch):
    monkeypatch.setattr(_op, "compilers", lambda: ("tpu", "cuda"))
    seq, mesh = 1024, make_mesh(context=4, tensor=2)
    row = P(None, CONTEXT, TENSOR)
    tokens = nn.positions_like((2, seq))
    known = nn.with_row_layout_of(nn.Tokens(tokens.positions), tokens, 4)
    shapes = [jax.ShapeDtypeStruct((2, seq, 4, 16), jnp.bfloat16)] * 3

    def traced(core, mask: nn.Mask) -> Any:
        def attend(query, key, value, positions):
            pieces = nn.with_row_layout_of(nn.Tokens(positions), known)
            given: dict[str, Any] = {"mask": mask, "tokens": pieces, "scale": 0.25}
            call_of = lambda *arrays: kernels.AttentionCall(*arrays, **given)
            total = lambda *arrays: jnp.sum(ContextAttention(core, "ring")(call_of(*arrays)).astype(jnp.float32) ** 2)
            return jax.grad(total, argnums=(0, 1, 2))(query, key, value)

        run = filter_shard_map(attend, mesh, (row, row, row, P(None, CONTEXT)), (row, row, row))
        return jax.jit(run).trace(*shapes, tokens.positions)

    lowered = lambda trace, platform: trace.lower(lowering_platforms=(platform,)).as_text()
    auto = traced(kernels.ATTENTION, nn.causal())
    assert {*re.findall(r'kernel_name = "splash_mha_(fwd|dq|dkv)', lowered(auto, "tpu"))} == {"fwd", "dq", "dkv"}
    cuda = lowered(auto, "cuda")
    assert {*re.findall(r"mask_type.{8}(\w+)", cuda)} == {"CAUSAL", "NO_MASK"} and "fmhaSoftmaxBackward" in cuda
    with pytest.raises(
        ValueError, match=r"SplashAttention\(\)\) over 4 devices of a ring.*no windows if devices split rows"
    ):
        traced(SPLASH, nn.sliding_window(9))
    with pytest.raises(ValueError, match=r"CudnnAttention\(\)\): its kernel runs on cuda.*compiled for 'tpu'"):
        lowered(traced(CUDNN, nn.causal()), "tpu")
