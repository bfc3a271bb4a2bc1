"""Dispatch of tokens to experts on other devices: the choice between a gather and an exchange, and the exchange.

A choice is a pair of a token and one of its `top_k` experts. An exchange sends the token of each choice to the expert's
device and the expert's output back. The buffers of an exchange have a fixed number of rows, which are called slots. So
the exchange runs in rounds, until every choice has been sent in some slot.

A round is padded or ragged. A padded round is an all-to-all with the same number of slots for each pair of devices, for
platforms without ragged all-to-alls, such as CPUs. A ragged round sends only the rows that exist. For a ragged round
each device sorts its choices by expert, and sends a run of rows to each expert. The receiving device writes the runs in
the order of its experts, and does not need to sort the rows again.
"""

import functools
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._shapes import count_pieces
from ..program import FURTHER_ROUNDS
from . import _collectives as send
from ._collectives import Runs
from ._mesh import EXPERT
from ._shard_map import vary, vary_like


ExpertMethod = Literal["auto", "gather", "exchange"]
MAX_GATHERED_BYTES = 2**30
"""Limit of the bytes of gathered rows that a device allocates at once; some layers would otherwise need terabytes."""
LEAST_SLOTS = 64
"""Minimum of the slots for a pair of devices in an exchange; fewer slots would often overflow by chance, and need a
second round."""
RAGGED_FACTOR, PADDED_FACTOR = 1.25, 2.0
"""Default slots of a round, relative to an even load; loads of pairs of devices vary more than loads of devices."""


class Exchange(NamedTuple):
    """Kind of the all-to-alls that exchange choices, ragged or padded, and the relative number of slots in a round."""

    is_ragged: bool
    factor: float
    """Slots relative to an even load: of a receiving device (ragged) or of a pair of devices (padded)."""

    def count_slots(self, choices: int, devices: int) -> int:
        """Return the slots of a round, if each device has `choices` choices.

        In a ragged round, these slots are for all rows that a device receives; in a padded round, for the rows of one
        pair of devices.
        """
        return nn.dispatch.slots_per_expert(self.factor, choices * (devices if self.is_ragged else 1), devices)

    def count_sent(self, choices: int, devices: int) -> int:
        """Return how many vectors a device sends to all devices, itself included, in a round at an even load."""
        slots = self.count_slots(choices, devices)
        return min(choices, slots) if self.is_ragged else devices * slots


def exchange_on(platform: str, factor: float | None) -> Exchange:
    """Return the exchange for a platform (XLA for CPUs has no ragged all-to-all); `factor=None` takes the default."""
    is_ragged = platform in ("tpu", "gpu")
    return Exchange(is_ragged, (RAGGED_FACTOR if is_ragged else PADDED_FACTOR) if factor is None else factor)


def choose_expert_method(
    method: str, *, tokens: int, top_k: int, devices: int, exchange: Exchange, row_bytes: int
) -> str:
    """Return `"gather"` or `"exchange"`: `method` itself or, for `"auto"`, the cheaper method; both methods are exact.

    A gather sends each device all tokens of every other device. A ragged exchange sends `top_k / devices` times as many
    vectors as a gather, and a padded exchange `factor` times that number. The exchange is chosen if it sends no more
    vectors than the gather. If a gather would allocate more than `MAX_GATHERED_BYTES`, the exchange may send up to
    twice as many vectors, since it allocates fewer rows. For few tokens, such as a decode step's, the gather is chosen.

    Args:
        method: `"auto"`, `"gather"` or `"exchange"`.
        tokens: Number of tokens of a device in a microbatch.
        top_k: Number of experts of a token.
        devices: Number of devices that the experts are split over.
        exchange: The all-to-alls that would exchange the choices.
        row_bytes: Bytes of a token's vector.
    """
    if method != "auto":
        return method
    is_large = devices * tokens * top_k * row_bytes > MAX_GATHERED_BYTES
    sent = exchange.count_sent(tokens * top_k, devices)
    return "exchange" if LEAST_SLOTS * devices <= sent <= devices * tokens * (1 + is_large) else "gather"


def count_gathered_pieces(tokens: int, gathered_bytes: int) -> int:
    """Return the smallest number of equal pieces of the tokens with at most `MAX_GATHERED_BYTES` for each piece.

    If a single token takes more, return one piece per token. `gathered_bytes` are the bytes of a gather of all tokens
    at once.
    """
    return count_pieces(tokens, gathered_bytes, MAX_GATHERED_BYTES)


# The exchange.


