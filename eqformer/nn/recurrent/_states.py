"""Where a recurrence's states lie, what a row's first token finds there, and how one token is read."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ...kernels import found_state, RECURRENT_STEP, RecurrentStepCall, Step
from .._cache import index_layer, update_layer


class States(eqx.Module):
    """A matrix for each head of each row, of all layers where there is a `layer`: read and written where they lie."""

    memory: Float[Array, "*layers_batch heads head_dim v_dim"]
    begins: Bool[Array, "*batch"]
    """Rows whose first token begins a document, and finds zeros."""
    layer: Int[Array, ""] | None = None
    is_next: Bool[Array, "*batch"] | None = None
    """Rows whose first token is the next of those that the state has read; others find NaN. None: all."""

    @property
    def found(self) -> Int[Array, "*batch"]:
        """What a row's first token finds: its state (0), zeros (1) or NaN (2)."""
        lost = 0 if self.is_next is None else jnp.where(self.is_next, 0, 2)
        return jnp.where(self.begins, 1, lost).astype(jnp.int32)

    def first(self, dtype: DTypeLike) -> Float[Array, "*batch heads head_dim v_dim"]:
        """What first tokens find, in a dtype, for rules that see themselves where documents begin."""
        state = index_layer(self.memory, self.layer).astype(dtype)
        return state if self.is_next is None else found_state(self.found[..., None, None, None], state)

    def replaced(
        self, state: Float[Array, "*batch heads head_dim v_dim"]
    ) -> Float[Array, "*layers_batch heads head_dim v_dim"]:
        """The memory with other states, those of the layer."""
        return update_layer(self.memory, state.astype(self.memory.dtype), self.layer)

    def stepped(
        self, step: Step, *given: Float[Array, "*batch kv_heads _ _"]
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """What one token a row is answered, and the memory after it.

        `step(layout, *given, state)` gives both, of states with dims of groups and of their heads. Each of `given` has
        a row of channels for each head of a group, or one that serves them all.
        """
        return RECURRENT_STEP(RecurrentStepCall(given, self.memory, self.found, self.layer, step))
