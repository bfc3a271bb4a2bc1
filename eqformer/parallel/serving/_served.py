"""What models laid out over devices for generating text have in common: each is used in the model's place."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ... import nn


class Served(eqx.Module):
    """A model over devices, with the vocabulary, positions and dtype of the model itself."""

    model: eqx.AbstractVar[nn.Transformer]

    @abc.abstractmethod
    def encode(self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree) -> tuple[Array, PyTree, None]:
        """The final norm's output, and the cache with these tokens stored."""

    @abc.abstractmethod
    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Logits of what `encode` gave."""

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """An empty cache."""

    def __call__(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "batch seq vocab"], PyTree]:
        """The model's own call: logits of the next token after each token, and the cache with these tokens stored.

        Without a cache the tokens are read into one of their own, which is let go.
        """
        tokens = nn.tokens_or_default(tokens, ids.shape, cache)
        batch, seq = ids.shape
        kept = self.init_cache(batch, seq) if cache is None else cache
        hidden, kept, _ = self.encode(ids, tokens, kept)
        logits = self.unembed(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(batch, seq, logits.shape[-1]), None if cache is None else kept

    @property
    def vocab(self) -> int:
        """How many token ids there are."""
        return self.model.vocab

    @property
    def positions(self) -> nn.LearnedPositions | None:
        """The model's learned positions."""
        return self.model.positions

    @property
    def start(self) -> int | None:
        """The id that each text of a model with an encoder begins with."""
        return self.model.start

    @property
    def compute_dtype(self) -> str:
        """The dtype of the residual stream."""
        return self.model.compute_dtype


def filled(x: Int[Array, "batch seq"], rows: int, value: int) -> Int[Array, "full_batch seq"]:
    """The array padded with rows of `value` to `rows` rows."""
    return jnp.pad(x, [(0, rows - x.shape[0]), (0, 0)], constant_values=value)


def filled_tokens(tokens: nn.Tokens, rows: int) -> nn.Tokens:
    """What a call with a cache reads of its tokens, with rows of padding below them."""
    lengths = None if tokens.lengths is None else filled(tokens.lengths, rows, 0)
    source = tokens.source
    if source is not None:
        below = [(0, rows - len(source.values)), *[(0, 0)] * (source.values.ndim - 1)]
        source = nn.Source(jnp.pad(source.values, below), filled_tokens(source.tokens, rows))
    return nn.Tokens(filled(tokens.positions, rows, -1), lengths=lengths, source=source)


def multiple(number: int, of: int) -> int:
    """The number rounded up to a multiple of `of`."""
    return -(-number // of) * of
