"""Normalisation over named dims, with the reduction in float32."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._dims import named_by
from ._dtype import at_least_float32
from ._module import Module


AVERAGED = ("means", "squares")
Mean = Callable[[Array, str], Array]  # the mean over a norm's dims, which are kept; and of what: one of `AVERAGED`


class Norm(Module):
    """A normalisation of trailing dims by averages over them, which may be taken over the slices of many devices."""

    @property
    @abc.abstractmethod
    def reduced(self) -> tuple[str, ...]:
        """The names of the trailing dims that averages are taken over."""

    @abc.abstractmethod
    def normalised(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """`x`, or this device's slice of it, normalised by what `mean` gives of wide arrays of its shape."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of `x`; the result has the dtype of `x`."""
        return self.normalised(x, self.mean)

    def mean(self, y: Float[Array, "..."], what: str) -> Float[Array, "..."]:
        """The mean over the dims of an array; a `ValueError` for a word by which devices with slices send nothing."""
        if what not in AVERAGED:
            raise ValueError(
                f"{type(self).__name__}.normalised: mean(y, {what!r}) says of what the mean is, which is one of "
                f"{' and '.join(map(repr, AVERAGED))}; take the nearer one, 'squares' for any power."
            )
        return jnp.mean(y, tuple(range(-len(self.reduced), 0)), keepdims=True)


class RMSNorm(Norm):
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
        """Begin with weights that leave the normalised input as it is.

        Args:
            dims: The names of the last dims of the input.
            eps: What is added to the mean of squares.
            offset: What is added to the weights: 1 counts them from one.
            scale: Whether there are weights.
            shift: Whether there is a shift.
            **sizes: The size of each dim by its name.
        """
        self.dims, shape = _named_shape("RMSNorm", dims, sizes)
        self.eps, self.offset = eps, offset
        self.weight = jnp.full(shape, 1.0 - offset, jnp.float32) if scale else None
        self.shift = jnp.zeros(shape, jnp.float32) if shift else None

    @property
    def reduced(self) -> tuple[str, ...]:
        """All its dims."""
        return self.dims

    def normalised(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """By the mean of squares."""
        _check_sizes("RMSNorm", self.dims, self.weight, x)
        wide = x.astype(at_least_float32(x.dtype))
        y = wide * jax.lax.rsqrt(mean(wide * wide, "squares") + self.eps)
        if self.weight is not None:
            y = y * (self.offset + self.weight.astype(y.dtype))
        if self.shift is not None:
            y = y + self.shift.astype(y.dtype)
        return y.astype(x.dtype)


class LayerNorm(Norm):
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
        """Begin with weights of 1 and biases of 0.

        Args:
            dims: The names of the last dims of the input.
            eps: What is added to the variance.
            scale: Whether there are weights.
            bias: Whether there are biases.
            over: The last of the dims, over which alone mean and variance are taken; None: over all.
            **sizes: The size of each dim by its name.
        """
        self.dims, shape = _named_shape("LayerNorm", dims, sizes)
        reduced = self.dims if over is None else tuple(over.split())
        if not reduced or self.dims[-len(reduced) :] != reduced:
            raise ValueError(f"LayerNorm({dims!r}, over={over!r}): over names the last of the dims.")
        self.over = len(reduced)
        self.eps = eps
        self.weight = jnp.ones(shape, jnp.float32) if scale else None
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None

    @property
    def reduced(self) -> tuple[str, ...]:
        """The last of its dims, or all."""
        return self.dims[-self.over :]

    def normalised(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """By the mean, and the mean of squares of what is left."""
        _check_sizes("LayerNorm", self.dims, self.weight, x)
        wide = x.astype(at_least_float32(x.dtype))
        centred = wide - mean(wide, "means")
        y = centred * jax.lax.rsqrt(mean(centred * centred, "squares") + self.eps)
        if self.weight is not None:
            y = y * self.weight.astype(y.dtype)
        if self.bias is not None:
            y = y + self.bias.astype(y.dtype)
        return y.astype(x.dtype)


class ClippedNorm(Norm):
    """What a norm gives, or the input itself, no further than `bound` from 0 (OLMoE)."""

    norm: Norm | None
    """The norm; None: none."""
    bound: float = eqx.field(static=True)
    """The largest size."""

    @property
    def reduced(self) -> tuple[str, ...]:
        """The norm's."""
        return () if self.norm is None else self.norm.reduced

    @property
    def weight(self) -> Any:
        """The norm's scale, or its shape, under the name that it has where nothing is clipped."""
        return getattr(self.norm, "weight", None)

    def normalised(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """By the norm, and clipped."""
        return jnp.clip(x if self.norm is None else self.norm.normalised(x, mean), -self.bound, self.bound)


def _named_shape(call: str, dims: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], list[int]]:
    names = tuple(dims.split())
    if not names or set(names) != set(sizes):
        raise ValueError(f"{call}({dims!r}): the sizes given are {sorted(sizes)}; the dims named are {sorted(names)}.")
    return names, [sizes[name] for name in names]


def _check_sizes(call: str, dims: tuple[str, ...], weight: Array | None, x: Array) -> None:
    """Raise where sizes differ from the weight's, which would broadcast."""
    if weight is not None and x.shape[-len(dims) :] != weight.shape:
        raise ValueError(
            f"{call}({' '.join(dims)!r})(x): the last dims of x must be {dict(zip(dims, weight.shape))}; "
            f"x has shape {x.shape}."
        )
