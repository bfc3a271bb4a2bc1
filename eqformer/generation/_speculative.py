"""Speculative decoding: a draft proposes tokens one by one, and the model checks them all at once."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..nn import LearnedPositions, SlotCache, token_keys, Tokens
from ._decode import decode_step, Draws, lengthened, pick, Rows
from ._drafts import Draft
from ._model import Model
from ._transforms import History


class Tally(eqx.Module):
    """What is counted of each row: see `Drafted`."""

    steps: Int[Array, "batch"]
    proposed: Int[Array, "batch"]
    accepted: Int[Array, "batch"]
    added: Int[Array, "batch"]


class Caches(eqx.Module):
    """The caches of a model and its draft; the draft has read the first `read` tokens of each row for good.

    `hidden` are the model's vectors after the last of these tokens and after those behind it.
    """

    own: PyTree
    draft: PyTree
    read: Int[Array, "batch"]
    hidden: Float[Array, "batch checked embed"]
    tally: Tally


class Speculative(eqx.Module):
    """A model with a draft, which reads prompts like a model; its cache is that of both."""

    model: Model
    draft: Draft

    @property
    def vocab(self) -> int:
        """The model's."""
        return self.model.vocab

    @property
    def positions(self) -> LearnedPositions | None:
        """The model's."""
        return self.model.positions

    @property
    def start(self) -> int | None:
        """The model's."""
        return self.model.start

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> Caches:
        """Empty caches, of which proposals can be taken back."""
        own = self.model.init_cache(batch, capacity, dtype, rollback=self.draft.tokens)
        none = jnp.zeros(batch, jnp.int32)
        one = none[:, None]
        like = eqx.filter_eval_shape(lambda: self.model.encode(one, Tokens(one), own)[0])
        hidden = jnp.zeros((batch, self.draft.tokens + 1, like.shape[-1]), like.dtype)
        draft = self.draft.init_cache(batch, capacity, dtype)
        return Caches(own, draft, none, hidden, Tally(none, none, none, none))

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: Caches
    ) -> tuple[Float[Array, "batch seq embed"], Caches, None]:
        """What the model gives of a part of the prompts, which both read."""
        hidden, own, _ = self.model.encode(ids, tokens, cache.own)
        before = cache.hidden[:, :1]
        _, draft = self.draft.read(ids, jnp.concatenate([before, hidden[:, :-1]], axis=1), tokens, cache.draft)
        count = jnp.sum(tokens.positions >= 0, axis=1, dtype=jnp.int32)
        newest = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        last = jnp.where(count[:, None, None] > 0, newest, before)
        return hidden, Caches(own, draft, cache.read + count, cache.hidden.at[:, :1].set(last), cache.tally), None

    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """The model's logits."""
        return self.model.unembed(hidden)


def speculative_step(pair: Speculative, rows: Rows, draws: Draws) -> Rows:
    """Propose tokens, check them, and lengthen each row by those that hold and one token of the model's own.

    By the rule of Leviathan et al. (2023, arXiv:2211.17192) the tokens are distributed as if the model had drawn each
    by itself; the likeliest tokens are so to the letter.
    """
    proposals, offered, draft_cache = _propose(pair.draft, rows, draws)
    count = proposals.shape[1]
    order = jnp.arange(count + 1, dtype=jnp.int32)
    read = jnp.concatenate([jnp.take_along_axis(rows.ids, rows.lengths[:, None] - 1, axis=1), proposals], axis=1)
    places = rows.lengths[:, None] - 1 + order
    # The last token of a row is never read, nor are those of rows that are done.
    tokens = Tokens(jnp.where(rows.done[:, None] | (places >= rows.limits[:, None] - 1), -1, places))
    hidden, own, _ = pair.model.encode(read, tokens, rows.cache.own)
    logits = pair.model.unembed(hidden.reshape(-1, hidden.shape[-1]))
    held = _with_tokens(rows.ids, rows.lengths[:, None] + order[:count], proposals)
    wanted = _probabilities(logits, jnp.repeat(held, count + 1, axis=0), (places + 1).reshape(-1), draws)
    logits, wanted = (x.reshape(*read.shape, -1) for x in (logits, wanted))
    accepted, rest = judged(wanted, offered, proposals, _shares(rows, count, draws))
    last = pick(jnp.log(rest), rows.lengths + accepted, draws)
    new = jnp.where(order < accepted[:, None], jnp.pad(proposals, [(0, 0), (0, 1)]), last[:, None])
    going = ~rows.done
    after = lengthened(rows, new, logits, jnp.where(going, accepted + 1, 0), None, draws)
    added = after.lengths - rows.lengths
    if not _takes_back(own):
        known = Tokens(jnp.where(order < added[:, None], tokens.positions, -1))
        _, own, _ = pair.model.encode(read, known, with_states_of(rows.cache.own, own))
    was = rows.cache.tally
    tally = Tally(
        was.steps + going.astype(jnp.int32),
        was.proposed + jnp.where(going, jnp.minimum(count, rows.limits - rows.lengths), 0),
        was.accepted + jnp.where(going, jnp.minimum(accepted, added), 0),
        was.added + added,
    )
    return dataclasses.replace(after, cache=Caches(own, draft_cache, rows.lengths, hidden, tally))


def step_of(model: Model, draws: Draws) -> Callable[[Rows], Rows]:
    """What lengthens rows, once."""
    if isinstance(model, Speculative):
        return lambda rows: speculative_step(model, rows, draws)
    return lambda rows: decode_step(model, rows, draws)


def tally_of(rows: Rows) -> Tally | None:
    """What was counted of a draft, None where there is none."""
    return rows.cache.tally if isinstance(rows.cache, Caches) else None


