"""A model without layers, whose losses have short formulas."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


VOCAB, EMBED = 11, 5


class Table(eqx.Module):
    """A model whose logits after a token are a row of a table, times a matrix."""

    table: Float[Array, "vocab embed"]
    head: Float[Array, "embed vocab"]

    def encode(self, ids, tokens):
        return self.table[ids], None, None

    def unembed(self, hidden):
        return hidden @ self.head


def make_table(seed: int = 0, *, embed: int = EMBED, scale: float = 1.0) -> Table:
    """A table of random numbers of a standard deviation."""
    table, head = scale * np.random.default_rng(seed).normal(size=(2, VOCAB, embed))
    return Table(jnp.asarray(table), jnp.asarray(head.T))
