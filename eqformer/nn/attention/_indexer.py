"""What chooses the keys of a sparse attention: small heads that score every key, and the best of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from .._dtype import at_least_float32
from .._linear import Linear
from .._linear_map import LinearMap
from .._module import Module
from .._norm import LayerNorm
from .._tokens import Tokens
from ._rotary import Rotary


class Indexer(Module):
    """The lightning indexer of DeepSeek-V3.2 (DeepSeek-AI 2025, eq. 1): each query sees its `top_k` best keys alone.

    A key at `s` has for a query at `t` the score `sum_h w_th relu(q_th . k_s)`, of small queries from the queries'
    latent, small keys and weights from the input. Nothing of it has a gradient: it is trained by a loss of its own. Of
    equal scores the first key counts.
    """

    query: LinearMap
    key: LinearMap
    key_norm: LayerNorm
    weight: LinearMap
    rotary: Rotary
    top_k: int = eqx.field(static=True)

    def __init__(
        self, *, embed: int, q_latent: int, heads: int, dim: int, top_k: int, rotary: Rotary, key: Key[Array, ""]
    ):
        """Draw the maps.

        Args:
            embed: Channels of the input.
            q_latent: Channels of the queries' latent.
            heads: Small heads.
            dim: Channels of one, of which the first `rotary.dim` are rotated.
            top_k: Keys that a query sees.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            key: For the weights.
        """
        if rotary.depends_on_length or top_k < 1:
            raise ValueError(
                f"Indexer(top_k={top_k}, rotary={rotary}): a query sees at least one key, and keys are cached rotated; "
                "give top_k >= 1 and a rotary whose scaling does not depend on the length."
            )
        keys = jax.random.split(key, 3)
        self.query = Linear(
            "q_latent -> index_heads index_dim", q_latent=q_latent, index_heads=heads, index_dim=dim, key=keys[0]
        )
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[1])
        self.key_norm = LayerNorm("index_dim", index_dim=dim, eps=1e-6)
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=keys[2])
        self.rotary, self.top_k = rotary, top_k

    def keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """What of the tokens of `x` is cached."""
        return self.rotary(self.key_norm(self.key(x))[..., None, :], tokens.positions)[..., 0, :]

    def __call__(
        self,
        x: Float[Array, "*batch _ embed"],
        latent: Float[Array, "*batch seq q_latent"],
        keys: Float[Array, "*batch kv_seq index_dim"],
        visible: Bool[Array, "*batch seq kv_seq"],
        tokens: Tokens,
    ) -> Bool[Array, "*batch seq kv_seq"]:
        """Which of the visible keys each query sees."""
        if keys.shape[-2] <= self.top_k:
            return visible
        query, weight, exact = self.query(latent), self.weight(x), at_least_float32(x.dtype)
        query, weight = jax.lax.stop_gradient((self.rotary(query, tokens.positions), weight))
        heads, dim = query.shape[-2:]
        dots = jnp.einsum("...qhd,...kd->...qhk", query.astype(exact), jax.lax.stop_gradient(keys).astype(exact))
        dots = jax.nn.relu(dots * dim**-0.5)
        scores = jnp.einsum("...qh,...qhk->...qk", weight.astype(exact) * heads**-0.5, dots)
        best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), self.top_k)[1]
        chosen = jnp.put_along_axis(jnp.zeros_like(visible), best, True, axis=-1, inplace=False)
        return chosen & visible
