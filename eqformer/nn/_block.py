"""A transformer block: attention, then a feed-forward layer, each beside the residual stream."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from ._dropout import Dropout
from ._norm import LayerNorm, RMSNorm
from ._tokens import Tokens, tokens_or_default


Norm = RMSNorm | LayerNorm | Callable[[Array], Array]


@runtime_checkable
class Mixer(Protocol):
    """What mixes tokens and can remember them: an attention."""

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Map the tokens of `x`, reading and extending the cache where one is given."""
        ...

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        ...


@runtime_checkable
class Layer(Protocol):
    """What a stack repeats: a block, or a period of blocks."""

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Map the tokens of `x`, extending the cache where one is given; third, what routed layers tell, or None."""
        ...

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        ...


class Routed(eqx.Module):
    """A feed-forward layer that routes tokens, and so reads more of them than their vectors and tells what it did."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The layer's output and an `Aux`."""


class Block(eqx.Module):
    """Two sublayers around a residual stream; which norms are given decides the arrangement.

    Each sublayer computes `x + output_norm(layer(norm(x)))`. With `attention_norm` and `feed_forward_norm` alone it is
    pre-norm (GPT-2, Llama), with the `output` norms alone OLMo 2's, with both the sandwich of Gemma 2. The `sum` norms
    come after the addition: post-norm (Vaswani 2017). A `parallel` block adds both layers to the same input (GPT-J,
    PaLM); there, a missing `feed_forward_norm` means that the two share the attention's. `residual_scale` multiplies
    what each sublayer adds (Granite).
    """

    attention: Mixer
    feed_forward: Callable[..., Any]  # an array to one of its shape, or `Routed`
    attention_norm: Norm | None = None
    feed_forward_norm: Norm | None = None
    attention_output_norm: Norm | None = None
    feed_forward_output_norm: Norm | None = None
    attention_sum_norm: Norm | None = None
    feed_forward_sum_norm: Norm | None = None
    dropout: Dropout | None = None
    parallel: bool = eqx.field(static=True, default=False)
    residual_scale: float | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.parallel and self.attention_sum_norm is not None:
            raise ValueError(
                "Block(parallel=True, attention_sum_norm=...): a parallel block has one sum, after both layers; "
                "pass the norm as feed_forward_sum_norm."
            )

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run both sublayers; the cache is the attention's, and the `Aux` a routed feed-forward layer's, or None."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        normed = _apply(self.attention_norm, x)
        attended, cache = self.attention(normed, tokens, cache)
        attended = self._added(_apply(self.attention_output_norm, attended), tokens, 0)
        if self.parallel:
            given = normed if self.feed_forward_norm is None else self.feed_forward_norm(x)
            after = x + attended
        else:
            after = _apply(self.attention_sum_norm, x + attended)
            given = _apply(self.feed_forward_norm, after)
        if isinstance(self.feed_forward, Routed):
            fed, aux = self.feed_forward(given, tokens)
        else:
            fed, aux = self.feed_forward(given), None
        fed = self._added(_apply(self.feed_forward_output_norm, fed), tokens, 1)
        return _apply(self.feed_forward_sum_norm, after + fed), cache, aux

    def _added(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens, sublayer: int
    ) -> Float[Array, "*batch seq embed"]:
        x = x if self.residual_scale is None else x * self.residual_scale
        return x if self.dropout is None else self.dropout(x, tokens.fold_in(sublayer).keys)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The attention's empty cache."""
        return self.attention.init_cache(batch, capacity, dtype)


class Period(eqx.Module):
    """Unlike blocks that repeat together as one block of a stack: Gemma's local and global layers, say."""

    blocks: tuple[Layer, ...]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the blocks in turn; the cache, and what routed layers tell, are tuples of theirs."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        caches = (None,) * len(self.blocks) if cache is None else cache
        after, auxes = [], []
        for number, (block, given) in enumerate(zip(self.blocks, caches, strict=True)):
            x, kept, aux = block(x, tokens.fold_in(number), given)
            after.append(kept)
            auxes.append(aux)
        return x, None if cache is None else tuple(after), tuple(auxes)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """A tuple of the blocks' empty caches."""
        return tuple(block.init_cache(batch, capacity, dtype) for block in self.blocks)


def _apply(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
