"""Blocks and vocabulary of the 2-D weight-stationary inference layout (Pope et al. 2022, arXiv:2211.05102).

`embed` is split over the axis `fsdp` (X in the paper), heads and hidden features over `tensor` (YZ), and the residual
stream over both. Weights never move. Each device sends less as the mesh grows, because an array that is gathered or
reduced over one axis is split over the other axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ..parallel import _collectives as send
from ..parallel._mesh import FSDP, TENSOR
from ..parallel._ring import circulate, Ring, ring_reduce_scatter
from ..parallel._shard_map import take_local_slice
from ..parallel.tensor._collective_matmul import matmul_reduce_scatter
from ..parallel.tensor._vocabulary import SplitEmbedding


STREAM = (FSDP, TENSOR)
"""Axes of the residual stream's features: `fsdp` is the major axis."""
HEADS = (TENSOR, FSDP)
"""Axes of reduce-scattered heads and hidden features, of cache rows and of logits: `tensor` is the major axis."""

Pairs = list[tuple[Float[Array, "batch seq _"], Float[Array, "full_embed _"]]]
"""Inputs and weights of output projections."""


class TwoDimBlock(nn.Layer):
    """A block on this device's part of the residual stream, with both dims of every weight sharded.

    Sublayers that read the same normalized input share one all-gather over `tensor`; their products are partial sums
    over `fsdp`, which are reduce-scattered. Attention outputs and hidden features are all-gathered over `fsdp`, and the
    products of all sublayers are reduce-scattered over `tensor` as one sum. `attention="rows"` exchanges heads for
    rows, so each device caches the keys of its own rows only; `"heads"` caches the one key head of all rows on every
    device.
    """

    inner: nn.Block | nn.ParallelResidual
    """The block with this device's slices of the weights."""
    attention: str = eqx.field(static=True)
    """`"rows"` or `"heads"`."""
    overlap: str = eqx.field(static=True)
    """The `overlap` of `matmul_reduce_scatter`."""

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the block and return the new residual stream and cache."""
        block = self.inner
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        parts = read_block(block)
        mixer, feed_forward = parts.sublayers
        if parts.norm is not None:
            y, cache = self._run_sublayers(parts.norm(x), mixer.scale, mixer.layer, feed_forward.layer, tokens, cache)
            return x + y, cache, None
        assert mixer.norm is not None and feed_forward.norm is not None
        y, cache = self._run_sublayers(mixer.norm(x), mixer.scale, mixer.layer, None, tokens, cache)
        normalized = feed_forward.norm(x if parts.is_parallel else x + y)
        y = y + self._run_sublayers(normalized, feed_forward.scale, None, feed_forward.layer, tokens, None)[0]
        return x + y, cache, None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the empty cache of the block."""
        return self.inner.init_cache(batch, capacity, dtype)

    def _run_sublayers(
        self,
        x: Float[Array, "batch seq embed"],
        scale: float | None,
        attention: PyTree,
        mlp: PyTree,
        tokens: nn.Tokens,
        cache: PyTree,
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return what attention, a feed-forward layer or both add to the residual stream, and the cache.

        `x` is their normalized input. A layer that is None is left out.
        """
        ups = {} if mlp is None else up_projections(mlp)
        queries, keys = ([], []) if attention is None else ([attention.query], [attention.key, attention.value])
        wide, narrow = self._project(x, [*queries, *ups.values()], keys)
        pairs, outputs = [], []
        if attention is not None:
            key, value = narrow
            attended, cache = self._attend(attention, wide.pop(0), key, value, tokens, cache)
            pairs.append((attended, attention.output.flat_matrix(x.dtype)))
            outputs.append(attention.output)
        if mlp is not None:
            placeholders = *map(_Constant, wide), _Flatten()
            between_maps = eqx.tree_at(lambda m: [*(getattr(m, name) for name in ups), m.down], mlp, placeholders)
            activated = between_maps(wide[0])  # The placeholders ignore this input.
            pairs.append((activated, mlp.down.flat_matrix(x.dtype)))
            outputs.append(mlp.down)
        y = reduce_scatter_sum(pairs, self.overlap)
        for linear in outputs:
            y = _add_local_bias(y, linear.bias, TENSOR, -1)
        return y if scale is None else y * scale, cache

    def _project(
        self, x: Float[Array, "batch seq embed"], wide: list[nn.LinearMap], narrow: list[nn.LinearMap]
    ) -> tuple[list[Array], list[Array]]:
        """Project to this device's heads or hidden features (`wide`), and to keys and values (`narrow`)."""
        by_rows = self.attention == "rows"
        weights = [linear.flat_matrix(x.dtype) for linear in wide]
        narrow_weights = [linear.flat_matrix(x.dtype) for linear in narrow]
        products, partial = gather_and_project(x, weights, narrow_weights, self.overlap, by_rows)
        outputs = []
        for linear, y in zip(wide, products, strict=True):
            y = y.reshape(*y.shape[:-1], -1, *linear.output_shape[1:])
            outputs.append(_add_local_bias(y, linear.bias, FSDP, 0))
        keys = []
        for linear, y in zip(narrow, partial, strict=True):
            if by_rows:
                y = send.psum_scatter("keys and values over fsdp", y, FSDP)
            else:
                y = send.psum("keys and values over fsdp", y, FSDP)
            y = y.reshape(*y.shape[:-1], *linear.output_shape)
            keys.append(nn.add_float32(y, linear.bias))
        return outputs, keys

    def _attend(
        self,
        attention: nn.Attention,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "own_batch seq kv_heads head_dim"],
        value: Float[Array, "own_batch seq kv_heads head_dim"],
        tokens: nn.Tokens,
        cache: PyTree,
    ) -> tuple[Float[Array, "batch seq features"], PyTree]:
        """Run attention without its projections, on all heads of this device's rows or on its heads of all rows."""
        by_rows = self.attention == "rows"
        if by_rows:
            query = send.all_to_all("heads to rows", query, HEADS, 0, 2)
            tokens = jax.tree.map(functools.partial(take_local_slice, axis=HEADS, dim=0), tokens)
        placeholders = _Constant(query), _Constant(key), _Constant(value), _Flatten()
        without_projections = eqx.tree_at(lambda m: (m.query, m.key, m.value, m.output), attention, placeholders)
        y, cache = without_projections(_Flatten()(query), tokens, cache)
        if by_rows:
            y = send.all_to_all("rows to heads", y, HEADS, 2, 0)
        return y, cache


