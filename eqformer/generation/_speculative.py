"""Speculative decoding: a draft proposes tokens one by one, and the model checks them in one forward pass."""

import abc
import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._annotation_checks import name_class
from ..nn import can_roll_back, dims, restore_states, Tokens
from ._decode import append_tokens, decode_step, Rows, sample_ids, SamplingState
from ._model import Model, PredictingModel
from ._transforms import History


# Drafts.


class Draft(eqx.Module):
    """Interface of a draft, which proposes `tokens` tokens at a time.

    A draft reads the tokens of a row and, with each token, the model's hidden vector of the previous token.
    """

    model: eqx.AbstractVar[Model]
    tokens: eqx.AbstractVar[int]

    @abc.abstractmethod
    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return the draft's hidden vectors of these tokens, and the cache.

        `hidden[:, i]` is the model's hidden vector of the token before `ids[:, i]`.
        """

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits of the next token."""

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """Return an empty cache, in which the last `tokens` tokens of a row may be replaced by other tokens later."""


class DraftModel(Draft):
    """A smaller model of the same vocabulary, which reads the tokens by itself."""

    model: Model
    tokens: int = eqx.field(static=True)

    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return the hidden vectors of the smaller model."""
        draft_hidden, cache, _ = self.model.encode(ids, tokens, cache)
        return draft_hidden, cache

    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits of the smaller model."""
        return self.model.unembed(hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """Return the smaller model's cache, whose capacity is at most the number of the model's learned positions."""
        limit = capacity if self.model.max_seq is None else self.model.max_seq
        return self.model.init_cache(batch, min(capacity, limit), dtype, rollback=self.tokens)


class PredictorDraft(Draft):
    """The model's own multi-token predictor, which predicts further tokens from its own hidden vectors."""

    model: PredictingModel
    tokens: int = eqx.field(static=True)

    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return the hidden vectors of the predictor."""
        return self.model.predict(ids, hidden, tokens, cache)

    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits of the model's head."""
        return self.model.unembed(hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """Return the predictor's cache."""
        return self.model.init_predictor_cache(batch, capacity, dtype, rollback=self.tokens)


class DraftStatistics(eqx.Module):
    """Counts of a draft's proposals, one number for each row of a batch."""

    steps: Int[np.ndarray, "batch"]
    """Forward passes of the model that checked proposals."""
    proposed: Int[np.ndarray, "batch"]
    """Proposed tokens within the row's limit."""
    accepted: Int[np.ndarray, "batch"]
    """Proposed tokens that are in the text."""
    added: Int[np.ndarray, "batch"]
    """Tokens that these steps added to the text: accepted proposals and the model's own tokens."""

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that are in the text."""
        return float(np.sum(self.accepted) / max(np.sum(self.proposed), 1))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward pass of the model adds to a row; 1 without a draft."""
        return float(np.sum(self.added) / max(np.sum(self.steps), 1))


def make_draft(model: Model, draft: Model | str, tokens: int, total: int) -> Draft:
    """Return the draft of a call; raise a `ValueError` if it does not fit the model or rows of `total` tokens."""
    if tokens < 1:
        raise ValueError(f"generate(draft_tokens={tokens}): a draft proposes at least 1 token at a time.")
    _check_frequencies((model, draft), total)
    if not isinstance(draft, str):
        _check_draft_model(model, draft, total)
        return DraftModel(model=draft, tokens=tokens)
    if draft != "mtp" or not isinstance(model, PredictingModel) or model.predictor is None:
        raise ValueError(
            f'generate(draft={draft!r}): a draft is a smaller model, or "mtp" for the predictor of a model that was '
            f"loaded or built with predictor=True; the model is {name_class(model)} without a predictor."
        )
    return PredictorDraft(model=model, tokens=tokens)


def _check_draft_model(model: Model, draft: Model, total: int) -> None:
    """Raise a `ValueError` for a smaller model of another vocabulary, or with too few learned positions."""
    if draft.vocab != model.vocab:
        raise ValueError(
            f"generate(draft): the draft has {draft.vocab} ids and the model {model.vocab}; a draft proposes ids of "
            "the model's own vocabulary, so give a model of the same tokenizer."
        )
    if (limit := draft.max_seq) is not None and total - 1 > limit:
        raise ValueError(
            f"generate(draft): rows of up to {total} tokens exceed the draft's {limit} learned positions; give shorter "
            "prompts, fewer new tokens or no draft."
        )


def _check_frequencies(models: PyTree, total: int) -> None:
    """Raise a `ValueError` for rotary frequencies that change from token to token.

    With a draft, several tokens are read at once, so all of them must have the same frequencies.
    """
    for rotary in nn.modules(models, nn.Rotary):
        if rotary.changes_within(total):
            raise ValueError(
                f"generate(draft): rotary frequencies of {type(rotary.scaling).__name__} change with each token beyond "
                f"its original_length, but with a draft several tokens are read at once, and rows have up to {total} "
                "tokens; give shorter prompts, fewer new tokens or no draft."
            )


# A model with a draft.


class DraftCounts(eqx.Module):
    """Counts on the device; see `DraftStatistics`."""

    steps: Int[Array, "batch"]
    proposed: Int[Array, "batch"]
    accepted: Int[Array, "batch"]
    added: Int[Array, "batch"]


class SpeculativeCache(eqx.Module):
    """Caches of a model and its draft.

    Before each `speculative_step`, for every row of `length` tokens that is not done:

    - The model has read all tokens but the last: positions 0 to `length - 2`. At later positions, its cache may hold
      rejected proposals. The step overwrites all of these entries before a query reads any of them.
    - The draft has read the first `draft_length` tokens and no proposal; `length - draft_length` is between 1 and
      `draft.tokens + 1`.
    - `hidden[i]` is the model's hidden vector of position `draft_length - 1 + i`, for `i < length - draft_length`.
    """

    model: PyTree
    draft: PyTree
    draft_length: Int[Array, "batch"]
    """Tokens of each row that the draft has read and will not roll back."""
    hidden: Float[Array, "batch checked embed"]
    """The model's hidden vectors of the last token that the draft has read, and of the tokens after that one."""
    counts: DraftCounts


class SpeculativeModel(eqx.Module):
    """A model with a draft, which reads prompts like a model; its cache holds both caches."""

    model: Model
    draft: Draft

    @property
    def vocab(self) -> int:
        """Vocabulary size of the model."""
        return self.model.vocab

    @property
    def max_seq(self) -> int | None:
        """Number of positions that the model knows; None for any number."""
        return self.model.max_seq

    @property
    def start(self) -> int | None:
        """Start id of the model, if it has an encoder."""
        return self.model.start

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> SpeculativeCache:
        """Return empty caches of the model and the draft, in which rejected proposals can be replaced."""
        model_cache = self.model.init_cache(batch, capacity, dtype, rollback=self.draft.tokens)
        zeros = jnp.zeros(batch, jnp.int32)
        one_token = zeros[:, None]
        vector, *_ = eqx.filter_eval_shape(self.model.encode, one_token, Tokens(one_token), model_cache)
        hidden = jnp.zeros((batch, self.draft.tokens + 1, vector.shape[-1]), vector.dtype)
        draft_cache = self.draft.init_cache(batch, capacity, dtype)
        return SpeculativeCache(model_cache, draft_cache, zeros, hidden, DraftCounts(zeros, zeros, zeros, zeros))

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: SpeculativeCache
    ) -> tuple[Float[Array, "batch seq embed"], SpeculativeCache, None]:
        """Read a part of the prompts with the model and the draft; return the model's hidden vectors."""
        hidden, model_cache, _ = self.model.encode(ids, tokens, cache.model)
        # The draft reads, with each id, the model's hidden vector of the token before the id.
        before_part = cache.hidden[:, :1]
        shifted = jnp.concatenate([before_part, hidden[:, :-1]], axis=1)
        _, draft_cache = self.draft.read(ids, shifted, tokens, cache.draft)
        # Keep the hidden vector of each row's last token, which is in this part unless the part holds only padding.
        count = jnp.sum(tokens.positions >= 0, axis=1, dtype=jnp.int32)
        last_of_part = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        last = jnp.where(count[:, None, None] > 0, last_of_part, before_part)
        kept_hidden = cache.hidden.at[:, :1].set(last)
        draft_length = cache.draft_length + count
        return hidden, SpeculativeCache(model_cache, draft_cache, draft_length, kept_hidden, cache.counts), None

    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the model's logits."""
        return self.model.unembed(hidden)

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: SpeculativeCache
    ) -> tuple[Float[Array, "batch vocab"], SpeculativeCache]:
        """Read tokens with the model and the draft; return the model's logits after the last one of each row."""
        hidden, cache, _ = self.encode(ids, tokens, cache)
        return self.unembed(hidden[:, -1]), cache

    def put_cache_row(
        self, cache: SpeculativeCache, rows: int, number: Int[Array, ""], single: SpeculativeCache
    ) -> SpeculativeCache:
        """Return the caches of `rows` rows with row `number` replaced by the only row of the caches `single`."""
        model_cache = put_cache_row(self.model, cache.model, rows, number, single.model)
        draft_cache = put_cache_row(self.draft.model, cache.draft, rows, number, single.draft)
        # The other fields are arrays with a dim `batch`.
        other_fields, single_fields = (dataclasses.replace(x, model=None, draft=None) for x in (cache, single))
        return dataclasses.replace(put_row(other_fields, number, single_fields), model=model_cache, draft=draft_cache)


