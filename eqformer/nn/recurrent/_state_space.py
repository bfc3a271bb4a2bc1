"""The state-space recurrence of Mamba-2: a matrix a head that fades, takes up a value by its key, answers queries."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._pallas import cpu_or
from ._chunks import cut, fading, product
from ._passed_on import passed_on


State = Float[Array, "*batch heads head_dim v_dim"]


def state_space(
    query: Float[Array, "*batch seq kv_heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq heads v_dim"],
    decay: Float[Array, "*batch seq heads"],
    documents: Int[Array, "*batch seq"],
    state: State,
    *,
    chunk: int,
) -> tuple[Float[Array, "*batch seq heads v_dim"], State]:
    """Each token's answer `S_t^T q_t`, and the last state, of `S_t = e^decay_t S_(t-1) + k_t v_t^T` in each head.

    By the duality of Dao and Gu (2024, arXiv:2405.21060, section 6) whole rows are computed by chunks: within one, as
    an attention whose scores fade; from one to the next by the state. All is products of matrices but the sum over
    chunks, and time and memory grow with `seq * chunk`. Each key and query serves `heads / kv_heads` neighbouring
    heads. `state` is of document 0, and each further document begins with zeros; a token of value and decay 0 changes
    nothing. One token is one step. All arrays are of one dtype.
    """
    batch, seq, groups = key.shape[:-3], key.shape[-3], key.shape[-2]
    heads, v_dim = value.shape[-2:]
    grouped = value.reshape(*value.shape[:-2], groups, heads // groups, v_dim)
    if seq == 1:
        return _step(query, key, grouped, decay, documents, state)
    size = min(chunk, seq)
    chunks = lambda x: cut(x.reshape(-1, *x.shape[len(batch) :]), size)
    # Tokens before a group's heads, so that all that these share is a product of matrices as they lie.
    query, key, grouped = (jnp.moveaxis(chunks(x), 3, 2) for x in (query, key, grouped))
    # The last chunk is padded with tokens of the last document, of value and decay 0.
    owners = cut(documents.reshape(-1, seq), size, mode="edge")
    by_group = lambda x: x.reshape(*x.shape[:2], groups, heads // groups, *x.shape[3:])
    within, passing, ending, kept = map(by_group, fading(jnp.moveaxis(chunks(decay), 2, -1), owners))
    scores = product("nbgid,nbgjd->nbgij", query, key)[..., None, :, :] * within
    output = product("nbgrij,nbgjrv->nbgirv", scores, grouped)
    added = product("nbgjd,nbgjrv->nbgdrv", key, grouped * ending.mT[..., None])
    start = jnp.swapaxes(by_group(state.reshape(1, -1, *state.shape[len(batch) :]))[0], 2, 3)
    before, last = passed_on(start, kept, added)
    output += product("nbgid,nbgdrv->nbgirv", query, before) * passing.mT[..., None]
    output = jnp.moveaxis(output, (0, 2), (1, 3)).reshape(*batch, -1, heads, v_dim)
    return jax.lax.slice_in_dim(output, 0, seq, axis=len(batch)), jnp.swapaxes(last, 2, 3).reshape(state.shape)


def _step(
    query: Float[Array, "*batch 1 kv_heads head_dim"],
    key: Float[Array, "*batch 1 kv_heads head_dim"],
    grouped: Float[Array, "*batch 1 kv_heads copies v_dim"],
    decay: Float[Array, "*batch 1 heads"],
    documents: Int[Array, "*batch 1"],
    state: State,
) -> tuple[Float[Array, "*batch 1 heads v_dim"], State]:
    goes_on = documents[..., 0, None, None, None] == 0
    state = jnp.where(goes_on, state * jnp.exp(decay[..., 0, :, None, None]), 0)
    added = key[..., 0, :, None, :, None] * grouped[..., 0, :, :, None, :]
    answer = functools.partial(_answer, query[..., 0, :, :], key[..., 0, :, :], grouped[..., 0, :, :, :])
    before, state = state.reshape(added.shape), state + added.reshape(state.shape)
    found = answer(before, state.reshape(added.shape))
    return found.reshape(*state.shape[:-2], state.shape[-1])[..., None, :, :], state


def _answer(query: Array, key: Array, value: Array, before: Array, state: Array) -> Array:
    """What a state answers. Accelerators sum it over the state before its token, and so read and write it at once."""
    by_product = lambda before, state: product("...gd,...grdv->...grv", query, state)

    def by_sum(before: Array, state: Array) -> Array:
        own = jnp.sum(query * key, axis=-1)[..., None, None] * value
        return jnp.sum(query[..., None, :, None] * before, axis=-2) + own

    return cpu_or(by_product, by_sum, before, state)
