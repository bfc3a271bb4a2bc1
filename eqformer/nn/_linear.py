"""A linear map between named dims."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from ._dims import named_by
from ._dtype import at_least_float32
from ._float32_sums import matmul_float32
from ._linear_map import DenseMap, LinearMap
from ._matmul_precision import ComputeDtypeMatmul


class Linear(DenseMap):
    """`y = W x + b` over named dims: `Linear("embed -> heads head_dim", embed=512, heads=8, head_dim=64, key=key)`.

    The weight's dims are the outputs, then the inputs (`heads head_dim embed`), as published checkpoints have them, and
    the same names contract it: `... embed, heads head_dim embed -> ... heads head_dim`. Sizes are read off the weight,
    so the map runs on any slice of itself. The weight is cast to the input's dtype where it is used.
    """

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    def __init__(self, spec: str, *, bias: bool = False, std: float | None = None, key: Key[Array, ""], **sizes: int):
        """Draw the weight from a normal distribution of deviation `std`, by default 1/sqrt(product of the input sizes).

        `spec` is `"inputs -> outputs"`; every dim it names gets its size by keyword. Raises a `ValueError` where
        `spec` and the sizes do not fit.
        """
        self.inputs, self.outputs = _parse(spec, sizes)
        fan_in = math.prod(sizes[dim] for dim in self.inputs)
        deviation = fan_in**-0.5 if std is None else std
        self.weight = deviation * jax.random.normal(key, [sizes[dim] for dim in self.weight_dims], jnp.float32)
        self.bias = jnp.zeros([sizes[dim] for dim in self.outputs], jnp.float32) if bias else None

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """`W x`, of the trailing dims of `x`; sums and result in `dtype` where one is given, of gradients too."""
        return applied(self, self.weight, x, dtype)


# On CPUs a weight of three dims is copied in transposed order at each call, which costs more than the product for few
# vectors, as in decoding. So few vectors are multiplied by it as a matrix; for many, accelerators would copy more in
# the backward pass.
_FEW = 512


def applied(
    linear: LinearMap, weight: Float[Array, "..."], x: Float[Array, "..."], dtype: DTypeLike | None
) -> Float[Array, "..."]:
    """What the map gives of `x` whose matrix is `weight`; raises a `ValueError` for an `x` of other dims."""
    wanted = tuple(linear.sizes[name] for name in linear.inputs)
    if x.shape[-len(wanted) :] != wanted:
        spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
        raise ValueError(
            f"{type(linear).__name__}({spec!r})(x): the last dims of x must be {dict(zip(linear.inputs, wanted))}; "
            f"x has shape {x.shape}."
        )
    lead = x.shape[: x.ndim - len(wanted)]
    is_plain = isinstance(linear.products, ComputeDtypeMatmul)
    is_widening = is_plain and dtype is not None and jnp.dtype(dtype) == at_least_float32(x.dtype) != x.dtype
    if is_plain and not is_widening and math.prod(lead) > _FEW:
        # Numbers stand for the dims: the inputs' first, then the outputs'.
        into = list(range(len(wanted)))
        out = list(range(len(wanted), len(wanted) + len(linear.outputs)))
        cast = weight.astype(x.dtype)
        return jnp.einsum(x, [..., *into], cast, [*out, *into], [..., *out], preferred_element_type=dtype)
    rows, matrix = (
        x.reshape(*lead, math.prod(wanted)),
        weight.reshape(math.prod(linear.output_shape), math.prod(wanted)),
    )
    if is_widening:
        y = matmul_float32(rows, matrix)
    else:
        y = linear.products(rows, matrix.astype(x.dtype), x.dtype if dtype is None else dtype)
    return y.reshape(*lead, *linear.output_shape)


def dense(linear: LinearMap) -> DenseMap:
    """A map whose weight is what this map computes: itself, or a plain `Linear`."""
    return linear if isinstance(linear, DenseMap) else plain(linear, linear.matrix())


def plain(linear: LinearMap, weight: Float[Array, "..."]) -> Linear:
    """A `Linear` of such dims and of the map's bias."""
    sizes = dict.fromkeys((*linear.outputs, *linear.inputs), 1)
    spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
    shapes = eqx.filter_eval_shape(Linear, spec, bias=linear.bias is not None, key=jax.random.key(0), **sizes)
    parts = lambda m: (m.weight, m.bias)
    return eqx.tree_at(parts, shapes, (weight, linear.bias), is_leaf=lambda leaf: leaf is None)


def _parse(spec: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs, arrow, outputs = spec.partition("->")
    names = inputs.split() + outputs.split()
    if not arrow or not inputs.split() or not outputs.split():
        raise ValueError(
            f'Linear({spec!r}): the spec must read "inputs -> outputs", such as "embed -> heads head_dim".'
        )
    if len(set(names)) != len(names):
        raise ValueError(f"Linear({spec!r}): each dim needs a name of its own; rename the repeated one.")
    if set(names) != set(sizes):
        raise ValueError(f"Linear({spec!r}): the sizes given are {sorted(sizes)}; the spec names {sorted(names)}.")
    return tuple(inputs.split()), tuple(outputs.split())
