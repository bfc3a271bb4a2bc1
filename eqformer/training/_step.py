"""One training step: gradients over microbatches, exact clipping, and steps skipped where numbers are not finite."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key, PyTree

from .._array_checks import checked
from .._shapes import Batch
from ..kernels import cpu_or
from ..parallel import grad_proxy, has_wider_grad, route_gradient, vary, varying_axes
from ._gradient_norms import module_gradient_norms
from ._loss_result import sum_and_count
from ._loss_scale import loss_scale, LossScale, Scale, seed, unscaled
from ._optimizer import check_optimizer, divided, global_norm, Optimizer, trainable, Trained
from ._rates import Rates
from ._rebalance import rebalanced
from ._tally import count_of, routing_metrics, Tally


LossFn = Callable[..., Any]  # (model, batch, key) -> (sum, count or Tally)
Gradients = Callable[..., Any]  # (model, batch, key, scale or None) -> (sum, count or Tally, gradients of sum)
GradientsOf = Callable[..., Gradients]  # (loss_fn, trained) -> gradients


class TrainState(eqx.Module):
    """All that a step changes: the model, the optimizer's state, and the counts of steps taken and skipped."""

    model: PyTree
    """The model."""
    optimizer_state: PyTree
    """The optimizer's state."""
    step: Int[Array, ""]
    """The steps taken."""
    skipped: Int[Array, ""]
    """The steps skipped."""
    skipped_in_a_row: Int[Array, ""]
    """Those since the last that was not."""
    loss_scale: LossScale | None = None
    """None except for models in float16."""
    empty_batches: Int[Array, ""] | None = None
    """The batches without any weight, which change nothing; None: they are not counted."""


def init_state(model: PyTree, optimizer: Optimizer) -> TrainState:
    """The state before step 0. A step donates the state it is given, so it deletes the arrays of this `model`."""
    check_optimizer(optimizer, "init_state(model, optimizer)")
    *zeros, no_batches = (jnp.zeros((), jnp.int32) for _ in range(4))
    scale = loss_scale(model)
    return _each_its_own_buffer(
        TrainState(model, optimizer.init(model), *zeros, loss_scale=scale, empty_batches=no_batches)
    )


