"""The seconds of a step by a roofline: products, memory and links, each at its data sheet's speed."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from .. import kernels, nn, parallel, training
from ..parallel import BATCH_AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, STATE, TENSOR
from ._accelerators import Accelerator, Topology
from ._costs import flops_per_token, fp8_flops_per_token, idle_shares
from ._held_bytes import ON_HOST
from ._sent_bytes import GRADIENTS, Sent, sum_by_cause


KEPT_ON_HOST = "kept on its host"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by cause, none of them measured."""

    products: float
    """Seconds of matrix products at the peak, including those that are recomputed."""
    memory: float
    """Seconds to read and write memory: weights, activations, gradients, the optimizer's state."""
    sent: dict[str, float]
    """Seconds of messages by the axis that they are sent over; `state` for parameters and gradients."""
    hidden: tuple[str, ...]
    """Causes of messages that are sent while products are computed, such as state and the keys and values of a ring."""
    bubble: float
    """Share of the time in which a pipeline stage waits."""
    of_model: float
    """Seconds of the model's own operations at the peak, without recomputation."""
    forward: float = 0.0
    """Seconds of the forward pass' products, which `products` include."""
    offload: float = 0.0
    """Seconds to send residuals to the host during the forward pass, and again to bring them back during the backward
    pass."""
    host_update: float = 0.0
    """Seconds to copy the optimizer's state from the host and back; the update waits for the copies."""
    exposed_state: float = 0.0
    """Seconds of `state` messages during which nothing else runs: those of gradients on TPUs."""

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds of products and memory, of messages by the axis that they are sent over, and of the host's link."""
        host = {KEPT_ON_HOST: 2 * self.offload, ON_HOST: self.host_update}
        used = {cause: seconds for cause, seconds in host.items() if seconds}
        return {"products": self.products, "memory": self.memory, **self.sent, **used}

    @property
    def seconds(self) -> float:
        """Seconds of a step: the slowest of all work that runs at once, then messages that run alone, and the bubble.

        A pass takes at least as long as its copies to the host or from it.
        """
        beside = sum(size for cause, size in self.sent.items() if cause in self.hidden) - self.exposed_state
        alone = sum(size for cause, size in self.sent.items() if cause not in self.hidden) + self.exposed_state
        waits = max(0.0, self.offload - self.forward) + max(0.0, self.offload - (self.products - self.forward))
        return (max(self.products + waits, self.memory, beside) + alone + self.host_update) / (1 - self.bubble)

    @property
    def utilization(self) -> float:
        """The model's own operations as a share of those that the devices could do (MFU)."""
        return self.of_model / self.seconds

    @property
    def bound(self) -> str:
        """The cause that takes longest: `products`, `memory`, an axis, or a link to the host."""
        seconds = self.by_cause
        return max(seconds, key=seconds.__getitem__)


