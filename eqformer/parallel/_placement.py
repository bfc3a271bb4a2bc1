"""The settings of a plan, and the placement of arrays on a mesh that follows from the settings.

`ParallelConfig` is plain data that does not depend on the mesh; the command line makes flags of its fields. `Placement`
adds the mesh: shardings of parameters, optimizer state and batches, and the order of layers. A `Leaf` has the sharding
of one array.
"""

import dataclasses
import math
import numbers
import operator
import typing
from typing import Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from .. import nn
from ._context_attention import context_order, ContextMethod
from ._expert_exchange import choose_expert_method, Exchange, exchange_on, ExpertMethod
from ._mesh import (
    axes_of,
    axis_sizes,
    BATCH_AXES,
    CONTEXT,
    dim_over,
    EXPERT,
    FSDP,
    Layout,
    partition_specs,
    PIPE,
    shardings,
    TENSOR,
    torus_steps,
    TorusSteps,
)
from .pipeline import _pipelined_stack as stage_layers
from .pipeline._schedule import Schedule
from .pipeline._schedules import make_schedule, Maker, ScheduleName
from .tensor._collective_matmul import Overlap
from .tensor._residual_stream import ResidualStream, StreamKind
from .tensor._stream_kinds import make_residual_stream
from .tensor._tensor import is_split, stream_maps, token_maps
from .tensor._vocabulary import logits_parts


Rows = TypeVar("Rows")
"""A tree of arrays whose first two dims are rows and tokens, or whose only dim is rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings of how a model runs over the axes of a mesh. Plain data: a `Plan` checks the values."""

    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over --mesh.fsdp: 0 splits only rows, 1 also optimizer state, 2 also gradients, 3 also parameters."""
    residual: StreamKind = "replicated"
    """The residual stream over --mesh.tensor: replicated, or split by tokens or by features."""
    overlap: Overlap = "none"
    """How a split stream is gathered and scattered: by one collective, or in rings that overlap with the products."""
    context_method: ContextMethod = "ring"
    """How attention reads other devices' tokens: a ring of keys and values, their gather, or heads (Ulysses)."""
    expert_method: ExpertMethod = "auto"
    """How tokens reach experts: a gather of all tokens, an exchange of choices (all-to-all), or the cheaper of both."""
    expert_factor: float | None = None
    """Slots of an exchange, relative to an even load (default: 1.25 per device; on CPUs, 2 per pair of devices)."""
    schedule: ScheduleName | Maker | Schedule = "1f1b"
    """The order in which the stages of a pipeline work."""
    microbatches: int = 1
    """Number of microbatches of a batch; they go through --mesh.pipe or, without it, run one after another."""
    stage_remat: bool = False
    """Keep only the inputs of stages, and recompute stages in the backward pass; always on with --edges spread."""
    chunks: int = 1
    """Parts of the model that each stage holds: any number for interleaved and looping, 2 for zb-v and dualpipe-v."""
    edges: Literal["ends", "spread"] = "ends"
    """Embedding and loss are computed by the first and last stage or, with --schedule gpipe, spread over all stages."""
    smallest: int = 1024
    """Smallest number of entries of an array that --mesh.fsdp splits."""
    optimizer_memory: Literal["device", "pinned_host"] = "device"
    """Where the optimizer's state lies between steps: on the devices, or in the memory of their hosts."""


def option_values(name: str) -> tuple[str | int, ...]:
    """Return the values that a field of `ParallelConfig` may have; an empty tuple for a number or a flag.

    A schedule may also be a function or a table.
    """
    annotation = typing.get_type_hints(ParallelConfig)[name]
    literals = [kind for kind in (annotation, *typing.get_args(annotation)) if typing.get_origin(kind) is Literal]
    return typing.get_args(literals[0]) if literals else ()


