"""Causal convolutions against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, wide

from eqformer import nn


CONV = random_module(nn.CausalConv, "heads head_dim", taps=3, heads=2, head_dim=3, key=jax.random.key(0))
X = normal(1, 2, 7, 2, 3)
DOCUMENTS = jnp.array([[0, 0, 1, 1, 1, 2, 3], [0] * 7], jnp.int32)


def literal(weight, x, documents, before):
    taps, y = weight.shape[-1], np.zeros(x.shape)
    joined = np.concatenate([before, x], axis=1)
    owners = np.pad(documents, ((0, 0), (taps - 1, 0)))
    for row, place, tap in np.ndindex(*x.shape[:2], taps):
        if owners[row, place + tap] == documents[row, place]:
            y[row, place] += weight[..., tap] * joined[row, place + tap]
    return y


def test_it_is_its_loops_within_documents():
    weight, before = wide(CONV.weight), normal(2, 2, 2, 2, 3)
    conv = jax.jit(lambda documents, before: CONV(X, documents, before))
    assert close(conv(DOCUMENTS, None), literal(weight, wide(X), DOCUMENTS, np.zeros((2, 2, 2, 3))))
    assert close(conv(DOCUMENTS, before), literal(weight, wide(X), DOCUMENTS, wide(before)))
    assert not close(conv(DOCUMENTS * 0, None), conv(DOCUMENTS, None), 1e-2)
    flipped = literal(weight[..., ::-1], wide(X), DOCUMENTS, wide(before))
    assert not close(conv(DOCUMENTS, before), flipped, 1e-2)
    biased = random_module(
        nn.CausalConv, "heads head_dim", taps=3, heads=2, head_dim=3, bias=True, key=jax.random.key(0)
    )
    assert close(biased(X, DOCUMENTS) - biased.bias, conv(DOCUMENTS, None), 1e-5)


def test_what_it_remembers_goes_on_where_it_ended():
    """Rows of 7 tokens, of which 4 and 1 come first, and padding behind them."""
    count, zeros = jnp.array([4, 1]), jnp.zeros((2, 2, 2, 3))
    documents = jnp.zeros((2, 7), jnp.int32)

    @jax.jit
    def run(count, documents):
        at_once, last_inputs = CONV(X, documents), CONV.last_inputs(X, documents, zeros, count)
        rests = [
            [
                CONV(X[row : row + 1, seen:], documents[:1, seen:], before)[0]
                for before in (last_inputs[row : row + 1], None)
            ]
            for row, seen in enumerate((4, 1))
        ]
        return at_once, rests, CONV.last_inputs(X, DOCUMENTS, zeros, jnp.array([7, 7]))

    at_once, rests, last = jax.tree.map(np.asarray, run(count, documents))
    for row, seen in enumerate(count.tolist()):
        rest, without = rests[row]
        assert close(rest, at_once[row, seen:], 1e-6) and not close(without, at_once[row, seen:], 1e-2)
    # Of a document that has ended nothing is kept.
    x = np.asarray(X)
    assert not np.any(last[0, 0]) and np.array_equal(last[0, 1], x[0, 6]) and np.array_equal(last[1], x[1, 5:])


def test_its_dims_are_named_and_must_fit():
    names = nn.dims(random_module(nn.CausalConv, "heads", taps=2, heads=2, bias=True, key=jax.random.key(0)))
    assert nn.dims(CONV).weight == "heads head_dim taps" and (names.weight, names.bias) == ("heads taps", "heads")
    with pytest.raises(ValueError, match=r"CausalConv\('heads', taps=0, dilation=1\)"):
        nn.CausalConv("heads", taps=0, heads=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"sizes were given for \['embed'\]"):
        nn.CausalConv("heads", taps=2, embed=2, key=jax.random.key(0))
