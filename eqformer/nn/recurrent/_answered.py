"""Answers of the delta rule, chunk by chunk, whose states and gradients are written over what they are made of."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._chunks import product
from ._passed_on import read_first


Chunks = tuple[Array, ...]


def answered(
    start: Float[Array, "batch heads head_dim v_dim"],
    kept: Float[Array, "n batch heads *head_dim"],
    added: Float[Array, "n batch heads chunk v_dim"],
    corrected: Float[Array, "n batch heads chunk head_dim"],
    scores: Float[Array, "n batch heads chunk chunk"],
    asked: Float[Array, "n batch heads chunk head_dim"],
    stored: Float[Array, "n batch heads chunk head_dim"],
) -> tuple[Float[Array, "n batch heads chunk v_dim"], Float[Array, "batch heads head_dim v_dim"]]:
    """What queries are answered, and the last state, where `S_0` is `start` and, for each chunk `n`,

    `news_n = added_n - corrected_n S_n`, `answer_n = asked_n S_n + scores_n news_n` and
    `S_(n+1) = kept_n S_n + stored_n^T news_n`.

    For gradients all states are kept, and the answers are products of all chunks at once. News are in the place of
    `added`, and the gradients of both are written over what answers add to them; a `scan` would make zeros for each
    gradient. In reverse mode alone: there is no `jax.jvp`.
    """
    # The zero has the carry vary, under `shard_map`, over all mesh axes that the later states vary over.
    return _answered(start + jnp.zeros_like(added, shape=()), kept, added, corrected, scores, asked, stored)


@jax.custom_vjp
def _answered(
    start: Array, kept: Array, added: Array, corrected: Array, scores: Array, asked: Array, stored: Array
) -> tuple[Array, Array]:
    def one_chunk(state: Array, given: Chunks) -> tuple[Array, Array]:
        kept, added, corrected, scores, asked, stored = given
        news = added - product("bhid,bhdv->bhiv", corrected, state)
        answer = product("bhid,bhdv->bhiv", asked, state) + product("bhij,bhjv->bhiv", scores, news)
        return state * kept[..., None] + product("bhjd,bhjv->bhdv", stored, news), answer

    last, answers = jax.lax.scan(one_chunk, start, (kept, added, corrected, scores, asked, stored))
    return answers, last


def _forward(
    start: Array, kept: Array, added: Array, corrected: Array, scores: Array, asked: Array, stored: Array
) -> tuple[tuple[Array, Array], Chunks]:
    def one_chunk(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, states, news = carry
        state, own = read_first(state, news[number])
        own -= product("bhid,bhdv->bhiv", corrected[number], state)
        later = state * kept[number][..., None] + product("bhjd,bhjv->bhdv", stored[number], own)
        return later, states.at[number].set(state), news.at[number].set(own)

    # One number that waits for an array of the layer, as JAX would make the zeros before the loop over layers.
    zero, added = jax.lax.optimization_barrier((jnp.zeros_like(added, shape=()), added))
    states = jnp.broadcast_to(zero, (len(kept), *start.shape))
    last, states, news = jax.lax.fori_loop(0, len(kept), one_chunk, (start, states, added))
    answers = product("nbhid,nbhdv->nbhiv", asked, states) + product("nbhij,nbhjv->nbhiv", scores, news)
    return (answers, last), (kept, states, news, corrected, scores, asked, stored)


def _backward(saved: Chunks, gradients: tuple[Array, Array]) -> Chunks:
    kept, states, news, corrected, scores, asked, stored = saved
    to_answers, to_last = gradients

    def one_chunk(turn: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        later, to_kept, to_states, to_news = carry
        number = len(kept) - 1 - turn
        later, own, news = read_first(later, to_states[number], to_news[number])
        news += product("bhjd,bhdv->bhjv", stored[number], later)
        to_kept = to_kept.at[number].set(_of_kept(later * states[number], kept))
        earlier = later * kept[number][..., None] + own - product("bhid,bhiv->bhdv", corrected[number], news)
        return earlier, to_kept, to_states.at[number].set(later), to_news.at[number].set(news)

    to_news = product("nbhij,nbhiv->nbhjv", scores, to_answers)
    to_states = product("nbhid,nbhiv->nbhdv", asked, to_answers)
    carry = to_last, jnp.zeros_like(kept), to_states, to_news
    to_start, to_kept, laters, to_news = jax.lax.fori_loop(0, len(kept), one_chunk, carry)
    to_corrected = -product("nbhiv,nbhdv->nbhid", to_news, states)
    to_scores = product("nbhiv,nbhjv->nbhij", to_answers, news)
    to_asked = product("nbhiv,nbhdv->nbhid", to_answers, states)
    to_stored = product("nbhjv,nbhdv->nbhjd", news, laters)
    return to_start, to_kept, to_news, to_corrected, to_scores, to_asked, to_stored


_answered.defvjp(_forward, _backward)


def _of_kept(x: Array, kept: Array) -> Array:
    """Summed over values and, where a head keeps as much of each channel, over channels."""
    return jnp.sum(x, axis=(-2, -1), keepdims=True)[..., 0] if kept.shape[-1] == 1 else jnp.sum(x, axis=-1)
