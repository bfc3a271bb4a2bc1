"""What proposes tokens for a model to check, and how many of its proposals were taken."""

import abc

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ._model import Model, PredictingModel


class Draft(eqx.Module):
    """What proposes `tokens` tokens at a time, from the tokens of a row and what a model made of those before each."""

    tokens: eqx.AbstractVar[int]

    @abc.abstractmethod
    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Vectors after these tokens, and the cache; `hidden` are a model's, or this draft's, after those before."""

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Those of the next token."""

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """An empty cache of which the proposals can be taken back."""


class SmallModel(Draft):
    """A smaller model of the same vocabulary, which reads the tokens by itself."""

    model: Model
    tokens: int = eqx.field(static=True)

    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """The small model's vectors."""
        read, cache, _ = self.model.encode(ids, tokens, cache)
        return read, cache

    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """The small model's."""
        return self.model.unembed(hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """The small model's."""
        known = capacity if self.model.positions is None else self.model.positions.weight.shape[0]
        return self.model.init_cache(batch, min(capacity, known), dtype, rollback=self.tokens)


class OwnPredictor(Draft):
    """The model's own predictor of a further token, which is given its own vectors to predict further still."""

    model: PredictingModel
    tokens: int = eqx.field(static=True)

    def read(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq _"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """The predictor's vectors."""
        return self.model.predict(ids, hidden, tokens, cache)

    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """By the model's head."""
        return self.model.unembed(hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """The predictor's."""
        return self.model.init_predictor_cache(batch, capacity, dtype, rollback=self.tokens)


class Drafted(eqx.Module):
    """How a draft has done, in numbers for each row of a batch."""

    steps: Int[np.ndarray, "batch"]
    """How often the model checked proposals."""
    proposed: Int[np.ndarray, "batch"]
    """How many tokens were proposed, but for those beyond the row's limit."""
    accepted: Int[np.ndarray, "batch"]
    """How many of them are in the text."""
    added: Int[np.ndarray, "batch"]
    """How many tokens the text has of these steps, the model's own among them."""

    @property
    def acceptance(self) -> float:
        """The share of the proposals that are in the text."""
        return float(np.sum(self.accepted) / max(np.sum(self.proposed), 1))

    @property
    def tokens_per_step(self) -> float:
        """How many tokens a row gets of a step of the model; without a draft it is 1."""
        return float(np.sum(self.added) / max(np.sum(self.steps), 1))


def draft_of(model: Model, draft: Model | str, tokens: int, total: int) -> Draft:
    """The draft, checked against the model for rows of up to `total` tokens; raises a `ValueError` if it cannot be."""
    if tokens < 1:
        raise ValueError(f"generate(draft_tokens={tokens}): a draft proposes at least 1 token at a time.")
    _check_frequencies((model, draft), total)
    if not isinstance(draft, str):
        _check_fits(model, draft, total)
        return SmallModel(model=draft, tokens=tokens)
    if draft != "mtp" or not isinstance(model, PredictingModel) or model.predictor is None:
        raise ValueError(
            f"generate(draft={draft!r}): a draft is a smaller model or, of a model that was loaded or built with "
            f'predictor=True, its own predictor, draft="mtp"; the model is a {type(model).__name__} without one.'
        )
    return OwnPredictor(model=model, tokens=tokens)


def _check_fits(model: Model, draft: Model, total: int) -> None:
    if draft.vocab != model.vocab:
        raise ValueError(
            f"generate(draft): the draft has {draft.vocab} ids and the model {model.vocab}; a draft proposes ids of "
            "the model's own vocabulary, so give a model of the same tokenizer."
        )
    if draft.positions is not None and total - 1 > (known := draft.positions.weight.shape[0]):
        raise ValueError(
            f"generate(draft): rows of up to {total} tokens exceed the draft's {known} learned positions; give shorter "
            "prompts, fewer new tokens or no draft."
        )


def _check_frequencies(models: PyTree, total: int) -> None:
    for rotary in nn.modules(models, nn.Rotary):
        if rotary.changes_within(total):
            raise ValueError(
                f"generate(draft): rotary frequencies of {type(rotary.scaling).__name__} change with each token beyond "
                f"its original_length, and rows have up to {total} tokens, of which several are read at once; give "
                "shorter prompts, fewer new tokens or no draft."
            )