def check_values(config: ParallelConfig) -> None:
    """Raise a `ValueError` for a field with a value that is not allowed."""
    for field in dataclasses.fields(ParallelConfig):
        name, value, allowed = field.name, getattr(config, field.name), option_values(field.name)
        is_custom_schedule = name == "schedule" and not isinstance(value, str)
        if allowed and value not in allowed and not is_custom_schedule:
            raise ValueError(f"Plan({name}={value!r}): the choices are {', '.join(map(str, allowed))}.")
    if config.expert_factor is not None and not 0 < config.expert_factor < math.inf:
        raise ValueError(
            f"Plan(expert_factor={config.expert_factor}): this is the number of slots in a round of an "
            "exchange, relative to an even load; give a positive and finite number, such as 1.25."
        )
    for name, value in (("microbatches", config.microbatches), ("chunks", config.chunks)):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"Plan({name}={value!r}): {name} must be a whole number of at least 1.")


@dataclasses.dataclass(frozen=True)
class Placement(ParallelConfig):
    """A `ParallelConfig` on a mesh: the shardings of global arrays, and the order of layers and tokens in them."""

    mesh: Mesh | AbstractMesh
    """The devices; an abstract mesh is enough for layouts and checks."""

    def size(self, axis: str) -> int:
        """Return the number of devices of an axis."""
        return axis_sizes(self.mesh)[axis]

    @property
    def devices(self) -> np.ndarray | None:
        """The devices of the mesh; None for an abstract mesh."""
        return self.mesh.devices if isinstance(self.mesh, Mesh) else None

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: `"tpu"`, `"gpu"` or `"cpu"`; `"cpu"` for a mesh without devices."""
        mesh = self.mesh
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
        return "cpu" if device is None else device.platform

    def layout(self, *, splits_fsdp: bool) -> Layout:
        """Return the layout of arrays; with `splits_fsdp`, the axis `fsdp` splits each array too."""
        tensor_dims = *make_residual_stream(self.residual).split_dims, "vocab"
        dims = {"layers": PIPE, "experts": EXPERT, **dict.fromkeys(tensor_dims, TENSOR)}
        # `moving`: before `shard` adds rows of padding, the number of stages may not divide the number of layers. Then
        # `pipe` splits another dim of the array.
        lenient, moving = frozenset({"kv_heads", "vocab"}), frozenset({"layers"})
        return Layout(dims, lenient, FSDP if splits_fsdp else None, self.smallest, moving)

    def parameter_specs(self, model: PyTree) -> PyTree:
        """Return the specs of the parameters."""
        return partition_specs(model, self.layout(splits_fsdp=self.zero == 3), self.mesh)

    def state_specs(self, model: PyTree) -> PyTree:
        """Return the specs of gradients, and of the optimizer state of each parameter."""
        return partition_specs(model, self.layout(splits_fsdp=self.zero >= 1), self.mesh)

    def batch_specs(self, batch: PyTree) -> PyTree:
        """Return the specs of a batch: rows over the axes that split the batch, tokens over `context`."""
        return jax.tree.map(lambda x: PartitionSpec(self.batch_axes, *(CONTEXT,) * (x.ndim > 1)), batch)

    @property
    def stream(self) -> ResidualStream | None:
        """Residual stream over the axis `tensor`; None if the axis has one device."""
        return make_residual_stream(self.residual, self.overlap) if self.size(TENSOR) > 1 else None

    @property
    def exchange(self) -> Exchange:
        """All-to-alls of `expert_method="exchange"`: ragged or padded, and their slots relative to an even load."""
        return exchange_on(self.platform, self.expert_factor)

    def expert_method_of(self, model: nn.LanguageModel, moe: nn.ExpertMixture, tokens: int) -> str:
        """Return how `tokens` tokens of a device reach experts on other devices: `"gather"` or `"exchange"`."""
        facts = moe.router.facts()
        if facts.expert_choice:
            return "gather"
        row_bytes = moe.expert_width(model.stream_channels) * jnp.dtype(model.compute_dtype).itemsize
        sizes = {"devices": self.size(EXPERT), "exchange": self.exchange, "row_bytes": row_bytes}
        return choose_expert_method(self.expert_method, tokens=tokens, top_k=int(facts.choices), **sizes)

    @property
    def torus_steps(self) -> TorusSteps:
        """Group sizes of the steps in which gradients are reduce-scattered and parameters gathered over `fsdp`.

        Empty group sizes mean one step over the whole axis. See `_mesh.torus_steps` for when there are two steps.
        """
        return TorusSteps() if self.devices is None else torus_steps(self.devices, FSDP)

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are split over the axis `pipe`."""
        return self.size(PIPE) > 1

    @property
    def splits_tables(self) -> bool:
        """Whether large vocabulary tables are gathered in chunks, where they are used."""
        return self.zero == 3 and not self.is_pipelined and self.stream is None

    @property
    def scatters_layers(self) -> bool:
        """Whether each layer's gradient is scattered at once; a pipeline scatters it after the last microbatch."""
        return self.zero == 2 and not self.is_pipelined

    @property
    def spreads_edges(self) -> bool:
        """Whether all stages compute embedding and loss, each for its own rows, not just the first and the last."""
        return self.is_pipelined and self.edges == "spread"

    @property
    def runs_schedule(self) -> bool:
        """Whether the schedule's table computes gradients, with embedding and loss in the first and last stage."""
        return self.is_pipelined and not self.spreads_edges

    @property
    def reruns_stages(self) -> bool:
        """Whether a stage's backward pass runs its layers forward again, regardless of the layers' `remat`."""
        return self.spreads_edges or (self.is_pipelined and self.stage_remat)

    @property
    def aux_spec(self) -> PartitionSpec:
        """Spec of the auxiliary outputs of routed layers: split like the layers if a schedule runs them, else
        replicated."""
        return PartitionSpec(PIPE) if self.runs_schedule else PartitionSpec()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes that rows are split over."""
        return (*BATCH_AXES, PIPE) if self.spreads_edges else BATCH_AXES

    def timetable(self) -> Schedule:
        """Return the table of the pipeline's schedule: the work of each stage in each tick."""
        return make_schedule(self.schedule, stages=self.size(PIPE), microbatches=self.microbatches, chunks=self.chunks)

    def shard(self, tree: PyTree, take: stage_layers.TakeRows | None = None) -> PyTree:
        """Return a model, or a tree like it, in this plan's shardings and layer order.

        `unshard` restores the layer order. Arrays are placed by `parameter_specs`; in a pipeline, the layers of stacks
        are in the order of the stages (see `pipeline._pipelined_stack`). Shapes, and arrays inside of a trace, are not
        placed. `take(x, order)` replaces the function that reorders rows; then nothing is placed.
        """
        moved = (
            stage_layers.order_for_pipeline(tree, self.timetable().part_of, take or stage_layers.take_layer_rows)
            if self.is_pipelined
            else tree
        )
        return moved if take is not None else self._place(moved)

    def unshard(self, tree: PyTree, take: stage_layers.TakeRows = stage_layers.take_layer_rows) -> PyTree:
        """Return a model, or a tree with its structure, such as its gradients, with the layers in reading order."""
        return stage_layers.order_for_reading(tree, self.timetable().part_of, take) if self.is_pipelined else tree

    def unshard_aux(self, aux: PyTree, model: nn.LanguageModel) -> PyTree:
        """Return the auxiliary outputs of a sharded model's layers in reading order."""
        return stage_layers.rows_to_layers(aux, self._rows(model)) if self.is_pipelined else aux

    def _place(self, tree: PyTree) -> PyTree:
        """Put arrays on the mesh; return a tree with traced arrays, or any tree on an abstract mesh, unchanged."""
        arrays, static = eqx.partition(tree, eqx.is_array)
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))
        if is_traced or self.devices is None:
            return tree
        return eqx.combine(jax.device_put(arrays, shardings(self.parameter_specs(arrays), self.mesh)), static)

    def shapes(self, model: nn.LanguageModel) -> nn.LanguageModel:
        """Return the shapes of the sharded model. `model` has arrays or shapes, and may already be sharded."""
        is_plain = all(len(stack) == stack.depth for stack in model.stacks)
        return eqx.filter_eval_shape(self.shard if is_plain else lambda model: model, model)

    def _rows(self, model: nn.LanguageModel) -> list[stage_layers.LayerRows]:
        return stage_layers.place_layers([stack.depth for stack in model.stacks], self.timetable().part_of)

    def arrange(self, batch: Rows, tokens: nn.Tokens) -> tuple[Rows, nn.Tokens]:
        """Put each row's tokens in the order in which they are split over `context`.

        `batch` is a `Batch`, or another tree of arrays of the same rows. The lengths of documents, which cannot be
        computed from a piece of a row, are added to `tokens`.
        """
        if self.size(CONTEXT) == 1:
            return batch, tokens
        order = context_order(self.context_method, tokens.positions.shape[1], self.size(CONTEXT))
        lengths = jnp.broadcast_to(nn.document_lengths(tokens), tokens.positions.shape)
        pieces = None if np.all(np.diff(order) == 1) else self.size(CONTEXT)
        tokens = nn.with_row_layout_of(dataclasses.replace(tokens, lengths=lengths), tokens, pieces)
        return jax.tree.map(lambda x: x if x.ndim == 1 else x[:, order], (batch, tokens))

    def to_token_order(self, x: Array) -> Array:
        """Undo `arrange` for an array over rows and tokens: put its tokens in the order of the text."""
        if self.size(CONTEXT) == 1:
            return x
        return jnp.take(x, np.argsort(context_order(self.context_method, x.shape[1], self.size(CONTEXT))), axis=1)

    def leaves(self, model: nn.LanguageModel) -> PyTree:
        """Return a tree like the sharded `model`, with a `Leaf` for each array."""
        if self.is_pipelined:
            self._check_pipeline_order(model)
        axes = *self.batch_axes, CONTEXT
        return make_leaves(model, self.parameter_specs(model), self.state_specs(model), axes, self.stream)

    def _check_pipeline_order(self, model: nn.LanguageModel) -> None:
        """Raise a `ValueError` if stacks lack the padding layers that `shard` adds."""
        rows = self._rows(model)
        actual, wanted = [len(stack) for stack in model.stacks], [len(stack.layer_of_row) for stack in rows]
        if actual != wanted:
            raise ValueError(
                f"Plan over pipe={self.size(PIPE)}: stacks of {[stack.depth for stack in rows]} layers need {wanted} "
                f"rows, padding included, but have {actual}; pass plan.shard(model)."
            )


