"""Context parallelism: the tokens of each row are split over the devices of the axis `context`.

Only attention mixes tokens. So only attention cores are wrapped, and all other layers run on a device's own tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast, get_args, Literal, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .. import kernels
from .._annotation_checks import name_class
from ..nn import broadcast_float32, Mixer
from . import _collectives as send
from ._mesh import CONTEXT
from ._ring import Ring
from ._ring_attention import choose_ring_kernels, flash_ring_attend, ring_attend
from ._shard_map import vary, varying_axes


ContextMethod = Literal["ring", "gather", "heads"]
CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)


class ContextAttention(kernels.PiecewiseAttention):
    """Wrapper of an attention core for rows that are split over the axis `context`, for use inside `shard_map`.

    A call gets the queries, keys, values and tokens of this device's piece of each row, and returns the outputs of its
    queries. Pieces are in the order of `context_order`. `method` decides which arrays are sent. The formulas below give
    the bytes that a device sends in a forward and a backward pass, for `c` devices and rows of `T` tokens. The queries
    of a token have `n` bytes, and its keys and values `m` bytes.

    - `"ring"`: keys and values pass round a ring, and each device attends to the piece that it has (arXiv:2310.01889).
      A device needs memory for two pieces, and sends `3 m T (c-1)/c` bytes. The kernels of `inner` run if they support
      the pieces in the order in which `Plan` stores them; otherwise `BlockwiseAttention` runs, with the block size of
      `inner`.
    - `"gather"`: all keys and values are gathered, and gathered again in the backward pass. A device sends
      `3 m T (c-1)/c` bytes. Any `inner` is possible. With `remat="products"`, an `inner` that does not name its output
      "attended", such as `DotProductAttention`, runs again in the backward pass, with one more gather.
    - `"heads"`: an all-to-all gives each device all tokens of `heads / c` heads, and another all-to-all returns the
      outputs (DeepSpeed Ulysses, arXiv:2309.14509). A device sends `(4 n + 2 m) T (c-1)/c^2` bytes. Any `inner` is
      possible; `heads` must be a multiple of `c`.

    Raises a `ValueError` at trace time for heads that do not split, and for a call with a cache.
    """

    inner: kernels.Operation
    method: str = eqx.field(static=True)

    def __check_init__(self):
        if self.method not in CONTEXT_METHODS:
            raise ValueError(f"ContextAttention(method={self.method!r}): the methods are {', '.join(CONTEXT_METHODS)}.")
        if self.method == "ring":
            require_blockwise(self.inner)

    def supports(self, call: kernels.AttentionCall) -> str | None:
        """Return why a call is not supported, or None; `inner` decides or, on a ring, blockwise attention."""
        return require_blockwise(self.inner).supports(call) if self.method == "ring" else self.inner.supports(call)

    def __call__(self, call: kernels.AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Return the attention of this device's queries to the keys of all devices."""
        if call.kv_tokens is not None:
            raise ValueError(
                f"ContextAttention(method={self.method!r}) was given kv_tokens of shape "
                f"{call.kv_tokens.positions.shape}, the tokens of a cache, but supports only calls without a cache; "
                "wrap the model in ShardedModel, which splits the slots of caches."
            )
        if jax.lax.axis_size(CONTEXT) > 1 and CONTEXT not in varying_axes(call.tokens.positions):
            raise ValueError(
                f"ContextAttention(method={self.method!r}) was given positions that are the same on all devices of the "
                f"axis {CONTEXT!r}, although each device has other tokens; pass the model the tokens of its piece, "
                "such as the argument `tokens` of a loss under a plan: model.encode(batch.ids, tokens)."
            )
        arrays = vary((call.query, call.key, call.value, call.tokens), (CONTEXT,))
        query, key, value, tokens = arrays
        call = dataclasses.replace(call, query=query, key=key, value=value, tokens=tokens)
        return {"ring": self._ring, "gather": self._gather, "heads": self._heads}[self.method](call)

    def weights(self, call: kernels.AttentionCall) -> Float[Array, "*batch heads seq kv_seq"]:
        """Return the softmax weights of this device's queries for the keys of all devices, in reading order."""
        return kernels.attention_probabilities(self._with_all_keys(call))

    def weigh_values(
        self, weights: Float[Array, "*batch heads seq kv_seq"], call: kernels.AttentionCall
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Return the weighted sums of the values of all devices."""
        return kernels.weigh_values(weights, self._with_all_keys(call).value, call.query.dtype)

    def _with_all_keys(self, call: kernels.AttentionCall) -> kernels.AttentionCall:
        """Return the call with the keys, values and tokens of all devices, in reading order."""
        call = dataclasses.replace(call, tokens=vary(call.tokens, (CONTEXT,)))
        if self.method != "heads":
            return _with_gathered_keys(call, _gather_tokens_in_reading_order(call.tokens))
        key, value = (send.all_gather("gathered keys and values", x, CONTEXT, -3) for x in (call.key, call.value))
        return dataclasses.replace(call, key=key, value=value, kv_tokens=_gather_tokens(call.tokens))

    def _ring(self, call: kernels.AttentionCall) -> Array:
        ring = Ring("ring keys and values", CONTEXT)
        if (ring_kernels := choose_ring_kernels(self.inner, ring.devices, call)) is not None:
            return flash_ring_attend(ring_kernels, ring, call)
        settings = require_blockwise(self.inner).settings(call)
        arrays = call.query, call.key, call.value, call.tokens, call.alibi_slopes
        output, logsum = ring_attend(settings, ring, *arrays)
        return output if call.sinks is None else kernels.blockwise.with_sinks(output, logsum, call.sinks)

    def _gather(self, call: kernels.AttentionCall) -> Array:
        def attend(call: kernels.AttentionCall, kv_tokens: kernels.TokenPositions) -> Array:
            return self.inner(_with_gathered_keys(call, kv_tokens))

        kv_tokens = _gather_tokens_in_reading_order(call.tokens)
        # Do not save gathered keys and values for the backward pass; gather them again.
        attend = jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names("attended"))
        return attend(call, kv_tokens)

    def _heads(self, call: kernels.AttentionCall) -> Array:
        size, heads = jax.lax.axis_size(CONTEXT), call.query.shape[-2]
        copies = _count_copies(size, heads, call.key.shape[-2], "ContextAttention(method='heads')")
        seq, head = call.query.ndim - 3, call.query.ndim - 2

        def swap(x: Array) -> Array:
            # Remat policies that save products of linear maps also save arrays of this name, so recomputation does not
            # send the arrays again.
            return checkpoint_name(send.all_to_all("tokens to heads", x, CONTEXT, head, seq), "product")

        query, key, value = swap(call.query), *(swap(_repeat_heads(x, copies)) for x in (call.key, call.value))
        tokens = _gather_tokens(call.tokens)

        def slice_heads(x: Float[Array, "heads"] | None) -> Float[Array, "_"] | None:
            first = jax.lax.axis_index(CONTEXT) * (heads // size)
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, heads // size)

        by_head = {"sinks": slice_heads(call.sinks), "alibi_slopes": slice_heads(call.alibi_slopes)}
        output = self.inner(dataclasses.replace(call, query=query, key=key, value=value, tokens=tokens, **by_head))
        return checkpoint_name(send.all_to_all("heads to tokens", output, CONTEXT, seq, head), "attended")


def zigzag(seq: int, pieces: int) -> Int[np.ndarray, "seq"]:
    """Return the order of tokens that gives piece `i` of `c` the parts `i` and `2c-1-i` of `2c` equal parts of a row.

    Under a causal mask, late queries see many keys and early queries see few. With an early and a late part in each
    piece, all pieces have equal work in each step of the ring. The stored row is `row[zigzag(seq, c)]`. Raises a
    `ValueError` unless `2 * pieces` divides `seq`.
    """
    if pieces < 1 or seq % (2 * pieces):
        raise ValueError(
            f"zigzag(seq={seq}, pieces={pieces}): a row is cut into 2 * pieces = {2 * pieces} equal parts, so seq must "
            f"be a multiple of this; take seq={max(1, seq // max(1, 2 * pieces)) * 2 * max(1, pieces)} or fewer pieces."
        )
    parts = np.arange(seq).reshape(2 * pieces, -1)
    return np.stack([parts[:pieces], parts[: pieces - 1 : -1]], axis=1).reshape(-1)


def zigzag_inverse(seq: int, pieces: int) -> Int[np.ndarray, "seq"]:
    """Return the order that undoes `zigzag`: `stored[zigzag_inverse(seq, c)]` is the row in reading order."""
    return np.argsort(zigzag(seq, pieces))


def context_order(method: str, seq: int, pieces: int) -> Int[np.ndarray, "seq"]:
    """Return the order in which rows must be stored before `ContextAttention` cuts them into `pieces`.

    The order is `zigzag` for `"ring"` and `"gather"`. For `"heads"`, the order is reading order, because
    the inner attention sees unsplit rows.
    """
    if pieces == 1:
        return np.arange(seq)
    if method == "heads":
        if seq % pieces:
            raise ValueError(
                f"context_order('heads', seq={seq}, pieces={pieces}): rows are cut into equal pieces; take a multiple "
                f"of {pieces} for seq, such as {-(-seq // pieces) * pieces}."
            )
        return np.arange(seq)
    return zigzag(seq, pieces)


def check_context(
    method: str, size: int, core: kernels.Operation, *, seq: int, heads: int, kv_heads: int, needs: Sequence[str] = ()
) -> None:
    """Raise a `ValueError`, before anything is compiled, for an attention that cannot run on pieces of rows.

    Args:
        method: One of `CONTEXT_METHODS`.
        size: Number of pieces of a row.
        core: Operation that computes the attention.
        seq: Number of tokens of an unsplit row.
        heads: Number of query heads of a device, after a split over `tensor`.
        kv_heads: Number of key heads of a device, after a split over `tensor`.
        needs: Options of the attention, such as `softcap` and `sinks`, that the core must support.
    """
    ContextAttention(core, method)
    context_order(method, seq, size)
    if method == "heads":
        _count_copies(size, heads, kv_heads, f"check_context('heads', size={size})")
    if method != "ring" and (lacking := kernels.unsupported_options(core, needs)):
        raise ValueError(
            f"check_context({method!r}, core={core}): the core does not support {' and '.join(lacking)}; take "
            "core=kernels.BlockwiseAttention(), or method='ring', which computes by blocks itself."
        )


def refuse_pieces(size: int, path: str, mixer: Mixer) -> NoReturn:
    """Raise a `ValueError` for a mixer that cannot run on pieces of rows, such as a recurrence."""
    raise ValueError(
        f"Plan over context={size}: {path} has {name_class(mixer)}, which needs whole rows, because it reads "
        "tokens one after another or chooses among all tokens, but a device has pieces of rows; give the devices to "
        "another axis, such as tensor, which splits heads."
    )


def require_blockwise(core: kernels.Operation) -> kernels.BlockwiseAttention:
    """Return the blockwise attention that computes `core` on a ring; raise a `ValueError` if there is none."""
    if (loop := kernels.blockwise_of(core)) is not None:
        return loop
    raise ValueError(
        f"ContextAttention({core}, method='ring'): the ring combines partial results by their logsumexps, which this "
        "core does not return; take core=kernels.BlockwiseAttention(), or method='gather' or 'heads', which run any "
        "core."
    )


def _count_copies(size: int, heads: int, kv_heads: int, call: str) -> int:
    """Return how many copies of each key head are sent, so that each device gets the key heads of its query heads.

    `call` begins the error messages.
    """
    if heads % size:
        raise ValueError(
            f"{call}: {heads} query heads on a device do not split over {size} devices of the axis {CONTEXT!r}; take a "
            f"size that divides {heads}, or method='ring' or 'gather', which leave heads alone."
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{call}: {kv_heads} key heads on a device are neither a multiple nor a divisor of the {size} devices of "
            f"the axis {CONTEXT!r}, so devices cannot get whole key heads; take a size that divides {kv_heads}, or "
            "method='ring' or 'gather', which leave heads alone."
        )
    return 1 if kv_heads % size == 0 else size // kv_heads


def _repeat_heads(
    x: Float[Array, "*batch seq kv_heads head_dim"], copies: int
) -> Float[Array, "*batch seq heads head_dim"]:
    """Repeat each key head `copies` times."""
    repeated = broadcast_float32(x[..., None, :], (*x.shape[:-1], copies, x.shape[-1]))
    return repeated.reshape(*x.shape[:-2], -1, x.shape[-1])


def _gather_tokens(tokens: kernels.TokenPositions) -> kernels.TokenPositions:
    """Gather the tokens of all pieces, which are in reading order."""
    return jax.tree.map(lambda x: send.all_gather("token positions", x, CONTEXT, -1), tokens)


def _gather_tokens_in_reading_order(tokens: kernels.TokenPositions) -> kernels.TokenPositions:
    """Gather the tokens of all pieces, which are in the order of `zigzag`."""
    return jax.tree.map(lambda x: _gather_in_reading_order(x, 1), tokens)


def _with_gathered_keys(call: kernels.AttentionCall, kv_tokens: kernels.TokenPositions) -> kernels.AttentionCall:
    """Return the call with the keys and values of all pieces, in reading order; their tokens are `kv_tokens`."""
    key, value = (_gather_in_reading_order(x, 3) for x in (call.key, call.value))
    return dataclasses.replace(call, key=key, value=value, kv_tokens=kv_tokens)


def _gather_in_reading_order(x: Array, dims_from_end: int) -> Array:
    """Gather all pieces of an array, which are in the order of `zigzag`, and return the array in reading order.

    The dim of tokens is `x.ndim - dims_from_end`. Masks use positions, so any order gives the right result. In reading
    order, kernels that skip empty blocks find more empty blocks.
    """
    dim = x.ndim - dims_from_end
    pieces = send.all_gather("gathered keys and values", x, CONTEXT, stacks=True)
    early, late = jnp.split(pieces, 2, axis=dim + 1)
    parts = jnp.concatenate([early, late[::-1]])
    moved = jnp.moveaxis(parts, 0, dim)
    return moved.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def sum_rows(x: Float[Array, "batch seq"]) -> tuple[Float[Array, "batch"], int]:
    """Return the sum over the tokens of each row on all devices, and the number of devices that split a row.

    Outside of `shard_map`, return the row sums of `x`, and 1.
    """
    sums = jnp.sum(x, axis=-1)
    if CONTEXT not in varying_axes(x):
        return sums, 1
    return send.psum("row sums", sums, CONTEXT), jax.lax.axis_size(CONTEXT)


# Decoding.


class SplitCacheAttention(kernels.PiecewiseAttention):
    """Wrapper of an attention core for KV caches whose slots are split over the axis `context`.

    Queries are replicated. Each device attends to the keys that it holds, and the results of the devices are combined
    by their logsumexps, as in flash decoding with split keys. For each query and head, the collectives reduce a
    logsumexp, a sum of exponentials and an output of `v_dim` channels.
    """

    inner: kernels.Operation

    def supports(self, call: kernels.AttentionCall) -> str | None:
        """Return why a call is not supported, or None; blockwise attention, which runs on each device, decides."""
        return require_blockwise(self.inner).supports(call)

    def __call__(self, call: kernels.AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Return the attention to the slots of all devices."""
        output, share, total, peak = self._attend_to_piece(call)
        combined = send.psum("split cache sums", output.astype(share.dtype) * share[..., None], CONTEXT)
        combined = (combined / total[..., None]).astype(output.dtype)
        return (
            combined
            if call.sinks is None
            else kernels.blockwise.with_sinks(combined, jnp.log(total) + peak, call.sinks)
        )

    def weights(self, call: kernels.AttentionCall) -> Float[Array, "*batch heads seq kv_seq"]:
        """Return the softmax weights of this device's slots; the softmax is over the slots of all devices."""
        _, share, total, peak = self._attend_to_piece(call)
        if call.sinks is not None:
            total = total + jnp.exp(call.sinks.astype(total.dtype) - peak)
        piece = dataclasses.replace(call, sinks=None)
        factors = jnp.moveaxis(share / total, -1, -2)[..., None]
        return kernels.attention_probabilities(vary(piece, (CONTEXT,))) * factors

    def weigh_values(
        self, weights: Float[Array, "*batch heads seq kv_seq"], call: kernels.AttentionCall
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Return the weighted sums of the values in the slots of all devices."""
        output = kernels.weigh_values(weights, call.value, weights.dtype)
        return send.psum("split cache sums", output, CONTEXT).astype(call.query.dtype)

    def _attend_to_piece(self, call: kernels.AttentionCall) -> tuple[Array, Array, Array, Array]:
        """Return the output for this device's slots, and `share`, `total` and `peak` to combine the devices' outputs.

        `peak` is the largest logsumexp of a device. `share` is the sum of the exponentials of this device's scores, and
        `total` the sum over the scores of all devices, both divided by `exp(peak)`.
        """
        mask = cast(kernels.Mask, call.mask)
        settings = kernels.blockwise.BlockwiseSettings(
            mask, call.scale, call.softcap, require_blockwise(self.inner).block
        )
        tokens = kernels.TokenPositions(call.tokens.positions)
        arrays = vary((call.query, call.key, call.value, tokens, call.kv_tokens, call.alibi_slopes), (CONTEXT,))
        output, logsum = kernels.blockwise.attend(settings, *arrays)
        # The combined output does not depend on `peak`, so `peak` needs no gradient.
        peak = send.pmax("split cache maxima", jax.lax.stop_gradient(logsum), CONTEXT)
        share = jnp.exp(logsum - peak)
        return output, share, send.psum("split cache sums", share, CONTEXT), peak
