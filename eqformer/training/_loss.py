"""Cross-entropy over chunks of tokens: the logits of all tokens never exist at once, in either pass."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from .._array_checks import checked
from .._shapes import Batch
from ..nn import in_float32, Tokens
from ..parallel import vary, varying_axes
from ._batch_tokens import batch_tokens
from ._chunks import chunks_of, sum_over_chunks
from ._loss_in_parts import in_parts, nats_in_parts
from ._narrow_tables import cast, read_dtypes, read_from
from ._tally import tallied


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
    sizes = _chunk_sizes(unembed, flat[0], chunk)
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


@checked
def next_token_loss(
    model: PyTree,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Float[Array, ""], Any]:
    """The sum over a batch of the nats of each target, and the weight of those tokens.

    Targets are next tokens, as the loaders' are, or hidden ones (`masked_batch`).

    The auxiliary losses of routed layers (load balancing, z-loss of the router) are added to the sum, and the weight is
    then a `Tally`, which holds the layers' `Aux` too.

    Args:
        model: Has `encode(ids, tokens) -> (hidden, cache, aux)` and `unembed(hidden) -> logits`.
        batch: Ids, targets and weights.
        key: For dropout and routers; None is inference: no dropout, no router noise, no dropped choices of experts.
        chunk: The tokens whose logits are there at once; None: see `chunk_size`.
        z_loss: As in `cross_entropy`.
        tokens: Replaces what `batch_tokens` makes of the batch; a mesh that splits rows passes its own.
        vocabulary: Reads logits that a mesh splits.
    """
    tokens = batch_tokens(batch, key) if tokens is None else tokens
    hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats = token_nats if vocabulary is None else vocabulary.nats
    total, count = cross_entropy(model.unembed, hidden, targets, weights, chunk=chunk, z_loss=z_loss, nats=nats)
    return tallied(total, count, aux)


@checked
def evaluation_sums(
    model: PyTree,
    batch: Batch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> dict[str, Float[Array, ""]]:
    """`nats`, `correct` (targets with the largest logit) and `count`, each summed over a batch, without dropout."""
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    flat = (hidden.reshape(-1, hidden.shape[-1]), *(jnp.asarray(x).reshape(-1) for x in (batch.targets, batch.weights)))
    sizes = _chunk_sizes(model.unembed, flat[0], chunk)
    unembed = _casting_once(model.unembed, flat[0][: sizes[1]])

    def of_chunk(piece):
        logits = in_float32(unembed(piece[0]))
        weights = piece[2].astype(logits.dtype)
        nats, _ = (token_nats if vocabulary is None else vocabulary.nats)(logits, piece[1])
        is_first = (_is_first if vocabulary is None else vocabulary.is_first)(logits, piece[1])
        sums = {"nats": nats, "correct": is_first.astype(logits.dtype)}
        found = {name: jnp.sum(weighed(each, weights)) for name, each in sums.items()}
        return found | {"count": jnp.sum(weights)}, None

    return sum_over_chunks(of_chunk, flat, sizes)[0]


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
    sizes = _chunk_sizes(unembed, flat[0], chunk)
    unembed = _casting_once(unembed, flat[0][: sizes[1]])
    of_chunk = lambda piece: ((), nats(in_float32(unembed(piece[0])), piece[1])[0])
    return sum_over_chunks(of_chunk, flat, sizes)[1].reshape(targets.shape)


def _is_first(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
    return jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets


def _chunk_sizes(unembed: Callable, hidden: Float[Array, "tokens embed"], chunk: int | None) -> tuple[int, int]:
    """`chunks_of` these tokens, whose logits are of as many ids as `unembed` gives."""
    vocab = jax.eval_shape(unembed, jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)).shape[-1]
    return chunks_of(len(hidden), vocab, chunk)


def _casting_once(unembed: Callable, chunk: Array) -> Callable:
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
