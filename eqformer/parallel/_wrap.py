"""Wrapping of a plain model's modules, by their contracts, for the device that holds their slices."""

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
from .tensor._vocabulary import features_to_rows, HeadInput, SourceOutput, take_local_rows


def replace(model: PyTree, kinds: type | tuple[type, ...], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """Replace each module of some classes by `make(module, *subtrees of likes)`."""
    return replace_where(model, lambda node: isinstance(node, kinds), make, *likes)


def replace_where(model: PyTree, is_kind: Callable[[Any], bool], make: Callable[..., Any], *likes: PyTree) -> PyTree:
    """Replace each module of which `is_kind` is true by `make(module, *subtrees of likes)`."""
    return jax.tree.map(lambda *nodes: make(*nodes) if is_kind(nodes[0]) else nodes[0], model, *likes, is_leaf=is_kind)


def split_over_tensor(model: nn.Transformer, specs: PyTree, shapes: PyTree, stream: ResidualStream) -> nn.Transformer:
    """Wrap a model for a device of the axis `tensor`, with a residual stream between its layers.

    `specs` and `shapes` are those of the global model. The arrays of the stacks keep their values and their paths.
    """
    kinds = (nn.Mixer, nn.FeedForward, nn.PerLayerInputs, nn.Norm, nn.MoE, ReplicatedLayer)
    names = nn.dims(shapes)

    def wrap(module: PyTree, spec: PyTree, shape: PyTree, name: PyTree) -> PyTree:
        if isinstance(module, nn.Norm):
            return stream.split_norm(module)
        if isinstance(module, nn.MoE):
            shared = replace(module.shared, kinds, wrap, spec.shared, shape.shared, name.shared)
            norm = None if module.expert_norm is None else stream.split_norm(module.expert_norm)
            replicated = [(module.router, spec.router), (module.to_latent, spec.to_latent)]
            replicated.append((module.from_latent, spec.from_latent))
            sliced = [None if part is None else slice_module(part, part_spec) for part, part_spec in replicated]
            fields = lambda m: (m.router, m.to_latent, m.from_latent, m.shared, m.expert_norm)
            return eqx.tree_at(fields, module, (*sliced, shared, norm), is_leaf=_is_none)
        if isinstance(module, ReplicatedLayer):
            return module
        if is_split(module) or isinstance(module, nn.PerLayerInputs):
            return stream.split_layer(module, shape, spec, name)
        if isinstance(module, nn.Mixer):
            return ReplicatedMixer(slice_module(module, spec), stream)
        return _replicate_layer(module, spec, stream)

    plain_model = model
    for kind, layer_of, _ in PLACES:
        replicate = lambda module, spec, layer_of=layer_of: _replicate_plain_layer(module, spec, layer_of, stream)
        model = replace(model, kind, replicate, specs)
    model = replace(model, kinds, wrap, specs, shapes, names)
    model = replace(model, nn.Dropout, stream.split_dropout)
    model = replace(model, nn.LearnedPositions, stream.split_positions)
    model = eqx.tree_at(lambda m: m.norm, model, HeadInput(model.norm, stream))
    if model.encoder is not None:
        # The encoder's output, which all cross-attentions read, is gathered once.
        model = eqx.tree_at(lambda m: m.encoder.norm, model, SourceOutput(model.encoder.norm, stream))
        source_table = lambda tree: tree.encoder.embedding
        if source_table(plain_model) is not None:
            embedding, spec, name, shape = map(source_table, (plain_model, specs, names, shapes))
            split = _split_embedding(embedding, spec, name, stream, shape.weight.shape[0], is_tied=False)
            model = eqx.tree_at(source_table, model, split)
    parts = _split_vocabulary(plain_model, specs, names, stream, shapes.vocab)
    return eqx.tree_at(lambda m: (m.embedding, m.head, m.logit_bias), model, parts, is_leaf=_is_none)


def split_over_context(model: PyTree, method: str) -> PyTree:
    """Replace every attention's core by one for pieces of rows; refuse recurrences over them."""

    def split_mixer(mixer: nn.Mixer) -> nn.Mixer:
        if mixer.facts().attends is None:
            refuse_pieces(jax.lax.axis_size(CONTEXT), "the model", mixer)
        core = ContextAttention(mixer.core, method)  # type: ignore[attr-defined]
        return eqx.tree_at(lambda m: m.core, mixer, core)

    is_unwrapped = lambda node: (
        isinstance(node, nn.Mixer) and not isinstance(node, TensorParallelMixer | ReplicatedMixer)
    )
    return replace_where(model, is_unwrapped, split_mixer)


def split_mixtures(model: PyTree, method: str, exchange: Exchange, stream: ResidualStream | None) -> PyTree:
    """Replace every mixture of experts by one for the experts, and tokens, that this device holds."""
    return replace(model, nn.MoE, lambda moe: SplitMoE(moe, method, exchange, stream))


def _replicate_plain_layer(
    module: PyTree, spec: PyTree, layer_of: Callable[[PyTree], PyTree], stream: ResidualStream
) -> PyTree:
    """Wrap a module's layer to run whole on every device if the layer follows no contract."""
    layer = layer_of(module)
    if not is_plain(layer):
        return module
    replicated = _replicate_layer(layer, layer_of(spec), stream)
    return eqx.tree_at(layer_of, module, replicated, is_leaf=lambda node: node is layer)


def _replicate_layer(layer: Callable[..., Any], spec: PyTree, stream: ResidualStream) -> Callable[..., Any]:
    """Wrap a layer to run on all features of each token; return it as it is where a device has these and its arrays."""
    sliced = slice_module(layer, spec)
    return ReplicatedLayer(sliced, stream) if stream.splits_features or sliced.is_split else layer


def slice_module(module: PyTree, specs: PyTree) -> Sliced:
    """Wrap a module that is gathered where it runs, by the dims that the axis `tensor` splits."""
    structure = jax.tree.structure(module)
    rows = zip(structure.flatten_up_to(module), structure.flatten_up_to(specs), strict=True)
    dims: list[int | None] = []
    for x, spec in rows:
        if eqx.is_array(x):
            dim = dim_over(spec, TENSOR)
            dims.append(None if dim is None else dim - x.ndim)
    return Sliced(module, tuple(dims))


def _split_vocabulary(
    model: nn.Transformer, specs: PyTree, names: PyTree, stream: ResidualStream, vocab: int
) -> tuple[eqx.Module, nn.LinearMap | None, Array | None]:
    """Return the embedding, the head and the logits' bias; each device holds the rows of its own ids."""
    head = None if model.head is None else jax.tree.map(_vocab_rows, model.head, specs.head, names.head)
    bias = model.logit_bias
    bias = None if bias is None else _vocab_rows(bias, specs.logit_bias, names.logit_bias)
    is_tied = head is None
    embedding = _split_embedding(model.embedding, specs.embedding, names.embedding, stream, vocab, is_tied=is_tied)
    return embedding, head, bias


def _split_embedding(
    embedding: nn.Embedding, spec: PyTree, names: PyTree, stream: ResidualStream, vocab: int, *, is_tied: bool
) -> eqx.Module:
    """Wrap an embedding, of which each device looks up its rows or features."""
    rows = lambda: _vocab_rows(embedding.weight, spec.weight, names.weight)
    return stream.split_embedding(embedding, rows, vocab, is_tied=is_tied)


def _vocab_rows(table: Array, spec: PartitionSpec, names: str) -> Array:
    """Return this device's rows of a table with a dim `vocab`; gather an array without the dim."""
    dims, split_dim = names.split(), dim_over(spec, TENSOR)
    if "vocab" not in dims:  # A factor of the head, which is applied to all features.
        return table if split_dim is None else gather_parameter(table, split_dim)
    vocab_dim = dims.index("vocab")
    if split_dim is None:
        return take_local_rows(table, vocab_dim)
    return table if split_dim == vocab_dim else features_to_rows(table, vocab_dim, split_dim)


def _is_none(node: object) -> bool:
    return node is None
