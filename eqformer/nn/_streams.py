"""Several residual streams of each token: hyper-connections around sublayers, and the streams' beginning and end.

Activations are `*batch streams seq embed`: the batch is first, and tokens and channels are last, as in a single stream.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ._block import Residual
from ._contracts import Mixer, Routed, Sublayer
from ._dtype import at_least_float32, broadcast_float32
from ._model_contracts import StreamExpansion, StreamMap, StreamMerge
from ._module import float32_field
from ._norm import Norm
from ._tokens import Tokens, tokens_or_default, with_row_layout_of


class ExpandStreams(StreamExpansion):
    """The beginning of the streams: each of the `streams` residual streams is a copy of the embedding."""

    streams: int = eqx.field(static=True)

    def __check_init__(self):
        if self.streams < 1:
            raise ValueError(f"ExpandStreams(streams={self.streams}): a token has at least one stream.")

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch streams seq embed"]:
        """Copy `x` into every stream."""
        return broadcast_float32(x[..., None, :, :], (*x.shape[:-2], self.streams, *x.shape[-2:]))


class StreamWeights(StreamMap):
    """Logits of the weights of a token's streams, computed from all its streams: `scale * (W x) / rms(x) + base`.

    `x` is the vector of all channels of all streams, and `rms(x)` the root of `mean(x^2) + eps`. There is a group of
    logits for each use, such as reading and writing, and `scale` has one factor for each group. Everything is computed
    in float32 at least.
    """

    sizes: tuple[int, ...] = eqx.field(static=True)
    """The number of weights of each use."""
    eps: float = eqx.field(static=True)
    weight: Float[Array, "stream_logits streams embed"] = float32_field()
    base: Float[Array, "stream_logits"] = float32_field()
    scale: Float[Array, "uses"] = float32_field()

    def __init__(
        self,
        *,
        streams: int,
        embed: int,
        base: Sequence[Float[Array, "*streams"]],
        eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Draw the map from a normal distribution of deviation 1/sqrt(channels); the scale begins at 0.01.

        Args:
            streams: Streams of a token.
            embed: Channels of a stream.
            base: The initial `base`: an array for each use, with an entry for each logit of the use.
            eps: Added to the mean of squares.
            key: Random key for the weights.
        """
        self.base = jnp.concatenate([part.reshape(-1) for part in base]).astype(jnp.float32)
        self.sizes, self.eps = tuple(part.size for part in base), eps
        self.weight = (streams * embed) ** -0.5 * jax.random.normal(key, (len(self.base), streams, embed), jnp.float32)
        self.scale = jnp.full(len(base), 0.01, jnp.float32)

    def project(
        self,
        x: Float[Array, "*batch streams seq embed"],
        add: Callable[[Float[Array, "*batch seq sums"]], Float[Array, "*batch seq sums"]],
        slices: int = 1,
    ) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return the logits of each use.

        `add` sums products and squares over the `slices` devices that share the channels.
        """
        wide = x.astype(at_least_float32(x.dtype))
        with jax.default_matmul_precision("highest"):  # A rounding error of a stream's weight changes all its channels.
            products = jnp.einsum("...nsd,mnd->...sm", wide, self.weight.astype(wide.dtype))
        sums = add(jnp.concatenate([products, jnp.sum(wide * wide, (-3, -1))[..., None]], -1))
        channels = slices * x.shape[-3] * x.shape[-1]
        normed = sums[..., :-1] * jax.lax.rsqrt(sums[..., -1:] / channels + self.eps)
        starts = [sum(self.sizes[:use]) for use in range(1, len(self.sizes))]
        by_use = zip(jnp.split(normed, starts, -1), jnp.split(self.base, starts), strict=True)
        return tuple(
            logits * self.scale[use].astype(wide.dtype) + base.astype(wide.dtype)
            for use, (logits, base) in enumerate(by_use)
        )


@dataclasses.dataclass(frozen=True)
class Sinkhorn:
    """Matrices whose rows and columns add up to 1, by alternating normalization (Sinkhorn and Knopp 1967).

    The start is the softmax of the logits over each row, plus `eps`, divided by its column sums. This matrix is then
    divided by its row sums and by its column sums, `iterations - 1` times. `eps` is added to all sums.
    """

    iterations: int = 20
    eps: float = 1e-6

    def __post_init__(self):
        if self.iterations < 1:
            raise ValueError(f"Sinkhorn(iterations={self.iterations}): columns are normalized at least once.")

    def __call__(self, logits: Float[Array, "*batch inputs outputs"]) -> Float[Array, "*batch inputs outputs"]:
        """Return, for each matrix of logits, a matrix whose rows and columns add up to 1."""

        def divide(matrix: Array, axis: int) -> Array:
            return matrix / (jnp.sum(matrix, axis, keepdims=True) + self.eps)

        def iterate(matrix: Array, _: None) -> tuple[Array, None]:
            return divide(divide(matrix, -1), -2), None

        matrix = divide(jax.nn.softmax(logits, axis=-1) + self.eps, -2)
        return jax.lax.scan(iterate, matrix, None, length=self.iterations - 1)[0]


class StreamSublayer(Sublayer):
    """A sublayer of several residual streams around the branch of a `Residual`, whose input is a sum of streams."""

    branch: Residual
    """The sublayer, without a `sum_norm`; its input and output are single streams."""

    def __check_init__(self):
        if self.branch.sum_norm is not None:
            raise ValueError(
                f"{type(self).__name__}(branch=Residual(sum_norm=...)): the branch is added to several streams, and no "
                "norm of a sum is computed; leave the norm out."
            )

    @property
    def layer(self) -> Mixer | Routed | Callable[..., Array]:
        """The branch's layer."""
        return self.branch.layer

    @property
    def norm(self) -> Norm | Callable[[Array], Array] | None:
        """The norm of the layer's input."""
        return self.branch.norm

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the branch's empty cache."""
        return self.branch.init_cache(batch, capacity, dtype)


