"""The bytes that each device holds under a plan: the state exactly, and a step's temporaries from its trace.

Bytes are listed by cause, such as parameters, optimizer state, or the part of a model that an activation comes from.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .. import kernels, nn, parallel, training
from .._shapes import Batch, is_shape, LabelBatch, PreferenceBatch
from ..program import count_host_bytes, estimate_peak, Program, read_traced
from ._accelerators import for_platform


# Compared with compiled steps, estimates were from 15 % too low to 15 % too high. Estimates of untested families may be
# further off, so an estimate is taken to be at most 25 % too high.
MAX_UNDERESTIMATE, MAX_OVERESTIMATE = 0.15, 0.25
ON_HOST = "optimizer state on its host"
MARGIN = f"margin of the estimate, {MAX_UNDERESTIMATE:.0%}"
"""Cause of the bytes by which a compiled step may need more than its estimate."""
Verdict = Literal["fits", "does not fit", "too close to tell without the compiler"]
"""Whether a step fits into a device's memory."""


class StepBytes(NamedTuple):
    """Bytes that a step holds at its peak."""

    held: dict[str, int]
    """Bytes on a device, by cause."""
    on_host: int
    """Bytes that the model's `remat` keeps in the memory of the device's host until the backward pass."""

    @property
    def total(self) -> int:
        """All bytes on a device, with the margin."""
        return sum(self.held.values())

    @property
    def estimate(self) -> int:
        """All bytes on a device, without the margin."""
        return self.total - self.held.get(MARGIN, 0)


def state_bytes(states: training.PlannedState) -> dict[str, tuple[int, int]]:
    """Return the bytes of parameters, gradients and optimizer state, each on one device and on all devices together.

    Optimizer state that a plan keeps in the memory of a device's host is listed separately, under `ON_HOST`.
    """
    plan = states.plan
    shapes = states.sharded_shapes()
    gradients = jax.tree.map(_gradient_shape, states.optimizer.trained(shapes.model))
    # Gradients are reduce-scattered as soon as they are computed, or kept whole until the end of the backward pass.
    is_split = plan.zero == 3 or plan.scatters_layers
    gradient_specs = plan.state_specs(gradients) if is_split else plan.parameter_specs(gradients)
    optimizer_state, _ = eqx.partition(shapes.optimizer_state, is_shape)
    on_host, on_device = eqx.partition(optimizer_state, training.is_on_host(plan, states.optimizer, optimizer_state))
    sizes = {
        "parameters": placed_bytes(_place_shapes(shapes.model, plan.parameter_specs(shapes.model), plan)),
        "gradients": placed_bytes(_place_shapes(gradients, gradient_specs, plan)),
        "optimizer state": placed_bytes(on_device),
    }
    return sizes | ({ON_HOST: placed_bytes(on_host)} if jax.tree.leaves(on_host) else {})


def _gradient_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, nn.at_least_float32(x.dtype))


def updated_bytes(states: training.PlannedState, on_host: int) -> int:
    """Return the bytes that an update needs on a device for copies of the optimizer's moments.

    Moments on the host (`on_host` bytes) are copied to the device. If moments are stored in 8 bits, the copies are
    float32 values of all moments, because compilers compute all new values before they search for the largest value of
    each row.
    """
    leaves = jax.tree.leaves(states.sharded_shapes().optimizer_state)
    codes = [leaf for leaf in leaves if is_shape(leaf) and leaf.dtype == jnp.uint8]
    return 4 * placed_bytes(codes)[0] if codes else on_host


