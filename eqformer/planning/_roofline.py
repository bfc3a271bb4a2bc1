"""Seconds of a step by a roofline: operations, memory traffic and messages of a model, at the speeds of data sheets.

Seconds are listed by cause: products (of matrices), memory, and, for messages, the mesh axis or the host's link.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import kernels, nn, parallel, training
from ..nn import ExpertMixture, is_trainable, LanguageModel, linear_maps, LinearMap, Mask, matrices, Mixer, modules
from ..parallel import BATCH_AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, STATE, TENSOR
from ._accelerators import Accelerator, Topology
from ._held_bytes import ON_HOST
from ._sent_bytes import GRADIENTS, Sent, sum_by_cause


_Map = LinearMap | jax.Array | jax.ShapeDtypeStruct


def parameter_count(model: PyTree, *, embeddings: bool = True, active: bool = False) -> int:
    """Return the number of trainable parameters of a model, or of its shapes (`equinox.filter_eval_shape`).

    Without `embeddings`, tables of tokens, positions and logits are left out. With `active`, only as many experts are
    counted as a token takes on average.
    """
    marks = jax.tree.leaves(matrices(model), is_leaf=lambda x: x is None)
    leaves = jax.tree.leaves(model, is_leaf=lambda x: x is None)
    total = 0
    for leaf, mark in zip(leaves, marks, strict=True):
        if is_trainable(leaf) and (embeddings or mark is None or not mark.table):
            total += math.prod(leaf.shape)
    return total - round(sum(_count_idle(moe) for moe in modules(model, ExpertMixture))) if active else total


def flops_per_token(
    model: LanguageModel,
    seq: int,
    *,
    attention: str = "half",
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
    noisy_copies: bool = False,
) -> float:
    """Return the operations per token of a training step over rows of `seq` tokens.

    A multiplication and an addition are two operations. Only products of matrices count: every linear map, scores and
    weighted sums of attention, a recurrence's products with its states, and the logits. The backward pass costs twice
    the forward pass; recomputation is not counted. Only as many experts of a layer are counted as a token chooses, on
    average.

    Args:
        model: The model, or its shapes.
        seq: Tokens of a row.
        attention: `"half"` counts the keys that a mask leaves visible, on average over a row (Megatron's convention for
            causal masks); `"full"` counts all `seq` keys (the convention of PaLM and most published MFU figures).
        backward: Whether to count the backward pass, too.
        trained: A function that picks the parameters that are trained, such as `nn.lora_factors`; None: all. A frozen
            weight has no gradient, so its backward pass costs only as much as its forward pass.
        noisy_copies: Whether each row has also a noisy copy of each of its `seq` tokens (`training.noise_blocks`). A
            token of the text then costs twice as much, because its copy sees as many keys as the token: the copies in
            the same block, and the tokens of earlier blocks.
    """
    if attention not in ("half", "full"):
        raise ValueError(f"flops_per_token(attention={attention!r}): give 'half' (visible keys) or 'full' (all keys).")
    _check_positive("flops_per_token", seq=seq)
    maps = (*linear_maps(model), *([model.embedding.weight] if model.head is None else []))
    forward, weight_gradients = _count_map_flops(model, maps, trained)
    mixing = 0.0
    for mixer in modules(model, Mixer):
        facts, copies = mixer.facts(), _copies(mixer)
        mixing += copies * facts.operations
        if facts.attends is not None:  # a visible key costs two operations for each channel of queries and of values
            keys = seq * (1 + noisy_copies) if attention == "full" else visible_keys(facts.attends.mask, seq)
            channels = (*facts.attends.query, *facts.attends.output)
            mixing += copies * 2 * keys * sum(heads * width for heads, width in channels)
    copies = 2 if noisy_copies else 1
    if not backward:
        return copies * (forward + mixing)
    # The backward pass computes the gradients of inputs, for as many operations as the forward pass, and the gradients
    # of weights. A product in a mixer has two inputs and no weight, so it counts twice.
    return copies * (forward + mixing + ((forward + mixing) + (weight_gradients + mixing)))


def flops_per_row_token(
    model: LanguageModel,
    seq: int,
    *,
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
    noisy_copies: bool = False,
) -> float:
    """Return the operations of a training step divided by the tokens of its rows, noisy copies included.

    Args:
        model: The model, or its shapes.
        seq: Tokens of a row, noisy copies included.
        backward: As in `flops_per_token`.
        trained: As in `flops_per_token`.
        noisy_copies: Whether half of the tokens of each row are noisy copies of the others (`training.noise_blocks`).
    """
    copies = 2 if noisy_copies else 1
    text = seq // copies
    return flops_per_token(model, text, backward=backward, trained=trained, noisy_copies=noisy_copies) / copies


def fp8_flops_per_token(
    model: LanguageModel,
    *,
    backward: bool = True,
    trained: Callable[[PyTree], PyTree] | None = None,
    experts: bool = True,
) -> float:
    """Return the part of `flops_per_token` that multiplies numbers of 8 bits, which some chips do twice as fast.

    Without `experts`, the products of experts are not counted. Some of these chips multiply experts in 16 bits: see
    `kernels.has_fp8_grouped_matmul`.
    """
    maps = [linear for linear in linear_maps(model) if linear.products.operand_bits == 8]
    if not experts:
        expert_maps = idle_shares(model)
        maps = [linear for linear in maps if id(linear) not in expert_maps]
    forward, weight_gradients = _count_map_flops(model, maps, trained)
    return forward + (forward + weight_gradients) if backward else forward


def _count_map_flops(
    model: LanguageModel, maps: Iterable[_Map], trained: Callable[[PyTree], PyTree] | None
) -> tuple[float, float]:
    """Return the operations per token of maps in the forward pass, and of the gradients of their weights.

    The gradients of inputs cost as much as the forward pass.
    """
    trained_ids = {id(x) for x in jax.tree.leaves(model if trained is None else trained(model)) if is_trainable(x)}
    idle, forward, weight_gradients = idle_shares(model), 0.0, 0.0
    for linear in maps:
        size = math.prod(linear.shape)
        operations = 2 * size * (1 - idle.get(id(linear), 0))
        forward += operations
        if any(id(x) in trained_ids and x.size == size for x in jax.tree.leaves(linear)):
            weight_gradients += operations
    return forward, weight_gradients


def visible_keys(mask: Mask, seq: int) -> float:
    """Return the number of keys that a query sees under `mask`, averaged over the positions of a row of `seq` tokens.

    The source of a cross-attention is taken to be as long as the row. Raises a `ValueError` for a row without tokens.
    """
    _check_positive("visible_keys", seq=seq)
    if mask.source:
        return seq + visible_keys(dataclasses.replace(mask, source=False), seq)
    if mask.block is not None:
        blocks, last = divmod(seq, mask.block)  # `last` tokens are in a shorter block at the end
        return (mask.block**2 * blocks * (blocks + 1) / 2 + last * seq) / seq
    if not mask.is_causal:
        return float(seq)
    reach = mask.reach(seq)
    if mask.chunk is not None and reach == mask.chunk:
        chunks, last = divmod(seq, reach)  # `last` tokens are in a shorter chunk at the end
        return (chunks * reach * (reach + 1) + last * (last + 1)) / 2 / seq
    # The first `reach` queries see 1, 2, ... keys, and each later query sees `reach` keys.
    return (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq


def _check_positive(call: str, **counts: int) -> None:
    """Raise a `ValueError` that begins with `call` for a count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{call}({name}={count}): {name} must be at least 1.")


