"""A whole model in the 1-D or 2-D weight-stationary layout, called like any: for text."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from .._axes import FSDP, TENSOR
from .._shard_map import filter_shard_map
from .._vary import own_part, vary
from .._wrap import replace
from ..layouts._layout import Layout, partition_specs
from ..layouts._mesh import axis_sizes
from ..tensor._collective_matmul import OVERLAPS
from ..tensor._feature import ByFeature
from ..tensor._norms import SplitNorm
from ..tensor._vocabulary import SplitEmbedding
from ._served import filled, filled_tokens, multiple, Served
from ._two_dim import HEADS, STREAM, TwoDimBlock, TwoDimVocabulary


ATTENTIONS = ("rows", "heads")
BLOCKS = (nn.Block, nn.ParallelBlock)
_LATER = ("output_norm", "sum_norm")
LAYOUT = Layout({"heads": TENSOR, "mlp": TENSOR, "vocab": TENSOR, "embed": FSDP})


class WeightStationary(Served):
    """A model whose weights stay where they are, split on both dims; it encodes, keeps caches and gives logits.

    Over `mesh`, `embed` is split over `fsdp`, heads, hidden features and ids over `tensor` (Pope et al. 2022, with X
    and YZ; `fsdp=1` is the 1-D layout), and the stream between layers over both. Inputs and outputs are global arrays.
    `attention="rows"` splits attention and its caches over rows, which are filled up with padding to a multiple of the
    devices; `"heads"`, for fewer rows, splits it over heads and keeps the single key head whole on every device.
    `overlap` as for `all_gather_matmul`. Raises a `ValueError` where the model does not fit the mesh.
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
        """Where the parameters of a model, or of its shapes, are kept."""
        return partition_specs(model, LAYOUT, mesh)

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, None]:
        """The final norm's output, and the cache with these tokens stored."""
        nn.check_cached(tokens, cache)
        rows = self._rows(ids.shape[0])

        def per_device(model: nn.Transformer, ids: Array, tokens: nn.Tokens, cache: PyTree) -> tuple[Array, PyTree]:
            x, cache, _ = self._wrapped(model).encode(ids, tokens, cache)
            return x, cache

        whole, specs = PartitionSpec(), self._cache_specs(cache)
        given_back = PartitionSpec(None, None, STREAM), specs
        run = filter_shard_map(per_device, self.mesh, (self._specs, whole, whole, specs), given_back)
        x, cache = run(self.model, filled(ids, rows, 0), filled_tokens(tokens, rows), cache)
        return x[: ids.shape[0]], cache, None

    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Logits, in float32 at least, of what `encode` gave."""
        given, given_back = PartitionSpec(None, STREAM), PartitionSpec(None, HEADS)
        per_device: Callable[..., Any] = lambda model, x: self._wrapped(model).unembed(x)
        return filter_shard_map(per_device, self.mesh, (self._specs, given), given_back)(self.model, hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens, in parts by rows or one whole on each device."""
        empty_cache = lambda: self.model.init_cache(self._rows(batch), capacity, dtype, rollback=rollback)
        shapes = eqx.filter_eval_shape(empty_cache)

        def empty(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Array:
            is_positions = nn.counts(x)
            copies = 1 if is_positions or self.attention == "rows" else self.mesh.size
            made = jnp.full((x.shape[0], x.shape[1] * copies, *x.shape[2:]), -1 if is_positions else 0, x.dtype)
            return jax.lax.with_sharding_constraint(made, NamedSharding(self.mesh, spec))

        return jax.tree.map(empty, shapes, self._cache_specs(shapes))

    @property
    def _specs(self) -> PyTree:
        return self.parameter_specs(self.model, self.mesh)

    def _rows(self, batch: int) -> int:
        return multiple(batch, self.mesh.size) if self.attention == "rows" else batch

    def _cache_specs(self, cache: PyTree) -> PyTree:
        """Dims are of layers, rows, slots; a cache that every device has whole is stored as copies along the rows."""
        split, whole = PartitionSpec(None, HEADS), PartitionSpec()
        by_rows = self.attention == "rows"
        return jax.tree.map(lambda x: whole if nn.counts(x) and not by_rows else split, cache)

    def _wrapped(self, model: nn.Transformer) -> nn.Transformer:
        """The model as it is on one device, from its slices."""
        model = vary(model, STREAM)  # over an axis of one device, no gather or slice would type it so
        split = lambda norm: SplitNorm(jax.tree.map(lambda x: own_part(x, TENSOR, -1), norm), STREAM)

        def block(inner: nn.Block | nn.ParallelBlock) -> TwoDimBlock:
            inner = eqx.tree_at(_stream_norms, inner, [split(norm) for norm in _stream_norms(inner)])
            return TwoDimBlock(inner, self.attention, self.overlap)

        table, head = model.embedding, model.head
        bias = None if head is None else head.bias
        found = SplitEmbedding(table.weight, table.scale, self.vocab, ByFeature())
        embedding = TwoDimVocabulary(found, table.weight if head is None else head.matrix(), bias)
        model = eqx.tree_at(lambda m: m.stacks, model, replace(model.stacks, BLOCKS, block))
        if model.positions is not None:
            own = own_part(model.positions.weight, TENSOR, 1)
            model = eqx.tree_at(lambda m: m.positions.weight, model, own)
        is_none = lambda node: node is None
        parts = split(model.norm), embedding, None
        return eqx.tree_at(lambda m: (m.norm, m.embedding, m.head), model, parts, is_leaf=is_none)


def _check(layout: WeightStationary) -> None:
    """Raise a `ValueError` for a mesh, or a layer, that the layout has no place for."""
    sizes, model = axis_sizes(layout.mesh), layout.model
    call = f"WeightStationary over fsdp={sizes.get(FSDP)}, tensor={sizes.get(TENSOR)}"
    if others := {axis: size for axis, size in sizes.items() if axis not in STREAM and size > 1}:
        raise ValueError(f"{call}: weights are split over these two axes alone; make {others} of size 1.")
    count = layout.mesh.size
    _divides(call, count, "the model", vocab=model.vocab, embed=model.embedding.weight.shape[1])
    if any(not isinstance(linear.products, nn.InComputeDtype) for linear in nn.linear_maps(model)):
        raise ValueError(f"{call}: the model multiplies in 8 bits; take nn.without_fp8(model), of the same weights.")
    for name in ("embedding_norm", "logit_bias", "encoder", "score_bias"):
        if getattr(model, name) is not None:
            raise ValueError(f"{call}: the model has {name}, which it has no place for; take a Plan instead.")
    for stack in model.stacks:
        block = stack.blocks
        if not isinstance(block, BLOCKS) or block.feed_forward is None:
            raise ValueError(
                f"{call}: a stack repeats {type(block).__name__}; it is made for stacks of nn.Block or "
                "nn.ParallelBlock with a feed-forward layer."
            )
        attention, mlp = _checked(call, block)
        _divides(call, count, "each layer", heads=attention.query.sizes["heads"], mlp=mlp.up.sizes["mlp"])
        if layout.attention == "heads" and (kv_heads := attention.key.sizes["kv_heads"]) != 1:
            raise ValueError(
                f"{call}, attention='heads': each device keeps the one key head whole, but there are {kv_heads}; take "
                "attention='rows'."
            )


def _stream_norms(block: nn.Block | nn.ParallelBlock) -> list[Any]:
    """The norms that read the stream, before both layers or before each."""
    shared = [block.norm] if isinstance(block, nn.ParallelBlock) else []
    norms = [*shared, block.mixer.norm, block.feed_forward.norm if block.feed_forward is not None else None]
    return [norm for norm in norms if norm is not None]


def _checked(call: str, block: nn.Block | nn.ParallelBlock) -> tuple[nn.Attention, nn.MLP | nn.GatedMLP]:
    assert block.feed_forward is not None
    if not isinstance(block.mixer, nn.Residual):
        raise ValueError(f"{call}: a block holds several mixers side by side; it is made for one Attention.")
    sublayers = {"mixer": block.mixer, "feed_forward": block.feed_forward}
    attention, mlp = block.mixer.layer, block.feed_forward.layer
    if not isinstance(attention, nn.Attention) or not isinstance(mlp, nn.MLP | nn.GatedMLP):
        kinds = f"{type(attention).__name__} and {type(mlp).__name__}"
        raise ValueError(f"{call}: a block holds {kinds}; it is made for Attention beside or before MLP or GatedMLP.")
    if attention.gate is not None or attention.sinks is not None:
        raise ValueError(f"{call}: an attention has a gate or sinks, which the layout does not split; use Planned.")
    if attention.value is None or attention.value_norm is not None:
        raise ValueError(f"{call}: values are keys or normed; use Planned.")
    if isinstance(block, nn.Block) and (block.scalar is not None or block.gated_input is not None):
        raise ValueError(f"{call}: a scalar or a gated input follows a block; use Planned.")
    for norm in (attention.query_norm, attention.key_norm):
        # An array has a dim of layers in front.
        if norm is not None and (norm.reduced != ("head_dim",) or any(x.ndim != 2 for x in jax.tree.leaves(norm))):
            raise ValueError(
                f"{call}: a norm of queries or keys is over {' '.join(norm.reduced)}, or scales each head by itself; "
                "one of head_dim alone would do."
            )
    is_shared = isinstance(block, nn.ParallelBlock) and block.norm is not None
    if len(_stream_norms(block)) != (1 if is_shared else 2) or not all(
        isinstance(norm, nn.Norm) for norm in _stream_norms(block)
    ):
        raise ValueError(f"{call}: each layer reads its input through a norm of eqformer.nn; this block's does not.")
    later = [f"{name}.{kind}" for name, one in sublayers.items() for kind in _LATER if getattr(one, kind) is not None]
    if later or (isinstance(block, nn.ParallelBlock) and block.sum_norm is not None):
        later = [*later, "sum_norm"]
        raise ValueError(f"{call}: a block has {later[0]}; it is made for blocks that normalise before their layers.")
    if scaled := [name for name, one in sublayers.items() if one.input_scale is not None]:
        raise ValueError(f"{call}: {scaled[0]} has an input_scale, which it has no place for; take a Plan instead.")
    if is_shared and block.mixer.scale != block.feed_forward.scale:
        raise ValueError(
            f"{call}: a parallel block's layers are scaled by {block.mixer.scale} and {block.feed_forward.scale}, but "
            "what they add is summed before it is scaled; take one scale."
        )
    return attention, mlp


def _divides(call: str, count: int, what: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % count:
            raise ValueError(
                f"{call}: {what} has {name}={size}, which {count} devices do not split evenly; take sizes that do, or "
                "fewer devices."
            )