class Step(eqx.Module):
    """A jitted step, `(state, batch, key) -> (state, metrics)`; made by `make_step`.

    The numbers of its learning rates are arguments of the compiled program, so that runs of any length share it.
    """

    run: Callable[..., Any]
    rate: Rates
    program: Any = eqx.field(static=True, default=None)
    """JAX's compiled program, of a step that `compiled` made; else None."""

    @checked
    def __call__(
        self, state: TrainState, batch: PyTree, key: Key[Array, ""] | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """Takes one step; `state` is donated. `key` is the run's key: the step folds its own number into it.

        Without a key, layers run as in inference: no dropout, no router noise, no dropped choices of experts.
        """
        if not isinstance(state.step, Tracer) and state.step.is_deleted():
            raise ValueError(
                "step(state, batch, key): the state was given to a step before, which donates it; go on with the state "
                "that this step returned."
            )
        if self.program is None:
            return self.run((batch, key, self.rate), state)
        state, rest = eqx.partition(state, _is_traced)
        state, metrics = self.program(state, eqx.filter((batch, key, self.rate), _is_traced))
        return eqx.combine(state, rest), metrics

    def lower(
        self, state: PyTree, batch: PyTree, key: PyTree = None, *, keep_unused: bool = False
    ) -> jax.stages.Lowered:
        """The step lowered for arguments like these, or for their shapes; its first argument is the state's arrays."""
        state, rest = eqx.partition(state, _is_traced)
        given, others = eqx.partition((batch, key, self.rate), _is_traced)

        def run(state: PyTree, given: PyTree) -> tuple[PyTree, Any]:
            state, metrics = self.run(eqx.combine(given, others), eqx.combine(state, rest))
            return eqx.filter(state, _is_traced), metrics

        return jax.jit(run, donate_argnums=0, keep_unused=keep_unused).lower(state, given)

    def compiled(self, state: PyTree, batch: PyTree, key: PyTree = None) -> "Step":
        """The step compiled for arguments like these, or for their shapes, and no others; itself, if it is compiled."""
        return self if self.program else Step(self.run, self.rate, self.lower(state, batch, key).compile())


def make_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    microbatches: int = 1,
    clip: float | None = 1.0,
    balance_rate: float = 0.0,
    gradient_norms: bool = False,
    gradients_of: GradientsOf | None = None,
    place: Callable[[TrainState], TrainState] = lambda state: state,
    near: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda memory, gradients: (memory, gradients),
    as_read: Callable[[PyTree, PyTree], PyTree] = lambda aux, model: aux,
) -> Step:
    """A jitted step that minimises `sum / count` of `loss_fn(model, batch, key) -> (sum, count)`.

    It trains the parameters that `optimizer.trained` picks, and computes no other gradients. The gradient is that of
    the sum over all microbatches, divided by the count over all of them, and scaled by `min(1, clip / norm)`. If the
    loss or the norm is not finite, the step is skipped: the model and the optimizer's state are returned unchanged, bit
    for bit. A batch whose weights are all 0 changes nothing either; it is counted by itself and ends no run.

    Metrics: `loss` (per token, before the update), `count`, `grad_norm` (before clipping), `learning_rate`, `skipped`
    and `empty_batches` (so far), `skipped_in_a_row`, those of `routing_metrics` and, in float16, the step's
    `loss_scale`, see `LossScale`. The state is donated. The last four arguments are for meshes.

    Args:
        loss_fn: `loss_fn(model, batch, key) -> (sum, count)`, whose quotient is minimised.
        optimizer: What the gradients do to the model, and which parameters are trained.
        microbatches: How many microbatches a batch is cut into, one after another; their gradients are summed.
        clip: The norm to which gradients are clipped; None: they are not.
        balance_rate: The step size of the routers' selection biases, see `rebalanced`.
        gradient_norms: Whether metrics have the norm of each module's gradient too, see `module_gradient_norms`.
        gradients_of: Computes the gradients of a batch, `gradients_of(loss_fn, trained)`, and cuts it as it likes.
        place: Constrains the sharding of the new state.
        near: Brings the optimizer's state to the devices, once the gradients are there, which it returns beside it.
        as_read: Brings the layers' aux from the order in which the state holds them into the model's, for metrics.
    """
    check_optimizer(optimizer, "make_step(loss_fn, optimizer)")
    if microbatches < 1:
        raise ValueError(f"make_step(microbatches={microbatches}): a step has at least one microbatch.")
    if microbatches > 1 and gradients_of is not None:
        raise ValueError(
            f"make_step(microbatches={microbatches}, gradients_of=...): gradients_of cuts the batch itself; give their "
            "number to it (a plan has microbatches of its own), and leave it out here."
        )
    if clip is not None and not clip > 0:
        raise ValueError(f"make_step(clip={clip}): the largest norm is positive; pass None for no clipping.")
    if gradients_of is None:
        of_batch = accumulated_gradients(loss_fn, microbatches, optimizer.trained)
    else:
        of_batch = gradients_of(loss_fn, optimizer.trained)

    @eqx.filter_jit(donate="all-except-first")
    def run(data: tuple[PyTree, Any, Rates], state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        batch, key, rate = data
        key = None if key is None else jax.random.fold_in(key, state.step)
        held = state.loss_scale
        total, tally, gradients = of_batch(state.model, batch, key, None if held is None else held.value)
        count = count_of(tally)
        loss, norm = total / count.astype(total.dtype), global_norm(gradients)
        norm = norm / count.astype(norm.dtype)
        clipping = 1.0 if clip is None else jnp.where(norm > clip, clip / norm, jnp.ones_like(norm))
        scale = clipping / count.astype(norm.dtype)
        learning_rate = jnp.asarray(rate(state.step), jnp.float32)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        memory, gradients = near(state.optimizer_state, gradients)

        def take(parameters: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
            scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)
            parameters, memory = optimizer.update(scaled, memory, parameters, learning_rate)
            aux = tally.aux if balance_rate and isinstance(tally, Tally) else ()
            return (rebalanced(parameters, aux, balance_rate) if aux else parameters), memory

        parameters, rest = divided(state.model, optimizer.trained)
        memory, memory_rest = eqx.partition(memory, eqx.is_array)
        update = lambda p, m: _arrays_of(take(p, eqx.combine(m, memory_rest)))
        with jax.named_scope("optimizer"):
            parameters, memory = updated_if(is_finite, update, parameters, memory)
        is_empty = count == 0  # loss and norm are then 0 / 0
        is_skipped = (~is_finite & ~is_empty).astype(jnp.int32)
        in_a_row = jnp.where(is_empty, state.skipped_in_a_row, (state.skipped_in_a_row + 1) * is_skipped)
        scale_after = None if held is None else held.after(jnp.isfinite(norm))
        scale_after = jax.tree.map(functools.partial(jnp.where, is_empty), held, scale_after)
        empty_batches = None if state.empty_batches is None else state.empty_batches + is_empty.astype(jnp.int32)
        state = TrainState(
            eqx.combine(parameters, rest),
            eqx.combine(memory, memory_rest),
            state.step + 1,
            state.skipped + is_skipped,
            in_a_row,
            scale_after,
            empty_batches,
        )
        state = place(state)
        metrics = {"loss": loss, "count": count, "grad_norm": norm, "learning_rate": learning_rate}
        tally = Tally(count, as_read(tally.aux, state.model)) if isinstance(tally, Tally) else tally
        metrics |= routing_metrics(tally) | ({} if held is None else {"loss_scale": held.value + 0})
        if gradient_norms:
            norms = module_gradient_norms(gradients)
            metrics |= {f"grad_norm/{name}": x / count.astype(x.dtype) for name, x in norms.items()}
        # `+ 0` copies, since the next step donates the state's own counters.
        metrics |= {} if state.empty_batches is None else {"empty_batches": state.empty_batches + 0}
        return state, metrics | {"skipped": state.skipped + 0, "skipped_in_a_row": state.skipped_in_a_row + 0}

    return Step(run, optimizer.rate)


def updated_if(is_meant: Bool[Array, ""], update: Callable[..., Any], *state: PyTree) -> Any:
    """`update(*state)`, of the same shapes as the state, where it is meant; else the state as it is, bit for bit.

    On accelerators each array is chosen by itself, in its own place: compilers for GPUs give a branch's results places
    of their own, so that parameters and optimizer state were there twice. On CPUs a branch is four times as fast, as
    choices keep XLA from fusing the update into one pass.
    """

    def branch(is_meant: Array, *state: PyTree) -> Any:
        return jax.lax.cond(is_meant, update, lambda *state: state, *state)

    def choices(is_meant: Array, *state: PyTree) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(is_meant, new, old), update(*state), state)

    return cpu_or(branch, choices, is_meant, *state)


