"""Cross-entropy over chunks of tokens: the logits of all tokens never exist at once, forward or backward.

The table of an unembedding may be stored in float32, or have its gradient in float32, and be multiplied in bfloat16.
Such a table is cast once, before the loop over chunks. Inside the loop, XLA for GPUs would cast the whole table again
in each iteration.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import equinox as eqx
import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ... import nn
from ..._annotation_checks import checked
from ...nn import in_float32
from ...parallel import vary, varying_axes
from ...program import inner_jaxprs
from ._vocabulary import token_nats


Unembed = Callable[..., Array]  # hidden states of tokens -> logits
TokenNats = Callable[[Array, Array], tuple[Array, Array]]  # (logits, targets) -> (nats, log-normalizers)


# Chunks of tokens.


def chunk_size(vocab: int) -> int:
    """Return the default number of tokens whose logits exist at once: 1024, and more for a `vocab` below 4096.

    With fewer than a thousand tokens, adding each chunk's gradient of the table costs more than the matrix products.
    """
    return max(1024, 2**22 // vocab)


def split_into_chunks(num_tokens: int, vocab: int, chunk: int | None) -> tuple[int, int]:
    """Return the number of chunks and the tokens of a chunk; the last chunk may have fewer tokens."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"cross_entropy(chunk={chunk}): a chunk holds at least one token; pass None for the default.")
    num_chunks = -(-num_tokens // (chunk_size(vocab) if chunk is None else chunk))
    return num_chunks, -(-num_tokens // num_chunks)


def sum_over_chunks(
    chunk_fn: Callable[..., tuple[PyTree, PyTree]], token_arrays: tuple, sizes: tuple[int, int], tables: PyTree = ()
) -> tuple:
    """Sum the first result of `chunk_fn` over chunks, and concatenate the second, which has one entry per token.

    `token_arrays` holds arrays of all tokens: hidden states, targets and perhaps more. Zeros pad the last chunk.
    `sizes` is the result of `split_into_chunks`. `tables` are the cast tables that `chunk_fn` reads. The buffers of the
    sums are made dependent on `tables`, so that they are allocated only after the tables are cast.
    """
    (num_chunks, size), num_tokens = sizes, token_arrays[0].shape[0]
    if num_chunks == 1:
        return chunk_fn(token_arrays)
    padding = num_chunks * size - num_tokens

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x
        return padded.reshape(num_chunks, size, *x.shape[1:])

    chunks = jax.tree.map(split, token_arrays)
    shapes, _ = jax.eval_shape(chunk_fn, jax.tree.map(operator.itemgetter(0), chunks))
    zeros = jax.tree.map(functools.partial(_zeros_after, (token_arrays[0], *jax.tree.leaves(tables))), shapes)

    def body(sums: PyTree, chunk: tuple) -> tuple[PyTree, PyTree]:
        summands, per_token = chunk_fn(chunk)
        return jax.tree.map(jnp.add, sums, summands), per_token

    sums, per_token = jax.lax.scan(body, zeros, chunks)
    return sums, jax.tree.map(lambda x: x.reshape(num_chunks * size, *x.shape[2:])[:num_tokens], per_token)


def _zeros_after(arrays: Sequence[Array], like: jax.ShapeDtypeStruct) -> Array:
    """Return zeros that depend on `arrays`, so that they are not allocated before the arrays exist.

    Compilers for GPUs would allocate constant zeros, which are as large as a table, before the first layer.
    """
    axes = varying_axes(like)
    arrays = [x for x in arrays if varying_axes(x) <= axes]
    zero = sum((0 * jnp.abs(x.reshape(-1)[0].astype(like.dtype)) for x in arrays), jnp.zeros((), like.dtype))
    return vary(jnp.full(like.shape, zero), axes)


# Chunks of the vocabulary.

MAX_LOGITS = 2**25
"""The largest number of logits that exist at once: tokens of a token chunk times ids of a vocabulary chunk."""


def has_chunked_vocabulary(unembed: PyTree) -> bool:
    """Return whether the module of a bound method `unembed` computes logits by chunks of the vocabulary."""
    return bool(nn.modules(unembed, nn.ChunkedUnembedding))


def vocabulary_chunk_nats(
    unembed: Unembed,
    hidden: Float[Array, "tokens embed"],
    targets: Int[Array, "tokens"],
    chunk: int | None = None,
) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
    """Compute `token_nats` from the logits of one vocabulary chunk after another.

    No device needs the whole table. The backward pass recomputes a chunk's logits. The gradients of `hidden` are summed
    over vocabulary chunks, and the gradients of a chunk's table over tokens, in float32 at least. `unembed` must read
    only the arrays of its `nn.ChunkedUnembedding`.
    """
    (table,) = nn.modules(unembed, nn.ChunkedUnembedding)
    trained, static = table.parts()

    def chunk_log_sums(static: PyTree, trained: PyTree, hidden: Array) -> tuple[Array, Array]:
        """Return each token's log-normalizer over a vocabulary chunk, and its target's logit (-inf if not in it)."""
        module, ids = table.of_part(trained, static)
        axes = varying_axes(hidden) | frozenset().union(*map(varying_axes, jax.tree.leaves(trained)))
        module = vary(module, axes)
        chunk_unembed = nn.map_modules(lambda _: module, unembed, nn.ChunkedUnembedding)

        @jax.checkpoint
        def token_chunk(arrays: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            logits = nn.in_float32(chunk_unembed(vary(arrays[0], axes)))
            logits = jnp.where(ids >= 0, logits, -jnp.inf)
            peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            log_normalizer = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1)) + peak[:, 0]
            is_target = (ids == arrays[1][:, None]) & (ids >= 0)
            target_logit = jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=-1)
            return (), (log_normalizer, jnp.where(jnp.any(is_target, axis=-1), target_logit, -jnp.inf))

        size = max(MAX_LOGITS // len(ids), 1) if chunk is None else chunk
        sizes = split_into_chunks(len(targets), len(ids), size)
        return sum_over_chunks(token_chunk, (hidden, targets), sizes)[1]

    def all_nats(trained: PyTree, hidden: Array) -> tuple[Array, Array]:
        return forward(trained, hidden)[0]

    def forward(trained: PyTree, hidden: Array) -> tuple[tuple[Array, Array], tuple]:
        log_normalizers, target_logits = jax.lax.map(
            lambda part: chunk_log_sums(part[0], part[1], hidden), (static, trained)
        )
        log_normalizer = jax.nn.logsumexp(log_normalizers, axis=0)
        # A target's logit is -inf in all chunks except its own chunk. A target that is no id has no chunk.
        target_logit = jnp.max(target_logits, axis=0)
        nats = jnp.where(target_logit > -jnp.inf, log_normalizer - target_logit, jnp.nan)
        return (nats, log_normalizer), (trained, hidden, log_normalizers - log_normalizer)

    def backward(residuals: tuple, cotangents: tuple[Array, Array]) -> tuple[PyTree, Array]:
        trained, hidden, log_shares = residuals
        nats_grad, log_normalizer_grad = cotangents

        def add(hidden_grad: Array, part: tuple) -> tuple[Array, PyTree]:
            trained, static, log_share = part
            _, pull_back = jax.vjp(functools.partial(chunk_log_sums, static), trained, hidden)
            trained_grad, chunk_grad = pull_back(((nats_grad + log_normalizer_grad) * jnp.exp(log_share), -nats_grad))
            return hidden_grad + nn.in_float32(chunk_grad), trained_grad

        zeros = vary(jnp.zeros(hidden.shape, nn.at_least_float32(hidden.dtype)), varying_axes(hidden))
        hidden_grad, trained_grads = jax.lax.scan(add, zeros, (trained, static, log_shares))
        return trained_grads, hidden_grad.astype(hidden.dtype)

    differentiable = jax.custom_vjp(all_nats)
    differentiable.defvjp(forward, backward)
    return differentiable(trained, hidden)


# Cross-entropy.


def apply_weights(values: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `values * weights`, and 0 where the weight is 0, even if the value is NaN or infinite."""
    return jnp.where(weights != 0, values, jnp.zeros_like(values)) * weights.astype(values.dtype)


@checked
def cross_entropy(
    unembed: Unembed,
    hidden: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    nats: TokenNats = token_nats,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return `sum_i w_i (-log p_i[target_i] + z_loss log^2 Z_i)` in nats, and `sum_i w_i`; their quotient is the mean.

    Under differentiation, the forward pass over a chunk also computes that chunk's gradients. The residuals are
    therefore the gradients of `hidden` and of the arrays that `unembed` reads. No logits are stored, and there are
    three matrix products with the table; recomputing logits in the backward pass would take four. Sums and accumulated
    gradients are at least float32. If no device holds the whole table (`nn.ChunkedUnembedding`), logits are computed
    for one vocabulary chunk after another, with four products.

    Args:
        unembed: Maps `tokens embed` to `tokens vocab`: a bound method of a module, or a function. All arrays that it
            reads (a tied or untied table, a bias, a scale) get gradients, also those that a function closes over.
        hidden: The model's outputs before the logits.
        targets: The id that each token's output predicts.
        weights: The weight of each token; weights get no gradient.
        chunk: The number of tokens whose logits exist at once; None: see `chunk_size`.
        z_loss: The factor of `log^2 Z` (arXiv 2204.02311).
        nats: Computes nats and log-normalizers from logits and targets; the default suits logits of all ids.
    """
    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), jax.lax.stop_gradient(weights.reshape(-1)))
    chunk = _float16_chunk(hidden) if chunk is None else chunk
    if nats is token_nats and has_chunked_vocabulary(unembed):
        losses, log_normalizer = vocabulary_chunk_nats(unembed, *flat[:2], chunk)
        losses = losses + z_loss * jnp.square(log_normalizer) if z_loss else losses
        return jnp.sum(apply_weights(losses, flat[2])), jnp.sum(flat[2].astype(losses.dtype))

    def chunk_loss(logits: Array, arrays: tuple, _: PyTree) -> tuple[Array, tuple[()]]:
        losses, log_normalizer = nats(logits, arrays[0])
        if z_loss:
            losses = losses + z_loss * jnp.square(log_normalizer)
        return jnp.sum(apply_weights(losses, arrays[1])), ()

    total, _ = sum_token_losses(unembed, flat, chunk_loss, chunk=chunk)
    return total, jnp.sum(flat[2].astype(total.dtype))


