"""One token's step of a recurrence, whose states are read and written where they are stored.

On TPUs, a Pallas kernel reads and writes the states once, in main memory (HBM). XLA makes two passes over the states:
one pass writes the new states, and the other reads the old states for the outputs.

In shapes, `kv_heads` are the groups of heads that share an input such as a key, and `copies` the heads of a group.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._cache_write import LANES, stores_channels_first
from ._op import Call, Implementation, Op
from ._platform import cpu_or, Ref, varying_of


class StateLayout(NamedTuple):
    """Order of a state's dims, and the way in which a step reads the state."""

    by_matmul: bool = False
    """Whether states are read by matrix products, as on CPUs; elsewhere they are multiplied and summed elementwise,
    which XLA fuses with other passes over the states."""
    values_first: bool = False
    """Whether the value channels come before the key channels."""

    def expand_key(self, x: Float[Array, "*heads head_dim"]) -> Float[Array, "*heads _ _"]:
        """Add a dim for value channels to an array over key channels, so that the array broadcasts against states."""
        return x[..., None, :] if self.values_first else x[..., :, None]

    def expand_value(self, x: Float[Array, "*heads v_dim"]) -> Float[Array, "*heads _ _"]:
        """Add a dim for key channels to an array over value channels, so that the array broadcasts against states."""
        return x[..., :, None] if self.values_first else x[..., None, :]

    def read(self, query: Float[Array, "..."], state: Float[Array, "*heads _ _"]) -> Float[Array, "*heads v_dim"]:
        """Return `query^T state` for queries of each head, or of all heads of a group."""
        if self.by_matmul:
            return jnp.einsum("...d,...dv->...v", query, state, preferred_element_type=query.dtype)
        return jnp.sum(self.expand_key(query) * state, axis=-1 if self.values_first else -2)


