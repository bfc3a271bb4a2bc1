"""What a model costs: parameters, and floating-point operations a token."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from ..nn import (
    ExpertMixture,
    is_trainable,
    LanguageModel,
    linear_maps,
    Mask,
    matrices,
    Mixer,
    modules,
)


def parameter_count(model: PyTree, *, embeddings: bool = True, active: bool = False) -> int:
    """The number of trainable parameters; without `embeddings`, tables of tokens, positions and logits are left out.

    With `active`, only as many experts are counted as a token takes on average. Takes a model or its shapes
    (`equinox.filter_eval_shape`), so that models of any size can be counted.
    """
    marks = jax.tree.leaves(matrices(model), is_leaf=lambda x: x is None)
    leaves = jax.tree.leaves(model, is_leaf=lambda x: x is None)
    total = 0
    for leaf, mark in zip(leaves, marks, strict=True):
        if is_trainable(leaf) and (embeddings or mark is None or not mark.table):
            total += math.prod(leaf.shape)
    return total - round(sum(_idle(moe) for moe in modules(model, ExpertMixture))) if active else total


def flops_per_token(
    model: LanguageModel,
    seq: int,
    *,
    attention: str = "half",
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
) -> float:
    """Operations a token of a training step over rows of `seq` tokens, a multiplication and an addition counted as two.

    Counted are products of matrices: every linear map, scores and weighted sums of attention, a recurrence's products
    with its states, and the logits. `attention="half"` counts the keys that a mask leaves visible, on average over a
    row (Megatron's custom for causal masks); `"full"` counts all `seq` keys (the custom of PaLM's and most published
    MFU figures). The backward pass costs twice the forward pass; what is recomputed is not counted. Of experts, as many
    are counted as a token takes. `trained` picks what of the model is trained, `nn.lora_factors` for one (`None`: all);
    a weight that is not has no gradient, so that its backward pass costs what its forward pass does.
    """
    if attention not in ("half", "full"):
        raise ValueError(f"flops_per_token(attention={attention!r}): give 'half' (visible keys) or 'full' (all keys).")
    maps = (*linear_maps(model), *([model.embedding.weight] if model.head is None else []))
    forward, of_weights = _of_maps(model, maps, trained)
    others = 0.0
    for mixer in modules(model, Mixer):
        facts, copies = mixer.facts(), _copies(mixer)
        others += copies * facts.operations
        if facts.attends is not None:  # a visible key costs two operations for each channel of queries and of values
            keys = seq if attention == "full" else visible_keys(facts.attends.mask, seq)
            channels = (*facts.attends.query, *facts.attends.output)
            others += copies * 2 * keys * sum(heads * width for heads, width in channels)
    return forward + others + ((forward + others) + (of_weights + others)) * backward


def fp8_flops_per_token(
    model: LanguageModel,
    *,
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
    experts: bool = True,
) -> float:
    """Those of `flops_per_token` that are products of numbers of 8 bits, which some chips multiply twice as fast.

    Without `experts` theirs are not counted, as some of these chips have kernels of 16 bits for them: see
    `kernels.fp8_grouped_matmul`.
    """
    wide = {} if experts else idle_shares(model)
    maps = [one for one in linear_maps(model) if one.products.operand_bits == 8 and id(one) not in wide]
    forward, of_weights = _of_maps(model, maps, trained)
    return forward + (forward + of_weights) * backward


def _of_maps(
    model: LanguageModel, maps: Iterable[Any], trained: Callable[[PyTree], PyTree] | None
) -> tuple[float, float]:
    """Operations of maps forward, which their inputs' gradients cost too, and of the gradients of weights."""
    moving = {id(x) for x in jax.tree.leaves(model if trained is None else trained(model)) if is_trainable(x)}
    idle, forward, of_weights = idle_shares(model), 0.0, 0.0
    for one in maps:
        products = 2 * math.prod(one.shape) * (1 - idle.get(id(one), 0))
        forward += products
        of_weights += products * any(id(x) in moving and x.size == math.prod(one.shape) for x in jax.tree.leaves(one))
    return forward, of_weights


def visible_keys(mask: Mask, seq: int) -> float:
    """The number of keys that a query sees under `mask`, on average over the positions of a row of `seq` tokens.

    A source is as long as the row.
    """
    if mask.source:
        return seq + visible_keys(dataclasses.replace(mask, source=False), seq)
    if not mask.is_causal:
        return float(seq)
    reach = mask.reach(seq)
    if mask.chunk is not None and reach == mask.chunk:
        whole, rest = divmod(seq, reach)
        return (whole * reach * (reach + 1) + rest * (rest + 1)) / 2 / seq
    # The first `reach` queries see 1, 2, ... keys, each later one `reach`.
    return (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq


def idle_shares(model: PyTree) -> dict[int, float]:
    """The part of the experts that a token does not take, on average, by the `id` of each of their maps."""
    return {id(one): _idle_share(moe) for moe in modules(model, ExpertMixture) for one in linear_maps(moe.experts)}


def _copies(mixer: Mixer) -> int:
    """How many layers an ensemble of a mixer holds."""
    first = linear_maps(mixer)[0]
    return math.prod(first.shape[: len(first.shape) - len(first.sizes)])


def _idle(moe: ExpertMixture) -> float:
    """The number of parameters of experts that a token does not take, on average."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(moe.experts) if is_trainable(x)) * _idle_share(moe)


def _idle_share(moe: ExpertMixture) -> float:
    """The part of its experts that a token does not take, on average."""
    facts = moe.router.facts()
    return 1 - facts.choices / facts.experts