def _float16_chunk(hidden: Array) -> int | None:
    """Return 1024 for float16, so that a chunk's gradient of the table does not overflow; else None, the default."""
    return 1024 if hidden.dtype == jnp.float16 else None


ChunkLoss = Callable[[Array, tuple, PyTree], tuple[Array, PyTree]]
"""(logits, a chunk of all token arrays but the hidden states, constants) -> (sum of the losses, other sums)"""


def sum_token_losses(
    unembed: Unembed, token_arrays: tuple, chunk_loss: ChunkLoss, *, chunk: int | None, constants: PyTree = ()
) -> tuple[Float[Array, ""], PyTree]:
    """Return the results of `chunk_loss`, summed over chunks of tokens; only the first result is differentiable.

    Gradients go to the hidden states, which are the first of `token_arrays`, and to the arrays that `unembed` reads.
    The forward pass computes these gradients, as `cross_entropy` describes, and stores no logits. `constants` holds the
    other arrays that `chunk_loss` reads; they get no gradients.
    """
    hidden = token_arrays[0]
    chunk = _float16_chunk(hidden) if chunk is None else chunk
    sizes = split_tokens(unembed, hidden, chunk)
    unembed, tables = _extract_tables(unembed, hidden[: sizes[1]])

    def one_chunk(
        casts: list[Array | None], constants: PyTree, arrays: tuple, tables: list[ReadTable], hidden: Array
    ) -> tuple[Array, PyTree]:
        logits = in_float32(unembed(hidden, *_with_casts(casts, tables)))
        return chunk_loss(logits, arrays, constants)

    def total_loss(tables: list[ReadTable], token_arrays: tuple, constants: PyTree) -> tuple[Array, PyTree]:
        casts = [table.cast() for table in tables]
        run = lambda arrays: (one_chunk(casts, constants, arrays[1:], tables, arrays[0]), None)
        return sum_over_chunks(run, token_arrays, sizes)[0]

    def forward(
        tables: list[ReadTable], token_arrays: tuple, constants: PyTree
    ) -> tuple[tuple[Array, PyTree], tuple[list[ReadTable], Array]]:
        casts = [table.cast() for table in tables]

        def with_gradients(arrays: tuple) -> tuple[tuple[tuple[Array, PyTree], list[ReadTable]], Array]:
            loss = functools.partial(one_chunk, casts, constants, arrays[1:])
            total, pull_back, sums = jax.vjp(loss, tables, arrays[0], has_aux=True)
            table_grads, hidden_grad = pull_back(vary(jnp.ones_like(total), varying_axes(total)))
            return ((total, sums), in_float32(table_grads)), hidden_grad

        (sums, table_grads), hidden_grad = sum_over_chunks(with_gradients, token_arrays, sizes, casts)
        return sums, (table_grads, hidden_grad)

    def backward(
        residuals: tuple[list[ReadTable], Array], cotangents: tuple[Array, PyTree]
    ) -> tuple[list[ReadTable], tuple, None]:
        table_grads, hidden_grad = residuals

        def scale(grad: Array, like: Array) -> Array:
            return (grad * cotangents[0].astype(grad.dtype)).astype(like.dtype)

        hidden_grads = scale(in_float32(hidden_grad), hidden_grad), *[None] * (len(token_arrays) - 1)
        return jax.tree.map(scale, table_grads, tables), hidden_grads, None

    differentiable = jax.custom_vjp(total_loss)
    differentiable.defvjp(forward, backward)
    return differentiable(tables, token_arrays, constants)


