"""A plain model with its modules wrapped, by type, for the device that holds these slices of it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from .. import nn
from ._axes import CONTEXT, TENSOR
from ._mixture import SplitMoE
from ._vary import own_part
from .context._context import ContextCore, refuse_recurrence
from .layouts._layout import dim_over
from .state._gather import gather_parameter
from .tensor._feature import FEATURE_DIMS, FeatureKeyHead, FeatureLinear
from .tensor._norms import SplitNorm
from .tensor._tensor import HEAD_DIMS, is_split, size_of, Tensor, TensorMixer, Whole
from .tensor._vocabulary import FeatureEmbedding, HeadInput, own_rows, rows_of_features, SplitEmbedding


def replace(model: PyTree, kinds: type | tuple[type, ...], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """The model with each module of some kinds replaced by `make(module, *parts of likes)`."""
    return replace_where(model, lambda node: isinstance(node, kinds), make, *likes)


def replace_where(model: PyTree, is_kind: Callable[[Any], bool], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """The same for each module of which `is_kind` is true."""
    return jax.tree.map(lambda *nodes: make(*nodes) if is_kind(nodes[0]) else nodes[0], model, *likes, is_leaf=is_kind)


def split_over_tensor(
    model: nn.Transformer, specs: PyTree, shapes: PyTree, residual: str, overlap: str, is_branched: bool
) -> nn.Transformer:
    """The model for a device of the axis `tensor`, with a stream of kind `residual` between its layers.

    `specs` and `shapes` are those of the whole model. The arrays of the stacks stay what and where they were.
    """
    kinds = (nn.Mixer, nn.FeedForward, nn.Norm, nn.MoE)
    names = nn.dims(shapes)

    def wrap(module: PyTree, spec: PyTree, shape: PyTree, name: PyTree) -> PyTree:
        if isinstance(module, nn.Norm):
            return _split_norm(module, residual)
        if isinstance(module, nn.MoE):
            shared = replace(module.shared, kinds, wrap, spec.shared, shape.shared, name.shared)
            if residual == "feature" and isinstance(shared, nn.GatedShared):
                shared = eqx.tree_at(lambda m: m.gate, shared, FeatureLinear(shared.gate, False))
            return eqx.tree_at(lambda m: m.shared, module, shared, is_leaf=_is_none)
        if not is_split(module):
            return Whole(module, residual)
        if residual == "feature":
            return _feature_module(module, (shape, spec, name), overlap, is_branched)
        inner = replace(module, nn.Norm, lambda norm: _split_norm(norm, residual))
        tensor = Tensor(inner, residual, overlap, is_branched, shares_kv_heads(shape))
        return TensorMixer(tensor) if isinstance(module, nn.Mixer) else tensor

    whole = model
    model = replace(model, kinds, wrap, specs, shapes, names)
    if residual == "feature":
        model = replace(model, nn.Dropout, FeatureDropout)
    if residual == "sequence":
        model = replace(model, nn.Dropout, TokensDropout)
        model = replace(model, nn.LearnedPositions, TokensPositions)
    model = eqx.tree_at(lambda m: m.norm, model, HeadInput(model.norm, residual))
    embedding, head = _split_vocabulary(whole, specs, names, residual, shapes.vocab)
    model = eqx.tree_at(lambda m: m.embedding, model, embedding)
    return model if head is None else eqx.tree_at(lambda m: m.head, model, head)


def shares_kv_heads(shapes: PyTree) -> bool:
    """Whether a mixer's key heads are held whole while its other heads are split."""
    kv_heads = size_of(shapes, "kv_heads")
    return kv_heads is not None and kv_heads % jax.lax.axis_size(TENSOR) != 0


def split_over_context(model: PyTree, method: str, is_branched: bool) -> PyTree:
    """The model with every attention's core replaced by one for pieces of rows; refuses recurrences over them."""

    def split(module: Any) -> Any:
        if module.facts().attends is None:
            refuse_recurrence(jax.lax.axis_size(CONTEXT), "the model", module)
        return eqx.tree_at(lambda m: m.core, module, ContextCore(module.core, method, is_branched))

    is_bare = lambda node: isinstance(node, nn.Mixer) and not isinstance(node, TensorMixer | Whole)
    return replace_where(model, is_bare, split)


def split_mixtures(model: PyTree, method: str, factor: float, residual: str | None) -> PyTree:
    """The model with every mixture of experts replaced by one for the experts, and tokens, that this device holds."""
    return replace(model, nn.MoE, lambda moe: SplitMoE(moe, method, factor, residual))