class HyperConnection(StreamSublayer):
    """A sublayer of several residual streams (Zhu et al. 2024, arXiv:2409.19606): `y_k = sum_j M_jk x_j + w_k f(s)`.

    `f` is the branch of a `Residual`, with its norms and dropout. Its input is the sum `s = sum_j r_j x_j` of streams.
    The weights of reading `r = sigmoid(logits) + eps`, of writing `w = write_scale * sigmoid(logits) + write_eps`, and
    of mixing `M` come from the logits that `StreamWeights` computes from all streams of the token.

    - Manifold-constrained hyper-connections (mHC, Xie et al. 2025, arXiv:2512.24880; DeepSeek-V4): `M` is a matrix
      whose rows and columns add up to 1, by `mixing=Sinkhorn()`.
    - Hy4's independent hyper-connections: `mixing=None`, streams are not mixed, and `M` is the identity.
    """

    weights: StreamMap
    mixing: Sinkhorn | None = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    write_scale: float = eqx.field(static=True)
    write_eps: float = eqx.field(static=True)

    def __init__(
        self,
        branch: Residual,
        *,
        streams: int,
        embed: int,
        mixing: Sinkhorn | None = Sinkhorn(),
        eps: float = 1e-6,
        write_scale: float = 2.0,
        write_eps: float = 0.0,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Draw the weights.

        At first, a layer of two or more streams reads nearly the mean of the streams. With the default `write_scale`
        and `write_eps`, it adds its output to each stream with a weight near 1.

        Args:
            branch: The sublayer.
            streams: Streams of a token.
            embed: Channels of a stream.
            mixing: Makes the matrix that mixes the streams; None: streams are not mixed.
            eps: Added to the weights of reading.
            write_scale: The factor of the sigmoid in the weights of writing.
            write_eps: Added to the weights of writing.
            norm_eps: Added to the mean of squares of all channels.
            key: Random key for the weights.
        """
        base = [_read_base(streams), jnp.zeros(streams)]
        base += [] if mixing is None else [_DIAGONAL * jnp.eye(streams)]
        self.branch, self.mixing = branch, mixing
        self.weights = StreamWeights(streams=streams, embed=embed, base=base, eps=norm_eps, key=key)
        self.eps, self.write_scale, self.write_eps = eps, write_scale, write_eps

    def __call__(
        self,
        x: Float[Array, "*batch streams seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch streams seq embed"], PyTree, PyTree]:
        """Mix the streams of `x`, and write the branch's output to each of them."""
        tokens = tokens_of_streams(tokens_or_default(tokens, x.shape[:-1], cache), x)
        read_logits, write_logits, *mix_logits = self.weights(x)
        branch_input = sum_streams(x, jax.nn.sigmoid(read_logits) + self.eps)
        y, cache, aux = self.branch.run_branch(branch_input, tokens, cache, index=index)
        wide, streams = at_least_float32(x.dtype), x.shape[-3]
        mixed = x.astype(wide)
        if self.mixing is not None:
            (logits,) = mix_logits
            matrix = _mix_matrix(self.mixing, logits.reshape(*logits.shape[:-1], streams, streams))
            # The dims: rows, the old stream, the new stream, tokens, channels.
            by_stream = jnp.moveaxis(matrix, -3, -1)[..., None]
            mixed = jnp.sum(by_stream * mixed[..., :, None, :, :], axis=-4)
        write = self.write_scale * jax.nn.sigmoid(write_logits) + self.write_eps
        return add_to_streams(mixed, y, write).astype(x.dtype), cache, aux


class MergeStreams(StreamMerge):
    """The end of the streams, which takes the place of a model's `norm`: the norm of the streams' weighted sum.

    The weights of a token's streams are `sigmoid(logits) + eps`, with the logits of `StreamWeights`.
    """

    weights: StreamMap
    norm: Norm
    """The norm of the sum."""
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        norm: Norm,
        *,
        streams: int,
        embed: int,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        """Draw the weights; at first the sum of two or more streams is nearly their mean.

        Args:
            norm: The norm of the sum.
            streams: Streams of a token.
            embed: Channels of a stream.
            eps: Added to the weights.
            norm_eps: Added to the mean of squares of all channels.
            key: Random key for the weights.
        """
        base = [_read_base(streams)]
        self.weights = StreamWeights(streams=streams, embed=embed, base=base, eps=norm_eps, key=key)
        self.norm, self.eps = norm, eps

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the norm of the sum."""
        (logits,) = self.weights(x)
        return self.norm(sum_streams(x, jax.nn.sigmoid(logits) + self.eps))


class MeanStreams(StreamMerge):
    """The end of the streams without weights: the norm of the streams' mean (GLM-5.3-Flash)."""

    norm: Norm
    """The norm of the mean."""

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the norm of the mean, which is computed in float32 at least."""
        return self.norm(jnp.mean(x.astype(at_least_float32(x.dtype)), axis=-3).astype(x.dtype))


def sum_streams(
    x: Float[Array, "*batch streams seq embed"], weights: Float[Array, "*batch seq streams"]
) -> Float[Array, "*batch seq embed"]:
    """Return the weighted sum of each token's streams: computed in the weights' dtype, returned in the dtype of `x`."""
    by_stream = jnp.swapaxes(weights, -1, -2)[..., None]
    return jnp.sum(by_stream * x.astype(weights.dtype), axis=-3).astype(x.dtype)


def add_to_streams(
    x: Float[Array, "*batch streams seq embed"],
    y: Float[Array, "*batch seq embed"],
    weights: Float[Array, "*batch seq streams"],
) -> Float[Array, "*batch streams seq embed"]:
    """Return each stream of `x` plus its weight times `y`, computed in the dtype of `x`."""
    return x + jnp.swapaxes(weights, -1, -2)[..., None] * y.astype(x.dtype)[..., None, :, :]


def _mix_matrix(
    mixing: Sinkhorn, logits: Float[Array, "*batch seq inputs outputs"]
) -> Float[Array, "*batch seq inputs outputs"]:
    # The backward pass runs the iterations again, instead of keeping a matrix of each token for every iteration.
    return jax.checkpoint(mixing)(logits)


def _read_base(streams: int) -> Float[Array, "streams"]:
    """Return the logits whose sigmoids are `1 / streams`; for one stream 0, whose sigmoid is 1/2."""
    return jnp.full(streams, -math.log(max(streams - 1, 1)))


_DIAGONAL = 4.0
"""The initial logit of mixing a stream into itself; the initial logits between different streams are 0."""


def tokens_of_streams(tokens: Tokens, x: Float[Array, "*batch streams seq embed"]) -> Tokens:
    """Return the tokens without a dim of streams, which tokens have if they were made for the shape of `x`."""
    if tokens.positions.ndim < x.ndim - 1:
        return tokens
    return with_row_layout_of(jax.tree.map(lambda array: array[..., 0, :], tokens), tokens)
