"""What a device sends in a step of a plan, by cause: computed from shapes, and counted in a compiled program."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .. import nn, parallel, training
from ..parallel import CONTEXT, EXPERT, FSDP, PIPE, STATE, TENSOR
from ._bounds import context_bytes, gather_bytes, pipeline_bytes, sharded_state_bytes


GRADIENTS = "gradients"  # how it is said of state that it is no parameters


class Sent(NamedTuple):
    """Bytes that a device sends in a step, of one cause: `STATE`, or the axis whose split asks for them."""

    cause: str
    what: str
    size: float


def sent_bytes(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    *,
    rows: int,
    seq: int,
    trained: training.Trained = training.trainable,
) -> list[Sent]:
    """The bytes that each device sends in a training step, by formulas.

    What the backward pass computes again is sent again, as the model's `remat` and the plan's `stage_remat` say. Left
    out is what is small beside the rest: the norms' sums, the positions that go with keys. Choices are exchanged as the
    plan's platform does.

    Args:
        plan: How the model is laid out.
        model: The model, which may be of shapes.
        rows: Those of a batch.
        seq: The tokens of a row.
        trained: What picks the parameters that move, as an optimizer's does: of all else there are no gradients, and
            what is not split over devices is never sent.
    """
    pieces = math.prod(map(plan.size, parallel.BATCH_AXES)) * plan.microbatches
    tokens = float(rows // pieces * seq // plan.size(CONTEXT))
    model = plan.shapes(model)
    moving = trained(model)
    found = list(_of_state(plan, model, moving))
    if plan.stream is not None:
        layers = sum(_of_tensor(plan, plan.stream, model, stack, tokens) for stack in model.stacks)
        at_ends = ", where they are computed" if plan.is_pipelined and not plan.spreads_edges else ""
        layers += _of_layer_inputs(plan, plan.stream, model, tokens)
        found.append(Sent(TENSOR, f"layers with a {plan.residual} stream", layers))
        found.append(
            Sent(TENSOR, f"embedding and loss{at_ends}", _of_vocabulary(plan, plan.stream, model, moving, tokens))
        )
    if plan.size(CONTEXT) > 1:
        attended = sum(_of_context(plan, model, stack, tokens) for stack in model.stacks)
        found.append(Sent(CONTEXT, f"attention by {plan.context_method}", attended))
    if plan.size(EXPERT) > 1:
        found += [sent for stack in model.stacks for sent in _of_experts(plan, model, stack, tokens)]
    if plan.is_pipelined:
        found.append(Sent(PIPE, "activations and their gradients", _of_pipe(plan, model, tokens)))
        found.append(Sent(STATE, "gradients of embedding and head, over stages", _of_edges(plan, model, moving)))
    lines: dict[tuple[str, str], float] = {}
    for cause, what, size in found:
        lines[cause, what] = lines.get((cause, what), 0.0) + size
    return [Sent(cause, what, size) for (cause, what), size in lines.items() if size]


def by_cause(found: Iterable[Sent]) -> dict[str, float]:
    """The bytes of each cause."""
    total: dict[str, float] = {}
    for cause, _, size in found:
        total[cause] = total.get(cause, 0.0) + size
    return total


def _of_state(plan: parallel.Plan, model: nn.LanguageModel, moving: Any) -> Iterator[Sent]:
    of_weights, of_gradients = f"parameters, zero {plan.zero}", f"{GRADIENTS}, zero {plan.zero}"
    # A backward entry that runs its layers forward once more gathers them for it; a single one it keeps.
    is_deep = plan.spreads_edges or sum(map(len, model.stacks)) > plan.timetable().parts
    chunks_logits, head = plan.splits_tables and parallel.chunked_tables(model).logits, model.head
    of_logits = None if not chunks_logits else model.embedding.weight if head is None else head.weight  # type: ignore[attr-defined]
    for x, leaf, number, weight, layers, moves in _arrays(plan, model, moving):
        if not (moves or plan.zero == 3):  # it stays where it is, whole
            continue
        pieces = plan.size(FSDP) if leaf.fsdp_dim is not None else 1
        once = plan.is_pipelined and not (plan.zero == 3 and layers)
        # What is no layer's, or that of the one layer of a stack, whose loop compilers take away, once for both passes;
        # a head in parts, in each.
        in_loop = layers > 1 or (layers and plan.is_pipelined)
        gathers = 2 + (plan.reruns_stages and is_deep) if in_loop else 1 + (x is of_logits and head is not None)
        kept: dict[str, Any] = {"zero": plan.zero, "microbatches": 1 if once else plan.microbatches, "gathers": gathers}
        narrow = jnp.dtype(leaf.sent).itemsize if plan.zero == 3 else weight
        wide = max(weight, 4) if moves else 0  # summed in float32 at least
        for what, *sizes, again in ((of_weights, narrow, 0, 2 * _width(model)), (of_gradients, 0, wide, wide)):
            sent = dict(zip(("weight_bytes", "gradient_bytes"), sizes))
            yield Sent(STATE, what, sharded_state_bytes(number, pieces, **kept, **sent))
            if x is of_logits and head is None:  # beside vectors, logits have gathers and a gradient of their own
                yield Sent(STATE, what, plan.microbatches * gather_bytes(number * again, pieces))
        if not moves:
            continue
        over = [axis for axis in leaf.reduced if plan.size(axis) > 1]
        copies = math.prod(map(plan.size, over))
        summed = sharded_state_bytes(number / pieces, copies, zero=0, gradient_bytes=max(weight, 4))
        yield (
            Sent(TENSOR, "gradients of what all hold", summed)
            if over == [TENSOR]
            else Sent(STATE, of_gradients, summed)
        )


def _of_edges(plan: parallel.Plan, model: nn.LanguageModel, moving: Any) -> float:
    """All stages hold what stands outside of the layers, and sum its gradients; where edges are spread, as state."""
    if plan.spreads_edges:
        return 0.0
    arrays = _arrays(plan, model, moving)
    size = sum(number * max(weight, 4) for _, _, number, weight, layers, moves in arrays if moves and not layers)
    splits_features = plan.stream is not None and plan.stream.splits_features
    if splits_features and moving.embedding.weight is not None:  # by ids too
        table = model.embedding.weight
        size += table.size / plan.size(TENSOR) * max(table.dtype.itemsize, 4)
    return 2 * gather_bytes(size, plan.size(PIPE))


def _of_tensor(
    plan: parallel.Plan, stream: parallel.ResidualStream, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float
) -> float:
    """By the numbers of a token that the stack's sublayers gather or scatter; an all-reduce does both."""
    embed = model.embedding.weight.shape[-1]
    # A sublayer reads the stream once, and each of its maps back into it is summed by itself: of a LoRA two.
    found, sizes = [layer for _, layer in parallel.replicated_layers(stack)], _sizes_of_slices(plan, stack)
    layers = nn.modules(stack, (nn.Mixer, nn.FeedForward, nn.Experts))
    sublayers = [layer for layer in layers if not any(layer is one for one in found)]
    # Of these a mixer is given all, and another layer all features, where its arrays or these are split.
    is_given = lambda one: stream.splits_features or (stream.is_whole and sizes[id(one)] > 0)
    whole = [layer for layer in found if isinstance(layer, nn.Mixer) or is_given(layer)]
    outputs = sum(
        len(parallel.stream_maps(m, "outputs")) if isinstance(m, nn.Mixer | nn.FeedForward) else 1 for m in sublayers
    )
    if stream.splits_features:
        maps = len(whole) * embed - sum(_outputs(plan, linear) for linear in nn.linear_maps(whole))
        there = forward = maps + sum(_outputs(plan, linear) for linear in nn.linear_maps(stack))
    else:
        outputs += len(whole) * stream.is_whole  # the first device's result goes to all
        forward = (len(sublayers) + len(whole) + outputs) * embed
        there = 2 * outputs * embed if stream.is_whole else forward
    again = plan.reruns_stages * there
    if _recomputes(stack) and not (stream.splits_tokens and stack.remat.startswith("full")):  # kept, if scattered
        again += there - embed * (2 if stream.is_whole else 1)  # the last output is kept as the next layer's input
    elif not stream.is_whole and (stack.remat != "none" or stream.overlap != "none"):
        again += (len(whole) + len(sublayers) * stream.splits_tokens) * embed  # what was gathered is not kept
    slices = sum(sizes.values()) / len(stack) * (2 + (stack.remat != "none" or plan.reruns_stages))
    sent = tokens * (2 * forward + again) * _width(model) + slices
    return _evaluations(plan, stack) * gather_bytes(sent, plan.size(TENSOR))


