"""Two ways of dispatch, from tokens to their experts and back: dropless, or with a fixed capacity of each expert."""

import abc
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
    """How tokens reach the experts that they chose."""

    @abc.abstractmethod
    def __call__(
        self, experts: Experts, x: Float[Array, "*batch seq embed"], routing: Routing, *, weighs_inputs: bool = False
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """The weighted sum of each token's experts whose choices are kept, and the number of dropped choices."""

    @abc.abstractmethod
    def kept(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """The choices that are kept, with -1 for others, and the number of dropped choices."""

    @abc.abstractmethod
    def without_drops(self, experts: Experts, routing: Routing) -> "Dispatch":
        """A dispatch of these experts, which may be those of one device, that drops no choice of all tokens."""

    @abc.abstractmethod
    def among(self, facts: RouterFacts) -> str:
        """The tokens on which it depends whether a choice is kept, as in `RouterFacts`; "token" where all are."""


class Dropless(Dispatch):
    """Dropless dispatch: choices are sorted by expert, and products are grouped products (MegaBlocks).

    Results are summed for each token in float32 at least and in the order of its choices, so that they do not depend on
    which device has which expert. There is a first derivative in reverse mode: no `jax.jvp`, no second derivative.
    """

    def __call__(
        self,
        experts: Experts,
        x: Float[Array, "*batch seq embed"],
        routing: Routing,
        *,
        weighs_inputs: bool = False,
    ) -> tuple[Float[Array, "*batch seq embed"], Int[Array, ""]]:
        """The weighted sum of each token's experts, and the number of dropped choices, which is 0."""
        number = math.prod(x.shape[:-1])
        flat = (array.reshape(number, array.shape[-1]) for array in (x, routing.experts, routing.weights))
        y = sum_of_experts(experts, *flat, weighs_inputs=weighs_inputs)
        return y.reshape(x.shape), jnp.zeros((), jnp.int32)

    def kept(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """The choices that are kept (all), and the number of dropped ones, which is 0."""
        return chosen, jnp.zeros((), jnp.int32)

    def without_drops(self, experts: Experts, routing: Routing) -> "Dropless":
        """Itself."""
        return self

    def among(self, facts: RouterFacts) -> str:
        """All choices are kept."""
        return "token"


class Capacity(Dispatch):
    """Each expert has `ceil(factor * choices / experts)` slots in a group; choices beyond these are dropped.

    Padding chooses no expert and is not counted, so that rows may be padded to any length.

    Groups are rows (`per="sequence"`, so that neither the batch nor a mesh that splits it changes who is dropped) or
    all rows of a call (`"batch"`). First choices go before second ones, and earlier tokens before later ones (GShard,
    arXiv:2006.16668, algorithm 1; Switch, arXiv:2101.03961, section 2.2). A dropped choice adds nothing: with all
    dropped, a token passes through the residual stream. Works with experts of any kind of module; those made of linear
    maps have one derivative, in reverse mode, as by `Dropless`.

    Choices are dropped in training only; in inference, layers use `without_drops`, since which choices are dropped
    depends on later tokens (whose first choices go before earlier tokens' second ones) and on the length of the call.
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
        """The weighted sum of each token's experts that had a slot, and the number of dropped choices."""
        chosen, slot, count = self._slots(routing.experts, len(experts))
        groups, has_slot = chosen.shape[0], slot >= 0
        dropped = jnp.sum((chosen >= 0) & ~has_slot, dtype=jnp.int32)
        if experts.only_call_maps():
            # CPUs compute no empty slot, and whatever is recomputed otherwise, what these maps gave is kept.
            kept = jnp.where(has_slot, chosen, -1)
            flat = (array.reshape(-1, array.shape[-1]) for array in (x, kept, routing.weights))
            y = sum_of_experts(experts, *flat, weighs_inputs=weighs_inputs, most=groups * count)
            return y.reshape(x.shape), dropped
        rows = x.reshape(*chosen.shape[:2], x.shape[-1])
        token = jax.vmap(lambda slot: token_of_slot(slot, len(experts) * count))(slot)
        taken = jax.vmap(lookup_rows)(rows, jnp.maximum(token, 0))
        taken = jnp.where((token >= 0)[..., None], taken, 0)
        weights = jnp.where(has_slot, routing.weights.reshape(chosen.shape), 0)
        if weighs_inputs:
            of_slots = jax.vmap(lambda slot, weights: weight_of_slot(slot, weights, len(experts) * count))
            taken, weights = scaled(taken, of_slots(slot, weights)), has_slot.astype(weights.dtype)
        number, embed = len(experts), x.shape[-1]
        by_expert = jnp.swapaxes(taken.reshape(groups, number, count, embed), 0, 1)
        y = experts.slots(by_expert.reshape(number, groups * count, embed)).reshape(number, groups, count, embed)
        y = jnp.swapaxes(y, 0, 1).reshape(groups, number * count, embed)
        given = jax.vmap(lookup_rows)(y, jnp.maximum(slot, 0))
        return combine(given, weights).reshape(x.shape), dropped

    def kept(
        self, chosen: Int[Array, "*batch seq top_k"], experts: int
    ) -> tuple[Int[Array, "*batch seq top_k"], Int[Array, ""]]:
        """The choices that have a slot, with -1 for others, and the number of dropped choices."""
        grouped, slot, _ = self._slots(chosen, experts)
        dropped = (grouped >= 0) & (slot < 0)
        return jnp.where(dropped, -1, grouped).reshape(chosen.shape), jnp.sum(dropped, dtype=jnp.int32)

    def without_drops(self, experts: Experts, routing: Routing) -> Dispatch:
        """A dispatch that drops nothing: `Dropless`, or a slot for every token if experts are not made of `Linear`s.

        The experts may be those of one device; `routing` is of all.
        """
        number, top_k = routing.scores.shape[-1], routing.experts.shape[-1]
        return Dropless() if experts.only_call_maps() else Capacity(number / top_k, self.per)

    def among(self, facts: RouterFacts) -> str:
        """Slots are counted `per` row or batch, unless there are as many as tokens: a token takes an expert once."""
        return self.per if self.factor * facts.choices < facts.experts else "token"

    def _slots(self, chosen: Int[Array, "*batch seq top_k"], experts: int) -> tuple[Array, Array, int]:
        """Choices by group, the slot of each or -1, and slots an expert."""
        tokens, top_k = math.prod(chosen.shape[:-1]), chosen.shape[-1]
        groups = math.prod(chosen.shape[:-2]) if self.per == "sequence" else 1
        chosen = chosen.reshape(groups, tokens // max(groups, 1), top_k)
        count = slots_of(self.factor, chosen.shape[1] * top_k, experts)
        real = jnp.sum(jnp.any(chosen >= 0, axis=-1), axis=-1, dtype=jnp.int32)  # padding chooses nobody
        limit = jnp.minimum(count, jnp.maximum(1, even_share(self.factor, real * top_k, experts)))
        slots = jax.vmap(lambda chosen, limit: slot_of_choice(chosen, experts, count, limit))(chosen, limit)
        return chosen, slots, count


def sum_of_experts(
    experts: Experts,
    x: Float[Array, "tokens embed"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    weighs_inputs: bool = False,
    devices: int = 1,
    most: int | None = None,
) -> Float[Array, "tokens embed"]:
    """Each token's weighted sum of the experts it has chosen; a choice of -1 adds nothing.

    With `weighs_inputs` it is the sum of what the experts make of the weighted token.

    Args:
        experts: All experts, or those of one of the `devices`.
        x: The tokens.
        chosen: The experts that each of them has chosen.
        weights: Those of the choices.
        weighs_inputs: Whether tokens are weighted, and not what experts give.
        devices: Among how many devices the experts of these tokens are split, of which one computes its part.
        most: No expert is chosen by more tokens than this, or None.
    """
    order, place, sizes = by_expert(chosen, len(experts))
    rows = take_rows(x, order // chosen.shape[-1], place.reshape(chosen.shape))
    if weighs_inputs:
        rows, weights = scaled(rows, weights.reshape(-1)[order]), (chosen >= 0).astype(weights.dtype)
    even = chosen.size // (len(experts) * devices)
    y = experts.sorted_rows(rows, sizes, even=even, most=most)
    return combine(take_rows(y, place, order[:, None]).reshape(*chosen.shape, x.shape[-1]), weights)


def run_slots(experts: Experts, x: Float[Array, "*batch seq embed"], slots: Slots) -> Float[Array, "*batch seq embed"]:
    """What experts that chose their tokens give: each token's sum over those that took it, in the experts' order."""
    groups, number, count = slots.token.shape
    rows = x.reshape(groups, -1, x.shape[-1])
    token = slots.token.reshape(groups, -1)
    taken = jax.vmap(lookup_rows)(rows, jnp.maximum(token, 0)).reshape(groups, number, count, -1)
    y = experts.slots(jnp.swapaxes(taken, 0, 1).reshape(number, groups * count, -1))
    y = jnp.swapaxes(y.reshape(number, groups, count, -1), 0, 1).reshape(groups, number * count, -1)
    exact = at_least_float32(x.dtype)
    weighted = y.astype(exact) * slots.weight.reshape(groups, -1, 1).astype(exact)
    add = lambda token, weighted: jnp.zeros((rows.shape[1], x.shape[-1]), exact).at[jnp.maximum(token, 0)].add(weighted)
    return jax.vmap(add)(token, weighted).astype(x.dtype).reshape(x.shape)


def by_expert(
    chosen: Int[Array, "tokens top_k"], experts: int
) -> tuple[Int[Array, "choices"], Int[Array, "choices"], Int[Array, "experts"]]:
    """Choices sorted by expert, the place of each in that order, and how many each expert has; -1 goes last."""
    check_indices(f"a dispatch of {chosen.shape[0]} tokens", "choices", chosen.size)
    flat = jnp.where(chosen < 0, experts, chosen).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    sizes = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    return order, place, sizes


@jax.custom_vjp
def take_rows(
    x: Float[Array, "rows embed"], place: Int[Array, "taken"], back: Int[Array, "rows times"]
) -> Float[Array, "taken embed"]:
    """`x[place]`, where `back` has for each row the places that took it, so that its gradient needs no scatter."""
    return x[place]


take_rows.defvjp(
    lambda x, place, back: (x[place], back),
    lambda back, gradient: (_summed(gradient[back]), None, None),
)


@jax.custom_vjp
def take_some_rows(
    x: Float[Array, "rows embed"], place: Int[Array, "taken"], back: Int[Array, "rows times"]
) -> Float[Array, "taken embed"]:
    """`take_rows` with zeros for a place of -1, where a -1 in `back` is no place."""
    return _rows_or_zeros(x, place)


take_some_rows.defvjp(
    lambda x, place, back: (_rows_or_zeros(x, place), back),
    lambda back, gradient: (_summed(_rows_or_zeros(gradient, back)), None, None),
)


def _rows_or_zeros(x: Float[Array, "rows embed"], place: Int[Array, "*taken"]) -> Float[Array, "*taken embed"]:
    return x.at[place].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _summed(rows: Float[Array, "taken times embed"]) -> Float[Array, "taken embed"]:
    if rows.shape[1] == 1:
        return rows[:, 0]
    return jnp.sum(rows, axis=1, dtype=at_least_float32(rows.dtype)).astype(rows.dtype)


def slots_of(factor: float, choices: int, experts: int) -> int:
    """Slots an expert, at least one: a factor of 1.1 is 11/10, and 100 choices of 10 experts make 11, not 12."""
    return max(1, even_share(factor, choices, experts))


def slot_of_choice(
    chosen: Int[Array, "tokens top_k"], experts: int, count: int, limit: Int[Array, ""] | None = None
) -> Int[Array, "tokens top_k"]:
    """Each choice's slot, of `count` an expert, or -1 where its expert has none left of the first `limit`."""
    check_indices(f"a dispatch of {chosen.shape[0]} tokens", f"slots ({experts} experts x {count})", experts * count)
    rank = rank_of_choice(chosen, experts)
    return jnp.where((chosen >= 0) & (rank < (count if limit is None else limit)), chosen * count + rank, -1)


def rank_of_choice(chosen: Int[Array, "tokens top_k"], experts: int) -> Int[Array, "tokens top_k"]:
    """How many choices of the same expert go before each: first choices before second ones, then earlier tokens'."""
    turns = chosen.T  # all first choices, then all second ones
    _, place, sizes = by_expert(turns, experts)
    starts = jnp.cumsum(sizes) - sizes
    return (place.reshape(turns.shape) - starts[jnp.maximum(turns, 0)]).T


def token_of_slot(slot: Int[Array, "tokens top_k"], number: int) -> Int[Array, "slots"]:
    """The token in each of `number` slots, -1 for an empty one."""
    return choice_of_slot(slot, number) // max(slot.shape[-1], 1)


def choice_of_slot(slot: Int[Array, "tokens top_k"], number: int) -> Int[Array, "slots"]:
    """The choice in each of `number` slots, counted token by token, -1 for an empty one."""
    choice = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape)
    return jnp.full(number + 1, -1, jnp.int32).at[jnp.where(slot < 0, number, slot)].set(choice)[:number]


def weight_of_slot(
    slot: Int[Array, "tokens top_k"], weights: Float[Array, "tokens top_k"], number: int
) -> Float[Array, "slots"]:
    """The weight of the choice in each of `number` slots, 0 for an empty one."""
    return jnp.zeros(number + 1, weights.dtype).at[jnp.where(slot < 0, number, slot)].set(weights)[:number]


def scaled(x: Float[Array, "*rows embed"], weights: Float[Array, "*rows"]) -> Float[Array, "*rows embed"]:
    """Each row times its weight, multiplied in float32 at least."""
    return multiply_float32(x, weights[..., None])


def combine(
    given: Float[Array, "*tokens top_k embed"], weights: Float[Array, "*tokens top_k"]
) -> Float[Array, "*tokens embed"]:
    """The weighted sum over each token's choices, in their order and in float32 at least."""
    exact, top_k = at_least_float32(given.dtype), given.shape[-2]
    each = jax.lax.split(given, [1] * top_k, axis=given.ndim - 2)  # whose gradients are joined, not padded and summed
    total = sum(weights[..., k, None].astype(exact) * each[k][..., 0, :].astype(exact) for k in range(top_k))
    return jnp.asarray(total).astype(given.dtype)
