"""Which attentions of a model a platform's fused kernel does not compute, and why: seen by tracing the model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._tokens import Tokens
from ..attention._mask import Mask
from ._auto import AutoCore
from ._contract import Core
from ._cudnn import CudnnKernel
from ._kernel import Call, known_rows
from ._splash import SplashKernel


_KERNELS = {kernel.platform: kernel for kernel in (SplashKernel(), CudnnKernel())}


class _Seen:
    """What was asked of the cores of a model, in order; hashed by what it is, since it is static in a module."""

    def __init__(self, platform: str):
        self.platform = platform
        self.refusals: dict[str | None, None] = {}


class _Noting(Core):
    """A core that computes nothing and notes why its platform's kernel would not compute a call of the core inside."""

    inside: Core
    seen: _Seen = eqx.field(static=True)

    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens | None = None,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Array, "heads"] | None = None,
        bias: Float[Array, "*#batch heads seq kv_seq"] | None = None,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        kernel = _KERNELS.get(self.seen.platform)
        rows = known_rows(mask, tokens, kv_tokens)
        if kernel is None:
            why = "the platform has none"
        elif not isinstance(self.inside, AutoCore) and kernel not in self.inside.fused().kernels:
            why = f"{type(self.inside).__name__} is asked for"
        elif bias is not None:
            why = "it has no bias of scores"
        elif kv_tokens is not None:
            why = "it has no keys of a cache or of another sequence"
        elif rows is None:
            why = "it needs rows known to be whole or packed in order, and no chunks"
        else:
            why = kernel.refusal(Call(rows, scale, softcap), query, key, value)
        self.seen.refusals[why] = None
        return jnp.zeros_like(query, shape=(*query.shape[:-1], value.shape[-1]))

    def lacks(self) -> tuple[str, ...]:
        """Nothing: a bias is seen too."""
        return ()


def attention_refusals(
    model: PyTree, ids: Int[Any, "*batch seq"], tokens: Tokens, platform: str
) -> tuple[str | None, ...]:
    """Why a platform's fused kernel does not compute attentions of a model, each reason once; None for those it does.

    `platform` is `cuda`, whose kernel is cuDNN's, or `tpu`, whose kernel is splash attention; any other has none. It is
    what a program lowered for it would have, on one device, whether its compiler is installed here or not. All others
    are computed in blocks, those with a bias by a matrix of scores. Nothing is computed: shapes do in place of arrays.
    """
    seen, is_core = _Seen(platform), lambda node: isinstance(node, Core)
    noting = jax.tree.map(lambda node: _Noting(node, seen) if is_core(node) else node, model, is_leaf=is_core)
    eqx.filter_eval_shape(lambda model, ids, tokens: model.encode(ids, tokens)[0], noting, ids, tokens)
    return tuple(seen.refusals)
