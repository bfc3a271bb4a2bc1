"""The three kinds of residual stream, by the names that a user gives: replicated, sequence and feature.

The replicated and the sequence stream split layers over heads and hidden features (`_tensor`). The feature stream
splits every activation over features, as JAXformer does: a map holds a slice of the dim that it contracts, so each
device computes partial sums of all outputs, and a reduce-scatter over the first output dim adds them up. No activation
is gathered, except for key heads that devices share.
"""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._fully_sharded import gather_module
from .._mesh import dim_over, TENSOR
from ._collective_matmul import matmul_reduce_scatter, Overlap
from ._residual_stream import FeatureDropout, ResidualStream, SplitLayer, StreamKind, TokensDropout, TokensPositions
from ._tensor import HEAD_DIMS, shares_kv_heads, TensorParallelLayer, TensorParallelMixer
from ._vocabulary import FeatureEmbedding, SplitEmbedding


# Layers of the feature stream.

FEATURE_DIMS = ("embed", "heads", "kv_heads", "mlp", "latent", "q_latent")
"""The dims of activations that are split. `rope_dim` is not, since all heads read the single rotated key."""


class FeatureLinear(nn.LinearWrapper):
    """A map of which this device holds a slice of the inputs; it returns a slice of the outputs' first dim, or all.

    `split_outputs` has an entry for each of the map's arrays: the output dim, counted from the end, along which the
    array is split, or None. Such an array is gathered, since each device computes partial sums of all outputs. The
    entry of the bias is None, because the bias is added to the device's slice of the sums.
    """

    scatters: bool = eqx.field(static=True)
    overlap: Overlap = eqx.field(static=True, default="none")
    split_outputs: tuple[int | None, ...] | None = eqx.field(static=True, default=None)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Contract the slices, add them up over the devices, and return this device's outputs."""
        linear = self.inner if self.split_outputs is None else gather_module(self.inner, self.split_outputs)
        outputs = linear.output_shape
        if not self.scatters:
            y = send.psum("replicated feature-parallel output", linear.product(x, dtype), TENSOR)
        else:
            rows = x.reshape(*x.shape[: x.ndim - len(linear.inputs)], -1)
            y = matmul_reduce_scatter(
                rows,
                linear.flat_matrix(x.dtype),
                TENSOR,
                scatter="outputs",
                overlap=self.overlap,
                products=self.products,
                name="feature-parallel output",
            )
            y = y.reshape(*y.shape[:-1], -1, *outputs[1:])
        return checkpoint_name(y, "product")  # for remat policies that save it, so that it is not reduced again


class FeatureKeyHead(nn.LinearWrapper):
    """A map to all key heads, of which only the head that this device's query heads share is returned."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the map to one head."""
        return (1, *self.inner.shape[1:])

    @property
    def bias(self) -> None:
        """None: the inner map adds its bias."""

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return this device's head of the inner map's result for all heads."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)