class PaddedQueues(NamedTuple):
    """This device's choices, in a queue for each device that holds chosen experts.

    A round takes the next choices of each queue. The fields `round_of_choice` and `slot_of_choice` say when a choice is
    taken.
    """

    choices: Int[Array, "tokens top_k"]
    round_of_choice: Int[Array, "tokens top_k"]
    """Round of each choice."""
    slot_of_choice: Int[Array, "tokens top_k"]
    """Slot of each choice in its round, among the slots for the device that holds the choice's expert."""
    rounds: Int[Array, ""]
    """Number of rounds until all queues of all devices of the axis are empty."""


class RaggedQueues(NamedTuple):
    """The choices of all devices, in a queue for each device that holds chosen experts.

    A queue is sorted by expert and then by sender. A round takes as many of the next choices as it has slots.
    """

    order: Int[Array, "choices"]
    """This device's choices sorted by expert."""
    rank: Int[Array, "tokens top_k"]
    """Index of each choice in `order`."""
    counts: Int[Array, "devices devices experts"]
    """Numbers of choices: `counts[sender, owner, expert]` counts the choices of `sender` for an expert on `owner`."""
    rounds: Int[Array, ""]
    """Number of rounds until all queues are empty."""


Queues = PaddedQueues | RaggedQueues
Round = Callable[..., Float[Array, "tokens top_k embed"]]
"""Function of frozen arrays, queues, the round's index and differentiable inputs."""
RoundOfExperts = Callable[..., Float[Array, "tokens top_k embed"]]
"""Function of experts, slots, queues, the round's index, tokens, and the weights of the tokens (or None)."""


def exchange_choices(
    experts: nn.Experts,
    x: Float[Array, "tokens embed"],
    choices: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    exchange: Exchange,
    *,
    weighs_inputs: bool,
) -> Float[Array, "tokens embed"]:
    """Return, for each token of this device, the weighted sum of the outputs of its chosen experts on all devices.

    The sum is exact for any load. A round has `factor` times the slots that an even load needs. Ragged rounds count
    slots per receiving device, padded rounds per pair of devices. Only uneven loads take further rounds; if all choices
    are for experts of one of the `n` devices, there are `n / factor` rounds. The first round saves its residuals.
    Further rounds run in a loop and save no residuals. The backward pass recomputes them, and sums gradients over
    rounds in float32 at least. There is no second derivative and no forward mode.

    Args:
        experts: Experts of this device.
        x: Tokens of this device.
        choices: The chosen experts of each token, numbered over all devices; -1 adds nothing.
        weights: Weights of the choices.
        exchange: The kind of the all-to-alls that send choices, and the slots of a round.
        weighs_inputs: Whether weights multiply the experts' inputs; otherwise they multiply the outputs.
    """
    make_queues: Callable[..., Queues] = make_ragged_queues if exchange.is_ragged else make_padded_queues
    run_round: RoundOfExperts = run_ragged_round if exchange.is_ragged else run_padded_round
    slots = exchange.count_slots(choices.size, jax.lax.axis_size(EXPERT))
    queues = make_queues(choices, len(experts), slots)
    trainable, fixed = eqx.partition(experts, nn.is_trainable)
    frozen, static = eqx.partition(fixed, eqx.is_array)
    # Mark all arrays as varying over the same axes, so that the transpose sums gradients once, outside of the rounds.
    trainable, x, frozen, weights = vary_like((trainable, x, frozen, weights), trainable, x, frozen, choices, weights)

    def run_experts(
        frozen: PyTree, queues: Queues, round_index: int | Array, trainable: PyTree, *inputs: Array | None
    ) -> Float[Array, "tokens top_k embed"]:
        return run_round(eqx.combine(trainable, frozen, static), slots, queues, round_index, *inputs)

    outputs = _repeat_rounds(run_experts)(frozen, queues, trainable, x, weights if weighs_inputs else None)
    return nn.dispatch.combine_choices(outputs, jnp.ones_like(weights) if weighs_inputs else weights)


