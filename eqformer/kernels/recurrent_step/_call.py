"""The record of one token's step of a recurrence, and the layout in which a step reads a state."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class StateLayout(NamedTuple):
    """Order of a state's dims, and the way in which a step reads the state."""

    by_products: bool = False
    """Whether states are read by matrix products, as on CPUs; elsewhere a sum is fused with other passes."""
    values_first: bool = False
    """Whether values' channels come before keys'."""

    def expand_key(self, x: Float[Array, "*heads head_dim"]) -> Float[Array, "*heads _ _"]:
        """Return numbers of keys' channels with a dim for values' channels, to be multiplied with states."""
        return x[..., None, :] if self.values_first else x[..., :, None]

    def expand_value(self, x: Float[Array, "*heads v_dim"]) -> Float[Array, "*heads _ _"]:
        """Return numbers of values' channels with a dim for keys' channels, to be multiplied with states."""
        return x[..., :, None] if self.values_first else x[..., None, :]

    def read(self, query: Float[Array, "..."], state: Float[Array, "*heads _ _"]) -> Float[Array, "*heads v_dim"]:
        """Return `query^T state` for queries of each head, or of all heads of a group."""
        if self.by_products:
            return jnp.einsum("...d,...dv->...v", query, state, preferred_element_type=query.dtype)
        return jnp.sum(self.expand_key(query) * state, axis=-1 if self.values_first else -2)


Step = Callable[..., tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*batch kv_heads copies _ _"]]]
"""`step(layout, *inputs, state)` returns a token's outputs and the states after it.

States have dims of groups and of their heads. Each input has a row of channels for each head, or one for its group.
"""


class RecurrentStepCall(eqx.Module):
    """The arguments of one token's step for each row."""

    inputs: tuple[Float[Array, "*batch kv_heads _ _"], ...]
    """The numbers of the token that the step reads."""
    memory: Float[Array, "*layers_batch heads head_dim v_dim"]
    """The states, of all layers where there is a `layer`."""
    initial: Int[Array, "*batch"]
    """The state before the token, by a code: that of the memory (0), zeros (1) or NaN (2)."""
    layer: Int[Array, ""] | None
    """The layer of a stack whose states are read and written; None: the memory is of one layer."""
    step: Step = eqx.field(static=True)
    """The recurrence."""

    operation = "recurrent step"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"states {self.memory.dtype}{list(self.memory.shape)}"


def initial_state(code: Int[Array, "..."], state: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the state, zeros or NaN, where the code is 0, 1 or 2."""
    return jnp.where(code == 0, state, jnp.where(code == 1, 0, jnp.full((), jnp.nan, state.dtype)))
