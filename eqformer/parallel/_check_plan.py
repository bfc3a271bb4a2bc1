"""Checks, before anything is compiled, that a plan, a model and a batch fit together."""

import dataclasses
import math
from types import NoneType

import equinox as eqx
import jax
from jaxtyping import PyTree

from .. import nn
from .._annotation_checks import name_class
from ._context_attention import check_context, refuse_pieces
from ._mesh import AXES, axes_of, AXIS_TYPES, BATCH_AXES, CONTEXT, Device, EXPERT, is_spec, PIPE, TENSOR
from ._placement import check_values, Placement
from .pipeline._pipelined_stack import check_depth
from .tensor._tensor import dim_size, is_plain, is_split, plain_layers
from .tensor._vocabulary import logits_parts


def check_parallel_config(plan: Placement) -> None:
    """Raise a `ValueError` for a plan with an unknown value, or with values that exclude each other."""
    axes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_types))
    if axes != dict(zip(AXES, AXIS_TYPES)):
        raise ValueError(
            f"Plan(mesh): the mesh must have the axes {', '.join(AXES)}, all of type Auto, but has "
            f"{', '.join(f'{axis} ({kind.name})' for axis, kind in axes.items())}; use make_mesh."
        )
    check_values(plan)
    _check_optimizer_memory(plan)
    if plan.overlap != "none" and plan.stream is not None and plan.stream.is_whole:
        raise ValueError(
            f"Plan(overlap={plan.overlap!r}, residual='replicated'): a replicated stream is all-reduced, with no "
            "gather to overlap; take residual='sequence' or 'feature', or overlap='none'."
        )
    if plan.is_pipelined:
        plan.timetable()
    if plan.spreads_edges:
        if plan.schedule != "gpipe" or plan.chunks != 1:
            raise ValueError(
                f"Plan(edges='spread', schedule={plan.schedule!r}, chunks={plan.chunks}): other schedules than GPipe "
                "begin backward passes before all forward passes have ended, so the last stage must compute the loss; "
                "take schedule='gpipe' with chunks=1, or edges='ends'."
            )
        if plan.microbatches % plan.size(PIPE):
            raise ValueError(
                f"Plan(edges='spread', microbatches={plan.microbatches}) over pipe={plan.size(PIPE)}: each stage "
                f"embeds the same number of microbatches; take a multiple of {plan.size(PIPE)}."
            )


def _check_optimizer_memory(plan: Placement) -> None:
    """Raise a `ValueError` if the devices lack the memory kind for the optimizer state."""
    if plan.optimizer_memory == "device" or plan.devices is None:
        return
    device = plan.devices.flat[0]
    kinds = _memory_kinds(device)
    if kinds and plan.optimizer_memory not in kinds:
        raise ValueError(
            f"Plan(optimizer_memory={plan.optimizer_memory!r}): the mesh's devices, {device}, have "
            f"the memories {', '.join(kinds)}; take optimizer_memory='device'."
        )


def _memory_kinds(device: Device) -> list[str]:
    """Return the memory kinds of a device; an empty list for a GPU that exists only as a compilation target."""
    return [memory.kind for memory in device.addressable_memories()]


def check_model(plan: Placement, model: nn.LanguageModel) -> None:
    """Raise a `ValueError` if the plan's mesh cannot split the model, which may consist of shapes."""
    check_model_class(model)
    if plan.is_pipelined:
        _check_sequence(plan, model)
        # Check the depth first, because this message is clearer than the layout's message about the dim `layers`.
        check_depth(sum(stack.depth for stack in model.stacks), plan.size(PIPE), plan.timetable().chunks)
        _check_stages(plan, model)
        model = plan.shapes(model)
    _check_extra_inputs(plan, model)
    specs = plan.parameter_specs(model)
    plan.state_specs(model)
    if plan.size(TENSOR) > 1:
        _check_tensor(plan, model, specs)
        _check_8_bit_maps(plan, specs)
    for path, moe in nn.named_modules(model, (nn.ExpertMixture,)):
        _check_mixture(plan, path, moe)


