"""What a model costs: parameters, and floating-point operations a token."""

import math

import jax
from jaxtyping import PyTree

from ..nn import (
    Attention,
    ExpertChoiceRouter,
    GatedDeltaNet,
    is_trainable,
    LatentAttention,
    Linear,
    Mask,
    matrices,
    modules,
    MoE,
    Transformer,
)


def parameter_count(model: PyTree, *, embeddings: bool = True, active: bool = False) -> int:
    """How many numbers are trained; without `embeddings`, those outside tables of tokens, positions and logits.

    With `active`, of experts as many as a token takes on average. Takes a model or its shapes
    (`equinox.filter_eval_shape`), so that one of any size can be counted.
    """
    marks = jax.tree.leaves(matrices(model), is_leaf=lambda x: x is None)
    leaves = jax.tree.leaves(model, is_leaf=lambda x: x is None)
    total = 0
    for leaf, mark in zip(leaves, marks, strict=True):
        if is_trainable(leaf) and (embeddings or mark is None or not mark.table):
            total += math.prod(leaf.shape)
    return total - round(sum(_idle(moe, False) for moe in modules(model, MoE))) if active else total


def flops_per_token(model: Transformer, seq: int, *, attention: str = "half", backward: bool = True) -> float:
    """Operations a token of a training step over rows of `seq` tokens, a multiplication and an addition counted as two.

    Counted are products of matrices: every linear map, scores and weighted sums of attention, a recurrence's products
    with its states, and the logits. `attention="half"` counts the keys that a mask leaves visible, on average over a
    row (Megatron's custom for causal masks); `"full"` counts all `seq` keys (the custom of PaLM's and most published
    MFU figures). The backward pass costs twice the forward pass; what is recomputed is not counted. Of experts, as many
    are counted as a token takes.
    """
    if attention not in ("half", "full"):
        raise ValueError(f"flops_per_token(attention={attention!r}): give 'half' (visible keys) or 'full' (all keys).")
    forward = 0.0
    for module in jax.tree.leaves(model, is_leaf=_is_counted):
        if isinstance(module, Linear):
            forward += 2 * math.prod(module.weight.shape)
        elif isinstance(module, Attention | LatentAttention | GatedDeltaNet):
            linears = (part for part in jax.tree.leaves(module, is_leaf=_is_linear) if isinstance(part, Linear))
            forward += sum(2 * math.prod(linear.weight.shape) for linear in linears)
            if isinstance(module, GatedDeltaNet):  # its state is read by the key, corrected, and read by the query
                forward += 3 * 2 * math.prod(module.value.weight.shape[:-1]) * module.query.weight.shape[-2]
                continue
            keys = seq if attention == "full" else visible_keys(module.mask, seq)
            forward += 2 * keys * _score_channels(module)
    forward -= sum(2 * _idle(moe, True) for moe in modules(model, MoE))
    if model.head is None:
        forward += 2 * math.prod(model.embedding.weight.shape)
    return forward * (3 if backward else 1)


def visible_keys(mask: Mask, seq: int) -> float:
    """How many keys a query sees under `mask`, on average over the positions of a row of `seq` tokens."""
    if not mask.is_causal:
        return float(seq)
    reach = mask.reach(seq)
    if mask.chunk is not None and reach == mask.chunk:
        whole, rest = divmod(seq, reach)
        return (whole * reach * (reach + 1) + rest * (rest + 1)) / 2 / seq
    # The first `reach` queries see 1, 2, ... keys, each later one `reach`.
    return (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq


def _score_channels(module: Attention | LatentAttention) -> int:
    """Channels of queries and of values, over all heads and layers: a visible key costs two operations for each."""
    query = math.prod(module.query.weight.shape[:-1])
    if isinstance(module, Attention):
        return 2 * query
    rotated = 0 if module.query_rope is None else math.prod(module.query_rope.weight.shape[:-1])
    return query + rotated + math.prod(module.value_up.weight.shape[:-1])


def _idle(moe: MoE, weights_only: bool) -> float:
    """Numbers of the experts that a token does not take, on average: all of them, or those of linear maps' weights."""
    maps = modules(moe.experts, Linear)
    arrays = [linear.weight for linear in maps] if weights_only else jax.tree.leaves(moe.experts)
    taken = moe.router.factor if isinstance(moe.router, ExpertChoiceRouter) else moe.router.top_k
    experts = maps[0].weight.shape[-len(maps[0].weight_dims) - 1]
    return sum(math.prod(x.shape) for x in arrays if is_trainable(x)) * (1 - taken / experts)


def _is_linear(node: object) -> bool:
    return isinstance(node, Linear)


def _is_counted(node: object) -> bool:
    return isinstance(node, Linear | Attention | LatentAttention | GatedDeltaNet)
