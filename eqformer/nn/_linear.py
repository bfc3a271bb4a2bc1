"""Linear maps between named dims."""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from .._annotation_checks import name_class
from ._contracts import ComposedMap, ComputeDtypeMatmul, DenseMap, LinearMap, MatmulPrecision
from ._dtype import at_least_float32, matmul_float32
from ._module import named_by


class LinearWrapper(LinearMap):
    """A linear map that takes the place of `inner` and computes its product in another way."""

    inner: Any  # A `LinearMap`, or whatever replaces it in a tree of the model's structure.

    @property
    def inputs(self) -> tuple[str, ...]:
        """Forwarded from `inner`."""
        return self.inner.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Forwarded from `inner`."""
        return self.inner.outputs

    @property
    def bias(self) -> Float[Array, "..."] | None:
        """Forwarded from `inner`."""
        return self.inner.bias

    @property
    def products(self) -> MatmulPrecision:
        """Forwarded from `inner`."""
        return self.inner.products

    @property
    def shape(self) -> tuple[int, ...]:
        """Forwarded from `inner`."""
        return self.inner.shape

    def matrix(self, dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Forwarded from `inner`."""
        return self.inner.matrix(dtype)

    @property
    def weight(self) -> Array:
        """Raise an `AttributeError`: a wrapper has no weight."""
        raise AttributeError(
            f"LinearMap.weight: {name_class(self)} takes the place of the map '{' '.join(self.inputs)} -> "
            f"{' '.join(self.outputs)}' here, and a device may hold only a slice of the weight; call the map instead "
            "of reading its weight."
        )


class PrecomputedLinear(LinearWrapper):
    """A linear map whose result, bias included, is computed by the function `answer`."""

    answer: Callable[[Array], Array] = eqx.field(static=True)

    @property
    def bias(self) -> None:
        """None: `answer` adds the bias."""

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `answer(x)`."""
        y = self.answer(x)
        return y if dtype is None else y.astype(dtype)


def is_map(node: object) -> TypeGuard[LinearMap]:
    """Return whether a node is a linear map that is not made of other maps (a `ComposedMap`)."""
    return isinstance(node, LinearMap) and not isinstance(node, ComposedMap)


def linear_maps(tree: PyTree) -> list[LinearMap]:
    """Return every linear map in a tree, in order; a `ComposedMap` counts as the maps that it is made of."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_map) if is_map(node)]


def map_linears(change: Callable[[Any], PyTree], module: PyTree) -> PyTree:
    """Return the module with `change(linear)` in the place of each linear map that is not made of other maps."""
    return jax.tree.map(lambda node: change(node) if is_map(node) else node, module, is_leaf=is_map)


class Linear(DenseMap):
    """`y = W x + b` over named dims: `Linear("embed -> heads head_dim", embed=512, heads=8, head_dim=64, key=key)`.

    The weight's dims are the outputs, then the inputs (`heads head_dim embed`), as in published checkpoints. The same
    names define the product: `... embed, heads head_dim embed -> ... heads head_dim`. Sizes are read from the weight,
    so the map also runs with a slice of the weight. The weight is cast to the input's dtype where it is used.
    """

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    def __init__(self, spec: str, *, bias: bool = False, std: float | None = None, key: Key[Array, ""], **sizes: int):
        """Initialize the weight normally with deviation `std`, by default 1/sqrt(product of the input sizes).

        `spec` is `"inputs -> outputs"`, and the size of every dim in it is passed by keyword. Raises a `ValueError` if
        the dims of `spec` and the sizes differ.
        """
        self.inputs, self.outputs = _parse(spec, sizes)
        fan_in = math.prod(sizes[dim] for dim in self.inputs)
        deviation = fan_in**-0.5 if std is None else std
        self.weight = deviation * jax.random.normal(key, [sizes[dim] for dim in self.weight_dims], jnp.float32)
        self.bias = jnp.zeros([sizes[dim] for dim in self.outputs], jnp.float32) if bias else None

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x` over the trailing dims of `x`. Results and sums are in `dtype`, in the backward pass too."""
        return apply_weight(self, self.weight, x, dtype)


# On CPUs a weight of three dims is copied in transposed order at each call. For few vectors, as in decoding, the copy
# costs more than the product, so up to this many vectors are multiplied by the weight as a matrix. For more vectors the
# weight keeps its dims, because accelerators would copy more for a matrix in the backward pass.
_FEW = 512


def apply_weight(
    linear: LinearMap, weight: Float[Array, "..."], x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None
) -> Float[Array, "..."]:
    """Return the product of `weight` and `x`, with the dims of the map `linear`, in the precision `linear.products`.

    Raises a `ValueError` if the last dims of `x` are not the inputs of the map.
    """
    input_shape = tuple(linear.sizes[name] for name in linear.inputs)
    if x.shape[-len(input_shape) :] != input_shape:
        spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
        sizes = dict(zip(linear.inputs, input_shape))
        raise ValueError(
            f"{type(linear).__name__}({spec!r})(x): the last dims of x must be {sizes}; x has shape {x.shape}."
        )
    batch = x.shape[: x.ndim - len(input_shape)]
    is_plain = isinstance(linear.products, ComputeDtypeMatmul)
    # A product of 16-bit vectors with a result in float32, such as logits.
    is_widening = is_plain and dtype is not None and jnp.dtype(dtype) == at_least_float32(x.dtype) != x.dtype
    if is_plain and not is_widening and math.prod(batch) > _FEW:
        # Labels of dims for `einsum`: the inputs first, then the outputs.
        inputs = list(range(len(input_shape)))
        outputs = list(range(len(input_shape), len(input_shape) + len(linear.outputs)))
        cast = weight.astype(x.dtype)
        return jnp.einsum(x, [..., *inputs], cast, [*outputs, *inputs], [..., *outputs], preferred_element_type=dtype)
    rows, matrix = (
        x.reshape(*batch, math.prod(input_shape)),
        weight.reshape(math.prod(linear.output_shape), math.prod(input_shape)),
    )
    if is_widening:
        y = matmul_float32(rows, matrix)
    else:
        y = linear.products(rows, matrix.astype(x.dtype), x.dtype if dtype is None else dtype)
    return y.reshape(*batch, *linear.output_shape)


def dense(linear: LinearMap) -> DenseMap:
    """Return the map itself if it has a weight, else a `Linear` whose weight is the map's matrix."""
    return linear if isinstance(linear, DenseMap) else plain(linear, linear.matrix())


def plain(linear: LinearMap, weight: Float[Array, "..."]) -> Linear:
    """Return a `Linear` with the map's dims and bias and another weight."""
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
