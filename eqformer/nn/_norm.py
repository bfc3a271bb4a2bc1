"""Normalisation over named dims, with the reduction in float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._dims import named_by
from ._dtype import at_least_float32


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight) + shift` over named dims (Zhang and Sennrich 2019).

    `RMSNorm("embed", embed=512)` normalises a residual stream, `RMSNorm("head_dim", head_dim=64)` each head by itself,
    `RMSNorm("heads head_dim", heads=8, head_dim=64)` all heads together. `offset=1` counts the scale from one, so that
    weight decay pulls it there (Gemma). `scale=False` leaves the weight out.
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    weight: Float[Array, "..."] | None = named_by("dims")
    shift: Float[Array, "..."] | None = named_by("dims")

    def __init__(
        self,
        dims: str,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        scale: bool = True,
        shift: bool = False,
        **sizes: int,
    ):
        self.dims, shape = _named_shape("RMSNorm", dims, sizes)
        self.eps, self.offset = eps, offset
        self.weight = jnp.full(shape, 1.0 - offset, jnp.float32) if scale else None
        self.shift = jnp.zeros(shape, jnp.float32) if shift else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of `x`; the result has the dtype of `x`."""
        axes = _check_sizes("RMSNorm", self.dims, self.weight, x)
        wide = x.astype(at_least_float32(x.dtype))
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + self.eps)
        if self.weight is not None:
            y = y * (self.offset + self.weight.astype(y.dtype))
        if self.shift is not None:
            y = y + self.shift.astype(y.dtype)
        return y.astype(x.dtype)


class LayerNorm(eqx.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over named dims (Ba, Kiros and Hinton 2016).

    With `over`, the last of the dims, mean and variance are over these alone: `LayerNorm("heads head_dim",
    over="head_dim", ...)` normalises each head by itself and scales it by its own weights (Command R+).
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    over: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    weight: Float[Array, "..."] | None = named_by("dims")
    bias: Float[Array, "..."] | None = named_by("dims")

    def __init__(
        self,
        dims: str,
        *,
        eps: float = 1e-5,
        scale: bool = True,
        bias: bool = True,
        over: str | None = None,
        **sizes: int,
    ):
        self.dims, shape = _named_shape("LayerNorm", dims, sizes)
        reduced = self.dims if over is None else tuple(over.split())
        if not reduced or self.dims[-len(reduced) :] != reduced:
            raise ValueError(f"LayerNorm({dims!r}, over={over!r}): over names the last of the dims.")
        self.over = len(reduced)
        self.eps = eps
        self.weight = jnp.ones(shape, jnp.float32) if scale else None
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of `x`; the result has the dtype of `x`."""
        axes = _check_sizes("LayerNorm", self.dims, self.weight, x)[-self.over :]
        wide = x.astype(at_least_float32(x.dtype))
        centred = wide - jnp.mean(wide, axes, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axes, keepdims=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.astype(y.dtype)
        if self.bias is not None:
            y = y + self.bias.astype(y.dtype)
        return y.astype(x.dtype)


def _named_shape(call: str, dims: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], list[int]]:
    names = tuple(dims.split())
    if not names or set(names) != set(sizes):
        raise ValueError(f"{call}({dims!r}): the sizes given are {sorted(sizes)}; the dims named are {sorted(names)}.")
    return names, [sizes[name] for name in names]


def _check_sizes(call: str, dims: tuple[str, ...], weight: Array | None, x: Array) -> tuple[int, ...]:
    """The trailing dims to reduce over; raises if their sizes differ from the weight's, which would broadcast."""
    if weight is not None and x.shape[-len(dims) :] != weight.shape:
        raise ValueError(
            f"{call}({' '.join(dims)!r})(x): the last dims of x must be {dict(zip(dims, weight.shape))}; "
            f"x has shape {x.shape}."
        )
    return tuple(range(-len(dims), 0))
