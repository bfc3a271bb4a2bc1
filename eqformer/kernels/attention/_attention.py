"""Attention in plain JAX, how the attention op runs its chosen implementation, and attention by one required kernel."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._mask import Mask
from .._decode_attention import DECODE_ATTENTION
from .._op import Choice, dispatch_with_derivative, Implementation, Op, Operation, record_choice
from ._blockwise import BlockwiseAttention
from ._call import AttentionCall, TokenPositions
from ._flash import FlashAttention, FlashChoice, run_flash
from ._reference import attend_by_definition


class ReferenceAttention(Implementation[AttentionCall, Array]):
    """The definition of attention, with every option and every derivative.

    This implementation builds the whole matrix of probabilities. Softmax and sums are float32, or float64 for float64
    inputs.
    """

    def supports(self, call: AttentionCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def decode_op(self, *, has_codes: bool) -> Op | None:
        """Return `DECODE_ATTENTION` for a cache of 8-bit codes; None for other caches, which `run` reads itself."""
        return DECODE_ATTENTION if has_codes else None

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        return attend_by_definition(call)


class DotProductAttention(Implementation[AttentionCall, Array]):
    """Attention by `jax.nn.dot_product_attention` in plain XLA, with all derivatives and memory quadratic in `seq`.

    For whole rows (`nn.Tokens.are_whole_rows`), JAX's function gets its causal flag and the window, or the lengths of
    the rows if the mask is bidirectional. Otherwise, JAX's function gets a mask of `batch 1 seq kv_seq`. If `head_dim`
    and `v_dim` differ, the smaller of the two is padded with zeros. JAX's own code for 16-bit arrays mixes dtypes, so
    it can be traced and lowered only under standard dtype promotion.
    """

    def supports(self, call: AttentionCall) -> str | None:
        """Return the option of the call that `jax.nn.dot_product_attention` lacks, or None."""
        options = {"softcap": call.softcap, "sinks": call.sinks, "bias of scores": call.has_bias or None}
        if missing := [name for name, value in options.items() if value is not None]:
            return f"jax.nn.dot_product_attention has no {' and no '.join(missing)}"
        return None

    def decode_op(self, *, has_codes: bool) -> Op | None:
        """Return `DECODE_ATTENTION` for a cache of 8-bit codes; None for other caches, which `run` reads itself."""
        return DECODE_ATTENTION if has_codes else None

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        query, mask, tokens = call.query, call.mask, call.tokens
        batch, v_dim = query.shape[:-3], call.value.shape[-1]
        width = max(query.shape[-1], v_dim)
        arrays = [_pad_channels(x, width) for x in (query, call.key, call.value)]
        arrays = [x.reshape(-1, *x.shape[-3:-1], width) for x in arrays]
        attend = functools.partial(jax.nn.dot_product_attention, implementation="xla", scale=call.scale)
        sees_any_key = None
        if _is_by_index(call):
            attend = functools.partial(attend, is_causal=True)
            if mask.window is not None:
                attend = functools.partial(attend, local_window_size=(mask.window - 1, 0))
        elif call.kv_tokens is None and tokens.are_whole_rows and mask == Mask(is_causal=False):
            lengths = jnp.sum(jnp.broadcast_to(tokens.positions, (*batch, query.shape[-3])) >= 0, axis=-1)
            lengths = jnp.maximum(lengths, 1).reshape(-1).astype(jnp.int32)
            attend = functools.partial(attend, key_value_seq_lengths=lengths)
        else:
            visible = mask(tokens, call.key_tokens)
            visible = jnp.broadcast_to(visible, (*batch, *visible.shape[-2:])).reshape(-1, 1, *visible.shape[-2:])
            attend = functools.partial(attend, mask=visible)
            sees_any_key = jnp.any(visible[:, 0], axis=-1)[..., None, None]
        output = _widen_float16(attend, *arrays)
        if sees_any_key is not None:  # JAX's function returns the mean of all values for a query that sees no key.
            output = jnp.where(sees_any_key, output, jnp.zeros_like(output))
        return output[..., :v_dim].reshape(*query.shape[:-1], v_dim)


def _is_by_index(call: AttentionCall) -> bool:
    """Return whether the mask is a function of indices alone: causal, on whole rows, without chunks."""
    return call.mask.is_causal and call.mask.chunk is None and call.kv_tokens is None and call.tokens.are_whole_rows


def _widen_float16(
    attend: Callable[..., Array],
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads head_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Return `attend(query, key, value)`; on CPUs and TPUs, float16 arrays are computed in float32."""

    def in_float32(*arrays: Array) -> Array:
        return attend(*(x.astype(jnp.float32) for x in arrays)).astype(query.dtype)

    if query.dtype != jnp.float16:
        return attend(query, key, value)
    # JAX requests float16 products with float32 sums by an algorithm that only GPUs have. The platform is known only
    # when the program is lowered.
    return jax.lax.platform_dependent(query, key, value, cpu=in_float32, tpu=in_float32, default=attend)


