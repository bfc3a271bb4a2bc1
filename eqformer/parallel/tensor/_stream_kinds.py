"""The three kinds of residual stream: replicated, sequence and feature.

With the replicated and the sequence stream, layers are split over heads and hidden features (`_tensor`). With the
feature stream, every activation is split over features, as in JAXformer. Each map holds a slice of the dim that it
contracts: each device computes partial sums of all outputs, and a reduce-scatter over the first output dim adds them.
No activation is gathered, except for key heads that devices share.
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
"""Dims of activations that are split. `rope_dim` is not split, because all heads read the single rotated key."""


class FeatureLinear(nn.LinearWrapper):
    """Wrapper of a linear map whose inputs are split: this device holds the weights of a slice of the inputs."""

    scatters: bool = eqx.field(static=True)
    """Whether the result is this device's slice of the first output dim; otherwise the result has all outputs."""
    overlap: Overlap = eqx.field(static=True, default="none")
    split_outputs: tuple[int | None, ...] | None = eqx.field(static=True, default=None)
    """For each array of the map, the output dim along which the array is split, counted from the end, or None.

    Arrays that are split along an output dim are gathered, because each device computes partial sums of all outputs.
    The entry of the bias is None, because the bias is added to the device's slice of the sums.
    """

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the product summed over devices: this device's slice if `scatters`, else all outputs."""
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
        return checkpoint_name(y, "product")  # If a remat policy saves `y`, recomputation needs no second reduction.


class FeatureKeyHead(nn.LinearWrapper):
    """Wrapper of a map to all key heads that returns only the key head of this device's query heads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the map to one head."""
        return (1, *self.inner.shape[1:])

    @property
    def bias(self) -> None:
        """None: the inner map adds its bias."""

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return this device's key head from the inner map's result for all key heads."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)


