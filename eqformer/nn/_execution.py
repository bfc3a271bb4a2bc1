"""Execution settings: attention kernel, rematerialisation and scan. None of them changes results."""

import copy
import dataclasses
from typing import Literal, TypeGuard, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..kernels import ATTENTIONS, Operation, unsupported_options
from ._contracts import Mixer
from ._model_contracts import LayerStack
from ._stack import REMAT


Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class Execution:
    """Settings of speed and memory that change no results, as plain data; `apply` checks them."""

    core: Literal["auto", "xla", "reference", "blockwise", "cudnn", "splash"] = "auto"
    """The implementation of attention, a name in `kernels.ATTENTIONS`; auto takes the kernel of the platform."""
    remat: Literal["none", "full", "dots", "dots_no_batch", "products", "products_on_host", "full_on_host"] = "products"
    """The rematerialisation policy; a policy that ends in `_on_host` stores its residuals in host memory."""
    unroll: int = 1
    """How many layers one scan iteration runs. If it is all layers, there is no scan, and compilation takes longer."""

    def apply(self, model: Model) -> Model:
        """Return the model, or its shapes, with these settings.

        Raises a `ValueError` as `with_execution` does, and for an unknown core.
        """
        if self.core not in ATTENTIONS:
            raise ValueError(f"Execution(core={self.core!r}): the cores are {', '.join(ATTENTIONS)}.")
        return with_execution(model, core=ATTENTIONS[self.core], remat=self.remat, unroll=self.unroll)


def with_execution(
    model: Model,
    *,
    core: Operation | None = None,
    remat: str | None = None,
    unroll: int | None = None,
) -> Model:
    """Return the model, or a part of a model, with other execution settings; a setting that is None stays unchanged.

    No array is read, so a model of shapes from `equinox.filter_eval_shape` works too.

    Args:
        model: A model or any tree of modules.
        core: The attention kernel of every attention layer. Results stay the same; softcaps, for example, still apply.
        remat: The rematerialisation policy of every `Stack`, one of `REMAT`.
        unroll: How many layers an iteration of a stack's scan runs.

    Raises:
        ValueError: For an unknown `remat`, an `unroll` below one, and a core without the softcap, sinks or bias that
            an attention of the model needs.
    """
    if remat is not None and remat not in REMAT:
        raise ValueError(f"with_execution(remat={remat!r}): the policies are {', '.join(REMAT)}.")
    if unroll is not None and unroll < 1:
        raise ValueError(f"with_execution(unroll={unroll}): an iteration of the scan runs at least one layer.")

    def change(module: PyTree) -> PyTree:
        if _has_core(module):
            return module if core is None else _replace_core(module, core)
        if not isinstance(module, LayerStack):
            return module
        changed = copy.copy(module)  # `dataclasses.replace` calls `__init__`, and a stack has its own.
        object.__setattr__(changed, "blocks", change_all(module.blocks))
        object.__setattr__(changed, "remat", module.remat if remat is None else remat)
        object.__setattr__(changed, "unroll", module.unroll if unroll is None else unroll)
        return changed

    def change_all(tree: PyTree) -> PyTree:
        return jax.tree.map(change, tree, is_leaf=lambda node: _has_core(node) or isinstance(node, LayerStack))

    return change_all(model)


def _has_core(node: object) -> TypeGuard[Mixer]:
    return isinstance(node, Mixer) and node.facts().attends is not None


def _replace_core(mixer: Mixer, core: Operation) -> Mixer:
    attends = mixer.facts().attends
    if attends is None:
        return mixer
    if missing := unsupported_options(core, attends.needs):
        raise ValueError(
            f"with_execution(core={core}): an attention of the model has {' and '.join(missing)}, which this core does "
            "not compute; pass kernels.ATTENTION or kernels.ReferenceAttention()."
        )
    return eqx.tree_at(lambda m: m.core, mixer, core)
