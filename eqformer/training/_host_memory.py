"""An optimizer's state in the memory of the devices' hosts between steps, and brought near for an update."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..parallel import Plan
from ._optimizer import Optimizer


def is_on_host(plan: Plan, optimizer: Optimizer, memory: PyTree) -> PyTree:
    """Whether a plan keeps each array of an optimizer's state on hosts: what it holds for parameters, no counters."""
    keeps = plan.optimizer_memory == "pinned_host"
    return optimizer.map_state(lambda held, *_: jax.tree.map(lambda _: keeps, held), memory, other=False)


def brought_near(plan: Plan, optimizer: Optimizer, memory: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree]:
    """An optimizer's state, in a jitted function, with what lies on hosts copied to the devices; and the gradients.

    Compilers are kept from copying before the gradients are there: those for GPUs would do so at a step's beginning, so
    that the copies lay beside all that the backward pass needs.
    """
    if plan.optimizer_memory == "device":
        return memory, gradients
    arrays, rest = eqx.partition(memory, eqx.is_array)
    arrays, gradients = jax.lax.optimization_barrier((arrays, gradients))
    return eqx.combine(_moved(jax.memory.Space.Device, plan, optimizer, arrays), rest), gradients


def taken_back(plan: Plan, optimizer: Optimizer, memory: PyTree) -> PyTree:
    """An optimizer's state, in a jitted function, with what the plan keeps on hosts there."""
    return _moved(jax.memory.Space.Host, plan, optimizer, memory)


def _moved(space: Any, plan: Plan, optimizer: Optimizer, arrays: PyTree) -> PyTree:
    move = lambda x, is_far: jax.device_put(x, space) if is_far else x
    return jax.tree.map(move, arrays, is_on_host(plan, optimizer, arrays))
