"""A sublayer of the residual stream with its norms, and dropout."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key, PyTree

from ._contracts import Layer, Mixer, Routed
from ._cross_layer import find_shared, SharedValue, ShareRequest
from ._model_contracts import RandomMask
from ._norm import Norm
from ._tokens import Tokens, tokens_or_default


class Dropout(RandomMask):
    """Zero each channel with probability `rate` and divide the others by `1 - rate` (Srivastava et al. 2014).

    Each token has a key of its own, so its mask is the same in any batch, on any mesh.
    """

    rate: float = eqx.field(static=True)

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"Dropout(rate={self.rate}): the rate is a probability; give one in [0, 1).")

    @property
    def is_active(self) -> bool:
        """Whether any channel may be dropped."""
        return self.rate != 0

    def draw_mask(self, keys: Key[Array, "*batch seq"], channels: int) -> Bool[Array, "*batch seq embed"]:
        """Draw the mask of channels that each token keeps."""
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, (channels,)))
        return draw(keys.reshape(-1)).reshape(*keys.shape, channels)

    def apply_mask(
        self, x: Float[Array, "*batch seq embed"], mask: Bool[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Return `x / (1 - rate)` where the mask is set, else zero."""
        # The name lets rematerialisation policies keep the mask, so that it is not drawn again.
        mask = checkpoint_name(mask, "dropout")
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros_like(x))


class Residual(Layer):
    """A residual sublayer: `sum_norm(x + scale * output_norm(layer(input_scale * norm(x))))`.

    The norms that are given decide the arrangement: pre-norm, post-norm, or both.
    """

    layer: Mixer | Routed | Callable[..., Any]
    """A `Mixer`, a `Routed` layer, or a function of an array to an array of the same shape."""
    norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the layer's input: alone it is pre-norm (GPT-2, Llama), with `output_norm` the sandwich of Gemma 2."""
    output_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the layer's output: alone it is OLMo 2's arrangement."""
    sum_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the sum: alone it is post-norm (Vaswani 2017)."""
    dropout: RandomMask | None = None
    """Dropout of the branch."""
    scale: float | None = eqx.field(static=True, default=None)
    """Factor of the branch's output (Granite)."""
    input_scale: float | None = eqx.field(static=True, default=None)
    """Factor of the layer's input (Falcon-H1)."""
    shares: str | None = eqx.field(static=True, default=None)
    """The name under which a mixer shares its keys and values, or its choice of keys, with later layers. The mixer is
    called with a `ShareRequest` in place of its cache."""
    reads: str | None = eqx.field(static=True, default=None)
    """The name of a shared value that a mixer reads. The mixer is called with the `SharedValue`, wrapped around its
    cache, and returns one."""

    def __check_init__(self):
        if self.shares and self.reads:
            raise ValueError(
                f"Residual(shares={self.shares!r}, reads={self.reads!r}): a layer that reads another layer's values "
                "shares none of its own; give one of the two."
            )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        number: int = 0,
        layer_input: Float[Array, "*batch full_seq mlp"] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Add the branch to `x`.

        Dropout's keys are folded with `number`, the sublayer's number within its block. A `layer_input`, if given, is
        the layer's second argument.
        """
        added, cache, aux = self.branch(x, tokens, cache, number=number, layer_input=layer_input)
        return apply_norm(self.sum_norm, x + added), cache, aux

    def branch(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        number: int = 0,
        layer_input: Float[Array, "*batch full_seq mlp"] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the summand for `x`, a mixer's new cache, and a routed layer's `Aux` or a mixer's shared value."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        normed, aux = apply_norm(self.norm, x), None
        normed = normed if self.input_scale is None else normed * self.input_scale
        if isinstance(self.layer, Mixer):
            y, cache, aux = self._mix(self.layer, normed, tokens, cache)
        elif isinstance(self.layer, Routed):
            y, aux = self.layer(normed, tokens.bare)
        else:
            y = self.layer(normed) if layer_input is None else self.layer(normed, layer_input)
        y = apply_norm(self.output_norm, y)
        y = y if self.scale is None else y * self.scale
        return y if self.dropout is None else self.dropout(y, tokens.fold_in(number).keys), cache, aux

    def _mix(
        self, mixer: Mixer, x: Float[Array, "*batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, SharedValue | None]:
        """Return the mixer's output, its new cache, and the value that it shares."""
        if self.shares is None and self.reads is None:
            return *mixer(x, tokens.bare, cache), None
        reads = self.reads
        if reads is None:
            wrapped_cache = ShareRequest(cache)
        else:
            wrapped_cache = dataclasses.replace(find_shared(tokens.shared, reads), wrapped=cache)
        y, shared = mixer(x, tokens.bare, wrapped_cache)
        if not isinstance(shared, SharedValue):
            call = f"shares={self.shares!r}): given ShareRequest(cache)"
            call = call if reads is None else f"reads={reads!r}): given a SharedValue"
            raise ValueError(
                f"Residual({type(mixer).__name__}, {call}, the mixer returns {type(shared).__name__} and no "
                "SharedValue; leave that option out, or take a mixer that returns its keys and values, or its choice, "
                "with its cache."
            )
        if reads is not None:
            return y, shared.wrapped, None
        return y, shared.wrapped, dataclasses.replace(shared, name=self.shares, wrapped=None)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return a mixer's empty cache, None for other layers."""
        return self.layer.init_cache(batch, capacity, dtype) if isinstance(self.layer, Mixer) else None


def apply_norm(
    norm: Norm | Callable[[Array], Array] | None, x: Float[Array, "*batch embed"]
) -> Float[Array, "*batch embed"]:
    """Return the normed array, or the array itself if there is no norm."""
    return x if norm is None else norm(x)