def judged(
    wanted: Float[Array, "batch checked vocab"],
    offered: Float[Array, "batch proposed vocab"],
    proposals: Int[Array, "batch proposed"],
    shares: Float[Array, "batch proposed"],
) -> tuple[Int[Array, "batch"], Float[Array, "batch vocab"]]:
    """How many proposals of each row are taken, and the distribution, but for its sum, of the token behind them.

    A proposal that the draft drew with probability `offered` is taken with probability `min(1, wanted / offered)`, by
    its uniform share, if those before it are; in the place of the first that is not comes a token drawn in proportion
    to `max(wanted - offered, 0)`. `wanted` has one position more, behind all of them.
    """
    at = proposals[..., None]
    asked, given = (jnp.take_along_axis(x[:, : at.shape[1]], at, axis=2)[..., 0] for x in (wanted, offered))
    taken = jnp.cumprod(shares * given < asked, axis=1, dtype=jnp.int32)
    count = jnp.sum(taken, axis=1, dtype=jnp.int32)
    of_next = lambda x: jnp.take_along_axis(x, count[:, None, None], axis=1)[:, 0]
    wanted, offered = of_next(wanted), of_next(jnp.pad(offered, [(0, 0), (0, 1), (0, 0)]))
    rest = jnp.maximum(wanted - offered, 0)
    # Nothing is left where the two are equal but for rounding; nor of a draft that gives NaN, which is never taken.
    return count, jnp.where(jnp.sum(rest, axis=1, keepdims=True) > 0, rest, wanted)


def with_states_of(before: PyTree, after: PyTree) -> PyTree:
    """A cache whose slots are those of `after`, since tokens read anew take their places, and all else of `before`."""
    return jax.tree.map(lambda old, new: new if _has_slots(new) else old, before, after, is_leaf=_has_slots)


def _propose(
    draft: Draft, rows: Rows, draws: Draws
) -> tuple[Int[Array, "batch proposed"], Float[Array, "batch proposed vocab"], PyTree]:
    """Tokens drawn from the draft, their distributions, and its cache with what it had not read of the rows."""
    proposing = dataclasses.replace(draws, key=jax.random.fold_in(draws.key, _PROPOSALS))
    places = rows.cache.read[:, None] + jnp.arange(draft.tokens + 1, dtype=jnp.int32)
    is_new = ~rows.done[:, None] & (places < rows.lengths[:, None])
    ids = jnp.take_along_axis(rows.ids, jnp.where(is_new, places, 0), axis=1)
    tokens = Tokens(jnp.where(is_new, places, -1))
    hidden, known = draft.read(ids, rows.cache.hidden, tokens, rows.cache.draft)
    newest = jnp.maximum(rows.lengths - 1 - rows.cache.read, 0)
    hidden = jnp.take_along_axis(hidden, newest[:, None, None], axis=1)[:, 0]

    def choose(hidden: Array, held: Array, lengths: Array) -> tuple[Array, Array, Array]:
        logits = draws.transforms(draft.logits(hidden), History(held, lengths))
        chosen = jnp.maximum(pick(logits, lengths, proposing), 0)  # a draft that may propose nothing is never taken
        return chosen, jax.nn.softmax(logits, axis=-1), _with_tokens(held, lengths[:, None], chosen[:, None])

    def step(carry: tuple, number: Array) -> tuple[tuple, tuple]:
        chosen, hidden, held, cache = carry
        place = rows.lengths + number
        tokens = Tokens(jnp.where(rows.done | (place >= rows.limits - 1), -1, place)[:, None])
        hidden, cache = draft.read(chosen[:, None], hidden[:, None], tokens, cache)
        chosen, offered, held = choose(hidden[:, 0], held, place + 1)
        return (chosen, hidden[:, 0], held, cache), (chosen, offered)

    first, offered, held = choose(hidden, rows.ids, rows.lengths)
    numbers = jnp.arange(draft.tokens - 1, dtype=jnp.int32)
    (*_, cache), others = jax.lax.scan(step, (first, hidden, held, known), numbers)
    ids, offered = (jnp.concatenate([one[None], more]) for one, more in zip((first, offered), others))
    return ids.swapaxes(0, 1), offered.swapaxes(0, 1), with_states_of(known, cache)


def _probabilities(
    logits: Float[Array, "batch vocab"], ids: Int[Array, "batch seq"], lengths: Int[Array, "batch"], draws: Draws
) -> Float[Array, "batch vocab"]:
    return jax.nn.softmax(draws.transforms(logits, History(ids, lengths)), axis=-1)


def _shares(rows: Rows, count: int, draws: Draws) -> Float[Array, "batch proposed"]:
    """Uniform numbers, one for each proposal by its row and position; zeros where nothing is random."""
    places = rows.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)
    if draws.transforms.is_greedy:
        return jnp.zeros(places.shape, jnp.float32)
    keys = token_keys(jax.random.fold_in(draws.key, _SHARES), draws.examples, places)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def _with_tokens(
    ids: Int[Array, "batch seq"], places: Int[Array, "batch new"], new: Int[Array, "batch new"]
) -> Int[Array, "batch seq"]:
    return ids.at[jnp.arange(len(ids))[:, None], places].set(new, mode="drop")


def _takes_back(cache: PyTree) -> bool:
    """Whether all that a cache holds is in slots, where tokens read anew take the places of others."""
    return all(_has_slots(node) for node in jax.tree.leaves(cache, is_leaf=_has_slots))


def _has_slots(node: object) -> bool:
    return isinstance(node, SlotCache)


# Folded into the key, so that proposals, shares and the model's own draws at one position are independent.
_PROPOSALS, _SHARES = 2**31 - 2, 2**31 - 3
