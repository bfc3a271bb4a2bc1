"""Short causal convolutions over tokens, a gated mixer with such a convolution, and the inputs of recurrent mixers.

`RecurrentInputs` passes a call's inputs through a mixer's convolutions, with padding, documents and caches.
"""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .._cache import check_one_document, ConvCache, index_layer, RecurrentCache, update_layer
from .._contracts import Mixer, MixerFacts
from .._dtype import at_least_float32, float_dtype
from .._linear import Linear, LinearMap
from .._module import Module, named_by
from .._tokens import continues, documents_of, lengths_after, Tokens, tokens_or_default
from ._recurrence import mask_in_layer, States


class CausalConv(Module):
    """Depthwise causal convolution `y_t = sum_i w_i x_(t - dilation * (taps - 1 - i)) + b` within each document.

    `CausalConv("heads head_dim", taps=4, heads=8, head_dim=64, key=key)` reads each token and the three before it; the
    last weight belongs to the token itself. The tokens that a convolution reads are `dilation` tokens apart. Tokens
    must be in reading order. Sums are float32 at least.
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    dilation: int = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("dims")

    def __init__(
        self, dims: str, *, taps: int, bias: bool = False, dilation: int = 1, key: Key[Array, ""], **sizes: int
    ):
        """Initialize the weights; a `bias` starts at zero.

        Args:
            dims: Names of the channel dims, separated by spaces.
            taps: Number of tokens that an output depends on, at least 1.
            bias: Whether to add a bias.
            dilation: The distance in tokens between two tokens that an output depends on.
            key: Random key for the weights.
            sizes: The size of each dim. A missing or an extra size raises a `ValueError`.
        """
        self.dims = tuple(dims.split())
        if set(self.dims) != set(sizes) or taps < 1 or dilation < 1:
            raise ValueError(
                f"CausalConv({dims!r}, taps={taps}, dilation={dilation}): sizes were given for {sorted(sizes)}; give "
                "one for each dim, and taps and a dilation of at least 1."
            )
        shape = [sizes[dim] for dim in self.dims]
        self.weight = taps**-0.5 * jax.random.normal(key, [*shape, taps], jnp.float32)
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None
        self.dilation = dilation

    @property
    def reach(self) -> int:
        """The number of tokens before a token on which the token's output may depend."""
        return self.dilation * (self.weight.shape[-1] - 1)

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: channels, then taps."""
        return (*self.dims, "taps")

    def __call__(
        self,
        x: Float[Array, "..."],
        documents: Int[Array, "*batch seq"],
        previous: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Convolve `x`, of shape `*batch seq` and the named dims.

        `previous` holds the `reach` tokens before `x`, which belong to document 0 (see `documents_of`); None means
        zeros.
        """
        seq_dim, seq = documents.ndim - 1, documents.shape[-1]
        sum_dtype = at_least_float32(x.dtype)
        x = self._prepend(x, seq_dim, previous).astype(sum_dtype)
        padded_documents = jnp.pad(documents, [(0, 0)] * seq_dim + [(self.reach, 0)])
        total = jnp.zeros_like(x, shape=())
        for tap in range(self.weight.shape[-1]):
            start = tap * self.dilation
            same_document = jax.lax.slice_in_dim(padded_documents, start, start + seq, axis=seq_dim) == documents
            shifted = jax.lax.slice_in_dim(x, start, start + seq, axis=seq_dim)
            same_document = jax.lax.expand_dims(same_document, range(same_document.ndim, shifted.ndim))
            visible = mask_in_layer(same_document, shifted, self.weight)
            total = total + visible * self.weight[..., tap].astype(sum_dtype)
        return total if self.bias is None else total + self.bias.astype(sum_dtype)

    def last_inputs(
        self,
        x: Float[Array, "..."],
        documents: Int[Array, "*batch seq"],
        previous: Float[Array, "..."],
        count: Int[Array, "*batch"],
    ) -> Float[Array, "..."]:
        """Return the argument `previous` of the next call; `count` is the number of tokens before a row's padding."""
        seq_dim, size = documents.ndim - 1, self.reach
        indices = count[..., None] + jnp.arange(size, dtype=jnp.int32)
        padded_documents = jnp.pad(documents, [(0, 0)] * seq_dim + [(size, 0)])
        last_documents = jnp.take_along_axis(padded_documents, indices, axis=seq_dim)

        def expand(per_token: Array) -> Array:
            return jax.lax.expand_dims(per_token, range(per_token.ndim, x.ndim))

        last = jnp.take_along_axis(self._prepend(x, seq_dim, previous), expand(indices), axis=seq_dim)
        return jnp.where(expand(last_documents == documents[..., -1:]), last, 0).astype(previous.dtype)

    def _prepend(
        self, x: Float[Array, "..."], seq_dim: int, previous: Float[Array, "..."] | None
    ) -> Float[Array, "..."]:
        if previous is None:
            size = self.reach
            previous = jnp.zeros_like(x, shape=(*x.shape[:seq_dim], size, *x.shape[seq_dim + 1 :]))
        return jnp.concatenate([previous.astype(x.dtype), x], axis=seq_dim)


