"""A model without layers, whose losses tests can compute by short formulas."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


VOCAB, EMBED = 11, 5


class Table(eqx.Module):
    """A model whose logits after a token are the token's row of a table, times a matrix."""

    table: Float[Array, "vocab embed"]
    head: Float[Array, "embed vocab"]

    def encode(self, ids, tokens):
        return self.table[ids], None, None

    def unembed(self, hidden):
        return hidden @ self.head


def make_table(seed: int = 0, *, embed: int = EMBED, scale: float = 1.0) -> Table:
    """Return a `Table` whose numbers are random with standard deviation `scale`."""
    table, head = scale * np.random.default_rng(seed).normal(size=(2, VOCAB, embed))
    return Table(jnp.asarray(table), jnp.asarray(head.T))
