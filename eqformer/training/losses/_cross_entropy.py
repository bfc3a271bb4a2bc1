"""Cross-entropy over chunks of tokens: the logits of all tokens never exist at once, in either pass."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ..._array_checks import checked
from ...nn import in_float32
from ...parallel import vary, varying_axes
from ._chunked_logits import chunks_of, in_parts, nats_in_parts, sum_over_chunks


TokenNats = Callable[..., Any]


@runtime_checkable
class Vocabulary(Protocol):
    """How a loss reads logits of which a device holds only a part, as when a mesh splits the vocabulary."""

    def nats(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """For each token the nats of its target, and the log-normaliser, as `token_nats` gives them."""
        ...

    def is_first(self, logits: Array, targets: Array) -> Array:
        """For each token, whether its target has the largest logit."""
        ...


@checked
def token_nats(
    logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
    """For each token `logsumexp(logits) - logits[target]` in nats, and the logsumexp itself.

    A target that is no id has NaN, as an id that is none has in an embedding; where its weight is 0 it counts nothing.
    It takes rows of logits over the whole vocabulary; a loss over a split vocabulary replaces this function.
    """
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_normaliser = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1)) + peak[:, 0]
    # A comparison instead of a gather: its gradient fuses with the softmax's, where a gather's would be a scatter.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]
    of_target = jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=-1)
    is_id = (targets >= 0) & (targets < logits.shape[1])
    return jnp.where(is_id, log_normaliser - of_target, jnp.nan), log_normaliser


def weighed(each: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """What each token counts, nothing where its weight is 0, whatever stands there."""
    return jnp.where(weights != 0, each, jnp.zeros_like(each)) * weights.astype(each.dtype)


@checked
def cross_entropy(
    unembed: Callable[..., Any],
    hidden: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    nats: TokenNats = token_nats,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`sum_i w_i (-log p_i[target_i] + z_loss log^2 Z_i)` in nats and `sum_i w_i`, the two halves of a mean.

    Under differentiation, the forward pass over a chunk also computes that chunk's gradients, so the residuals of the
    backward pass are the gradients of `hidden` and of the arrays that `unembed` uses: no logits are kept, and there are
    three products with the table, where recomputing chunks in the backward pass takes four. Sums and accumulated
    gradients are float32 at least. A module whose table is nowhere whole (`nn.ChunkedUnembedding`) gives logits in
    parts, by four.

    Args:
        unembed: Maps `tokens embed` to `tokens vocab`; the arrays that it uses (a tied or untied table, a bias, a
            scale) receive gradients, whether it is a bound method of a module or closes over them.
        hidden: The model's outputs before the logits.
        targets: The ids that they predict.
        weights: How much each counts; they get no gradient.
        chunk: The tokens whose logits are there at once; None: see `chunk_size`.
        z_loss: The factor of `log^2 Z` (arXiv 2204.02311).
        nats: What gives the nats of logits; a mesh that splits the vocabulary has its own.
    """
    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), jax.lax.stop_gradient(weights.reshape(-1)))
    if chunk is None and hidden.dtype == jnp.float16:
        chunk = 1024  # so that a chunk's gradient of the table, computed before any scaling, fits in float16
    if nats is token_nats and in_parts(unembed):
        each, log_normaliser = nats_in_parts(unembed, *flat[:2], chunk)
        each = each + z_loss * jnp.square(log_normaliser) if z_loss else each
        return jnp.sum(weighed(each, flat[2])), jnp.sum(flat[2].astype(each.dtype))
    sizes = count_chunks(unembed, flat[0], chunk)
    unembed, tables, dtypes = _with_tables(unembed, flat[0][: sizes[1]])

    def of_chunk(tables: list, hidden: Array, targets: Array, weights: Array) -> Array:
        logits = in_float32(unembed(hidden, *tables))
        each, log_normaliser = nats(logits, targets)
        if z_loss:
            each = each + z_loss * jnp.square(log_normaliser)
        return jnp.sum(weighed(each, weights))

    def of_all(tables, flat):
        values = cast(tables, dtypes)
        return sum_over_chunks(lambda piece: (of_chunk(read_from(values, tables), *piece), None), flat, sizes)[0]

    def forward(tables, flat):
        values = cast(tables, dtypes)

        def with_gradients(piece):
            of_piece = lambda tables, hidden: of_chunk(read_from(values, tables), hidden, *piece[1:])
            total, pull = jax.vjp(of_piece, tables, piece[0])
            of_tables, of_hidden = pull(vary(jnp.ones_like(total), varying_axes(total)))
            return (total, [in_float32(x) for x in of_tables]), of_hidden

        (total, of_tables), of_hidden = sum_over_chunks(with_gradients, flat, sizes, values)
        return total, (of_tables, of_hidden)

    def backward(gradients, scale):
        of_tables, of_hidden = gradients
        of_tables = [(x * scale.astype(x.dtype)).astype(table.dtype) for x, table in zip(of_tables, tables)]
        wide = in_float32(of_hidden)
        return of_tables, ((wide * scale.astype(wide.dtype)).astype(of_hidden.dtype), None, None)

    differentiable = jax.custom_vjp(of_all)
    differentiable.defvjp(forward, backward)
    total = differentiable(tables, flat)
    return total, jnp.sum(flat[2].astype(total.dtype))


