"""How one token's step is computed: by which products, and in which order a state has its dims."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._chunks import einsum


class Order(NamedTuple):
    """By which products a step reads its states, and whether their dims are those of keys and values or turned."""

    by_products: bool = False
    """Whether states are read by products, as on CPUs; elsewhere a sum is fused with other passes."""
    turned: bool = False
    """Whether values' channels come before keys'."""

    def of_keys(self, x: Float[Array, "*heads head_dim"]) -> Float[Array, "*heads _ _"]:
        """Numbers of keys' channels, to be multiplied with states."""
        return x[..., None, :] if self.turned else x[..., :, None]

    def of_values(self, x: Float[Array, "*heads v_dim"]) -> Float[Array, "*heads _ _"]:
        """Numbers of values' channels, likewise."""
        return x[..., :, None] if self.turned else x[..., None, :]

    def read(self, query: Float[Array, "..."], state: Float[Array, "*heads _ _"]) -> Float[Array, "*heads v_dim"]:
        """What states hold for a query of their head, or of all of a group."""
        if self.by_products:
            return einsum("...d,...dv->...v", query, state)
        return jnp.sum(self.of_keys(query) * state, axis=-1 if self.turned else -2)


# Of an order, numbers of the token and states with dims of groups and their heads: the answers and the states after it.
Step = Callable[..., tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*batch kv_heads copies _ _"]]]


def found_of(found: Int[Array, "..."], state: Float[Array, "..."]) -> Float[Array, "..."]:
    """The state, zeros or NaN, as `found` says by 0, 1 or 2."""
    return jnp.where(found == 0, state, jnp.where(found == 1, 0, jnp.full((), jnp.nan, state.dtype)))
