"""Attention residuals: a sublayer reads a weighted sum of the outputs of earlier blocks of sublayers.

The weights are a softmax. The residual streams are an array `*batch streams seq embed`, as with hyper-connections. The
first stream is the sum of the current block, and the next streams are slots for the sums of finished blocks. All
channels of the last stream hold the number of sublayers that have run. This count tells a sublayer which slots are
filled, so that all layers have the same program and a scan can run them.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._block import Residual
from ._dtype import at_least_float32
from ._model_contracts import StreamExpansion, StreamMap, StreamMerge
from ._norm import Norm
from ._streams import StreamSublayer, sum_streams, tokens_of_streams
from ._tokens import Tokens, tokens_or_default


_LARGEST_COUNT = 256
"""The largest number up to which bfloat16 holds every whole number."""


class ExpandBlocks(StreamExpansion):
    """The expansion of the embedding to streams, at the beginning of a model with attention residuals.

    The embedding becomes the current block's sum; the slots for finished blocks are empty, and the count is 0.
    """

    streams: int = eqx.field(static=True)
    """Number of streams: the sum of the current block, a slot for each block, and the count of sublayers."""

    def __init__(self, *, sublayers: int, block: int):
        """Make a slot for each block.

        Args:
            sublayers: Number of sublayers of the whole model, at most 256, the largest count that bfloat16 holds.
            block: Number of sublayers of a block.
        """
        if not 1 <= sublayers <= _LARGEST_COUNT:
            raise ValueError(
                f"ExpandBlocks(sublayers={sublayers}): a stream of the compute dtype counts sublayers, and bfloat16 "
                f"counts up to {_LARGEST_COUNT}; give a number from 1 to {_LARGEST_COUNT}."
            )
        _check_block("ExpandBlocks", block)
        self.streams = 2 + -(-sublayers // block)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch streams seq embed"]:
        """Return the streams before the first sublayer."""
        padding = [(0, 0)] * (x.ndim - 2) + [(0, self.streams - 1), (0, 0), (0, 0)]
        return jnp.pad(x[..., None, :, :], padding)


class BlockScores(StreamMap):
    """Scores of the softmax over blocks: `sum(weight * norm * v) / rms(v)` for the vector `v` of each block.

    `rms(v)` is the root of `mean(v^2) + eps`. Everything is computed in float32 at least.
    """

    norm: Float[Array, "embed"]
    """The scale of an RMSNorm of the blocks."""
    weight: Float[Array, "embed"]
    """The query, which is the same for all tokens."""
    eps: float = eqx.field(static=True)

    def __init__(self, *, embed: int, eps: float = 1e-5):
        """Begin with a query of zeros, so that the softmax is the mean of the blocks (arXiv:2603.15031)."""
        self.norm, self.weight, self.eps = jnp.ones(embed, jnp.float32), jnp.zeros(embed, jnp.float32), eps

    def project(
        self,
        x: Float[Array, "*batch streams seq embed"],
        add: Callable[[Float[Array, "*batch seq sums"]], Float[Array, "*batch seq sums"]],
        slices: int = 1,
    ) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return one score for each stream; `add` sums over the `slices` devices that share the channels."""
        dtype = at_least_float32(x.dtype)
        wide, query = x.astype(dtype), self.norm.astype(dtype) * self.weight.astype(dtype)
        with jax.default_matmul_precision("highest"):  # A rounding error of a score changes all channels of the sum.
            products = jnp.einsum("...nsd,d->...sn", wide, query)
        squares = jnp.swapaxes(jnp.sum(wide * wide, -1), -1, -2)
        products, squares = jnp.split(add(jnp.concatenate([products, squares], -1)), 2, -1)
        return (products * jax.lax.rsqrt(squares / (slices * x.shape[-1]) + self.eps),)


