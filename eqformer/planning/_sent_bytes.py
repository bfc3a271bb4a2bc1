"""Bytes that a device sends in a training step under a plan, by cause, from formulas.

In this file, a *stream* is the residual stream of a model whose layers are split over the axis `tensor`. It is whole on
each device, or split by tokens or by features.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import nn, parallel, training
from ..parallel import CONTEXT, EXPERT, FSDP, PIPE, STATE, TENSOR
from ._bounds import context_bytes, gather_bytes, pipeline_bytes, sharded_state_bytes


_PARAMETERS = "parameters"  # first word of `Sent.what` for gathers of parameters
GRADIENTS = "gradients"  # first word of `Sent.what` for sums of the parameters' gradients


class Sent(NamedTuple):
    """Bytes that a device sends in a step for one cause: `STATE`, or the mesh axis whose split requires them."""

    cause: str
    what: str
    """The arrays that are sent, in words."""
    size: float


def sum_by_cause(sent: Iterable[Sent]) -> dict[str, float]:
    """Return the bytes of each cause."""
    sizes: dict[str, float] = {}
    for cause, _, size in sent:
        sizes[cause] = sizes.get(cause, 0.0) + size
    return sizes


def merge_sent(sent: Iterable[Sent]) -> list[Sent]:
    """Add up the bytes of one cause and one `what`, and leave out sums of 0."""
    sizes: dict[tuple[str, str], float] = {}
    for cause, what, size in sent:
        sizes[cause, what] = sizes.get((cause, what), 0.0) + size
    return [Sent(cause, what, size) for (cause, what), size in sizes.items() if size]


def sent_bytes(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    *,
    rows: int,
    seq: int,
    trained: training.Trained = training.trainable,
) -> list[Sent]:
    """Return the bytes that each device sends in a training step, by formulas.

    A search ranks plans by these formulas, which take a hundredth of the time of a trace. The model's `remat` and the
    plan's `stage_remat` decide which collectives the backward pass repeats. The sums of norms, and positions that are
    sent with keys, are small and left out.

    Args:
        plan: How the model is laid out.
        model: The model, or its shapes.
        rows: Rows of a batch.
        seq: The tokens of a row.
        trained: Picks the parameters that are trained, like the optimizer's `trained`. Frozen parameters have no
            gradients, and are sent only if they are split over devices.
    """
    microbatches_on_all_devices = math.prod(map(plan.size, parallel.BATCH_AXES)) * plan.microbatches
    tokens = float(rows // microbatches_on_all_devices * seq // plan.size(CONTEXT))  # Tokens in a device's microbatch.
    model = plan.shapes(model)
    trained_model = trained(model)
    sent = list(_state(plan, model, trained_model, tokens))
    if (stream := plan.stream) is not None:
        layers = sum(_tensor_layers(plan, stream, model, stack, tokens) for stack in model.stacks)
        at_ends = ", on the stages that compute them" if plan.is_pipelined and not plan.spreads_edges else ""
        layers += _layer_inputs(plan, stream, model, tokens)
        sent.append(Sent(TENSOR, f"layers with a {plan.residual} stream", layers))
        vocabulary = _vocabulary(plan, stream, model, trained_model, tokens)
        sent.append(Sent(TENSOR, f"embedding and loss{at_ends}", vocabulary))
    if plan.size(CONTEXT) > 1:
        attention = sum(_context(plan, model, stack, tokens) for stack in model.stacks)
        sent.append(Sent(CONTEXT, f"attention by {plan.context_method}", attention))
    if plan.size(EXPERT) > 1:
        sent += [experts for stack in model.stacks for experts in _experts(plan, model, stack, tokens)]
    if plan.is_pipelined:
        sent.append(Sent(PIPE, "activations and their gradients", _pipeline(plan, model, tokens)))
        edges = _edge_gradients(plan, model, trained_model)
        sent.append(Sent(STATE, "gradients of embedding and head, over stages", edges))
    return merge_sent(sent)


class _PlacedArray(NamedTuple):
    """An array of a model, and its layout over the devices of a plan."""

    whole: jax.ShapeDtypeStruct
    """Shape of the array on all devices together."""
    shard: tuple[int, ...]
    """The shape of a device's part, before `fsdp` splits it."""
    fsdp_dim: int | None
    """Dim that `fsdp` splits, at least for the gradient; None: no dim."""
    gathered_dtype: str
    """Dtype in which the array is gathered."""
    summed_axes: tuple[str, ...]
    """Axes over which partial sums of the gradient are added up."""
    layers: int
    """Number of layers that are stacked in the array; 0 for an array outside of stacks."""
    is_trained: bool
    """Whether the array has a gradient."""
    ids_per_token: int | None
    """Vectors of each token in a table of layers that stays split (`parallel.keeps_split`); None for other arrays."""

    @property
    def size(self) -> int:
        """Number of elements of a device's part, before `fsdp` splits it."""
        return math.prod(self.shard)

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of the gradient, which is summed in float32 at least; 0 for a frozen array."""
        return max(self.whole.dtype.itemsize, 4) if self.is_trained else 0

    def fsdp_pieces(self, plan: parallel.Plan) -> int:
        """Return the number of pieces into which `fsdp` splits a device's part."""
        return 1 if self.fsdp_dim is None else plan.size(FSDP)


