"""Experts: feed-forward layers of one kind as a vmapped ensemble, which run on slots or on rows sorted by expert.

Rows are sorted by the expert that their tokens chose. If the kernels of grouped products (`kernels.GROUPED_MATMUL`)
support all linear maps of the experts, a kernel computes each map for all rows at once. Otherwise rows are computed in
slots and blocks (`_grouped_blocks.py`).
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ...kernels import Choice, compilers, GROUPED_MATMUL, GroupedMatmul, GroupedMatmulCall, record_choice, varying_zero
from .._contracts import MatmulPrecision
from .._dtype import add_float32, at_least_float32
from .._linear import dense, DenseMap, LinearMap, map_linears
from .._module import ensemble, map_modules, Module, path_name, take_members
from .._precision import Fp8Matmul
from . import _grouped_blocks as grouped_blocks


class Experts(Module):
    """`experts` feed-forward layers, each array with an `experts` dim in front.

    `mlps` may be any module that maps the last dim of an array; `sorted_rows` needs experts whose parameters all
    belong to linear maps. Indexing returns an expert: `experts[2]` is a layer.
    """

    mlps: Callable[[Array], Array] = ensemble("experts")

    def __init__(
        self, make: Callable[[Key[Array, ""]], Callable[[Array], Array]], experts: int, *, key: Key[Array, ""]
    ):
        """Build `make(key)` for `experts` keys, in one trace."""
        if experts < 1:
            raise ValueError(f"Experts(experts={experts}): a mixture has at least one expert.")
        self.mlps = eqx.filter_vmap(make)(jax.random.split(key, experts))

    def __len__(self) -> int:
        return jax.tree.leaves(eqx.filter(self.mlps, eqx.is_array))[0].shape[0]

    def __getitem__(self, index: int) -> Callable[[Array], Array]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"experts[{index}]: there are {len(self)} experts.")
        return take_members(self.mlps, index)

    def slots(self, x: Float[Array, "experts slots embed"]) -> Float[Array, "experts slots embed"]:
        """Run each expert on its slots; all experts have the same number of slots."""
        return eqx.filter_vmap(lambda mlp, x: mlp(x))(self.mlps, x)

    def sorted_rows(
        self,
        x: Float[Array, "rows embed"],
        sizes: Int[Array, "experts"],
        *,
        even_rows: int | None = None,
        max_group_rows: int | None = None,
    ) -> Float[Array, "rows embed"]:
        """Run expert 0 on the first `sizes[0]` rows, expert 1 on the next `sizes[1]`, and so on.

        Rows after the last expert's rows give zeros. `even_rows` is the number of rows of an expert at an even load, by
        default an equal share of all rows. `max_group_rows` is a bound on the rows of an expert, if a bound is known.
        Raises a `ValueError` if a parameter of an expert does not belong to a linear map from one dim to one dim.
        """
        if parameters := self._parameters_outside_maps():
            raise ValueError(
                f"Experts.sorted_rows: an expert's parameters {', '.join(parameters)} belong to no linear map from one "
                "dim to one dim, and only such maps run on rows sorted by expert; dispatch by Capacity, which runs any "
                "module."
            )
        return run_grouped(self.mlps, x, sizes, even_rows=even_rows, max_group_rows=max_group_rows)

    def only_call_maps(self) -> bool:
        """Return whether experts use parameters only by calling linear maps, so that `sorted_rows` can run them."""
        if self._parameters_outside_maps():
            return False
        # The maps are replaced by functions without a weight. Each function returns its input, not an array of the
        # map's output size: under a plan, maps may be slices, and the sizes of consecutive slices need not match.
        without_weights = map_modules(lambda _: _CallOnly(), self.mlps, LinearMap)
        try:
            jax.eval_shape(without_weights, jax.ShapeDtypeStruct((1, 2), jnp.float32))
        except (AttributeError, TypeError):  # The expert reads a map's weight.
            return False
        return True

    def _parameters_outside_maps(self) -> list[str]:
        """Return the paths of parameters that belong to no linear map from one dim to one dim; most experts have
        none."""
        is_matrix = lambda linear: len(linear.inputs) == len(linear.outputs) == 1
        without_maps = map_linears(lambda linear: None if is_matrix(linear) else linear, self.mlps)
        leaves = jax.tree_util.tree_leaves_with_path(without_maps)
        return [path_name(path) for path, leaf in leaves if eqx.is_array(leaf)]


class _CallOnly(eqx.Module):
    """A replacement for a linear map in a trace, which can be called but has no weight to read."""

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows inputs"]:
        return x


def run_grouped(
    modules: PyTree,
    x: Float[Array, "rows inputs"],
    sizes: Int[Array, "groups"],
    *,
    even_rows: int | None = None,
    max_group_rows: int | None = None,
) -> Float[Array, "rows outputs"]:
    """Return `modules[g](x[i])` for each row `i` of group `g`: the first `sizes[0]` rows are of group 0, and so on.

    `modules` is an ensemble over groups. All of its parameters must belong to linear maps from one dim to one dim, and
    a module must map rows one by one. Rows after the last group give zeros.

    If a platform's kernels (`kernels.GROUPED_MATMUL`) support all maps of `modules`, these kernels compute the maps.
    Otherwise each group has as many slots as an even load has rows. The rows in slots are computed together for all
    groups, and the other rows in blocks of one group each, as in MegaBlocks (arXiv:2211.15841). On CPUs, if no gradient
    is taken, slots are used only in float32 or float64, and only for few rows or large weights; all other rows are
    computed in blocks.

    Maps that hold no weight, such as quantized maps, are decoded for groups that have rows, and again in the backward
    pass. The outputs of the maps are kept for the backward pass, which recomputes the rest; there are no second
    derivatives and no forward mode. Weights are cast to the dtype of `x`; sums are float32 at least.

    Args:
        modules: An ensemble over groups.
        x: The rows, sorted by group.
        sizes: The number of rows of each group.
        even_rows: The number of rows of a group with an even load; None: an equal share of all rows, including rows of
            no group.
        max_group_rows: A bound on the rows of a group. Accelerators without kernels for such calls then give each
            group this many slots, and run no blocks.
    """
    arrays, static = eqx.partition(modules, eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    # Inside `shard_map`, the transpose of these additions sums gradients over the mesh axes over which an array does
    # not vary.
    zero = varying_zero((arrays, x, sizes), x.dtype)
    arrays, x = jax.tree.map(functools.partial(_vary_as, zero), (arrays, x))
    return _grouped_function(structure, tuple(leaves), even_rows, max_group_rows, compilers())(
        arrays, x, sizes.astype(jnp.int32)
    )


class _Passes(NamedTuple):
    """The functions by which one platform computes an ensemble on sorted rows."""

    run: Callable[..., Array]
    """Returns the outputs, for programs without gradients."""
    forward: Callable[..., tuple[Array, list[Array]]]
    """Returns the outputs, and the maps' outputs, which the backward pass reads."""
    backward: Callable[..., tuple[PyTree, Array]]
    """Returns the gradients of the parameters and of the rows."""


