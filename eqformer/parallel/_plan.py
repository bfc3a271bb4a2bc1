"""`Plan`, which runs a plain model over a mesh, and `OnDevice`, the functions that each device runs."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from . import _collectives as send
from ._check_plan import check_model, check_parallel_config, check_rows
from ._fully_sharded import gather, Gathered, grad_proxy, has_wider_grad, route_gradient, scatter, Scattered
from ._global_values import DeviceParts, find_split, join_parts, ON_EACH_DEVICE, Split, stack_devices
from ._layer_tables import split_tables
from ._mesh import AXES, axes_of, AXIS_TYPES, CONTEXT, EXPERT, FSDP, PIPE, TENSOR
from ._placement import Leaf, Placement
from ._shard_map import filter_shard_map, vary, vary_like, varying_axes
from ._sharded_cache import (
    CacheLayout,
    check_replicated_mixers,
    pad_tokens,
    repeat_key_heads,
    round_to_multiple,
    run_on_cache_pieces,
    ShardedCache,
)
from ._vocab_chunks import with_chunked_tables
from ._wrap import Mode, split_mixtures, split_over_context, split_over_tensor
from .pipeline._pipelined_stack import pipelined_rounds, PipelinedStack, skip_padding
from .tensor._vocabulary import SplitVocabulary


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """Functions of one device for a model under a plan; all methods are for use inside `filter_shard_map`."""

    plan: Placement
    leaves: PyTree
    """The plan's `Leaf` of each array (`Placement.leaves`)."""
    shapes: nn.LanguageModel
    """Shapes of the global model."""
    mode: Mode = "train"
    """Whether the model is wrapped for losses or for serving."""
    kv_row_shards: int = 1
    """In serving, the number of devices of `tensor` that share each key head and split its cache by rows."""

    def parameters(self, model: nn.LanguageModel) -> PyTree:
        """Return the arrays that receive gradients: the model's shards, marked so that gradients stay partial sums.

        An array is replaced by a gradient proxy, which is zero, if its gradient has a wider dtype, or is split
        (`zero=2`).
        """

        def parameter_of(leaf: Leaf, x: PyTree) -> PyTree:
            is_split = self.plan.zero == 2 and leaf.fsdp_dim is not None
            if not (is_split or has_wider_grad(x)):
                return vary(x, leaf.partial)
            pieces = [self.plan.size(FSDP) if is_split and i == leaf.fsdp_dim else 1 for i in range(x.ndim)]
            shape = [size // piece for size, piece in zip(x.shape, pieces, strict=True)]
            spec = leaf.state_spec if is_split else leaf.spec
            return vary(jnp.zeros(shape, nn.at_least_float32(x.dtype)), {*leaf.partial, *axes_of(spec)})

        return jax.tree.map(parameter_of, self.leaves, model)

    def wrap(self, parameters: PyTree, model: nn.LanguageModel) -> nn.LanguageModel:
        """Wrap the model for this device, to compute with the values of `model` and send gradients to `parameters`."""
        plan, leaves, shards, in_blocks = self.plan, self.leaves, model, self._combines_in_blocks(model)
        trees = leaves, shards, parameters
        combine_in_stack = self._block_parameter if in_blocks else self._combine
        stacks = [jax.tree.map(combine_in_stack, *stack_trees) for stack_trees in zip(*map(_stacks, trees))]
        trees_without_stacks = [_set_stacks(tree, [(), ()]) for tree in trees]
        model = _set_stacks(jax.tree.map(self._combine, *trees_without_stacks), stacks)
        if plan.splits_tables:
            inputs = model, shards, parameters, leaves, self.shapes, plan.torus_steps
            model = with_chunked_tables(*inputs, has_tiles=plan.platform == "tpu")
        if plan.stream is not None:
            specs = jax.tree.map(lambda leaf: leaf.spec, leaves)
            model = split_over_tensor(model, specs, self.shapes, plan.stream, self.mode, self.kv_row_shards)
        if plan.mesh.size > 1:
            model = split_mixtures(model, plan.expert_method, plan.exchange, plan.stream)
        if plan.size(CONTEXT) > 1:
            model = split_over_context(model, plan.context_method, self.mode)
        if in_blocks:
            stack_triples = zip(*map(_stacks, (model, leaves, shards)))
            model = _set_stacks(model, [tuple(map(self._combine_in_blocks, *triple)) for triple in stack_triples])
        if plan.is_pipelined:
            depths = list(map(len, self.shapes.stacks))
            stacks = skip_padding(model.stacks, depths, plan.timetable().part_of)
            model = eqx.tree_at(lambda m: m.stacks, model, stacks)
        if plan.spreads_edges:  # Every stage computes embedding and loss for its own rows.
            stacks = tuple(PipelinedStack(stack, plan.microbatches, splits_rows=True) for stack in model.stacks)
            model = eqx.tree_at(lambda m: m.stacks, model, stacks)
        return model

    def _combines_in_blocks(self, model: nn.LanguageModel) -> bool:
        """Return whether blocks combine values with gradient proxies inside of each call.

        A pipeline's loop over microbatches sums the gradients of the arrays that its stages receive, in the dtypes of
        these arrays. 16-bit values are therefore combined with their float32 proxies inside the blocks.
        """
        sums_wide_grads = self.plan.spreads_edges and any(map(has_wider_grad, jax.tree.leaves(model.stacks)))
        return self.plan.zero == 3 or self.plan.scatters_layers or sums_wide_grads

    def _combine(self, leaf: Leaf, x: PyTree, parameter: PyTree) -> PyTree:
        """Return the value of an array outside of blocks, and send its gradient to the parameter."""
        steps = self.plan.torus_steps
        if self.plan.zero == 3 and leaf.spec is not None:
            # Gather here, once for all uses: embedding and head may be one array.
            return gather(
                parameter, leaf.fsdp_dim, leaf.gather_dtype, x if has_wider_grad(x) else None, steps, leaf.dtype
            )
        dim = leaf.fsdp_dim if self.plan.zero == 2 else None
        return parameter if dim is None and not has_wider_grad(x) else route_gradient(x, parameter, dim, steps)

    def _block_parameter(self, leaf: Leaf, x: PyTree, parameter: PyTree) -> PyTree:
        """Return the array that receives the gradient of a block's array.

        With `zero=2` in a pipeline, the gradient is reduce-scattered here, once after all microbatches.
        """
        if self.plan.zero != 2 or self.plan.scatters_layers or leaf.fsdp_dim is None:
            return parameter
        value = grad_proxy(x) if has_wider_grad(x) else x
        return route_gradient(value, parameter, leaf.fsdp_dim, self.plan.torus_steps)

    def _combine_in_blocks(self, stack: nn.LayerStack, leaves: nn.LayerStack, shards: nn.LayerStack) -> nn.LayerStack:
        """Wrap a stack's blocks to combine their arrays, which may be gradient proxies, with the values of `shards`."""
        arrays = [leaf for leaf in jax.tree.leaves(leaves.blocks) if leaf.spec is not None]
        is_split = self.plan.zero == 3 or self.plan.scatters_layers
        # The dims of a leaf count the dim `layers`, which a block does not have.
        dims = [leaf.fsdp_dim - 1 if is_split and leaf.fsdp_dim is not None else None for leaf in arrays]

        def value_of(x: Array, parameter: Array, leaf: Leaf) -> Array | None:
            has_proxy = has_wider_grad(x) or (self.plan.scatters_layers and leaf.fsdp_dim is not None)
            # Mark as varying outside of the scan over layers. Inside the scan, the marked weights of each layer would
            # be saved as residuals.
            return vary_like(x, parameter) if has_proxy else None

        stack_arrays = [jax.tree.leaves(eqx.filter(tree.blocks, eqx.is_array)) for tree in (shards, stack)]
        values = tuple(map(value_of, *stack_arrays, arrays))
        if self.plan.zero == 3:
            blocks, table_leaves = split_tables(stack.blocks, leaves.blocks, self.plan.torus_steps)
            # The leaves of two arrays may be equal, so compare them by identity.
            tables, dtypes = {id(leaf) for leaf in table_leaves}, tuple(leaf.dtype for leaf in arrays)
            dims = [None if id(leaf) in tables else dim for leaf, dim in zip(arrays, dims, strict=True)]
            blocks = Gathered(blocks, tuple(dims), dtypes, stack.remat != "none", values, self.plan.torus_steps)
        else:
            blocks = Scattered(stack.blocks, values, tuple(dims), self.plan.torus_steps)
        return eqx.tree_at(lambda s: s.blocks, stack, blocks)

    def wrap_forward(self, model: nn.LanguageModel) -> nn.LanguageModel:
        """Wrap the model for a forward pass without gradients on this device, as a stage if there is a pipeline."""
        wrapped = self.wrap(model, model)
        if not self.plan.is_pipelined or self.plan.spreads_edges:
            return wrapped
        rounds = pipelined_rounds(wrapped.stacks, self.plan.timetable(), self.plan.microbatches)
        return eqx.tree_at(lambda m: m.stacks, wrapped, rounds)

    def reduce(self, gradients: PyTree) -> PyTree:
        """Sum each gradient over the axes on which it is a partial sum, and scatter it if the state is split."""

        def reduce_array(leaf: Leaf, gradient: Array | None) -> Array | None:
            if gradient is None:
                return None
            if self.plan.zero == 1 and leaf.fsdp_dim is not None:
                gradient = scatter(vary(gradient, [FSDP]), leaf.fsdp_dim, self.plan.torus_steps)
            return self.total(gradient, leaf.reduced, "gradients over replica")

        return jax.tree.map(reduce_array, self.leaves, gradients)

    def total(self, x: Array, axes: tuple[str, ...] | None = None, name: str = "loss and token count") -> Array:
        """Return the sum over the devices of some axes, by default of all axes that split tokens."""
        axes = (*self.plan.batch_axes, CONTEXT) if axes is None else axes
        return send.psum(name, vary(x, axes), axes) if axes else x

    def replicate(self, x: Array) -> Array:
        """Mark a value as replicated over `tensor`; all devices of `tensor` have computed the same value."""
        return send.pmax("replicated values", x, TENSOR) if TENSOR in varying_axes(x) else x

    @property
    def vocabulary(self) -> SplitVocabulary | None:
        """Functions of split logits for losses; None if each device holds the logits of all ids."""
        return SplitVocabulary(self.shapes.vocab) if self.plan.size(TENSOR) > 1 else None


def _stacks(model: nn.LanguageModel) -> list[PyTree]:
    """Return the stacks of a model, or of a tree with its structure, and the stacks of its encoder, if it has one."""
    encoder = model.parts.encoder
    return [model.stacks, *([] if encoder is None else [encoder.stacks])]


def _set_stacks(model: nn.LanguageModel, stacks: list[PyTree]) -> nn.LanguageModel:
    """Replace the stacks of a model, and the stacks of its encoder, if it has one."""
    model = eqx.tree_at(lambda m: m.stacks, model, stacks[0])
    has_encoder = model.parts.encoder is not None
    return eqx.tree_at(lambda m: m.parts.encoder.stacks, model, stacks[1]) if has_encoder else model


@dataclasses.dataclass(frozen=True)
class Plan(Placement):
    """A mesh and the fields of a `ParallelConfig`: `Plan(mesh, zero=3, residual="sequence")`.

    The methods take and return global arrays, which are sharded by the plan's specs. Inside of one `filter_shard_map`,
    each device runs the methods of `on_device(model)`.
    """

    def __post_init__(self):
        check_parallel_config(self)

    def check(self, model: nn.LanguageModel, *, rows: int, seq: int, group: int = 1) -> None:
        """Raise a `ValueError`, before anything is compiled, if model, rows or tokens do not fit the mesh.

        Consecutive groups of `group` rows stay on one device.
        """
        check_model(self, model)
        check_rows(self, model, rows, seq, group)

    def on_device(self, model: nn.LanguageModel, mode: Mode = "train", kv_row_shards: int = 1) -> OnDevice:
        """Return the functions of one device for a global model, or for its shapes.

        The model is wrapped for losses in the mode `"train"`, and for generation with caches in the mode `"serve"`. In
        the mode `"serve"`, `kv_row_shards` devices of `tensor` share each key head and split its cache by rows.
        """
        return OnDevice(self, self.leaves(model), eqx.filter_eval_shape(lambda: model), mode, kv_row_shards)

    def run_forward(
        self,
        call: Callable[..., tuple[PyTree, PyTree]],
        model: nn.LanguageModel,
        ids: Int[Array, "batch seq"],
        tokens: nn.Tokens,
        cache: ShardedCache | None,
        inputs: PyTree,
        shapes: PyTree,
        dims: PyTree,
    ) -> tuple[PyTree, ShardedCache | None]:
        """Run a function on all devices; return its results as global arrays, and the new cache.

        Each device calls `call(device_model, ids, tokens, cache, inputs, parts)` with its rows of `ids`. `parts` is a
        `DeviceParts`, which converts between global arrays and the device's parts of them. Without a cache, the model
        is wrapped for training, and a device has its tokens of each row. With a cache, the model is wrapped for
        generation, and a device has all tokens of its rows and its part of the cache.
        Raises a `ValueError` for a model, rows or tokens that do not fit the mesh, and for a device's result that
        cannot be a part of an array with the shape in `shapes`.

        Args:
            call: Function that returns a tree of arrays, such as values inside the model, and the new cache.
            model: The sharded model, without pipeline stages (`without_stages`).
            ids: Ids of all rows.
            tokens: Positions and documents of the ids.
            cache: The result of `init_cache` or of an earlier call; None to run without a cache.
            inputs: Further arrays, replicated on all devices.
            shapes: A tree like the results, with the shapes of the global arrays.
            dims: A tree like the results, with the names of their dims.
        """
        plan = self if cache is None else self.for_serving()
        layout, structure, splits = CacheLayout(plan), jax.tree.structure(shapes), list[Split]()
        if cache is None:
            plan.check(model, rows=ids.shape[0], seq=ids.shape[1])
            device, rows = plan.on_device(model), plan.arrange(ids, tokens)
            arrays, row_specs, cache_specs = None, plan.batch_specs(rows), None
        else:
            nn.check_cached(tokens, cache.arrays)
            plan.check_serving(model, rows=ids.shape[0])
            model = repeat_key_heads(model, plan)
            device, rows = plan.on_device(model, "serve"), (ids, pad_tokens(tokens, ids.shape[0]))
            arrays, row_specs, cache_specs = cache.arrays, PartitionSpec(plan.batch_axes), layout.specs(cache.arrays)

        def per_device(
            model: nn.LanguageModel, rows: tuple[Array, nn.Tokens], inputs: PyTree, cache: PyTree
        ) -> tuple[list[Array], PyTree]:
            call_on_device = lambda *args: call(*args, inputs, DeviceParts(plan))
            model = device.wrap_forward(model)
            if cache is None:
                results, _ = call_on_device(model, *rows, None)
            else:
                results, cache = run_on_cache_pieces(call_on_device, model, plan, rows[0], (), rows[1], cache)
            parts = structure.flatten_up_to(results)
            named = zip(parts, jax.tree.leaves(shapes), jax.tree.leaves(dims), strict=True)
            splits[:] = [find_split(plan, x, shape.shape, names) for x, shape, names in named]
            return [stack_devices(x) for x in parts], cache

        in_specs = plan.parameter_specs(model), row_specs, PartitionSpec(), cache_specs
        run = filter_shard_map(per_device, plan.mesh, in_specs, (ON_EACH_DEVICE, cache_specs))
        stacked, arrays = run(model, rows, inputs, arrays)
        columns = zip(stacked, splits, jax.tree.leaves(shapes), jax.tree.leaves(dims), strict=True)
        values = [join_parts(plan, x, split, shape.shape, names) for x, split, shape, names in columns]
        new_cache = None if cache is None else dataclasses.replace(cache, arrays=arrays)
        return jax.tree.unflatten(structure, values), new_cache

    def init_cache(
        self, model: nn.LanguageModel, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> ShardedCache:
        """Return an empty cache for `run_forward`, for `batch` rows of up to `capacity` tokens.

        The model is sharded, without pipeline stages (`without_stages`). Raises a `ValueError` for rows that the
        devices cannot split.
        """
        plan = self.for_serving()
        plan.check_serving(model, rows=batch)
        capacity = round_to_multiple(capacity, plan.size(CONTEXT))
        cache = ShardedCache(None, batch, capacity, dtype, rollback)
        shapes = cache.one_device_shapes(eqx.filter_eval_shape(repeat_key_heads, model, plan))
        return dataclasses.replace(cache, arrays=CacheLayout(plan).init(shapes))

    def for_serving(self) -> "Plan":
        """Return the plan for generation on the same mesh, with a residual stream that is replicated over `tensor`."""
        zero = 3 if self.zero == 3 else 0
        experts = {"expert_method": self.expert_method, "expert_factor": self.expert_factor}
        return Plan(self.mesh, zero=zero, smallest=self.smallest, **experts)

    def check_serving(self, model: nn.LanguageModel, *, rows: int) -> None:
        """Raise a `ValueError` if a model with caches, or the number of rows, does not fit the mesh."""
        self.check(model, rows=rows, seq=2 * self.size(CONTEXT))
        if self.size(TENSOR) > 1:
            check_replicated_mixers(model)

    def encode(
        self, model: nn.LanguageModel, ids: Int[Array, "batch seq"], tokens: nn.Tokens
    ) -> Float[Array, "batch seq embed"]:
        """Return the hidden vectors of `model.encode` for a sharded model, as a global array in reading order.

        Raises a `ValueError` for a model, rows or tokens that do not fit the mesh.
        """
        # Without a backward pass no activations are saved, so only a pipeline needs microbatches.
        forward_plan = self if self.is_pipelined else dataclasses.replace(self, microbatches=1)
        forward_plan.check(model, rows=ids.shape[0], seq=ids.shape[1])
        device = self.on_device(model)

        def per_device(model: nn.LanguageModel, rows: tuple[Array, nn.Tokens]) -> Array:
            return device.replicate(device.wrap_forward(model).encode(*rows)[0])

        rows = self.arrange(ids, tokens)
        specs = self.parameter_specs(model), self.batch_specs(rows)
        hidden = filter_shard_map(per_device, self.mesh, specs, PartitionSpec(self.batch_axes, CONTEXT))(model, rows)
        return self.to_token_order(hidden)

    def without_stages(self, model: nn.LanguageModel) -> tuple["Plan", nn.LanguageModel]:
        """Return a plan without pipeline stages and microbatches, and the model with its layers in reading order.

        The devices of the axis `pipe` are added to the axis `fsdp` or, in a plan that splits experts, to `expert`. They
        then split rows, and each device has all layers. The order of the devices in the mesh does not change.
        """
        if not self.is_pipelined:
            return dataclasses.replace(self, microbatches=1), model
        if self.devices is None:
            raise ValueError("Plan.without_stages: an abstract mesh has no devices to move; give a mesh of devices.")
        self._check_pipeline_order(model)
        sizes = dict(zip(AXES, self.devices.shape, strict=True)) | {PIPE: 1}
        sizes[EXPERT if self.size(EXPERT) > 1 else FSDP] *= self.size(PIPE)
        mesh = Mesh(self.devices.reshape([*sizes.values()]), AXES, axis_types=AXIS_TYPES)
        plan = dataclasses.replace(self, mesh=mesh, edges="ends", schedule="1f1b", chunks=1, microbatches=1)
        return plan, self.unshard(model)
