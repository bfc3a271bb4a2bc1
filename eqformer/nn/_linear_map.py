"""What a linear map is to everything that splits, watches, adapts or counts one."""

import abc
import math
from collections.abc import Callable
from typing import Any, TYPE_CHECKING, TypeGuard

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ._float32_sums import add_float32
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