def _of_layer_inputs(
    plan: parallel.Plan, stream: parallel.ResidualStream, model: nn.LanguageModel, tokens: float
) -> float:
    """What is read of the stream once for all layers' own vectors, and its gradient."""
    embed = model.embedding.weight.shape[-1]
    maps = nn.linear_maps(model.parts.layer_inputs)
    numbers = sum(_outputs(plan, one) if stream.splits_features else embed for one in maps)
    return plan.microbatches * gather_bytes(2 * tokens * numbers * _width(model), plan.size(TENSOR))


def _sizes_of_slices(plan: parallel.Plan, stack: nn.LayerStack) -> dict[int, int]:
    """Bytes of the arrays of what runs whole, by its id, where dims' names split them: gathered, and gradients back."""
    sizes = {
        id(one): 0 for one in (*nn.modules(stack, nn.Router), *(one for _, one in parallel.replicated_layers(stack)))
    }

    def add(module: Any, specs: Any) -> None:
        if id(module) in sizes:
            pairs = zip(jax.tree.leaves(module), jax.tree.leaves(specs), strict=True)
            split = [x for x, spec in pairs if TENSOR in jax.tree.leaves(tuple(spec))]
            sizes[id(module)] = sum(x.size * x.dtype.itemsize for x in split)

    specs = parallel.partition_specs(stack, plan.layout(splits_fsdp=False), plan.mesh)
    jax.tree.map(add, stack, specs, is_leaf=lambda node: id(node) in sizes)
    return sizes


