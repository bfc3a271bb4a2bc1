"""One token's step on TPUs: a kernel in Pallas by Mosaic reads and writes the states once, where they are stored.

XLA makes two passes over them: one writes the new states, and one reads the old ones for the outputs.
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
from ..cache_write._tpu import is_turned, LANES
from ._call import found_state, RecurrentStepCall, StateLayout, Step


_BYTES = 2**20  # of a program's states


class StepTpu(Implementation):
    """The step in Mosaic, of float32 states whose channels fill whole vectors.

    `interpret` runs the kernel as plain JAX on any platform, for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def supports(self, call: RecurrentStepCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        dims = call.memory.shape[-2:]
        smaller, larger = sorted(dims) if is_turned(*dims) else dims
        if smaller % 8 or larger % LANES:
            return f"it takes states whose channels fill vectors of 8 x {LANES}, not {list(dims)}"
        if any(x.dtype != jnp.float32 for x in (call.memory, *call.inputs)):
            return f"it computes in float32, not {[str(x.dtype) for x in (call.memory, *call.inputs)]}"
        return None

    def run(
        self, call: RecurrentStepCall
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """Return the outputs and the memory after the token; `call.step` runs on blocks of heads."""
        memory, found, layer = call.memory, call.found, call.layer
        values_first = is_turned(*memory.shape[-2:])
        inputs = tuple(x.reshape(found.size, *x.shape[-3:]) for x in call.inputs)
        states = memory.reshape(1 if layer is None else len(memory), *inputs[0].shape[:2], -1, *memory.shape[-2:])
        known = jnp.zeros(1, jnp.int32) if layer is None else layer[None], found.reshape(-1)
        step = functools.partial(call.step, StateLayout(values_first=values_first))
        states = states.swapaxes(-2, -1) if values_first else states
        output, after = _called(step, known, inputs, states, memory.shape[-1], self.interpret)
        after = after.swapaxes(-2, -1) if values_first else after
        return output.reshape(*found.shape, *output.shape[1:]), after.reshape(memory.shape)


def _called(
    step: Step, known: tuple[Array, Array], given: tuple[Array, ...], whole: Array, v_dim: int, interpret: bool
) -> tuple[Array, Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    _, rows, groups, heads, *dims = whole.shape
    few, many = _block(groups, heads, math.prod(dims) * whole.dtype.itemsize)

    def of(x: Any) -> Any:
        shared = x.shape[2] == 1
        place = lambda row, group, head, *_: (row, group, 0 if shared else head, 0)
        return pl.BlockSpec((1, few, 1 if shared else many, x.shape[3]), place)

    states = pl.BlockSpec((1, 1, few, many, *dims), lambda *at: (at[3][0], *at[:3], 0, 0))
    answers = jax.ShapeDtypeStruct((rows, groups, heads, v_dim), whole.dtype)
    varying = varying_of((*known, *given, whole))
    moved = 2 * whole[0].nbytes + sum(x.nbytes for x in given) + math.prod(answers.shape) * whole.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, step),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, groups // few, heads // many),
            in_specs=[*map(of, given), states],
            out_specs=[of(answers), states],
        ),
        out_shape=[
            answers.update(manual_axis_type=varying),
            tpu.HBM.from_type(jax.typeof(whole).update(manual_axis_type=varying)),
        ],
        input_output_aliases={2 + len(given): 1},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="stepped_states",
    )(*known, *given, whole)


def _kernel(step: Step, _: Any, found: Any, *refs: Any) -> None:
    """Some heads of a row."""
    from jax.experimental import pallas as pl

    *given, memory, answer, after = refs
    state = found_state(found[pl.program_id(0)], memory[0, 0])
    answer[0], after[0, 0] = step(*(x[0] for x in given), state)


def _block(groups: int, heads: int, size: int) -> tuple[int, int]:
    """Groups and heads of a program: whole groups, or eights of one's heads, as many as have no more than `_BYTES`."""
    fits = lambda count: count * size <= _BYTES
    if fits(heads):
        return next(few for few in range(groups, 0, -1) if groups % few == 0 and fits(few * heads)), heads
    eights = [many for many in range(8, heads, 8) if heads % many == 0]
    return 1, max(filter(fits, eights), default=min([*eights, heads]))
