"""A small model and a random batch for all tests of the room, and the package trl."""

import importlib
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put

from eqformer import Batch, kernels, nn


@pytest.fixture
def trl(monkeypatch):
    """The package trl; without it, a test is skipped."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("the package trl is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return importlib.import_module("trl")


@pytest.fixture(scope="session")
def filled():
    """A function that returns the model of `build()` with random numbers from numpy.

    JAX would compile the constructors' own draws for longer than the tests run.
    """

    def fill(build, seed: int = 0):
        draw = np.random.default_rng(seed)

        def number(path, leaf):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                return put(np.arange(leaf.shape[0]), leaf.dtype)
            is_scale = "norm" in jax.tree_util.keystr(path)
            return put(is_scale + 0.25 * draw.normal(size=leaf.shape), leaf.dtype)

        return jax.tree_util.tree_map_with_path(number, eqx.filter_eval_shape(build))

    return fill


@pytest.fixture(scope="session")
def make_model(filled):
    """A function that builds a Transformer of two blocks with dropout and grouped queries, tied or untied."""

    def make(*, seed: int = 0, tied: bool = True, dropout: float = 0.0, vocab: int = 50, layers: int = 2):
        embed, heads, kv_heads, head_dim, mlp = 16, 4, 2, 4, 24

        def block(key):
            one, two = jax.random.split(key)
            return nn.Block(
                nn.Residual(
                    nn.Attention(
                        embed=embed,
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=head_dim,
                        bias=True,
                        core=kernels.ReferenceAttention(),
                        key=one,
                    ),
                    nn.RMSNorm("embed", embed=embed),
                    dropout=nn.Dropout(dropout) if dropout else None,
                ),
                nn.Residual(
                    nn.GatedMLP(embed=embed, mlp=mlp, key=two),
                    nn.RMSNorm("embed", embed=embed),
                    dropout=nn.Dropout(dropout) if dropout else None,
                ),
            )

        def build():
            table, stack, head = jax.random.split(jax.random.key(0), 3)
            return nn.Transformer(
                nn.Embedding(vocab=vocab, embed=embed, key=table),
                (nn.Stack(block, layers, key=stack),),
                nn.RMSNorm("embed", embed=embed),
                None if tied else nn.Linear("embed -> vocab", embed=embed, vocab=vocab, key=head),
            )

        return filled(build, seed)

    return make


@pytest.fixture(scope="session")
def make_batch():
    """A function that builds a batch of packed rows: two documents and padding in each, unequal weights."""

    def make(*, rows: int = 4, seq: int = 12, vocab: int = 50, seed: int = 0, first: int = 0) -> Batch:
        draw = np.random.default_rng(seed)
        cut, end = seq // 3, seq - 2
        positions = np.concatenate([np.arange(cut), np.arange(end - cut), np.full(seq - end, -1)])
        segments = np.repeat([0, 1, 2], [cut, end - cut, seq - end])
        weights = draw.integers(0, 2, (rows, seq)) * (positions >= 0)
        weights[np.arange(rows) % 2 == 0, 1:3] = 0  # so that microbatches have different numbers of tokens
        weights[:, 0] = 1
        return Batch(
            ids=draw.integers(0, vocab, (rows, seq)).astype(np.int32),
            targets=draw.integers(0, vocab, (rows, seq)).astype(np.int32),
            weights=weights.astype(np.float32),
            positions=np.tile(positions, (rows, 1)).astype(np.int32),
            segments=np.tile(segments, (rows, 1)).astype(np.int32),
            examples=np.arange(first, first + rows, dtype=np.int32),
        )

    return make
