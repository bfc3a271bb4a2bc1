"""How TPUs read one token: a kernel reads and writes the states where they lie, once, in Pallas by Mosaic.

XLA makes two passes over them, one that writes and one that reads what was before for the answer.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...kernels import is_turned, LANES, varying_of
from ._step_order import found_of, Order, Step


_BYTES = 2**20  # of a program's states


def kernel_has(memory: Float[Array, "... head_dim v_dim"], given: tuple[Float[Array, "..."], ...]) -> bool:
    """Whether all is in float32 and states fill whole vectors."""
    dims = sorted(memory.shape[-2:]) if is_turned(*memory.shape[-2:]) else memory.shape[-2:]
    return dims[0] % 8 == 0 and dims[1] % LANES == 0 and all(x.dtype == jnp.float32 for x in (memory, *given))


def step_by_kernel(
    step: Step,
    given: tuple[Float[Array, "*batch kv_heads _ _"], ...],
    memory: Float[Array, "*layers_batch heads head_dim v_dim"],
    found: Int[Array, "*batch"],
    layer: Int[Array, ""] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
    """The answers and the memory after the token, see `States.stepped`; `step` runs on blocks of heads."""
    turned = is_turned(*memory.shape[-2:])
    given = tuple(x.reshape(found.size, *x.shape[-3:]) for x in given)
    whole = memory.reshape(1 if layer is None else len(memory), *given[0].shape[:2], -1, *memory.shape[-2:])
    known = jnp.zeros(1, jnp.int32) if layer is None else layer[None], found.reshape(-1)
    call = functools.partial(_called, functools.partial(step, Order(turned=turned)), known, given)
    if turned:
        answer, after = call(whole.swapaxes(-2, -1), memory.shape[-1], interpret)
        after = after.swapaxes(-2, -1)
    else:
        answer, after = call(whole, memory.shape[-1], interpret)
    return answer.reshape(*found.shape, *answer.shape[1:]), after.reshape(memory.shape)


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
    state = found_of(found[pl.program_id(0)], memory[0, 0])
    answer[0], after[0, 0] = step(*(x[0] for x in given), state)


def _block(groups: int, heads: int, size: int) -> tuple[int, int]:
    """Groups and heads of a program: whole groups, or eights of one's heads, as many as have no more than `_BYTES`."""
    fits = lambda count: count * size <= _BYTES
    if fits(heads):
        return next(few for few in range(groups, 0, -1) if groups % few == 0 and fits(few * heads)), heads
    eights = [many for many in range(8, heads, 8) if heads % many == 0]
    return 1, max(filter(fits, eights), default=min([*eights, heads]))
