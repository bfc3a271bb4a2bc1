"""Attention by the kernel of the platform that a program is compiled for, with one gradient for all of them.

Each kernel gives the attended values and the logarithm of each row's sum of exponentials, and takes both for its
gradients, as `BlockwiseCore`'s loop does. So they can stand for each other: `jax.lax.platform_dependent` has one of
them in the program, by the platform for which JAX lowers it, wherever that is done.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .._sums import wide_product
from .._tokens import Tokens
from ..attention._mask import Mask
from ._blocks import grouped
from ._blockwise import attend_backward, attend_forward, Rules
from ._kernel import Call, Kernel, Places, places_of
from ._platform import refused


class Ways(NamedTuple):
    """The kernels that a call may run by, each on its platform, and the loop of `BlockwiseCore` elsewhere.

    With `only`, what is asked for by that name alone may run: elsewhere it cannot be compiled.
    """

    call: Call
    kernels: tuple[Kernel, ...]
    only: str | None = None


def attend_fused(
    ways: Ways,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: Tokens,
    sinks: Float[Array, "heads"] | None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Attention of rows to themselves, whose mask `ways.call.rows` tells.

    Args:
        ways: How it may be computed.
        query: The queries.
        key: The keys.
        value: The values.
        tokens: Their positions and segments.
        sinks: A score of each head that joins its softmax.
    """
    batch = query.shape[:-3]
    arrays = tuple(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    given = arrays, places_of(tokens, batch), sinks
    # A custom gradient must vary over the mesh axes that its argument varies over: see `attend` in `_blockwise.py`.
    zero = jnp.zeros((), query.dtype)
    for array in jax.tree.leaves(given):
        zero += jnp.zeros_like(array, zero.dtype, shape=())
    arrays, places, sinks = jax.tree.map(lambda x: x + zero.astype(x.dtype), given)
    return _attend(ways, *arrays, places, sinks).reshape(*batch, *query.shape[-3:-1], value.shape[-1])


def _attend_plainly(ways: Ways, query: Array, key: Array, value: Array, places: Places, sinks: Array | None) -> Array:
    return _results(ways, query, key, value, places, sinks)[0]


_attend = jax.custom_vjp(_attend_plainly, nondiff_argnums=(0,))


def _results(
    ways: Ways, query: Array, key: Array, value: Array, places: Places, sinks: Array | None
) -> tuple[Array, Array]:
    return with_sinks(*part_forward(ways, query, key, value, places, places), sinks)


def _forward(ways: Ways, query: Array, key: Array, value: Array, places: Places, sinks: Array | None):
    results = _results(ways, query, key, value, places, sinks)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # for remat policies that keep it
    return output, (query, key, value, places, sinks, output, logsum)


def _backward(ways: Ways, saved: tuple, to_output: Array):
    query, key, value, places, sinks, output, logsum = saved
    gradients = part_backward(ways, query, key, value, places, places, output, logsum, to_output)
    return *gradients, None, to_sinks(sinks, output, logsum, to_output)


_attend.defvjp(_forward, _backward)


def with_sinks(
    output: Float[Array, "batch seq heads v_dim"],
    logsum: Float[Array, "batch heads seq"],
    sinks: Float[Array, "heads"] | None,
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """The output and the sums with sinks in the softmax, from those without.

    Sinks join each row's sum and no value: with the whole sum in their place, the kernels' gradients are right too.
    """
    if sinks is None:
        return output, logsum
    whole = jnp.logaddexp(logsum, sinks.astype(logsum.dtype)[:, None])
    return wide_product(output, jnp.exp(logsum - whole).swapaxes(1, 2)[..., None]), whole


def to_sinks(
    sinks: Float[Array, "heads"] | None,
    output: Float[Array, "batch seq heads v_dim"],
    logsum: Float[Array, "batch heads seq"],
    to_output: Float[Array, "batch seq heads v_dim"],
) -> Float[Array, "heads"] | None:
    """The gradient of sinks, from the output and the sums that `with_sinks` gave."""
    if sinks is None:
        return None
    shared = jnp.sum(to_output.astype(logsum.dtype) * output.astype(logsum.dtype), axis=-1).swapaxes(1, 2)
    weights = jnp.exp(sinks.astype(logsum.dtype)[:, None] - logsum)
    return -jnp.sum(weights * shared, axis=(0, 2)).astype(sinks.dtype)


def part_forward(
    ways: Ways,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads v_dim"],
    places: Places,
    kv_places: Places,
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """The attended values and the logarithm of each row's sum, by the way of the platform; with no gradient.

    Args:
        ways: How it may be computed.
        query: The queries.
        key: The keys.
        value: The values.
        places: The positions and segments of the queries.
        kv_places: Those of the keys.
    """
    branches = {kernel: kernel.forward for kernel in ways.kernels}
    return _by_platform(ways, branches, _forward_in_blocks, query, key, value, places, kv_places)


def part_backward(
    ways: Ways,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads v_dim"],
    places: Places,
    kv_places: Places,
    *results: Float[Array, "..."],
) -> tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch kv_seq kv_heads head_dim"],
    Float[Array, "batch kv_seq kv_heads v_dim"],
]:
    """The gradients of query, key and value by the way of the platform; for part of the keys, their part of these.

    Args:
        ways: How it may be computed.
        query: The queries.
        key: The keys.
        value: The values.
        places: The positions and segments of the queries.
        kv_places: Those of the keys.
        results: The output, the sums and the output's gradient, all of a softmax over all keys.
    """
    branches = {kernel: kernel.backward for kernel in ways.kernels}
    return _by_platform(ways, branches, _backward_in_blocks, query, key, value, places, kv_places, *results)


def _by_platform(
    ways: Ways, branches: dict[Kernel, Callable[..., Any]], in_blocks: Callable[..., Any], *arrays: Any
) -> Any:
    """What the kernel of the platform gives for the arrays, or else the loop over blocks."""
    bound = {}
    for kernel, branch in branches.items():
        bound[kernel.platform] = _over_batch(functools.partial(branch, ways.call))
        if kernel.interpret:
            return bound[kernel.platform](*arrays)

    def otherwise(query: Array, *rest: Any) -> tuple[Array, ...]:
        if ways.only is not None:
            query = refused(query, ways.only, tuple(bound))
        return in_blocks(ways, query, *rest)

    return jax.lax.platform_dependent(*arrays, **bound, default=otherwise)


def _over_batch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, whose arrays all begin with a dim for the batch, called once with a larger one under `vmap`."""
    call = jax.custom_batching.custom_vmap(lambda *arrays: tuple(kernel(*arrays)))

    @call.def_vmap
    def rule(size: int, are_batched: Any, *arrays: Any):
        def joined(x: Array, is_batched: bool) -> Array:
            whole = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return whole.reshape(-1, *whole.shape[2:])

        results = call(*jax.tree.map(joined, [*arrays], are_batched))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    return call


def _in_groups(
    ways: Ways, query: Array, key: Array, value: Array, places: Places, kv_places: Places
) -> tuple[Rules, tuple]:
    rows = ways.call.rows
    rules = Rules(Mask(rows.is_causal, rows.window, ahead=rows.ahead), ways.call.scale, ways.call.softcap, "platform")
    return rules, grouped(query, key, value, Tokens(*places), Tokens(*kv_places))


def _forward_in_blocks(ways: Ways, *arrays: Any) -> tuple[Array, Array]:
    rules, arrays = _in_groups(ways, *arrays)
    output, logsum = attend_forward(rules, *arrays)
    return _tokens_first(output), logsum.reshape(logsum.shape[0], -1, logsum.shape[-1])


def _backward_in_blocks(ways: Ways, *given: Any) -> tuple[Array, Array, Array]:
    *arrays, output, logsum, to_output = given
    rules, arrays = _in_groups(ways, *arrays)
    rows = arrays[0].shape[:-1]
    output, to_output = (x.swapaxes(1, 2).reshape(*rows, -1) for x in (output, to_output))
    logsum = logsum.reshape(rows)
    gradients = attend_backward(rules, (*arrays, output, logsum), (to_output, jnp.zeros_like(logsum)))
    to_query, to_key, to_value = gradients
    return _tokens_first(to_query), to_key.swapaxes(1, 2), to_value.swapaxes(1, 2)


def _tokens_first(x: Array) -> Array:
    """`batch seq heads head_dim` of `batch kv_heads group seq head_dim`."""
    return x.reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)
