"""Layers whose weights are split on both of their dims, for text: "Efficiently Scaling Transformer Inference".

The 2-D weight-stationary layout of Pope et al. (2022, arXiv:2211.05102): `embed` over the axis `fsdp` (theirs: X),
heads and hidden features over `tensor` (YZ), and the stream between layers over both. No weight is ever sent; with more
devices each sends less, since what is gathered or reduced over one axis is split over the other.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from .. import _send as send
from .._axes import FSDP, TENSOR
from .._ring import circulate, collect, Ring
from .._vary import own_part
from ..tensor._collective_matmul import matmul_reduce_scatter
from ..tensor._vocabulary import SplitEmbedding


STREAM = (FSDP, TENSOR)  # features of the stream are split over `fsdp` first, then `tensor`
HEADS = (TENSOR, FSDP)  # heads and hidden features after their sums, rows of caches, ids: the other way round

Pairs = list[tuple[Float[Array, "batch seq _"], Float[Array, "full_embed _"]]]


class TwoDimBlock(nn.Layer):
    """A block run on this device's part of the stream, with a slice of both dims of its weights.

    Layers that read one normed input share its gather over `tensor`; their products are partial sums over `fsdp`, which
    are scattered. What goes back is gathered over `fsdp`, and all layers' products are scattered over `tensor` as one
    sum. `attention="rows"` exchanges heads for rows, so that each device keeps the keys of its own rows alone;
    `"heads"` keeps one key head of all rows on every device.
    """

    inner: nn.Block | nn.ParallelBlock
    attention: str = eqx.field(static=True)
    overlap: str = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """The block's own call."""
        block = self.inner
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        mixer, fed = block.mixer, block.feed_forward
        assert fed is not None and isinstance(mixer, nn.Residual)
        is_parallel = isinstance(block, nn.ParallelBlock)
        if is_parallel and block.norm is not None:
            y, cache = self._added(block.norm(x), mixer.scale, mixer.layer, fed.layer, tokens, cache)
            return x + y, cache, None
        assert mixer.norm is not None and fed.norm is not None
        y, cache = self._added(mixer.norm(x), mixer.scale, mixer.layer, None, tokens, cache)
        given = fed.norm(x if is_parallel else x + y)
        y = y + self._added(given, fed.scale, None, fed.layer, tokens, None)[0]
        return x + y, cache, None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The block's own empty cache."""
        return self.inner.init_cache(batch, capacity, dtype)

    def _added(
        self,
        x: Float[Array, "batch seq embed"],
        scale: float | None,
        attention: PyTree,
        mlp: PyTree,
        tokens: nn.Tokens,
        cache: PyTree,
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """What the layers that read `x` add to the stream: attention, a feed-forward layer or both; None is neither."""
        ups = {} if mlp is None else ups_of(mlp)
        queries, keys = ([], []) if attention is None else ([attention.query], [attention.key, attention.value])
        wide, narrow = self._read(x, [*queries, *ups.values()], keys)
        pairs, outputs = [], []
        if attention is not None:
            key, value = narrow
            attended, cache = self._attend(attention, wide.pop(0), key, value, tokens, cache)
            pairs.append((attended, attention.output.flat_matrix(x.dtype)))
            outputs.append(attention.output)
        if mlp is not None:
            stands = *map(_Given, wide), _Left()
            activated = eqx.tree_at(lambda m: [*(getattr(m, name) for name in ups), m.down], mlp, stands)(wide[0])
            pairs.append((activated, mlp.down.flat_matrix(x.dtype)))
            outputs.append(mlp.down)
        y = scattered_sum(pairs, self.overlap)
        for linear in outputs:
            y = _with_own(y, linear.bias, TENSOR, -1)
        return y if scale is None else y * scale, cache

    def _read(
        self, x: Float[Array, "batch seq embed"], wide: list[nn.LinearMap], narrow: list[nn.LinearMap]
    ) -> tuple[list[Array], list[Array]]:
        """This device's outputs of maps to heads or hidden features, and keys and values of its rows, or of all."""
        by_rows = self.attention == "rows"
        weights = [linear.flat_matrix(x.dtype) for linear in wide]
        whole = [linear.flat_matrix(x.dtype) for linear in narrow]
        products, partial = gathered_products(x, weights, whole, self.overlap, by_rows)
        outputs = []
        for linear, y in zip(wide, products, strict=True):
            y = y.reshape(*y.shape[:-1], -1, *linear.output_shape[1:])
            outputs.append(_with_own(y, linear.bias, FSDP, 0))
        keys = []
        for linear, y in zip(narrow, partial, strict=True):
            if by_rows:
                y = send.psum_scatter("keys and values of rows", y, FSDP)
            else:
                y = send.psum("keys and values of rows", y, FSDP)
            y = y.reshape(*y.shape[:-1], *linear.output_shape)
            keys.append(nn.wide_sum(y, linear.bias))
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
        """The attention's own call, without its maps, on all heads of this device's rows or its heads of all rows."""
        by_rows = self.attention == "rows"
        if by_rows:
            query = send.all_to_all("heads to rows", query, HEADS, 0, 2)
            tokens = jax.tree.map(lambda x: own_part(x, HEADS, 0), tokens)
        stands = _Given(query), _Given(key), _Given(value), _Left()
        bare = eqx.tree_at(lambda m: (m.query, m.key, m.value, m.output), attention, stands)
        y, cache = bare(_Left()(query), tokens, cache)
        if by_rows:
            y = send.all_to_all("rows to heads", y, HEADS, 2, 0)
        return y, cache


class TwoDimVocabulary(eqx.Module):
    """Lookup and logits by tables of which this device holds a slice of some ids' features.

    Looked-up vectors are scattered over features; hidden vectors are gathered over `tensor`, and their partial logits
    scattered over `fsdp`. `rows` is the table that gives logits.
    """

    inner: SplitEmbedding
    rows: Float[Array, "vocab embed"]
    bias: Float[Array, "vocab"] | None

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """The rows that give logits."""
        return self.rows

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """This device's features of each token's vector."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """This device's logits."""
        whole = send.all_gather("stream for logits", x, TENSOR, -1)
        logits = _product(whole, self.rows.astype(x.dtype))
        logits = send.psum_scatter("partial logits", logits, FSDP, -1)
        return _with_own(logits, self.bias, FSDP, 0)


class _Given(eqx.Module):
    """Stands for a map whose result is known."""

    value: Float[Array, "..."]

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.value


class _Left(eqx.Module):
    """Stands for a map that is applied later: its input, all dims but rows and tokens as one."""

    def __call__(self, x: Float[Array, "batch seq *features"]) -> Float[Array, "batch seq flat"]:
        return x.reshape(*x.shape[:2], -1)


def gathered_products(
    x: Float[Array, "batch seq embed"],
    weights: list[Float[Array, "_ inputs"]],
    narrow: list[Float[Array, "_ inputs"]],
    overlap: str,
    by_rows: bool,
) -> tuple[list[Float[Array, "batch seq _"]], list[Float[Array, "_ seq _"]]]:
    """`gather(x) @ weight.T` for each weight, summed over `fsdp` and scattered there; partial sums for the `narrow`.

    `x` is gathered over `tensor` on its features, which the products contract. With `by_rows`, the narrow products are
    computed for this device's rows (over `tensor`) only. `overlap` hides the scatters behind products or, where `fsdp`
    has one device, the gather.
    """
    own = (lambda y: own_part(y, TENSOR, 0)) if by_rows else (lambda y: y)
    if overlap == "none" or jax.lax.axis_size(FSDP) > 1:
        full = send.all_gather("stream for wide maps", x, TENSOR, 2)
        product = lambda w: matmul_reduce_scatter(full, w, FSDP, scatter="outputs", overlap=overlap, name="wide maps")
        products = list(map(product, weights))
        return products, [_product(own(full), w).astype(x.dtype) for w in narrow]

    def grow(sums: Sequence[Array], piece: Array, start: Array) -> Sequence[Array]:
        parts = [piece] * len(weights) + [own(piece)] * len(narrow)
        columns = (_columns(w, start, piece.shape[2]) for w in (*weights, *narrow))
        return [total + _product(*pair) for total, *pair in zip(sums, parts, columns)]

    exact = nn.at_least_float32(x.dtype)
    empty = [jnp.zeros((*x.shape[:2], len(w)), exact) for w in weights]
    empty += [jnp.zeros((*own(x).shape[:2], len(w)), exact) for w in narrow]
    sums = circulate(Ring("stream for wide maps", TENSOR, overlap == "bidirectional"), x, 2, grow, empty)
    sums = [y.astype(x.dtype) for y in sums]
    return sums[: len(weights)], sums[len(weights) :]


def scattered_sum(pairs: Pairs, overlap: str) -> Float[Array, "batch seq embed"]:
    """The sum of `gather(y) @ weight.T` over pairs, gathered over `fsdp`, summed over `tensor` and scattered there."""
    whole = [(send.all_gather("inputs of maps to the stream", y, FSDP, -1), weight) for y, weight in pairs]
    (y, weight), dim = pairs[0], pairs[0][0].ndim - 1

    def share(start: int | Array, length: int) -> Array:
        return sum(_product(y, jax.lax.dynamic_slice_in_dim(weight, start, length, 0)) for y, weight in whole)  # type: ignore[return-value]

    if overlap == "none":
        total = share(0, len(weight)).astype(y.dtype)
        return send.psum_scatter("maps to the stream", total, TENSOR, dim)
    ring = Ring("maps to the stream", TENSOR, overlap == "bidirectional")
    return collect(ring, len(weight) // ring.devices, dim, share, y.dtype)


def ups_of(mlp: nn.MLP | nn.GatedMLP) -> dict[str, Any]:
    """A feed-forward layer's maps to hidden features, by name."""
    return {"gate": mlp.gate, "up": mlp.up} if isinstance(mlp, nn.GatedMLP) else {"up": mlp.up}


def _with_own(y: Float[Array, "..."], bias: Float[Array, "..."] | None, axis: str, dim: int) -> Float[Array, "..."]:
    return nn.wide_sum(y, None if bias is None else own_part(bias, axis, dim))


def _columns(weight: Float[Array, "outputs inputs"], start: Array, length: int) -> Float[Array, "outputs _"]:
    return jax.lax.dynamic_slice_in_dim(weight, start, length, 1)


def _product(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "*batch outputs"]:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=nn.at_least_float32(x.dtype))