def nats_of_tokens(
    unembed: Callable[..., Any],
    hidden: Float[Array, "*batch seq embed"],
    targets: Int[Array, "*batch seq"],
    *,
    chunk: int | None = None,
    nats: TokenNats = token_nats,
) -> Float[Array, "*batch seq"]:
    """Each token's `-log p[target]`, from the logits of `chunk` tokens at a time; not meant to be differentiated."""
    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    sizes = count_chunks(unembed, flat[0], chunk)
    unembed = cast_tables_once(unembed, flat[0][: sizes[1]])
    of_chunk = lambda piece: ((), nats(in_float32(unembed(piece[0])), piece[1])[0])
    return sum_over_chunks(of_chunk, flat, sizes)[1].reshape(targets.shape)


def count_chunks(unembed: Callable, hidden: Float[Array, "tokens embed"], chunk: int | None) -> tuple[int, int]:
    """`chunks_of` these tokens, whose logits are of as many ids as `unembed` gives."""
    vocab = jax.eval_shape(unembed, jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)).shape[-1]
    return chunks_of(len(hidden), vocab, chunk)


def cast_tables_once(unembed: Callable, chunk: Array) -> Callable:
    """`unembed` of chunks like this one, whose tables are cast here where it casts them."""
    if in_parts(unembed):  # which are gathered where they are read
        return unembed
    its, tables, dtypes = _with_tables(unembed, chunk)
    values = cast(tables, dtypes)
    return lambda hidden: its(hidden, *read_from(values, tables))


def _with_tables(unembed: Callable, chunk: Array) -> tuple[Callable, list[Array], list[Any]]:
    """`unembed` as a function of a chunk like this one and of the arrays that it reads; those; their `read_dtypes`."""
    leaves, rest = eqx.partition(unembed, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(leaves)
    chunk = jax.lax.stop_gradient(chunk)

    def call(leaves: list[Array], chunk: Array) -> Array:
        return eqx.combine(jax.tree.unflatten(structure, leaves), rest)(chunk)

    # A bound method holds the whole model: only the arrays that it reads get gradients here.
    program = jax.make_jaxpr(call)(leaves, chunk)
    read = {id(variable) for equation in program.eqns for variable in equation.invars}
    variables = program.jaxpr.invars[: len(leaves)]
    is_read = [id(variable) in read for variable in variables]
    dtypes = read_dtypes(program.jaxpr, [variable for variable, used in zip(variables, is_read) if used])
    # Inside `shard_map` a replicated table is multiplied with hidden states that vary over devices. `pcast` to varying
    # here, outside of the custom rule: the table's gradient is then reduced once, after all chunks, not once a chunk.
    tables = [vary(leaf, varying_axes(chunk)) for leaf, used in zip(leaves, is_read) if used]

    def with_read(chunk: Array, *tables: Array) -> Array:
        given = iter(tables)
        return call([next(given) if used else leaf for leaf, used in zip(leaves, is_read)], chunk)

    converted, closed_over = jax.closure_convert(with_read, chunk, *tables)
    if any(varying_axes(array) != varying_axes(chunk) for array in closed_over):
        raise ValueError(
            "cross_entropy(unembed): inside shard_map, arrays that a plain function closes over must vary over the "
            f"same axes as hidden, {sorted(varying_axes(chunk))}; pass a bound method of a module or a "
            "jax.tree_util.Partial."
        )
    return converted, tables + list(closed_over), dtypes + [None] * len(closed_over)


def read_dtypes(program: Any, tables: Sequence[Any]) -> list[np.dtype | None]:
    """For each variable of a jaxpr the dtype to which it is cast wherever it is read, if that has fewer bits."""
    return [_if_narrower(_read_as(program, table), table.aval.dtype) for table in tables]


def cast(tables: Sequence[Array], dtypes: Sequence[np.dtype | None]) -> list[Array | None]:
    """The tables of which `read_dtypes` knows a dtype, in that dtype; None for the others."""
    return [None if dtype is None else table.astype(dtype) for table, dtype in zip(tables, dtypes, strict=True)]


def read_from(values: Sequence[Array | None], tables: Sequence[Array]) -> list[Array]:
    """The tables, with the values of those that were cast and all gradients as wide as the tables."""
    return [table if value is None else _valued(value, table) for value, table in zip(values, tables, strict=True)]


@jax.custom_vjp
def _valued(value: Shaped[Array, "..."], table: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return value.astype(table.dtype)


_valued.defvjp(lambda value, table: (value.astype(table.dtype), None), lambda _, gradient: (None, gradient))


def _read_as(program: Any, variable: Any) -> set[np.dtype]:
    """The dtypes that a variable of a jaxpr is cast to; its own among them where it is read as it is."""
    found = {variable.aval.dtype for one in program.outvars if one is variable}
    for equation in program.eqns:
        for place, one in enumerate(equation.invars):
            if one is not variable:
                continue
            inner = [getattr(x, "jaxpr", x) for x in equation.params.values() if hasattr(x, "eqns")]
            if equation.primitive.name == "convert_element_type":
                found.add(np.dtype(equation.params["new_dtype"]))
            elif len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
                found |= _read_as(inner[0], inner[0].invars[place])
            else:
                found.add(variable.aval.dtype)
    return found


def _if_narrower(found: set[np.dtype], than: np.dtype) -> np.dtype | None:
    """The one dtype that was found, if it is of floating-point numbers of fewer bits."""
    (one, *others) = found or {than}
    is_narrower = jnp.issubdtype(one, jnp.floating) and jnp.finfo(one).bits < jnp.finfo(than).bits
    return one if is_narrower and not others else None
