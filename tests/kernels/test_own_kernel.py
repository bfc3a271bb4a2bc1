"""A user's kernel (`docs/extending.md`) is chosen, explained, differentiated, and refused."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extending import beside

from eqformer import kernels, nn


SHORT = beside("short_rows").ShortRows(interpret=True)
OWN = kernels.ATTENTION.with_implementation("cpu", SHORT)


def call_of(seq: int = 8, **options) -> kernels.AttentionCall:
    draw = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, seq, heads, 4))
    tokens = nn.positions_like((2, seq))
    given = {"mask": nn.causal(), "tokens": tokens, "scale": 0.5} | options
    return kernels.AttentionCall(draw(0, 4), draw(1, 2), draw(2, 2), **given)


def names(call: kernels.AttentionCall, platform: str = "cpu") -> list[str]:
    return [line.implementation for line in kernels.explain(OWN, call, platform=platform)]


def results(op: kernels.Operation, call: kernels.AttentionCall) -> tuple[jax.Array, ...]:
    """The output and the gradients of its squares."""

    def loss(arrays: tuple) -> tuple[jax.Array, jax.Array]:
        query, key, value = arrays
        output = op(dataclasses.replace(call, query=query, key=key, value=value))
        return jnp.sum(output**2), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))((call.query, call.key, call.value))
    return output, *gradients


def test_it_is_chosen_on_its_platform_alone_and_computes_the_definition():
    call = call_of()
    assert names(call) == ["ShortRows"] and names(call, "tpu") == names(call, "cuda") == ["BlockwiseAttention"]
    got, want = results(OWN, call), results(kernels.ReferenceAttention(), call)
    assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(got, want, strict=True))
    wide = results(kernels.ReferenceAttention(), call_of(scale=0.4))
    assert not any(np.allclose(x, y, atol=1e-2) for x, y in zip(got, wide, strict=True))  # the comparison can fail
    assert "pallas" in str(jax.make_jaxpr(OWN)(call)) and "pallas" not in str(jax.make_jaxpr(kernels.ATTENTION)(call))


@pytest.mark.by_default(
    "options0-it takes rows of up to 64 tokens, not 65",
    "options2-it takes only a causal mask over rows of one document",
)
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"seq": 65}, "it takes rows of up to 64 tokens, not 65"),
        ({"softcap": 2.0}, "it has no softcap, no sinks and no bias"),
        ({"mask": nn.full()}, "it takes only a causal mask over rows of one document"),
    ],
)
def test_another_implementation_computes_what_it_refuses_and_its_reason_is_told(options, reason):
    call = call_of(**options)
    (line,) = kernels.explain(OWN, call, platform="cpu")
    assert str(line) == f"attention: BlockwiseAttention; not ShortRows: {reason}"
    got, want = (jax.jit(op)(call) for op in (OWN, kernels.ATTENTION))
    assert np.array_equal(got, want)
    with pytest.raises(ValueError, match=f"ShortRows.*cannot compute query float32.*{reason}; pass an op"):
        SHORT(call)


def test_a_model_with_another_op_is_traced_anew():
    """With one registry for all models the second call would find the program of the first."""
    traces: list[str] = []

    @eqx.filter_jit
    def attend(module: nn.Attention, x: jax.Array) -> jax.Array:
        traces.append(str(module.core))
        return module(x)[0]

    layer, x = nn.Attention(embed=8, heads=2, head_dim=4, key=jax.random.key(0)), jnp.ones((1, 5, 8))
    outputs = [attend(module, x) for module in (layer, nn.with_execution(layer, core=OWN), layer)]
    assert len(traces) == 2 and "ShortRows" in traces[1] and "ShortRows" not in traces[0]
    assert np.allclose(outputs[0], outputs[1], atol=1e-5)
    with pytest.raises(ValueError, match="'gpu' is no platform; name one of cpu, cuda, tpu, any"):
        kernels.ATTENTION.with_implementation("gpu", SHORT)
