"""Attention by flash kernels, which share one custom derivative for all platforms.

A flash kernel returns the output and the logsumexp of each query's scores, and its backward pass takes both, as in
FlashAttention-2 (arXiv:2307.08691). So kernels of several platforms can share one `jax.custom_vjp`, in which
`jax.lax.platform_dependent` chooses a kernel while JAX lowers the program.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from .._decode_attention import DECODE_ATTENTION
from .._op import Implementation, Op
from .._platform import at_least_float32, fail_lowering, varying_zero
from ._call import AttentionCall, with_one_batch_dim


Output = Float[Array, "batch seq heads v_dim"]
LogSum = Float[Array, "batch heads seq"]
Gradients = tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch kv_seq kv_heads head_dim"],
    Float[Array, "batch kv_seq kv_heads v_dim"],
]

PassResult = TypeVar("PassResult", bound=tuple[Array, ...])


class TwoPasses(Protocol):
    """A forward and a backward pass of attention, as `FlashAttention` describes them."""

    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return the output and the logsumexp of each query's scores."""
        ...

    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients of query, key and value."""
        ...


class FlashAttention(Implementation[AttentionCall, Array]):
    """Kernel of attention that has a backward pass.

    Both passes get a call with one batch dim and without sinks. Sinks are added to the logsumexp after the forward pass
    (`add_sinks`). `supports` must refuse calls with `has_bias`, because a `bias` would get no gradient, and because
    `jax.vmap` calls the kernel once, with a larger batch, although `alibi_slopes` have no batch.
    """

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> tuple[Output, LogSum]:
        """Return the output and the logsumexp of each query's scores."""

    @abc.abstractmethod
    def backward(self, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output) -> Gradients:
        """Return the gradients of query, key and value.

        Args:
            call: The call.
            output: The output of the softmax over all keys; in ring attention, these include keys outside of the call.
            logsum: The logsumexp of each query's scores for all keys and sinks.
            output_grad: The gradient of the output.
        """

    def decode_op(self, *, has_codes: bool) -> Op | None:
        """Return `DECODE_ATTENTION` for a cache of 8-bit codes; None for other caches, which `run` reads itself."""
        return DECODE_ATTENTION if has_codes else None

    def run(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call by this kernel on every platform."""
        return run_flash(FlashChoice((), self), call)


class FlashChoice(NamedTuple):
    """Kernels of an attention by platform."""

    by_platform: tuple[tuple[str, FlashAttention], ...]
    fallback: TwoPasses
    """Passes that run on all other platforms."""
    required_by: str | None = None
    """Name of an operation that requires the kernels; compiling for other platforms then raises a `ValueError`."""


def run_flash(choice: FlashChoice, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
    """Run the kernel of the platform that the program is compiled for."""
    merged = with_one_batch_dim(call)
    # Under `shard_map` a custom gradient must vary over the mesh axes of its argument. So add to each array a zero that
    # varies over the axes of all arrays; XLA removes the addition.
    zero = varying_zero(merged, call.query.dtype)
    merged = jax.tree.map(lambda x: x + zero.astype(x.dtype), merged)
    return _attend(choice, merged).reshape(*call.query.shape[:-1], call.value.shape[-1])


def _attend_by_kernels(choice: FlashChoice, call: AttentionCall) -> Output:
    return add_sinks(*forward(choice, without_sinks(call)), call.sinks)[0]


_attend = jax.custom_vjp(_attend_by_kernels, nondiff_argnums=(0,))


def _attend_forward(choice: FlashChoice, call: AttentionCall) -> tuple[Output, tuple]:
    results = add_sinks(*forward(choice, without_sinks(call)), call.sinks)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # Remat policies may save both by this name.
    return output, (call, output, logsum)


def _attend_backward(choice: FlashChoice, residuals: tuple, output_grad: Output) -> tuple[AttentionCall]:
    call, output, logsum = residuals
    gradients = backward(choice, without_sinks(call), output, logsum, output_grad)
    return (call_gradient(call, *gradients, sinks_grad(call.sinks, output, logsum, output_grad)),)


_attend.defvjp(_attend_forward, _attend_backward)


def without_sinks(call: AttentionCall) -> AttentionCall:
    """Return the call without its sinks."""
    return eqx.tree_at(lambda call: call.sinks, call, None, is_leaf=lambda x: x is None)


def call_gradient(call: AttentionCall, *gradients: Array | None) -> AttentionCall:
    """Return the gradients of query, key, value and sinks in the structure of the call."""
    differentiated = lambda call: (call.query, call.key, call.value, call.sinks)
    without_gradients = jax.tree.map(lambda _: None, call)
    return eqx.tree_at(differentiated, without_gradients, gradients, is_leaf=lambda x: x is None)


def add_sinks(output: Output, logsum: LogSum, sinks: Float[Array, "heads"] | None) -> tuple[Output, LogSum]:
    """Return output and logsumexp of the softmax with sinks, from output and logsumexp without sinks.

    A sink adds to each query's sum of exponentials, and has no value. If a backward pass gets this output and this
    logsumexp, it returns the right gradients without knowing the sinks.
    """
    if sinks is None:
        return output, logsum
    total = jnp.logaddexp(logsum, sinks.astype(logsum.dtype)[:, None])
    return scale_output(output, jnp.exp(logsum - total).swapaxes(1, 2)[..., None]), total


def scale_output(output: Float[Array, "..."], factor: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `output * factor`, computed in float32 at least, in the dtype of the output."""
    wide = at_least_float32(output.dtype)
    return (output.astype(wide) * factor.astype(wide)).astype(output.dtype)


def sinks_grad(
    sinks: Float[Array, "heads"] | None, output: Output, logsum: LogSum, output_grad: Output
) -> Float[Array, "heads"] | None:
    """Return the gradient of the sinks, from the output and logsumexp that `add_sinks` returned."""
    if sinks is None:
        return None
    row_sums = jnp.sum(output_grad.astype(logsum.dtype) * output.astype(logsum.dtype), axis=-1).swapaxes(1, 2)
    weights = jnp.exp(sinks.astype(logsum.dtype)[:, None] - logsum)
    return -jnp.sum(weights * row_sums, axis=(0, 2)).astype(sinks.dtype)


def forward(choice: FlashChoice, call: AttentionCall) -> tuple[Output, LogSum]:
    """Return output and logsumexp by the platform's kernel, without a derivative."""
    branches = {platform: kernel.forward for platform, kernel in choice.by_platform}
    return _by_platform(choice, branches, choice.fallback.forward, call)


def backward(
    choice: FlashChoice, call: AttentionCall, output: Output, logsum: LogSum, output_grad: Output
) -> Gradients:
    """Return the gradients of query, key and value by the platform's kernel."""
    branches = {platform: kernel.backward for platform, kernel in choice.by_platform}
    return _by_platform(choice, branches, choice.fallback.backward, call, output, logsum, output_grad)


def _by_platform(
    choice: FlashChoice,
    branches: dict[str, Callable[..., PassResult]],
    fallback: Callable[..., PassResult],
    call: AttentionCall,
    *arrays: Array,
) -> PassResult:
    if not branches and choice.required_by is None:
        return (
            _over_batch(fallback)(call, *arrays)
            if isinstance(choice.fallback, FlashAttention)
            else fallback(call, *arrays)
        )
    merged_branches = {platform: _over_batch(branch) for platform, branch in branches.items()}

    def run_fallback(call: AttentionCall, *arrays: Array) -> PassResult:
        if choice.required_by is not None:
            query = fail_lowering(call.query, choice.required_by, tuple(branches))
            call = eqx.tree_at(lambda call: call.query, call, query)
        return fallback(call, *arrays)

    return jax.lax.platform_dependent(call, *arrays, **merged_branches, default=run_fallback)


def _over_batch(kernel: Callable[..., PassResult]) -> Callable[..., PassResult]:
    """Wrap a kernel so that `jax.vmap` calls it once with a larger batch; the first dim of all arrays is the batch."""
    call = jax.custom_batching.custom_vmap(lambda *arrays: tuple(kernel(*arrays)))

    @call.def_vmap
    def rule(size: int, are_batched: list[PyTree], *arrays: PyTree):
        def merge(x: Array, is_batched: bool) -> Array:
            stacked = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return stacked.reshape(-1, *stacked.shape[2:])

        results = call(*jax.tree.map(merge, [*arrays], are_batched))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    return call
