"""Ring attention by the fused kernels of accelerators, for rows in the order of `zigzag`.

A device holds an early and a late part of each row. Its queries see its own keys in the order of a causal mask. Of a
device that stands before it on the ring they see all early keys and no late ones; and to keys of a device behind it
only its late queries come after, and they see all of those. So no step needs another mask than these, and each of them
but the first is half of the whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ...nn import at_least_float32, Core, fused, kernel, lowest, Mask, Tokens
from .._ring import Ring
from .._vary import vary, vary_like
from ._shift import shift


Held = tuple[Array, Array, kernel.Places]


class Steps(NamedTuple):
    """How a device attends to its own piece, and to one whose keys are all past to the queries."""

    own: fused.Ways
    past: fused.Ways


def steps_of(
    core: Core,
    pieces: int,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: Tokens,
    given: dict[str, Any],
) -> Steps | None:
    """The steps by the kernels that a core has; None where there are none, and `ValueError` where one must be.

    Args:
        core: The core that would compute whole rows.
        pieces: How many devices are on the ring.
        query: A device's queries.
        key: Its keys.
        value: Its values.
        tokens: Their positions and segments.
        given: The mask, the scale and the softcap.
    """
    kernels, only = core.fused()
    mask: Mask = given["mask"]
    is_known = tokens.pieces == pieces and tokens.whole_rows == pieces * query.shape[-3]
    is_known = is_known and (tokens.segments is None or tokens.documents is not None)
    reason = "over a ring it needs a causal mask without chunks, and rows known to be whole or in order"
    if is_known and mask.is_causal and mask.chunk is None:
        documents = None if tokens.segments is None else tokens.documents
        call = kernel.Call(kernel.Rows(True, mask.window, documents, "own"), given["scale"], given["softcap"])
        past = call._replace(rows=call.rows._replace(is_causal=False, piece="past"))
        half = query.shape[-3] // 2
        (early_key, _), (early_value, _) = (jnp.split(x, [half], axis=-3) for x in (key, value))
        refusals = {one: one.refusal(call, query, key, value) for one in kernels}
        refusals |= {one: why or one.refusal(past, query, early_key, early_value) for one, why in refusals.items()}
        if there := tuple(one for one, why in refusals.items() if why is None):
            return Steps(fused.Ways(call, there, only), fused.Ways(past, there, only))
        reason = next((why for why in refusals.values() if why), reason)
    if only is None:
        return None
    raise ValueError(
        f"{only} over {pieces} devices of a ring cannot compute query {query.dtype}{list(query.shape)} under {mask}: "
        f"{reason}; pass AutoCore(), which takes blocks where it must, or method='heads', which gives it whole rows."
    )


def fused_ring_attend(
    steps: Steps,
    ring: Ring,
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads v_dim"],
    tokens: Tokens,
    sinks: Float[Array, "heads"] | None,
) -> Float[Array, "*batch seq heads v_dim"]:
    """The attention of this device's queries to the keys of all devices on the ring, as `ring_attend` computes it.

    Args:
        steps: How the pieces are attended to.
        ring: The devices.
        query: This device's queries.
        key: Its keys.
        value: Its values.
        tokens: Their positions and segments.
        sinks: A score of each head that joins its softmax.
    """
    batch = query.shape[:-3]
    arrays = tuple(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    given = *arrays, kernel.places_of(tokens, batch), sinks
    output = _ring(steps, ring, *vary(vary_like(given, given), (ring.axis,)))
    return output.reshape(*batch, *query.shape[-3:-1], value.shape[-1])


def _results(
    steps: Steps, ring: Ring, query: Array, key: Array, value: Array, places: kernel.Places, sinks: Array | None
) -> tuple[Array, Array]:
    def joined(result: tuple[Array, Array], held: Held, turn: Any) -> tuple[Array, Array]:
        output, logsum = result
        part, part_logsum = _past(steps.past, ring, turn, query, places, held)
        share = jax.nn.sigmoid(part_logsum - logsum).swapaxes(1, 2)[..., None]
        return output + share * (part.astype(output.dtype) - output), jnp.logaddexp(logsum, part_logsum)

    def step(carry: tuple, turn: Array) -> tuple[tuple, None]:
        result, held = carry
        following = _send(ring, held)  # on its way while this device computes
        return (joined(result, held, turn), following), None

    held = key, value, places
    following = _send(ring, held) if ring.devices > 1 else held
    output, logsum = fused.part_forward(steps.own, query, *held[:2], places, places)
    result = output.astype(at_least_float32(output.dtype)), logsum
    if ring.devices > 1:
        turns = jnp.arange(1, ring.devices - 1, dtype=jnp.int32)
        (result, held), _ = jax.lax.scan(step, (result, following), turns)
        result = joined(result, held, ring.devices - 1)
    return fused.with_sinks(result[0].astype(query.dtype), result[1], sinks)


_ring = jax.custom_vjp(lambda *given: _results(*given)[0], nondiff_argnums=(0, 1))


def _ring_forward(steps: Steps, ring: Ring, *given: Any):
    output, logsum = (checkpoint_name(x, "attended") for x in _results(steps, ring, *given))  # for remat policies
    return output, (*given, output, logsum)


def _ring_backward(steps: Steps, ring: Ring, saved: tuple, to_output: Array):
    query, key, value, places, sinks, output, logsum = saved
    results = output, logsum, to_output
    exact = at_least_float32(query.dtype)

    def parts(held: Held, turn: Any) -> tuple[Array, tuple[Array, ...]]:
        to_query, *to_held = _to_past(steps.past, ring, turn, query, places, held, results)
        return to_query.astype(exact), tuple(to_held)

    def step(carry: tuple, turn: Array) -> tuple[tuple, None]:
        held, to_query, to_held = carry
        following, arrived = _send(ring, held), _send(ring, to_held)
        more, to_held = parts(held, turn)
        return (following, to_query + more, jax.tree.map(jnp.add, arrived, to_held)), None

    held, size = (key, value, places), ring.devices
    following = _send(ring, held) if size > 1 else held
    to_query, *own = fused.part_backward(steps.own, query, key, value, places, places, *results)
    to_query = to_query.astype(exact)
    if size > 1:
        # The gradients of a piece are sent one step behind it, and reach their owner with the last step.
        nothing = vary_like(jax.tree.map(jnp.zeros_like, tuple(own)), own)
        if size > 2:
            held, following = following, _send(ring, following)
            more, nothing = parts(held, 1)
            turns = jnp.arange(2, size - 1, dtype=jnp.int32)
            (following, to_query, nothing), _ = jax.lax.scan(step, (following, to_query + more, nothing), turns)
            nothing = _send(ring, nothing)
        more, to_held = parts(following, size - 1)
        to_query = to_query + more
        home = _send(ring, jax.tree.map(jnp.add, nothing, to_held))
        own = jax.tree.map(jnp.add, tuple(own), home)
    return to_query.astype(query.dtype), *own, None, fused.to_sinks(sinks, *results)


_ring.defvjp(_ring_forward, _ring_backward)


def _past(
    ways: fused.Ways, ring: Ring, turn: Any, query: Array, places: kernel.Places, held: Held
) -> tuple[Array, Array]:
    """What a device's queries get of the piece that reaches it at a turn."""

    def of_early_keys() -> tuple[Array, Array]:
        key, value, kv_places = _halves(held)[0]
        return fused.part_forward(ways, query, key, value, places, kv_places)

    def by_late_queries() -> tuple[Array, Array]:
        _, (late, late_places) = _halves((query, places))
        key, value, kv_places = held
        output, logsum = fused.part_forward(ways, late, key, value, late_places, kv_places)
        unseen = jnp.full_like(logsum, lowest(logsum.dtype))
        return _behind(jnp.zeros_like(output), output, 1), _behind(unseen, logsum, 2)

    return _of_turn(ring, turn, of_early_keys, by_late_queries)


