"""Shared parts of recurrences: the array that stores states, chunks of rows, and decay factors within a chunk."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...kernels import initial_state, RECURRENT_STEP, RecurrentStepCall, Step
from .._cache import index_layer, update_layer


class States(eqx.Module):
    """The states of a recurrence, a matrix for each head of each row, in the array that stores them."""

    memory: Float[Array, "*layers_batch heads head_dim v_dim"]
    """The states. If `layer` is given, a dim of layers comes first."""
    begins: Bool[Array, "*batch"]
    """Whether a row's first token begins a document, so that the row's initial state is zero."""
    layer: Int[Array, ""] | None = None
    """The layer of the stack whose states are read and written; None: the memory has no dim of layers."""
    follows_cache: Bool[Array, "*batch"] | None = None
    """Whether a row's first token follows the tokens that its state has read; the initial state of other rows is NaN.
    None: this holds for all rows."""

    @property
    def initial_code(self) -> Int[Array, "*batch"]:
        """A code for the initial state of each row: the stored state (0), zeros (1) or NaN (2)."""
        stored_or_nan = 0 if self.follows_cache is None else jnp.where(self.follows_cache, 0, 2)
        return jnp.where(self.begins, 1, stored_or_nan).astype(jnp.int32)

    def initial(self, dtype: jax.typing.DTypeLike) -> Float[Array, "*batch heads head_dim v_dim"]:
        """Return the initial states, for update rules that mask the state themselves where a document starts.

        With `follows_cache`, rows that begin a document have zeros, and rows that do not follow their cache have NaN.
        Without `follows_cache`, all rows have the stored states.
        """
        state = index_layer(self.memory, self.layer).astype(dtype)
        return state if self.follows_cache is None else initial_state(self.initial_code[..., None, None, None], state)

    def update(
        self, state: Float[Array, "*batch heads head_dim v_dim"]
    ) -> Float[Array, "*layers_batch heads head_dim v_dim"]:
        """Return the memory with new states of the layer."""
        return update_layer(self.memory, state.astype(self.memory.dtype), self.layer)

    def step_token(
        self, step: Step, *inputs: Float[Array, "*batch kv_heads _ _"]
    ) -> tuple[Float[Array, "*batch kv_heads copies v_dim"], Float[Array, "*layers_batch heads head_dim v_dim"]]:
        """Return the outputs of one token of each row, and the memory after it.

        `step(layout, *inputs, state)` returns the outputs and new states. States have a dim of groups and a dim of the
        heads of a group. Each input has a row of channels for each head of a group, or one row for the whole group.
        """
        return RECURRENT_STEP(RecurrentStepCall(inputs, self.memory, self.initial_code, self.layer, step))


def split_chunks(x: Array, size: int, mode: str = "constant") -> Array:
    """Split dim 1 (`seq`) into chunks of `size` tokens, with a first dim of chunks; pad the last chunk by `mode`."""
    padded = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return jnp.moveaxis(padded.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def join_chunks(
    x: Float[Array, "n rows heads chunk v_dim"], batch: Sequence[int], seq: int
) -> Float[Array, "*batch seq heads v_dim"]:
    """Join chunks to whole rows, and drop the padding after `seq` tokens."""
    rows = jnp.moveaxis(jnp.swapaxes(x, 2, 3), 0, 1).reshape(*batch, -1, x.shape[2], x.shape[-1])
    return jax.lax.slice_in_dim(rows, 0, seq, axis=len(batch))


def decay_factors(
    log_decay: Float[Array, "n batch heads chunk"], documents: Int[Array, "n batch chunk"]
) -> tuple[
    Float[Array, "n batch heads chunk chunk"],
    Float[Array, "n batch heads chunk"],
    Float[Array, "n batch heads chunk"],
    Float[Array, "n batch heads"],
]:
    """Return the decay factors of a chunk.

    In order: token to later token, initial state to token, token to chunk end, initial state to chunk end. A factor
    across a document boundary is zero.
    """
    total = jnp.cumsum(log_decay, axis=-1)
    visible, continues = same_document(documents)
    # Mask before the exponential: exp of a masked difference may overflow, and its gradient would be NaN.
    token_to_token = jnp.exp(mask_in_layer(visible, total[..., :, None] - total[..., None, :], total, -jnp.inf))
    state_to_token = mask_in_layer(continues, jnp.exp(total), total)
    return token_to_token, state_to_token, token_to_token[..., -1, :], state_to_token[..., -1]


def same_document(
    documents: Int[Array, "n batch chunk"],
) -> tuple[Bool[Array, "n batch 1 chunk chunk"], Bool[Array, "n batch 1 chunk"]]:
    """Return two masks: the earlier tokens in each token's document, and tokens whose document began before the chunk.

    The last token of the previous chunk tells whether a document began before the chunk; document 0 began before the
    row.
    """
    earlier = jnp.tril(jnp.ones((documents.shape[-1],) * 2, bool))
    visible = (earlier & (documents[..., :, None] == documents[..., None, :]))[:, :, None]
    last_before = jnp.concatenate([jnp.zeros_like(documents[:1, :, -1]), documents[:-1, :, -1]])
    return visible, (documents == last_before[..., None])[:, :, None]


def einsum(pattern: str, left: Array, right: Array) -> Array:
    """Contract two arrays, accumulating in the dtype of `left`."""
    return jnp.einsum(pattern, left, right, preferred_element_type=left.dtype)


def mask_in_layer(
    mask: Bool[Array, "..."], x: Float[Array, "..."], layer_array: Float[Array, "..."], fill: float = 0
) -> Float[Array, "..."]:
    """Return `x` where the mask holds and `fill` elsewhere; the mask may broadcast to the shape of `x`.

    JAX hoists loop-invariant values out of a scan over layers: it would broadcast the mask and `fill` to the shape of
    `x` once, and pass both to every iteration. A barrier ties them to `layer_array`, any small array that differs from
    layer to layer, and the backward pass keeps the mask in its own shape. Only reverse mode is defined (no `jax.jvp`).
    """
    barrier = jax.lax.optimization_barrier
    mask, filler, _ = barrier((mask, jnp.asarray(fill, x.dtype), jax.lax.stop_gradient(layer_array)))
    return _where(mask, x, filler)


@jax.custom_vjp
def _where(mask: Array, x: Array, fill: Array) -> Array:
    return jnp.where(mask, x, fill)


def _where_forward(mask: Array, x: Array, fill: Array) -> tuple[Array, Array]:
    return _where(mask, x, fill), mask


def _where_backward(mask: Array, gradient: Array) -> tuple[None, Array, None]:
    return None, jnp.where(mask, gradient, 0), None


_where.defvjp(_where_forward, _where_backward)


def read_before_write(state: Array, *overwritten: Array) -> list[Array]:
    """Return the arrays unchanged, but make the compiler read `overwritten` before the loop writes to their buffers."""
    return list(jax.lax.optimization_barrier((state, *overwritten)))