def idle_shares(model: PyTree) -> dict[int, float]:
    """Return, for each linear map of experts (by `id`), the average share of experts that a token does not take."""
    return {
        id(linear): _idle_share(moe) for moe in modules(model, ExpertMixture) for linear in linear_maps(moe.experts)
    }


def _copies(mixer: Mixer) -> int:
    """Return the number of layers whose mixers are stacked in this mixer."""
    first = linear_maps(mixer)[0]
    return math.prod(first.shape[: len(first.shape) - len(first.sizes)])


def _count_idle(moe: ExpertMixture) -> float:
    """Return the number of parameters of experts that a token does not take, on average."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(moe.experts) if is_trainable(x)) * _idle_share(moe)


def _idle_share(moe: ExpertMixture) -> float:
    """Return the share of a mixture's experts that a token does not take, on average."""
    facts = moe.router.facts()
    return 1 - facts.choices / facts.experts


KEPT_ON_HOST = "kept on its host"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by cause, computed from data sheets and not measured."""

    products: float
    """Seconds of matrix products at the device's peak of operations, including recomputed products."""
    memory: float
    """Seconds to read and write memory: weights, activations, gradients, the optimizer's state."""
    sent: dict[str, float]
    """Seconds of messages by the axis that they are sent over; `state` for parameters and gradients."""
    hidden: tuple[str, ...]
    """Causes of messages that are sent while products are computed, such as state and the keys and values of a ring."""
    bubble: float
    """Time in which a pipeline stage waits, divided by the time in which it works, as in `parallel.Timing`."""
    of_model: float
    """Seconds of the model's own products at the device's peak, without recomputation."""
    forward: float = 0.0
    """Seconds of the products of the forward pass, a part of `products`."""
    offload: float = 0.0
    """Seconds to send residuals to the host during the forward pass, and again to bring them back during the backward
    pass."""
    host_update: float = 0.0
    """Seconds to copy the optimizer's state from the host and back; the update waits for the copies."""
    exposed_state: float = 0.0
    """Seconds of `state` messages during which nothing else runs: the messages of gradients on TPUs, elsewhere 0."""

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds of products and memory, of messages by the axis that they are sent over, and of the host's link."""
        host = {KEPT_ON_HOST: 2 * self.offload, ON_HOST: self.host_update}
        used = {cause: seconds for cause, seconds in host.items() if seconds}
        return {"products": self.products, "memory": self.memory, **self.sent, **used}

    @property
    def seconds(self) -> float:
        """Seconds of a step: the slowest of the overlapping kinds of work, messages that run alone, and the bubble.

        A pass takes at least as long as its copies to the host or from it.
        """
        hidden_sent = sum(size for cause, size in self.sent.items() if cause in self.hidden) - self.exposed_state
        exposed_sent = sum(size for cause, size in self.sent.items() if cause not in self.hidden) + self.exposed_state
        backward = self.products - self.forward
        waits_for_host = max(0.0, self.offload - self.forward) + max(0.0, self.offload - backward)
        overlapping = max(self.products + waits_for_host, self.memory, hidden_sent)
        return (overlapping + exposed_sent + self.host_update) * (1 + self.bubble)

    @property
    def utilization(self) -> float:
        """The model's own operations as a share of the operations that the devices could do (MFU)."""
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
    noisy_copies: bool = False,
) -> Roofline:
    """Return the seconds of a training step whose devices send the bytes of `sent`.

    Products run at the peak of the compute dtype, products of 8 bits at the peak of fp8, and each link at its data
    sheet's speed. Only linear maps and the optimizer's update count as memory traffic, so the result is close to a
    lower bound. Compiled programs of TPUs wait for the messages of gradients, but not for the other messages of state
    (docs/accelerators-memory.md). Raises a `ValueError` if the mesh has another number of devices than the topology,
    and for a batch without tokens.

    Args:
        plan: How the model is laid out.
        model: The model, or its shapes.
        sent: The bytes that a device sends, by cause.
        topology: The accelerators and their links.
        rows: Rows of a batch.
        seq: The tokens of a row.
        trained: Picks the parameters that have gradients; None: all.
        kept_bytes: Bytes of residuals that a device sends to its host in forward passes and brings back in backward
            passes.
        moment_bytes: Bytes of the optimizer's state that an update brings from the host, and takes back.
        noisy_copies: Whether half of the tokens of each row are noisy copies of the others (`training.noise_blocks`).
    """
    _check_positive("roofline", rows=rows, seq=seq)
    accelerator, speeds = topology.accelerator, topology.speeds(plan.mesh)
    tokens = rows * seq / plan.mesh.size
    peak, fp8_peak = accelerator.peak(str(jnp.dtype(model.compute_dtype))), accelerator.peak("float8_e4m3fn")

    def product_seconds(*, backward: bool) -> float:
        has_fp8_experts = kernels.has_fp8_grouped_matmul(accelerator.name)
        fp8 = fp8_flops_per_token(model, backward=backward, trained=trained, experts=has_fp8_experts)
        products = flops_per_row_token(model, seq, backward=backward, trained=trained, noisy_copies=noisy_copies)
        return (products - fp8) * tokens / peak + fp8 * tokens / fp8_peak

    of_model, forward = product_seconds(backward=True), product_seconds(backward=False)
    # Reruns of forward products in a backward pass; the `remat` of the first stack stands for all stacks.
    forward_reruns = plan.reruns_stages + (model.stacks[0].remat in ("full", "full_on_host", "dots_no_batch"))
    bubble = parallel.simulate(plan.timetable()).lock_step.bubble if plan.is_pipelined else 0.0
    sent = list(sent)
    sent_seconds = {cause: size / link_speed(cause, plan, speeds) for cause, size in sum_by_cause(sent).items()}
    gradients = sum(size for cause, label, size in sent if cause == STATE and label.startswith(GRADIENTS))
    exposed_bytes = gradients if accelerator.platform == "tpu" else 0.0
    hidden = [STATE]
    if plan.context_method == "ring":
        hidden.append(CONTEXT)
    if plan.overlap != "none":
        hidden.append(TENSOR)
    # Residuals are copied to the host beside products too; `Roofline.seconds` adds the time that a pass waits for them.
    hidden.append(KEPT_ON_HOST)
    return Roofline(
        products=of_model + forward_reruns * forward,
        memory=_memory_seconds(plan, model, tokens, accelerator),
        sent=sent_seconds,
        hidden=tuple(hidden),
        bubble=bubble,
        of_model=of_model,
        forward=forward,
        offload=kept_bytes / accelerator.host,
        host_update=2 * moment_bytes / accelerator.host,
        exposed_state=exposed_bytes / link_speed(STATE, plan, speeds) if exposed_bytes else 0.0,
    )


