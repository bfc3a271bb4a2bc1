"""What a plan decides of each array of a model."""

import dataclasses
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ... import nn
from .._axes import FSDP, TENSOR
from ..layouts._layout import axes_of, dim_over
from ..tensor._residual_stream import ResidualStream
from ..tensor._tensor import is_split, stream_maps, token_maps


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How an array is sharded, how its gradient is, and over which axes a device's gradient is a partial sum."""

    spec: PartitionSpec | None  # None: no array
    state_spec: PartitionSpec | None
    partial: tuple[str, ...]
    dtype: str  # in which it is used; none of random keys
    sent: str = ""  # in which it is gathered: `dtype`, or of tables of the vocabulary the narrower one of products

    @property
    def fsdp_dim(self) -> int | None:
        """The dim that the state, or also the array, is split on over the axis `fsdp`."""
        return dim_over(self.state_spec, FSDP)

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes of `partial` over which the gradient is summed where it is not also split."""
        return tuple(axis for axis in self.partial if axis != FSDP or self.fsdp_dim is None)


def leaves_of(
    model: nn.Transformer, specs: PyTree, state_specs: PyTree, axes: tuple[str, ...], stream: ResidualStream | None
) -> PyTree:
    """A tree like `model` with a `Leaf` for each of its leaves.

    `axes` are those that split the batch's tokens; `stream=None`: nothing is split over `tensor`.
    """
    structure = jax.tree.structure(model)
    marks = structure.flatten_up_to(_in_slices(model, stream))
    matrices = structure.flatten_up_to(nn.matrices(model))
    wide = structure.flatten_up_to(_in_what_is_wide(model))

    def leaf(
        x: PyTree,
        spec: PartitionSpec | None,
        state_spec: PartitionSpec | None,
        in_slices: bool,
        matrix: nn.Matrix | None,
        is_wide: bool,
    ) -> Leaf:
        if spec is None:
            return Leaf(None, None, (), "")
        state_spec = state_spec if nn.is_trainable(x) else spec  # a number that is not trained has no state
        over = axes + (TENSOR,) * in_slices
        dtype = sent = "" if jnp.issubdtype(x.dtype, jax.dtypes.extended) else str(x.dtype)
        if matrix is not None and not is_wide:
            sent = narrower(model.compute_dtype, dtype) if matrix.table else model.compute_dtype
            dtype = dtype if matrix.table else sent
        return Leaf(spec, state_spec, tuple(axis for axis in over if axis not in axes_of(spec)), dtype, sent)

    columns = jax.tree.leaves(model), *map(structure.flatten_up_to, (specs, state_specs)), marks, matrices, wide
    return jax.tree.unflatten(structure, [leaf(*row) for row in zip(*columns, strict=True)])


def narrower(compute: str, dtype: str) -> str:
    """The compute dtype where that has fewer bytes than a parameter's."""
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(compute).itemsize < jnp.dtype(dtype).itemsize
    return compute if is_narrower else dtype


def _in_what_is_wide(model: nn.Transformer) -> PyTree:
    """Whether an array is used before anything is cast to the compute dtype, so that it must cross as it is.

    Routers are computed in float32, vectors of positions are added and those of tokens scaled before they are cast.
    """

    def is_wide(node: object) -> bool:
        is_scaled = isinstance(node, nn.Embedding | nn.LayerEmbedding) and node.scale is not None
        return is_scaled or isinstance(node, nn.Router | nn.LearnedPositions | eqx.nn.Embedding)

    return jax.tree.map(lambda node: _everywhere(node, is_wide(node)), model, is_leaf=is_wide)


def _in_slices(model: nn.Transformer, stream: ResidualStream | None) -> PyTree:
    """Whether an array that is replicated over `tensor` is used with split activations, so its gradient is partial.

    With a replicated stream these are the arrays within mixers, feed-forward layers and experts, except for biases that
    are added after the reduction, and tables at the ends, of which each device uses a part. Those of
    one's own that name the stream's dim, or none, may meet either, and JAX's types say where gradients are summed.
    """
    if stream is None or not stream.is_whole:
        return _everywhere(model, stream is not None)

    def mark(node: PyTree) -> PyTree:
        marks = _everywhere(node, is_split(node) or isinstance(node, nn.Mixer | nn.Experts | nn.ScoreBias))
        if not is_split(node):
            return marks
        marks = jax.tree.map(operator.and_, marks, _names_a_slice(node))
        marks = eqx.tree_at(token_maps, marks, _everywhere(token_maps(marks), False))
        biases = lambda m: [linear.bias for linear in stream_maps(m, "outputs") if linear.bias is not None]
        return eqx.tree_at(biases, marks, [False] * len(biases(marks)))

    layers = (nn.Mixer, nn.FeedForward, nn.Experts, nn.ScoreBias)
    marks = jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, layers))
    has_table = model.encoder is not None and model.encoder.embedding is not None
    of_encoder = lambda m: (m.encoder.embedding,) if has_table else ()
    ends = lambda m: (m.embedding, m.head, m.logit_bias, *of_encoder(m))
    return eqx.tree_at(ends, marks, _everywhere(ends(model), True), is_leaf=lambda node: node is None)


def _names_a_slice(layer: PyTree) -> PyTree:
    """Whether an array is a map's, or has names of dims of which none is the stream's."""
    names = jax.tree.map(lambda names: bool(names) and "embed" not in names, nn.field_dim_names(layer))
    of = lambda node, named: _everywhere(node, True) if nn.is_map(node) else named
    return jax.tree.map(of, layer, names, is_leaf=nn.is_map)


def _everywhere(tree: PyTree, value: bool) -> PyTree:
    return jax.tree.map(lambda _: value, tree)
