"""Normalisation of a dim that is split over devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send


class SplitNorm(eqx.Module):
    """A norm over dims of which this device holds a slice: the sums of squares (and of values) are taken over `axis`.

    `axis` may be several. Equal slices, so the mean of the devices' means is the mean.
    """

    inner: nn.RMSNorm | nn.LayerNorm
    axis: str | tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of the whole, of which `x` is a slice."""
        norm = self.inner
        dims = tuple(range(-len(reduced_dims(norm)), 0))
        wide = x.astype(nn.at_least_float32(x.dtype))
        if isinstance(norm, nn.LayerNorm):
            wide = wide - send.pmean("means of split norms", jnp.mean(wide, dims, keepdims=True), self.axis)
        squares = send.pmean("squares of split norms", jnp.mean(wide * wide, dims, keepdims=True), self.axis)
        squares = send.vary("squares of split norms", squares, self.axis)
        y = wide * jax.lax.rsqrt(squares + norm.eps)
        if norm.weight is not None:
            offset = norm.offset if isinstance(norm, nn.RMSNorm) else 0.0
            y = y * (offset + norm.weight.astype(y.dtype))
        shift = norm.shift if isinstance(norm, nn.RMSNorm) else norm.bias
        return (y if shift is None else y + shift.astype(y.dtype)).astype(x.dtype)


def reduced_dims(norm: nn.RMSNorm | nn.LayerNorm) -> tuple[str, ...]:
    """The names of the dims that a norm takes its mean over: all that it scales, or the last of them."""
    return norm.dims[-norm.over :] if isinstance(norm, nn.LayerNorm) else norm.dims