class GatedShortConv(Mixer):
    """Gated short convolution of LFM2: `output(output_gate(x) * conv(input_gate(x) * value(x)))`.

    The convolution (`CausalConv`) reads the last `taps` tokens of a document, so a cache holds `taps - 1` tokens,
    however long the rows are. There are no positions: tokens must be in reading order, with padding at the end of a
    row, and a document starts at position 0 or at a new segment (Liquid AI 2025, arXiv:2511.23404).
    """

    input_gate: LinearMap
    output_gate: LinearMap
    value: LinearMap
    conv: CausalConv
    output: LinearMap

    def __init__(
        self,
        *,
        embed: int,
        mlp: int | None = None,
        taps: int = 3,
        bias: bool = False,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the weights.

        Args:
            embed: Channels of the input and the output.
            mlp: Channels that are convolved; None: `embed`.
            taps: Number of tokens that the convolution reads.
            bias: Whether the projections and the convolution have biases.
            output_std: Standard deviation of the output projection's weights; None: as for the other projections.
            key: Random key for the weights.
        """
        keys, mlp = jax.random.split(key, 5), embed if mlp is None else mlp
        project = functools.partial(Linear, "embed -> mlp", embed=embed, mlp=mlp, bias=bias)
        self.input_gate, self.output_gate, self.value = (project(key=key) for key in keys[:3])
        self.conv = CausalConv("mlp", taps=taps, mlp=mlp, bias=bias, key=keys[3])
        self.output = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=keys[4])

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: ConvCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], ConvCache | None]:
        """Mix tokens in order; a cache supplies the tokens before `x`, and the returned cache includes `x`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        gated = self.input_gate(x) * self.value(x)
        # The shape of `x` may differ: a parallel layout may give a slice of the tokens, and gather rows in the maps.
        shape = gated.shape[:-1]
        positions, documents = jnp.broadcast_to(tokens.positions, shape), documents_of(tokens, shape)
        gated = jnp.where(positions[..., None] >= 0, gated, 0)
        previous = None
        if cache is not None:
            check_one_document(tokens)
            follows_cache = continues(positions, cache.lengths)
            previous = jnp.where(follows_cache[..., None, None], cache.inputs, jnp.nan)
            count = jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
            last_inputs = self.conv.last_inputs(gated, documents, previous, count)
            cache = ConvCache(last_inputs.astype(cache.inputs.dtype), lengths_after(positions, cache.lengths))
        mixed = self.conv(gated, documents, previous)
        return self.output((self.output_gate(x).astype(mixed.dtype) * mixed).astype(x.dtype)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> ConvCache:
        """Return an empty cache; its size does not depend on `capacity`."""
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        channels, _ = self.conv.weight.shape
        return ConvCache(jnp.zeros((*batch, self.conv.reach, channels), dtype), jnp.zeros(tuple(batch), jnp.int32))

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the channels, and the operations of a token.

        A channel of a token takes two operations per tap, and one for each of the two gates.
        """
        channels, taps = self.conv.weight.shape[-2:]
        return MixerFacts(True, operations=(2 * taps + 2) * channels)


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
            f"{call}(heads={heads}, kv_heads={kv_heads}): each key head serves equally many value heads, so "
            f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
        )
    if chunk < 1:
        raise ValueError(f"{call}(chunk={chunk}): chunk counts tokens and must be at least 1.")


def draw_step_bias(shape: tuple[int, ...], key: Key[Array, ""]) -> Float[Array, "..."]:
    """Initialize biases whose softplus is log-uniform between 0.001 and 0.1."""
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
    last = (*batch, conv.reach)
    key_inputs, value_inputs = jnp.zeros((*last, kv_heads, head_dim), dtype), jnp.zeros((*last, heads, v_dim), dtype)
    state = jnp.zeros((*batch, heads, head_dim, v_dim), at_least_float32(jnp.dtype(dtype)))
    lengths = jnp.zeros(tuple(batch), jnp.int32)
    return RecurrentCache(state=state, queries=key_inputs, keys=key_inputs, values=value_inputs, lengths=lengths)


def normalize(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Divide vectors by their length; a small number keeps the length from being zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