def add_draft(model: Model, draft: Model | str | None, draft_tokens: int, total: int) -> Model:
    """Return the model together with its draft, if there is one.

    Raises a `ValueError` for a draft that does not fit the model or rows of `total` tokens.
    """
    if draft is None:
        return model
    if model.start is not None:
        raise ValueError(
            "generate(draft=...): the model has an encoder, and no draft supports one; leave the draft out."
        )
    return SpeculativeModel(model, make_draft(model, draft, draft_tokens, total))


def put_row(batch: PyTree, number: Int[Array, ""], single: PyTree) -> PyTree:
    """Return a batch with row `number` replaced by the only row of `single`, a tree of the same modules."""

    def put(names: str, x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, number, names.split().index("batch"))

    return jax.tree.map(put, dims(batch), batch, single)


def put_cache_row(model: Model, cache: PyTree, rows: int, number: Int[Array, ""], single: PyTree) -> PyTree:
    """Return a cache of `rows` rows with row `number` replaced by the only row of the cache `single`."""
    # A sharded model writes the row on the devices that hold the row, and a model with a draft has two caches.
    put = getattr(model, "put_cache_row", None)
    return put_row(cache, number, single) if put is None else put(cache, rows, number, single)


def make_decode_step(model: Model, sampling: SamplingState) -> Callable[[Rows], Rows]:
    """Return the function of one decoding step: plain, or speculative for a model with a draft."""
    if isinstance(model, SpeculativeModel):
        return functools.partial(speculative_step, model, sampling=sampling)
    return functools.partial(decode_step, model, sampling=sampling)


