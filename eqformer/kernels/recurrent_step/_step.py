"""One token's step of a recurrence, in plain JAX and by a kernel for TPUs."""

import functools

import jax
from jaxtyping import Array, Float

from .._op import Implementation, Op
from .._platform import cpu_or
from ._call import initial_state, RecurrentStepCall, StateLayout
from ._tpu import StepTpu


StepResult = tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]


class ReferenceStep(Implementation):
    """The step in plain JAX: states are read by matrix products on CPUs, and by sums elsewhere."""

    def supports(self, call: RecurrentStepCall) -> str | None:
        """Return None: it computes every call."""
        return None

    def run(self, call: RecurrentStepCall) -> StepResult:
        """Return the outputs and the memory after the token."""
        inputs, memory, layer = call.inputs, call.memory, call.layer
        state = memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)
        grouped = state.reshape(*inputs[0].shape[:-2], -1, *state.shape[-2:]).astype(inputs[0].dtype)
        grouped = initial_state(jax.lax.expand_dims(call.initial, range(call.initial.ndim, grouped.ndim)), grouped)
        on_cpus, elsewhere = (functools.partial(call.step, StateLayout(by_products)) for by_products in (True, False))
        output, new_state = cpu_or(on_cpus, elsewhere, *inputs, grouped)
        new_state = new_state.reshape(state.shape).astype(state.dtype)
        return output, new_state if layer is None else jax.lax.dynamic_update_index_in_dim(memory, new_state, layer, 0)


RECURRENT_STEP = Op(ReferenceStep(), (("tpu", StepTpu()),))
"""One token of each row, whose states are read and written where they are stored."""