@functools.lru_cache(maxsize=256)
def _grouped_function(
    structure: Hashable, leaves: tuple, even_rows: int | None, max_group_rows: int | None, platforms: tuple[str, ...]
) -> Callable[[PyTree, Array, Array], Array]:
    """Return the function `run(arrays, x, sizes)` with its gradient.

    Equal modules get the same function, so that eager calls compile only once.
    """
    static = jax.tree.unflatten(structure, leaves)
    partial = functools.partial
    default = _Passes(
        partial(grouped_blocks.run_in_blocks_without_residuals, even_rows=even_rows),
        partial(grouped_blocks.blocks_forward, even_rows=even_rows),
        partial(grouped_blocks.blocks_backward, even_rows=even_rows),
    )
    in_slots = _Passes(
        partial(grouped_blocks.run_in_blocks, even_rows=even_rows, max_group_rows=max_group_rows),
        partial(grouped_blocks.blocks_forward, even_rows=even_rows, max_group_rows=max_group_rows),
        partial(grouped_blocks.blocks_backward, even_rows=even_rows, max_group_rows=max_group_rows),
    )
    without_kernels = {"default": default} | dict.fromkeys(platforms, in_slots)

    @functools.partial(jax.jit, static_argnums=0)
    def run_on_platform(
        name: Literal["run", "forward", "backward"], arrays: PyTree, x: Array, sizes: Array, *residuals: PyTree
    ) -> PyTree:
        supported, args = _kernel_platforms(static, arrays, x, sizes, max_group_rows), (arrays, x, sizes, *residuals)
        passes = without_kernels | {platform: _kernel_passes(platform, max_group_rows) for platform in supported}
        chosen = {platform: getattr(passes[platform], name) for platform in passes}
        if name == "backward":
            chosen = {platform: _differentiate_parts(backward) for platform, backward in chosen.items()}
        return jax.lax.platform_dependent(*args, **{platform: partial(f, static) for platform, f in chosen.items()})

    @jax.custom_vjp
    def run(arrays: PyTree, x: Array, sizes: Array) -> Array:
        return run_on_platform("run", arrays, x, sizes)

    def forward(arrays: PyTree, x: Array, sizes: Array) -> tuple[Array, tuple]:
        results = run_on_platform("forward", arrays, x, sizes)
        y, outputs = jax.tree.map(functools.partial(checkpoint_name, name="product"), results)
        return y, (arrays, x, sizes, (*outputs, y))

    def backward(residuals: tuple, gradient: Array) -> tuple[PyTree, Array, None]:
        return *run_on_platform("backward", *residuals, gradient), None

    run.defvjp(forward, backward)
    return run


