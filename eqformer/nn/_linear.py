"""Linear maps between named dims."""

import abc
import math
from collections.abc import Callable
from typing import Any, TYPE_CHECKING, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from ._dims import named_by
from ._dtype import at_least_float32
from ._float32_sums import add_float32, matmul_float32
from ._matmul_precision import ComputeDtypeMatmul, MatmulPrecision
from ._module import Module


class LinearMap(Module):
    """`y = W x + b` between named dims, however W is held: the contract of `Linear`, `LoRA` and a map of one's own.

    A module that follows it stands wherever a `Linear` does. Its arrays name their dims (`nn.named_by`), so that a
    layout can split them; everything it says is of the slice that a device holds. An array of outputs alone that is no
    bias, such as a scale for each output of a weight of eight bits, multiplies or is added before sums over devices.
    """

    if TYPE_CHECKING:  # an abstract variable would be taken for an argument of each constructor
        inputs: tuple[str, ...] = eqx.field(init=False)
        outputs: tuple[str, ...] = eqx.field(init=False)
        bias: Array | None = eqx.field(init=False)
    else:
        inputs: eqx.AbstractVar[tuple[str, ...]]
        outputs: eqx.AbstractVar[tuple[str, ...]]
        bias: eqx.AbstractVar[Float[Array, "..."] | None]

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The sizes of W's dims, outputs then inputs; in front those of the ensembles that the map stands in."""

    @abc.abstractmethod
    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """`W x`, of the trailing dims of `x`, without the bias; in `dtype` where one is given, else in that of `x`."""

    @abc.abstractmethod
    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """W in `dtype` or its own, of the dims of `shape`."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map the trailing input dims of `x` to the output dims; leading dims stay."""
        return add_float32(self.product(x), self.bias)

    def of_other(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The same of vectors that are not those of the layer's own tokens, such as a source's."""
        return self(x)

    @property
    def products(self) -> MatmulPrecision:
        """How `matrix` is multiplied: in the compute dtype, unless a map says otherwise."""
        return ComputeDtypeMatmul()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each output and input dim."""
        names = (*self.outputs, *self.inputs)
        if len(self.shape) < len(names):
            raise ValueError(
                f"{type(self).__name__}: its weight has the shape {self.shape} in a layer, and its dims are "
                f"({', '.join(names)}); a stack's weight has a dim of layers in front of these."
            )
        return dict(zip(names, self.shape[len(self.shape) - len(names) :]))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The sizes of the output dims."""
        return tuple(self.sizes[name] for name in self.outputs)

    def flat_matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "outputs inputs"]:
        """`matrix` with all outputs as rows and all inputs as columns, of a map that stands in no ensemble."""
        return self.matrix(dtype).reshape(math.prod(self.output_shape), -1)


class DenseMap(LinearMap):
    """A map whose W is a parameter, `weight`, so that W's gradient is the product of the output's and the input.

    Its `product` is `products.forward` with the weight cast to the dtype of `x`, and nothing more.
    """

    if TYPE_CHECKING:
        weight: Array = eqx.field(init=False)
    else:
        weight: eqx.AbstractVar[Float[Array, "..."]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's."""
        return self.weight.shape

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the outputs, then the inputs."""
        return (*self.outputs, *self.inputs)

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The weight."""
        return self.weight if dtype is None else self.weight.astype(dtype)


class ComposedMap(LinearMap):
    """A map made of maps, such as a `LoRA`: what splits, watches or counts maps takes each of these by itself."""


class LinearWrapper(LinearMap):
    """A map in the place of another, `inner`, whose product it finds in a way of its own."""

    inner: Any  # a `LinearMap`, or what stands for one in a tree like the model

    @property
    def inputs(self) -> tuple[str, ...]:
        """Those of `inner`."""
        return self.inner.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Those of `inner`."""
        return self.inner.outputs

    @property
    def bias(self) -> Float[Array, "..."] | None:
        """That of `inner`."""
        return self.inner.bias

    @property
    def products(self) -> MatmulPrecision:
        """Those of `inner`."""
        return self.inner.products

    @property
    def shape(self) -> tuple[int, ...]:
        """That of `inner`."""
        return self.inner.shape

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """That of `inner`."""
        return self.inner.matrix(dtype)

    @property
    def weight(self) -> Array:
        """None of its own: an `AttributeError` that says so."""
        raise AttributeError(
            f"LinearMap.weight: a {type(self).__name__} stands for the map '{' '.join(self.inputs)} -> "
            f"{' '.join(self.outputs)}' here, which devices may hold a slice of; call the map in place of reading its "
            "weight."
        )


class PrecomputedLinear(LinearWrapper):
    """A map whose whole result, the bias included, is what `answer(x)` gives."""

    answer: Callable[[Array], Array] = eqx.field(static=True)

    @property
    def bias(self) -> None:
        """None that is left to add."""

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The result."""
        y = self.answer(x)
        return y if dtype is None else y.astype(dtype)


def is_map(node: object) -> TypeGuard[LinearMap]:
    """Whether a node is a linear map, and none that is made of others."""
    return isinstance(node, LinearMap) and not isinstance(node, ComposedMap)


def linear_maps(tree: PyTree) -> list[Any]:
    """Every linear map in a tree, in order, those that others are made of by themselves."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_map) if is_map(node)]


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
