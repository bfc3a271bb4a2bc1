"""Per array of a model: how a plan shards it and its gradient, and in which dtypes it is used and sent."""

import dataclasses
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from .. import nn
from ._layout import axes_of, dim_over
from ._mesh import FSDP, TENSOR
from .tensor._residual_stream import ResidualStream
from .tensor._tensor import is_split, stream_maps, token_maps
from .tensor._vocabulary import logits_parts


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Sharding of an array and of its gradient, and the axes over which a device's gradient is a partial sum."""

    spec: PartitionSpec | None
    """Spec of the array; None if the leaf is no array."""
    state_spec: PartitionSpec | None
    """Spec of the gradient and of the optimizer state."""
    partial: tuple[str, ...]
    """Axes over which a device's gradient is a partial sum."""
    dtype: str
    """Dtype in which the array is used; empty for random keys."""
    sent: str = ""
    """Dtype in which the array is gathered: `dtype`, or for vocabulary tables the narrower one of matmuls."""

    @property
    def fsdp_dim(self) -> int | None:
        """Dim that the state, or also the array, is split on over the axis `fsdp`."""
        return dim_over(self.state_spec, FSDP)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes of `partial` over which the gradient is summed where it is not also split."""
        return tuple(axis for axis in self.partial if axis != FSDP or self.fsdp_dim is None)


def make_leaves(
    model: nn.LanguageModel, specs: PyTree, state_specs: PyTree, axes: tuple[str, ...], stream: ResidualStream | None
) -> PyTree:
    """Return a tree like `model` with a `Leaf` for each of its leaves.

    `axes` are those that split the batch's tokens; `stream=None`: nothing is split over `tensor`.
    """
    structure = jax.tree.structure(model)
    partial_flags = structure.flatten_up_to(_has_partial_gradient(model, stream))
    matrices = structure.flatten_up_to(nn.matrices(model))
    wide_flags = structure.flatten_up_to(_is_used_before_cast(model))

    def leaf_of(
        x: PyTree,
        spec: PartitionSpec | None,
        state_spec: PartitionSpec | None,
        is_partial: bool,
        matrix: nn.Matrix | None,
        is_wide: bool,
    ) -> Leaf:
        if spec is None:
            return Leaf(None, None, (), "")
        state_spec = state_spec if nn.is_trainable(x) else spec  # An array that is not trained has no state.
        gradient_axes = axes + (TENSOR,) * is_partial
        dtype = sent = "" if jnp.issubdtype(x.dtype, jax.dtypes.extended) else str(x.dtype)
        if matrix is not None and not is_wide:
            sent = narrower_dtype(model.compute_dtype, dtype) if matrix.table else model.compute_dtype
            dtype = dtype if matrix.table else sent
        return Leaf(spec, state_spec, tuple(axis for axis in gradient_axes if axis not in axes_of(spec)), dtype, sent)

    arrays, *spec_columns = jax.tree.leaves(model), *map(structure.flatten_up_to, (specs, state_specs))
    rows = zip(arrays, *spec_columns, partial_flags, matrices, wide_flags, strict=True)
    return jax.tree.unflatten(structure, [leaf_of(*row) for row in rows])


def narrower_dtype(compute_dtype: str, dtype: str) -> str:
    """Return the compute dtype where it has fewer bytes than a parameter's dtype, else the parameter's."""
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(compute_dtype).itemsize < jnp.dtype(dtype).itemsize
    return compute_dtype if is_narrower else dtype


def _is_used_before_cast(model: nn.LanguageModel) -> PyTree:
    """Flag arrays that are used before anything is cast to the compute dtype, so that they must be sent as they are.

    Routers are computed in float32, vectors of positions are added and those of tokens scaled before they are cast.
    """

    def is_wide(node: object) -> bool:
        if isinstance(node, nn.EmbeddingTable):
            return node.has_transform
        return isinstance(node, nn.Router | nn.PositionEmbedding | eqx.nn.Embedding)

    return jax.tree.map(lambda node: _flag_all(node, is_wide(node)), model, is_leaf=is_wide)


def _has_partial_gradient(model: nn.LanguageModel, stream: ResidualStream | None) -> PyTree:
    """Flag arrays that are replicated over `tensor` and used with split activations, so their gradients are partial.

    With a replicated stream these are the arrays within mixers, feed-forward layers and experts, except for biases that
    are added after the reduction, and tables at the ends, of which each device uses a part. The arrays of layers from
    outside this package that name the stream's dim, or none, may be used with either, and JAX's types tell where
    gradients are summed.
    """
    if stream is None or not stream.is_whole:
        return _flag_all(model, stream is not None)

    layers = (nn.Mixer, nn.FeedForward, nn.Experts, nn.ScoreBias)

    def flag_layer(node: PyTree) -> PyTree:
        is_partial = isinstance(node, layers) and (is_split(node) or not isinstance(node, nn.FeedForward))
        flags = _flag_all(node, is_partial)
        if not is_split(node):
            return flags
        flags = jax.tree.map(operator.and_, flags, _names_split_dims(node))
        flags = eqx.tree_at(token_maps, flags, _flag_all(token_maps(flags), False))
        return eqx.tree_at(_output_biases, flags, [False] * len(_output_biases(flags)))

    flags = jax.tree.map(flag_layer, model, is_leaf=lambda node: isinstance(node, layers))
    return eqx.tree_at(_vocabulary_tables, flags, _flag_all(_vocabulary_tables(model), True))


def _output_biases(layer: PyTree) -> list[PyTree]:
    """Return the biases of the maps back into the stream."""
    return [linear.bias for linear in stream_maps(layer, "outputs") if linear.bias is not None]


def _vocabulary_tables(model: nn.LanguageModel) -> list[PyTree]:
    """Return the tables at the ends of a model, and of its encoder: each device uses a part of them."""
    encoder = model.parts.encoder
    source_embedding = None if encoder is None else encoder.embedding
    tables = [embedding.weight for embedding in (model.embedding, source_embedding) if embedding is not None]
    return [*tables, *logits_parts(model)]


def _names_split_dims(layer: PyTree) -> PyTree:
    """Flag arrays that are a map's, or have names of dims of which none is the stream's."""

    def flag(node: PyTree, names: PyTree) -> PyTree:
        return _flag_all(node, True) if nn.is_map(node) else bool(names) and "embed" not in names

    return jax.tree.map(flag, layer, nn.field_dim_names(layer), is_leaf=nn.is_map)


def _flag_all(tree: PyTree, value: bool) -> PyTree:
    return jax.tree.map(lambda _: value, tree)
