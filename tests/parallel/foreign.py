"""Modules of somebody's own, which follow a contract of `nn` and that no room knows by name."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Key

from eqformer import nn


class Int8Map(nn.LinearMap):
    """A linear map whose weight is eight bits wide, with a scale for each output that is trained."""

    inputs: tuple[str, ...] = eqx.field(static=True)
    outputs: tuple[str, ...] = eqx.field(static=True)
    rounded: Int8[Array, "..."] = nn.named_by("dims")
    scale: Float[Array, "..."] = nn.named_by("outputs")
    bias: Float[Array, "..."] | None = nn.named_by("outputs")

    @staticmethod
    def of(linear: nn.DenseMap) -> "Int8Map":
        """The map, rounded."""
        dims = tuple(range(-len(linear.inputs), 0))
        scale = jnp.max(jnp.abs(linear.weight), dims) / 127
        rounded = jnp.round(linear.weight / jnp.expand_dims(scale, dims)).astype(jnp.int8)
        return Int8Map(inputs=linear.inputs, outputs=linear.outputs, rounded=rounded, scale=scale, bias=linear.bias)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the rounded weight's dims."""
        return (*self.outputs, *self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The rounded weight's."""
        return self.rounded.shape

    def product(self, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product with the rounded weight, scaled."""
        count = len(self.inputs)
        contracted = tuple(range(x.ndim - count, x.ndim)), tuple(range(self.rounded.ndim - count, self.rounded.ndim))
        y = jnp.tensordot(x, self.rounded.astype(x.dtype), contracted, preferred_element_type=dtype)
        return nn.wide_product(y, self.scale)

    def matrix(self, dtype: Any = None) -> Float[Array, "..."]:
        """The rounded weight, scaled."""
        scale = jnp.expand_dims(self.scale, tuple(range(-len(self.inputs), 0)))
        return (self.rounded.astype(scale.dtype) * scale).astype(scale.dtype if dtype is None else dtype)


class Faded(eqx.Module):
    """What a `Fading` remembers of each row."""

    state: Float[Array, "*batch heads v_dim"]


class Fading(nn.Mixer):
    """A gated linear recurrence: each head fades by what the input says and takes in a value."""

    value: nn.LinearMap
    keep: nn.LinearMap
    output: nn.LinearMap
    splits: bool = eqx.field(static=True)

    def __init__(self, *, embed: int, heads: int, v_dim: int, splits: bool = True, key: Key[Array, ""]):
        """Draw the maps; with `splits` it says that it runs on a slice of its heads."""
        keys = jax.random.split(key, 3)
        self.value = nn.Linear("embed -> heads v_dim", embed=embed, heads=heads, v_dim=v_dim, bias=True, key=keys[0])
        self.keep = nn.Linear("embed -> heads", embed=embed, heads=heads, key=keys[1])
        self.output = nn.Linear("heads v_dim -> embed", embed=embed, heads=heads, v_dim=v_dim, bias=True, key=keys[2])
        self.splits = splits

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: Faded | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], Faded | None]:
        """Read the tokens in turn; a document begins at position 0, and padding changes nothing."""
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        value, keep = self.value(x), jax.nn.sigmoid(self.keep(x))[..., None]
        positions = jnp.broadcast_to(tokens.positions, value.shape[:-2])[..., None, None]
        keep = jnp.where(positions < 0, 1, jnp.where(positions == 0, 0, keep))
        state = jnp.zeros_like(value[..., 0, :, :]) if cache is None else cache.state.astype(value.dtype)

        def read(state: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
            keep, value = one
            state = keep * state + (1 - keep) * value
            return state, state

        axis = value.ndim - 3
        state, states = jax.lax.scan(read, state, jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (keep, value)))
        return self.output(jnp.moveaxis(states, 0, axis)), None if cache is None else Faded(state)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> Faded:
        """An empty memory, of one size for any number of tokens."""
        return Faded(jnp.zeros((*batch, *self.value.output_shape), dtype))

    def facts(self) -> nn.MixerFacts:
        """It may run on a slice of its heads; a token costs three operations a channel."""
        heads, v_dim = self.value.output_shape
        return nn.MixerFacts(self.splits, operations=3 * heads * v_dim)
