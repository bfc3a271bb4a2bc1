"""Requests of an `Engine`, their results, and sampling with separate settings for each row."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._shapes import as_tuple
from ..nn import at_least_float32
from ._decode import MAX_ALTERNATIVES
from ._transforms import check_sampling, clamp_setting, History, keep_top, MinP, RepetitionPenalty, Temperature, TopP


MAX_PENALTY = 100.0
"""Largest presence and frequency penalty, which is far above the difference of most logits."""
MAX_ENDS = 16
"""Maximum number of ids that may end one text."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the settings with which it is continued."""

    prompt: Sequence[int]
    """Ids that the new ids continue; a model with an encoder reads them with its encoder."""
    max_new_tokens: int = 256
    """Maximum number of tokens to generate."""
    temperature: float | int = 0.0
    """0 takes the likeliest token each time; 1 samples from the model's own distribution."""
    top_k: int | None = None
    """Sample from the `top_k` likeliest tokens only."""
    top_p: float | int | None = None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float | int | None = None
    """Sample from the tokens whose probability is at least `min_p` times the largest probability."""
    repetition_penalty: float | int | None = None
    """Above 1: make tokens that are already in the row less likely."""
    presence_penalty: float | int = 0
    """Number that is subtracted from the logits of each id that has been sampled already; the prompt does not count."""
    frequency_penalty: float | int = 0
    """Number that is subtracted from the logits of an id for each time that the id has been sampled."""
    logit_bias: Mapping[int, float | int] = dataclasses.field(default_factory=dict)
    """Numbers that are added to the logits of ids before anything else; minus infinity forbids an id."""
    allowed: Callable[[list[int]], Bool[np.ndarray, "vocab"]] | None = None
    """A function of the new ids so far that says which ids may come next, such as a grammar. While such a request runs,
    the engine generates one token at a time for all rows, because the host calls the function before each token."""
    end_of_text: int | Sequence[int] = ()
    """The id, or ids, that end the text; the id that is sampled stays in the result."""
    ends: Callable[[list[int]], bool] | None = None
    """A function of the new ids so far that says whether the text has ended, for example at a string. The last id of
    the result is the first id after which the function returns true."""
    seed: int = 0
    """The samples depend on the seed, on `example` and on positions, as in `generate(..., key=jax.random.key(seed),
    examples=[example])`."""
    example: int = 0
    """The number that determines the random samples together with `seed`, as in `generate`'s `examples`."""
    alternatives: int = 0
    """Number of the likeliest ids that the result reports beside each sampled id."""

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"Request(max_new_tokens={self.max_new_tokens}): at least 1 token must be generated.")
        if not 0 <= self.alternatives <= MAX_ALTERNATIVES:
            raise ValueError(
                f"Request(alternatives={self.alternatives}): from 0 to {MAX_ALTERNATIVES} likely ids can be reported."
            )
        if len(self.end_ids) > MAX_ENDS:
            raise ValueError(
                f"Request(end_of_text): {len(self.end_ids)} ids end the text, but at most {MAX_ENDS} can; give fewer, "
                "and find the others by `ends`."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(penalty := getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(
                    f"Request({name}={penalty}): a penalty is from -{MAX_PENALTY:g} to {MAX_PENALTY:g}; 0 changes "
                    "nothing."
                )
        check_sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end the text."""
        return as_tuple(self.end_of_text)

    def bias(self, new_ids: list[int], vocab: int) -> Float[np.ndarray, "vocab"]:
        """Return the `logit_bias` of the token after the new ids, with minus infinity where `allowed` forbids an id."""
        bias = np.zeros(vocab, np.float32)
        bias[list(self.logit_bias)] = list(self.logit_bias.values())
        if self.allowed is not None:
            bias[~np.asarray(self.allowed(new_ids), bool)] = -np.inf
        return bias

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest by the model's own logits, because no setting changes the logits."""
        return (
            self.temperature == 0
            and self.repetition_penalty in (None, 1)
            and self.presence_penalty == self.frequency_penalty == 0
            and not self.logit_bias
            and self.allowed is None
        )


@dataclasses.dataclass
class Result:
    """The continuation of a request."""

    number: int
    """The number of the request."""
    prompt_length: int
    """Number of ids of the prompt."""
    shared_length: int = 0
    """Number of ids of the prompt whose cache was copied from an earlier request."""
    ids: list[int] = dataclasses.field(default_factory=list)
    """The ids that were sampled."""
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    """The log-probability of each id by the model's logits before any change, in nats."""
    alternatives: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    """For each sampled id, the `alternatives` likeliest ids at its position, with their log-probabilities."""
    finish: str = ""
    """Why the text ended: `"end"` of text, `"stop"` by the request's function, `"length"`, `"cancelled"` or `"error"`;
    empty while it is generated."""
    error: str = ""
    """The error that ended the request."""


class RowSampling(eqx.Module):
    """Transforms of logits with separate settings for each row, in the order of `sampling`.

    A setting that a request leaves out gets a value that leaves the logits unchanged.
    """

    bias: Float[Array, "batch vocab"]
    repetition_penalty: Float[Array, "batch"]
    new_id_penalties: Float[Array, "batch presence_and_frequency"]
    """Penalties of the ids that have been sampled: once (presence), and for each time that they occur (frequency)."""
    temperature: Float[Array, "batch"]
    """0 takes the likeliest token."""
    top_k: Int[Array, "batch"]
    start: Int[Array, "batch"]
    """Ids of each row before the first new token."""
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]

    @staticmethod
    def for_request(request: Request, bias: Float[np.ndarray, "vocab"], start: int) -> "RowSampling":
        """Return the settings of one row, whose numbers `Request` has checked."""
        vocab = len(bias)
        top_k = vocab if request.top_k is None else min(request.top_k, vocab)
        numbers = (
            _or_default(request.repetition_penalty, 1),
            request.temperature,
            _or_default(request.top_p, 1),
            _or_default(request.min_p, 0),
        )
        penalty, temperature, top_p, min_p = (np.asarray([clamp_setting(number)], np.float32) for number in numbers)
        settings = {
            "bias": bias[None],
            "repetition_penalty": penalty,
            "new_id_penalties": np.asarray([[request.presence_penalty, request.frequency_penalty]], np.float32),
            "temperature": temperature,
            "top_k": np.asarray([top_k], np.int32),
            "start": np.asarray([start], np.int32),
            "top_p": top_p,
            "min_p": min_p,
        }
        # Transferring all arrays together takes a third of the time of transferring each array alone.
        return RowSampling(**jax.device_put(settings))

    @staticmethod
    def neutral(batch: int, vocab: int) -> "RowSampling":
        """Return the settings of free slots: greedy, and without any change of the logits."""
        return RowSampling(
            bias=jnp.zeros((batch, vocab), jnp.float32),
            repetition_penalty=jnp.ones(batch, jnp.float32),
            new_id_penalties=jnp.zeros((batch, 2), jnp.float32),
            temperature=jnp.zeros(batch, jnp.float32),
            top_k=jnp.full(batch, vocab, jnp.int32),
            start=jnp.zeros(batch, jnp.int32),
            top_p=jnp.ones(batch, jnp.float32),
            min_p=jnp.zeros(batch, jnp.float32),
        )

    def __call__(self, logits: Float[Array, "batch vocab"], history: History) -> Float[Array, "batch vocab"]:
        """Return the changed logits; ids that must not be sampled have minus infinity.

        In a step with a draft, `logits` has several positions of each row, one after another.
        """
        positions = len(logits) // len(self.temperature)
        if positions > 1:
            repeated = jax.tree.map(lambda setting: jnp.repeat(setting, positions, axis=0), self)
            return repeated(logits, history)
        logits = logits.astype(at_least_float32(logits.dtype)) + self.bias
        # A penalty scatters ids, and a truncation sorts the vocabulary. Each of them runs only if a row asks for it.
        penalties, unchanged = self.repetition_penalty, lambda logits: logits
        rows = (history.ids, history.lengths, self.start, self.new_id_penalties)
        penalize_new = lambda logits: jax.vmap(_penalize_new)(logits, *rows)
        penalize = lambda logits: jax.vmap(_penalize_row)(logits, history.ids, history.lengths, penalties)
        cut_top_k = lambda logits: jax.vmap(_cut_top_k)(logits, self.top_k)
        cut_top_p = lambda logits: jax.vmap(_cut_top_p)(logits, self.top_p)
        logits = jax.lax.cond(jnp.any(penalties != 1), penalize, unchanged, logits)
        logits = jax.lax.cond(jnp.any(self.new_id_penalties != 0), penalize_new, unchanged, logits)
        logits = jax.vmap(_scale_row)(logits, self.temperature)
        logits = jax.lax.cond(jnp.any(self.top_k < logits.shape[1]), cut_top_k, unchanged, logits)
        logits = jax.lax.cond(jnp.any(self.top_p < 1), cut_top_p, unchanged, logits)
        return jax.vmap(_cut_min_p)(logits, self.min_p)


T = TypeVar("T")
_Logits = Float[Array, "vocab"]
_Setting = Float[Array, ""]


def _penalize_row(logits: _Logits, ids: Int[Array, "seq"], length: Int[Array, ""], penalty: _Setting) -> _Logits:
    return _with_setting(RepetitionPenalty(1), penalty)(logits[None], History(ids[None], length[None]))[0]


def _penalize_new(
    logits: _Logits,
    ids: Int[Array, "seq"],
    length: Int[Array, ""],
    start: Int[Array, ""],
    penalties: Float[Array, "presence_and_frequency"],
) -> _Logits:
    """Subtract a row's presence and frequency penalties from the logits of the ids from `start` to `length`."""
    order, vocab = jnp.arange(len(ids)), len(logits)
    new_ids = jnp.where((order >= start) & (order < length), ids, vocab)  # Other ids are dropped.
    counts = jnp.zeros(vocab, logits.dtype).at[new_ids].add(1, mode="drop")
    presence, frequency = penalties.astype(logits.dtype)
    return logits - presence * jnp.minimum(counts, 1) - frequency * counts


def _scale_row(logits: _Logits, temperature: _Setting) -> _Logits:
    """Apply a row's temperature; at 0, leave only the likeliest token."""
    rows, history = logits[None], _no_history()
    divide = _with_setting(Temperature(1), jnp.where(temperature > 0, temperature, 1))
    return jnp.where(temperature > 0, divide(rows, history), Temperature(0)(rows, history))[0]


def _cut_top_k(logits: _Logits, top_k: Int[Array, ""]) -> _Logits:
    return keep_top(logits[None], top_k)[0]


def _cut_top_p(logits: _Logits, top_p: _Setting) -> _Logits:
    return _with_setting(TopP(1), top_p)(logits[None], _no_history())[0]


def _cut_min_p(logits: _Logits, min_p: _Setting) -> _Logits:
    return _with_setting(MinP(0), min_p)(logits[None], _no_history())[0]


def _with_setting(transform: T, setting: _Setting) -> T:
    """Return a transform with another setting, which is traced; transforms are built from plain numbers only."""
    return jax.tree.map(lambda _: setting, transform)


def _no_history() -> History:
    """Return an empty history, for transforms of one row that do not read the history."""
    return History(jnp.zeros((1, 0), jnp.int32), jnp.zeros(1, jnp.int32))


def _or_default(setting: float | int | None, default: int) -> float | int:
    return default if setting is None else setting