def frozen_unembed(unembed: Unembed, chunk: Array) -> tuple[Unembed, PyTree]:
    """Return `unembed` as a function of hidden states (shaped like `chunk`) and constants, and these constants."""
    unembed, tables = _extract_tables(unembed, chunk)
    constants = [table.cast() for table in tables], tables

    def logits(hidden: Array, constants: PyTree) -> Array:
        return in_float32(unembed(hidden, *_with_casts(*constants)))

    return logits, jax.lax.stop_gradient(constants)


def chunked_token_nats(
    unembed: Unembed,
    hidden: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    *,
    chunk: int | None = None,
    nats: TokenNats = token_nats,
) -> Float[Array, "*batch seq"]:
    """Return each token's `-log p[target]`, from logits of `chunk` tokens at a time; not meant for differentiation."""
    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    read = lambda logits, arrays: ((), nats(logits, arrays[0])[0])
    return read_over_chunks(unembed, flat, read, chunk)[1].reshape(targets.shape)


ReadLogits = Callable[[Array, tuple], tuple[PyTree, PyTree]]
"""(logits, a chunk of all token arrays but the hidden states) -> (sums over tokens, results of each token)"""


def read_over_chunks(
    unembed: Unembed, token_arrays: tuple, read: ReadLogits, chunk: int | None
) -> tuple[PyTree, PyTree]:
    """Apply `read` to the logits of each chunk; return its sums, added over chunks, and its results of each token.

    The hidden states are the first of `token_arrays`. For differentiation, use `sum_token_losses`.
    """
    sizes = split_tokens(unembed, token_arrays[0], chunk)
    unembed = cast_tables_once(unembed, token_arrays[0][: sizes[1]])
    return sum_over_chunks(lambda arrays: read(in_float32(unembed(arrays[0])), arrays[1:]), token_arrays, sizes)


