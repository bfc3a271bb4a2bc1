"""The attention op: its implementations, how a chosen implementation runs, and kernels that are required by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Choice, dispatch_with_derivative, Implementation, Op, Operation, record_choice
from ._blockwise import BlockwiseAttention
from ._call import AttentionCall, Mask, TokenPositions
from ._cudnn import CudnnAttention
from ._flash import FlashAttention, FlashChoice, run_flash
from ._reference import DotProductAttention, ReferenceAttention
from ._splash import SplashAttention


def run_attention(choice: Choice, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
    """Run the chosen implementation; kernels with a backward pass save the softmax sums that the backward pass reads.

    The derivative of an implementation without a backward pass is that of the fallback.
    """
    flash = flash_choice(choice)
    flash_platforms = set() if flash is None else {platform for platform, _ in flash.by_platform}
    branches = {platform: kernel.run for platform, kernel in choice.by_platform if platform not in flash_platforms}

    def run_default(call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        return choice.fallback.run(call) if flash is None else run_flash(flash, call)

    return dispatch_with_derivative(branches, run_default, call)


def flash_choice(choice: Choice) -> FlashChoice | None:
    """Return the chosen kernels that have a backward pass, with a fallback whose passes fit theirs.

    None without such kernels, and also with them if the fallback is neither a kernel nor `BlockwiseAttention`: the call
    is then differentiated through the fallback.
    """
    kernels = tuple((platform, kernel) for platform, kernel in choice.by_platform if isinstance(kernel, FlashAttention))
    if isinstance(choice.fallback, FlashAttention) or (kernels and isinstance(choice.fallback, BlockwiseAttention)):
        return FlashChoice(kernels, choice.fallback)
    return None


ATTENTION = Op(
    ReferenceAttention(),
    (("cuda", CudnnAttention()), ("tpu", SplashAttention()), ("any", BlockwiseAttention())),
    run_attention,
)
"""Attention by cuDNN on NVIDIA GPUs, by splash attention on TPUs, and by a loop over blocks on other platforms.

Calls that these do not support are computed by the loop over blocks, or else by the definition.
"""


class RequiredKernel(Operation[AttentionCall, Array]):
    """Attention by one kernel on one platform. Calls with a cache are computed by `BlockwiseAttention` instead.

    A call that the kernel cannot compute raises a `ValueError` when it is traced, and a call without a cache raises one
    when it is lowered for another platform. The platform `any` runs the kernel on all platforms.
    """

    platform: str = eqx.field(static=True)
    kernel: FlashAttention

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None; calls with a cache are supported."""
        return None if call.kv_tokens is not None else self.kernel.supports(call)

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        if call.kv_tokens is not None:
            return BlockwiseAttention()(call)
        if (reason := self.kernel.supports(call)) is not None:
            raise ValueError(
                f"{self} cannot compute {call.describe()}: {reason}; pass kernels.ATTENTION, which takes another "
                "implementation where it must."
            )
        record_choice(Choice(call.operation, (), self.kernel, ()))
        return run_flash(self.flash_choice(), call)

    def flash_choice(self) -> FlashChoice:
        """Return the choice of the kernel alone."""
        if self.platform == "any":
            return FlashChoice((), self.kernel)
        return FlashChoice(((self.platform, self.kernel),), BlockwiseAttention(), str(self))


def blockwise_of(core: Operation) -> BlockwiseAttention | None:
    """Return the loop over blocks that computes the same as `core`; None if `core` is an operation of another class.

    Ring attention combines partial results of this loop. Attention to a cache is computed by this loop, or by a kernel
    for decoding in its place.
    """
    if isinstance(core, BlockwiseAttention):
        return core
    if isinstance(core, Op):
        loops = (loop for loop in core.implementations if isinstance(loop, BlockwiseAttention))
        return next(loops, BlockwiseAttention())
    return BlockwiseAttention() if isinstance(core, Implementation | RequiredKernel) else None


def decodes_by_kernels(core: Operation) -> bool:
    """Return whether the kernels for decoding may read a cache in the place of `core`."""
    return isinstance(core, Op | BlockwiseAttention | RequiredKernel)


def unsupported_options(core: Operation, options: Sequence[str]) -> tuple[str, ...]:
    """Return those of `softcap`, `sinks` and `bias` that `core` cannot compute, by asking it about small calls.

    If `core` refuses even the small call without options, nothing can be learned, and the result is empty.
    """
    values = {"softcap": 1.0, "sinks": jnp.zeros(1), "bias": jnp.zeros((1, 128, 128))}

    array = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    tokens = TokenPositions(jnp.arange(128, dtype=jnp.int32)[None], whole_rows=128)
    call = AttentionCall(array, array, array, mask=Mask(), tokens=tokens, scale=1.0)
    known = [name for name in options if name in values]
    if core.supports(call) is not None:
        return ()
    return tuple(name for name in known if core.supports(dataclasses.replace(call, **{name: values[name]})) is not None)


ATTENTIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "auto": ATTENTION,
        "xla": DotProductAttention(),
        "reference": ReferenceAttention(),
        "blockwise": BlockwiseAttention(),
        "cudnn": RequiredKernel("cuda", CudnnAttention()),
        "splash": RequiredKernel("tpu", SplashAttention()),
    }
)
"""The attention operations by their names in flags and recipes."""