def draft_counts(rows: Rows) -> DraftCounts | None:
    """Return the counts of the draft, or None without a draft."""
    return rows.cache.counts if isinstance(rows.cache, SpeculativeCache) else None


def speculative_step(pair: SpeculativeModel, rows: Rows, sampling: SamplingState) -> Rows:
    """Propose tokens, check them, and append the accepted tokens and one token of the model.

    `SpeculativeCache` describes the caches before and after the step. By the rule of Leviathan et al. (2023,
    arXiv:2211.17192), the tokens have the distribution of the model alone; greedy tokens are exactly the tokens of the
    model alone.
    """
    proposals, draft_probabilities, draft_cache = _propose(pair.draft, rows, sampling)
    count = proposals.shape[1]
    order = jnp.arange(count + 1, dtype=jnp.int32)
    last_token = jnp.take_along_axis(rows.ids, rows.lengths[:, None] - 1, axis=1)
    checked_ids = jnp.concatenate([last_token, proposals], axis=1)
    positions = rows.lengths[:, None] - 1 + order
    # The last token that a row's limit allows is never read. This token, and all tokens of rows that are done, count as
    # padding.
    tokens = Tokens(jnp.where(rows.done[:, None] | (positions >= rows.limits[:, None] - 1), -1, positions))
    hidden, model_cache, _ = pair.model.encode(checked_ids, tokens, rows.cache.model)
    logits = pair.model.unembed(hidden.reshape(-1, hidden.shape[-1]))
    # The transforms read the row's ids up to each checked token, so each checked token gets a copy of the row.
    history = _write_tokens(rows.ids, rows.lengths[:, None] + order[:count], proposals)
    repeated_history = jnp.repeat(history, count + 1, axis=0)
    probabilities = _probabilities(logits, repeated_history, (positions + 1).reshape(-1), sampling)
    logits, probabilities = (x.reshape(*checked_ids.shape, -1) for x in (logits, probabilities))
    uniforms = _sample_uniforms(rows, count, sampling)
    accepted, residual = accept_proposals(probabilities, draft_probabilities, proposals, uniforms)
    model_token = sample_ids(jnp.log(residual), rows.lengths + accepted, sampling)
    new_ids = jnp.where(order < accepted[:, None], jnp.pad(proposals, [(0, 0), (0, 1)]), model_token[:, None])
    new_rows = append_tokens(rows, new_ids, logits, jnp.where(rows.done, 0, accepted + 1), None, sampling)
    added = new_rows.lengths - rows.lengths
    if not can_roll_back(model_cache):
        # A recurrent state cannot roll back: read the accepted tokens again, from the state before the proposals.
        accepted_tokens = Tokens(jnp.where(order < added[:, None], tokens.positions, -1))
        restored = restore_states(rows.cache.model, model_cache)
        _, model_cache, _ = pair.model.encode(checked_ids, accepted_tokens, restored)
    counts = _add_counts(rows, count, accepted, added)
    # The draft has read all tokens of the rows before this step, and `hidden` begins at the last of these tokens.
    cache = SpeculativeCache(model_cache, draft_cache, rows.lengths, hidden, counts)
    return dataclasses.replace(new_rows, cache=cache)


