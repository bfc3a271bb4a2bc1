"""A whole model in the 1-D or 2-D weight-stationary inference layout (Pope et al. 2022, arXiv:2211.05102)."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._annotation_checks import checked
from ..parallel._mesh import axis_sizes, FSDP, Layout, partition_specs, TENSOR
from ..parallel._shard_map import filter_shard_map, take_local_slice, vary
from ..parallel._sharded_cache import pad_batch, pad_tokens, round_to_multiple
from ..parallel._sharded_model import DistributedModel
from ..parallel.tensor._collective_matmul import OVERLAPS
from ..parallel.tensor._residual_stream import SplitNorm
from ..parallel.tensor._stream_kinds import FeatureStream
from ..parallel.tensor._vocabulary import SplitEmbedding
from ._two_dim import BlockParts, HEADS, Norm, read_block, STREAM, TwoDimBlock, TwoDimVocabulary


ATTENTIONS = ("rows", "heads")
BLOCKS = (nn.Block, nn.ParallelResidual)
_OUTPUT_NORMS = ("output_norm", "sum_norm")
LAYOUT = Layout({"heads": TENSOR, "mlp": TENSOR, "vocab": TENSOR, "embed": FSDP})


class WeightStationary(DistributedModel):
    """Inference with weights that never move: a model with both dims of every weight sharded.

    `embed` is sharded over `fsdp`, heads, hidden features and vocabulary over `tensor` (X and YZ in the paper; `fsdp=1`
    is the 1-D layout), and the residual stream over both. Inputs and outputs are global arrays. `attention="rows"`
    splits attention and its caches over rows, which are padded to a multiple of the number of devices; `"heads"`, for
    fewer rows, splits attention over heads and replicates the single key head. `overlap` takes the same values as in
    `all_gather_matmul`. Raises a `ValueError` for a model that does not fit the mesh.
    """

    model: nn.Transformer
    mesh: Mesh = eqx.field(static=True)
    attention: str = eqx.field(static=True)
    overlap: str = eqx.field(static=True)

    def __init__(self, model: nn.Transformer, mesh: Mesh, *, attention: str = "rows", overlap: str = "none"):
        for name, value, known in (("attention", attention, ATTENTIONS), ("overlap", overlap, OVERLAPS)):
            if value not in known:
                raise ValueError(f"WeightStationary({name}={value!r}): choose one of {', '.join(map(repr, known))}.")
        self.model, self.mesh, self.attention, self.overlap = model, mesh, attention, overlap
        _check(self)

    @staticmethod
    def parameter_specs(model: PyTree, mesh: Mesh) -> PyTree:
        """Return the partition specs of a model, or of its shapes."""
        return partition_specs(model, LAYOUT, mesh)

    @checked
    def encode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, None]:
        """Return the output of the final norm, and the cache with these tokens stored."""
        nn.check_cached(tokens, cache)
        rows = self._padded_rows(ids.shape[0])

        def per_device(model: nn.Transformer, ids: Array, tokens: nn.Tokens, cache: PyTree) -> tuple[Array, PyTree]:
            x, cache, _ = self._wrap_model(model).encode(ids, tokens, cache)
            return x, cache

        replicated, cache_specs = PartitionSpec(), self._cache_specs(cache)
        in_specs = self._specs, replicated, replicated, cache_specs
        run = filter_shard_map(per_device, self.mesh, in_specs, (PartitionSpec(None, None, STREAM), cache_specs))
        x, cache = run(self.model, pad_batch(ids, rows, 0), pad_tokens(tokens, rows), cache)
        return x[: ids.shape[0]], cache, None

    @checked
    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits, in float32 at least, of hidden vectors from `encode`."""
        in_specs = self._specs, PartitionSpec(None, STREAM)

        def per_device(model: nn.Transformer, x: Array) -> Array:
            return self._wrap_model(model).unembed(x)

        return filter_shard_map(per_device, self.mesh, in_specs, PartitionSpec(None, HEADS))(self.model, hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens, sharded by rows or replicated."""
        empty_cache = lambda: self.model.init_cache(self._padded_rows(batch), capacity, dtype, rollback=rollback)
        shapes = eqx.filter_eval_shape(empty_cache)

        def allocate(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Array:
            is_positions = nn.is_position_array(x)
            copies = 1 if is_positions or self.attention == "rows" else self.mesh.size
            array = jnp.full((x.shape[0], x.shape[1] * copies, *x.shape[2:]), -1 if is_positions else 0, x.dtype)
            return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

        return jax.tree.map(allocate, shapes, self._cache_specs(shapes))

    @property
    def _specs(self) -> PyTree:
        return self.parameter_specs(self.model, self.mesh)

    def _padded_rows(self, batch: int) -> int:
        """Return the number of rows after padding, which only attention over rows needs."""
        return round_to_multiple(batch, self.mesh.size) if self.attention == "rows" else batch

    def _cache_specs(self, cache: PyTree) -> PyTree:
        """Return the partition specs of cache arrays, whose first dims are `layers rows slots`.

        A replicated cache is stored as one copy per device along the dim of rows.
        """
        split, replicated = PartitionSpec(None, HEADS), PartitionSpec()
        by_rows = self.attention == "rows"
        return jax.tree.map(lambda x: replicated if nn.is_position_array(x) and not by_rows else split, cache)

    def _wrap_model(self, model: nn.Transformer) -> nn.Transformer:
        """Return the model as one device runs it, with each module replaced by its wrapper for the layout."""
        # Mark the arrays as varying. Gathers and slices do so too, but an axis of one device has no gathers or slices.
        model = vary(model, STREAM)
        split_channels = functools.partial(jax.tree.map, functools.partial(take_local_slice, axis=TENSOR, dim=-1))

        def split(norm: PyTree) -> nn.Module:
            return SplitNorm(split_channels(norm), STREAM)

        def wrap_block(inner: nn.Block | nn.ParallelResidual) -> TwoDimBlock:
            inner = eqx.tree_at(_stream_norms, inner, [split(norm) for norm in _stream_norms(inner)])
            return TwoDimBlock(inner, self.attention, self.overlap)

        table, head = model.embedding, model.head
        bias = None if head is None else head.bias
        lookup = SplitEmbedding(table, self.vocab, FeatureStream())
        embedding = TwoDimVocabulary(lookup, table.weight if head is None else head.matrix(), bias)
        model = eqx.tree_at(lambda m: m.stacks, model, nn.map_modules(wrap_block, model.stacks, BLOCKS))
        if model.positions is not None:
            model = eqx.tree_at(lambda m: m.positions, model, split_channels(model.positions))
        is_none = lambda node: node is None
        parts = split(model.norm), embedding, None
        return eqx.tree_at(lambda m: (m.norm, m.embedding, m.head), model, parts, is_leaf=is_none)


def _check(layout: WeightStationary) -> None:
    """Raise a `ValueError` for a mesh or a layer that the layout does not support."""
    sizes, model = axis_sizes(layout.mesh), layout.model
    call = f"WeightStationary over fsdp={sizes.get(FSDP)}, tensor={sizes.get(TENSOR)}"
    if other_axes := {axis: size for axis, size in sizes.items() if axis not in STREAM and size > 1}:
        raise ValueError(
            f"{call}: weights are split over these two axes only, but the mesh also has {other_axes}; give these axes "
            "size 1."
        )
    count = layout.mesh.size
    _check_divides(call, count, "the model", vocab=model.vocab, embed=model.embedding.weight.shape[1])
    if any(linear.products.operand_bits is not None for linear in nn.linear_maps(model)):
        raise ValueError(f"{call}: the model multiplies in 8 bits; take nn.without_fp8(model), with the same weights.")
    for name in ("embedding_norm", "logit_bias", "encoder", "score_bias", "frequencies", "token_types", "classifier"):
        if getattr(model, name) is not None:
            raise ValueError(f"{call}: the model has {name}, which this layout does not support; take a Plan instead.")
    for stack in model.stacks:
        block = stack.blocks
        if not isinstance(block, BLOCKS):
            raise ValueError(
                f"{call}: the layout is made for stacks of nn.Block or nn.ParallelResidual, but a stack repeats "
                f"{type(block).__name__}; use ShardedModel."
            )
        attention, mlp = _check_block(call, block)
        _check_divides(call, count, "each layer", heads=attention.query.sizes["heads"], mlp=mlp.up.sizes["mlp"])
        if layout.attention == "heads" and (kv_heads := attention.key.sizes["kv_heads"]) != 1:
            raise ValueError(
                f"{call}, attention='heads': each device keeps the one key head whole, but there are {kv_heads}; take "
                "attention='rows'."
            )


def _stream_norms(block: nn.Block | nn.ParallelResidual) -> list[Norm]:
    """Return the norms that read the residual stream: one before both sublayers, or one before each."""
    parts = read_block(block)
    norms = [parts.norm, *(residual.norm for residual in parts.sublayers)]
    return [norm for norm in norms if norm is not None]


def _check_block(call: str, block: nn.Block | nn.ParallelResidual) -> tuple[nn.Attention, nn.MLP | nn.GatedMLP]:
    """Return the attention and the feed-forward layer of a block; raise a `ValueError` for any other block."""
    parts = read_block(block)
    if len(parts.sublayers) != 2 or not all(isinstance(sublayer, nn.Residual) for sublayer in parts.sublayers):
        kinds = ", ".join(type(sublayer).__name__ for sublayer in parts.sublayers)
        raise ValueError(
            f"{call}: a block has the sublayers {kinds}; the layout is made for two sublayers, a Residual of attention "
            "and a Residual of a feed-forward layer; use ShardedModel."
        )
    attention, mlp = (residual.layer for residual in parts.sublayers)
    if not isinstance(attention, nn.Attention) or not isinstance(mlp, nn.MLP | nn.GatedMLP):
        kinds = f"{type(attention).__name__} and {type(mlp).__name__}"
        raise ValueError(
            f"{call}: a block's layers are {kinds}; the layout is made for Attention beside or before MLP or "
            "GatedMLP; use ShardedModel."
        )
    _check_attention(call, attention)
    norms, expected_count = _stream_norms(block), 2 if parts.norm is None else 1
    if len(norms) != expected_count or not all(isinstance(norm, nn.Norm) for norm in norms):
        raise ValueError(f"{call}: each layer of a block must read its input through a norm of eqformer.nn.")
    _check_outputs(call, parts)
    return attention, mlp


def _check_attention(call: str, attention: nn.Attention) -> None:
    """Raise a `ValueError` for an attention with parts that the layout cannot split."""
    scores = attention.scores
    if attention.gate is not None or scores.sinks is not None or scores.alibi is not None:
        raise ValueError(
            f"{call}: an attention has a gate, sinks or ALiBi, which the layout cannot split; use ShardedModel."
        )
    if attention.value is None or attention.value_norm is not None:
        raise ValueError(
            f"{call}: an attention uses its keys as values, or normalizes its values, which the layout does not "
            "support; use ShardedModel."
        )
    for norm in nn.modules(attention, nn.Norm):
        # The arrays of a norm have dims `layers head_dim`, since the stack holds all its layers.
        if norm.reduced != ("head_dim",) or any(x.ndim != 2 for x in jax.tree.leaves(norm)):
            raise ValueError(
                f"{call}: a norm of queries or keys must be over head_dim, with one scale for all heads; this norm is "
                f"over {' '.join(norm.reduced)}, or scales each head by itself."
            )


def _check_outputs(call: str, parts: BlockParts) -> None:
    """Raise a `ValueError` for norms of outputs, scales of inputs, and sublayers of different output scales."""
    mixer, feed_forward = parts.sublayers
    sublayers = {"mixer": mixer, "feed_forward": feed_forward}
    output_norms = [
        f"{name}.{kind}"
        for name, sublayer in sublayers.items()
        for kind in _OUTPUT_NORMS
        if getattr(sublayer, kind) is not None
    ]
    output_norms += [name for name in _OUTPUT_NORMS if getattr(parts, name) is not None]
    if output_norms:
        raise ValueError(
            f"{call}: a block has {output_norms[0]}; the layout is made for blocks that normalize only the inputs of "
            "their layers; use ShardedModel."
        )
    if scaled := [name for name, sublayer in sublayers.items() if sublayer.input_scale is not None]:
        raise ValueError(
            f"{call}: {scaled[0]} has an input_scale, which this layout does not support; take a Plan instead."
        )
    if parts.norm is not None and mixer.scale != feed_forward.scale:
        raise ValueError(
            f"{call}: a parallel block's layers are scaled by {mixer.scale} and {feed_forward.scale}, but the layout "
            "sums their outputs before it scales the sum; take one scale for both."
        )


def _check_divides(call: str, count: int, owner: str, **sizes: int) -> None:
    """Raise a `ValueError` for a size of `owner` that `count` devices do not divide."""
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"{call}: {owner} has {name}={size}, which {count} devices do not split evenly; take a multiple of "
                f"{count}, or fewer devices."
            )
