"""Wrap each module of a model for one device of the mesh; the module's `nn` class selects the wrapper."""

import functools
import operator
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from .. import nn
from ._context_attention import ContextAttention, refuse_pieces, SplitCacheAttention
from ._expert_exchange import Exchange
from ._expert_parallel import SplitMixture
from ._fully_sharded import gather_parameter
from ._mesh import CONTEXT, dim_over, TENSOR
from .tensor import _tensor as tensor
from .tensor._residual_stream import ResidualStream
from .tensor._vocabulary import EncoderOutput, features_to_rows, HeadInput, logits_parts, take_local_rows


Mode = Literal["train", "serve"]
"""Mode of a wrapped model: `train` computes losses and gradients, `serve` decodes with KV caches."""


def split_over_tensor(
    model: nn.LanguageModel,
    specs: PyTree,
    shapes: PyTree,
    stream: ResidualStream,
    mode: Mode = "train",
    kv_row_shards: int = 1,
) -> nn.LanguageModel:
    """Wrap a model for a device of the axis `tensor`, with a residual stream between its layers.

    `specs` and `shapes` describe the arrays of the global model. Wrappers change neither the values of the stacks'
    arrays nor the order of these arrays among the tree's leaves. In the mode `"train"` the final norm gathers the
    stream for the head. In `"serve"` the stream is replicated, and so is the final norm's output. `kv_row_shards` is
    the number of devices that share each key head and split its cache by rows, see `TensorParallelLayer`.
    """
    kinds = (nn.Mixer, nn.FeedForward, nn.Norm, nn.StreamMap, nn.ExpertMixture, tensor.ReplicatedLayer)
    names = nn.dims(shapes)

    def wrap(module: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        if isinstance(module, nn.Norm):
            return stream.split_norm(module)
        if isinstance(module, nn.StreamMap):
            return stream.split_stream_weights(module)
        if isinstance(module, nn.ExpertMixture):
            return wrap_mixture(module, shape, spec, name)
        if isinstance(module, tensor.ReplicatedLayer):
            return module
        if tensor.is_split(module):
            return stream.split_layer(module, shape, spec, name, kv_row_shards)
        if isinstance(module, nn.Mixer):
            return tensor.ReplicatedMixer(gather_when_called(module, spec), stream)
        return _replicate_layer(module, spec, stream)

    def wrap_mixture(mixture: nn.ExpertMixture, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        # Experts stay split. The router, and linear maps outside of layers, gather their arrays when they are called.
        gathered = (nn.Router, nn.LinearMap)

        def is_submodule(node: object) -> bool:
            return node is mixture.experts or (node is not mixture and isinstance(node, (*gathered, *kinds)))

        def wrap_submodule(node: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
            if node is mixture.experts:
                return node
            if isinstance(node, gathered):
                return gather_when_called(node, spec)
            return wrap(node, shape, spec, name) if isinstance(node, kinds) else node

        return jax.tree.map(wrap_submodule, mixture, shape, spec, name, is_leaf=is_submodule)

    plain_model = model
    # First wrap layers that belong to none of the classes in `kinds`, because `wrap` could not recognize them.
    for kind, field in tensor.LAYER_FIELDS:
        replicate = functools.partial(_replicate_plain_layer, field=field, stream=stream)
        model = nn.map_modules(replicate, model, kind, specs)
    model = nn.map_modules(wrap, model, kinds, shapes, specs, names)
    model = nn.map_modules(stream.split_dropout, model, nn.RandomMask)
    model = nn.map_modules(stream.split_positions, model, nn.PositionEmbedding)
    if mode == "train":
        model = eqx.tree_at(lambda m: m.norm, model, HeadInput(model.norm, stream))
    if (inputs := plain_model.parts.layer_inputs) is not None:
        inputs_trees = [tree.parts.layer_inputs for tree in (shapes, specs, names)]
        model = eqx.tree_at(lambda m: m.parts.layer_inputs, model, stream.split_layer(inputs, *inputs_trees))
    if (encoder := plain_model.parts.encoder) is not None:
        encoder_trees = [tree.parts.encoder for tree in (shapes, specs, names)]
        split_encoder = _split_encoder(model.parts.encoder, encoder, *encoder_trees, stream=stream)
        model = eqx.tree_at(lambda m: m.parts.encoder, model, split_encoder)
    parts = _split_vocabulary(plain_model, specs, names, stream, shapes.vocab)
    return eqx.tree_at(lambda m: [m.embedding, *logits_parts(m)], model, parts)


def split_over_context(model: PyTree, method: str, mode: Mode = "train") -> PyTree:
    """Replace every attention core by a core that takes a segment of each sequence and attends to all segments.

    In the mode `"serve"` only the KV cache is split: every device has all query tokens. Raises a `ValueError` if the
    model has a mixer that needs whole sequences, such as a recurrence.
    """

    def split_mixer(mixer: nn.Mixer) -> nn.Mixer:
        if mixer.facts().attends is None:
            refuse_pieces(jax.lax.axis_size(CONTEXT), "the model", mixer)
        inner = mixer.core  # type: ignore[attr-defined]
        core = ContextAttention(inner, method) if mode == "train" else SplitCacheAttention(inner)
        return eqx.tree_at(lambda m: m.core, mixer, core)

    def split_node(node: PyTree) -> PyTree:
        return split_mixer(node) if _is_unwrapped_mixer(node) else node

    return jax.tree.map(split_node, model, is_leaf=_is_unwrapped_mixer)


def _is_unwrapped_mixer(node: object) -> bool:
    return isinstance(node, nn.Mixer) and not isinstance(node, tensor.TensorParallelMixer | tensor.ReplicatedMixer)


def split_mixtures(model: PyTree, method: str, exchange: Exchange, stream: ResidualStream | None) -> PyTree:
    """Replace every mixture of experts by a `SplitMixture`, with this device's experts, for this device's tokens."""
    split = functools.partial(SplitMixture, method=method, exchange=exchange, stream=stream)
    return nn.map_modules(split, model, nn.ExpertMixture)


def _replicate_plain_layer(module: PyTree, spec: PyTree, field: str, stream: ResidualStream) -> PyTree:
    """Wrap the layer in a module's field to run in full on every device, if the layer is plain (`tensor.is_plain`)."""
    layer = getattr(module, field)
    if not tensor.is_plain(layer):
        return module
    replicated = _replicate_layer(layer, getattr(spec, field), stream)
    return eqx.tree_at(operator.attrgetter(field), module, replicated, is_leaf=lambda node: node is layer)


def _replicate_layer(layer: Callable[..., PyTree], spec: PyTree, stream: ResidualStream) -> Callable[..., PyTree]:
    """Wrap a layer that needs gathered features or arrays; return other layers unchanged."""
    sliced = gather_when_called(layer, spec)
    return tensor.ReplicatedLayer(sliced, stream) if stream.splits_features or sliced.is_split else layer


def gather_when_called(module: PyTree, specs: PyTree) -> tensor.Sliced:
    """Wrap a module to gather, at each call, the arrays that are split over the axis `tensor`."""
    structure = jax.tree.structure(module)
    rows = zip(structure.flatten_up_to(module), structure.flatten_up_to(specs), strict=True)
    dims: list[int | None] = []
    for x, spec in rows:
        if eqx.is_array(x):
            dim = dim_over(spec, TENSOR)
            # Count dims from the end, because in a stack the module runs on one layer's arrays, without the dim
            # `layers`.
            dims.append(None if dim is None else dim - x.ndim)
    return tensor.Sliced(module, tuple(dims))


def _split_encoder(
    encoder: PyTree, plain: nn.Encoder, shapes: PyTree, specs: PyTree, names: PyTree, stream: ResidualStream
) -> nn.Encoder:
    """Split an encoder's embedding, and gather the encoder's output once for all cross-attentions.

    The layers of `encoder` are already wrapped; `plain` is the encoder before wrapping.
    """
    encoder = eqx.tree_at(lambda m: m.norm, encoder, EncoderOutput(encoder.norm, stream))
    if plain.embedding is None:
        return encoder
    vocab = shapes.embedding.weight.shape[0]
    embedding = _split_embedding(plain.embedding, specs.embedding, names.embedding, stream, vocab, is_tied=False)
    return eqx.tree_at(lambda m: m.embedding, encoder, embedding)


def _split_vocabulary(
    model: nn.LanguageModel, specs: PyTree, names: PyTree, stream: ResidualStream, vocab: int
) -> list[PyTree]:
    """Return the wrapped embedding and, if the model has them, this device's rows of the head and the logit bias."""
    is_tied = model.head is None
    embedding = _split_embedding(model.embedding, specs.embedding, names.embedding, stream, vocab, is_tied=is_tied)
    parts = zip(*map(logits_parts, (model, specs, names)), strict=True)
    return [embedding, *(jax.tree.map(_vocab_rows, *part) for part in parts)]


def _split_embedding(
    embedding: nn.TokenEmbedding, spec: PyTree, names: PyTree, stream: ResidualStream, vocab: int, *, is_tied: bool
) -> eqx.Module:
    """Wrap an embedding so that each device looks up its own rows or features."""
    rows = functools.partial(_vocab_rows, embedding.weight, spec.weight, names.weight)
    return stream.split_embedding(embedding, rows, vocab, is_tied=is_tied)


def _vocab_rows(table: Array, spec: jax.sharding.PartitionSpec, names: str) -> Array:
    """Return this device's rows of a table with a dim `vocab`; gather an array without that dim."""
    dims, split_dim = names.split(), dim_over(spec, TENSOR)
    if "vocab" not in dims:  # A low-rank factor of the head has no dim `vocab`, and multiplies all features.
        return table if split_dim is None else gather_parameter(table, split_dim)
    vocab_dim = dims.index("vocab")
    if split_dim is None:
        return take_local_rows(table, vocab_dim)
    return table if split_dim == vocab_dim else features_to_rows(table, vocab_dim, split_dim)
