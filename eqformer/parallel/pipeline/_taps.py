"""What stands for a linear map in a pipeline that puts weights' gradients off, see `_weight_gradients`."""

from typing import Any

import einops
import equinox as eqx
import jax
from jaxtyping import Array, Float

from ... import nn
from .._vary import vary_like, varying_axes


class Notes:
    """What happened to one Linear in a trace: the shapes of each call."""

    def __init__(self):
        self.calls: list[tuple] = []


class Seen(eqx.Module):
    """Stands for a Linear and notes what it is called on."""

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    notes: Notes = eqx.field(static=True)
    weight: Float[Array, "..."] = nn.named_by("weight_dims")
    bias: Float[Array, "..."] | None = nn.named_by("outputs")

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims."""
        return self.outputs + self.inputs

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The map's own result."""
        y = holding(self, self.weight, None)(x)
        self.notes.calls.append((self.weight.shape, *_typed(vary_like(x, self.weight)), *_typed(y)))
        return nn.wide_sum(y, self.bias)


class Tapped(eqx.Module):
    """Stands for a Linear whose weight gets no gradient: those of `into` and `out` are its input and its cotangent."""

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = nn.named_by("weight_dims")
    bias: Float[Array, "..."] | None = nn.named_by("outputs")
    into: Float[Array, "..."]  # type: ignore[misc]  # no field has a default
    out: Float[Array, "..."]  # type: ignore[misc]

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims."""
        return self.outputs + self.inputs

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The map's own result."""
        # Typed alike before the product: the sums over axes that the input does not vary over are this line's.
        x = vary_like(x, self.weight)
        y = _product((self.outputs, self.inputs), x, self.weight.astype(x.dtype), self.into, self.out)
        return nn.wide_sum(y, self.bias)


Map = nn.Linear | Seen | Tapped


def is_map(node: Any) -> bool:
    """Whether a node is a linear map, or stands for one."""
    return isinstance(node, Map)


def holding(node: Any, weight: Any, bias: Any, kind: type = nn.Linear, **more: Any) -> Any:
    """A `kind` of the node's dims that holds what it is given, checked by nobody: shapes, gradients or None."""
    linear = object.__new__(kind)
    fields = {"outputs": node.outputs, "inputs": node.inputs, "weight": weight, "bias": bias}
    for name, value in (fields | more).items():
        object.__setattr__(linear, name, value)
    return linear


def _contract(dims: tuple, x: Array, weight: Array) -> Array:
    outputs, inputs = (" ".join(names) for names in dims)
    return einops.einsum(x, weight, f"... {inputs}, {outputs} {inputs} -> ... {outputs}")


def _product_of(dims: tuple, x: Array, weight: Array, into: Array, out: Array) -> Array:
    return _contract(dims, x, weight)


def _forward(dims: tuple, x: Array, weight: Array, into: Array, out: Array) -> tuple[Array, tuple]:
    return _contract(dims, x, weight), (x, weight)


def _backward(dims: tuple, kept: tuple, cotangent: Array) -> tuple:
    x, weight = kept
    outputs, inputs = (" ".join(names) for names in dims)
    to_x = einops.einsum(cotangent, weight, f"... {outputs}, {outputs} {inputs} -> ... {inputs}")
    return to_x, None, x, cotangent


_product = jax.custom_vjp(_product_of, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)


def _typed(x: Array) -> tuple[jax.ShapeDtypeStruct, frozenset[str]]:
    return jax.ShapeDtypeStruct(x.shape, x.dtype), varying_axes(x)