def _kernel_platforms(
    static: PyTree, arrays: PyTree, x: Array, sizes: Array, max_group_rows: int | None
) -> tuple[str, ...]:
    """Return the accelerators of this installation whose kernels support all maps of an ensemble."""
    if not compilers():
        return ()
    count, choices = len(x), list[Choice]()

    def note_choice(linear: LinearMap, x: Array) -> Array:
        weight = dense(linear).weight
        matrices, rows = jnp.zeros((len(sizes), *weight.shape), weight.dtype), jnp.zeros((count, x.shape[-1]), x.dtype)
        is_stored = isinstance(linear, DenseMap)
        call = GroupedMatmulCall(
            rows, matrices, sizes, isinstance(linear.products, Fp8Matmul), max_group_rows, is_stored
        )
        choices.append(GROUPED_MATMUL.choose(call))
        return linear(x)

    passes = grouped_blocks.PLAIN_PASSES._replace(forward=note_choice)
    run = lambda arrays, x: grouped_blocks.record_linears(eqx.combine(arrays, static), x, passes)
    jax.eval_shape(run, jax.tree.map(lambda a: a[0], arrays), x[:1])
    supported = [{name for name, _ in choice.by_platform} for choice in choices]
    common = set.intersection(*supported) if supported else set()
    for choice in choices:
        record_choice(choice._replace(by_platform=tuple(pair for pair in choice.by_platform if pair[0] in common)))
    return tuple(name for name in compilers() if name in common)


def _kernel_passes(platform: str, max_group_rows: int | None) -> _Passes:
    """Return the passes by a platform's kernels."""

    def kernel_for(call: GroupedMatmulCall) -> GroupedMatmul:
        kernel = GROUPED_MATMUL.implementation_for(call, platform)
        assert isinstance(kernel, GroupedMatmul), kernel
        return kernel

    return _Passes(
        functools.partial(run_by_kernels, kernel_for=kernel_for, max_group_rows=max_group_rows),
        functools.partial(kernels_forward, kernel_for=kernel_for, max_group_rows=max_group_rows),
        functools.partial(kernels_backward, kernel_for=kernel_for, max_group_rows=max_group_rows),
    )


def _differentiate_parts(backward: Callable[..., tuple[PyTree, Array]]) -> Callable[..., tuple[PyTree, Array]]:
    """Return a backward pass that also differentiates maps without a weight, such as quantized maps.

    It decodes the weights, calls `backward` for their gradients, and turns these into gradients of the arrays from
    which the weights are decoded.
    """

    def run(static: PyTree, arrays: PyTree, *residuals: PyTree) -> tuple[PyTree, Array]:
        differentiable, codes = eqx.partition(arrays, eqx.is_inexact_array)
        split = lambda arrays: eqx.partition(map_linears(dense, eqx.combine(arrays, codes, static)), eqx.is_array)
        weights, pull_back = jax.vjp(lambda arrays: split(arrays)[0], differentiable)
        weight_grads, x_grad = backward(split(differentiable)[1], weights, *residuals)
        return *pull_back(weight_grads), x_grad

    return run