def split_features(module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, stream: ResidualStream) -> PyTree:
    """Return a layer of which every map reduces and scatters, and every norm averages over devices.

    Key heads that the axis does not divide are summed on every device. `shapes`, `specs` and `names` are those of the
    unsplit layer's arrays.
    """

    def split_node(node: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        if not nn.is_map(node):
            return stream.split_norm(node) if isinstance(node, nn.Norm) else node
        if not set(node.inputs) & set(FEATURE_DIMS):  # The inputs are replicated here, and the outputs are a slice.
            return node
        return FeatureLinear(node, _scatters(shape), stream.overlap, _split_outputs(node, spec, name))

    module = jax.tree.map(split_node, module, shapes, specs, names, is_leaf=_is_map_or_norm)
    return nn.map_modules(_take_key_head, module, nn.LinearMap) if shares_kv_heads(shapes) else module


def _is_map_or_norm(node: object) -> bool:
    return nn.is_map(node) or isinstance(node, nn.Norm)


def _take_key_head(linear: nn.LinearMap) -> nn.LinearMap:
    return FeatureKeyHead(linear) if linear.outputs[0] == "kv_heads" else linear


def _scatters(linear: nn.LinearMap) -> bool:
    return linear.outputs[0] in FEATURE_DIMS and linear.output_shape[0] % jax.lax.axis_size(TENSOR) == 0


def _split_outputs(linear: nn.LinearMap, specs: PyTree, names: PyTree) -> tuple[int | None, ...] | None:
    """Return `FeatureLinear.split_outputs`: for each array but the bias its dim of outputs split by `tensor`, or None.

    Returns None for a map without such an array; a pipeline may put a wrapper with other arrays in its place.
    """

    def split_output_dim(x: Array, spec: jax.sharding.PartitionSpec, names: str) -> int | None:
        dim, dim_names = dim_over(spec, TENSOR), names.split()
        if x is linear.bias or dim is None or dim_names[dim] not in linear.outputs:
            return None
        return dim - len(dim_names)

    columns = map(jax.tree.structure(linear).flatten_up_to, (linear, specs, names))
    dims = tuple(split_output_dim(*row) for row in zip(*columns, strict=True) if eqx.is_array(row[0]))
    return None if all(dim is None for dim in dims) else dims


# The streams.


class _UnsplitFeatures(ResidualStream):
    """A stream with all features of a token: layers are split by their heads and hidden features."""

    split_dims: ClassVar[tuple[str, ...]] = HEAD_DIMS

    @property
    def routed(self) -> ResidualStream:
        """This stream."""
        return self

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return `x` unchanged."""
        return x

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return `y` unchanged."""
        return y

    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, sharers: int = 1
    ) -> eqx.Module:
        """Wrap the layer in `TensorParallelLayer`."""
        inner, shares_heads = nn.map_modules(self.split_norm, module, nn.Norm), shares_kv_heads(shapes)
        if isinstance(module, nn.Mixer):
            return TensorParallelMixer(TensorParallelLayer(inner, self, shares_heads, sharers))
        return TensorParallelLayer(inner, self, shares_heads)

    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Return the lookup in the rows of this device's ids."""
        return SplitEmbedding(eqx.tree_at(lambda e: e.weight, embedding, local_table()), total, self)


class ReplicatedStream(_UnsplitFeatures):
    """A residual stream that every device has in full."""

    dim: ClassVar[int | None] = None

    def split_dropout(self, dropout: nn.RandomMask) -> nn.RandomMask:
        """Return dropout unchanged."""
        return dropout

    def split_positions(self, positions: nn.PositionEmbedding) -> nn.PositionEmbedding:
        """Return the positions unchanged."""
        return positions


class SequenceStream(_UnsplitFeatures):
    """A residual stream split over tokens (Megatron-LM's sequence parallelism, arXiv:2205.05198)."""

    dim: ClassVar[int | None] = -2

    def split_dropout(self, dropout: nn.RandomMask) -> TokensDropout:
        """Return dropout by the keys of this device's tokens."""
        return TokensDropout(dropout)

    def split_positions(self, positions: nn.PositionEmbedding) -> TokensPositions:
        """Return the positions of this device's tokens."""
        return TokensPositions(positions)


class FeatureStream(ResidualStream):
    """A residual stream split over features: each device has some features of every token."""

    dim: ClassVar[int | None] = -1
    split_dims: ClassVar[tuple[str, ...]] = FEATURE_DIMS

    @property
    def routed(self) -> ResidualStream:
        """The stream split over tokens, since a router reads all features of a token."""
        return SequenceStream()

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert all tokens with some features to some tokens with all features, by an all-to-all."""
        return send.all_to_all("features to tokens", x, TENSOR, -2, -1)

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Convert some tokens with all features to all tokens with some features, by an all-to-all."""
        return send.all_to_all("tokens to features", y, TENSOR, -1, -2)

    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, sharers: int = 1
    ) -> eqx.Module:
        """Return the layer with maps that reduce and scatter, see `split_features`."""
        assert sharers == 1, "only serving shares key heads, with a replicated stream"
        return split_features(module, shapes, specs, names, self)

    def split_dropout(self, dropout: nn.RandomMask) -> FeatureDropout:
        """Return dropout by the slice of each token's mask for this device's features."""
        return FeatureDropout(dropout)

    def split_positions(self, positions: nn.PositionEmbedding) -> nn.PositionEmbedding:
        """Return the positions unchanged; their array holds this device's features."""
        return positions

    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Return the lookup of this device's features of all ids; tied logits use the rows of its ids."""
        return FeatureEmbedding(embedding, local_table() if is_tied else embedding.weight)


RESIDUAL_STREAMS: dict[StreamKind, type[ResidualStream]] = {
    "replicated": ReplicatedStream,
    "sequence": SequenceStream,
    "feature": FeatureStream,
}


def make_residual_stream(kind: StreamKind, overlap: Overlap = "none") -> ResidualStream:
    """Make the stream of a kind, such as `"sequence"`."""
    return RESIDUAL_STREAMS[kind](overlap)
