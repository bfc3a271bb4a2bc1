"""One training step: gradients, clipping by the global norm, and an update that is skipped if they are not finite."""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Key, PyTree

from .. import nn
from .._annotation_checks import checked
from ..kernels import cpu_or
from ..parallel import Plan
from ._gradients import make_execution
from ._logit_clip import LogitClip
from ._train_state import TrainState
from .losses._loss_aux import loss_count, loss_metrics, LossFn, routing_aux, routing_metrics, with_routing_aux
from .optimizer._learning_rates import Rates
from .optimizer._optimizer import check_optimizer, global_norm, Optimizer, partition_trained


class Step(eqx.Module):
    """A jitted step, `(state, batch, key) -> (state, metrics)`; made by `make_step`.

    The numbers in `rate` are arguments of the compiled program, so runs of any length share one program.
    """

    run: Callable[..., tuple[TrainState, dict[str, Array]]]
    """The jitted function `((batch, key, rate), state) -> (state, metrics)`."""
    rate: Rates
    """The learning rate as a function of the step."""
    program: jax.stages.Compiled | None = eqx.field(static=True, default=None)
    """The compiled program of a step that `compile` returned; None for any other step."""

    @checked
    def __call__(
        self, state: TrainState, batch: PyTree, key: Key[Array, ""] | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """Take one step; `state` is donated. `key` is the run's key: the step folds its own number into it.

        Without a key, layers run as in inference: no dropout, no router noise, no dropped choices of experts.
        """
        if not isinstance(state.step, Tracer) and state.step.is_deleted():
            raise ValueError(
                "step(state, batch, key): an earlier step has already taken this state, and a step donates its state; "
                "pass the state that the earlier step returned."
            )
        if self.program is None:
            return self.run((batch, key, self.rate), state)
        arrays, rebuild_state = _flatten_arrays(state)
        arrays, metrics = self.program(arrays, _flatten_arrays((batch, key, self.rate))[0])
        return rebuild_state(arrays), metrics

    def lower(
        self, state: PyTree, batch: PyTree, key: PyTree = None, *, keep_unused: bool = False
    ) -> jax.stages.Lowered:
        """Lower the step for arguments like these, or their shapes.

        The program's argument 0 is a flat list of the state's arrays. If the argument were a tree of modules, Python
        would flatten the tree in each call, which would slow small steps noticeably.
        """
        arrays, rebuild_state = _flatten_arrays(state)
        data, rebuild_data = _flatten_arrays((batch, key, self.rate))

        def run(arrays: list[Array], data: list[Array]) -> tuple[list[Array], dict[str, Array]]:
            new_state, metrics = self.run(rebuild_data(data), rebuild_state(arrays))
            return _flatten_arrays(new_state)[0], metrics

        return jax.jit(run, donate_argnums=0, keep_unused=keep_unused).lower(arrays, data)

    def compile(self, state: PyTree, batch: PyTree, key: PyTree = None) -> "Step":
        """Return the step compiled for arguments like these, or for their shapes; a compiled step returns itself."""
        return self if self.program else Step(self.run, self.rate, self.lower(state, batch, key).compile())


def make_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    plan: Plan | None = None,
    *,
    microbatches: int = 1,
    clip: float | None = 1.0,
    balance_rate: float = 0.0,
    gradient_norms: bool = False,
    clip_logits: float | None = None,
) -> Step:
    """Make a jitted step that minimizes `sum / count` of `loss_fn(model, batch, key) -> (sum, count)`.

    The step trains the parameters that `optimizer.trained` picks, and computes no other gradients. The gradient of the
    loss's sum over all microbatches is divided by the count over all microbatches, and scaled by `min(1, clip / norm)`.
    If the loss or the norm is not finite, the step is skipped: the model and the optimizer's state are returned
    unchanged, bit for bit. A batch whose weights are all 0 changes nothing either. Such a batch is counted in
    `empty_batches` and not in `skipped`, because many skipped steps stop a run and empty batches should not.

    Under a plan, the step returns the same numbers as on one device. `PlannedState` makes the state, which is sharded
    by `state_shardings`. The loss is called as `make_gradient_function` describes. The state is donated.

    Metrics: `loss` (per token, before the update), `count`, `grad_norm` (before clipping), `learning_rate`, `skipped`
    and `empty_batches` (so far), `skipped_in_a_row`, the metrics that the loss returns, and the `routing_metrics`. With
    `clip_logits`, the step's `largest_logit` is added, and in float16 its `loss_scale` (see `LossScale`).

    Args:
        loss_fn: `loss_fn(model, batch, key) -> (sum, count)`; the step minimizes `sum / count`.
        optimizer: Picks the parameters that are trained, and updates them.
        plan: The mesh, the parallelism of the model and the number of microbatches; None: one device.
        microbatches: The number of microbatches into which a batch is split on one device; they run one after another,
            and their gradients are summed. A plan has its own number of microbatches.
        clip: The largest global norm of the gradients; larger gradients are scaled down to this norm; None: no
            clipping.
        balance_rate: The step size of the routers' selection biases, see `rebalance_routers`.
        gradient_norms: Whether the metrics include the norm of each module's gradient, see `module_gradient_norms`.
        clip_logits: The limit of attention logits: heads with a larger logit in the step's batch get smaller queries
            and keys after the update, see `LogitClip` (MuonClip, arXiv 2507.20534); None: no clipping.
    """
    check_optimizer(optimizer, "make_step(loss_fn, optimizer)")
    if clip is not None and not clip > 0:
        raise ValueError(f"make_step(clip={clip}): the largest norm is positive; pass None for no clipping.")
    logit_clip = LogitClip(clip_logits)
    logit_clip.check_plan(plan)
    loss_fn, trained = logit_clip.with_row_numbers(loss_fn), logit_clip.with_zeros(optimizer.trained)
    execution = make_execution(loss_fn, trained, plan, microbatches)

    @eqx.filter_jit(donate="all-except-first")
    def run(data: tuple[PyTree, PyTree, Rates], state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        batch, key, rate = data
        key = None if key is None else jax.random.fold_in(key, state.step)
        loss_scale, point = state.loss_scale, optimizer.gradient_point(state.model, state.optimizer_state)
        point, batch = logit_clip.watch(point, batch, optimizer.trained, has_loss_scale=loss_scale is not None)
        total, loss_aux, gradients = execution.gradients(
            point, batch, key, None if loss_scale is None else loss_scale.value
        )
        gradients, largest_logits = logit_clip.split(gradients)
        count = loss_count(loss_aux)
        loss, norm = total / count.astype(total.dtype), global_norm(gradients)
        norm = norm / count.astype(norm.dtype)
        clipping = 1.0 if clip is None else jnp.where(norm > clip, clip / norm, jnp.ones_like(norm))
        scale = clipping / count.astype(norm.dtype)
        learning_rate = jnp.asarray(rate(state.step), jnp.float32)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        optimizer_state, gradients = execution.fetch_optimizer_state(optimizer, state.optimizer_state, gradients)

        def update(parameters: PyTree, optimizer_state: PyTree) -> tuple[PyTree, PyTree]:
            scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)
            parameters, optimizer_state = optimizer.update(scaled, optimizer_state, parameters, learning_rate)
            parameters, optimizer_state = logit_clip.clip(parameters, optimizer_state, largest_logits, optimizer)
            aux = routing_aux(loss_aux) if balance_rate else None
            if not aux:
                return parameters, optimizer_state
            rebalance = functools.partial(rebalance_routers, aux=aux, rate=balance_rate)
            return rebalance(parameters), optimizer.map_fast_weights(rebalance, optimizer_state)

        with jax.named_scope("optimizer"):
            model, optimizer_state = _update_if(is_finite, update, state.model, optimizer_state, optimizer)
        is_empty = count == 0  # The loss and the norm are then 0 / 0, which is not finite.
        state = _count_step(state, model, optimizer_state, is_finite, is_empty, norm)
        state = execution.place_state(optimizer, state)

        if (aux := routing_aux(loss_aux)) is not None:
            loss_aux = with_routing_aux(loss_aux, execution.order_aux(aux, state.model))
        metrics = {"loss": loss, "count": count, "grad_norm": norm, "learning_rate": learning_rate}
        for name, (total, weight) in loss_metrics(loss_aux).items():
            metrics[name] = total / jnp.where(weight == 0, 1, weight)
        metrics |= routing_metrics(loss_aux) | ({} if loss_scale is None else {"loss_scale": loss_scale.value + 0})
        metrics |= logit_clip.metrics(largest_logits)
        if gradient_norms:
            norms = module_gradient_norms(gradients)
            metrics |= {f"grad_norm/{name}": x / count.astype(x.dtype) for name, x in norms.items()}
        return state, metrics | _copy_counters(state)

    return Step(run, optimizer.rate)


