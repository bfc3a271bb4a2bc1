"""What proposes tokens for a model to check, and how many of its proposals were taken."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ._model import Model


class Draft(eqx.Module):
    """A smaller model of the same vocabulary that proposes `tokens` tokens at a time."""

    model: Model
    tokens: int = eqx.field(static=True)

    def read(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Hidden vectors after these tokens, and the cache."""
        hidden, cache, _ = self.model.encode(ids, tokens, cache)
        return hidden, cache

    def logits(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Those of the next token."""
        return self.model.unembed(hidden)

    def init_cache(self, batch: int, capacity: int, dtype: str | None) -> PyTree:
        """An empty cache of which the proposals can be taken back."""
        known = capacity if self.model.positions is None else self.model.positions.weight.shape[0]
        return self.model.init_cache(batch, min(capacity, known), dtype, rollback=self.tokens)


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


def draft_of(model: Model, draft: Model, tokens: int, total: int) -> Draft:
    """The draft, checked against the model for rows of up to `total` tokens; raises a `ValueError` if it cannot be."""
    if tokens < 1:
        raise ValueError(f"generate(draft_tokens={tokens}): a draft proposes at least 1 token at a time.")
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
    for rotary in nn.modules((model, draft), nn.Rotary):
        if rotary.depends_on_length and total > getattr(rotary.scaling, "original_length", 0):
            raise ValueError(
                f"generate(draft): rotary frequencies of {type(rotary.scaling).__name__} change with each token beyond "
                f"its original_length, and rows have up to {total} tokens, of which several are read at once; give "
                "shorter prompts, fewer new tokens or no draft."
            )
    return Draft(draft, tokens)