def split_tokens(unembed: Unembed, hidden: Float[Array, "tokens embed"], chunk: int | None) -> tuple[int, int]:
    """Return `split_into_chunks` for these tokens and the size of `unembed`'s vocabulary."""
    vocab = jax.eval_shape(unembed, jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)).shape[-1]
    return split_into_chunks(len(hidden), vocab, chunk)


# Tables are cast once, before the loop over chunks.


class ReadTable(eqx.Module):
    """An array that `unembed` reads; `read_dtype` is the narrower dtype to which every read casts it, or None."""

    array: Shaped[Array, "..."]
    read_dtype: np.dtype | None = eqx.field(static=True)

    def cast(self) -> Shaped[Array, "..."] | None:
        """Return the array in `read_dtype`."""
        return None if self.read_dtype is None else self.array.astype(self.read_dtype)


def cast_tables_once(unembed: Unembed, chunk: Array) -> Unembed:
    """Return a function like `unembed` that holds its tables in the narrower dtype to which `unembed(chunk)` casts
    them.

    A table is cast now if every read of the table in `unembed(chunk)` casts the table to the same narrower dtype.
    """
    if has_chunked_vocabulary(unembed):  # No device holds the whole table, so the table cannot be cast at once.
        return unembed
    unembed_tables, tables = _extract_tables(unembed, chunk)
    casts = [table.cast() for table in tables]

    def unembed_casts(hidden: Array) -> Array:
        return unembed_tables(hidden, *_with_casts(casts, tables))

    return unembed_casts