# The sharding of each array and of its gradient, and the dtypes in which the array is used and sent.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Sharding of an array and of its gradient, and the axes over which a device's gradient is a partial sum."""

    spec: PartitionSpec | None
    """Spec of the array; None if the leaf is no array."""
    state_spec: PartitionSpec | None
    """Spec of the gradient and of the optimizer state."""
    partial: tuple[str, ...]
    """Axes over which a device's gradient is a partial sum."""
    dtype: str
    """Dtype in which the array is used; empty for random keys."""
    gather_dtype: str = ""
    """Dtype in which the array is gathered: `dtype`; for vocabulary tables, the compute dtype if it has fewer bytes."""

    @property
    def fsdp_dim(self) -> int | None:
        """Dim along which `fsdp` splits the optimizer state, and with ZeRO-3 the array; None if neither is split."""
        return dim_over(self.state_spec, FSDP)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes of `partial` over which the gradient is summed but not scattered."""
        return tuple(axis for axis in self.partial if axis != FSDP or self.fsdp_dim is None)


def make_leaves(
    model: nn.LanguageModel, specs: PyTree, state_specs: PyTree, axes: tuple[str, ...], stream: ResidualStream | None
) -> PyTree:
    """Return a tree like `model` with a `Leaf` for each of its leaves.

    `axes` are the mesh axes that split the tokens of the batch. `stream` is None if nothing is split over `tensor`.
    """
    structure = jax.tree.structure(model)
    partial_flags = structure.flatten_up_to(_has_partial_gradient(model, stream))
    matrices = structure.flatten_up_to(nn.matrices(model))
    wide_flags = structure.flatten_up_to(_is_used_before_cast(model))

    def leaf_of(
        x: PyTree,
        spec: PartitionSpec | None,
        state_spec: PartitionSpec | None,
        is_partial: bool,
        matrix: nn.Matrix | None,
        is_wide: bool,
    ) -> Leaf:
        if spec is None:
            return Leaf(None, None, (), "")
        state_spec = state_spec if nn.is_trainable(x) else spec  # An array that is not trained has no state.
        gradient_axes = axes + (TENSOR,) * is_partial
        dtype = gather_dtype = "" if jnp.issubdtype(x.dtype, jax.dtypes.extended) else str(x.dtype)
        if matrix is not None and not is_wide:
            gather_dtype = narrower_dtype(model.compute_dtype, dtype) if matrix.table else model.compute_dtype
            dtype = dtype if matrix.table else gather_dtype
        partial = tuple(axis for axis in gradient_axes if axis not in axes_of(spec))
        return Leaf(spec, state_spec, partial, dtype, gather_dtype)

    arrays, *spec_columns = jax.tree.leaves(model), *map(structure.flatten_up_to, (specs, state_specs))
    rows = zip(arrays, *spec_columns, partial_flags, matrices, wide_flags, strict=True)
    return jax.tree.unflatten(structure, [leaf_of(*row) for row in rows])


def narrower_dtype(compute_dtype: str, dtype: str) -> str:
    """Return the compute dtype if it has fewer bytes than a parameter's dtype, else the parameter's dtype."""
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(compute_dtype).itemsize < jnp.dtype(dtype).itemsize
    return compute_dtype if is_narrower else dtype


def _is_used_before_cast(model: nn.LanguageModel) -> PyTree:
    """Flag arrays that are used, and must be gathered, in their own dtype, before a cast to the compute dtype.

    Routers compute in float32. Position vectors are added, and token vectors scaled, before the cast.
    """

    def is_wide(node: object) -> bool:
        if isinstance(node, nn.EmbeddingTable):
            return node.has_transform
        return isinstance(node, nn.Router | nn.PositionEmbedding | eqx.nn.Embedding)

    return jax.tree.map(lambda node: _flag_all(node, is_wide(node)), model, is_leaf=is_wide)


def _has_partial_gradient(model: nn.LanguageModel, stream: ResidualStream | None) -> PyTree:
    """Flag arrays that are replicated over `tensor` and used with split activations, so their gradients are partial.

    With a replicated stream, these are the arrays in mixers, feed-forward layers and experts (except for biases that
    are added after the reduction) and the tables at the ends of the model, because each device uses a part of each
    table. For an array of a user-defined layer that has a dim `embed`, or whose dims have no names, the flag is
    False: JAX's varying types decide where the gradient of such an array is summed.
    """
    if stream is None or not stream.is_whole:
        return _flag_all(model, stream is not None)

    layers = (nn.Mixer, nn.FeedForward, nn.Experts, nn.ScoreBias)

    def flag_layer(node: PyTree) -> PyTree:
        is_partial = isinstance(node, layers) and (is_split(node) or not isinstance(node, nn.FeedForward))
        flags = _flag_all(node, is_partial)
        if not is_split(node):
            return flags
        flags = jax.tree.map(operator.and_, flags, _names_split_dims(node))
        flags = eqx.tree_at(token_maps, flags, _flag_all(token_maps(flags), False))
        return eqx.tree_at(_output_biases, flags, [False] * len(_output_biases(flags)))

    flags = jax.tree.map(flag_layer, model, is_leaf=lambda node: isinstance(node, layers))
    return eqx.tree_at(_vocabulary_tables, flags, _flag_all(_vocabulary_tables(model), True))


def _output_biases(layer: PyTree) -> list[PyTree]:
    """Return the biases of the maps back into the stream."""
    return [linear.bias for linear in stream_maps(layer, "outputs") if linear.bias is not None]


def _vocabulary_tables(model: nn.LanguageModel) -> list[PyTree]:
    """Return the tables at the ends of a model, and of its encoder: each device uses a part of them."""
    encoder = model.parts.encoder
    source_embedding = None if encoder is None else encoder.embedding
    tables = [embedding.weight for embedding in (model.embedding, source_embedding) if embedding is not None]
    return [*tables, *logits_parts(model)]


def _names_split_dims(layer: PyTree) -> PyTree:
    """Flag all arrays of linear maps, and other arrays whose dims have names, but not the name `embed`."""

    def flag(node: PyTree, names: PyTree) -> PyTree:
        return _flag_all(node, True) if nn.is_map(node) else bool(names) and "embed" not in names

    return jax.tree.map(flag, layer, nn.field_dim_names(layer), is_leaf=nn.is_map)


def _flag_all(tree: PyTree, value: bool) -> PyTree:
    return jax.tree.map(lambda _: value, tree)