class TwoDimVocabulary(eqx.Module):
    """Embedding and logits with tables sharded over `vocab` and `embed`.

    Embedded vectors are reduce-scattered over features. For logits, hidden vectors are all-gathered over `tensor` and
    partial logits reduce-scattered over `fsdp`. `rows` is the table of the logits.
    """

    inner: SplitEmbedding
    rows: Float[Array, "vocab embed"]
    bias: Float[Array, "vocab"] | None

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """The table of the logits."""
        return self.rows

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return this device's features of each token's embedding."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return this device's logits."""
        gathered = send.all_gather("logits input", x, TENSOR, -1)
        logits = _multiply(gathered, self.rows.astype(x.dtype))
        logits = send.psum_scatter("partial logits", logits, FSDP, -1)
        return _add_local_bias(logits, self.bias, FSDP, 0)


class _Constant(eqx.Module):
    """Placeholder for a projection that has already run: returns the projection's result."""

    value: Float[Array, "..."]

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.value


class _Flatten(eqx.Module):
    """Placeholder for an output projection that runs later: only flattens all dims after `seq`."""

    def __call__(self, x: Float[Array, "batch seq *features"]) -> Float[Array, "batch seq flat"]:
        return x.reshape(*x.shape[:2], -1)


Norm = nn.Norm | Callable[[Array], Array]


class BlockParts(NamedTuple):
    """The sublayers of a block, and the norms around all sublayers together, which only a parallel block has."""

    is_parallel: bool
    sublayers: tuple[PyTree, ...]
    norm: Norm | None = None
    output_norm: Norm | None = None
    sum_norm: Norm | None = None


def read_block(block: nn.Block | nn.ParallelResidual) -> BlockParts:
    """Return the parts of a block whose sublayers run one after another (`Block`) or read one input."""
    if isinstance(block, nn.ParallelResidual):
        return BlockParts(True, block.branches, block.norm, block.output_norm, block.sum_norm)
    return BlockParts(False, block.sublayers)


