"""The gated delta rule: a matrix a head that forgets, corrects what it holds for a key, and answers queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._answered import answered
from ._channel_fading import BLOCK, fading_by_channel
from ._chunks import cut, fading, product, put_together
from ._masked import masked
from ._states import States
from ._step_order import Order


def delta_rule(
    query: Float[Array, "*batch seq kv_heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq heads v_dim"],
    rate: Float[Array, "*batch seq heads"],
    decay: Float[Array, "..."],
    documents: Int[Array, "*batch seq"],
    states: States,
    *,
    chunk: int,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
    """Each token's answer `S_t^T q_t`, and the memory of the last states (arXiv:2412.06464, eq. 10).

    `S_t = e^decay_t S_(t-1) + rate_t k_t (v_t - e^decay_t S_(t-1)^T k_t)^T`: what the state holds for a key is moved
    towards its value (Yang, Kautz and Hatamizadeh 2024). Each further document begins with zeros. A token of rate and
    decay 0 changes nothing. One token is one step; more are computed by chunks, in products of `chunk x chunk` (section
    3.3 there), one chunk after another, so that time and memory grow with `seq * chunk`. Each key and query serves
    `heads / kv_heads` neighbouring heads. All arrays are of one dtype.

    `decay` is that of a head, of shape `*batch seq heads`, or of each channel of its keys, `*batch seq heads head_dim`
    (Kimi team 2025, arXiv:2510.26692).
    """
    decay = decay[..., None] if decay.ndim == rate.ndim else decay
    if query.shape[-3] == 1:
        return _of_one_token(query, key, value, rate, decay, states)
    copies = value.shape[-2] // key.shape[-2]
    query, key = (jnp.repeat(x, copies, axis=-2) for x in (query, key))
    batch, seq = query.shape[:-3], query.shape[-3]
    is_by_head = decay.shape[-1] == 1
    size = min(chunk, seq if is_by_head else seq + -seq % BLOCK)
    by_heads = lambda x: jnp.swapaxes(cut(x.reshape(-1, *x.shape[len(batch) :]), size), 2, 3)
    query, key, value, rate, decay = map(by_heads, (query, key, value, rate, decay))
    # The last chunk is padded with tokens of the last document, of rate and decay 0.
    owners = cut(documents.reshape(-1, seq), size, mode="edge")
    if is_by_head:
        within, *rest = fading(decay[..., 0], owners)
        passing, ending, kept = (x[..., None] for x in rest)
        faded = lambda one, other: product("nbhid,nbhjd->nbhij", one, other) * within
    else:
        faded, passing, ending, kept = fading_by_channel(decay, owners)
    weighed = rate[..., None] * key
    system = masked(jnp.tri(size, k=-1, dtype=bool), faded(weighed, key), rate)
    added, corrected = _solved(system, rate[..., None] * value, weighed * passing)
    scores = faded(query, key)
    asked, stored = query * passing, key * ending
    state = states.first(value.dtype)
    start = state.reshape(-1, *state.shape[len(batch) :])
    output, last = answered(start, kept, added, corrected, scores, asked, stored)
    return put_together(output, batch, seq), states.replaced(last.reshape(state.shape))


def _of_one_token(
    query: Array, key: Array, value: Array, rate: Array, decay: Array, states: States
) -> tuple[Array, Array]:
    """All heads are of one group, which differ in their keys."""
    copies = value.shape[-2] // key.shape[-2]
    if copies > 1:
        # A gather: to simplify the indices of repeated heads takes XLA's fusion for GPUs half a minute a layer.
        owner = jnp.arange(value.shape[-2]) // copies
        query, key = query[..., owner, :], key[..., owner, :]
    return states.stepped(_step, query, key, value, rate[..., None], decay)


def _step(
    order: Order, query: Array, key: Array, value: Array, rate: Array, decay: Array, state: Array
) -> tuple[Array, Array]:
    before = state * order.of_keys(jnp.exp(decay))
    held, asked = order.read(key, before), order.read(query, before)
    news = rate * (value - held)
    answer = asked + jnp.sum(query * key, axis=-1, keepdims=True) * news
    return answer, before + order.of_keys(key) * order.of_values(news)


def _solved(system: Float[Array, "n b h chunk chunk"], *sides: Float[Array, "n b h chunk _"]) -> tuple[Array, ...]:
    """The solutions of `x + system x = side` for each of `sides`, where `system` has nothing on its diagonal or above.

    By products alone, in a tenth of the time that LAPACK takes. (Its batched solver waits for threads of a pool that
    simulated CPU devices use too: where all of them wait, they do for ever.)
    """
    inverse, zero = _inverse(jax.lax.stop_gradient(system)), jnp.zeros_like(system, shape=())
    each = lambda function: lambda xs: tuple(map(function, xs))
    return jax.lax.custom_linear_solve(
        each(lambda x: x + _exact(system, x)),
        tuple(side + zero for side in sides),  # varying over mesh axes as the results do
        lambda _, sides: each(lambda side: _exact(inverse, side))(sides),
        lambda _, sides: each(lambda side: _exact(inverse.mT, side))(sides),
    )


def _inverse(system: Float[Array, "*n chunk chunk"]) -> Array:
    """`(I + system)^-1`: the inverses of blocks on the diagonal, of one row, then of two, four and so on.

    Of two neighbours with inverses `X` and `Y` and `A` below the first, the inverse has `-Y A X` there. That is as
    exact as substitution, which the powers of `system` are not where keys are alike.
    """
    size, rows = system.shape[-1], 2
    inverse = jnp.eye(size, dtype=system.dtype) - _below(system, 1)
    while rows < size:
        inverse -= _exact(inverse, _exact(_below(system, rows), inverse))
        rows *= 2
    return inverse


def _below(system: Float[Array, "*n chunk chunk"], rows: int) -> Array:
    """Of two neighbouring blocks on the diagonal, of so many rows, what stands below the first; else zeros."""
    block = jnp.arange(system.shape[-1]) // rows
    return masked((block[:, None] % 2 == 1) & (block[:, None] - 1 == block), system, system)


def _exact(one: Array, other: Array) -> Array:
    return jnp.matmul(one, other, precision="highest")