def _add_counts(rows: Rows, proposed: int, accepted: Int[Array, "batch"], added: Int[Array, "batch"]) -> DraftCounts:
    """Return the counts after a step that has added `added` tokens to each row; rows that are done do not count."""
    counts, active = rows.cache.counts, ~rows.done
    return DraftCounts(
        steps=counts.steps + active.astype(jnp.int32),
        proposed=counts.proposed + jnp.where(active, jnp.minimum(proposed, rows.limits - rows.lengths), 0),
        accepted=counts.accepted + jnp.where(active, jnp.minimum(accepted, added), 0),
        added=counts.added + added,
    )


def accept_proposals(
    probabilities: Float[Array, "batch checked vocab"],
    draft_probabilities: Float[Array, "batch proposed vocab"],
    proposals: Int[Array, "batch proposed"],
    uniforms: Float[Array, "batch proposed"],
) -> tuple[Int[Array, "batch"], Float[Array, "batch vocab"]]:
    """Return how many proposals of each row are accepted, and the unnormalized distribution of the next token.

    Let `q` be the draft's probability of a proposal, and `p` the model's. The proposal is accepted with probability
    `min(1, p / q)` if all earlier proposals are accepted; its random number in `uniforms` decides. The token that
    replaces the first rejected proposal is sampled in proportion to `max(p - q, 0)`. `probabilities` has one position
    more than there are proposals.
    """
    index = proposals[..., None]
    target, draft = (
        jnp.take_along_axis(x[:, : index.shape[1]], index, axis=2)[..., 0] for x in (probabilities, draft_probabilities)
    )
    accepted = jnp.cumprod(uniforms * draft < target, axis=1, dtype=jnp.int32)
    count = jnp.sum(accepted, axis=1, dtype=jnp.int32)
    padded_draft_probabilities = jnp.pad(draft_probabilities, [(0, 0), (0, 1), (0, 0)])
    next_target, next_draft = (
        jnp.take_along_axis(x, count[:, None, None], axis=1)[:, 0] for x in (probabilities, padded_draft_probabilities)
    )
    residual = jnp.maximum(next_target - next_draft, 0)
    # The residual is zero if both distributions are equal up to rounding. It is NaN if the draft's distribution is NaN;
    # proposals from such a distribution are never accepted. In both cases the next token is sampled from the model's
    # distribution.
    return count, jnp.where(jnp.sum(residual, axis=1, keepdims=True) > 0, residual, next_target)