def _update_if(
    is_finite: Bool[Array, ""],
    update: Callable[..., tuple[PyTree, PyTree]],
    model: PyTree,
    optimizer_state: PyTree,
    optimizer: Optimizer,
) -> tuple[PyTree, PyTree]:
    """Return the model and the optimizer's state, updated if the loss and the gradients are finite."""
    parameters, untrained = partition_trained(model, optimizer.trained)
    arrays, static = eqx.partition(optimizer_state, eqx.is_array)

    def update_arrays(parameters: PyTree, arrays: PyTree) -> tuple[PyTree, PyTree]:
        parameters, optimizer_state = update(parameters, eqx.combine(arrays, static))
        return parameters, eqx.filter(optimizer_state, eqx.is_array)

    parameters, arrays = update_where(is_finite, update_arrays, parameters, arrays)
    return eqx.combine(parameters, untrained), eqx.combine(arrays, static)


def _count_step(
    state: TrainState,
    model: PyTree,
    optimizer_state: PyTree,
    is_finite: Bool[Array, ""],
    is_empty: Bool[Array, ""],
    norm: Float[Array, ""],
) -> TrainState:
    """Return the state after a step: the new model and optimizer state, the next counters and loss scale."""
    is_skipped = (~is_finite & ~is_empty).astype(jnp.int32)
    skipped_in_a_row = jnp.where(is_empty, state.skipped_in_a_row, (state.skipped_in_a_row + 1) * is_skipped)
    loss_scale = None if state.loss_scale is None else state.loss_scale.advance(jnp.isfinite(norm))
    loss_scale = jax.tree.map(functools.partial(jnp.where, is_empty), state.loss_scale, loss_scale)
    empty_batches = None if state.empty_batches is None else state.empty_batches + is_empty.astype(jnp.int32)
    return TrainState(
        model,
        optimizer_state,
        state.step + 1,
        state.skipped + is_skipped,
        skipped_in_a_row,
        loss_scale,
        empty_batches,
    )


