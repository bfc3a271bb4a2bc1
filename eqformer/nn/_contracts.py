"""Contracts of linear maps, of their products, and of modules of blocks and stacks; and the `Aux` of routed layers.

A contract is an abstract module. Modules of other packages may subclass it.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ..kernels import Mask
from ._dtype import add_float32, multiply_vectors
from ._module import Module, modules
from ._tokens import Tokens


class LinearMap(Module):
    """A linear map `y = W x + b` between named dims, with W stored in any form: the contract of `Linear` and `LoRA`.

    A module that follows this contract may take the place of any `Linear`. Its arrays name their dims (`nn.named_by`),
    so that a layout can shard them; all sizes are the sizes of the slice that a device holds. If devices split the
    inputs, the devices' results are summed: an array with only output dims, such as the scales of an 8-bit weight's
    outputs, is applied before the sum, and the bias is added after the sum.
    """

    if TYPE_CHECKING:  # Type checkers take an abstract variable for an argument of each constructor.
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
        """Sizes of W's dims: the dims of the ensembles that contain the map, then outputs, then inputs."""

    @abc.abstractmethod
    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x` over the trailing dims of `x`, without the bias, in `dtype` or else in the dtype of `x`."""

    @abc.abstractmethod
    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return W in `dtype`, by default in its own dtype, with the dims of `shape`."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map the trailing input dims of `x` to the output dims; leading dims stay."""
        return add_float32(self.product(x), self.bias)

    def of_other(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map vectors that are not the layer's own input, such as the source of a cross-attention."""
        return self(x)

    @property
    def base(self) -> "LinearMap":
        """The map without adapters: the wrapped map of a `LoRA`; by default the map itself."""
        return self

    @property
    def products(self) -> "MatmulPrecision":
        """The precision in which `matrix` is multiplied: by default the compute dtype."""
        return ComputeDtypeMatmul()

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each output and input dim."""
        names = (*self.outputs, *self.inputs)
        if len(self.shape) < len(names):
            raise ValueError(
                f"{type(self).__name__}: its weight has the shape {self.shape} in a layer, and its dims are "
                f"({', '.join(names)}); a stack's weight has a dim of layers in front of these."
            )
        return dict(zip(names, self.shape[len(self.shape) - len(names) :]))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Sizes of the output dims."""
        return tuple(self.sizes[name] for name in self.outputs)

    def flat_matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "outputs inputs"]:
        """Return `matrix` with all outputs as rows and all inputs as columns, for a map outside of ensembles."""
        return self.matrix(dtype).reshape(math.prod(self.output_shape), -1)


class DenseMap(LinearMap):
    """A linear map whose W is a parameter, `weight`.

    The gradient of `weight` is therefore the product of the output's gradient and the input. `product` must be
    `products.forward` with the weight cast to the dtype of `x`, and nothing more.
    """

    if TYPE_CHECKING:
        weight: Array = eqx.field(init=False)
    else:
        weight: eqx.AbstractVar[Float[Array, "..."]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the outputs, then the inputs."""
        return (*self.outputs, *self.inputs)

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the weight."""
        return self.weight if dtype is None else self.weight.astype(dtype)


class ComposedMap(LinearMap):
    """A linear map made of linear maps, such as a `LoRA`; transforms and costs treat each inner map separately."""


Channels = tuple[tuple[int, ...], ...]  # Pairs (heads, channels of a head) of one token; costs sum over pairs.


@dataclasses.dataclass(frozen=True)
class MatmulPrecision(abc.ABC):
    """The three products of a map `y = W x`: the output, and the gradients of the input and of the weight.

    Each product gets whole vectors and a matrix of outputs by inputs; on a mesh, these may be the slices that a device
    holds. A product may round its operands in any way, sums in float32 at least, and returns an array of `dtype`. A
    call computes `forward`; the other two products are its gradients in reverse mode.
    """

    operand_bits: ClassVar[int | None]
    """Bits of the operands after rounding; None if they are not rounded."""

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`.

        Under `shard_map`, the gradient of a factor is summed over the mesh axes over which only the other factor
        varies.
        """
        x_zero, weight_zero = (jnp.zeros_like(array, shape=()) for array in (x, weight))
        # With the zeros both factors vary over the same axes, and the transposes of these additions sum the gradients.
        factors = x + weight_zero.astype(x.dtype), weight + x_zero.astype(weight.dtype)
        return _multiply(self, jnp.dtype(dtype), *factors)

    @abc.abstractmethod
    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""

    @abc.abstractmethod
    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient, `W^T g`."""

    @abc.abstractmethod
    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient, `sum g x^T` over all vectors."""


class ComputeDtypeMatmul(MatmulPrecision):
    """Products of arrays without rounding, in their own dtype."""

    operand_bits: ClassVar[int | None] = None

    def __call__(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`, with JAX's gradients."""
        return self.forward(x, weight, dtype)

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""
        return multiply_vectors(x, weight, dtype)

    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient."""
        return jnp.einsum("...o,oi->...i", gradient, weight, preferred_element_type=dtype)

    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient."""
        vectors = tuple(range(x.ndim - 1))
        return jnp.tensordot(gradient, x, (vectors, vectors), preferred_element_type=dtype)