def accumulated_gradients(loss_fn: LossFn, microbatches: int = 1, trained: Trained = trainable) -> Callable[..., Any]:
    """`(model, batch, key, scale=None) -> (sum, count, gradients of sum)`, by a scan over `microbatches`.

    There are gradients of the parameters that `trained` picks, and None in the place of all else.

    Microbatch `i` holds rows `i`, `i + microbatches`, ..., so that rows which are split over devices stay on theirs; of
    a `Batch` with groups of rows, it holds groups. All microbatches get the same key: random numbers depend on the
    example, so the result is that of the whole batch.
    Gradients and their sums are float32 at least, whatever the parameters' dtype. A loss over the whole batch
    (`LoadBalance(per="batch")`) is computed for each microbatch. `scale` is a `LossScale`'s value.
    """

    def of_batch(model: PyTree, batch: PyTree, key: PyTree, scale: Scale = None) -> tuple[Array, PyTree, PyTree]:
        moving, rest = divided(model, trained)
        proxies = jax.tree.map(lambda x: grad_proxy(x) if has_wider_grad(x) else x, moving)

        def loss(proxies: PyTree, batch: PyTree) -> tuple[Array, PyTree]:
            values = jax.tree.map(
                lambda x, proxy: route_gradient(x, proxy) if has_wider_grad(x) else proxy, moving, proxies
            )
            total, tally = sum_and_count(loss_fn(eqx.combine(values, rest), batch, key), loss_fn)
            return total * seed(scale, batch), (total, tally)

        def with_gradients(proxies: PyTree, batch: PyTree) -> tuple[Array, PyTree, PyTree]:
            gradients, (total, tally) = eqx.filter_grad(loss, has_aux=True)(proxies, batch)
            return total, tally, unscaled(gradients, seed(scale, batch))

        if microbatches == 1:
            return with_gradients(proxies, batch)
        pieces = in_microbatches(batch, microbatches)
        start = jax.tree.map(jnp.zeros_like, proxies)

        def add(sums: tuple, piece: PyTree) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, sums, with_gradients(proxies, piece)), None

        first = jax.tree.map(lambda x: x[0], pieces)
        like = eqx.filter_eval_shape(lambda *given: sum_and_count(loss_fn(*given), loss_fn), model, first, key)
        zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), varying_axes(x)), like)
        return jax.lax.scan(add, (zeros[0], zeros[1], start), pieces)[0]

    return of_batch


def in_microbatches(batch: PyTree, number: int) -> PyTree:
    """The batch with a leading dim of microbatches: microbatch `i` holds rows `i`, `i + number`, and so on.

    Of a `Batch` with groups of rows, it holds groups `i`, `i + number`, and so on.
    """
    is_batch = lambda node: isinstance(node, Batch)
    groups = [node.group for node in jax.tree.leaves(batch, is_leaf=is_batch) if is_batch(node)]
    group = math.lcm(*groups)

    def cut(x: Array) -> Array:
        if left := x.shape[0] % (number * group):
            what = "" if group == 1 else f" of whole groups of {group} rows"
            raise ValueError(
                f"make_step(microbatches={number}): the batch of {x.shape[0]} rows must divide into as many "
                f"microbatches{what}, but {left} rows would be left; change one of them."
            )
        grouped = jnp.asarray(x).reshape(-1, number, group, *x.shape[1:]).swapaxes(0, 1)
        return grouped.reshape(number, -1, *x.shape[1:])

    return jax.tree.map(cut, batch)


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _each_its_own_buffer(tree: PyTree) -> PyTree:
    # An array that occurs twice in the tree cannot be donated twice.
    seen: set[int] = set()

    def own(leaf: PyTree) -> PyTree:
        is_first = id(leaf) not in seen
        seen.add(id(leaf))
        return leaf if is_first or not eqx.is_array(leaf) else leaf.copy()

    return jax.tree.map(own, tree)


def _arrays_of(pair: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    return pair[0], eqx.filter(pair[1], eqx.is_array)
