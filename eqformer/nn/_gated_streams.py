"""Gated residual streams: sublayers that read a gated mean of all normalized streams, and the streams' end."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ._block import Residual
from ._dtype import at_least_float32
from ._linear import Linear, LinearMap
from ._mlp import silu
from ._model_contracts import StreamMerge
from ._module import Module
from ._norm import Norm, RMSNorm
from ._streams import add_to_streams, StreamSublayer, tokens_of_streams
from ._tokens import Tokens, tokens_or_default


class StreamGates(Module):
    """The gated mean `mean_s(g_s n_s)` of the normalized streams `n_s = norm(x_s)` of a token (Qwen4-Exp).

    Each channel of each stream has its own gate. A low-rank map of all normalized streams computes the gates,
    `g = sigmoid(up(silu(down(n) / streams)))`.
    """

    norm: Norm
    down: LinearMap
    up: LinearMap

    def __init__(self, *, streams: int, embed: int, rank: int, eps: float = 1e-6, key: Key[Array, ""]):
        """Initialize the weights.

        Args:
            streams: Streams of a token.
            embed: Channels of a stream.
            rank: Channels between the two maps.
            eps: Added to the mean of squares in the norms.
            key: Random key for the weights.
        """
        down, up = jax.random.split(key)
        sizes: dict[str, Any] = {"streams": streams, "embed": embed}
        self.norm = RMSNorm("streams embed", over="embed", eps=eps, offset=1.0, **sizes)
        self.down = Linear("streams embed -> stream_rank", stream_rank=rank, key=down, **sizes)
        self.up = Linear("stream_rank -> streams embed", stream_rank=rank, key=up, **sizes)

    def __call__(
        self, x: Float[Array, "*batch streams seq embed"]
    ) -> tuple[Float[Array, "*batch seq embed"], Float[Array, "*batch seq streams embed"]]:
        """Return the gated mean, and the normalized streams."""
        normed = self.norm(jnp.swapaxes(x, -3, -2))
        gates = jax.nn.sigmoid(self.up(silu(self.down(normed) / x.shape[-3])))
        wide = at_least_float32(x.dtype)
        return jnp.mean(gates.astype(wide) * normed.astype(wide), -2).astype(x.dtype), normed


class GatedConnection(StreamSublayer):
    """A sublayer of several residual streams, `y_s = x_s + w_s f(m)`, with the gated mean `m` (Qwen4-Exp).

    `f` is the branch of a `Residual`, and `m` the result of `StreamGates`. Each stream has one weight of writing. The
    weights are computed from all normalized streams `n`: `w = 2 sigmoid(write(n) / streams)`.
    """

    gates: StreamGates
    write: LinearMap

    def __init__(
        self, branch: Residual, *, streams: int, embed: int, rank: int, eps: float = 1e-6, key: Key[Array, ""]
    ):
        """Initialize the weights.

        Args:
            branch: The sublayer.
            streams: Streams of a token.
            embed: Channels of a stream.
            rank: Channels between the two maps of the gates.
            eps: Added to the mean of squares in the norms.
            key: Random key for the weights.
        """
        gates, write = jax.random.split(key)
        self.branch = branch
        self.gates = StreamGates(streams=streams, embed=embed, rank=rank, eps=eps, key=gates)
        self.write = Linear(
            "streams embed -> stream_logits", streams=streams, embed=embed, stream_logits=streams, key=write
        )

    def __call__(
        self,
        x: Float[Array, "*batch streams seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch streams seq embed"], PyTree, PyTree]:
        """Write the branch's output to each stream of `x`."""
        tokens = tokens_of_streams(tokens_or_default(tokens, x.shape[:-1], cache), x)
        mean, normed = self.gates(x)
        y, cache, aux = self.branch.run_branch(mean, tokens, cache, index=index)
        wide, streams = at_least_float32(x.dtype), x.shape[-3]
        write = 2 * jax.nn.sigmoid(self.write(normed).astype(wide) / streams)
        return add_to_streams(x.astype(wide), y, write).astype(x.dtype), cache, aux


class GatedMerge(StreamMerge):
    """The end of the streams, which takes the place of a model's `norm`: the gated mean of `StreamGates`."""

    gates: StreamGates

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return the gated mean."""
        mean, _ = self.gates(x)
        return mean
