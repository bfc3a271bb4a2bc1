"""Normalization over named dims, with the reduction in float32."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._dtype import at_least_float32
from ._module import Module, named_by


AVERAGED = ("means", "squares")
Mean = Callable[[Array, str], Array]
"""`mean(y, what)` returns the mean of `y` over a norm's dims, which stay as dims of size 1.

`what` names the quantity, "means" or "squares" (`AVERAGED`). If devices hold slices of the dims, they sum `y` over the
devices, and programs show these sums under that name.
"""


class Norm(Module):
    """A normalization of trailing dims by averages over these dims, which may be split over devices."""

    @property
    @abc.abstractmethod
    def reduced(self) -> tuple[str, ...]:
        """Return the names of the trailing dims that averages are taken over."""

    @abc.abstractmethod
    def normalize(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """Return `x` normalized, where `x` may be a device's slice. All averages must be taken by `mean`.

        The arrays passed to `mean` have the shape of `x` and are in float32 at least.
        """

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize the trailing dims of `x`; the result has the dtype of `x`."""
        return self.normalize(x, self.mean)

    def mean(self, y: Float[Array, "..."], what: str) -> Float[Array, "..."]:
        """Return the mean over the norm's dims; raise a `ValueError` unless `what` is one of `AVERAGED`."""
        if what not in AVERAGED:
            raise ValueError(
                f"{type(self).__name__}.normalize: mean(y, {what!r}) must name the averaged quantity by one of "
                f"{' and '.join(map(repr, AVERAGED))}; pass the closest one, such as 'squares' for other powers."
            )
        return jnp.mean(y, tuple(range(-len(self.reduced), 0)), keepdims=True)