def place_arrays(
    plan: parallel.Plan, model: nn.LanguageModel, trained_model: nn.LanguageModel
) -> Iterator[_PlacedArray]:
    """Yield the floating-point arrays of a model, whose leaves are shapes, with their layouts.

    In `trained_model`, None takes the place of frozen arrays.
    """
    leaves = plan.leaves(model)
    specs = parallel.partition_specs(model, plan.layout(splits_fsdp=False), plan.mesh)
    layers_by_leaf: dict[int, int] = {}
    for stack, stack_leaves in zip(model.stacks, leaves.stacks, strict=True):
        layers_by_leaf |= dict.fromkeys(map(id, jax.tree.leaves(stack_leaves)), len(stack))
    tables = {id(table.weight): table.ids_per_token for table in nn.modules(model.stacks, nn.EmbeddingTable)}
    structure = jax.tree.structure(model)
    trees = map(structure.flatten_up_to, (model, leaves, specs, trained_model))
    for x, leaf, spec, trained in zip(*trees, strict=True):
        if spec is not None and jnp.issubdtype(x.dtype, jnp.floating):
            shard = jax.sharding.NamedSharding(plan.mesh, spec).shard_shape(x.shape)
            stays_split = plan.zero == 3 and id(x) in tables and parallel.keeps_split(leaf, math.prod(shard[1:]))
            yield _PlacedArray(
                whole=x,
                shard=shard,
                fsdp_dim=leaf.fsdp_dim,
                gathered_dtype=leaf.gather_dtype,
                summed_axes=leaf.reduced,
                layers=layers_by_leaf.get(id(leaf), 0),
                is_trained=trained is not None,
                ids_per_token=tables[id(x)] if stays_split else None,
            )


def _state(plan: parallel.Plan, model: PyTree, trained_model: PyTree, tokens: float) -> Iterator[Sent]:
    """Yield the bytes of parameters that are gathered and of gradients that are reduced."""
    logits_table = None
    if plan.splits_tables and parallel.chunked_tables(model).logits:
        logits_table = model.embedding.weight if model.head is None else model.head.weight  # type: ignore[attr-defined]
    for array in place_arrays(plan, model, trained_model):
        if array.is_trained or plan.zero == 3:  # A frozen, replicated array is never sent.
            gathers = _count_gathers(plan, model, array)
            if array.ids_per_token is not None:
                yield _looked_up_vectors(plan, array, tokens * array.ids_per_token)
            elif array.whole is not logits_table:
                yield from _sharded_state(plan, array, gathers)
            elif model.head is None:  # The logits are computed from the embedding's table, which is gathered for both.
                yield from _sharded_state(plan, array, gathers)
                yield from _tied_logits(plan, model, array)
            else:  # A head whose logits are computed in chunks is gathered in each of the two passes.
                yield from _sharded_state(plan, array, gathers + 1)
        if array.is_trained:
            yield _summed_gradient(plan, array)


