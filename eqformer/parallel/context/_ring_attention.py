"""Ring attention: over a sequence that is split over the devices of an axis, keys and values pass round a ring."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ...kernels import at_least_float32, blockwise, lowest, TokenPositions
from .._ring import Ring, shift
from .._shard_map import vary, vary_like


def ring_attend(
    rules: blockwise.BlockwiseSettings,
    ring: Ring,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: TokenPositions,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*batch seq heads"]]:
    """Attend to the keys of all devices of the axis as `blockwise.attend` would (Liu et al., 2310.01889).

    Each device attends to the piece it has while the next one arrives, and combines results by their logsumexps.
    Received pieces are not kept: the backward pass sends keys and values round the ring again, together with their
    gradients, which reach their owner with the last step, and recomputes probabilities from the total logsumexp. Keys
    and values are sent `size - 1` times in each pass, and gradients as often, in the arrays' dtype.
    """
    arrays = blockwise.group_heads(query, key, value, tokens, None)
    arrays = vary(vary_like(arrays, arrays), (ring.axis,))
    output, logsum = _ring(rules, ring, *arrays[:4])
    batch = query.shape[:-3]
    return blockwise.ungroup_heads(output, batch), blockwise.ungroup_heads(logsum[..., None], batch)[..., 0]


def _ring_plainly(
    rules: blockwise.BlockwiseSettings, ring: Ring, query: Array, key: Array, value: Array, places: TokenPositions
) -> tuple[Array, Array]:
    def attended(result: tuple[Array, Array], held: tuple) -> tuple[Array, Array]:
        (output, logsum), (key, value, kv_places) = result, held
        part, part_logsum = blockwise.attend_forward(rules, query, key, value, places, kv_places)
        share = jax.nn.sigmoid(part_logsum - logsum)[..., None]
        return output + share * (part.astype(output.dtype) - output), jnp.logaddexp(logsum, part_logsum)

    def step(carry: tuple, _) -> tuple[tuple, None]:
        result, held = carry
        following = _send(ring, held)  # on its way while this device computes
        return (attended(result, held), following), None

    held = key, value, places
    zero = jnp.zeros_like(query, at_least_float32(query.dtype), shape=())
    rows = query.shape[:-1]
    empty = jnp.full((*rows, value.shape[-1]), zero), jnp.full(rows, zero + lowest(zero.dtype))
    (result, held), _ = jax.lax.scan(step, (empty, held), length=ring.devices - 1)
    output, logsum = attended(result, held)
    return output.astype(query.dtype), logsum


_ring = jax.custom_vjp(_ring_plainly, nondiff_argnums=(0, 1))


def _ring_forward(
    rules: blockwise.BlockwiseSettings, ring: Ring, query: Array, key: Array, value: Array, places: TokenPositions
):
    results = _ring(rules, ring, query, key, value, places)
    output, logsum = (checkpoint_name(x, "attended") for x in results)  # for remat policies that keep it
    return (output, logsum), (query, key, value, places, output, logsum)


def _ring_backward(rules: blockwise.BlockwiseSettings, ring: Ring, saved: tuple, gradients: tuple[Array, Array]):
    query, key, value, places, output, logsum = saved
    exact = at_least_float32(query.dtype)

    def parts(held: tuple) -> tuple[Array, tuple[Array, ...]]:
        to_query, *to_held = blockwise.attend_backward(
            rules, (query, *held[:2], places, held[2], output, logsum), gradients
        )
        return to_query.astype(exact), tuple(to_held)

    def step(carry: tuple, _) -> tuple[tuple, None]:
        held, to_query, to_held = carry
        following, arrived = _send(ring, held), _send(ring, to_held)
        more, to_held = parts(held)
        return (following, to_query + more, jax.tree.map(jnp.add, arrived, to_held)), None

    # The device's own piece first, while the next one arrives. The gradients of a piece are sent one step behind it, so
    # that they too overlap with the computation, and reach their owner with the last step.
    held, size = (key, value, places), ring.devices
    if size == 1:
        to_query, own = parts(held)
        return to_query.astype(query.dtype), *own, None
    following = _send(ring, held)
    to_query, own = parts(held)
    held, arrived = following, None
    if size > 2:
        following = _send(ring, held)
        more, to_held = parts(held)
        carry, _ = jax.lax.scan(step, (following, to_query + more, to_held), length=size - 3)
        held, to_query, to_held = carry
        arrived = _send(ring, to_held)
    more, to_held = parts(held)
    to_held = to_held if arrived is None else jax.tree.map(jnp.add, arrived, to_held)
    home = jax.tree.map(jnp.add, own, _send(ring, to_held))
    return (to_query + more).astype(query.dtype), *home, None


_ring.defvjp(_ring_forward, _ring_backward)


def _send(ring: Ring, tree: PyTree) -> PyTree:
    return shift(tree, ring.axis, name=ring.name)