class RMSNorm(Norm):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight) + shift` over named dims (Zhang and Sennrich 2019).

    `RMSNorm("embed", embed=512)` normalizes a residual stream, `RMSNorm("head_dim", head_dim=64)` each head by itself,
    `RMSNorm("heads head_dim", heads=8, head_dim=64)` all heads together. With `offset=1`, weight decay pulls the factor
    `offset + weight` towards 1 instead of 0 (Gemma). `scale=False` leaves the weight out.

    With `over`, the mean is taken over some of the trailing dims only: `RMSNorm("streams embed", over="embed", ...)`
    normalizes each residual stream by itself and scales it by its own weights (Qwen4-Exp).
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    over: int = eqx.field(static=True)
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
        over: str | None = None,
        **sizes: int,
    ):
        """Initialize the weights so that they leave the normalized input as it is.

        Args:
            dims: The names of the last dims of the input.
            eps: Added to the mean of squares.
            offset: Added to the weights.
            scale: Whether there are weights.
            shift: Whether there is a shift.
            over: The names of the trailing dims over which the mean is taken; None: all dims.
            **sizes: The size of each dim by its name.
        """
        self.dims, shape = _named_shape("RMSNorm", dims, sizes)
        self.over = _count_reduced("RMSNorm", self.dims, over)
        self.eps, self.offset = eps, offset
        self.weight = jnp.full(shape, 1.0 - offset, jnp.float32) if scale else None
        self.shift = jnp.zeros(shape, jnp.float32) if shift else None

    @property
    def reduced(self) -> tuple[str, ...]:
        """Return the dims of `over`, or all dims."""
        return self.dims[-self.over :]

    def normalize(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """Divide by the root of the mean of squares."""
        _check_sizes("RMSNorm", self.dims, self.weight, x)
        wide = x.astype(at_least_float32(x.dtype))
        y = wide * jax.lax.rsqrt(mean(wide * wide, "squares") + self.eps)
        if self.weight is not None:
            y = y * (self.offset + self.weight.astype(y.dtype))
        if self.shift is not None:
            y = y + self.shift.astype(y.dtype)
        return y.astype(x.dtype)


class LayerNorm(Norm):
    """`(x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias` over named dims (Ba, Kiros and Hinton 2016).

    With `offset=1`, weight decay pulls the factor `offset + weight` towards 1 instead of 0 (Nemotron).

    With `over`, mean and variance are taken over some of the trailing dims only: `LayerNorm("heads head_dim",
    over="head_dim", ...)` normalizes each head by itself and scales it by its own weights (Command R+).
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    over: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    weight: Float[Array, "..."] | None = named_by("dims")
    bias: Float[Array, "..."] | None = named_by("dims")

    def __init__(
        self,
        dims: str,
        *,
        eps: float = 1e-5,
        offset: float = 0.0,
        scale: bool = True,
        bias: bool = True,
        over: str | None = None,
        **sizes: int,
    ):
        """Initialize weights of `1 - offset` and biases of 0.

        Args:
            dims: The names of the last dims of the input.
            eps: Added to the variance.
            offset: Added to the weights.
            scale: Whether there are weights.
            bias: Whether there are biases.
            over: The names of the trailing dims over which mean and variance are taken; None: all dims.
            **sizes: The size of each dim by its name.
        """
        self.dims, shape = _named_shape("LayerNorm", dims, sizes)
        self.over = _count_reduced("LayerNorm", self.dims, over)
        self.eps, self.offset = eps, offset
        self.weight = jnp.full(shape, 1.0 - offset, jnp.float32) if scale else None
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None

    @property
    def reduced(self) -> tuple[str, ...]:
        """Return the dims of `over`, or all dims."""
        return self.dims[-self.over :]

    def normalize(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """Subtract the mean, and divide by the root of the variance."""
        _check_sizes("LayerNorm", self.dims, self.weight, x)
        wide = x.astype(at_least_float32(x.dtype))
        centered = wide - mean(wide, "means")
        y = centered * jax.lax.rsqrt(mean(centered * centered, "squares") + self.eps)
        if self.weight is not None:
            weight = self.weight.astype(y.dtype)
            y = y * (weight + self.offset if self.offset else weight)
        if self.bias is not None:
            y = y + self.bias.astype(y.dtype)
        return y.astype(x.dtype)


class IdentityNorm(Norm):
    """The input itself, for a place at which a model has no norm."""

    @property
    def reduced(self) -> tuple[str, ...]:
        """Return no dims."""
        return ()

    def normalize(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """Return `x`."""
        return x


class ClippedNorm(Norm):
    """The output of a norm, or the input itself, clipped to `[-bound, bound]` (OLMoE)."""

    norm: Norm | None
    """The norm; None: the input is clipped."""
    bound: float = eqx.field(static=True)
    """The largest magnitude."""

    @property
    def reduced(self) -> tuple[str, ...]:
        """Return the dims of the norm."""
        return () if self.norm is None else self.norm.reduced

    @property
    def weight(self) -> PyTree:
        """The norm's weight, so that it has the same path as in a norm that is not clipped."""
        return getattr(self.norm, "weight", None)

    def normalize(self, x: Float[Array, "..."], mean: Mean) -> Float[Array, "..."]:
        """Normalize, and clip."""
        return jnp.clip(x if self.norm is None else self.norm.normalize(x, mean), -self.bound, self.bound)


def _named_shape(call: str, dims: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], list[int]]:
    names = tuple(dims.split())
    if not names or set(names) != set(sizes):
        raise ValueError(f"{call}({dims!r}): the sizes given are {sorted(sizes)}; the dims named are {sorted(names)}.")
    return names, [sizes[name] for name in names]


def _count_reduced(call: str, dims: tuple[str, ...], over: str | None) -> int:
    """Return the number of trailing dims that `over` names, or of all dims if it is None."""
    reduced = dims if over is None else tuple(over.split())
    if not reduced or dims[-len(reduced) :] != reduced:
        raise ValueError(f"{call}({' '.join(dims)!r}, over={over!r}): over must name the last of the dims.")
    return len(reduced)


def _check_sizes(call: str, dims: tuple[str, ...], weight: Array | None, x: Array) -> None:
    """Raise a `ValueError` if the sizes of `x` differ from the weight's sizes, because the weight would broadcast."""
    if weight is not None and x.shape[-len(dims) :] != weight.shape:
        raise ValueError(
            f"{call}({' '.join(dims)!r})(x): the last dims of x must be {dict(zip(dims, weight.shape))}; "
            f"x has shape {x.shape}."
        )
