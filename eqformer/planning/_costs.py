"""Parameters of a model, and its floating-point operations a token."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
from jaxtyping import PyTree

from ..nn import ExpertMixture, is_trainable, LanguageModel, linear_maps, LinearMap, Mask, matrices, Mixer, modules


_Map = LinearMap | jax.Array | jax.ShapeDtypeStruct


def parameter_count(model: PyTree, *, embeddings: bool = True, active: bool = False) -> int:
    """Return the number of trainable parameters of a model, or of its shapes (`equinox.filter_eval_shape`).

    Without `embeddings`, tables of tokens, positions and logits are left out. With `active`, only as many experts are
    counted as a token takes on average.
    """
    marks = jax.tree.leaves(matrices(model), is_leaf=lambda x: x is None)
    leaves = jax.tree.leaves(model, is_leaf=lambda x: x is None)
    total = 0
    for leaf, mark in zip(leaves, marks, strict=True):
        if is_trainable(leaf) and (embeddings or mark is None or not mark.table):
            total += math.prod(leaf.shape)
    return total - round(sum(_count_idle(moe) for moe in modules(model, ExpertMixture))) if active else total


def flops_per_token(
    model: LanguageModel,
    seq: int,
    *,
    attention: str = "half",
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
) -> float:
    """Return the operations per token of a training step over rows of `seq` tokens.

    A multiplication and an addition are two operations. Counted are products of matrices: every linear map, scores and
    weighted sums of attention, a recurrence's products with its states, and the logits. `attention="half"` counts the
    keys that a mask leaves visible, on average over a row (Megatron's custom for causal masks); `"full"` counts all
    `seq` keys (the custom of PaLM's and most published MFU figures). The backward pass costs twice the forward pass;
    recomputation is not counted. Only as many experts of a layer are counted as a token chooses, on average. `trained`
    picks the parameters that are trained, such as `nn.lora_factors` (`None`: all); a frozen weight has no gradient, so
    that its backward pass costs as much as its forward pass.
    """
    if attention not in ("half", "full"):
        raise ValueError(f"flops_per_token(attention={attention!r}): give 'half' (visible keys) or 'full' (all keys).")
    maps = (*linear_maps(model), *([model.embedding.weight] if model.head is None else []))
    forward, weight_gradients = _count_map_flops(model, maps, trained)
    mixing = 0.0
    for mixer in modules(model, Mixer):
        facts, copies = mixer.facts(), _copies(mixer)
        mixing += copies * facts.operations
        if facts.attends is not None:  # a visible key costs two operations for each channel of queries and of values
            keys = seq if attention == "full" else visible_keys(facts.attends.mask, seq)
            channels = (*facts.attends.query, *facts.attends.output)
            mixing += copies * 2 * keys * sum(heads * width for heads, width in channels)
    return forward + mixing + ((forward + mixing) + (weight_gradients + mixing)) * backward


def fp8_flops_per_token(
    model: LanguageModel,
    *,
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
    experts: bool = True,
) -> float:
    """Return the part of `flops_per_token` that multiplies numbers of 8 bits, which some chips do twice as fast.

    Without `experts`, the products of experts are not counted, since some of these chips compute them in 16 bits: see
    `kernels.has_fp8_grouped_matmul`.
    """
    left_out = {} if experts else idle_shares(model)
    maps = [m for m in linear_maps(model) if m.products.operand_bits == 8 and id(m) not in left_out]
    forward, weight_gradients = _count_map_flops(model, maps, trained)
    return forward + (forward + weight_gradients) * backward


def _count_map_flops(
    model: LanguageModel, maps: Iterable[_Map], trained: Callable[[PyTree], PyTree] | None
) -> tuple[float, float]:
    """Return the operations of the maps' forward pass, which input gradients cost too, and of weight gradients."""
    trained_ids = {id(x) for x in jax.tree.leaves(model if trained is None else trained(model)) if is_trainable(x)}
    idle, forward, weight_gradients = idle_shares(model), 0.0, 0.0
    for linear in maps:
        size = math.prod(linear.shape)
        products = 2 * size * (1 - idle.get(id(linear), 0))
        forward += products
        weight_gradients += products * any(id(x) in trained_ids and x.size == size for x in jax.tree.leaves(linear))
    return forward, weight_gradients


def visible_keys(mask: Mask, seq: int) -> float:
    """Return the number of keys that a query sees under `mask`, averaged over the positions of a row of `seq` tokens.

    The source of a cross-attention is taken to be as long as the row.
    """
    if mask.source:
        return seq + visible_keys(dataclasses.replace(mask, source=False), seq)
    if not mask.is_causal:
        return float(seq)
    reach = mask.reach(seq)
    if mask.chunk is not None and reach == mask.chunk:
        chunks, last = divmod(seq, reach)  # `last` tokens are in a shorter chunk at the end
        return (chunks * reach * (reach + 1) + last * (last + 1)) / 2 / seq
    # The first `reach` queries see 1, 2, ... keys, each later one `reach`.
    return (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq


def idle_shares(model: PyTree) -> dict[int, float]:
    """Return the share of the experts that a token does not take, on average, by the `id` of each of their maps."""
    return {
        id(linear): _idle_share(moe) for moe in modules(model, ExpertMixture) for linear in linear_maps(moe.experts)
    }


def _copies(mixer: Mixer) -> int:
    """Return the number of layers that an ensemble of a mixer holds."""
    first = linear_maps(mixer)[0]
    return math.prod(first.shape[: len(first.shape) - len(first.sizes)])


def _count_idle(moe: ExpertMixture) -> float:
    """Return the number of parameters of experts that a token does not take, on average."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(moe.experts) if is_trainable(x)) * _idle_share(moe)


def _idle_share(moe: ExpertMixture) -> float:
    """Return the share of a mixture's experts that a token does not take, on average."""
    facts = moe.router.facts()
    return 1 - facts.choices / facts.experts