def _to_past(
    ways: fused.Ways,
    ring: Ring,
    turn: Any,
    query: Array,
    places: kernel.Places,
    held: Held,
    results: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """The gradients of queries, and of the keys and values that reach the device at a turn."""

    def of_early_keys() -> tuple[Array, Array, Array]:
        key, value, kv_places = _halves(held)[0]
        to_query, *rest = fused.part_backward(ways, query, key, value, places, kv_places, *results)
        to_key, to_value = (_behind(x, jnp.zeros_like(x), 1) for x in rest)
        return to_query, to_key, to_value

    def by_late_queries() -> tuple[Array, Array, Array]:
        output, logsum, to_output = results
        _, (late, late_places, output, to_output) = _halves((query, places, output, to_output))
        logsum = jnp.split(logsum, 2, axis=2)[1]
        key, value, kv_places = held
        arrays = late, key, value, late_places, kv_places, output, logsum, to_output
        to_query, to_key, to_value = fused.part_backward(ways, *arrays)
        return _behind(jnp.zeros_like(to_query), to_query, 1), to_key, to_value

    return _of_turn(ring, turn, of_early_keys, by_late_queries)


def _of_turn(ring: Ring, turn: Any, of_early_keys: Callable[[], Any], by_late_queries: Callable[[], Any]) -> Any:
    """The one for pieces of devices before this one, or the other."""
    return jax.lax.cond(jax.lax.axis_index(ring.axis) >= turn, of_early_keys, by_late_queries)


def _halves(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The early and the late part of arrays `batch seq ...`."""
    half = lambda x: x.shape[1] // 2
    return jax.tree.map(lambda x: x[:, : half(x)], tree), jax.tree.map(lambda x: x[:, half(x) :], tree)


def _behind(early: Array, late: Array, dim: int) -> Array:
    return jnp.concatenate([vary_like(early, late), vary_like(late, early)], axis=dim)


def _send(ring: Ring, tree: PyTree) -> PyTree:
    return shift(tree, ring.axis, name=ring.name)
