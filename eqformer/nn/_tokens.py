"""What a layer may read of each token beside its vector."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree, UInt


class Tokens(eqx.Module):
    """Position, document and random key of each token, all of one shape and so split over a mesh like the tokens.

    `positions` count from 0 in each document; -1 marks padding, which is never attended to. `segments` number the
    documents of a packed row (`None`: one document a row). `keys` hold one PRNG key a token; layers fold their number
    into them. Tokens with keys are trained on; `None` is inference: no randomness, and no choice of experts dropped.
    `lengths` are the rows' lengths, one more than the last position of each, where the tokens here are only a part of
    their rows (`None`: told from `positions`); rotary frequencies may depend on them.
    """

    positions: Int[Array, "*batch seq"]
    segments: Int[Array, "*batch seq"] | None = None
    keys: Key[Array, "*batch seq"] | None = None
    lengths: Int[Array, "*batch"] | None = None

    @property
    def is_training(self) -> bool:
        """Whether layers may do to these tokens what training alone asks for: noise, dropout, full experts."""
        return self.keys is not None

    def fold_in(self, number: int | Int[Array, ""]) -> "Tokens":
        """The same tokens with `number` folded into every key, as each layer and sublayer does with its own."""
        if self.keys is None:
            return self
        return Tokens(self.positions, self.segments, fold_in_each(self.keys, jnp.uint32(number)), self.lengths)


def positions_like(shape: Sequence[int]) -> Tokens:
    """Tokens of one document a row, at positions 0, 1, ..., for an array of shape `*batch seq`."""
    return Tokens(jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), tuple(shape)))


def tokens_or_default(tokens: Tokens | None, shape: Sequence[int], cache: PyTree) -> Tokens:
    """The tokens given to a call, or else those of `positions_like`; refuses a cache without positions."""
    if tokens is not None:
        return tokens
    if cache is not None:
        raise ValueError(
            f"a call on tokens of shape {tuple(shape)} has a cache and tokens=None: with a cache, only the caller "
            "knows how far each row has come; pass Tokens(positions), with -1 for padding."
        )
    return positions_like(shape)


def row_lengths(tokens: Tokens, kv_tokens: Tokens | None) -> Int[Array, "*batch"]:
    """Each row's length: as the caller says it, or else one more than the last position that may be attended to."""
    if tokens.lengths is not None:
        return tokens.lengths
    return jnp.max((tokens if kv_tokens is None else kv_tokens).positions, axis=-1) + 1


def fold_in_each(keys: Key[Array, "*shape"], number: UInt[Array, ""]) -> Key[Array, "*shape"]:
    """`jax.random.fold_in` of one number into every key of an array."""
    flat = keys.reshape(-1)
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(flat).reshape(keys.shape)


def token_keys(
    key: Key[Array, ""], examples: Int[Array, "batch"], positions: Int[Array, "batch seq"]
) -> Key[Array, "batch seq"]:
    """One key a token, a function of the example's number and the token's place in its row, never of a device.

    `examples` numbers the rows over the whole run; `positions` are any numbers that are distinct within a row.
    """
    rows = jax.vmap(lambda example: jax.random.fold_in(key, example))(examples)
    over_seq = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(over_seq)(rows, positions)