def _extract_tables(unembed: Unembed, chunk: Array) -> tuple[Unembed, list[ReadTable]]:
    """Return `unembed` as a function of a chunk and of all arrays that it reads, and these arrays."""
    leaves, static = eqx.partition(unembed, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(leaves)
    chunk = jax.lax.stop_gradient(chunk)

    def call(leaves: list[Array], chunk: Array) -> Array:
        return eqx.combine(jax.tree.unflatten(structure, leaves), static)(chunk)

    # A bound method holds the whole model; only the arrays that the method reads get gradients here.
    program = jax.make_jaxpr(call)(leaves, chunk)
    read_ids = {id(variable) for equation in program.eqns for variable in equation.invars}
    variables = program.jaxpr.invars[: len(leaves)]
    read_indices = [index for index, variable in enumerate(variables) if id(variable) in read_ids]
    dtypes = find_narrower_dtypes(program.jaxpr, [variables[index] for index in read_indices])
    # Inside `shard_map` a replicated table is multiplied with hidden states that vary over devices. The table is marked
    # as varying here, outside of the custom rule, so that its gradient is reduced once, after all chunks.
    arrays = [vary(leaves[index], varying_axes(chunk)) for index in read_indices]

    def call_with_tables(chunk: Array, *tables: Array) -> Array:
        with_tables = list(leaves)
        for index, table in zip(read_indices, tables, strict=True):
            with_tables[index] = table
        return call(with_tables, chunk)

    converted, closed_over = jax.closure_convert(call_with_tables, chunk, *arrays)
    if any(varying_axes(array) != varying_axes(chunk) for array in closed_over):
        raise ValueError(
            "cross_entropy(unembed): inside shard_map, arrays that a plain function closes over must vary over the "
            f"same axes as hidden, {sorted(varying_axes(chunk))}; pass a bound method of a module or a "
            "jax.tree_util.Partial."
        )
    tables = [ReadTable(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    return converted, tables + [ReadTable(array, None) for array in closed_over]


def find_narrower_dtypes(program: core.Jaxpr, tables: Sequence[core.Var]) -> list[np.dtype | None]:
    """Return, for each of these variables of a jaxpr, the dtype to which every read of the variable casts it.

    Return None for a variable if reads use different dtypes, or if the dtype is no floating-point dtype of fewer bits.
    """
    return [_narrower_dtype(_collect_read_dtypes(program, table), _dtype_of(table)) for table in tables]


def _with_casts(casts: Sequence[Array | None], tables: Sequence[ReadTable]) -> list[Array]:
    """Return each table rounded to its cast, but in the table's own dtype, so that gradients have this dtype too."""
    return [
        table.array if cast_array is None else _replace_value(cast_array, table.array)
        for cast_array, table in zip(casts, tables, strict=True)
    ]


@jax.custom_vjp
def _replace_value(value: Shaped[Array, "..."], table: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `value` in the table's dtype; the gradient goes to the table.

    `unembed` casts the result back to the dtype of `value`, so the two casts cancel each other exactly.
    """
    return value.astype(table.dtype)


def _replace_value_forward(value: Array, table: Array) -> tuple[Array, None]:
    return value.astype(table.dtype), None


def _replace_value_backward(_: None, gradient: Array) -> tuple[None, Array]:
    return None, gradient


_replace_value.defvjp(_replace_value_forward, _replace_value_backward)


def _collect_read_dtypes(program: core.Jaxpr, variable: core.Var) -> set[np.dtype]:
    """Return the dtypes to which a jaxpr casts a variable; a read without a cast adds the variable's own dtype."""
    dtypes = {_dtype_of(variable) for atom in program.outvars if atom is variable}
    for equation in program.eqns:
        for position, atom in enumerate(equation.invars):
            if atom is not variable:
                continue
            inner = inner_jaxprs(equation)
            if equation.primitive.name == "convert_element_type":
                dtypes.add(np.dtype(equation.params["new_dtype"]))
            elif len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
                dtypes |= _collect_read_dtypes(inner[0], inner[0].invars[position])
            else:
                dtypes.add(_dtype_of(variable))
    return dtypes


def _dtype_of(variable: core.Var) -> np.dtype:
    """Return the dtype of the arrays that a variable of a jaxpr stands for."""
    return cast(ShapedArray, variable.aval).dtype


def _narrower_dtype(dtypes: set[np.dtype], table_dtype: np.dtype) -> np.dtype | None:
    """Return the only dtype of a set if it is a floating-point dtype with fewer bits than the table's; else None."""
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(table_dtype).bits
    return dtype if is_narrower else None
