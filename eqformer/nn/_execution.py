"""How a model runs, as plain data."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeVar

from ..kernels import (
    ATTENTION,
    BlockwiseAttention,
    CudnnAttention,
    DotProductAttention,
    Operation,
    ReferenceAttention,
    RequiredKernel,
    SplashAttention,
)
from ._run_with import run_with


Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs, in words: speed and memory, and no results. Plain data: `apply` checks it."""

    core: Literal["auto", "xla", "reference", "blockwise", "cudnn", "splash"] = "auto"
    """The attention; auto takes what the platform has: cudnn on GPUs, splash on TPUs, blockwise elsewhere."""
    remat: Literal["none", "full", "dots", "dots_no_batch", "products", "products_on_host", "full_on_host"] = "products"
    """What the backward pass recomputes instead of keeping it; ..._on_host keeps what it keeps in hosts' memory."""
    unroll: int = 1
    """How many layers an iteration of the scan over layers runs; with all there is no scan: compiling takes longer."""

    def apply(self, model: Model) -> Model:
        """The model, or its shapes, run so; raises a `ValueError` as `run_with` does, and for an unknown core."""
        if self.core not in _CORES:
            raise ValueError(f"Execution(core={self.core!r}): the cores are {', '.join(_CORES)}.")
        return run_with(model, core=_CORES[self.core], remat=self.remat, unroll=self.unroll)


_CORES: Mapping[str, Operation] = MappingProxyType(
    {
        "auto": ATTENTION,
        "xla": DotProductAttention(),
        "reference": ReferenceAttention(),
        "blockwise": BlockwiseAttention(),
        "cudnn": RequiredKernel("cuda", CudnnAttention()),
        "splash": RequiredKernel("tpu", SplashAttention()),
    }
)
