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
from .layouts._layout import axes_of, dim_over
from .state._gather import gather_parameter
from .tensor._feature import FEATURE_DIMS, FeatureKeyHead, FeatureLinear
from .tensor._norms import reduced_dims, SplitNorm
from .tensor._tensor import HEAD_DIMS, MIXERS, Tensor, TENSOR_MODULES, TensorMixer
from .tensor._vocabulary import FeatureEmbedding, HeadInput, own_rows, rows_of_features, SplitEmbedding


def replace(model: PyTree, kinds: type | tuple[type, ...], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """The model with each module of some kinds replaced by `make(module, *parts of likes)`."""
    is_kind = lambda node: isinstance(node, kinds)
    return jax.tree.map(lambda *nodes: make(*nodes) if is_kind(nodes[0]) else nodes[0], model, *likes, is_leaf=is_kind)


def split_over_tensor(
    model: nn.Transformer, specs: PyTree, shapes: PyTree, residual: str, overlap: str, is_branched: bool
) -> nn.Transformer:
    """The model for a device of the axis `tensor`, with a stream of kind `residual` between its layers.

    `specs` and `shapes` are those of the whole model. The arrays of the stacks stay what and where they were.
    """
    norms = (nn.RMSNorm, nn.LayerNorm)
    kinds = (*TENSOR_MODULES, *norms, nn.MoE)

    def wrap(module: PyTree, spec: PyTree, shape: PyTree) -> PyTree:
        if isinstance(module, norms):
            return _split_norm(module, residual)
        if isinstance(module, nn.MoE):
            shared = replace(module.shared, kinds, wrap, spec.shared, shape.shared)
            if residual == "feature" and isinstance(shared, nn.GatedShared):
                shared = eqx.tree_at(lambda m: m.gate, shared, FeatureLinear(shared.gate, False))
            return eqx.tree_at(lambda m: m.shared, module, shared, is_leaf=_is_none)
        if residual == "feature":
            return _feature_module(module, shape, overlap, is_branched)
        inner = replace(module, norms, lambda norm: _split_norm(norm, residual))
        tensor = Tensor(inner, residual, overlap, is_branched, shares_kv_heads(module, spec))
        return TensorMixer(tensor) if isinstance(module, nn.Mixer) else tensor

    whole = model
    model = replace(model, kinds, wrap, specs, shapes)
    if residual == "feature":
        model = replace(model, nn.Dropout, FeatureDropout)
    if residual == "sequence":
        model = replace(model, nn.Dropout, TokensDropout)
        model = replace(model, nn.LearnedPositions, TokensPositions)
    model = eqx.tree_at(lambda m: m.norm, model, HeadInput(model.norm, residual))
    embedding, head = _split_vocabulary(whole, specs, residual, shapes.vocab)
    model = eqx.tree_at(lambda m: m.embedding, model, embedding)
    return model if head is None else eqx.tree_at(lambda m: m.head, model, head)


def shares_kv_heads(module: PyTree, specs: PyTree) -> bool:
    """Whether a mixer's key heads are held whole while its other heads are split."""
    return isinstance(module, nn.Attention | nn.GatedDeltaNet) and TENSOR not in axes_of(specs.key.weight)


def split_over_context(model: PyTree, method: str, is_branched: bool) -> PyTree:
    """The model with every attention's core replaced by one for pieces of rows; refuses recurrences over them."""

    def split(module: PyTree) -> PyTree:
        if isinstance(module, nn.GatedDeltaNet):
            refuse_recurrence(jax.lax.axis_size(CONTEXT), "the model")
        return eqx.tree_at(lambda m: m.core, module, ContextCore(module.core, method, is_branched))

    return replace(model, MIXERS, split)


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


def _split_norm(norm: nn.RMSNorm | nn.LayerNorm, residual: str) -> PyTree:
    # By the names of its dims, since a norm need not have an array to lay out. Key heads that devices share are each
    # held by equally many, so that there too the mean of the devices' means is the mean.
    split = FEATURE_DIMS if residual == "feature" else HEAD_DIMS
    return SplitNorm(norm, TENSOR) if set(reduced_dims(norm)) & set(split) else norm


def _feature_module(module: PyTree, shapes: PyTree, overlap: str, is_branched: bool) -> PyTree:
    """A layer whose every map reduces and scatters; key heads that the axis does not divide are summed whole."""

    def feature(part: PyTree, shape: PyTree) -> PyTree:
        if not isinstance(part, nn.Linear):
            return _split_norm(part, "feature")
        if part.inputs == ("rank",):  # whole on each device, which has the outputs' slice
            return part
        return FeatureLinear(part, _scatters(shape), overlap, is_branched)

    module = replace(module, (nn.Linear, nn.RMSNorm, nn.LayerNorm), feature, shapes)
    if not isinstance(module, nn.Attention):
        return module
    key = module.key.linear if isinstance(module.key, nn.LoRA) else module.key
    if key.scatters:  # type: ignore[attr-defined]
        return module
    heads = FeatureKeyHead(module.key), FeatureKeyHead(module.value)
    return eqx.tree_at(lambda m: (m.key, m.value), module, heads)


def _scatters(linear: nn.Linear) -> bool:
    size = linear.weight.shape[linear.weight.ndim - len(linear.weight_dims)]
    return linear.outputs[0] in FEATURE_DIMS and size % jax.lax.axis_size(TENSOR) == 0


def _split_vocabulary(
    model: nn.Transformer, specs: PyTree, residual: str, vocab: int
) -> tuple[SplitEmbedding | FeatureEmbedding, nn.Linear | nn.LoRA | None]:
    """The embedding and the head of which each device holds the rows of its own ids."""
    embedding, head = model.embedding, model.head

    def rows(table: Array, spec: PartitionSpec) -> Array:
        if dim_over(spec, TENSOR) == 1:
            return rows_of_features(table)
        return table if TENSOR in axes_of(spec) else own_rows(table)

    def of_own_ids(linear: nn.Linear, specs: PyTree) -> nn.Linear:
        linear = eqx.tree_at(lambda m: m.weight, linear, rows(linear.weight, specs.weight))
        if linear.bias is None or TENSOR in axes_of(specs.bias):
            return linear
        return eqx.tree_at(lambda m: m.bias, linear, own_rows(linear.bias))

    if isinstance(head, nn.LoRA):
        down, is_split = head.down, TENSOR in axes_of(specs.head.down.weight)
        if is_split:  # the head is given whole features
            down = eqx.tree_at(lambda m: m.weight, down, gather_parameter(down.weight, 1))
        own = of_own_ids(head.linear, specs.head.linear), down, of_own_ids(head.up, specs.head.up)
        head = eqx.tree_at(lambda m: (m.linear, m.down, m.up), head, own)
    elif head is not None:
        head = of_own_ids(head, specs.head)
    if residual == "feature":
        looked_up = rows(embedding.weight, specs.embedding.weight) if head is None else embedding.weight
        return FeatureEmbedding(embedding, looked_up), head
    table = rows(embedding.weight, specs.embedding.weight)
    return SplitEmbedding(table, embedding.scale, vocab, residual), head


def _is_none(node: Any) -> bool:
    return node is None