def _propose(
    draft: Draft, rows: Rows, sampling: SamplingState
) -> tuple[Int[Array, "batch proposed"], Float[Array, "batch proposed vocab"], PyTree]:
    """Sample tokens from the draft; return these tokens, their distributions, and the draft's cache.

    The returned cache has read the rows' tokens, but not the sampled tokens, since the model may reject these.
    """
    draft_sampling = sampling.fold_in(_PROPOSAL_STREAM)
    positions = rows.cache.draft_length[:, None] + jnp.arange(draft.tokens + 1, dtype=jnp.int32)
    is_new = ~rows.done[:, None] & (positions < rows.lengths[:, None])
    ids = jnp.take_along_axis(rows.ids, jnp.where(is_new, positions, 0), axis=1)
    tokens = Tokens(jnp.where(is_new, positions, -1))
    hidden, known_cache = draft.read(ids, rows.cache.hidden, tokens, rows.cache.draft)
    newest = jnp.maximum(rows.lengths - 1 - rows.cache.draft_length, 0)
    hidden = jnp.take_along_axis(hidden, newest[:, None, None], axis=1)[:, 0]

    def choose(hidden: Array, history: Array, lengths: Array) -> tuple[Array, Array, Array]:
        logits = sampling.transforms(draft.logits(hidden), History(history, lengths))
        # A draft with no candidate proposes id 0 with probability NaN, which is never accepted.
        proposal = jnp.maximum(sample_ids(logits, lengths, draft_sampling), 0)
        history = _write_tokens(history, lengths[:, None], proposal[:, None])
        return proposal, jax.nn.softmax(logits, axis=-1), history

    def propose_next(carry: tuple, number: Array) -> tuple[tuple, tuple]:
        proposal, hidden, history, cache = carry
        position = rows.lengths + number
        tokens = Tokens(jnp.where(rows.done | (position >= rows.limits - 1), -1, position)[:, None])
        hidden, cache = draft.read(proposal[:, None], hidden[:, None], tokens, cache)
        proposal, probabilities, history = choose(hidden[:, 0], history, position + 1)
        return (proposal, hidden[:, 0], history, cache), (proposal, probabilities)

    first_id, first_probabilities, history = choose(hidden, rows.ids, rows.lengths)
    numbers = jnp.arange(draft.tokens - 1, dtype=jnp.int32)
    carry = first_id, hidden, history, known_cache
    (*_, cache), (later_ids, later_probabilities) = jax.lax.scan(propose_next, carry, numbers)
    proposals = jnp.concatenate([first_id[None], later_ids])
    probabilities = jnp.concatenate([first_probabilities[None], later_probabilities])
    return proposals.swapaxes(0, 1), probabilities.swapaxes(0, 1), restore_states(known_cache, cache)


def _probabilities(
    logits: Float[Array, "batch vocab"],
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    sampling: SamplingState,
) -> Float[Array, "batch vocab"]:
    """Return the transformed distribution of the token after the first `lengths` ids of each row."""
    return jax.nn.softmax(sampling.transforms(logits, History(ids, lengths)), axis=-1)


def _sample_uniforms(rows: Rows, count: int, sampling: SamplingState) -> Float[Array, "batch proposed"]:
    """Sample one uniform number for each proposal, by its row and position; return zeros for greedy sampling."""
    positions = rows.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)
    if sampling.transforms.is_greedy:
        return jnp.zeros(positions.shape, jnp.float32)
    keys = sampling.fold_in(_ACCEPTANCE_STREAM).token_keys(positions)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def _write_tokens(
    ids: Int[Array, "batch seq"], positions: Int[Array, "batch new"], new_ids: Int[Array, "batch new"]
) -> Int[Array, "batch seq"]:
    return ids.at[jnp.arange(len(ids))[:, None], positions].set(new_ids, mode="drop")


# These numbers are folded into the key, so that proposals, acceptance and the model's own samples at one position are
# independent.
_PROPOSAL_STREAM, _ACCEPTANCE_STREAM = 2**31 - 2, 2**31 - 3
