"""States of a recurrence: read and written in the array that stores them, and the state before a row's first token."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ...kernels import initial_state, RECURRENT_STEP, RecurrentStepCall, Step
from .._cache import index_layer, update_layer


class States(eqx.Module):
    """A matrix for each head of each row, in the array that stores them: of all layers where there is a `layer`."""

    memory: Float[Array, "*layers_batch heads head_dim v_dim"]
    begins: Bool[Array, "*batch"]
    """Whether a row's first token begins a document: its initial state is zero."""
    layer: Int[Array, ""] | None = None
    follows_cache: Bool[Array, "*batch"] | None = None
    """Whether a row's first token follows the tokens that the state has read; the initial state of other rows is NaN.
    None: all do."""

    @property
    def initial_code(self) -> Int[Array, "*batch"]:
        """The initial state of each row, by a code: the stored state (0), zeros (1) or NaN (2)."""
        stored_or_nan = 0 if self.follows_cache is None else jnp.where(self.follows_cache, 0, 2)
        return jnp.where(self.begins, 1, stored_or_nan).astype(jnp.int32)

    def initial(self, dtype: DTypeLike) -> Float[Array, "*batch heads head_dim v_dim"]:
        """Return the initial states, for rules that handle the start of documents themselves.

        So rows that begin a document have the stored state here; rows that do not follow their cache have NaN.
        """
        state = index_layer(self.memory, self.layer).astype(dtype)
        return state if self.follows_cache is None else initial_state(self.initial_code[..., None, None, None], state)

    def update(
        self, state: Float[Array, "*batch heads head_dim v_dim"]
    ) -> Float[Array, "*layers_batch heads head_dim v_dim"]:
        """Return the memory with new states of the layer."""
        return update_layer(self.memory, state.astype(self.memory.dtype), self.layer)

    def step_token(
        self, step: Step, *inputs: Float[Array, "*batch kv_heads _ _"]
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """Return the outputs of one token of each row, and the memory after it.

        `step(layout, *inputs, state)` returns both, for states with dims of groups and of their heads. Each input has a
        row of channels for each head of a group, or one for all of them.
        """
        return RECURRENT_STEP(RecurrentStepCall(inputs, self.memory, self.initial_code, self.layer, step))
