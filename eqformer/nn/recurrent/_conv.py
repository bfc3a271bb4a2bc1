"""A convolution over the last few tokens, each channel by itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._dims import named_by
from .._dtype import at_least_float32
from .._module import Module
from ._masked import masked


class CausalConv(Module):
    """`y_t = sum_i w_i x_(t - taps + 1 + i) + b` for each channel of the named dims, over tokens of one document alone.

    `CausalConv("heads head_dim", taps=4, heads=8, head_dim=64, key=key)` reads a token and the three before it; the
    last weight is the token's own. Tokens come in reading order. Sums are in float32 at least.
    """

    dims: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("dims")

    def __init__(self, dims: str, *, taps: int, bias: bool = False, key: Key[Array, ""], **sizes: int):
        """Draw the weights; a `bias` begins with zeros. Raises a `ValueError` where `dims` and the sizes do not fit."""
        self.dims = tuple(dims.split())
        if set(self.dims) != set(sizes) or taps < 1:
            raise ValueError(
                f"CausalConv({dims!r}, taps={taps}): the sizes given are {sorted(sizes)}; give one for each dim, "
                "and at least one tap."
            )
        shape = [sizes[dim] for dim in self.dims]
        self.weight = taps**-0.5 * jax.random.normal(key, [*shape, taps], jnp.float32)
        self.bias = jnp.zeros(shape, jnp.float32) if bias else None

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the channels', then the taps."""
        return (*self.dims, "taps")

    def __call__(
        self,
        x: Float[Array, "..."],
        documents: Int[Array, "*batch seq"],
        before: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Convolve `x`, `*batch seq` and the named dims; `before` are the `taps - 1` tokens before it, else zeros.

        They are of document 0, see `documents_of`.
        """
        along, seq = documents.ndim - 1, documents.shape[-1]
        x = self._joined(x, along, before).astype(exact := at_least_float32(x.dtype))
        owners = jnp.pad(documents, [(0, 0)] * along + [(self.weight.shape[-1] - 1, 0)])
        total = jnp.zeros_like(x, shape=())
        for tap in range(self.weight.shape[-1]):
            is_own = jax.lax.slice_in_dim(owners, tap, tap + seq, axis=along) == documents
            piece = jax.lax.slice_in_dim(x, tap, tap + seq, axis=along)
            is_own = jax.lax.expand_dims(is_own, range(is_own.ndim, piece.ndim))
            total = total + masked(is_own, piece, self.weight) * self.weight[..., tap].astype(exact)
        return total if self.bias is None else total + self.bias.astype(exact)

    def after(
        self,
        x: Float[Array, "..."],
        documents: Int[Array, "*batch seq"],
        before: Float[Array, "..."],
        count: Int[Array, "*batch"],
    ) -> Float[Array, "..."]:
        """What the next call wants as `before`, when the first `count` tokens of each row of `x` are no padding."""
        along, kept = documents.ndim - 1, self.weight.shape[-1] - 1
        places = count[..., None] + jnp.arange(kept, dtype=jnp.int32)
        owners = jnp.take_along_axis(jnp.pad(documents, [(0, 0)] * along + [(kept, 0)]), places, axis=along)
        spread = lambda flags: jax.lax.expand_dims(flags, range(flags.ndim, x.ndim))
        last = jnp.take_along_axis(self._joined(x, along, before), spread(places), axis=along)
        return jnp.where(spread(owners == documents[..., -1:]), last, 0).astype(before.dtype)

    def _joined(self, x: Array, along: int, before: Array | None) -> Array:
        if before is None:
            before = jnp.zeros_like(x, shape=(*x.shape[:along], self.weight.shape[-1] - 1, *x.shape[along + 1 :]))
        return jnp.concatenate([before.astype(x.dtype), x], axis=along)