def _count_gathers(plan: parallel.Plan, model: nn.LanguageModel, array: _PlacedArray) -> int:
    """Return how often a microbatch gathers an array at stage 3 of ZeRO.

    An array outside of layers is gathered once for both passes. An array of a stack of one layer is gathered once, too,
    because compilers remove a loop of one iteration. Any other array of a layer is gathered in each of the two passes.
    In a pipeline whose stages recompute their forward pass, the recomputation gathers the array once more, unless the
    schedule computes one layer at a time: the layer's gathered parameters then stay for its backward pass.
    """
    if array.layers == 0 or (array.layers == 1 and not plan.is_pipelined):
        return 1
    if not plan.reruns_stages:
        return 2
    runs_several_layers = plan.spreads_edges or sum(map(len, model.stacks)) > plan.timetable().parts
    return 3 if runs_several_layers else 2


def _sharded_state(plan: parallel.Plan, array: _PlacedArray, gathers: int) -> Iterator[Sent]:
    """Yield the bytes of an array and of its gradient over `fsdp`."""
    # A pipeline sends the arrays once a step, except for layers at stage 3 of ZeRO, which each microbatch sends.
    is_sent_once = plan.is_pipelined and not (plan.zero == 3 and array.layers)
    gathered = jnp.dtype(array.gathered_dtype) if plan.zero == 3 else array.whole.dtype
    kinds = ((_PARAMETERS, gathered.itemsize, 0), (GRADIENTS, 0, array.gradient_itemsize))
    for name, weight_bytes, gradient_bytes in kinds:
        size = sharded_state_bytes(
            array.size,
            array.fsdp_pieces(plan),
            zero=plan.zero,
            microbatches=1 if is_sent_once else plan.microbatches,
            gathers=gathers,
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
        )
        yield Sent(STATE, f"{name}, zero {plan.zero}", size)


def _looked_up_vectors(plan: parallel.Plan, array: _PlacedArray, ids: float) -> Sent:
    """Return the bytes of the vectors, and of their gradients, that devices look up for each other in a split table.

    The gather of the `ids` of a microbatch and repetitions by rematerialisation are left out.
    """
    devices, vector, layers = plan.size(FSDP), math.prod(array.shard[2:]), array.shard[0]
    size = ids * devices * vector * layers * plan.microbatches * jnp.dtype(array.gathered_dtype).itemsize
    return Sent(STATE, "vectors of split tables", gather_bytes(size, devices) * (2 if array.is_trained else 1))


def _tied_logits(plan: parallel.Plan, model: nn.LanguageModel, array: _PlacedArray) -> Iterator[Sent]:
    """Yield the bytes that logits from a tied table add to the bytes of the lookup: two gathers and a gradient."""
    for name, itemsize in ((_PARAMETERS, 2 * _activation_bytes(model)), (GRADIENTS, array.gradient_itemsize)):
        size = plan.microbatches * gather_bytes(array.size * itemsize, array.fsdp_pieces(plan))
        yield Sent(STATE, f"{name}, zero {plan.zero}", size)


def _summed_gradient(plan: parallel.Plan, array: _PlacedArray) -> Sent:
    """Return the bytes that are sent to sum a gradient over the axes on which each device has a partial sum."""
    axes = [axis for axis in array.summed_axes if plan.size(axis) > 1]
    shard_size, copies = array.size / array.fsdp_pieces(plan), math.prod(map(plan.size, axes))
    size = sharded_state_bytes(shard_size, copies, zero=0, gradient_bytes=array.gradient_itemsize)
    if axes == [TENSOR]:
        return Sent(TENSOR, "gradients of replicated arrays", size)
    return Sent(STATE, f"{GRADIENTS}, zero {plan.zero}", size)


def _edge_gradients(plan: parallel.Plan, model: nn.LanguageModel, trained_model: nn.LanguageModel) -> float:
    """Return the bytes to sum the gradients of edges (arrays outside of layers) over all stages.

    Every stage holds the edges. If the edges are spread over the stages, their gradients are counted as state instead,
    and the result is 0.
    """
    if plan.spreads_edges:
        return 0.0
    arrays = place_arrays(plan, model, trained_model)
    size = sum(array.size * array.gradient_itemsize for array in arrays if not array.layers)
    splits_features = plan.stream is not None and plan.stream.splits_features
    if splits_features and trained_model.embedding.weight is not None:
        # The loss reads a copy of the table that is split by ids, and the copy's gradient is summed over stages, too.
        table = model.embedding.weight
        size += table.size / plan.size(TENSOR) * max(table.dtype.itemsize, 4)
    return 2 * gather_bytes(size, plan.size(PIPE))


