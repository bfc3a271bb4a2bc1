"""Where a recurrence's states lie, what a row's first token finds there, and how one token is read."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ...kernels import cpu_or, tpu_or
from .._layer_cache import of_layer, with_layer
from ._states_tpu import kernel_has, step_by_kernel
from ._step_order import found_of, Order, Step


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
        state = of_layer(self.memory, self.layer).astype(dtype)
        return state if self.is_next is None else found_of(self.found[..., None, None, None], state)

    def replaced(
        self, state: Float[Array, "*batch heads head_dim v_dim"]
    ) -> Float[Array, "*layers_batch heads head_dim v_dim"]:
        """The memory with other states, those of the layer."""
        return with_layer(self.memory, state.astype(self.memory.dtype), self.layer)

    def stepped(
        self, step: Step, *given: Float[Array, "*batch kv_heads _ _"]
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """What one token a row is answered, and the memory after it.

        `step(order, *given, state)` gives both, of states with dims of groups and of their heads. Each of `given` has
        a row of channels for each head of a group, or one that serves them all.
        """
        plainly, states = functools.partial(_plainly, step), (self.memory, self.found, self.layer)
        if kernel_has(self.memory, given):
            return tpu_or(functools.partial(step_by_kernel, step), plainly, given, *states)
        return plainly(given, *states)


def _plainly(
    step: Step, given: tuple[Array, ...], memory: Array, found: Array, layer: Array | None
) -> tuple[Array, Array]:
    state = of_layer(memory, layer)
    grouped = state.reshape(*given[0].shape[:-2], -1, *state.shape[-2:]).astype(given[0].dtype)
    grouped = found_of(jax.lax.expand_dims(found, range(found.ndim, grouped.ndim)), grouped)
    on_cpus, elsewhere = (functools.partial(step, Order(by_products)) for by_products in (True, False))
    answer, after = cpu_or(on_cpus, elsewhere, *given, grouped)
    return answer, with_layer(memory, after.reshape(state.shape).astype(state.dtype), layer)
