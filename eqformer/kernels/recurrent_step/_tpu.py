"""One token's step of a recurrence on TPUs: a kernel in Pallas by Mosaic.

It reads and writes the states once, in main memory (HBM) where they are stored. XLA makes two passes over the states:
one writes the new states, and the other reads the old ones for the outputs.
"""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Implementation
from .._platform import varying_of
from ..cache_write._tpu import LANES, stores_channels_first
from ._call import initial_state, RecurrentStepCall, StateLayout, Step


_STATE_BYTES = 2**20  # of a program's states


class StepTpu(Implementation):
    """The step in Mosaic, of float32 states whose channels fill whole vectors.

    A program has up to 1 MB of states in vector memory (VMEM): whole groups, or eights of a group's heads. `interpret`
    runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: RecurrentStepCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        dims = call.memory.shape[-2:]
        smaller, larger = sorted(dims) if stores_channels_first(*dims) else dims
        if smaller % 8 or larger % LANES:
            return f"it takes states whose channels fill vectors of 8 x {LANES}, not {list(dims)}"
        if any(x.dtype != jnp.float32 for x in (call.memory, *call.inputs)):
            return f"it computes in float32, not {[str(x.dtype) for x in (call.memory, *call.inputs)]}"
        return None

    def run(
        self, call: RecurrentStepCall
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """Return the outputs and the memory after the token; `call.step` runs on blocks of heads."""
        memory, initial, layer = call.memory, call.initial, call.layer
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
    """Call the kernel; its grid is rows, blocks of groups, blocks of heads. States are updated in place."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    _, rows, groups, heads, *dims = states.shape
    block_groups, block_heads = _choose_block(groups, heads, math.prod(dims) * states.dtype.itemsize)

    def row_spec(x: Array | jax.ShapeDtypeStruct) -> Any:
        is_shared = x.shape[2] == 1
        index = lambda row, group, head, *_: (row, group, 0 if is_shared else head, 0)
        return pl.BlockSpec((1, block_groups, 1 if is_shared else block_heads, x.shape[3]), index)

    states_spec = pl.BlockSpec((1, 1, block_groups, block_heads, *dims), lambda *index: (index[3][0], *index[:3], 0, 0))
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


def _kernel(step: Step, _: Any, initial: Any, *refs: Any) -> None:
    """Step some heads of a row."""
    from jax.experimental import pallas as pl

    *inputs, memory, output, new_state = refs
    state = initial_state(initial[pl.program_id(0)], memory[0, 0])
    output[0], new_state[0, 0] = step(*(x[0] for x in inputs), state)


def _choose_block(groups: int, heads: int, size: int) -> tuple[int, int]:
    """Return the groups and the heads of a program: whole groups, or eights of the heads of one group.

    They are as many as have no more than `_STATE_BYTES`.
    """
    fits = lambda count: count * size <= _STATE_BYTES
    if fits(heads):
        return next(number for number in range(groups, 0, -1) if groups % number == 0 and fits(number * heads)), heads
    eights = [number for number in range(8, heads, 8) if heads % number == 0]
    return 1, max(filter(fits, eights), default=min([*eights, heads]))
