"""A short convolution between two gates, in the place of attention."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._cache import ConvCache
from .._contracts import Mixer, MixerFacts
from .._documents import continues, documents_of, lengths_after
from .._dtype import float_dtype
from .._linear import Linear
from .._linear_map import LinearMap
from .._slots import check_one_document
from .._tokens import Tokens, tokens_or_default
from ._conv import CausalConv


class GatedShortConv(Mixer):
    """`output(output_gate(x) * conv(input_gate(x) * value(x)))`, the operator of LFM2; called like an attention.

    The convolution (`CausalConv`) reads the last `taps` tokens of a document, so that a cache holds `taps - 1` tokens
    however long the rows are. There are no positions: tokens come in reading order, any padding last in a row of a
    call, and a document begins at position 0 or with another segment. (Liquid AI 2025, arXiv:2511.23404.)
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
        """Draw the maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Channels that are convolved; None: as many.
            taps: Tokens that the convolution sees.
            bias: Whether the maps and the convolution have biases.
            output_std: The deviation of the last map's weights; None: as the others'.
            key: For the weights.
        """
        keys, mlp = jax.random.split(key, 5), embed if mlp is None else mlp
        into = lambda key: Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=key)
        self.input_gate, self.output_gate, self.value = map(into, keys[:3])
        self.conv = CausalConv("mlp", taps=taps, mlp=mlp, bias=bias, key=keys[3])
        self.output = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=keys[4])

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: ConvCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], ConvCache | None]:
        """Read the tokens of `x` in turn, after those that a cache remembers; it then remembers these too."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        given = self.input_gate(x) * self.value(x)
        shape = given.shape[:-1]  # of all tokens, where `x` are some of them
        positions, documents = jnp.broadcast_to(tokens.positions, shape), documents_of(tokens, shape)
        given = jnp.where(positions[..., None] >= 0, given, 0)
        before = None
        if cache is not None:
            check_one_document(tokens)
            goes_on = continues(positions, cache.lengths)
            before = jnp.where(goes_on[..., None, None], cache.inputs, jnp.nan)
            count = jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
            after = self.conv.after(given, documents, before, count)
            cache = ConvCache(after.astype(cache.inputs.dtype), lengths_after(positions, cache.lengths))
        mixed = self.conv(given, documents, before)
        return self.output((self.output_gate(x).astype(mixed.dtype) * mixed).astype(x.dtype)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> ConvCache:
        """An empty cache; `capacity` does not matter."""
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        channels, taps = self.conv.weight.shape
        return ConvCache(jnp.zeros((*batch, taps - 1, channels), dtype), jnp.zeros(tuple(batch), jnp.int32))

    def facts(self) -> MixerFacts:
        """It runs on a slice of its channels, each of which is multiplied by its taps and two gates."""
        channels, taps = self.conv.weight.shape[-2:]
        return MixerFacts(True, operations=(2 * taps + 2) * channels)
