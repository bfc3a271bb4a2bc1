"""Parts that all recurrent mixers share: convolutions of a call's inputs, padding, documents, caches, initial
weights."""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .._cache import check_one_document, index_layer, RecurrentCache, update_layer
from .._dtype import at_least_float32, float_dtype
from .._linear import LinearMap
from .._tokens import continues, documents_of, lengths_after, Tokens
from ._convolution import CausalConv
from ._recurrence import mask_in_layer, States


class RecurrentInputs(eqx.Module):
    """The queries, keys and values of one call of a recurrent mixer, its tokens, and its cache, if there is one.

    Queries, keys and values each pass through a convolution of their own.
    """

    projections: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    convs: tuple[CausalConv, CausalConv, CausalConv]
    positions: Int[Array, "*batch seq"]
    documents: Int[Array, "*batch seq"]
    cache: RecurrentCache | None
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        projections: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]],
        convs: tuple[CausalConv, CausalConv, CausalConv],
        tokens: Tokens,
        cache: RecurrentCache | None,
        activation: Callable[[Array], Array],
    ):
        """Broadcast positions and documents to the dims `*batch seq` of the projections.

        The mixer's input may have another shape: a parallel layout may give a mixer a slice of the tokens, and gather
        whole rows in the projections.

        Args:
            projections: Queries, keys and values, `*batch seq heads channels`, before the convolutions.
            convs: The convolutions of queries, keys and values.
            tokens: The tokens of the call. Packed rows with a cache raise a `ValueError`.
            cache: The cache before the call.
            activation: Applied after the convolutions.
        """
        if cache is not None:
            check_one_document(tokens)
        self.projections, self.convs, self.cache, self.activation = projections, convs, cache, activation
        shape = projections[0].shape[:-2]
        self.positions, self.documents = jnp.broadcast_to(tokens.positions, shape), documents_of(tokens, shape)

    @property
    def is_real(self) -> Bool[Array, "*batch seq"]:
        """Whether each token is no padding."""
        return self.positions >= 0

    def convolve(self) -> list[Float[Array, "..."]]:
        """Return queries, keys and values after convolution and activation, in float32 at least."""
        cached = (None,) * 3 if self.cache is None else _last_inputs(self.cache)
        triples = zip(self.convs, self._without_padding(), cached, strict=True)
        return [self.activation(conv(x, self.documents, past)) for conv, x, past in triples]

    def initial_states(
        self, key: Float[Array, "*batch seq kv_heads head_dim"], value: Float[Array, "*batch seq heads v_dim"]
    ) -> States:
        """Return the states of the cache, or zero states without a cache."""
        begins = self.documents[..., 0] > 0
        if self.cache is None:
            heads, v_dim = value.shape[-2:]
            zeros = jnp.zeros_like(value, shape=(*value.shape[:-3], heads, key.shape[-1], v_dim))
            return States(zeros, begins)
        follows_cache = continues(self.positions, index_layer(self.cache.lengths, self.cache.layer))
        return States(self.cache.state, begins, self.cache.layer, follows_cache)

    def update_cache(self, states: Float[Array, "*layers_batch heads head_dim v_dim"]) -> RecurrentCache | None:
        """Return the cache after the call's tokens, with these states, or None without a cache."""
        cache = self.cache
        if cache is None:
            return None
        count = jnp.sum(self.is_real, axis=-1, dtype=jnp.int32)
        store = functools.partial(update_layer, layer=cache.layer)
        triples = zip(self.convs, self._without_padding(), _last_inputs(cache), strict=True)
        last = [conv.last_inputs(x, self.documents, past, count) for conv, x, past in triples]
        queries, keys, values = map(store, (cache.queries, cache.keys, cache.values), last)
        lengths = store(cache.lengths, lengths_after(self.positions, index_layer(cache.lengths, cache.layer)))
        return RecurrentCache(
            state=states, queries=queries, keys=keys, values=values, lengths=lengths, layer=cache.layer
        )

    def _without_padding(self) -> list[Array]:
        return [mask_in_layer(self.is_real[..., None, None], x, self.convs[0].weight) for x in self.projections]


def _last_inputs(cache: RecurrentCache) -> tuple[Array, ...]:
    """Return the queries, keys and values of the last tokens before the call, in the cache's layer."""
    return tuple(index_layer(x, cache.layer) for x in (cache.queries, cache.keys, cache.values))


def check_sizes(call: str, *, heads: int, kv_heads: int, chunk: int) -> None:
    """Raise a `ValueError` that begins with `call` unless `kv_heads` divides `heads` and `chunk` is at least 1."""
    if heads % kv_heads:
        raise ValueError(
            f"{call}(heads={heads}, kv_heads={kv_heads}): each key head serves equally many values, so "
            f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
        )
    if chunk < 1:
        raise ValueError(f"{call}(chunk={chunk}): chunk counts tokens and must be at least 1.")


def draw_step_bias(shape: tuple[int, ...], key: Key[Array, ""]) -> Float[Array, "..."]:
    """Draw biases whose softplus is log-uniform between 0.001 and 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(0.001), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


def init_recurrent_cache(
    batch: Sequence[int], dtype: str, key: LinearMap, value: LinearMap, conv: CausalConv
) -> RecurrentCache:
    """Return an empty cache, which serves rows of any length.

    Args:
        batch: The batch dims.
        dtype: The dtype of the last inputs; the state is float32 at least.
        key: The projection to keys.
        value: The projection to values.
        conv: One of the convolutions, which all have the same number of taps.
    """
    dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
    (kv_heads, head_dim), (heads, v_dim) = key.output_shape, value.output_shape
    last = (*batch, conv.weight.shape[-1] - 1)
    key_inputs, value_inputs = jnp.zeros((*last, kv_heads, head_dim), dtype), jnp.zeros((*last, heads, v_dim), dtype)
    state = jnp.zeros((*batch, heads, head_dim, v_dim), at_least_float32(jnp.dtype(dtype)))
    lengths = jnp.zeros(tuple(batch), jnp.int32)
    return RecurrentCache(state=state, queries=key_inputs, keys=key_inputs, values=value_inputs, lengths=lengths)


def normalize(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Divide vectors by their length; a small number keeps the length from being zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
