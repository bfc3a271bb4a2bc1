"""A sublayer beside a residual stream, with its norms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from ._contracts import Layer, Mixer, Routed
from ._dropout import Dropout
from ._left import Leaving, Left, of_name
from ._norm import Norm
from ._tokens import Tokens, tokens_or_default


class Residual(Layer):
    """A residual sublayer: `sum_norm(x + scale * output_norm(layer(input_scale * norm(x))))`.

    Which norms are given decides the arrangement.
    """

    layer: Mixer | Routed | Callable[..., Any]
    """A `Mixer`, a `Routed` layer or a function of an array to one of its shape."""
    norm: Norm | Callable[[Array], Array] | None = None
    """Of the layer's input: alone it is pre-norm (GPT-2, Llama), with `output_norm` the sandwich of Gemma 2."""
    output_norm: Norm | Callable[[Array], Array] | None = None
    """Of the layer's output: alone it is OLMo 2's arrangement."""
    sum_norm: Norm | Callable[[Array], Array] | None = None
    """Of the sum: alone it is post-norm (Vaswani 2017)."""
    dropout: Dropout | None = None
    """Acts on what is added."""
    scale: float | None = eqx.field(static=True, default=None)
    """What multiplies what is added (Granite)."""
    input_scale: float | None = eqx.field(static=True, default=None)
    """What multiplies what the layer is given (Falcon-H1)."""
    leaves: str | None = eqx.field(static=True, default=None)
    """The name under which a mixer leaves its keys and values, or its choice of keys, for later layers: it is called
    with `Leaving(cache)`."""
    reads: str | None = eqx.field(static=True, default=None)
    """The name of what a mixer reads: it is called with a `Left`, whose `rest` is its cache, and returns one."""

    def __check_init__(self):
        if self.leaves and self.reads:
            raise ValueError(
                f"Residual(leaves={self.leaves!r}, reads={self.reads!r}): what reads another layer's leaves nothing of "
                "its own; give one of the two."
            )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        number: int = 0,
        beside: Float[Array, "*batch full_seq mlp"] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Add the layer's output to `x`; dropout's keys are folded with `number`, the sublayer's within its block.

        Where something is given `beside` it, the layer is a function of both.
        """
        added, cache, aux = self.branch(x, tokens, cache, number=number, beside=beside)
        return apply_norm(self.sum_norm, x + added), cache, aux

    def branch(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        number: int = 0,
        beside: Float[Array, "*batch full_seq mlp"] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """What is added to `x`, a mixer's cache, and a routed layer's `Aux` or what a mixer leaves for later layers."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        given, aux = apply_norm(self.norm, x), None
        given = given if self.input_scale is None else given * self.input_scale
        if isinstance(self.layer, Mixer):
            y, cache, aux = self._mixed(self.layer, given, tokens, cache)
        elif isinstance(self.layer, Routed):
            y, aux = self.layer(given, tokens.bare)
        else:
            y = self.layer(given) if beside is None else self.layer(given, beside)
        y = apply_norm(self.output_norm, y)
        y = y if self.scale is None else y * self.scale
        return y if self.dropout is None else self.dropout(y, tokens.fold_in(number).keys), cache, aux

    def _mixed(
        self, mixer: Mixer, x: Float[Array, "*batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """What the mixer gives, its cache, and what it leaves."""
        if self.leaves is None and self.reads is None:
            return *mixer(x, tokens.bare, cache), None
        reads = self.reads
        given = Leaving(cache) if reads is None else dataclasses.replace(of_name(tokens.left, reads), rest=cache)
        y, left = mixer(x, tokens.bare, given)
        if not isinstance(left, Left):
            way = f"reads={reads!r}): given a Left" if reads else f"leaves={self.leaves!r}): given Leaving(cache)"
            raise ValueError(
                f"Residual({type(mixer).__name__}, {way}, the mixer returns {type(left).__name__} and no Left; leave "
                "that out, or take one that returns its keys and values, or its choice, with its cache."
            )
        return y, left.rest, None if reads is not None else dataclasses.replace(left, name=self.leaves, rest=None)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """A mixer's empty cache, None for other layers."""
        return self.layer.init_cache(batch, capacity, dtype) if isinstance(self.layer, Mixer) else None


def apply_norm(
    norm: Norm | Callable[[Array], Array] | None, x: Float[Array, "*batch embed"]
) -> Float[Array, "*batch embed"]:
    """The normed array, or the array itself where there is no norm."""
    return x if norm is None else norm(x)
