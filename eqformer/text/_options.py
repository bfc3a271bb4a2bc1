"""Settings of a call that generates text."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING, TypedDict

from .. import generation


if TYPE_CHECKING:
    from ._llm import LLM


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments that `LLM.generate` and `LLM.chat` share; each may be left out."""

    max_new_tokens: int
    """Most tokens to draw for a text; 256 by default. A text that ends by itself is shorter."""
    stop: str | Sequence[str]
    """Strings that end a text, which does not contain them; none by default."""
    temperature: float | int
    """0, the default, takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: int | None
    """Draw from the `top_k` likeliest tokens only."""
    top_p: float | int | None
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float | int | None
    """Draw from the tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: float | int | None
    """Above 1: make tokens that are already in the text less likely."""
    seed: int
    """Seed of the draws, 0 by default: the same seed gives the same text."""
    batch_size: int | None
    """Texts of a list that are drawn together; None, the default, draws all. The texts do not depend on it."""
    cache_dtype: str | None
    """Dtype of keys and values in the cache: None, the default, is the dtype in which they are computed; `"int8"` and
    `"fp8"` take less memory."""
    draft: "LLM | generation.Model | str | None"
    """A smaller model that proposes tokens, or `"mtp"`, the model's own predictor. Drawing is faster, and the texts
    have the same distribution."""
    draft_tokens: int
    """Tokens that the draft proposes at a time; 4 by default."""


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments of `LLM.chat`: those of `GenerateOptions`, and one more."""

    template_options: Mapping[str, object]
    """Further variables of the chat template, such as `{"enable_thinking": False}`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The `GenerateOptions` of a call, with a default for each option that is left out."""

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    temperature: float | int = 0.0
    top_k: int | None = None
    top_p: float | int | None = None
    min_p: float | int | None = None
    repetition_penalty: float | int | None = None
    seed: int = 0
    batch_size: int | None = None
    cache_dtype: str | None = None
    draft: "LLM | generation.Model | str | None" = None
    draft_tokens: int = 4

    def __post_init__(self):
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(
                f"generate(batch_size={self.batch_size}): at least 1 text must be drawn at a time; None draws all."
            )
        if not isinstance(self.stop, str | Sequence) or not all(isinstance(text, str) for text in self.stop):
            raise ValueError(
                f"generate(stop={self.stop!r}): strings end a text; give a string, or a list such as ['\\n']."
            )

    @staticmethod
    def from_options(call: str, options: Mapping[str, Any]) -> "Settings":
        """Return the settings of a call; raise a `TypeError` for an option that does not exist, with the nearest."""
        names = [field.name for field in dataclasses.fields(Settings)]
        if unknown := [name for name in options if name not in names]:
            near = difflib.get_close_matches(unknown[0], names, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the options are {', '.join(names)}."
            raise TypeError(f"{call}({unknown[0]}=...): there is no such option; {advice}")
        return Settings(**options)

    @property
    def transforms(self) -> generation.Chain:
        """The transforms of logits that these settings describe."""
        return generation.sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
