"""Dispatch of tokens to their experts and back: dropless, or with a fixed capacity for each expert."""

import abc
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._dtype import at_least_float32, lookup_rows, multiply_float32
from .._module import Module
from ._experts import Experts
from ._routing import check_indices, even_share, RouterFacts, Routing, Slots


class Dispatch(Module):
    """A way in which tokens reach the experts that they chose."""

    @abc.abstractmethod
    def __call__(
        self, experts: Experts, x: Float[Array, "*batch seq embed"], routing: Routing, *, weighs_inputs: bool = False
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """Return the weighted sum over each token's kept choices, and the number of dropped choices."""

    @abc.abstractmethod
    def keep_choices(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """Return the choices with -1 in the place of dropped choices, and the number of dropped choices."""

    @abc.abstractmethod
    def without_drops(self, experts: Experts, routing: Routing) -> "Dispatch":
        """Return a dispatch that drops no choice of any token; `experts` may be the experts of one device only."""

    @abc.abstractmethod
    def among(self, facts: RouterFacts) -> str:
        """Return the group of tokens that decides whether a choice is kept, as in `RouterFacts.among`.

        It is "token" if every choice is kept.
        """


class Dropless(Dispatch):
    """Dropless dispatch: choices are sorted by expert, and products are grouped products (MegaBlocks).

    The outputs of each token's experts are summed in float32 at least and in the order of its choices, so that the sum
    does not depend on which device has which expert. There is a first derivative in reverse mode: no `jax.jvp`, no
    second derivative.
    """

    def __call__(
        self,
        experts: Experts,
        x: Float[Array, "*batch seq embed"],
        routing: Routing,
        *,
        weighs_inputs: bool = False,
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """Return the weighted sum over each token's experts, and 0, the number of dropped choices."""
        count = math.prod(x.shape[:-1])
        flat = (array.reshape(count, array.shape[-1]) for array in (x, routing.experts, routing.weights))
        y = sum_experts(experts, *flat, weighs_inputs=weighs_inputs)
        return y.reshape(x.shape), jnp.zeros((), jnp.int32)

    def keep_choices(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """Return all choices, and 0, the number of dropped choices."""
        return chosen, jnp.zeros((), jnp.int32)

    def without_drops(self, experts: Experts, routing: Routing) -> "Dropless":
        """Return this dispatch, which drops nothing."""
        return self

    def among(self, facts: RouterFacts) -> str:
        """Return "token": every choice is kept."""
        return "token"


class Capacity(Dispatch):
    """Dispatch to `ceil(factor * choices / experts)` slots for each expert in a group; further choices are dropped.

    Padding chooses no expert and is not counted, so that rows may be padded to any length.

    With `per="sequence"` each row is a group, so that neither the batch nor a mesh that splits the batch changes which
    choices are dropped. With `per="batch"` all rows of a call are one group. First choices get slots before second
    choices, and earlier tokens before later tokens (GShard, arXiv:2006.16668, algorithm 1; Switch, arXiv:2101.03961,
    section 2.2). A dropped choice adds nothing, so a token whose choices are all dropped passes only through the
    residual stream. Any module may be an expert. Experts that are made of linear maps have a first derivative in
    reverse mode only, as with `Dropless`.

    Choices are dropped in training only. In inference, layers use `without_drops`, because dropped choices would depend
    on the length of the call and on later tokens, whose first choices go before earlier tokens' second choices.
    """

    factor: float = eqx.field(static=True)
    per: str = eqx.field(static=True, default="sequence")

    def __check_init__(self):
        if not 0 < self.factor < math.inf:
            raise ValueError(
                f"Capacity(factor={self.factor}): experts have `factor` times the slots that even loads need; give a "
                "positive and finite number, such as 1.25."
            )
        if self.per not in ("sequence", "batch"):
            raise ValueError(f"Capacity(per={self.per!r}): slots are counted per 'sequence' or per 'batch'.")

    def __call__(
        self,
        experts: Experts,
        x: Float[Array, "*batch seq embed"],
        routing: Routing,
        *,
        weighs_inputs: bool = False,
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """Return the weighted sum over each token's choices that have a slot, and the number of dropped choices."""
        chosen, slot, capacity = self._assign_slots(routing.experts, len(experts))
        groups, has_slot = chosen.shape[0], slot >= 0
        dropped = jnp.sum((chosen >= 0) & ~has_slot, dtype=jnp.int32)
        if experts.only_call_maps():
            # Grouped products do not compute empty slots on CPUs, and rematerialisation can keep their results.
            with_slot = jnp.where(has_slot, chosen, -1)
            flat = (array.reshape(-1, array.shape[-1]) for array in (x, with_slot, routing.weights))
            y = sum_experts(experts, *flat, weighs_inputs=weighs_inputs, max_group_rows=groups * capacity)
            return y.reshape(x.shape), dropped
        rows = x.reshape(*chosen.shape[:2], x.shape[-1])
        token = jax.vmap(functools.partial(token_of_slot, count=len(experts) * capacity))(slot)
        inputs = jax.vmap(lookup_rows)(rows, jnp.maximum(token, 0))
        inputs = jnp.where((token >= 0)[..., None], inputs, 0)
        weights = jnp.where(has_slot, routing.weights.reshape(chosen.shape), 0)
        if weighs_inputs:
            slot_weights = jax.vmap(functools.partial(weight_of_slot, count=len(experts) * capacity))
            inputs, weights = scale_rows(inputs, slot_weights(slot, weights)), has_slot.astype(weights.dtype)
        count, embed = len(experts), x.shape[-1]
        inputs = jnp.swapaxes(inputs.reshape(groups, count, capacity, embed), 0, 1)
        y = experts.slots(inputs.reshape(count, groups * capacity, embed)).reshape(count, groups, capacity, embed)
        y = jnp.swapaxes(y, 0, 1).reshape(groups, count * capacity, embed)
        outputs = jax.vmap(lookup_rows)(y, jnp.maximum(slot, 0))
        return combine_choices(outputs, weights).reshape(x.shape), dropped

    def keep_choices(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """Return the choices with -1 in the place of choices without a slot, and the number of dropped choices."""
        by_group, slot, _ = self._assign_slots(chosen, experts)
        dropped = (by_group >= 0) & (slot < 0)
        return jnp.where(dropped, -1, by_group).reshape(chosen.shape), jnp.sum(dropped, dtype=jnp.int32)

    def without_drops(self, experts: Experts, routing: Routing) -> Dispatch:
        """Return `Dropless`, or a slot for every token if the experts are not made of linear maps alone.

        `experts` may be the experts of one device only; `routing` is over the experts of all devices.
        """
        count, top_k = routing.scores.shape[-1], routing.experts.shape[-1]
        return Dropless() if experts.only_call_maps() else Capacity(count / top_k, self.per)

    def among(self, facts: RouterFacts) -> str:
        """Return `per`; "token" if each expert has a slot for every token, since a token takes an expert once only."""
        return self.per if self.factor * facts.choices < facts.experts else "token"

    def _assign_slots(self, chosen: Int[Array, "*batch seq top_k"], experts: int) -> tuple[Array, Array, int]:
        """Return the choices by group, the slot of each choice or -1, and the slots of an expert."""
        tokens, top_k = math.prod(chosen.shape[:-1]), chosen.shape[-1]
        groups = math.prod(chosen.shape[:-2]) if self.per == "sequence" else 1
        chosen = chosen.reshape(groups, tokens // max(groups, 1), top_k)
        capacity = slots_per_expert(self.factor, chosen.shape[1] * top_k, experts)
        real = jnp.sum(jnp.any(chosen >= 0, axis=-1), axis=-1, dtype=jnp.int32)  # padding chooses no expert
        limit = jnp.minimum(capacity, jnp.maximum(1, even_share(self.factor, real * top_k, experts)))
        slots = jax.vmap(lambda chosen, limit: slot_of_choice(chosen, experts, capacity, limit))(chosen, limit)
        return chosen, slots, capacity


def sum_experts(
    experts: Experts,
    x: Float[Array, "tokens embed"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    weighs_inputs: bool = False,
    devices: int = 1,
    max_group_rows: int | None = None,
) -> Float[Array, "tokens embed"]:
    """Return each token's weighted sum over the experts that it chose; a choice of -1 adds nothing.

    Args:
        experts: All experts, or the experts of one of the `devices`.
        x: The tokens.
        chosen: The experts that each token chose.
        weights: The weights of the choices.
        weighs_inputs: Whether weights multiply the experts' inputs instead of their outputs.
        devices: The number of devices over which the experts of these tokens are split; this device computes its part.
        max_group_rows: A bound on the tokens that choose the same expert, or None.
    """
    order, position, sizes = sort_by_expert(chosen, len(experts))
    rows = take_rows(x, order // chosen.shape[-1], position.reshape(chosen.shape))
    if weighs_inputs:
        rows, weights = scale_rows(rows, weights.reshape(-1)[order]), (chosen >= 0).astype(weights.dtype)
    even_rows = chosen.size // (len(experts) * devices)
    y = experts.sorted_rows(rows, sizes, even_rows=even_rows, max_group_rows=max_group_rows)
    return combine_choices(take_rows(y, position, order[:, None]).reshape(*chosen.shape, x.shape[-1]), weights)


def run_slots(experts: Experts, x: Float[Array, "*batch seq embed"], slots: Slots) -> Float[Array, "*batch seq embed"]:
    """Return each token's weighted sum over the experts that chose the token, in the order of the experts."""
    groups, count, capacity = slots.token.shape
    rows = x.reshape(groups, -1, x.shape[-1])
    token = slots.token.reshape(groups, -1)
    inputs = jax.vmap(lookup_rows)(rows, jnp.maximum(token, 0)).reshape(groups, count, capacity, -1)
    y = experts.slots(jnp.swapaxes(inputs, 0, 1).reshape(count, groups * capacity, -1))
    y = jnp.swapaxes(y.reshape(count, groups, capacity, -1), 0, 1).reshape(groups, count * capacity, -1)
    wide = at_least_float32(x.dtype)
    weighted = y.astype(wide) * slots.weight.reshape(groups, -1, 1).astype(wide)

    def add_to_tokens(token: Array, weighted: Array) -> Array:
        return jnp.zeros((rows.shape[1], x.shape[-1]), wide).at[jnp.maximum(token, 0)].add(weighted)

    return jax.vmap(add_to_tokens)(token, weighted).astype(x.dtype).reshape(x.shape)


def sort_by_expert(
    chosen: Int[Array, "tokens top_k"], experts: int
) -> tuple[Int[Array, "choices"], Int[Array, "choices"], Int[Array, "experts"]]:
    """Return the order of choices by expert, each choice's position in that order, and each expert's number of choices.

    Choices of -1 come last.
    """
    check_indices(f"a dispatch of {chosen.shape[0]} tokens", "choices", chosen.size)
    flat = jnp.where(chosen < 0, experts, chosen).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    sizes = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    return order, position, sizes


@jax.custom_vjp
def take_rows(
    x: Float[Array, "rows embed"], index: Int[Array, "taken"], users: Int[Array, "rows times"]
) -> Float[Array, "taken embed"]:
    """Return `x[index]`, with a gradient that is a gather and a sum instead of a scatter.

    `users` lists for each row of `x` the indices of its copies in the result.
    """
    return x[index]


def _take_rows_forward(x: Array, index: Array, users: Array) -> tuple[Array, Array]:
    return x[index], users


def _take_rows_backward(users: Array, gradient: Array) -> tuple[Array, None, None]:
    return _sum_users(gradient[users]), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


@jax.custom_vjp
def take_rows_or_zeros(
    x: Float[Array, "rows embed"], index: Int[Array, "taken"], users: Int[Array, "rows times"]
) -> Float[Array, "taken embed"]:
    """Return the rows of `take_rows`, with zeros for an index of -1; a -1 in `users` stands for no copy."""
    return _rows_or_zeros(x, index)


def _take_rows_or_zeros_forward(x: Array, index: Array, users: Array) -> tuple[Array, Array]:
    return _rows_or_zeros(x, index), users


def _take_rows_or_zeros_backward(users: Array, gradient: Array) -> tuple[Array, None, None]:
    return _sum_users(_rows_or_zeros(gradient, users)), None, None


take_rows_or_zeros.defvjp(_take_rows_or_zeros_forward, _take_rows_or_zeros_backward)


def _rows_or_zeros(x: Float[Array, "rows embed"], index: Int[Array, "*taken"]) -> Float[Array, "*taken embed"]:
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _sum_users(rows: Float[Array, "taken times embed"]) -> Float[Array, "taken embed"]:
    if rows.shape[1] == 1:
        return rows[:, 0]
    return jnp.sum(rows, axis=1, dtype=at_least_float32(rows.dtype)).astype(rows.dtype)


def slots_per_expert(factor: float, choices: int, experts: int) -> int:
    """Return the slots of an expert, at least one.

    A factor of 1.1 is 11/10: 100 choices of 10 experts make 11 slots, not 12.
    """
    return max(1, even_share(factor, choices, experts))


def slot_of_choice(
    chosen: Int[Array, "tokens top_k"], experts: int, capacity: int, limit: Int[Array, ""] | None = None
) -> Int[Array, "tokens top_k"]:
    """Return the slot of each choice, or -1 if the first `limit` of its expert's `capacity` slots are full."""
    call, slots = f"a dispatch of {chosen.shape[0]} tokens", f"slots ({experts} experts x {capacity})"
    check_indices(call, slots, experts * capacity)
    rank = rank_of_choice(chosen, experts)
    return jnp.where((chosen >= 0) & (rank < (capacity if limit is None else limit)), chosen * capacity + rank, -1)


def rank_of_choice(chosen: Int[Array, "tokens top_k"], experts: int) -> Int[Array, "tokens top_k"]:
    """Return how many choices of the same expert go before each choice.

    First choices go before second choices; among first choices, and among second choices, earlier tokens go first.
    """
    by_choice = chosen.T  # all first choices, then all second choices
    _, position, sizes = sort_by_expert(by_choice, experts)
    starts = jnp.cumsum(sizes) - sizes
    return (position.reshape(by_choice.shape) - starts[jnp.maximum(by_choice, 0)]).T


def token_of_slot(slot: Int[Array, "tokens top_k"], count: int) -> Int[Array, "slots"]:
    """Return the index of the token in each of `count` slots, -1 for an empty slot."""
    return choice_of_slot(slot, count) // max(slot.shape[-1], 1)


def choice_of_slot(slot: Int[Array, "tokens top_k"], count: int) -> Int[Array, "slots"]:
    """Return the index of the choice in each of `count` slots, -1 for an empty slot.

    `slot` has the slot of each choice, or -1. Choices are counted token by token.
    """
    choice = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape)
    return jnp.full(count + 1, -1, jnp.int32).at[jnp.where(slot < 0, count, slot)].set(choice)[:count]


def weight_of_slot(
    slot: Int[Array, "tokens top_k"], weights: Float[Array, "tokens top_k"], count: int
) -> Float[Array, "slots"]:
    """Return the weight of the choice in each of `count` slots, 0 for an empty slot."""
    return jnp.zeros(count + 1, weights.dtype).at[jnp.where(slot < 0, count, slot)].set(weights)[:count]


def scale_rows(x: Float[Array, "*rows embed"], weights: Float[Array, "*rows"]) -> Float[Array, "*rows embed"]:
    """Multiply each row by its weight, in float32 at least."""
    return multiply_float32(x, weights[..., None])


def combine_choices(
    outputs: Float[Array, "*tokens top_k embed"], weights: Float[Array, "*tokens top_k"]
) -> Float[Array, "*tokens embed"]:
    """Return the weighted sum over each token's choices, in their order and in float32 at least."""
    wide, top_k = at_least_float32(outputs.dtype), outputs.shape[-2]
    # The gradients of a split are concatenated; the gradients of slices would be padded and summed.
    choices = jax.lax.split(outputs, [1] * top_k, axis=outputs.ndim - 2)
    total = sum(weights[..., k, None].astype(wide) * choices[k][..., 0, :].astype(wide) for k in range(top_k))
    return jnp.asarray(total).astype(outputs.dtype)