def _of_vocabulary(
    plan: parallel.Plan, stream: parallel.ResidualStream, model: nn.LanguageModel, moving: Any, tokens: float
) -> float:
    """Lookup and the loss's input in both passes, and three numbers of each token's loss."""
    table = model.embedding.weight
    embed, weight = table.shape[-1], table.dtype.itemsize
    passes = 1 if moving.embedding.weight is None else 2
    lookup = (2 if stream.is_whole else passes if stream.splits_tokens else 0) * embed * weight
    rounds = plan.microbatches / (plan.size(PIPE) if plan.spreads_edges else 1)
    sent = rounds * tokens * (lookup + 2 * embed * _width(model) + 2 * 3 * 4)
    if stream.splits_features:  # the table, from slices of features to slices of ids, and its gradient back
        swaps = 1 if plan.is_pipelined else plan.microbatches
        sent += passes * swaps * table.size / plan.size(TENSOR) * weight
    return gather_bytes(sent, plan.size(TENSOR))


def _of_context(plan: parallel.Plan, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float) -> float:
    method, total = plan.context_method, 0.0
    for module in nn.modules(stack, nn.Mixer):
        query, key, value, output = _channels(plan, module)
        each = context_bytes(
            tokens * plan.size(CONTEXT),
            (key + value) / 2,
            plan.size(CONTEXT),
            method=method,
            embed=(query + output) / 2,
            activation_bytes=_width(model),
        )
        forward = each / (2 if method == "heads" else 3)
        total += each + forward * (plan.reruns_stages + _recomputes(stack))
    return _evaluations(plan, stack) * total


def _of_experts(plan: parallel.Plan, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float) -> Iterator[Sent]:
    """Tokens, choices and weights to the experts, results back, gradients of all but the choices; of rounds, one."""
    devices = plan.size(EXPERT)
    for moe in nn.modules(stack, (nn.ExpertMixture,)):
        facts, vector = moe.router.facts(), moe.expert_width(model.embedding.weight.shape[-1]) * _width(model)
        top_k = 0 if facts.gives_slots else int(facts.choices)  # what experts choose is known where they are
        method = plan.expert_method_of(model, moe, int(tokens))
        if method == "exchange":
            sent = plan.exchange.sent(int(tokens) * top_k, devices)
            numbers = devices * facts.experts if plan.exchange.is_ragged else sent  # how many each expert has, or which
            vectors, choices, weights = sent * vector, numbers * 4, 0.0
        else:
            vectors, choices = devices * tokens * vector, devices * tokens * top_k * 4
            weights = choices
        # What policies do not keep is what the experts are given and, but for `products`, what choices give back;
        # stages of a pipeline may run forward once more.
        again = (stack.remat != "none") * (vectors + choices + weights)
        again += (_recomputes(stack) and not weights) * vectors
        again += plan.reruns_stages * (2 * vectors + choices + weights)
        total = gather_bytes(4 * vectors + choices + 2 * weights + again, devices)
        yield Sent(EXPERT, f"experts by {method}", _evaluations(plan, stack) * total)