def _repeat_rounds(run_round: Round) -> Callable[..., Float[Array, "tokens top_k embed"]]:
    """Return a function that runs `run_round` for all rounds and joins their outputs, with a custom backward pass.

    The returned function takes frozen arrays, queues and differentiable inputs. The outputs of a round are zero for the
    choices of all other rounds.
    """

    def loop_over_further_rounds(first: PyTree, queues: Queues, add_round: Callable[[Array, PyTree], PyTree]) -> PyTree:
        def continues(carry: tuple[Array, PyTree]) -> Array:
            return carry[0] < queues.rounds

        def step(carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return carry[0] + 1, add_round(*carry)

        with jax.named_scope(FURTHER_ROUNDS):
            return jax.lax.while_loop(continues, step, (jnp.ones((), jnp.int32), first))[1]

    def run_further_rounds(first: Array, frozen: PyTree, queues: Queues, *inputs: PyTree) -> Array:
        def add_round(round_index: Array, total: Array) -> Array:
            outputs = run_round(frozen, queues, round_index, *inputs)
            # A choice has an output in one round, and zeros in all others. So select the output instead of adding.
            return jnp.where(outputs == 0, total, outputs)

        return loop_over_further_rounds(first, queues, add_round)

    @jax.custom_vjp
    def run(frozen: PyTree, queues: Queues, *inputs: PyTree) -> Array:
        return run_further_rounds(run_round(frozen, queues, 0, *inputs), frozen, queues, *inputs)

    def forward(frozen: PyTree, queues: Queues, *inputs: PyTree) -> tuple[Array, tuple[PyTree, ...]]:
        first, pull_back = jax.vjp(functools.partial(run_round, frozen, queues, 0), *inputs)
        return run_further_rounds(first, frozen, queues, *inputs), (pull_back, frozen, queues, inputs)

    def backward(residuals: tuple[PyTree, ...], gradient: Array) -> tuple[PyTree, ...]:
        pull_back, frozen, queues, inputs = residuals

        def widen(x: Array) -> Array:
            return x.astype(nn.at_least_float32(x.dtype))

        def add_round(round_index: Array, total: PyTree) -> PyTree:
            grads = jax.vjp(functools.partial(run_round, frozen, queues, round_index), *inputs)[1](gradient)
            return jax.tree.map(operator.add, total, jax.tree.map(widen, grads))

        total = loop_over_further_rounds(jax.tree.map(widen, pull_back(gradient)), queues, add_round)
        return None, None, *jax.tree.map(lambda total, x: total.astype(x.dtype), total, inputs)

    run.defvjp(forward, backward)
    return run


def make_padded_queues(choices: Int[Array, "tokens top_k"], experts: int, slots: int) -> PaddedQueues:
    """Return the queues of this device's choices, for `slots` slots per round and `experts` experts per device."""
    rank = nn.dispatch.rank_of_choice(jnp.where(choices < 0, -1, choices // experts), jax.lax.axis_size(EXPERT))
    rounds = jnp.max(jnp.where(choices < 0, -1, rank), initial=-1) // slots + 1
    # All devices of the exchange must leave the loop together.
    rounds = send.pmax("exchange rounds", vary(rounds, [EXPERT]), EXPERT)
    return PaddedQueues(choices, rank // slots, rank % slots, rounds)


def run_padded_round(
    experts: nn.Experts,
    slots: int,
    queues: PaddedQueues,
    round_index: int | Array,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top_k"] | None,
) -> Float[Array, "tokens top_k embed"]:
    """Return the experts' outputs for a round's choices, and zeros for all other choices.

    If there are weights, they multiply the tokens.
    """
    choices = queues.choices
    is_in_round = (choices >= 0) & (queues.round_of_choice == round_index)
    slot = jnp.where(is_in_round, choices // len(experts) * slots + queues.slot_of_choice, -1)
    choice = nn.dispatch.choice_of_slot(slot, jax.lax.axis_size(EXPERT) * slots)
    rows = nn.dispatch.take_rows_or_zeros(x, choice // choices.shape[-1], slot)
    if weights is not None:
        rows = nn.dispatch.scale_rows(rows, nn.dispatch.weight_of_slot(slot, weights, len(choice)))
    expert = jnp.where(choice < 0, -1, choices.reshape(-1)[jnp.maximum(choice, 0)] % len(experts))

    def to_experts(array: Array) -> Array:
        return send.all_to_all("expert dispatch", array, EXPERT, 0, 0)

    order, rank, sizes = nn.dispatch.sort_by_expert(to_experts(expert)[:, None], len(experts))
    received = nn.dispatch.take_rows(to_experts(rows), order, rank[:, None])
    even_load = min(choices.size, len(choice))
    y = experts.sorted_rows(received, sizes, even_rows=even_load // len(experts))
    returned = nn.dispatch.take_rows(y, rank, order[:, None])
    # Remat policies that save products of linear maps also save arrays of this name, so recomputation sends no outputs.
    returned = checkpoint_name(send.all_to_all("expert combine", returned, EXPERT, 0, 0), "product")
    outputs = nn.dispatch.take_rows_or_zeros(returned, slot.reshape(-1), choice[:, None])
    return outputs.reshape(*choices.shape, x.shape[-1])


def make_ragged_queues(choices: Int[Array, "tokens top_k"], experts: int, slots: int) -> RaggedQueues:
    """Return the queues of all devices' choices, for `slots` slots per round and `experts` experts per device."""
    devices = jax.lax.axis_size(EXPERT)
    nn.dispatch.check_indices(f"an exchange among {devices} devices", "choices", devices * choices.size)
    order, rank, sizes = nn.dispatch.sort_by_expert(choices, devices * experts)
    counts = send.all_gather("tokens per expert", sizes, EXPERT, stacks=True).reshape(devices, devices, experts)
    # All devices of the exchange compute the same number of rounds, so they leave the loop together.
    rounds = (jnp.max(jnp.sum(counts, axis=(0, 2), dtype=jnp.int32)) + (slots - 1)) // slots
    return RaggedQueues(order, rank.reshape(choices.shape), counts, rounds)


def run_ragged_round(
    experts: nn.Experts,
    slots: int,
    queues: RaggedQueues,
    round_index: int | Array,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens top_k"] | None,
) -> Float[Array, "tokens top_k embed"]:
    """Return the experts' outputs for a round's choices, and zeros for all other choices.

    If there are weights, they multiply the tokens.
    """
    order, rank = queues.order, queues.rank
    to_experts, from_experts, sizes = ragged_runs(queues.counts, jax.lax.axis_index(EXPERT), round_index * slots, slots)
    rows = nn.dispatch.take_rows(x, order // rank.shape[-1], rank)
    if weights is not None:
        rows = nn.dispatch.scale_rows(rows, weights.reshape(-1)[order])
    received = _send_rows("expert dispatch", len(rows), slots, rows, to_experts, from_experts)
    y = experts.sorted_rows(received, sizes, even_rows=min(len(rows), slots) // len(experts))
    outputs = _send_rows("expert combine", slots, len(rows), y, from_experts, to_experts)
    outputs = checkpoint_name(outputs, "product")
    return nn.dispatch.take_rows(outputs, rank.reshape(-1), order[:, None]).reshape(*rank.shape, x.shape[-1])


def ragged_runs(
    counts: Int[Array, "devices devices experts"], device: Int[Array, ""], first_slot: int | Array, slots: int
) -> tuple[Runs, Runs, Int[Array, "experts"]]:
    """Return the runs that a device sends in a round, the runs back, and the number of rows of each of its experts.

    The round takes `slots` choices of each device's queue, from index `first_slot` on.
    """
    by_device = counts.reshape(len(counts), -1)
    # Index of each run's first choice among the sender's sorted choices.
    sender_starts = (jnp.cumsum(by_device, axis=1) - by_device).reshape(counts.shape)
    # Index of each run's first choice in its queue. Dims of `queue`: the device of the experts, the expert, the sender.
    queue = jnp.moveaxis(counts, 0, 2)
    flat_queue = queue.reshape(len(queue), -1)
    queue_starts = jnp.moveaxis((jnp.cumsum(flat_queue, axis=1) - flat_queue).reshape(queue.shape), 2, 0)
    start, end = (jnp.clip(index, first_slot, first_slot + slots) for index in (queue_starts, queue_starts + counts))
    sizes = end - start
    source, target = (
        jnp.where(sizes > 0, index, 0) for index in (sender_starts + start - queue_starts, start - first_slot)
    )

    def take_sent(array: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, device, 0, keepdims=False)

    def take_received(array: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, device, 1, keepdims=False)

    sent_sizes, sent_sources, sent_targets = (take_sent(array).reshape(-1) for array in (sizes, source, target))
    received_sizes, received_sources, received_targets = (
        take_received(array).reshape(-1) for array in (sizes, source, target)
    )
    to_experts = Runs(sent_sources, sent_sizes, sent_targets, received_sizes)
    from_experts = Runs(received_targets, received_sizes, received_sources, sent_sizes)
    return to_experts, from_experts, jnp.sum(take_received(sizes), axis=0, dtype=jnp.int32)


def _send_rows(name: str, sent: int, received: int, rows: Array, runs: Runs, back: Runs) -> Array:
    """Send `sent` rows to other devices, which have slots for `received` rows; gradients return by the runs `back`."""

    @jax.custom_vjp
    def run(rows: Float[Array, "sent embed"], runs: Runs, back: Runs) -> Float[Array, "received embed"]:
        return send.ragged_all_to_all(name, rows, EXPERT, received, runs, back)

    def forward(rows: Array, runs: Runs, back: Runs) -> tuple[Array, tuple[Runs, Runs]]:
        return run(rows, runs, back), (runs, back)

    def backward(residuals: tuple[Runs, Runs], gradient: Array) -> tuple[Array, None, None]:
        runs, back = residuals
        return _send_rows(name, received, sent, gradient, back, runs), None, None

    run.defvjp(forward, backward)
    return run(rows, runs, back)
