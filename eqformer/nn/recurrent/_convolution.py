"""Short causal convolutions over tokens, one filter per channel, and the gated mixer that is built on one."""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._cache import check_one_document, ConvCache
from .._contracts import Mixer, MixerFacts
from .._dtype import at_least_float32, float_dtype
from .._linear import Linear, LinearMap
from .._module import Module, named_by
from .._tokens import continues, documents_of, lengths_after, Tokens, tokens_or_default
from ._recurrence import mask_in_layer


class CausalConv(Module):
    """Depthwise causal convolution `y_t = sum_i w_i x_(t - taps + 1 + i) + b` within each document.

    `CausalConv("heads head_dim", taps=4, heads=8, head_dim=64, key=key)` reads each token and the three before it; the
    last weight belongs to the token itself. Tokens must be in reading order. Sums are float32 at least.
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("dims")

    def __init__(self, dims: str, *, taps: int, bias: bool = False, key: Key[Array, ""], **sizes: int):
        """Draw the weights; a `bias` starts at zero.

        Args:
            dims: Names of the channel dims, separated by spaces.
            taps: Tokens that an output depends on, at least 1.
            bias: Whether to add a bias.
            key: For the weights.
            sizes: The size of each dim. A missing or an extra size raises a `ValueError`.
        """
        self.dims = tuple(dims.split())
        if set(self.dims) != set(sizes) or taps < 1:
            raise ValueError(
                f"CausalConv({dims!r}, taps={taps}): sizes were given for {sorted(sizes)}; give one for each dim, "
                "and taps of at least 1."
            )
        shape = [sizes[dim] for dim in self.dims]
        self.weight = taps**-0.5 * jax.random.normal(key, [*shape, taps], jnp.float32)
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None

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

        `previous` holds the `taps - 1` tokens before `x`, which belong to document 0 (see `documents_of`); None means
        zeros.
        """
        seq_dim, seq, taps = documents.ndim - 1, documents.shape[-1], self.weight.shape[-1]
        sum_dtype = at_least_float32(x.dtype)
        x = self._prepend(x, seq_dim, previous).astype(sum_dtype)
        owners = jnp.pad(documents, [(0, 0)] * seq_dim + [(taps - 1, 0)])
        total = jnp.zeros_like(x, shape=())
        for tap in range(taps):
            same_document = jax.lax.slice_in_dim(owners, tap, tap + seq, axis=seq_dim) == documents
            shifted = jax.lax.slice_in_dim(x, tap, tap + seq, axis=seq_dim)
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
        """Return the `previous` of the next call; the first `count` tokens of each row of `x` are not padding."""
        seq_dim, size = documents.ndim - 1, self.weight.shape[-1] - 1
        indices = count[..., None] + jnp.arange(size, dtype=jnp.int32)
        owners = jnp.take_along_axis(jnp.pad(documents, [(0, 0)] * seq_dim + [(size, 0)]), indices, axis=seq_dim)

        def expand(per_token: Array) -> Array:
            return jax.lax.expand_dims(per_token, range(per_token.ndim, x.ndim))

        last = jnp.take_along_axis(self._prepend(x, seq_dim, previous), expand(indices), axis=seq_dim)
        return jnp.where(expand(owners == documents[..., -1:]), last, 0).astype(previous.dtype)

    def _prepend(
        self, x: Float[Array, "..."], seq_dim: int, previous: Float[Array, "..."] | None
    ) -> Float[Array, "..."]:
        if previous is None:
            size = self.weight.shape[-1] - 1
            previous = jnp.zeros_like(x, shape=(*x.shape[:seq_dim], size, *x.shape[seq_dim + 1 :]))
        return jnp.concatenate([previous.astype(x.dtype), x], axis=seq_dim)


class GatedShortConv(Mixer):
    """Gated short convolution of LFM2: `output(output_gate(x) * conv(input_gate(x) * value(x)))`.

    The convolution (`CausalConv`) reads the last `taps` tokens of a
    document, so a cache holds `taps - 1` tokens, however long the rows are. There are no positions: tokens must be in
    reading order, with padding at the end of a row, and a document starts at position 0 or at a new segment (Liquid AI
    2025, arXiv:2511.23404).
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
        """Draw the weights.

        Args:
            embed: Channels of the input and the output.
            mlp: Channels that are convolved; None: `embed`.
            taps: Tokens that the convolution reads.
            bias: Whether the projections and the convolution have biases.
            output_std: Standard deviation of the output projection's weights; None: as for the other projections.
            key: For the weights.
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
        channels, taps = self.conv.weight.shape
        return ConvCache(jnp.zeros((*batch, taps - 1, channels), dtype), jnp.zeros(tuple(batch), jnp.int32))

    def facts(self) -> MixerFacts:
        """State that the mixer runs on a slice of its channels; each channel costs its taps and two gates."""
        channels, taps = self.conv.weight.shape[-2:]
        return MixerFacts(True, operations=(2 * taps + 2) * channels)