def _pad_channels(array: Float[Array, "*shape channels"], width: int) -> Float[Array, "*shape width"]:
    if array.shape[-1] == width:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def run_attention(choice: Choice, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
    """Run the chosen implementation; kernels with a backward pass save the softmax sums that the backward pass reads.

    An implementation without a backward pass takes the derivative of the fallback.
    """
    flash = flash_choice(choice)
    flash_platforms = set() if flash is None else {platform for platform, _ in flash.by_platform}
    branches = {platform: kernel.run for platform, kernel in choice.by_platform if platform not in flash_platforms}

    def run_default(call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        return choice.fallback.run(call) if flash is None else run_flash(flash, call)

    return dispatch_with_derivative(branches, run_default, call)


def flash_choice(choice: Choice) -> FlashChoice | None:
    """Return the chosen kernels with a backward pass, and a fallback that returns the same softmax sums as the kernels.

    Return None if there are no such kernels, or if the fallback is neither a kernel nor `BlockwiseAttention`. The call
    is then differentiated through the fallback.
    """
    kernels = tuple((platform, kernel) for platform, kernel in choice.by_platform if isinstance(kernel, FlashAttention))
    if isinstance(choice.fallback, FlashAttention) or (kernels and isinstance(choice.fallback, BlockwiseAttention)):
        return FlashChoice(kernels, choice.fallback)
    return None


class RequiredKernel(Operation[AttentionCall, Array]):
    """Attention by one kernel on one platform. Calls with a cache are computed by `BlockwiseAttention` instead.

    A call that the kernel cannot compute raises a `ValueError` when it is traced, and a call without a cache raises a
    `ValueError` when it is lowered for another platform. The platform `any` runs the kernel on all platforms.
    """

    platform: str = eqx.field(static=True)
    kernel: FlashAttention

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None; calls with a cache are supported."""
        return None if call.kv_tokens is not None else self.kernel.supports(call)

    def decode_op(self, *, has_codes: bool) -> Op:
        """Return `DECODE_ATTENTION`, because `BlockwiseAttention` computes calls with a cache."""
        return DECODE_ATTENTION

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        if call.kv_tokens is not None:
            return BlockwiseAttention()(call)
        if (reason := self.kernel.supports(call)) is not None:
            raise ValueError(
                f"{self} cannot compute {call.describe()}: {reason}; pass kernels.ATTENTION, which takes another "
                "implementation for such calls."
            )
        record_choice(Choice(call.operation, (), self.kernel, ()))
        return run_flash(self.flash_choice(), call)

    def flash_choice(self) -> FlashChoice:
        """Return the choice of the kernel alone."""
        if self.platform == "any":
            return FlashChoice((), self.kernel)
        return FlashChoice(((self.platform, self.kernel),), BlockwiseAttention(), str(self))


class PiecewiseAttention(Operation[AttentionCall, Array]):
    """Attention whose calls have the keys of a piece of each row, while queries attend to all keys of the row."""

    @abc.abstractmethod
    def weights(self, call: AttentionCall) -> Float[Array, "*batch heads seq kv_seq"]:
        """Return weights of the softmax over all keys of the row.

        The subclass decides whether these are the weights of all keys of the row, or only of the keys in the call.
        """

    @abc.abstractmethod
    def weigh_values(
        self, weights: Float[Array, "*batch heads seq kv_seq"], call: AttentionCall
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Return the output of the call for weights in the form in which `weights` returns them."""


def blockwise_of(core: Operation) -> BlockwiseAttention | None:
    """Return the loop over blocks that computes the same as `core`; None if `core` is an operation of another class.

    Ring attention combines partial results of this loop.
    """
    match core:
        case BlockwiseAttention():
            return core
        case Op():
            loops = (loop for loop in core.implementations if isinstance(loop, BlockwiseAttention))
            return next(loops, BlockwiseAttention())
        case Implementation() | RequiredKernel():
            return BlockwiseAttention()
        case _:
            return None


def unsupported_options(core: Operation, options: Sequence[str]) -> tuple[str, ...]:
    """Return the options (such as `softcap`) that `core` does not support, by asking `core` about small calls.

    If `core` refuses even the small call without options, nothing is known about options, and the result is empty.
    """
    values = {"softcap": 1.0, "sinks": jnp.zeros(1), "bias": jnp.zeros((1, 128, 128)), "alibi_slopes": jnp.zeros(1)}
    array = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    tokens = TokenPositions(jnp.arange(128, dtype=jnp.int32)[None], whole_rows=128)
    call = AttentionCall(array, array, array, mask=Mask(), tokens=tokens, scale=1.0)
    known = [name for name in options if name in values]
    if core.supports(call) is not None:
        return ()
    return tuple(name for name in known if core.supports(dataclasses.replace(call, **{name: values[name]})) is not None)
