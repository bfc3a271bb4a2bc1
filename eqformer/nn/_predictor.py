"""A module behind a model that predicts one token further than the model does."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._linear_map import LinearMap
from ._module import Module
from ._norm import Norm
from ._sequential import run_layers
from ._stack import empty_caches, Stack
from ._tokens import Tokens


class Predictor(Module):
    """Multi-token prediction's module for one more token (DeepSeek-V3, arXiv:2412.19437, eq. 21 to 23).

    With `h` what the model's final norm gave of token `i`, `x_i = merge [embedding_norm(Emb(t_(i+1))); hidden_norm(h)]`
    goes through the layers and `norm`; of what they give, the model's head makes logits of token `i + 2`. The paper
    writes the two in the other order, which permutes columns of `merge`; this one is that of published weights.
    """

    embedding_norm: Norm | Callable[[Array], Array]
    """Of the next token's embedding."""
    hidden_norm: Norm | Callable[[Array], Array]
    """Of the model's vector."""
    merge: LinearMap
    """A map `sides embed -> merged`."""
    stacks: tuple[Stack, ...]
    """The layers, one in published models."""
    norm: Norm | Callable[[Array], Array]
    """Of the last layer's output."""

    def __call__(
        self,
        embedded: Float[Array, "*batch seq embed"],
        hidden: Float[Array, "*batch seq embed"],
        tokens: Tokens,
        cache: PyTree = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """What the head is given, and the cache; `tokens` count the vectors of the model, each beside the next token's
        embedding."""
        x = self.merge(jnp.stack([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-2))
        x, cache, _ = run_layers(self.stacks, x, tokens, cache)
        return self.norm(x), cache

    def init_cache(
        self, batch: Sequence[int], capacity: int, dtype: str | None, *, compute_dtype: str, rollback: int = 0
    ) -> PyTree:
        """An empty cache, as `Transformer.init_cache` gives one."""
        return empty_caches(self.stacks, batch, capacity, dtype, compute_dtype=compute_dtype, rollback=rollback)