def _tensor_layers(
    plan: parallel.Plan, stream: parallel.ResidualStream, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float
) -> float:
    """Return the bytes of activations that a stack's sublayers gather or scatter; an all-reduce counts as both."""
    replicated = [layer for _, layer in parallel.replicated_layers(stack)]
    slices = _slice_bytes(plan, stack)
    gathered = [layer for layer in replicated if _is_gathered(layer, stream, slices)]
    sublayers = nn.modules(stack, (nn.Mixer, nn.FeedForward, nn.Experts))
    split = [layer for layer in sublayers if not any(layer is whole_layer for whole_layer in replicated)]
    values = _count_layer_values(plan, stream, model.stream_channels, stack, gathered, split)
    slice_sends = 3 if stack.remat != "none" or plan.reruns_stages else 2
    slices_sent = sum(slices.values()) / len(stack) * slice_sends
    size = tokens * values * _activation_bytes(model) + slices_sent
    return _evaluations(plan, stack) * gather_bytes(size, plan.size(TENSOR))


def _count_layer_values(
    plan: parallel.Plan,
    stream: parallel.ResidualStream,
    embed: int,
    stack: nn.LayerStack,
    gathered: list[PyTree],
    split: list[PyTree],
) -> int:
    """Return how many values per token a layer of a stack gathers or scatters in both passes of a microbatch.

    Args:
        plan: How the model is laid out.
        stream: The residual stream.
        embed: Channels of the stream.
        stack: The layers.
        gathered: Sublayers that every device computes, after gathering their inputs.
        split: Sublayers that are split over devices.
    """
    # `forward` counts the values of a forward pass, and `rerun` the values of a forward pass that is recomputed.
    if stream.splits_features:
        outputs = sum(_scattered_outputs(plan, linear) for linear in nn.linear_maps(stack))
        outputs -= sum(_scattered_outputs(plan, linear) for linear in nn.linear_maps(gathered))
        rerun = forward = len(gathered) * embed + outputs
    else:
        outputs = sum(map(_count_outputs, split))
        if stream.is_whole:  # The first device sends its result of a replicated layer to all devices.
            outputs += len(gathered)
        # Each sublayer gathers the stream once.
        forward = (len(split) + len(gathered) + outputs) * embed
        rerun = 2 * outputs * embed if stream.is_whole else forward
    values = 2 * forward
    if plan.reruns_stages:
        values += rerun
    keeps_scattered = stream.splits_tokens and stack.remat.startswith("full")
    if _sends_again(stack) and not keeps_scattered:
        # The last output is kept as the next layer's input.
        values += rerun - embed * (2 if stream.is_whole else 1)
    elif not stream.is_whole and (stack.remat != "none" or stream.overlap != "none"):
        # Gathered inputs are not kept.
        values += (len(gathered) + (len(split) if stream.splits_tokens else 0)) * embed
    return values


def _is_gathered(layer: PyTree, stream: parallel.ResidualStream, slices: Mapping[int, int]) -> bool:
    """Return whether a replicated layer gathers its input.

    A mixer gathers all tokens. Any other layer gathers all features if the features of the stream are split, or if the
    stream is whole and some of the layer's arrays are split. `slices` maps the id of each replicated module to the
    bytes of its split arrays.
    """
    if isinstance(layer, nn.Mixer) or stream.splits_features:
        return True
    return stream.is_whole and slices[id(layer)] > 0


def _count_outputs(layer: PyTree) -> int:
    """Return the number of output projections of a layer, which are summed one by one; a LoRA counts as two."""
    return len(parallel.stream_maps(layer, "outputs")) if isinstance(layer, nn.Mixer | nn.FeedForward) else 1