def check_model_class(model: object) -> None:
    """Raise a `ValueError` for anything but a `LanguageModel`."""
    if not isinstance(model, nn.LanguageModel):
        raise ValueError(
            f"Plan.check(model): a plan runs an nn.LanguageModel, such as an nn.Transformer of any layers, but the "
            f"model is {name_class(model)}; put it into an nn.Transformer, or shard it by partition_specs and run "
            "it by filter_shard_map."
        )


def _check_sequence(plan: Placement, model: nn.LanguageModel) -> None:
    """Raise a `ValueError` if the model does not declare that its stacks run one after another."""
    if not model.runs_in_sequence:
        raise ValueError(
            f"Plan over pipe={plan.size(PIPE)}: stages can only run stacks one after another and then the norm, but "
            f"{type(model).__name__} does not declare that its encode does just this; set runs_in_sequence=True if it "
            "does, or leave out pipe."
        )


def _check_stages(plan: Placement, model: nn.LanguageModel) -> None:
    """Raise a `ValueError` for residuals on the host, and for layers that read more than the residual stream."""
    reading_stacks = [index for index, stack in enumerate(model.stacks) if nn.shared_names_read(stack)]
    host_stacks = [index for index, stack in enumerate(model.stacks) if stack.remat.endswith("_on_host")]
    if host_stacks and not plan.reruns_stages:
        remat = model.stacks[host_stacks[0]].remat
        raise ValueError(
            f"Plan over pipe={plan.size(PIPE)}: stacks[{host_stacks[0]}] has remat {remat!r}, but stages keep the "
            f"residuals of their backward pass on the devices; take remat {remat.removesuffix('_on_host')!r}, or "
            "Plan(stage_remat=True), which keeps only a stage's input."
        )
    needs = [f"stacks[{index}] reads {_describe_shared(model.stacks[index])}" for index in reading_stacks]
    needs += [] if model.parts.layer_inputs is None else ["each layer is given a vector of each token (layer_inputs)"]
    if needs:
        raise ValueError(
            f"Plan over pipe={plan.size(PIPE)}: {needs[0]}, but stages send only the residual stream; leave out pipe, "
            "and split the model over fsdp, tensor or context."
        )


def _describe_shared(stack: nn.LayerStack) -> str:
    """Describe the values of earlier layers that a stack reads."""
    reads_embedding = bool(nn.modules(stack, nn.EmbeddingSkip))
    return "the embedded tokens (EmbeddingSkip)" if reads_embedding else "keys that layers before it share"


def _check_extra_inputs(plan: Placement, model: nn.LanguageModel) -> None:
    """Raise a `ValueError` if a layer reads a source or score bias that the plan's axes would have to split."""
    names = {"source": "another sequence", "bias": "a bias of scores"}
    for path, mixer in nn.named_modules(model, nn.Mixer):
        attends = mixer.facts().attends
        extra_inputs = [names[need] for need in attends.needs if need in names] if attends is not None else []
        splits = [f"{axis}={plan.size(axis)}" for axis in (PIPE, CONTEXT) if plan.size(axis) > 1]
        splits += ["residual='feature'"] if plan.size(TENSOR) > 1 and plan.residual == "feature" else []
        if extra_inputs and splits:
            raise ValueError(
                f"Plan over {', '.join(splits)}: {path} reads "
                f"{' and '.join(extra_inputs)}, which such a plan does not split over devices; give the devices to "
                "another axis, such as fsdp or tensor, with residual='replicated' or 'sequence'."
            )