Step = Callable[..., tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*batch kv_heads copies _ _"]]]
"""`step(layout, *inputs, state)` returns a token's outputs and the states after the token.

States have dims of groups and of their heads. Each input has a row of channels for each head, or one row for the whole
group.
"""


class RecurrentStepCall(Call):
    """The arguments of one token's step for each row."""

    inputs: tuple[Float[Array, "*batch kv_heads _ _"], ...]
    """The token's vectors that the step reads, such as its query, key, value and decay."""
    memory: Float[Array, "*layers_batch heads head_dim v_dim"]
    """The states; of all layers of a stack if `layer` is set."""
    initial: Int[Array, "*batch"]
    """A code of the state before the token: 0 is the state in the memory, 1 is zeros, and 2 is NaN. NaN marks an error
    of the caller: a token that does not follow the last token of the row's state."""
    layer: Int[Array, ""] | None
    """The layer of a stack whose states are read and written; None: the memory is of one layer."""
    step: Step = eqx.field(static=True)
    """The recurrence."""

    operation = "recurrent step"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"states {self.memory.dtype}{list(self.memory.shape)}"


def initial_state(code: Int[Array, "..."], state: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the state for code 0, zeros for code 1, and NaN for code 2."""
    return jnp.where(code == 0, state, jnp.where(code == 1, 0, jnp.full((), jnp.nan, state.dtype)))


StepResult = tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]


class ReferenceStep(Implementation[RecurrentStepCall, StepResult]):
    """The step in plain JAX: states are read by matrix products on CPUs, and by sums elsewhere."""

    def supports(self, call: RecurrentStepCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def run(self, call: RecurrentStepCall) -> StepResult:
        """Return the outputs and the memory after the token."""
        inputs, memory, layer = call.inputs, call.memory, call.layer
        state = memory if layer is None else jax.lax.dynamic_index_in_dim(memory, layer, 0, keepdims=False)
        grouped = state.reshape(*inputs[0].shape[:-2], -1, *state.shape[-2:]).astype(inputs[0].dtype)
        grouped = initial_state(jax.lax.expand_dims(call.initial, range(call.initial.ndim, grouped.ndim)), grouped)
        on_cpus, elsewhere = (functools.partial(call.step, StateLayout(by_matmul)) for by_matmul in (True, False))
        output, new_state = cpu_or(on_cpus, elsewhere, *inputs, grouped)
        new_state = new_state.reshape(state.shape).astype(state.dtype)
        return output, new_state if layer is None else jax.lax.dynamic_update_index_in_dim(memory, new_state, layer, 0)


_STATE_BYTES = 2**20  # bytes of the states of one program of the kernel


class StepTpu(Implementation[RecurrentStepCall, StepResult]):
    """The step by a Pallas kernel, for float32 states whose channels fill whole vector registers.

    A program of the kernel has about 1 MB of states in vector memory (VMEM): the states of whole groups, or of a
    multiple of 8 heads of one group. `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: RecurrentStepCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        dims = call.memory.shape[-2:]
        rows, lanes = sorted(dims) if stores_channels_first(*dims) else dims
        if rows % 8 or lanes % LANES:
            return f"it takes states whose channels fill vectors of 8 x {LANES}, not {list(dims)}"
        if any(x.dtype != jnp.float32 for x in (call.memory, *call.inputs)):
            return f"it computes in float32, not {[str(x.dtype) for x in (call.memory, *call.inputs)]}"
        return None

    def run(self, call: RecurrentStepCall) -> StepResult:
        """Return the outputs and the memory after the token; `call.step` runs on blocks of heads."""
        memory, initial, layer = call.memory, call.initial, call.layer
        # The kernel takes the states in the order in which the TPU stores them, so that no copy is made.
        values_first = stores_channels_first(*memory.shape[-2:])
        inputs = tuple(x.reshape(initial.size, *x.shape[-3:]) for x in call.inputs)
        states = memory.reshape(1 if layer is None else len(memory), *inputs[0].shape[:2], -1, *memory.shape[-2:])
        scalars = jnp.zeros(1, jnp.int32) if layer is None else layer[None], initial.reshape(-1)
        step = functools.partial(call.step, StateLayout(values_first=values_first))
        states = states.swapaxes(-2, -1) if values_first else states
        output, new_states = _call_kernel(step, scalars, inputs, states, memory.shape[-1], self.interpret)
        new_states = new_states.swapaxes(-2, -1) if values_first else new_states
        return output.reshape(*initial.shape, *output.shape[1:]), new_states.reshape(memory.shape)


def _call_kernel(
    step: Step, scalars: tuple[Array, Array], inputs: tuple[Array, ...], states: Array, v_dim: int, interpret: bool
) -> tuple[Array, Array]:
    """Call the kernel, which updates the states in place; its grid is rows, blocks of groups, blocks of heads."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    _, rows, groups, heads, *dims = states.shape
    block_groups, block_heads = _choose_block(groups, heads, math.prod(dims) * states.dtype.itemsize)

    def row_spec(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        is_shared = x.shape[2] == 1
        index = lambda row, group, head, *_: (row, group, 0 if is_shared else head, 0)
        return pl.BlockSpec((1, block_groups, 1 if is_shared else block_heads, x.shape[3]), index)

    # The last two arguments are the prefetched scalars: `layer` holds the index of the layer.
    states_index = lambda row, group, head, layer, _: (layer[0], row, group, head, 0, 0)
    states_spec = pl.BlockSpec((1, 1, block_groups, block_heads, *dims), states_index)
    output = jax.ShapeDtypeStruct((rows, groups, heads, v_dim), states.dtype)
    varying = varying_of((*scalars, *inputs, states))
    output_bytes = math.prod(output.shape) * states.dtype.itemsize
    bytes_accessed = 2 * states[0].nbytes + sum(x.nbytes for x in inputs) + output_bytes
    return pl.pallas_call(
        functools.partial(_kernel, step),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, groups // block_groups, heads // block_heads),
            in_specs=[*map(row_spec, inputs), states_spec],
            out_specs=[row_spec(output), states_spec],
        ),
        out_shape=[
            output.update(manual_axis_type=varying),
            tpu.HBM.from_type(jax.typeof(states).update(manual_axis_type=varying)),
        ],
        input_output_aliases={2 + len(inputs): 1},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_accessed),
        interpret=interpret,
        name="stepped_states",
    )(*scalars, *inputs, states)


def _kernel(step: Step, _: Ref, initial: Ref, *refs: Ref) -> None:
    """Compute the step of a block of a row's heads."""
    from jax.experimental import pallas as pl

    *inputs, memory, output, new_state = refs
    state = initial_state(initial[pl.program_id(0)], memory[0, 0])
    output[0], new_state[0, 0] = step(*(x[0] for x in inputs), state)


def _choose_block(groups: int, heads: int, size: int) -> tuple[int, int]:
    """Return how many groups a program has, and how many heads of each: whole groups, or a part of one group.

    The program has as many heads as fit in `_STATE_BYTES`, and at least the smallest divisor of `heads` that is a
    multiple of 8, or all heads of a group if there is no such divisor.
    """
    max_heads = _STATE_BYTES // size
    if heads <= max_heads:
        divisors = [count for count in range(1, groups + 1) if groups % count == 0]
        return max(count for count in divisors if count * heads <= max_heads), heads
    multiples_of_8 = [count for count in range(8, heads, 8) if heads % count == 0]
    return 1, max((count for count in multiples_of_8 if count <= max_heads), default=min([*multiples_of_8, heads]))


RECURRENT_STEP = Op(ReferenceStep(), (("tpu", StepTpu()),))
"""The step of one token of each row. States are read and written where they are stored."""