def _forward(products: MatmulPrecision, dtype: DTypeLike, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return products.forward(x, weight, dtype), (x, weight)


def _backward(
    products: MatmulPrecision, dtype: DTypeLike, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = residuals
    return products.input_grad(gradient, weight, x.dtype), products.weight_grad(gradient, x, weight.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(products: MatmulPrecision, dtype: DTypeLike, x: Array, weight: Array) -> Array:
    return products.forward(x, weight, dtype)


_multiply.defvjp(_forward, _backward)


class Attends(NamedTuple):
    """The mask and the shapes of the call that a mixer makes to its attention core, the field `core`.

    If a mixer returns this record in its `facts`, a plan may replace the core, so that rows can be split over devices.
    """

    mask: Mask
    """The keys that a query may see."""
    query: Channels
    """Heads and channels of the queries."""
    key: Channels
    """Heads and channels of the keys."""
    value: Channels
    """Heads and channels of the values."""
    output: Channels
    """Heads and channels of the output."""
    needs: tuple[str, ...] = ()
    """Options that the core must support: `softcap`, `sinks`, `bias`, `alibi_slopes`, and `source` for keys of another
    sequence."""


@dataclasses.dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer for transforms and cost formulas; the defaults are safe for any mixer.

    Sizes are the sizes of the slice that a device holds.
    """

    splits_heads: bool = False
    """Whether the mixer runs on a slice of its `heads`, `kv_heads` or `mlp`. Its input projections then return such
    slices, and the results of its output projections are summed over devices. Besides projections and norms, the mixer
    may apply only elementwise functions to its input; a projection may read the result of such a function, except in a
    plan with `residual="sequence"`. Every device runs the whole mixer if `splits_heads` is false, or if an array that
    belongs to no map has both the dim `embed` and one of the dims above."""
    attends: Attends | None = None
    """The attention that the mixer's core computes. None for a mixer that needs whole rows, because it reads tokens in
    sequence, chooses among all tokens, or combines neighbouring tokens outside of its core."""
    operations: int | float = 0
    """Operations for each token outside of linear maps and the core; a multiply-add counts as 2."""
    shares_kv_heads: bool = True
    """Whether several devices may hold the same key head, each with some of its query heads."""
    attends_by_rows: bool = False
    """Whether, in serving, devices that share a key head may each attend for some of the rows, with only the caches and
    tokens of these rows. Such a mixer reads its input only through projections, whose results the devices exchange."""
    projects_derived: bool = False
    """Whether a projection reads a function of the mixer's input, such as a norm of the input, instead of the input. A
    plan with `residual="sequence"` refuses such a mixer if the plan splits its heads."""


class Mixer(Module):
    """A layer that mixes tokens and may cache them: an attention, or a recurrence."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Map the tokens of `x`, reading and extending the cache if one is given."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens, whose arrays name all their dims."""

    def facts(self) -> MixerFacts:
        """Return facts for transforms and cost formulas; the default is safe for any mixer."""
        return MixerFacts()


class ScoreBias(Module):
    """A bias by positions, added to the scores of each attention that has `Scores(bias=True)`.

    The module also runs on a slice of its heads: its arrays name their dim `heads`, or are the same for all heads.
    """

    @abc.abstractmethod
    def __call__(self, queries: Tokens, keys: Tokens) -> Float[Array, "*batch heads seq kv_seq"]:
        """Return the bias of each query and key, in float32 at least."""


class FeedForward(Module):
    """A layer that maps each token by itself and also runs on a slice of its `mlp` hidden features.

    Its projections from `embed` to `mlp` return such a slice on each device, and the results of its projections from
    `mlp` to `embed` are summed over the slices. Any other projection of the input, such as a gate with one channel,
    returns the whole result on every device. Besides projections and norms, the layer may apply only elementwise
    functions to its input. Arrays that belong to no map name their dims: arrays with `embed` act on the stream, arrays
    with `mlp` act on slices, and an array with both makes every device run the whole layer. A layer that does not
    follow these rules must be a plain function instead, which every device runs whole.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""


class Routed(Module):
    """A feed-forward layer that routes tokens to experts; it reads random keys and padding, and returns an `Aux`."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the layer's output and an `Aux`."""

    def rebalance(self, aux: PyTree, rate: float | Float[Array, ""]) -> "Routed":
        """Return the layer after a step with this `Aux`, adjusted by `rate` towards equal loads of experts.

        By default the layer is unchanged.
        """
        return self


class Layer(Module):
    """A layer that a stack repeats: a block, a super-block, or a residual sublayer alone."""

    @property
    def members(self) -> "tuple[Layer, ...]":
        """The layers that this layer runs one after another, such as a super-block's; by default the layer itself."""
        return (self,)

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Map the tokens of `x`; return the output, the extended cache, and the `Aux` of routed layers or None."""

    @abc.abstractmethod
    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens; None for a layer without a cache."""


class Sublayer(Layer):
    """A layer of a `Block`, which runs its sublayers one after another on the residual stream."""

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Map the tokens of `x`, as a `Layer` does.

        `index` is the sublayer's place in its block, to be folded into the keys of dropout; None outside of a block.
        """


class ChunkedUnembedding(Module):
    """A module that computes the logits of the whole vocabulary, or of one part of the vocabulary at a time.

    It computes parts if no device has the whole vocabulary table.
    """

    @abc.abstractmethod
    def parts(self) -> tuple[PyTree, PyTree]:
        """Return two trees: the arrays with gradients, and the other arrays. Each array has a dim of parts in front."""

    @abc.abstractmethod
    def of_part(self, trained: PyTree, constants: PyTree) -> tuple[Module, Int[Array, "part"]]:
        """Return a module that computes the logits of one part, and the part's ids; id -1 marks padding.

        `trained` and `constants` are this part of each of the two trees that `parts` returns.
        """


class Aux(eqx.Module):
    """Auxiliary losses and counts of a mixture of experts, each summed over a call's tokens other than padding.

    In a stack, each array has a `layers` dim in front. `loss` is added to the sum of the tokens' losses; `load` counts
    the choices of each expert, including dropped choices; `entropy` sums the entropy of each token's scores, in nats.
    """

    loss: Float[Array, "*layers"]
    load: Int[Array, "*layers experts"]
    dropped: Int[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    tokens: Int[Array, "*layers"]


def aux_of(aux: PyTree) -> list[Aux]:
    """Return every `Aux` in the `aux` that a model, a stack or a layer returned, in the order of the layers."""
    return modules(aux, Aux)


def aux_loss(aux: PyTree) -> Float[Array, ""]:
    """Return the sum of the losses of all routed layers; zero if there are none."""
    first, *further = [jnp.sum(layer.loss) for layer in aux_of(aux)] or [jnp.zeros((), jnp.float32)]
    return sum(further, start=first)
