"""States that chunks of tokens pass on, each written in the place of what its chunk adds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def passed_on(
    start: Float[Array, "batch groups copies v_dim head_dim"],
    kept: Float[Array, "n batch groups copies"],
    added: Float[Array, "n batch groups copies v_dim head_dim"],
) -> tuple[Array, Array]:
    """The state before each chunk, and the last, of `S_(n+1) = kept_n S_n + added_n`, where `S_0` is `start`.

    Compilers write the states in the place of `added` and, in the backward pass, the gradients of `added` in that of
    the states' own; a `scan` would make zeros for each of them. In reverse mode alone: there is no `jax.jvp`.
    """
    # The zero has all vary, under `shard_map`, over all mesh axes that the later states vary over.
    zero = jnp.zeros_like(added, shape=())
    return _passed_on(start + zero, kept + zero, added)


@jax.custom_vjp
def _passed_on(start: Array, kept: Array, added: Array) -> tuple[Array, Array]:
    def one_chunk(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, states = carry
        state, added = read_first(state, states[number])
        return state * _of_heads(kept[number]) + added, states.at[number].set(state)

    last, before = jax.lax.fori_loop(0, len(added), one_chunk, (start, added))
    return before, last


def _forward(start: Array, kept: Array, added: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    before, last = _passed_on(start, kept, added)
    return (before, last), (kept, before)


def _backward(saved: tuple[Array, Array], gradients: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    kept, before = saved

    def one_chunk(turn: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        later, to_kept, to_states = carry
        number = len(kept) - 1 - turn
        later, own = read_first(later, to_states[number])
        to_kept = to_kept.at[number].set(jnp.sum(later * before[number], axis=(3, 4)))
        return later * _of_heads(kept[number]) + own, to_kept, to_states.at[number].set(later)

    to_before, to_last = gradients
    return jax.lax.fori_loop(0, len(kept), one_chunk, (to_last, jnp.zeros_like(kept), to_before))


_passed_on.defvjp(_forward, _backward)


def read_first(state: Array, *there: Array) -> list[Array]:
    """All, where what is `there` is read from the places into which what comes of it will be written."""
    return list(jax.lax.optimization_barrier((state, *there)))


def _of_heads(kept: Array) -> Array:
    return kept[..., None, None]