def split_features(module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, stream: ResidualStream) -> PyTree:
    """Wrap the maps and norms of a layer to run on slices of features.

    Every map reduces its result over devices and, if possible, scatters it; every norm averages over devices. If the
    axis does not divide the key heads, every device computes all key heads and keeps one head. `shapes`, `specs` and
    `names` describe the arrays of the unsplit layer.
    """

    def split_node(node: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        if not nn.is_map(node):
            return stream.split_norm(node) if isinstance(node, nn.Norm) else node
        if not set(node.inputs) & set(FEATURE_DIMS):  # The map's inputs are replicated, and its outputs are a slice.
            return node
        return FeatureLinear(node, _scatters(shape), stream.overlap, _split_outputs(node, spec, name))

    module = jax.tree.map(split_node, module, shapes, specs, names, is_leaf=_is_map_or_norm)
    return nn.map_modules(_take_key_head, module, nn.LinearMap) if shares_kv_heads(shapes) else module


def _is_map_or_norm(node: object) -> bool:
    return nn.is_map(node) or isinstance(node, nn.Norm)


def _take_key_head(linear: nn.LinearMap) -> nn.LinearMap:
    """Wrap a map to key heads in `FeatureKeyHead`; return other maps unchanged."""
    return FeatureKeyHead(linear) if linear.outputs[0] == "kv_heads" else linear


def _scatters(linear: nn.LinearMap) -> bool:
    """Return whether devices can split the first output dim of a map."""
    return linear.outputs[0] in FEATURE_DIMS and linear.output_shape[0] % jax.lax.axis_size(TENSOR) == 0


def _split_outputs(linear: nn.LinearMap, specs: PyTree, names: PyTree) -> tuple[int | None, ...] | None:
    """Return the `split_outputs` of a map's `FeatureLinear`, or None if no array but the bias is split along outputs.

    A pipeline may later replace the map by a wrapper with more arrays. A tuple has an entry for each array and would
    then not fit; None fits any number of arrays.
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
    """Stream with all features of each token; layers are split over heads and hidden features."""

    split_dims: ClassVar[tuple[str, ...]] = HEAD_DIMS

    @property
    def routed(self) -> ResidualStream:
        """Stream that routers and experts read: this stream."""
        return self

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return `x` unchanged."""
        return x

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return `y` unchanged."""
        return y

    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, kv_row_shards: int = 1
    ) -> eqx.Module:
        """Wrap the layer in `TensorParallelLayer`."""
        inner, shares_heads = nn.map_modules(self.split_norm, module, nn.Norm), shares_kv_heads(shapes)
        if isinstance(module, nn.Mixer):
            return TensorParallelMixer(TensorParallelLayer(inner, self, shares_heads, kv_row_shards))
        return TensorParallelLayer(inner, self, shares_heads)

    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Wrap the embedding to look up the ids of this device's rows."""
        return SplitEmbedding(eqx.tree_at(lambda e: e.weight, embedding, local_table()), total, self)


class ReplicatedStream(_UnsplitFeatures):
    """Residual stream that every device has in full."""

    dim: ClassVar[int | None] = None

    def split_dropout(self, dropout: nn.RandomMask) -> nn.RandomMask:
        """Return dropout unchanged."""
        return dropout

    def split_positions(self, positions: nn.PositionEmbedding) -> nn.PositionEmbedding:
        """Return the positions unchanged."""
        return positions


class SequenceStream(_UnsplitFeatures):
    """Residual stream split over tokens (Megatron-LM's sequence parallelism, arXiv:2205.05198)."""

    dim: ClassVar[int | None] = -2

    def split_dropout(self, dropout: nn.RandomMask) -> TokensDropout:
        """Wrap dropout to use the keys of this device's tokens."""
        return TokensDropout(dropout)

    def split_positions(self, positions: nn.PositionEmbedding) -> TokensPositions:
        """Wrap learned positions to look up the positions of this device's tokens."""
        return TokensPositions(positions)


class FeatureStream(ResidualStream):
    """Residual stream split over features: each device has some features of every token."""

    dim: ClassVar[int | None] = -1
    split_dims: ClassVar[tuple[str, ...]] = FEATURE_DIMS

    @property
    def routed(self) -> ResidualStream:
        """Stream that routers and experts read: split over tokens, because a router reads all features of a token."""
        return SequenceStream()

    def to_routed(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Reshard from all tokens with some features to some tokens with all features, by an all-to-all."""
        return send.all_to_all("features to tokens", x, TENSOR, -2, -1)

    def from_routed(self, y: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Reshard from some tokens with all features to all tokens with some features, by an all-to-all."""
        return send.all_to_all("tokens to features", y, TENSOR, -1, -2)

    def split_layer(
        self, module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, kv_row_shards: int = 1
    ) -> eqx.Module:
        """Wrap the layer's maps and norms, see `split_features`."""
        assert kv_row_shards == 1, "devices split caches by rows only in serving, where the stream is replicated"
        return split_features(module, shapes, specs, names, self)

    def split_dropout(self, dropout: nn.RandomMask) -> FeatureDropout:
        """Wrap dropout to use the mask's slice of this device's features."""
        return FeatureDropout(dropout)

    def split_positions(self, positions: nn.PositionEmbedding) -> nn.PositionEmbedding:
        """Return the positions unchanged; their array holds this device's features."""
        return positions

    def split_embedding(
        self, embedding: nn.TokenEmbedding, local_table: Callable[[], Array], total: int, *, is_tied: bool
    ) -> eqx.Module:
        """Wrap the embedding to look up this device's features of all ids; tied logits read this device's rows."""
        return FeatureEmbedding(embedding, local_table() if is_tied else embedding.weight)


RESIDUAL_STREAMS: dict[StreamKind, type[ResidualStream]] = {
    "replicated": ReplicatedStream,
    "sequence": SequenceStream,
    "feature": FeatureStream,
}


def make_residual_stream(kind: StreamKind, overlap: Overlap = "none") -> ResidualStream:
    """Make a residual stream of a kind: `"replicated"`, `"sequence"` or `"feature"`."""
    return RESIDUAL_STREAMS[kind](overlap)