def gather_and_project(
    x: Float[Array, "batch seq embed"],
    weights: list[Float[Array, "_ inputs"]],
    narrow: list[Float[Array, "_ inputs"]],
    overlap: str,
    by_rows: bool,
) -> tuple[list[Float[Array, "batch seq _"]], list[Float[Array, "_ seq _"]]]:
    """Return `all_gather(x) @ weight.T` for each weight, reduce-scattered over `fsdp`, and partial sums for `narrow`.

    `x` is all-gathered over `tensor` along the features that the products contract. With `by_rows`, the products with
    `narrow` are computed only for this device's rows (over `tensor`). `overlap` hides the reduce-scatters behind
    products or, if `fsdp` has one device, the all-gather.
    """

    def take_local_rows(y: Array) -> Array:
        return take_local_slice(y, TENSOR, 0) if by_rows else y

    if overlap == "none" or jax.lax.axis_size(FSDP) > 1:
        full = send.all_gather("column-parallel input over tensor", x, TENSOR, 2)
        products = [
            matmul_reduce_scatter(
                full, weight, FSDP, scatter="outputs", overlap=overlap, name="column-parallel output over fsdp"
            )
            for weight in weights
        ]
        return products, [_multiply(take_local_rows(full), w).astype(x.dtype) for w in narrow]

    def accumulate(sums: Sequence[Array], piece: Array, start: Array) -> Sequence[Array]:
        parts = [piece] * len(weights) + [take_local_rows(piece)] * len(narrow)
        columns = (_slice_columns(w, start, piece.shape[2]) for w in (*weights, *narrow))
        return [total + _multiply(*pair) for total, *pair in zip(sums, parts, columns)]

    sum_dtype = nn.at_least_float32(x.dtype)
    zeros = [jnp.zeros((*x.shape[:2], len(w)), sum_dtype) for w in weights]
    zeros += [jnp.zeros((*take_local_rows(x).shape[:2], len(w)), sum_dtype) for w in narrow]
    sums = circulate(
        Ring("column-parallel input over tensor", TENSOR, overlap == "bidirectional"), x, 2, accumulate, zeros
    )
    sums = [y.astype(x.dtype) for y in sums]
    return sums[: len(weights)], sums[len(weights) :]


def reduce_scatter_sum(pairs: Pairs, overlap: str) -> Float[Array, "batch seq embed"]:
    """Return the sum of `all_gather(y) @ weight.T` over pairs: gather over `fsdp`, reduce-scatter over `tensor`."""
    gathered = [(send.all_gather("row-parallel input over fsdp", y, FSDP, -1), weight) for y, weight in pairs]
    (y, weight), dim = pairs[0], pairs[0][0].ndim - 1

    def partial_output(start: int | Array, length: int) -> Array:
        """Return `length` features of the output, summed over this device's inputs."""
        return sum(_multiply(y, jax.lax.dynamic_slice_in_dim(weight, start, length, 0)) for y, weight in gathered)  # type: ignore[return-value]

    if overlap == "none":
        total = partial_output(0, len(weight)).astype(y.dtype)
        return send.psum_scatter("row-parallel output", total, TENSOR, dim)
    ring = Ring("row-parallel output", TENSOR, overlap == "bidirectional")
    return ring_reduce_scatter(ring, len(weight) // ring.devices, dim, partial_output, y.dtype)


def up_projections(mlp: nn.FeedForward) -> dict[str, nn.LinearMap]:
    """Return the projections of a feed-forward layer to its hidden features, by name."""
    fields = {field.name: getattr(mlp, field.name) for field in dataclasses.fields(mlp)}
    linears = {name: value for name, value in fields.items() if isinstance(value, nn.LinearMap)}
    return {name: linear for name, linear in linears.items() if linear.inputs == ("embed",)}


def _add_local_bias(
    y: Float[Array, "..."], bias: Float[Array, "..."] | None, axis: str, dim: int
) -> Float[Array, "..."]:
    """Add this device's part of a bias, which is split along `dim` over `axis`."""
    return nn.add_float32(y, None if bias is None else take_local_slice(bias, axis, dim))


def _slice_columns(weight: Float[Array, "outputs inputs"], start: Array, length: int) -> Float[Array, "outputs _"]:
    return jax.lax.dynamic_slice_in_dim(weight, start, length, 1)


def _multiply(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=nn.at_least_float32(x.dtype))
