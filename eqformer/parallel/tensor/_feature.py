"""The `feature` residual stream: every activation is split over its features, every map ends in a reduce-scatter.

JAXformer's division: a map holds a slice of what it contracts, so that its products are partial sums of all outputs,
which are reduced and scattered over the outputs' first dim. Nothing is ever gathered but attention's few shared keys.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from ..layouts._layout import dim_over
from ..state._gather import gather_module
from ._collective_matmul import matmul_reduce_scatter
from ._residual_stream import FeatureDropout, ResidualStream, Sublayer
from ._tensor import SequenceStream, shares_kv_heads
from ._vocabulary import FeatureEmbedding


# The dims of activations that are split; `rope_dim` stays whole, since all heads read the one rotated key.
FEATURE_DIMS = ("embed", "heads", "kv_heads", "mlp", "latent", "q_latent")


class FeatureLinear(nn.LinearWrapper):
    """A map of which this device holds a slice of the inputs; it returns a slice of the outputs' first dim, or all.

    `split_outputs` has for each of its arrays the dim, counted from the end, along which it is split by outputs. Such
    an array is gathered, since partial sums are of all outputs. It is None for others, and for the bias, which is added
    to a slice of the sums.
    """

    scatters: bool = eqx.field(static=True)
    overlap: str = eqx.field(static=True, default="none")
    split_outputs: tuple[int | None, ...] | None = eqx.field(static=True, default=None)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Contract the slices, add them up over the devices, and keep this device's outputs."""
        linear = self.inner if self.split_outputs is None else gather_module(self.inner, self.split_outputs)
        outputs = linear.output_shape
        if not self.scatters:
            y = send.psum("whole maps of features", linear.product(x, dtype), TENSOR)
        else:
            flat = x.reshape(*x.shape[: x.ndim - len(linear.inputs)], -1)
            weight, name = linear.flat_matrix(x.dtype), "maps of features"
            how: Any = {"overlap": self.overlap, "products": self.products, "name": name}
            y = matmul_reduce_scatter(flat, weight, TENSOR, scatter="outputs", **how)
            y = y.reshape(*y.shape[:-1], -1, *outputs[1:])
        return checkpoint_name(y, "product")  # for remat policies that keep it, so that it is not reduced again


class FeatureKeyHead(nn.LinearWrapper):
    """A map to all key heads, of which the one that this device's query heads share is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one head's map."""
        return (1, *self.inner.shape[1:])

    @property
    def bias(self) -> None:
        """None: the inner map adds it."""

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The inner map's result for all heads, of which this device's is kept."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)


class FeatureStream(ResidualStream):
    """Each device has some of the features of every token."""

    dim: ClassVar[int | None] = -1
    split_dims: ClassVar[tuple[str, ...]] = FEATURE_DIMS

    @property
    def routed(self) -> ResidualStream:
        """By tokens, since a router reads all features of a token."""
        return SequenceStream()

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """From all tokens with some features to some tokens with all, by an all-to-all."""
        return send.all_to_all("features to tokens", x, TENSOR, -2, -1)

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """From some tokens with all features to all tokens with some, by an all-to-all."""
        return send.all_to_all("tokens to features", y, TENSOR, -1, -2)

    def layer(self, module: Sublayer, shapes: PyTree, specs: PyTree, names: PyTree) -> eqx.Module:
        """The layer whose every map reduces and scatters; key heads that the axis does not divide are summed whole."""

        def feature(part: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
            if not nn.is_map(part):
                return self.norm(part) if isinstance(part, nn.Norm) else part
            if not set(part.inputs) & set(FEATURE_DIMS):  # inputs are whole here, outputs a slice
                return part
            return FeatureLinear(part, _scatters(shape), self.overlap, _split_outputs(part, spec, name))

        is_part = lambda node: nn.is_map(node) or isinstance(node, nn.Norm)
        module = jax.tree.map(feature, module, shapes, specs, names, is_leaf=is_part)
        if not shares_kv_heads(shapes):
            return module
        is_map = lambda node: isinstance(node, nn.LinearMap)
        own = lambda node: FeatureKeyHead(node) if is_map(node) and node.outputs[0] == "kv_heads" else node
        return jax.tree.map(own, module, is_leaf=is_map)

    def dropout(self, dropout: nn.Dropout) -> FeatureDropout:
        """Its features' part of each token's mask."""
        return FeatureDropout(dropout)

    def positions(self, positions: nn.LearnedPositions) -> nn.LearnedPositions:
        """The positions themselves, of which it holds its features."""
        return positions

    def embedding(
        self, embedding: nn.Embedding, own_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """The lookup of this device's features of all ids; tied logits are made by the rows of its own ids."""
        return FeatureEmbedding(embedding, own_table() if is_tied else embedding.weight)


def _scatters(linear: nn.LinearMap) -> bool:
    return linear.outputs[0] in FEATURE_DIMS and linear.output_shape[0] % jax.lax.axis_size(TENSOR) == 0


def _split_outputs(linear: nn.LinearMap, specs: PyTree, names: PyTree) -> tuple[int | None, ...] | None:
    """`FeatureLinear.split_outputs`: for each array but the bias its dim of outputs that `tensor` splits, or None.

    None for a map without such an array, in whose place a pipeline may put a stand-in that has others.
    """

    def of_outputs(x: Array, spec: PartitionSpec, names: str) -> int | None:
        dim, each = dim_over(spec, TENSOR), names.split()
        return None if x is linear.bias or dim is None or each[dim] not in linear.outputs else dim - len(each)

    columns = map(jax.tree.structure(linear).flatten_up_to, (linear, specs, names))
    found = tuple(of_outputs(*row) for row in zip(*columns, strict=True) if eqx.is_array(row[0]))
    return None if all(dim is None for dim in found) else found