def step_bytes(
    states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str = "cuda"
) -> StepBytes:
    """Return an upper bound of the bytes that a device holds at the peak of a step, by cause.

    The bytes of the state are exact. The estimate adds the temporaries of the loss and its gradients
    (`temporary_bytes`) or, if these are more bytes, the gradients and the copies of moments during the update
    (`updated_bytes`). The estimate may be 15 % lower than the bytes of the compiled step, so a margin is added as a
    separate cause.

    Args:
        states: The state under the plan in question.
        model: The model, or its shapes.
        batch: The shapes of a step's batch.
        platform: The compiler's platform, `cuda` or `tpu`.
    """
    state = {name: size for name, (size, _) in state_bytes(states).items()}
    updated = updated_bytes(states, state.pop(ON_HOST, 0))
    update = {"gradients": state.pop("gradients"), "moments in an update": updated}
    temporary = temporary_bytes(states, model, batch, platform)
    estimate = state | temporary.held
    # An update without copies of moments needs only the gradients, which the temporaries contain.
    if updated and sum(update.values()) > sum(temporary.held.values()):
        estimate = state | update
    margin = math.ceil(sum(estimate.values()) * MAX_UNDERESTIMATE / (1 - MAX_UNDERESTIMATE))
    return temporary._replace(held=estimate | {MARGIN: margin})


def temporary_bytes(states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str) -> StepBytes:
    """Estimate the bytes that a device needs beside parameters and optimizer state at the peak of a step, by cause.

    The loss and its gradients are traced for one device of the `platform`, and `estimate_peak` walks through the trace.
    """
    programs = trace_gradients(states, model, batch, platform)
    peaks = [estimate_peak(program) for program in programs]
    by_cause = max(peaks, key=lambda peak: peak.size).by_cause if peaks else {}
    return StepBytes(by_cause, max(map(count_host_bytes, programs), default=0))


def trace_gradients(
    states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str
) -> tuple[Program, ...]:
    """Return the programs of a loss and its gradients that each device of a platform runs."""
    plan, trained = for_platform(states.plan, platform), states.optimizer.trained
    gradients = training.make_gradient_function(training.next_token_loss, plan, trained=trained)
    arrays, static = eqx.partition(plan.shapes(model), is_shape)

    def run(arrays: PyTree, batch: Batch, key: PRNGKeyArray) -> PyTree:
        return eqx.filter(gradients(eqx.combine(arrays, static), batch, key), eqx.is_array)

    with kernels.traced_for(platform):
        traced = jax.make_jaxpr(run)(arrays, batch, jax.eval_shape(jax.random.key, 0))
    return read_traced(traced.jaxpr, platform)