class TokensDropout(eqx.Module):
    """Dropout of this device's tokens, with their own keys out of all tokens' keys."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch full_seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop channels of this device's tokens."""
        return self.inner(x, None if keys is None else own_part(keys, TENSOR, -1))


class FeatureDropout(eqx.Module):
    """Dropout of this device's features: its slice of the mask of all features."""

    inner: nn.Dropout

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Drop this device's channels of each token."""
        if keys is None or self.inner.rate == 0:
            return x
        whole = jnp.ones((*x.shape[:-1], x.shape[-1] * jax.lax.axis_size(TENSOR)), x.dtype)
        is_kept = own_part(self.inner(whole, keys), TENSOR, -1) != 0
        return jnp.where(is_kept, x / (1 - self.inner.rate), jnp.zeros_like(x))


class TokensPositions(eqx.Module):
    """Learned positions of this device's tokens."""

    inner: nn.LearnedPositions

    def __call__(self, positions: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vectors of this device's tokens."""
        return self.inner(own_part(positions, TENSOR, -1))


def _split_norm(norm: nn.Norm, residual: str) -> PyTree:
    # By the names of its dims, since a norm need not have an array to lay out. Key heads that devices share are each
    # held by equally many, so that there too the mean of the devices' means is the mean.
    split = FEATURE_DIMS if residual == "feature" else HEAD_DIMS
    return SplitNorm(norm, TENSOR) if set(norm.reduced) & set(split) else norm


def _feature_module(module: PyTree, likes: tuple[PyTree, PyTree, PyTree], overlap: str, is_branched: bool) -> PyTree:
    """A layer whose every map reduces and scatters; key heads that the axis does not divide are summed whole.

    `likes` are its shapes, specs and names of dims.
    """

    def feature(part: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        if not nn.is_map(part):
            return _split_norm(part, "feature")
        if not set(part.inputs) & set(FEATURE_DIMS):  # whole on each device, which has the outputs' slice
            return part
        return FeatureLinear(part, _scatters(shape), overlap, is_branched, _split_outputs(part, spec, name))

    is_part = lambda node: nn.is_map(node) or isinstance(node, nn.Norm)
    one = lambda part, *like: feature(part, *like) if is_part(part) else part
    module = jax.tree.map(one, module, *likes, is_leaf=is_part)
    if not shares_kv_heads(likes[0]):
        return module
    own = lambda linear: FeatureKeyHead(linear) if linear.outputs[0] == "kv_heads" else linear
    return replace(module, nn.LinearMap, own)


def _scatters(linear: nn.LinearMap) -> bool:
    return linear.outputs[0] in FEATURE_DIMS and linear.output_shape[0] % jax.lax.axis_size(TENSOR) == 0


def _split_outputs(linear: nn.LinearMap, specs: PyTree, names: PyTree) -> tuple[int | None, ...]:
    """For each array the dim, from the end, by which it is a slice of the map's outputs over the axis `tensor`."""

    def of_outputs(spec: PartitionSpec, names: str) -> int | None:
        dim, each = dim_over(spec, TENSOR), names.split()
        return None if dim is None or each[dim] not in linear.outputs else dim - len(each)

    columns = map(jax.tree.structure(linear).flatten_up_to, (linear, specs, names))
    return tuple(of_outputs(spec, name) for x, spec, name in zip(*columns, strict=True) if eqx.is_array(x))


def _split_vocabulary(
    model: nn.Transformer, specs: PyTree, names: PyTree, residual: str, vocab: int
) -> tuple[SplitEmbedding | FeatureEmbedding, nn.LinearMap | None]:
    """The embedding and the head of which each device holds the rows of its own ids."""

    def rows(table: Any, spec: PartitionSpec, names: str) -> Any:
        dims, split = names.split(), dim_over(spec, TENSOR)
        if "vocab" not in dims:  # a factor of the head, which is given whole features
            return table if split is None else gather_parameter(table, split)
        ids = dims.index("vocab")
        if split is None:
            return own_rows(table, ids)
        return table if split == ids else rows_of_features(table, ids, split)

    embedding, head = model.embedding, model.head
    own_table = lambda: rows(embedding.weight, specs.embedding.weight, names.embedding.weight)
    head = None if head is None else jax.tree.map(rows, head, specs.head, names.head)
    if residual == "feature":
        return FeatureEmbedding(embedding, own_table() if head is None else embedding.weight), head
    return SplitEmbedding(own_table(), embedding.scale, vocab, residual), head


def _is_none(node: Any) -> bool:
    return node is None
