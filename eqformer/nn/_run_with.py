"""How a model runs, and not what it computes: set on a built model."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array

from ._stack import REMAT, Stack
from .attention._attention import Attention
from .attention._latent_attention import LatentAttention
from .cores._blockwise import BlockwiseCore
from .cores._core import ReferenceCore


Model = TypeVar("Model")


def run_with(
    model: Model,
    *,
    core: Callable[..., Array] | None = None,
    remat: str | None = None,
    unroll: int | None = None,
) -> Model:
    """The model, or any part of one, run another way; what is None stays as it is.

    `core` computes every attention's softmax (a softcap stays as the family needs it), `remat` says what the backward
    pass recomputes in every `Stack`, one of `REMAT`, and `unroll` how many layers a turn of its scan runs. Arrays are
    not touched: the shapes of `equinox.filter_eval_shape` do as well. Raises a `ValueError` for a policy that there is
    not, an `unroll` below one, and a core that has no softcap where the model needs one.
    """
    if remat is not None and remat not in REMAT:
        raise ValueError(f"run_with(remat={remat!r}): the policies are {', '.join(REMAT)}.")
    if unroll is not None and unroll < 1:
        raise ValueError(f"run_with(unroll={unroll}): a turn of the scan runs at least one layer.")

    def change(module: Any) -> Any:
        if isinstance(module, _WITH_CORES):
            return module if core is None else _exchanged(module, core)
        if not isinstance(module, Stack):
            return module
        changed = copy.copy(module)  # a stack is made by its own `__init__`, so `dataclasses.replace` cannot be asked
        object.__setattr__(changed, "blocks", everywhere(module.blocks))
        object.__setattr__(changed, "remat", module.remat if remat is None else remat)
        object.__setattr__(changed, "unroll", module.unroll if unroll is None else unroll)
        return changed

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(change, tree, is_leaf=lambda node: isinstance(node, (*_WITH_CORES, Stack)))

    return everywhere(model)


_WITH_CORES = (Attention, LatentAttention)
_CAPPED = (BlockwiseCore, ReferenceCore)


def _exchanged(module: Any, core: Any) -> Any:
    if isinstance(module.core, _CAPPED) and module.core.softcap is not None:
        if not isinstance(core, _CAPPED):
            raise ValueError(
                f"run_with(core={core}): the model's scores have a softcap of {module.core.softcap}, which this core "
                "has not; pass BlockwiseCore() or ReferenceCore()."
            )
        core = dataclasses.replace(core, softcap=module.core.softcap)
    return eqx.tree_at(lambda m: m.core, module, core)
