"""One entry for all transforms: a mesh and choices, and how a plain model is laid out, wrapped and differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from .. import nn
from .._shapes import Batch
from . import _send as send
from ._axes import BATCH_AXES, CONTEXT, EXPERT, FSDP, PIPE, TENSOR
from ._check_plan import check_choices, check_model, check_ring_order, check_rows
from ._vary import vary, vary_like
from ._wrap import split_mixtures, split_over_context, split_over_tensor
from .context._context import context_order
from .layouts._layout import axes_of, Layout, partition_specs
from .layouts._mesh import axis_sizes
from .pipeline._depth import from_rows, in_reading_order, in_ring_order, layer_rows, Rows, taken_rows, to_rows
from .pipeline._padding import pass_over_padding
from .pipeline._pipelined_stack import pipelined_rounds, PipelinedStack
from .pipeline._schedule import Schedule
from .pipeline._schedules import make_schedule
from .state._fully_sharded import Gathered, Scattered
from .state._leaves import Leaf, leaves_of
from .state._stand_ins import gather, is_narrow, routed, scatter, stand_in
from .tensor._feature import FEATURE_DIMS
from .tensor._tensor import HEAD_DIMS
from .tensor._vocabulary import SplitVocabulary


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model runs over a mesh.

    - `zero`: what the axis `fsdp` splits: nothing (0), optimizer memory (1), also gradients (2) or all (3).
    - `residual`, `overlap`: the stream between layers over the axis `tensor`, see `Tensor`, `FeatureLinear`, and how
      its gathers overlap with products.
    - `context_method`: how attention works over rows that the axis `context` splits, see `ContextCore`.
    - `expert_method`, `expert_factor`: how tokens come to experts that the axis `expert` splits, see `SplitMoE`.
    - `schedule`, `microbatches`, `chunks`: the pipeline over the axis `pipe`, see `make_schedule`, which takes a name,
      a function or a table of one's own. `edges`: whether embedding and loss are computed at its `"ends"` or, under
      GPipe, `"spread"` over all stages.
    - `smallest`: arrays of fewer entries are not split over `fsdp`.

    A plan takes and gives global arrays, laid out by its specs; what happens on each device happens inside one
    `filter_shard_map`, where `parameters`, `wrap` and `reduce` do their work.
    """

    mesh: Mesh | AbstractMesh
    zero: int = 0
    residual: str = "replicated"
    overlap: str = "none"
    context_method: str = "ring"
    expert_method: str = "gather"
    expert_factor: float = 2.0
    schedule: str | Callable[[int, int], Schedule] | Schedule = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    edges: str = "ends"
    smallest: int = 1024

    def __post_init__(self):
        check_choices(self)

    def check(self, model: nn.Transformer, *, rows: int, seq: int) -> None:
        """Raise a `ValueError`, before anything is compiled, where model, rows or tokens do not fit the mesh."""
        check_model(self, model)
        check_rows(self, model, rows, seq)

    def size(self, axis: str) -> int:
        """How many devices an axis has."""
        return axis_sizes(self.mesh)[axis]

    def layout(self, *, splits_fsdp: bool) -> Layout:
        """The layout of parameters or, with `splits_fsdp`, of what else is split over the axis `fsdp`."""
        split = FEATURE_DIMS if self.residual == "feature" else HEAD_DIMS
        dims = {"layers": PIPE, "experts": EXPERT, **dict.fromkeys((*split, "vocab"), TENSOR)}
        # Stages may not divide the layers in reading order; in ring order they do.
        lenient, moving = frozenset({"kv_heads", "vocab"}), frozenset({"layers"})
        return Layout(dims, lenient, FSDP if splits_fsdp else None, self.smallest, moving)

    def parameter_specs(self, model: PyTree) -> PyTree:
        """Where the parameters are kept."""
        return partition_specs(model, self.layout(splits_fsdp=self.zero == 3), self.mesh)

    def state_specs(self, model: PyTree) -> PyTree:
        """Where gradients, and what the optimizer remembers of the parameters, are kept."""
        return partition_specs(model, self.layout(splits_fsdp=self.zero >= 1), self.mesh)

    def batch_specs(self, batch: PyTree) -> PyTree:
        """Rows over the axes that split the batch, tokens over `context`."""
        return jax.tree.map(lambda x: PartitionSpec(self.batch_axes, *(CONTEXT,) * (x.ndim > 1)), batch)

    @property
    def is_pipelined(self) -> bool:
        """Whether layers are split over the axis `pipe`."""
        return self.size(PIPE) > 1

    @property
    def scatters_layers(self) -> bool:
        """Whether the gradient of each layer is split as soon as it is made; a pipeline splits them after its last."""
        return self.zero == 2 and not self.is_pipelined

    @property
    def spreads_edges(self) -> bool:
        """Whether embedding and loss are computed by all stages, each for its rows, not by the first and the last."""
        return self.is_pipelined and self.edges == "spread"

    @property
    def runs_schedule(self) -> bool:
        """Whether gradients are made by the schedule's table, embedding and loss at its ends."""
        return self.is_pipelined and not self.spreads_edges

    @property
    def aux_spec(self) -> PartitionSpec:
        """The spec of routed layers' aux: split like the layers that a schedule runs, or else replicated."""
        return PartitionSpec(PIPE) if self.runs_schedule else PartitionSpec()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that rows are split over."""
        return (*BATCH_AXES, PIPE) if self.spreads_edges else BATCH_AXES

    def timetable(self) -> Schedule:
        """What each stage of the pipeline does when."""
        return make_schedule(self.schedule, stages=self.size(PIPE), microbatches=self.microbatches, chunks=self.chunks)

    def to_ring_order(self, tree: PyTree, taken: Callable[..., Any] = taken_rows) -> PyTree:
        """A model, or a tree of such, with its layers in the order in which the ring of stages holds them.

        That is another than reading order where devices hold several parts; and where parts hold unequal numbers of
        layers, it has rows of padding, which are zero and passed over. Such a model trains in ring order and is saved
        in reading order. `taken(x, order)` gives the entries of an array along its first dim in an order, for who
        has another way to move one that is large.
        """
        return in_ring_order(tree, self.timetable().part_of, taken) if self.is_pipelined else tree

    def to_reading_order(self, tree: PyTree, taken: Callable[..., Any] = taken_rows) -> PyTree:
        """What `to_ring_order` gave, with its layers in the order in which the model is read."""
        return in_reading_order(tree, self.timetable().part_of, taken) if self.is_pipelined else tree

    def aux_to_ring_order(self, aux: PyTree, model: nn.Transformer) -> PyTree:
        """Layers' aux in reading order, for each of the model's stacks, brought into ring order."""
        return to_rows(aux, self._rows(model)) if self.runs_schedule else aux

    def aux_to_reading_order(self, aux: PyTree, model: nn.Transformer) -> PyTree:
        """Layers' aux in ring order, for each of the model's stacks, brought into reading order."""
        return from_rows(aux, self._rows(model)) if self.runs_schedule else aux

    def shapes(self, model: nn.Transformer) -> nn.Transformer:
        """The shapes of a model, or of its shapes, as devices hold it: in ring order, whichever order it is in."""
        is_plain = all(len(stack) == stack.depth for stack in model.stacks)
        return eqx.filter_eval_shape(self.to_ring_order if is_plain else lambda model: model, model)

    def _rows(self, model: nn.Transformer) -> list[Rows]:
        return layer_rows([stack.depth for stack in model.stacks], self.timetable().part_of)

    def arrange(self, batch: Batch, tokens: nn.Tokens) -> tuple[Batch, nn.Tokens]:
        """The batch with each row's tokens in the order in which they are split over `context`.

        The lengths of documents, which cannot be computed from a piece of a row, are added to its tokens.
        """
        if self.size(CONTEXT) == 1:
            return batch, tokens
        order = context_order(self.context_method, batch.ids.shape[1], self.size(CONTEXT))
        lengths = jnp.broadcast_to(nn.document_lengths(tokens), batch.ids.shape)
        whole_rows = tokens.whole_rows if np.all(np.diff(order) == 1) else None
        tokens = nn.of_whole_rows(dataclasses.replace(tokens, lengths=lengths), whole_rows)
        return jax.tree.map(lambda x: x if x.ndim == 1 else x[:, order], (batch, tokens))

    def leaves(self, model: nn.Transformer) -> PyTree:
        """A tree like `model`, which is in ring order, with what this plan decides of each array."""
        if self.is_pipelined:
            check_ring_order(self, model, self._rows(model))
        residual = self.residual if self.size(TENSOR) > 1 else None
        axes = *self.batch_axes, CONTEXT
        return leaves_of(model, self.parameter_specs(model), self.state_specs(model), axes, residual)

    # What follows runs inside `filter_shard_map`, on one device's slices; `leaves` is of the whole model.

    def parameters(self, model: nn.Transformer, leaves: PyTree) -> PyTree:
        """What to differentiate: the model's shards, typed so that each device's gradients stay partial sums.

        Arrays whose gradient is wider than they are, or is split (`zero=2`), are replaced by a stand-in of zeros.
        """

        def own(leaf: Leaf, x: Any) -> Any:
            is_split = self.zero == 2 and leaf.fsdp_dim is not None
            if not (is_split or is_narrow(x)):
                return vary(x, leaf.partial)
            shape = [
                size // (self.size(FSDP) if is_split and i == leaf.fsdp_dim else 1) for i, size in enumerate(x.shape)
            ]
            spec = leaf.state_spec if is_split else leaf.spec
            return vary(jnp.zeros(shape, nn.at_least_float32(x.dtype)), {*leaf.partial, *axes_of(spec)})

        return jax.tree.map(own, leaves, model)

    def wrap(self, parameters: PyTree, model: nn.Transformer, leaves: PyTree, shapes: PyTree) -> nn.Transformer:
        """The wrapped model on this device, with the model's values and the gradients going to `parameters`."""
        whole, is_apart = model, self._holds_values_apart(model)
        outside = [eqx.tree_at(lambda m: m.stacks, tree, ()) for tree in (leaves, whole, parameters)]
        in_stacks = self._in_block if is_apart else self._with_value
        stacks = jax.tree.map(in_stacks, leaves.stacks, whole.stacks, parameters.stacks)
        model = eqx.tree_at(lambda m: m.stacks, jax.tree.map(self._with_value, *outside), stacks)
        if self.size(TENSOR) > 1:
            specs = jax.tree.map(lambda leaf: leaf.spec, leaves)
            model = split_over_tensor(model, specs, shapes, self.residual, self.overlap, self.is_pipelined)
        if self.mesh.size > 1:
            residual = self.residual if self.size(TENSOR) > 1 else None
            model = split_mixtures(model, self.expert_method, self.expert_factor, residual)
        if self.size(CONTEXT) > 1:
            model = split_over_context(model, self.context_method, self.is_pipelined)
        if is_apart:
            blocks = tuple(map(self._with_blocks, model.stacks, leaves.stacks, whole.stacks))
            model = eqx.tree_at(lambda m: m.stacks, model, blocks)
        if self.is_pipelined:
            stacks = pass_over_padding(model.stacks, list(map(len, shapes.stacks)), self.timetable().part_of)
            model = eqx.tree_at(lambda m: m.stacks, model, stacks)
        if self.spreads_edges:
            stacks = tuple(PipelinedStack(stack, self.microbatches, splits_rows=True) for stack in model.stacks)
            model = eqx.tree_at(lambda m: m.stacks, model, stacks)
        return model

    def _holds_values_apart(self, model: nn.Transformer) -> bool:
        """Whether blocks of layers are put together from values and stand-ins when they are called.

        A pipeline that loops over microbatches adds up the gradients of what its stages are given.
        """
        is_summed = self.spreads_edges and any(map(is_narrow, jax.tree.leaves(model.stacks)))
        return self.zero == 3 or self.scatters_layers or is_summed

    def _with_value(self, leaf: Leaf, x: Any, parameter: Any) -> Any:
        """An array with its value and the parameter's gradient, outside of blocks that are put together."""
        if self.zero == 3 and leaf.spec is not None:  # once: it is used at both ends, and no backward pass needs it
            return gather(parameter, leaf.fsdp_dim, leaf.dtype, x if is_narrow(x) else None)
        dim = leaf.fsdp_dim if self.zero == 2 else None
        return parameter if dim is None and not is_narrow(x) else routed(x, parameter, dim)

    def _in_block(self, leaf: Leaf, x: Any, parameter: Any) -> Any:
        """What the block differentiates by; a pipeline scatters it after all microbatches."""
        if self.zero != 2 or self.scatters_layers or leaf.fsdp_dim is None:
            return parameter
        return routed(stand_in(x) if is_narrow(x) else x, parameter, leaf.fsdp_dim)

    def _with_blocks(self, stack: nn.Stack, leaves: nn.Stack, whole: nn.Stack) -> nn.Stack:
        """The stack with blocks of what it has and, where these are stand-ins, their values."""
        arrays = [leaf for leaf in jax.tree.leaves(leaves.blocks) if leaf.spec is not None]
        is_split = self.zero == 3 or self.scatters_layers
        # A block has no dim `layers`.
        dims = tuple(leaf.fsdp_dim - 1 if is_split and leaf.fsdp_dim is not None else None for leaf in arrays)

        def value(x: Array, parameter: Array, leaf: Leaf) -> Array | None:
            is_apart = is_narrow(x) or (self.scatters_layers and leaf.fsdp_dim is not None)
            # `pcast` outside of the scan over layers: inside, each layer's weights would be saved.
            return vary_like(x, parameter) if is_apart else None

        arrays_of = lambda stack: jax.tree.leaves(eqx.filter(stack.blocks, eqx.is_array))
        values = tuple(map(value, arrays_of(whole), arrays_of(stack), arrays))
        if self.zero == 3:
            dtypes = tuple(leaf.dtype for leaf in arrays)
            blocks = Gathered(stack.blocks, dims, dtypes, stack.remat != "none", values)
        else:
            blocks = Scattered(stack.blocks, values, dims)
        return eqx.tree_at(lambda s: s.blocks, stack, blocks)

    def wrap_forward(self, model: nn.Transformer, leaves: PyTree, shapes: PyTree) -> nn.Transformer:
        """The model on this device for a pass without gradients, a pipeline's stages included."""
        wrapped = self.wrap(model, model, leaves, shapes)
        if not self.is_pipelined or self.spreads_edges:
            return wrapped
        rounds = pipelined_rounds(wrapped.stacks, self.timetable(), self.microbatches)
        return eqx.tree_at(lambda m: m.stacks, wrapped, rounds)

    def reduce(self, gradients: PyTree, leaves: PyTree) -> PyTree:
        """Each gradient reduced once over the axes on which it is partial, and scattered if the state is split."""

        def one(leaf: Leaf, gradient: Any) -> Any:
            if gradient is None:
                return None
            if self.zero == 1 and leaf.fsdp_dim is not None:
                gradient = scatter(vary(gradient, [FSDP]), leaf.fsdp_dim)
            return self.total(gradient, leaf.reduced, "gradients over replicas")

        return jax.tree.map(one, leaves, gradients)

    def total(self, x: Array, axes: tuple[str, ...] | None = None, name: str = "losses and counts") -> Array:
        """The sum over the devices of some axes, by default all between which tokens are split."""
        axes = (*self.batch_axes, CONTEXT) if axes is None else axes
        return send.psum(name, vary(x, axes), axes) if axes else x

    def vocabulary(self, model: nn.Transformer) -> SplitVocabulary | None:
        """How the loss reads logits of which each device holds a part; None if a device holds all."""
        return SplitVocabulary(model.vocab) if self.size(TENSOR) > 1 else None