def _layer_inputs(
    plan: parallel.Plan, stream: parallel.ResidualStream, model: nn.LanguageModel, tokens: float
) -> float:
    """Return the bytes to gather the stream for `PerLayerInputs`, once for all layers, and to scatter its gradient."""
    embed = model.stream_channels
    maps = nn.linear_maps(model.parts.layer_inputs)
    values = sum(_scattered_outputs(plan, linear) if stream.splits_features else embed for linear in maps)
    return plan.microbatches * gather_bytes(2 * tokens * values * _activation_bytes(model), plan.size(TENSOR))


def _slice_bytes(plan: parallel.Plan, stack: nn.LayerStack) -> dict[int, int]:
    """Return, by the id of each replicated module, the bytes of its arrays that are split over `tensor`.

    Slices of these arrays are gathered, and their gradients are reduced.
    """
    replicated = (*nn.modules(stack, nn.Router), *(layer for _, layer in parallel.replicated_layers(stack)))
    sizes = {id(module): 0 for module in replicated}

    def add(module: PyTree, specs: PyTree) -> None:
        if id(module) in sizes:
            pairs = zip(jax.tree.leaves(module), jax.tree.leaves(specs), strict=True)
            split = [x for x, spec in pairs if TENSOR in jax.tree.leaves(tuple(spec))]
            sizes[id(module)] = sum(x.size * x.dtype.itemsize for x in split)

    specs = parallel.partition_specs(stack, plan.layout(splits_fsdp=False), plan.mesh)
    jax.tree.map(add, stack, specs, is_leaf=lambda node: id(node) in sizes)
    return sizes


def _vocabulary(
    plan: parallel.Plan,
    stream: parallel.ResidualStream,
    model: nn.LanguageModel,
    trained_model: nn.LanguageModel,
    tokens: float,
) -> float:
    """Return the bytes that lookup and loss send: vectors of tokens in both passes, and sums of the loss per token."""
    table = model.embedding.weight
    embed, itemsize = table.shape[-1], table.dtype.itemsize
    passes = 1 if trained_model.embedding.weight is None else 2
    if stream.is_whole:  # vectors are summed by an all-reduce
        lookups = 2
    else:
        lookups = passes if stream.splits_tokens else 0
    # With spread edges, each stage looks up, and computes the loss of, its share of the microbatches.
    microbatches = plan.microbatches / (plan.size(PIPE) if plan.spreads_edges else 1)
    loss_sums = 2 * 3 * 4  # Bytes of three all-reduced float32 numbers per token; an all-reduce counts twice.
    size = microbatches * tokens * (lookups * embed * itemsize + 2 * embed * _activation_bytes(model) + loss_sums)
    if stream.splits_features:
        # The table is resharded from slices of features to slices of ids, and its gradient is resharded back.
        reshards = 1 if plan.is_pipelined else plan.microbatches
        size += passes * reshards * table.size / plan.size(TENSOR) * itemsize
    return gather_bytes(size, plan.size(TENSOR))


def _context(plan: parallel.Plan, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float) -> float:
    """Return the bytes that attention over split rows sends."""
    method, total = plan.context_method, 0.0
    for module in nn.modules(stack, nn.Mixer):
        query, key, value, output = _channels(plan, module)
        size = context_bytes(
            tokens * plan.size(CONTEXT),
            (key + value) / 2,
            plan.size(CONTEXT),
            method=method,
            embed=(query + output) / 2,
            activation_bytes=_activation_bytes(model),
        )
        # Both passes of "heads" send the same bytes. The other methods send twice as many bytes in the backward pass.
        forward = size / (2 if method == "heads" else 3)
        repeats = int(plan.reruns_stages) + int(_sends_again(stack))
        total += size + forward * repeats
    return _evaluations(plan, stack) * total