def activation_bytes(plan: parallel.Plan, model: nn.LanguageModel, *, rows: int, seq: int) -> int:
    """Return a lower bound of the bytes of activations that a device keeps for a backward pass, from shapes alone.

    A layer keeps its input and, without full rematerialisation, the outputs of all linear maps that do not write to the
    residual stream. Experts, vocabulary tables, losses, and all but one of a pipeline's microbatches are left out.
    """
    if plan.reruns_stages:
        return 0
    microbatches_on_all_devices = math.prod(map(plan.size, parallel.BATCH_AXES)) * plan.microbatches
    tokens = (rows // microbatches_on_all_devices) * (seq // plan.size(parallel.CONTEXT))
    tensor, values_per_token = plan.size(parallel.TENSOR), 0.0
    experts = {id(linear) for moe in nn.modules(model, nn.ExpertMixture) for linear in nn.linear_maps(moe.experts)}
    for stack in model.stacks:
        if stack.remat.endswith("_on_host"):
            continue
        is_whole = plan.stream is None or plan.stream.is_whole
        values_per_token += len(stack) * model.streams * model.stream_channels / (1 if is_whole else tensor)
        # With LoRA, the sum of a map and its LoRA may be stored instead of both outputs.
        if stack.remat == "full" or nn.modules(stack, nn.LoRA):
            continue
        for linear in nn.linear_maps(stack):
            if id(linear) not in experts and linear.outputs != ("embed",):
                copies = math.prod(linear.shape[: len(linear.shape) - len(linear.sizes)])
                values_per_token += copies * math.prod(linear.output_shape) / tensor
    return int(tokens * values_per_token / plan.size(parallel.PIPE) * jnp.dtype(model.compute_dtype).itemsize)


def batch_shapes(rows: int, seq: int, *, packed: bool = False) -> Batch:
    """Return the shapes of a batch; with `packed`, rows pack documents of 128 tokens, and the batch has positions."""

    def make() -> Batch:
        ids, weights, examples = _make_tokens(rows, seq)
        positions = ids if packed else None
        documents = max(seq // 128, 1) if packed else None
        return Batch(ids, ids, weights, examples, positions, positions, documents=documents)

    return eqx.filter_eval_shape(make)


def text_group_shapes(rows: int, seq: int, *, group: int) -> Batch:
    """Return the shapes of a batch of groups of texts, each text a row, for `training.contrastive_loss`."""

    def make() -> Batch:
        ids, weights, examples = _make_tokens(rows, seq)
        return Batch(ids, ids, weights, examples, ids, ids, group=group, documents=1)

    return eqx.filter_eval_shape(make)


def labelled_text_shapes(rows: int, seq: int) -> LabelBatch:
    """Return the shapes of a batch of texts with one label each, for `training.classification_loss`."""

    def make() -> LabelBatch:
        ids, weights, examples = _make_tokens(rows, seq)
        return LabelBatch(ids, ids, weights, examples, ids, ids, documents=1, labels=examples, types=ids)

    return eqx.filter_eval_shape(make)


def preference_shapes(rows: int, seq: int, *, has_reference: bool, has_labels: bool = False) -> PreferenceBatch:
    """Return the shapes of a batch of pairs or, with `has_labels`, of labelled completions for KTO.

    With `has_reference`, the batch has each row's negative log-likelihood under a reference model, in nats.
    """

    def make() -> PreferenceBatch:
        ids, weights, examples = _make_tokens(rows, seq)
        number_per_row = weights[:, 0]
        labels = number_per_row if has_labels else None
        pairs = PreferenceBatch(ids, ids, weights, examples, ids, ids, group=1 if has_labels else 2, documents=1)
        nats = number_per_row if has_reference else None
        return dataclasses.replace(pairs, reference_nats=nats, labels=labels, baseline=labels)

    return eqx.filter_eval_shape(make)


def _make_tokens(rows: int, seq: int) -> tuple[Array, Array, Array]:
    """Return the ids, the weights and the row numbers of a batch, all zero."""
    return jnp.zeros((rows, seq), jnp.int32), jnp.zeros((rows, seq)), jnp.zeros(rows, jnp.int32)


def _place_shapes(tree: PyTree, specs: PyTree, plan: parallel.Plan) -> PyTree:
    return jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(plan.mesh, spec)),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
    )


def placed_bytes(tree: PyTree) -> tuple[int, int]:
    """Return the bytes of a tree of shapes, on one device and on all devices together.

    A shape without a sharding has no bytes on a device.
    """
    shapes = [leaf for leaf in jax.tree.leaves(tree) if is_shape(leaf)]
    shards = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes if x.sharding is not None]
    return sum(shards), sum(x.size * x.dtype.itemsize for x in shapes)


def judge_formula(bound: int, certain: int, memory: int) -> Verdict:
    """Judge whether a step fits into `memory`.

    Args:
        bound: The estimate of `step_bytes` with its margin, or a decode step's weights and caches.
        certain: The bytes that are needed whatever the compiler does. Compiled steps need more than these bytes, so the
            step counts as fitting only if `certain / (1 - MAX_UNDERESTIMATE)` bytes fit too.
        memory: The bytes that programs may fill.
    """
    if max(certain, bound * (1 - MAX_UNDERESTIMATE) / (1 + MAX_OVERESTIMATE)) > memory:
        return "does not fit"
    is_sure = max(bound, certain / (1 - MAX_UNDERESTIMATE)) <= memory
    return "fits" if is_sure else "too close to tell without the compiler"
