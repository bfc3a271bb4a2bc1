"""Cores that run by the fused kernel of a platform: the one that chooses, and those that are asked for by name."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from .._pallas import compilers
from .._tokens import Tokens
from ..attention._mask import Mask
from ._blockwise import BlockwiseCore
from ._contract import Block, Core, Fused
from ._core import check_heads, ReferenceCore
from ._cudnn import CudnnKernel
from ._fused import attend_fused, Ways
from ._kernel import Call, Kernel, known_rows
from ._splash import SplashKernel


class AutoCore(Core):
    """Attention by what the platform has: cuDNN on NVIDIA GPUs, splash on TPUs, and elsewhere a loop over blocks.

    The platform is that which the program is compiled for, also where it is compiled on a machine that has none: JAX
    chooses when it lowers the program (`jax.lax.platform_dependent`). The kernels need rows that are known to be whole,
    or packed one after another (`Tokens.whole_rows`); splash bfloat16 or float32 and rows of a multiple of 128 tokens,
    cuDNN 16 bit, heads of at most 128 channels (256 on Hopper) and no softcap. Every other call, such as one with a
    cache, is `BlockwiseCore`'s, and on a CPU all are. Differentiable as that is. With a `bias` it is `ReferenceCore`'s,
    of quadratic memory.
    """

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
        """Attend, as any core.

        Args:
            bias: What is added to the scores; without the dims of the batch the same for all rows; None: nothing.
        """
        check_heads(query, key)
        given: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks}
        if bias is not None:
            return ReferenceCore()(query, key, value, tokens=tokens, kv_tokens=kv_tokens, bias=bias, **given)
        rows = known_rows(mask, tokens, kv_tokens)
        if rows is not None and (kernels := self.fused().kernels):
            call = Call(rows, scale, softcap)
            if there := tuple(kernel for kernel in kernels if kernel.refusal(call, query, key, value) is None):
                return attend_fused(Ways(call, there), query, key, value, tokens, sinks)
        return BlockwiseCore()(query, key, value, tokens=tokens, kv_tokens=kv_tokens, **given)

    def lacks(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def ring_block(self) -> Block:
        """That of `BlockwiseCore()`."""
        return "platform"

    def leaves_caches(self) -> bool:
        """Yes."""
        return True

    def fused(self) -> Fused:
        """Those that this installation can compile."""
        there = compilers()
        return Fused(tuple(kernel for kernel in (SplashKernel(), CudnnKernel()) if kernel.platform in there))


class _KernelCore(Core):
    """Attention by one fused kernel, and by nothing else; with a cache `BlockwiseCore`."""

    @abc.abstractmethod
    def kernel(self) -> Kernel:
        """The kernel."""

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
    ) -> Float[Array, "*batch seq heads v_dim"]:
        check_heads(query, key)
        if kv_tokens is not None:
            given: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks}
            return BlockwiseCore()(query, key, value, tokens=tokens, kv_tokens=kv_tokens, **given)
        rows = known_rows(mask, tokens, None)
        if rows is None:
            reason = (
                "it needs rows known to be whole or packed in order, and no chunks (nn.positions_like, Batch.documents)"
            )
        else:
            call = Call(rows, scale, softcap)
            reason = self.kernel().refusal(call, query, key, value)
            if reason is None:
                return attend_fused(Ways(call, *self.fused()), query, key, value, tokens, sinks)
        raise ValueError(
            f"{self} cannot compute query {query.dtype}{list(query.shape)}, key {list(key.shape)} and value "
            f"{list(value.shape)} under {mask}: {reason}; pass AutoCore(), which takes another way where it must."
        )

    def ring_block(self) -> Block:
        """That of `BlockwiseCore()`, for caches."""
        return "platform"

    def leaves_caches(self) -> bool:
        """Yes."""
        return True

    def fused(self) -> Fused:
        """The one kernel, by this core's name."""
        return Fused((self.kernel(),), str(self))


class SplashCore(_KernelCore):
    """Attention on TPUs by JAX's splash attention, and by nothing else; with a cache `BlockwiseCore`.

    It has windows, packed documents, softcaps and sinks. Raises a `ValueError` while tracing a call that the kernel
    cannot compute, and while compiling for another platform. `interpret` runs it as plain JAX on any platform, which
    is slow: for tests.
    """

    interpret: bool = eqx.field(static=True, default=False)

    def kernel(self) -> Kernel:
        """Splash attention."""
        return SplashKernel(self.interpret)


class CudnnCore(_KernelCore):
    """Attention on NVIDIA GPUs by cuDNN's fused kernels, and by nothing else; with a cache `BlockwiseCore`.

    It has windows, packed documents and sinks, no softcaps, and computes in 16 bit. Raises a `ValueError` while tracing
    a call that the kernels cannot compute, and while compiling for another platform.
    """

    def kernel(self) -> Kernel:
        """cuDNN's."""
        return CudnnKernel()

    def lacks(self) -> tuple[str, ...]:
        """Softcaps and biases."""
        return "softcap", "bias"