def link_speed(cause: str, plan: parallel.Plan, speeds: dict[str, float]) -> float:
    """Return the bytes a second at which the bytes of a cause are sent.

    The cause is a mesh axis, or `STATE`. State is sent over `fsdp`, unless `fsdp` has one device or `replica` has
    several. State is then taken to be sent over the slowest axis that has several devices, `tensor` left out.
    """
    if cause != STATE:
        return speeds[cause]
    if plan.size(FSDP) > 1 and plan.size(REPLICA) == 1:
        return speeds[FSDP]
    return min(speeds[axis] for axis in (*BATCH_AXES, CONTEXT, PIPE) if plan.size(axis) > 1)


def _memory_seconds(plan: parallel.Plan, model: nn.LanguageModel, tokens: float, accelerator: Accelerator) -> float:
    """Return the seconds that a step needs to read and write memory.

    Each linear map reads its input and weight and writes its output, in a forward product and two backward products.
    The optimizer's update reads and writes the state.
    """
    itemsize, idle = jnp.dtype(model.compute_dtype).itemsize, idle_shares(model)
    weights = activations = 0.0  # counts of weights, and of inputs and outputs per token
    for linear in nn.linear_maps(model):
        # Each microbatch reads the whole weight in each pass; only axes that split the map's products divide it.
        is_expert = id(linear) in idle
        product_pieces = plan.size(TENSOR) * plan.size(PIPE) * (plan.size(EXPERT) if is_expert else 1)
        weights += math.prod(linear.shape) / product_pieces * plan.microbatches
        # A token goes through the map of every layer or, for maps of experts, only through its chosen experts' maps.
        stacked_maps = math.prod(linear.shape[: len(linear.shape) - len(linear.sizes)])
        maps_per_token = stacked_maps * (1 - idle.get(id(linear), 0.0))
        outputs = math.prod(linear.output_shape)
        inputs = math.prod(linear.sizes.values()) / outputs
        activations += maps_per_token * (outputs + inputs)
    state_pieces = plan.size(TENSOR) * plan.size(PIPE) * plan.size(EXPERT) * (plan.size(FSDP) if plan.zero else 1)
    parameters = sum(x.size for x in jax.tree.leaves(model) if nn.is_trainable(x)) / state_pieces
    # The update reads and writes a weight and two moments, and reads a gradient: 7 numbers of float32.
    return (3 * itemsize * (weights + activations * tokens) + 7 * 4 * parameters) / accelerator.bandwidth