def check_rows(plan: Placement, model: nn.LanguageModel, rows: int, seq: int, group: int = 1) -> None:
    """Raise a `ValueError` if the devices do not divide the rows of a microbatch or the tokens of a row."""
    devices = math.prod(plan.size(axis) for axis in BATCH_AXES)
    if rows % (devices * plan.microbatches * group):
        pieces = "pieces" if group == 1 else f"pieces of whole groups of {group} rows"
        raise ValueError(
            f"Plan over {devices} pieces of the batch ({', '.join(f'{a}={plan.size(a)}' for a in BATCH_AXES)}) in "
            f"{plan.microbatches} microbatches: {rows} rows do not fall into {devices} x {plan.microbatches} equal "
            f"{pieces}; take a multiple of {devices * plan.microbatches * group} rows."
        )
    size = plan.size(CONTEXT)
    row_pieces = 2 * size if size > 1 and plan.context_method != "heads" else size
    if seq % row_pieces:
        raise ValueError(
            f"Plan over context={size} by {plan.context_method!r}: rows of {seq} tokens are cut into {row_pieces} "
            f"equal pieces; take a multiple of {row_pieces} tokens."
        )
    stream = plan.stream
    routes = stream is not None and stream.routed.splits_tokens and bool(nn.named_modules(model, (nn.ExpertMixture,)))
    if stream is not None and (stream.splits_tokens or routes) and (seq // size) % plan.size(TENSOR):
        reason = "are split over the axis" if stream.splits_tokens else "are split over the axis where they are routed"
        raise ValueError(
            f"Plan(residual={plan.residual!r}) over tensor={plan.size(TENSOR)}: the {seq // size} tokens that a device "
            f"of context={size} holds {reason}; take a multiple of {size * plan.size(TENSOR)} tokens."
        )
    for path, mixer in nn.named_modules(model, nn.Mixer):
        _check_mixer(plan, path, mixer, seq)


def _check_mixer(plan: Placement, path: str, mixer: nn.Mixer, seq: int) -> None:
    """Raise a `ValueError` if the heads of a mixer or its rows cannot be split as the plan says."""
    size, tensor, facts, splits = plan.size(CONTEXT), plan.size(TENSOR), mixer.facts(), is_split(mixer)
    kv_heads = dim_size(mixer, "kv_heads") or dim_size(mixer, "heads") or tensor
    if splits and kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"Plan over tensor={tensor}: {path} has {kv_heads} key heads, which neither split over {tensor} devices "
            f"nor are shared by equal groups of devices; take a size that divides {kv_heads} or is a multiple of it."
        )
    if splits and kv_heads % tensor and not facts.shares_kv_heads:
        raise ValueError(
            f"Plan over tensor={tensor}: {path} has {kv_heads} key heads, and a norm over all query heads of a key "
            f"head, so devices cannot share a key head; take an axis that divides {kv_heads}."
        )
    if size == 1:
        return
    if facts.attends is None:
        refuse_pieces(size, path, mixer)
    heads, kv_heads = (channels[0][0] for channels in (facts.attends.query, facts.attends.key))
    pieces = tensor if splits else 1
    try:
        check_context(
            plan.context_method,
            size,
            mixer.core,  # type: ignore[attr-defined]
            seq=seq,
            heads=heads // pieces,
            kv_heads=max(1, kv_heads // pieces),
            needs=facts.attends.needs,
        )
    except ValueError as error:
        raise ValueError(f"Plan over context={size}: {path}: {error}") from error


def _check_tensor(plan: Placement, model: nn.LanguageModel, specs: PyTree) -> None:
    """Raise a `ValueError` for a module that the axis `tensor` splits and that no wrapper can run on a slice."""
    known = (
        nn.Mixer,
        nn.FeedForward,
        nn.ExpertMixture,
        nn.PerLayerInputs,
        nn.EmbeddingTable,
        nn.PositionEmbedding,
        nn.Norm,
        nn.StreamMap,
        nn.StreamMerge,
        nn.ScoreBias,
    )
    headless = _without_head(model)
    plain_ids = {id(layer) for _, layer in plain_layers(headless)}  # Every device runs these layers in full.

    def is_known(node: object) -> bool:
        return isinstance(node, known) or id(node) in plain_ids

    nodes = jax.tree_util.tree_leaves_with_path(headless, is_leaf=is_known)
    subtrees = jax.tree.map(lambda _, subtree: _Subtree(subtree), headless, _without_head(specs), is_leaf=is_known)
    for (path, node), subtree in zip(nodes, jax.tree.leaves(subtrees), strict=True):
        splits = any(TENSOR in axes_of(spec) for spec in jax.tree.leaves(subtree.specs, is_leaf=is_spec))
        if splits and not is_known(node):
            raise ValueError(
                f"Plan over tensor={plan.size(TENSOR)}: {nn.path_name(path)} would be split by the names of its dims, "
                "but no transform knows how to run its module on a slice; rename the dims, or make the module an "
                "nn.Mixer or nn.FeedForward."
            )
    if plan.stream is not None and plan.stream.splits_tokens:
        for path, mixer in nn.named_modules(model, nn.Mixer):
            _check_projections(plan, path, mixer)
    if plan.stream is not None and plan.stream.splits_features:
        kv_paths = _kv_head_paths(model)
        for path, mixer in nn.named_modules(model, nn.Mixer):
            _check_shared_key_heads(plan, path, mixer, kv_paths)
        _check_feature_layers(plan, model, known)


def _check_projections(plan: Placement, path: str, mixer: nn.Mixer) -> None:
    """Raise a `ValueError` if a split mixer declares that a projection reads a function of the mixer's input."""
    if is_split(mixer) and mixer.facts().projects_derived:
        raise ValueError(
            f"Plan(residual='sequence') over tensor={plan.size(TENSOR)}: {path} is {name_class(mixer)} with a "
            "projection of an array that the mixer computes from its input, such as a norm, and a device has only some "
            "tokens of this array; use residual='replicated' or 'feature'."
        )


def _without_head(model: PyTree) -> PyTree:
    """Return a model, or a tree like it, with None in place of head and logit bias."""
    return eqx.tree_at(logits_parts, model, [None] * len(logits_parts(model)))


def _check_feature_layers(plan: Placement, model: nn.LanguageModel, known: tuple[type, ...]) -> None:
    """Raise a `ValueError` for a part of a block that cannot run on a slice of each token's features."""
    modules = [("norm", model.norm)]
    for path, sublayer in nn.named_modules(model, nn.ParallelResidual):
        norms = sublayer.norm, sublayer.output_norm, sublayer.sum_norm
        modules += zip((f"{path}.{name}" for name in ("norm", "output_norm", "sum_norm")), norms)
    for path, sublayer in nn.named_modules(model, nn.Residual):
        fields = [field.name for field in dataclasses.fields(sublayer) if not field.metadata.get("static")]
        modules += [(f"{path}.{name}", getattr(sublayer, name)) for name in fields if name != "layer"]
        modules += [] if is_plain(sublayer.layer) else [(f"{path}.layer", sublayer.layer)]
    for path, module in modules:
        if not isinstance(module, (*known, nn.RandomMask, NoneType)):
            raise ValueError(
                f"Plan(residual='feature') over tensor={plan.size(TENSOR)}: {path} is {name_class(module)}, "
                "which would get a slice of each token's features and compute as if it had all features; take "
                "residual='replicated' or 'sequence', or an nn.Mixer, nn.FeedForward, nn.ExpertMixture or nn.Norm."
            )


def _check_shared_key_heads(plan: Placement, path: str, mixer: nn.Mixer, kv_paths: list[str]) -> None:
    """Raise a `ValueError` if devices share key heads, and arrays outside of linear maps have a dim of key heads.

    A device with a slice of the features computes all key heads by a linear map, and then uses one key head. An array
    outside of linear maps would still have all key heads.
    """
    kv_heads = dim_size(mixer, "kv_heads")
    if not is_split(mixer) or kv_heads is None or kv_heads % plan.size(TENSOR) == 0:
        return
    if mixer_paths := [kv_path for kv_path in kv_paths if kv_path.startswith(f"{path}.")]:
        raise ValueError(
            f"Plan(residual='feature') over tensor={plan.size(TENSOR)}: {path} has {kv_heads} key heads, fewer than "
            f"the axis has devices, and {', '.join(mixer_paths)} belongs to all key heads; take "
            "residual='replicated' or 'sequence', or a smaller axis."
        )


def _kv_head_paths(model: nn.LanguageModel) -> list[str]:
    """Return the paths of arrays with a dim of key heads outside of maps, and of norms over that dim without arrays."""
    without_maps = nn.map_linears(lambda _: None, model)
    names = jax.tree_util.tree_leaves_with_path(nn.dims(without_maps))
    arrays = [nn.path_name(path) for path, dims in names if isinstance(dims, str) and "kv_heads" in dims.split()]
    norms = nn.named_modules(model, nn.Norm)
    return arrays + [path for path, norm in norms if "kv_heads" in norm.reduced and not jax.tree.leaves(norm)]


class _Subtree:
    """Wrapper that makes a subtree of specs a leaf."""

    def __init__(self, specs: PyTree):
        self.specs = specs


def _check_mixture(plan: Placement, path: str, moe: nn.ExpertMixture) -> None:
    """Raise a `ValueError` if a mixture's results would depend on the mesh, or its experts cannot be split.

    Results depend on the mesh if choices depend on whole rows or on the whole batch, and a device has only a part of
    the rows or of the batch. Experts cannot be split if they are not made of linear maps, or if the layout does not
    split their hidden dim.
    """
    facts = moe.router.facts()
    _check_choice_scope(plan, path, moe.router, facts.among)
    if not facts.expert_choice:
        _check_choice_scope(plan, path, moe.dispatch, moe.dispatch.among(facts))
    linears: list[nn.LinearMap] = []
    without_linears = nn.map_linears(linears.append, moe.experts)
    splits = plan.size(EXPERT) > 1 or plan.size(TENSOR) > 1
    if splits and not facts.expert_choice and any(map(nn.has_shape, jax.tree.leaves(without_linears))):
        raise ValueError(
            f"Plan over expert={plan.size(EXPERT)}, tensor={plan.size(TENSOR)}: {path} has experts with parameters "
            "outside of linear maps, but split experts run on rows sorted by expert, which only linear maps support; "
            "leave both axes at 1, or build the experts of nn.LinearMaps."
        )
    if plan.size(TENSOR) > 1:
        axis_of = plan.layout(splits_fsdp=False).dims
        for linear in linears:
            dims = (*linear.inputs, *linear.outputs)
            if "rank" in dims:  # A LoRA factor: the other factor, or the map itself, is split.
                continue
            if "embed" in dims and not any(axis_of.get(dim) == TENSOR for dim in dims if dim != "embed"):
                raise ValueError(
                    f"Plan over tensor={plan.size(TENSOR)}: {path} has experts with a map from {linear.inputs} to "
                    f"{linear.outputs}, but the axis splits no dim of this map, so each device would compute the whole "
                    "product, and the sum over devices would count it several times; name the hidden dim `mlp`."
                )


def _check_choice_scope(plan: Placement, path: str, module: nn.Router | nn.Dispatch, among: str) -> None:
    """Raise a `ValueError` if a router's or dispatch's choices depend on more tokens (`among`) than a device has."""
    context, rows, name = plan.size(CONTEXT), math.prod(map(plan.size, BATCH_AXES)), name_class(module)
    if among != "token" and context > 1:
        raise ValueError(
            f"Plan over context={context}: {path} has {name}, whose choices depend on whole rows, but a device has "
            "pieces of rows; take another axis, or let each token choose its experts and drop no choices (dispatch by "
            "Dropless, or with a factor of experts / top_k)."
        )
    if among not in ("token", "sequence") and rows > 1:
        raise ValueError(
            f"Plan over {rows} pieces of the batch: {path} has {name}, whose choices depend on the whole batch, but "
            "a device has some of its rows; take per='sequence'."
        )


def _check_8_bit_maps(plan: Placement, specs: PyTree) -> None:
    """Raise a `ValueError` for a map with 8-bit products that the axis `tensor` does not split.

    Each device would compute and round a partial sum of the map's gradient, from its own heads. The sum of rounded
    parts is not the rounded sum.
    """
    nodes = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda node: nn.is_map(node) or is_spec(node))
    for path, linear in nodes:
        if not nn.is_map(linear) or linear.products.operand_bits is None:
            continue
        if not any(TENSOR in axes_of(spec) for spec in jax.tree.leaves(linear, is_leaf=is_spec)):
            name = nn.path_name(path)
            raise ValueError(
                f"Plan(residual={plan.residual!r}) over tensor={plan.size(TENSOR)}: {name} multiplies in "
                f"{linear.products.operand_bits} bits and is replicated, so each device would round a "
                "partial sum of a gradient; leave the map out (nn.with_fp8(model, where=...)), or take an axis that "
                f"divides its {linear.outputs[0]}."
            )
