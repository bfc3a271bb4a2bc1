"""Positions as a learned bias of attention's scores, one for each range of distances."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from .._contracts import ScoreBias
from .._dtype import at_least_float32
from .._tokens import Tokens


class RelativeBias(ScoreBias):
    """A table with a number for each head and range of distances (T5: Raffel et al. 2020, arXiv:1910.10683).

    Of the ranges of one direction half are of one distance each; the others grow by a constant factor, so that the last
    begins at the distance `farthest` or before it, and holds all that lie further. With `both_ways` half of the ranges
    are of keys before a query, its own token included, and half of keys behind it; else all are of keys before it, and
    keys behind it count as its own token.
    """

    weight: Float[Array, "ranges heads"]
    farthest: int = eqx.field(static=True)
    both_ways: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        ranges: int = 32,
        heads: int,
        farthest: int = 128,
        both_ways: bool = False,
        std: float = 0.02,
        key: Key[Array, ""],
    ):
        """Draw the table.

        Args:
            ranges: Ranges of distances, of both directions together.
            heads: Heads of queries.
            farthest: From where on all distances are in one range.
            both_ways: Whether keys behind a query have ranges of their own, as in an encoder.
            std: The deviation of the table.
            key: For the weights.
        """
        one_way = ranges // 2 if both_ways else ranges
        if one_way < 2 or farthest <= one_way // 2:
            raise ValueError(
                f"RelativeBias(ranges={ranges}, farthest={farthest}, both_ways={both_ways}): a direction has {one_way} "
                f"ranges, half of them of one distance each; give it at least 2, and farthest above {one_way // 2}."
            )
        self.weight = std * jax.random.normal(key, (ranges, heads), jnp.float32)
        self.farthest, self.both_ways = farthest, both_ways

    def __call__(self, queries: Tokens, keys: Tokens) -> Float[Array, "*batch heads seq kv_seq"]:
        """What is added to the score of each query (its row) and key, in float32 at least."""
        before, behind = queries.positions, keys.positions
        if queries is keys and queries.are_whole_rows:  # of all rows alike, but for padding, which nothing sees
            before = behind = jnp.arange(before.shape[-1], dtype=jnp.int32)
        distance = before[..., :, None] - behind[..., None, :]
        table = self.weight.astype(at_least_float32(self.weight.dtype))
        return jnp.moveaxis(table[self._range(distance)], -1, -3)

    def _range(self, distance: Int[Array, "*batch seq kv_seq"]) -> Int[Array, "*batch seq kv_seq"]:
        one_way = self.weight.shape[0] // (2 if self.both_ways else 1)
        known = jnp.asarray(_ranges(one_way, self.farthest))
        if not self.both_ways:
            return known[jnp.clip(distance, 0, self.farthest)]
        return known[jnp.minimum(jnp.abs(distance), self.farthest)] + jnp.where(distance < 0, one_way, 0)


def _ranges(count: int, farthest: int) -> np.ndarray:
    """The range of each distance up to `farthest`: `exact + floor(grown log(d / exact) / log(farthest / exact))`.

    In whole numbers, so that no rounding of a logarithm moves a distance to the next range.
    """
    exact = count // 2
    grown = count - exact

    def of(distance: int) -> int:
        if distance < exact:
            return distance
        passed = (distance**grown * exact**step >= exact**grown * farthest**step for step in range(1, grown))
        return exact + sum(passed)

    return np.array([of(distance) for distance in range(farthest + 1)], np.int32)