def _experts(plan: parallel.Plan, model: nn.LanguageModel, stack: nn.LayerStack, tokens: float) -> Iterator[Sent]:
    """Yield the bytes that expert parallelism sends.

    A choice is a pair of a token and one of its experts. The forward pass sends tokens, choices and the choices'
    weights to the experts, and the experts' results back. The backward pass sends the gradients of all of these except
    the choices. An exchange is counted as one round of all-to-alls.
    """
    devices = plan.size(EXPERT)
    for moe in nn.modules(stack, (nn.ExpertMixture,)):
        facts = moe.router.facts()
        vector_bytes = moe.expert_width(model.stream_channels) * _activation_bytes(model)
        top_k = 0 if facts.expert_choice else int(facts.choices)  # If experts choose tokens, no choices are sent.
        method = plan.expert_method_of(model, moe, int(tokens))
        if method == "exchange":
            sent = plan.exchange.count_sent(int(tokens) * top_k, devices)
            # A ragged exchange sends one count of choices per expert; a padded exchange sends each choice's expert.
            numbers = devices * facts.experts if plan.exchange.is_ragged else sent
            # The device that holds the token applies the weights, so the weights are not sent.
            vectors, choices, weights = sent * vector_bytes, numbers * 4, 0.0
        else:
            vectors, choices = devices * tokens * vector_bytes, devices * tokens * top_k * 4
            weights = choices
        size = 4 * vectors + choices + 2 * weights
        # No rematerialisation policy keeps the inputs of experts, and only `products` keeps their results. The stages
        # of a pipeline may also recompute their forward pass.
        if stack.remat != "none":
            size += vectors + choices + weights
        if _sends_again(stack) and not weights:
            size += vectors
        if plan.reruns_stages:
            size += 2 * vectors + choices + weights
        yield Sent(EXPERT, f"experts by {method}", _evaluations(plan, stack) * gather_bytes(size, devices))


def _pipeline(plan: parallel.Plan, model: nn.LanguageModel, tokens: float) -> float:
    """Return the bytes that a stage sends; all devices send in each tick in which any device has a message."""
    if plan.spreads_edges:  # Every tick also sends an input microbatch towards the first stage (`PipelinedStack`).
        rounds = 2 * count_ticks(plan)
    else:
        rounds = sum(parallel.count_link_ticks(plan.timetable()).values()) / 2
    slices = 1 if plan.stream is None or plan.stream.is_whole else plan.size(TENSOR)
    embed = model.stream_channels * model.streams
    return pipeline_bytes(tokens, embed, rounds, tensor=slices, activation_bytes=_activation_bytes(model))


def _channels(plan: parallel.Plan, mixer: nn.Mixer) -> tuple[float, float, float, float]:
    """Return the channels per token of a device's queries, keys, values and outputs: at least one head of each.

    With the method `"heads"`, a device needs at least one head for each device of the axis `context`.
    """
    min_heads = plan.size(CONTEXT) if plan.context_method == "heads" else 1
    attends = mixer.facts().attends
    if attends is None:
        raise ValueError(f"{type(mixer).__name__} declares no attention core, so axis context cannot split its rows.")

    def count(channels: Iterable[tuple[int, ...]]) -> float:
        return float(sum(max(heads / plan.size(TENSOR), min_heads) * width for heads, width in channels))

    return count(attends.query), count(attends.key), count(attends.value), count(attends.output)


def _scattered_outputs(plan: parallel.Plan, linear: nn.LinearMap) -> int:
    """Return how many values per token a map scatters in a feature stream; values that it all-reduces count twice."""
    dims = plan.layout(splits_fsdp=False).dims
    if not set(linear.inputs) & set(dims):  # Each device holds all inputs, so no partial sums are added up.
        return 0
    is_split = linear.outputs[0] in dims and linear.output_shape[0] % plan.size(TENSOR) == 0
    return math.prod(linear.output_shape) * (1 if is_split else 2)


def _evaluations(plan: parallel.Plan, stack: nn.LayerStack) -> float:
    """Return how many layers a device evaluates in a step, counted once for each microbatch."""
    return len(stack) / plan.size(PIPE) * plan.microbatches


def _sends_again(stack: nn.LayerStack) -> bool:
    """Return whether a layer's backward pass repeats the collectives of its forward pass."""
    return stack.remat not in ("none", "products", "products_on_host")


def _activation_bytes(model: nn.LanguageModel) -> int:
    return jnp.dtype(model.compute_dtype).itemsize


def count_ticks(plan: parallel.Plan) -> int:
    """Return how many iterations the pipeline's loop has."""
    return plan.microbatches + plan.size(PIPE) - 1 if plan.spreads_edges else plan.timetable().ticks