def _vary_as(zero: Array, array: Array) -> Array:
    """Return the array, varying over at least the mesh axes over which `zero` varies."""
    axes, zero_axes = (jax.typeof(x).manual_axis_type.varying for x in (array, zero))
    return array if axes >= zero_axes else array + zero.astype(array.dtype)


# The passes by kernels: a grouped product for each linear map, for all rows at once.

KernelFor = Callable[[GroupedMatmulCall], GroupedMatmul]
"""A function that returns the kernel for a call."""


def run_by_kernels(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    max_group_rows: int | None = None,
) -> Array:
    """Return the rows' outputs, with each map computed by the kernel that `kernel_for` returns."""
    return kernels_forward(static, arrays, x, sizes, kernel_for=kernel_for, max_group_rows=max_group_rows)[0]


def kernels_forward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    *,
    kernel_for: KernelFor,
    max_group_rows: int | None = None,
) -> tuple[Array, list[Array]]:
    """Return the rows' outputs, and the outputs of the modules' linear maps."""
    passes, map_outputs = _kernel_linear_passes(sizes, len(x), kernel_for, max_group_rows), []

    def forward(linear: LinearMap, x: Array) -> Array:
        map_outputs.append(passes.forward(linear, x))
        return map_outputs[-1]

    y, outputs = grouped_blocks.record_linears(eqx.combine(arrays, static), x, passes._replace(forward=forward))
    # After the last group, the output of a map is zero, but the output of an activation may not be zero.
    is_map_output = any(y is output for output in map_outputs)
    return (y if is_map_output else jnp.where(_is_in_group(x, sizes), y, 0)), outputs


def kernels_backward(
    static: PyTree,
    arrays: PyTree,
    x: Array,
    sizes: Array,
    outputs: Sequence[Array],
    gradient: Array,
    *,
    kernel_for: KernelFor,
    max_group_rows: int | None = None,
) -> tuple[PyTree, Array]:
    """Return the gradients of the parameters and of the rows; the last of `outputs` is the modules' output."""
    passes = _kernel_linear_passes(sizes, len(x), kernel_for, max_group_rows)
    replay = lambda arrays, x: grouped_blocks.replay_linears(eqx.combine(arrays, static), x, passes, outputs)
    array_grads, x_grad = jax.vjp(replay, arrays, x)[1](gradient)
    return array_grads, jnp.where(_is_in_group(x, sizes), x_grad, 0)


def _kernel_linear_passes(
    sizes: Array, rows: int, kernel_for: KernelFor, max_group_rows: int | None
) -> grouped_blocks.LinearPasses:
    """Return the passes of a linear map by its kernel, for all groups at once."""
    group_of_row = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)

    def select_kernel(products: MatmulPrecision, x: Array, weight: Array) -> GroupedMatmul:
        return kernel_for(GroupedMatmulCall(x, weight, sizes, isinstance(products, Fp8Matmul), max_group_rows))

    def forward(linear: LinearMap, x: Array) -> Array:
        weight = dense(linear).weight
        y = select_kernel(linear.products, x, weight).forward(x, weight, sizes)
        bias = None if linear.bias is None else jnp.where(_is_in_group(x, sizes), linear.bias[group_of_row], 0)
        return add_float32(y, bias)

    def backward(
        products: MatmulPrecision, parameters: grouped_blocks.Parameters, x: Array, output_grad: Array
    ) -> tuple[grouped_blocks.Parameters, Array]:
        (weight, bias), wide = parameters, at_least_float32(x.dtype)
        kernel, bias_grad = select_kernel(products, x, weight), None
        weight_grad = kernel.weight_grad(output_grad, x, sizes, weight.dtype)
        if bias is not None:
            row_grads = jnp.where(_is_in_group(x, sizes), output_grad, 0)
            bias_grad = jax.ops.segment_sum(row_grads.astype(wide), group_of_row, len(sizes)).astype(bias.dtype)
        return (weight_grad, bias_grad), kernel.input_grad(output_grad, weight, sizes)

    return grouped_blocks.LinearPasses(forward, backward)


def _is_in_group(x: Array, sizes: Array) -> Bool[Array, "rows 1"]:
    return (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[:, None]