def _of_pipe(plan: parallel.Plan, model: nn.LanguageModel, tokens: float) -> float:
    """All devices send in each tick in which any has something to send."""
    # With spread edges the first stage's next input goes round beside the stages' outputs, in all ticks.
    rounds = 2 * ticks(plan) if plan.spreads_edges else sum(parallel.count_link_ticks(plan.timetable()).values()) / 2
    slices = 1 if plan.stream is None or plan.stream.is_whole else plan.size(TENSOR)
    embed = model.embedding.weight.shape[-1]
    return pipeline_bytes(tokens, embed, rounds, tensor=slices, activation_bytes=_width(model))


def _arrays(plan: parallel.Plan, model: nn.LanguageModel, moving: Any) -> Iterator[tuple]:
    """Each array, the plan's `Leaf`, numbers on a device, bytes of one, its stack's layers, and if it is trained."""
    leaves = plan.leaves(model)
    specs = parallel.partition_specs(model, plan.layout(splits_fsdp=False), plan.mesh)
    pairs = zip(model.stacks, leaves.stacks, strict=True)
    layers = {id(leaf): len(stack) for stack, own in pairs for leaf in jax.tree.leaves(own)}
    structure = jax.tree.structure(model)
    for x, leaf, spec, moved in zip(*map(structure.flatten_up_to, (model, leaves, specs, moving)), strict=True):
        if spec is not None and jnp.issubdtype(x.dtype, jnp.floating):
            number = math.prod(NamedSharding(plan.mesh, spec).shard_shape(x.shape))
            yield x, leaf, number, x.dtype.itemsize, layers.get(id(leaf), 0), moved is not None


def scattered_gradients(
    plan: parallel.Plan, model: nn.LanguageModel, trained: training.Trained
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the shape of each gradient that `fsdp` scatters, its dim that is split, and how many layers have one.

    Tables of the vocabulary that are scattered in parts are left out.
    """
    model = plan.shapes(model)
    specs = parallel.partition_specs(model, plan.layout(splits_fsdp=False), plan.mesh)
    structure = jax.tree.structure(model)
    shapes = {id(x): spec for x, spec in zip(jax.tree.leaves(model), structure.flatten_up_to(specs), strict=True)}
    for x, leaf, _, _, layers, moves in _arrays(plan, model, trained(model)):
        if leaf.fsdp_dim is None or not moves or (plan.splits_tables and not layers):
            continue
        shape = NamedSharding(plan.mesh, shapes[id(x)]).shard_shape(x.shape)
        yield (shape[1:], leaf.fsdp_dim - 1, shape[0]) if layers else (shape, leaf.fsdp_dim, 1)


def _channels(plan: parallel.Plan, mixer: nn.Mixer) -> tuple[float, float, float, float]:
    """Numbers a token of queries, keys, values and outputs on a device, which has at least one head of each."""
    least = plan.size(CONTEXT) if plan.context_method == "heads" else 1
    attends = mixer.facts().attends
    if attends is None:
        raise ValueError(f"{type(mixer).__name__} says of no core by which the axis context could cut its rows.")
    of = lambda channels: float(sum(max(heads / plan.size(TENSOR), least) * width for heads, width in channels))
    return of(attends.query), of(attends.key), of(attends.value), of(attends.output)


def _outputs(plan: parallel.Plan, linear: nn.LinearMap) -> int:
    """Numbers a token that a map of the feature stream scatters; twice those that it has to sum whole."""
    dims = plan.layout(splits_fsdp=False).dims
    if not set(linear.inputs) & set(dims):  # no sum over devices: each holds all that it contracts
        return 0
    split = linear.outputs[0] in dims and linear.output_shape[0] % plan.size(TENSOR) == 0
    return math.prod(linear.output_shape) * (1 if split else 2)


def _evaluations(plan: parallel.Plan, stack: nn.LayerStack) -> float:
    return len(stack) / plan.size(PIPE) * plan.microbatches


def _recomputes(stack: nn.LayerStack) -> bool:
    """Whether a layer's backward pass sends again what its forward pass sent."""
    return stack.remat not in ("none", "products", "products_on_host")


def _width(model: nn.LanguageModel) -> int:
    return jnp.dtype(model.compute_dtype).itemsize


def ticks(plan: parallel.Plan) -> int:
    """How many turns the pipeline's loop takes."""
    return plan.microbatches + plan.size(PIPE) - 1 if plan.spreads_edges else plan.timetable().ticks
