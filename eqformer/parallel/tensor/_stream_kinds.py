"""The three kinds of residual stream, by the names that a user gives: replicated, sequence and feature."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from ._collective_matmul import Overlap
from ._feature import FEATURE_DIMS, split_features
from ._residual_stream import FeatureDropout, ResidualStream, SplitLayer, StreamKind, TokensDropout, TokensPositions
from ._tensor import HEAD_DIMS, shares_kv_heads, TensorParallelLayer, TensorParallelMixer
from ._vocabulary import FeatureEmbedding, SplitEmbedding


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
        is_norm = lambda node: isinstance(node, nn.Norm)
        split = lambda node: self.split_norm(node) if is_norm(node) else node
        inner, shares_heads = jax.tree.map(split, module, is_leaf=is_norm), shares_kv_heads(shapes)
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