def _copy_counters(state: TrainState) -> dict[str, Array]:
    """Return the state's counters as metrics; `+ 0` copies them, since the next step donates the state's arrays."""
    metrics = {} if state.empty_batches is None else {"empty_batches": state.empty_batches + 0}
    return metrics | {"skipped": state.skipped + 0, "skipped_in_a_row": state.skipped_in_a_row + 0}


def update_where(condition: Bool[Array, ""], update: Callable[..., tuple], *state: PyTree) -> tuple:
    """Return `update(*state)`, which has the state's shapes, if the condition holds; else the state, bit for bit.

    On accelerators, `jnp.where` selects each array in place. A branch (`jax.lax.cond`) would allocate new memory for
    its results on GPUs, so that parameters and optimizer state would exist twice. On CPUs a branch is four times as
    fast as `jnp.where`, which keeps XLA from fusing the update into one pass.
    """

    def branch(condition: Array, *state: PyTree) -> tuple:
        return jax.lax.cond(condition, update, lambda *state: state, *state)

    def select(condition: Array, *state: PyTree) -> tuple:
        return jax.tree.map(functools.partial(jnp.where, condition), update(*state), state)

    return cpu_or(branch, select, condition, *state)


def rebalance_routers(model: PyTree, aux: PyTree, rate: float) -> PyTree:
    """Return the model with its routers' biases moved by `rate` towards an even load.

    Routers without such a bias are unchanged. `aux` is the tree of `Aux` that the model's layers returned for the whole
    batch. For the `selection_bias` of a `TopKRouter`, this is DeepSeek-V3's load balancing without an auxiliary loss
    (arXiv:2408.15664).
    """
    layer_aux = dict(zip(map(id, nn.modules(model, nn.Routed)), nn.aux_of(aux), strict=True))

    def rebalance(layer: nn.Routed) -> nn.Routed:
        return layer.rebalance(layer_aux[id(layer)], rate)

    return nn.map_modules(rebalance, model, nn.Routed)


def module_gradient_norms(gradients: PyTree) -> dict[str, Float[Array, ""]]:
    """Return the norm of each module's gradient, over all its layers, by the module's path.

    The modules are the residual sublayers, such as `stacks[0].blocks.sublayers[0]` with its norms, and the parts
    outside of the stacks: `embedding`, `norm`, `head`. The squares of the norms add up to the square of the whole
    gradient's norm. Under a plan the arrays are global, so each gradient counts once.
    """
    sublayers = [path for path, _ in nn.named_modules(gradients, nn.Residual)]
    leaves_by_module: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = nn.path_name(path)
        enclosing = (sublayer for sublayer in sublayers if name.startswith(f"{sublayer}."))
        module = next(enclosing, nn.path_name(path[: 2 if _is_tuple_element(path) else 1]))
        leaves_by_module.setdefault(module, []).append(leaf)
    return {module: global_norm(leaves) for module, leaves in leaves_by_module.items()}


def _is_tuple_element(path: tuple) -> bool:
    """Return whether a path begins with an element of a tuple that is a field, such as `stacks[0]`."""
    return len(path) > 1 and isinstance(path[1], jax.tree_util.SequenceKey)


def _flatten_arrays(tree: PyTree) -> tuple[list[PyTree], Callable[[Sequence[Array]], PyTree]]:
    """Return a tree's arrays, or their shapes, and a function that puts other arrays into the same tree."""
    leaves, structure = jax.tree.flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if _is_traced(leaf)]

    def unflatten(arrays: Sequence[Array]) -> PyTree:
        replaced = dict(zip(indices, arrays, strict=True))
        return structure.unflatten([replaced.get(index, leaf) for index, leaf in enumerate(leaves)])

    return [leaves[index] for index in indices], unflatten


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