def roofline(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    sent: Iterable[Sent],
    topology: Topology,
    *,
    rows: int,
    seq: int,
    trained: training.Trained | None = None,
    kept_bytes: float = 0.0,
    moment_bytes: float = 0.0,
) -> Roofline:
    """Return the seconds of a training step whose devices send the bytes of `sent`.

    Products run at the peak of the compute dtype, those of 8 bits at that of fp8, and each link at its data sheet's
    speed. Memory traffic is that of linear maps and of the optimizer's update alone, so the result is close to a lower
    bound. TPUs wait for gradients, as their programs do (docs/accelerators-memory.md), and for nothing else of state.
    Raises a `ValueError` if the mesh has another number of devices than the topology.

    Args:
        plan: How the model is laid out.
        model: The model, which may be of shapes.
        sent: The bytes that a device sends, by cause.
        topology: The accelerators and their links.
        rows: Rows of a batch.
        seq: The tokens of a row.
        trained: Picks the parameters that have gradients; None: all.
        kept_bytes: Bytes of residuals that a device sends to its host in forward passes and brings back in backward
            passes.
        moment_bytes: Bytes of the optimizer's state that an update brings from the host, and takes back.
    """
    accelerator, speeds = topology.accelerator, topology.speeds(plan.mesh)
    tokens = rows * seq / plan.mesh.size
    peak, fp8_peak = accelerator.peak(str(jnp.dtype(model.compute_dtype))), accelerator.peak("float8_e4m3fn")

    def product_seconds(*, backward: bool) -> float:
        has_fp8_experts = kernels.has_fp8_grouped_matmul(accelerator.name)
        fp8 = fp8_flops_per_token(model, backward=backward, trained=trained, experts=has_fp8_experts)
        products = flops_per_token(model, seq, backward=backward, trained=trained)
        return (products - fp8) * tokens / peak + fp8 * tokens / fp8_peak

    of_model, forward = product_seconds(backward=True), product_seconds(backward=False)
    # Reruns of forward products in a backward pass; the `remat` of the first stack stands for that of all stacks.
    forward_reruns = plan.reruns_stages + (model.stacks[0].remat in ("full", "full_on_host", "dots_no_batch"))
    bubble = parallel.simulate(plan.timetable()).lock_step.bubble if plan.is_pipelined else 0.0
    sent = list(sent)
    links = {cause: size / link_speed(cause, plan, speeds) for cause, size in sum_by_cause(sent).items()}
    gradients = sum(size for cause, label, size in sent if cause == STATE and label.startswith(GRADIENTS))
    waits = gradients and accelerator.platform == "tpu"
    hidden = [STATE]
    if plan.context_method == "ring":
        hidden.append(CONTEXT)
    if plan.overlap != "none":
        hidden.append(TENSOR)
    # Copies of residuals to the host run beside products too; `Roofline.seconds` adds what a pass waits for them.
    hidden.append(KEPT_ON_HOST)
    return Roofline(
        of_model + forward_reruns * forward,
        _memory_seconds(plan, model, tokens, accelerator),
        links,
        tuple(hidden),
        bubble,
        of_model,
        forward,
        kept_bytes / accelerator.host,
        2 * moment_bytes / accelerator.host,
        gradients / link_speed(STATE, plan, speeds) if waits else 0.0,
    )


def link_speed(cause: str, plan: parallel.Plan, speeds: dict[str, float]) -> float:
    """Return the speed of the axis that a cause sends over.

    State goes over `fsdp` if that axis has more than one device and `replica` has one. Otherwise it is taken to go over
    the slowest of `fsdp`, the axes of the batch, `context` and `pipe`, among those with more than one device.
    """
    if cause != STATE:
        return speeds[cause]
    axes = [axis for axis in (FSDP, *BATCH_AXES, CONTEXT, PIPE) if plan.size(axis) > 1]
    return speeds[FSDP] if plan.size(FSDP) > 1 and plan.size(REPLICA) == 1 else min(speeds[axis] for axis in axes)


def _memory_seconds(plan: parallel.Plan, model: nn.LanguageModel, tokens: float, accelerator: Accelerator) -> float:
    """Return the seconds in which memory is read and written.

    Each map reads its input and weight and writes its output, in a forward and two backward products; the optimizer
    passes over the state.
    """
    width, idle = jnp.dtype(model.compute_dtype).itemsize, idle_shares(model)
    weights = activations = 0.0  # numbers of weights, and of inputs and outputs a token
    for linear in nn.linear_maps(model):
        # Each microbatch reads the whole weight in each pass; only the axes that split its products divide it.
        is_expert = id(linear) in idle
        split = plan.size(TENSOR) * plan.size(PIPE) * (plan.size(EXPERT) if is_expert else 1)
        weights += math.prod(linear.shape) / split * plan.microbatches
        # A token goes through the map of each layer and, if it is an expert's, of the experts that the token takes.
        stacked_maps = math.prod(linear.shape[: len(linear.shape) - len(linear.sizes)])
        maps_per_token = stacked_maps * (1 - idle.get(id(linear), 0.0))
        outputs = math.prod(linear.output_shape)
        inputs = math.prod(linear.sizes.values()) / outputs
        activations += maps_per_token * (outputs + inputs)
    split = plan.size(TENSOR) * plan.size(PIPE) * plan.size(EXPERT) * (plan.size(FSDP) if plan.zero else 1)
    parameters = sum(x.size for x in jax.tree.leaves(model) if nn.is_trainable(x)) / split
    # The update reads and writes a weight and two moments, and reads a gradient: 7 numbers of float32.
    return (3 * width * (weights + activations * tokens) + 7 * 4 * parameters) / accelerator.bandwidth
