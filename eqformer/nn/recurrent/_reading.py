"""What recurrences share around their rules: convolutions of what goes in, padding, documents, the cache."""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .._cache import RecurrentCache
from .._documents import continues, documents_of, lengths_after
from .._dtype import at_least_float32, float_dtype
from .._layer_cache import of_layer, with_layer
from .._linear_map import LinearMap
from .._slots import check_one_document
from .._tokens import Tokens
from ._conv import CausalConv
from ._masked import masked
from ._states import States


class Reading(eqx.Module):
    """The tokens of one call of a recurrence and, where there is a cache, what is known of those before.

    The recurrence has queries, keys and values, of which each goes through a convolution of its own.
    """

    convs: tuple[CausalConv, CausalConv, CausalConv]
    positions: Int[Array, "*batch seq"]
    documents: Int[Array, "*batch seq"]
    cache: RecurrentCache | None
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        convs: tuple[CausalConv, CausalConv, CausalConv],
        tokens: Tokens,
        shape: tuple[int, ...],
        cache: RecurrentCache | None,
        activation: Callable[[Array], Array],
    ):
        """Of tokens of this `shape`, that of whole rows. Raises a `ValueError` for packed rows with a cache.

        The `activation` follows the convolutions.
        """
        if cache is not None:
            check_one_document(tokens)
        self.convs, self.cache, self.activation = convs, cache, activation
        self.positions, self.documents = jnp.broadcast_to(tokens.positions, shape), documents_of(tokens, shape)

    @property
    def is_real(self) -> Bool[Array, "*batch seq"]:
        """Which tokens are no padding."""
        return self.positions >= 0

    def convolved(self, inputs: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
        """Queries, keys and values after their convolutions and activation, in float32 at least."""
        before = (None,) * 3 if self.cache is None else _before(self.cache)
        triples = zip(self.convs, self._without_padding(inputs), before, strict=True)
        return [self.activation(conv(y, self.documents, past)) for conv, y, past in triples]

    def states(
        self, key: Float[Array, "*batch seq kv_heads head_dim"], value: Float[Array, "*batch seq heads v_dim"]
    ) -> States:
        """What these tokens find: zeros, or what the cache has; NaN for a row whose tokens are not the next."""
        begins = self.documents[..., 0] > 0
        if self.cache is None:
            heads, v_dim = value.shape[-2:]
            zeros = jnp.zeros_like(value, shape=(*value.shape[:-3], heads, key.shape[-1], v_dim))
            return States(zeros, begins)
        is_next = continues(self.positions, of_layer(self.cache.lengths, self.cache.layer))
        return States(self.cache.state, begins, self.cache.layer, is_next)

    def cache_after(
        self, inputs: Sequence[Float[Array, "..."]], states: Float[Array, "*layers_batch heads head_dim v_dim"]
    ) -> RecurrentCache | None:
        """The cache with these tokens read, where there is one, and these states; `inputs` are as for `convolved`."""
        was = self.cache
        if was is None:
            return None
        count, kept = jnp.sum(self.is_real, axis=-1, dtype=jnp.int32), functools.partial(with_layer, layer=was.layer)
        triples = zip(self.convs, self._without_padding(inputs), _before(was), strict=True)
        after = [conv.after(y, self.documents, past, count) for conv, y, past in triples]
        queries, keys, values = map(kept, (was.queries, was.keys, was.values), after)
        lengths = lengths_after(self.positions, of_layer(was.lengths, was.layer))
        tokens = {"queries": queries, "keys": keys, "values": values, "lengths": kept(was.lengths, lengths)}
        return RecurrentCache(state=states, **tokens, layer=was.layer)

    def _without_padding(self, inputs: Sequence[Array]) -> list[Array]:
        return [masked(self.is_real[..., None, None], y, self.convs[0].weight) for y in inputs]


def _before(cache: RecurrentCache) -> tuple[Array, ...]:
    """Queries, keys and values of the last tokens that a cache, or its layer, has read."""
    return tuple(of_layer(x, cache.layer) for x in (cache.queries, cache.keys, cache.values))


def check_sizes(call: str, *, heads: int, kv_heads: int, chunk: int) -> None:
    """Raise a `ValueError` unless `kv_heads` divides `heads` and a chunk has tokens; `call` is what errors name."""
    if heads % kv_heads:
        raise ValueError(
            f"{call}(heads={heads}, kv_heads={kv_heads}): each key head serves equally many values, so "
            f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
        )
    if chunk < 1:
        raise ValueError(f"{call}(chunk={chunk}): chunk counts tokens and must be at least 1.")


def step_bias(shape: tuple[int, ...], key: Key[Array, ""]) -> Float[Array, "..."]:
    """Numbers of which softplus gives steps from 0.001 to 0.1, whose logarithms are spread evenly."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(0.001), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


def empty_cache(batch: Sequence[int], dtype: str, key: LinearMap, value: LinearMap, conv: CausalConv) -> RecurrentCache:
    """A cache that remembers nothing, for rows of any length.

    `key` and `value` are the maps that keys and values come from, `conv` one of the convolutions, which see equally
    many tokens.
    """
    dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
    (kv_heads, head_dim), (heads, v_dim) = key.output_shape, value.output_shape
    kept = (*batch, conv.weight.shape[-1] - 1)
    few, many = jnp.zeros((*kept, kv_heads, head_dim), dtype), jnp.zeros((*kept, heads, v_dim), dtype)
    state = jnp.zeros((*batch, heads, head_dim, v_dim), at_least_float32(jnp.dtype(dtype)))
    return RecurrentCache(state=state, queries=few, keys=few, values=many, lengths=jnp.zeros(tuple(batch), jnp.int32))


def unit(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Vectors divided by their length, which a small number keeps from being zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
