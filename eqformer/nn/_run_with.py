"""How a model runs, and not what it computes: set on a built model."""

import copy
from typing import TypeGuard, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..kernels import Operation, unsupported_options
from ._contracts import Mixer
from ._stack import REMAT, Stack


Model = TypeVar("Model")


def run_with(
    model: Model,
    *,
    core: Operation | None = None,
    remat: str | None = None,
    unroll: int | None = None,
) -> Model:
    """The model, or any part of one, run another way; what is None stays as it is.

    `core` computes every attention's softmax (what that is, a softcap included, stays), `remat` says what the backward
    pass recomputes in every `Stack`, one of `REMAT`, and `unroll` how many layers a turn of its scan runs. Arrays are
    not touched: the shapes of `equinox.filter_eval_shape` do as well. Raises a `ValueError` for a policy that there is
    not, an `unroll` below one, and a core without the softcap, sinks or bias that the model needs.
    """
    if remat is not None and remat not in REMAT:
        raise ValueError(f"run_with(remat={remat!r}): the policies are {', '.join(REMAT)}.")
    if unroll is not None and unroll < 1:
        raise ValueError(f"run_with(unroll={unroll}): a turn of the scan runs at least one layer.")

    def change(module: PyTree) -> PyTree:
        if _has_core(module):
            return module if core is None else _exchanged(module, core)
        if not isinstance(module, Stack):
            return module
        changed = copy.copy(module)  # a stack is made by its own `__init__`, so `dataclasses.replace` cannot be asked
        object.__setattr__(changed, "blocks", everywhere(module.blocks))
        object.__setattr__(changed, "remat", module.remat if remat is None else remat)
        object.__setattr__(changed, "unroll", module.unroll if unroll is None else unroll)
        return changed

    def everywhere(tree: PyTree) -> PyTree:
        return jax.tree.map(change, tree, is_leaf=lambda node: _has_core(node) or isinstance(node, Stack))

    return everywhere(model)


def _has_core(node: object) -> TypeGuard[Mixer]:
    return isinstance(node, Mixer) and node.facts().attends is not None


def _exchanged(mixer: Mixer, core: Operation) -> Mixer:
    attends = mixer.facts().attends
    if attends is None:
        return mixer
    if lacking := unsupported_options(core, attends.needs):
        raise ValueError(
            f"run_with(core={core}): an attention of the model has {' and '.join(lacking)}, which this core has not; "
            "pass kernels.ATTENTION or kernels.ReferenceAttention()."
        )
    return eqx.tree_at(lambda m: m.core, mixer, core)
