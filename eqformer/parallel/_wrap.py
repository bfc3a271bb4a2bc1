"""A plain model with its modules wrapped, by contract, for the device that holds these slices of it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from .. import nn
from ._axes import CONTEXT, TENSOR
from ._expert_method import Exchange
from ._expert_parallel import SplitMoE
from .context._context_attention import ContextAttention, refuse_pieces
from .layouts._layout import dim_over
from .state._gather import gather_parameter
from .tensor._replicated_layers import is_plain, PLACES, ReplicatedLayer, ReplicatedMixer, Sliced
from .tensor._residual_stream import ResidualStream
from .tensor._tensor import is_split, TensorParallelMixer
from .tensor._vocabulary import HeadInput, own_rows, rows_of_features, SourceOutput


def replace(model: PyTree, kinds: type | tuple[type, ...], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """The model with each module of some kinds replaced by `make(module, *parts of likes)`."""
    return replace_where(model, lambda node: isinstance(node, kinds), make, *likes)


def replace_where(model: PyTree, is_kind: Callable[[Any], bool], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """The same for each module of which `is_kind` is true."""
    return jax.tree.map(lambda *nodes: make(*nodes) if is_kind(nodes[0]) else nodes[0], model, *likes, is_leaf=is_kind)


def split_over_tensor(model: nn.Transformer, specs: PyTree, shapes: PyTree, stream: ResidualStream) -> nn.Transformer:
    """The model for a device of the axis `tensor`, with a stream between its layers.

    `specs` and `shapes` are those of the whole model. The arrays of the stacks stay what and where they were.
    """
    kinds = (nn.Mixer, nn.FeedForward, nn.PerLayerInputs, nn.Norm, nn.MoE, ReplicatedLayer)
    names = nn.dims(shapes)

    def wrap(module: PyTree, spec: PyTree, shape: PyTree, name: PyTree) -> PyTree:
        if isinstance(module, nn.Norm):
            return stream.norm(module)
        if isinstance(module, nn.MoE):
            shared = replace(module.shared, kinds, wrap, spec.shared, shape.shared, name.shared)
            norm = None if module.expert_norm is None else stream.norm(module.expert_norm)
            whole = [(module.router, spec.router), (module.to_latent, spec.to_latent)]
            whole.append((module.from_latent, spec.from_latent))
            read_whole = [None if part is None else sliced(part, its) for part, its in whole]
            parts = lambda m: (m.router, m.to_latent, m.from_latent, m.shared, m.expert_norm)
            return eqx.tree_at(parts, module, (*read_whole, shared, norm), is_leaf=_is_none)
        if isinstance(module, ReplicatedLayer):
            return module
        if is_split(module) or isinstance(module, nn.PerLayerInputs):
            return stream.layer(module, shape, spec, name)
        if isinstance(module, nn.Mixer):
            return ReplicatedMixer(sliced(module, spec), stream)
        return _run_whole(module, spec, stream)

    whole = model
    for kind, layer_of, _ in PLACES:
        model = replace(model, kind, lambda module, spec, of=layer_of: _with_plain(module, spec, of, stream), specs)
    model = replace(model, kinds, wrap, specs, shapes, names)
    model = replace(model, nn.Dropout, stream.dropout)
    model = replace(model, nn.LearnedPositions, stream.positions)
    model = eqx.tree_at(lambda m: m.norm, model, HeadInput(model.norm, stream))
    if model.encoder is not None:  # what all cross-attentions read is gathered once
        model = eqx.tree_at(lambda m: m.encoder.norm, model, SourceOutput(model.encoder.norm, stream))
        of_source = lambda tree: tree.encoder.embedding
        if of_source(whole) is not None:
            own, spec, name, shape = map(of_source, (whole, specs, names, shapes))
            table = _table(own, spec, name, stream, shape.weight.shape[0], is_tied=False)
            model = eqx.tree_at(of_source, model, table)
    parts = _split_vocabulary(whole, specs, names, stream, shapes.vocab)
    return eqx.tree_at(lambda m: (m.embedding, m.head, m.logit_bias), model, parts, is_leaf=_is_none)


def split_over_context(model: PyTree, method: str) -> PyTree:
    """The model with every attention's core replaced by one for pieces of rows; refuses recurrences over them."""

    def split(module: nn.Mixer) -> nn.Mixer:
        if module.facts().attends is None:
            refuse_pieces(jax.lax.axis_size(CONTEXT), "the model", module)
        return eqx.tree_at(lambda m: m.core, module, ContextAttention(module.core, method))  # type: ignore[attr-defined]

    is_bare = lambda node: isinstance(node, nn.Mixer) and not isinstance(node, TensorParallelMixer | ReplicatedMixer)
    return replace_where(model, is_bare, split)


def split_mixtures(model: PyTree, method: str, exchange: Exchange, stream: ResidualStream | None) -> PyTree:
    """The model with every mixture of experts replaced by one for the experts, and tokens, that this device holds."""
    return replace(model, nn.MoE, lambda moe: SplitMoE(moe, method, exchange, stream))


def _with_plain(module: PyTree, spec: PyTree, layer_of: Callable[[PyTree], PyTree], stream: ResidualStream) -> PyTree:
    layer = layer_of(module)
    if not is_plain(layer):
        return module
    return eqx.tree_at(layer_of, module, _run_whole(layer, layer_of(spec), stream), is_leaf=lambda node: node is layer)


def _run_whole(layer: Callable[..., Any], spec: PyTree, stream: ResidualStream) -> Callable[..., Any]:
    """A layer for each token by itself on all its features; itself where a device has these and all its arrays."""
    inner = sliced(layer, spec)
    return ReplicatedLayer(inner, stream) if stream.splits_features or inner.is_split else layer


def sliced(module: PyTree, specs: PyTree) -> Sliced:
    """A module to be put together where it runs, by the dims that the axis `tensor` splits."""
    dim = lambda x, spec: None if (found := dim_over(spec, TENSOR)) is None else found - x.ndim
    columns = map(jax.tree.structure(module).flatten_up_to, (module, specs))
    return Sliced(module, tuple(dim(x, spec) for x, spec in zip(*columns, strict=True) if eqx.is_array(x)))


def _split_vocabulary(
    model: nn.Transformer, specs: PyTree, names: PyTree, stream: ResidualStream, vocab: int
) -> tuple[eqx.Module, nn.LinearMap | None, Array | None]:
    """The embedding, the head and the logits' bias, of which each device holds the rows of its own ids."""
    head = None if model.head is None else jax.tree.map(_rows, model.head, specs.head, names.head)
    bias = None if model.logit_bias is None else _rows(model.logit_bias, specs.logit_bias, names.logit_bias)
    return _table(model.embedding, specs.embedding, names.embedding, stream, vocab, is_tied=head is None), head, bias


def _table(
    embedding: nn.Embedding, spec: PyTree, names: PyTree, stream: ResidualStream, vocab: int, *, is_tied: bool
) -> eqx.Module:
    """An embedding, of which each device looks up what it holds."""
    return stream.embedding(
        embedding, lambda: _rows(embedding.weight, spec.weight, names.weight), vocab, is_tied=is_tied
    )


def _rows(table: Array, spec: PartitionSpec, names: str) -> Array:
    dims, split = names.split(), dim_over(spec, TENSOR)
    if "vocab" not in dims:  # a factor of the head, which is given whole features
        return table if split is None else gather_parameter(table, split)
    ids = dims.index("vocab")
    if split is None:
        return own_rows(table, ids)
    return table if split == ids else rows_of_features(table, ids, split)


def _is_none(node: object) -> bool:
    return node is None
