"""What stands for a linear map in a pipeline that puts weights' gradients off, see `_weight_gradients`."""

from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ... import nn
from .._vary import vary_like, varying_axes


class Notes:
    """What happened to one map in a trace: the shapes of each call."""

    def __init__(self):
        self.calls: list[tuple] = []


class Watched(nn.LinearWrapper, nn.DenseMap):
    """Stands for a `DenseMap` in some blocks of a pipeline."""

    @property
    def weight(self) -> Any:
        """The map's own."""
        return self.inner.weight


class Seen(Watched):
    """Stands for a map and notes what it is called on."""

    notes: Notes = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The map's own."""
        y = self.inner.product(x, dtype)
        self.notes.calls.append((self.inner.shape, *_typed(vary_like(x, self.inner.weight)), *_typed(y)))
        return y


class Tapped(Watched):
    """Stands for a map whose weight gets no gradient: those of `into` and `out` are its input and its cotangent."""

    into: Float[Array, "..."]
    out: Float[Array, "..."]

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The map's own."""
        # `pcast` before the product: its transpose sums the input's gradient over axes that the input is the same on.
        weight, inputs = self.inner.weight, len(self.inputs)
        rows = vary_like(x, weight).reshape(*x.shape[: x.ndim - inputs], -1)
        into, out = self.into.reshape(rows.shape), self.out.reshape(*rows.shape[:-1], -1)
        y = _product(self.products, rows, weight.reshape(-1, rows.shape[-1]).astype(x.dtype), into, out)
        y = y.reshape(*y.shape[:-1], *self.output_shape)
        return y if dtype is None else y.astype(dtype)


def _product_of(products: nn.MatmulPrecision, x: Array, weight: Array, into: Array, out: Array) -> Array:
    return products.forward(x, weight, x.dtype)


def _forward(products: nn.MatmulPrecision, x: Array, weight: Array, into: Array, out: Array) -> tuple[Array, tuple]:
    return products.forward(x, weight, x.dtype), (x, weight)


def _backward(products: nn.MatmulPrecision, kept: tuple, cotangent: Array) -> tuple:
    x, weight = kept
    return products.to_input(cotangent, weight, x.dtype), None, x, cotangent


_product = jax.custom_vjp(_product_of, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)


def _typed(x: Array) -> tuple[jax.ShapeDtypeStruct, frozenset[str]]:
    return jax.ShapeDtypeStruct(x.shape, x.dtype), varying_axes(x)
