"""The state-space recurrence of Mamba-2: a matrix a head that fades, takes up a value by its key, answers queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._chunks import cut, fading, product
from ._passed_on import passed_on
from ._states import States
from ._step_order import Order


def state_space(
    query: Float[Array, "*batch seq kv_heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq heads v_dim"],
    decay: Float[Array, "*batch seq heads"],
    documents: Int[Array, "*batch seq"],
    states: States,
    *,
    chunk: int,
) -> tuple[Float[Array, "*batch seq heads v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
    """Each token's answer `S_t^T q_t`, and the memory of the last states `S_t = e^decay_t S_(t-1) + k_t v_t^T`.

    By the duality of Dao and Gu (2024, arXiv:2405.21060, section 6) whole rows are computed by chunks: within one, as
    an attention whose scores fade; from one to the next by the state. All is products of matrices but the sum over
    chunks, and time and memory grow with `seq * chunk`. Each key and query serves `heads / kv_heads` neighbouring
    heads. Each further document begins with zeros; a token of value and decay 0 changes nothing. One token is one step.
    All arrays are of one dtype.
    """
    batch, seq, groups = key.shape[:-3], key.shape[-3], key.shape[-2]
    heads, v_dim = value.shape[-2:]
    grouped = value.reshape(*value.shape[:-2], groups, heads // groups, v_dim)
    if seq == 1:
        of_groups = decay.reshape(*grouped.shape[:-1], 1)
        now = (jnp.squeeze(x, -4) for x in (query[..., None, :], key[..., None, :], grouped, of_groups))
        answer, memory = states.stepped(_step, *now)
        return answer.reshape(value.shape), memory
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
    added = product("nbgjd,nbgjrv->nbgrvd", key, grouped * ending.mT[..., None])
    state = states.first(value.dtype)
    start = by_group(state.mT.reshape(1, -1, *state.mT.shape[len(batch) :]))[0]
    before, last = passed_on(start, kept, added)
    output += product("nbgid,nbgrvd->nbgirv", query, before) * passing.mT[..., None]
    output = jnp.moveaxis(output, (0, 2), (1, 3)).reshape(*batch, -1, heads, v_dim)
    memory = states.replaced(last.reshape(state.mT.shape).mT)
    return jax.lax.slice_in_dim(output, 0, seq, axis=len(batch)), memory


def _step(order: Order, query: Array, key: Array, value: Array, decay: Array, state: Array) -> tuple[Array, Array]:
    """Queries and keys of groups, values and decays of their heads. Sums are over the state before the token.

    So accelerators read it and write the next at once.
    """
    before = state * jnp.exp(decay)[..., None]
    after = before + order.of_keys(key) * order.of_values(value)
    if order.by_products:
        return order.read(query, after), after
    return order.read(query, before) + jnp.sum(query * key, axis=-1, keepdims=True) * value, after