class AttentionResidual(StreamSublayer):
    """A sublayer that reads a weighted sum of blocks (Kimi team 2026, arXiv:2603.15031): `s <- s + f(sum_j p_j v_j)`.

    `f` is the branch of a `Residual`, with its norms and dropout. The vectors `v_j` are the sums of the finished blocks
    and `s`, the sum of the current block. The weights `p` are the softmax of the vectors' `BlockScores`. The embedding
    is the first finished block. After every `block` sublayers, `s` becomes a finished block, and a new sum begins at
    zero; the first sublayer of the new block still reads the old `s`.
    """

    scores: StreamMap
    block: int = eqx.field(static=True)
    """Number of sublayers of a block, such as 8 for blocks of four layers with attention and a feed-forward layer."""

    def __init__(self, branch: Residual, *, embed: int, block: int, eps: float = 1e-5):
        """Initialize the scores so that all blocks have equal weights.

        Args:
            branch: The sublayer.
            embed: Channels of the residual stream.
            block: Number of sublayers of a block.
            eps: Added to the mean square of a block's vector.
        """
        _check_block("AttentionResidual", block)
        self.branch, self.block, self.scores = branch, block, BlockScores(embed=embed, eps=eps)

    def __call__(
        self,
        x: Float[Array, "*batch streams seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch streams seq embed"], PyTree, PyTree]:
        """Add the branch's output to the sum of the current block, and count the sublayer."""
        tokens = tokens_of_streams(tokens_or_default(tokens, x.shape[:-1], cache), x)
        count, slots = _count_sublayers(x), x.shape[-3] - 2
        y, cache, aux = self.branch.run_branch(
            _mix_blocks(self.scores, x, _is_filled(count, self.block, slots)), tokens, cache, index=index
        )
        total, blocks, counter = jnp.split(x, [1, 1 + slots], axis=-3)
        # The first sublayer of a block moves the previous block's sum into a slot, and begins a new sum.
        begins = (count % self.block == 0)[..., None, :, None]
        is_next = (jnp.arange(slots, dtype=jnp.int32)[:, None] == (count // self.block)[..., None, :])[..., None]
        blocks = jnp.where(begins & is_next, total, blocks)
        total = jnp.where(begins, jnp.zeros_like(total), total) + y[..., None, :, :]
        return jnp.concatenate([total, blocks, counter + jnp.ones_like(counter)], axis=-3), cache, aux


class MergeBlocks(StreamMerge):
    """The final norm of a model with attention residuals, the norm of a weighted sum of blocks.

    It takes the place of the model's `norm`.
    """

    scores: StreamMap
    norm: Norm
    """The norm of the weighted sum."""
    block: int = eqx.field(static=True)
    """Number of sublayers of a block."""

    def __init__(self, norm: Norm, *, embed: int, block: int, eps: float = 1e-5):
        """Initialize the scores so that all blocks have equal weights.

        Args:
            norm: The norm of the weighted sum.
            embed: Channels of the residual stream.
            block: Number of sublayers of a block, as in each `AttentionResidual`.
            eps: Added to the mean square of a block's vector.
        """
        _check_block("MergeBlocks", block)
        self.norm, self.block, self.scores = norm, block, BlockScores(embed=embed, eps=eps)

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the norm of the weighted sum."""
        is_filled = _is_filled(_count_sublayers(x), self.block, x.shape[-3] - 2)
        return self.norm(_mix_blocks(self.scores, x, is_filled))


def _count_sublayers(x: Float[Array, "*batch streams seq embed"]) -> Int[Array, "*batch seq"]:
    """Return the number of sublayers that have run, which every channel of the last stream holds."""
    return jax.lax.stop_gradient(x[..., -1, :, 0]).astype(jnp.int32)


def _is_filled(count: Int[Array, "*batch seq"], block: int, slots: int) -> Bool[Array, "*batch seq sources"]:
    """Return which vectors exist after `count` sublayers: the current sum always, and the slots of finished blocks."""
    finished = (count + block - 1) // block
    return jnp.arange(1 + slots, dtype=jnp.int32) <= finished[..., None]


def _mix_blocks(
    score: Callable[..., tuple[Array, ...]],
    x: Float[Array, "*batch streams seq embed"],
    is_filled: Bool[Array, "*batch seq sources"],
) -> Float[Array, "*batch seq embed"]:
    """Return the sum of a token's vectors, weighted by the softmax of their scores; empty slots have no weight."""
    sources = x[..., :-1, :, :]
    (scores,) = score(sources)
    weights = jax.nn.softmax(jnp.where(is_filled, scores, -jnp.inf), axis=-1)
    return sum_streams(sources, weights)


def _check_block(name: str, block: int) -> None:
    if block < 1:
        raise ValueError(f"{name}(block={block}): a block has at least one sublayer.")
