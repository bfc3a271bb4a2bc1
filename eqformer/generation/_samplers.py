"""`Sampler`: how a model writes, one token after another or one block after another, behind the same three methods."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Required, runtime_checkable, TypedDict, Unpack

from jaxtyping import Array, Key

from ..nn import block_of
from ._block_engine import BlockEngine
from ._blocks import generate_blocks, stream_blocks
from ._denoise import BlockOrder
from ._engine import Engine
from ._generate import generate, Generation, stream
from ._model import Model
from ._request_engine import RequestEngine
from ._score_blocks import score_blocks
from ._score_tokens import Ids, score_tokens, TokenScores
from ._speculative import DraftStatistics
from ._transforms import Transform


class SamplerOptions(TypedDict, total=False):
    """Keyword arguments of `Sampler.stream`, as `generate` describes them."""

    max_new_tokens: Required[int]
    """Maximum number of tokens to generate for a text."""
    transforms: Sequence[Transform] | Transform
    """Changes of the logits before an id is sampled."""
    end_of_text: int | Sequence[int] | None
    """The id, or ids, that end a text."""
    cache_dtype: str | None
    """The dtype of keys and values in the cache; None: the compute dtype."""
    draft: Model | str | None
    """A smaller model that proposes tokens; `"mtp"` is the model's own predictor."""
    draft_tokens: int
    """Tokens that the draft proposes at a time."""
    key: Required[Key[Array, ""]]
    """The key of all random samples."""


class BatchOptions(SamplerOptions, total=False):
    """Keyword arguments of `Sampler.generate`, as `generate` describes them."""

    examples: Sequence[int]
    """A number for each text; `key` and this number determine the text's random samples."""
    log_probabilities: bool
    """Whether to return log-probabilities of the sampled ids."""
    ends_row: Callable[[int, list[int]], bool] | None
    """A function of a text's number and its new ids so far that says whether the text has ended."""


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `Sampler.engine`, as `Engine` describes them."""

    slots: int
    """Number of requests that are continued at once."""
    capacity: int
    """Maximum number of ids of a row, prompt included."""
    prefill_chunk: int
    """Number of prompt ids that are read at once."""
    stride: int
    """Maximum number of tokens of each row that are generated before the host reads them."""
    prefixes: int
    """Number of prompt prefixes whose caches are stored for later prompts."""
    cache_dtype: str | None
    """The dtype of keys and values in the caches; None: the compute dtype."""
    draft: Model | str | None
    """A smaller model that proposes tokens; `"mtp"` is the model's own predictor."""
    draft_tokens: int
    """Tokens that the draft proposes at a time."""


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of `Sampler.score`, as `score_tokens` describes them."""

    batch_size: int | None
    """Maximum number of rows that are read at once; None: all."""
    progress: Callable[[int, int], object]
    """A function that is called with the number of scored rows and the number of all rows."""


@runtime_checkable
class IdStream(Protocol):
    """Iterator over the ids of one text while they are generated."""

    @property
    def draft(self) -> DraftStatistics | None: ...

    def __iter__(self) -> Iterator[int]: ...

    def __next__(self) -> int: ...


class Sampler(abc.ABC):
    """The way in which a model writes; `sampler_of(model)` returns the sampler that suits the model."""

    reads_last_id: ClassVar[bool] = False
    """Whether `score` reads the last id of a continuation; a model that predicts next tokens does not."""

    @abc.abstractmethod
    def generate(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        **options: Unpack[BatchOptions],
    ) -> Generation:
        """Continue each prompt; raise a `ValueError` for options that this kind of model does not support."""

    @abc.abstractmethod
    def stream(self, model: Model, prompt: Sequence[int], **options: Unpack[SamplerOptions]) -> IdStream:
        """Yield the ids of one text while they are generated."""

    @abc.abstractmethod
    def engine(self, model: Model, **options: Unpack[EngineOptions]) -> RequestEngine:
        """Return an engine that continues many requests at once."""

    @abc.abstractmethod
    def score(
        self, model: Model, prompts: Sequence[Ids], continuations: Sequence[Ids], **options: Unpack[ScoreOptions]
    ) -> list[TokenScores]:
        """Return the scores of each id of known continuations; their sum may be a bound on the log-probability."""


@dataclasses.dataclass(frozen=True)
class NextTokenSampler(Sampler):
    """Sampling of one token after another, by `generate`, `stream` and `Engine`."""

    def generate(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        **options: Unpack[BatchOptions],
    ) -> Generation:
        """Continue each prompt."""
        return generate(model, prompts, **options)

    def stream(self, model: Model, prompt: Sequence[int], **options: Unpack[SamplerOptions]) -> IdStream:
        """Yield the ids of one text while they are generated."""
        return stream(model, prompt, **options)

    def engine(self, model: Model, **options: Unpack[EngineOptions]) -> Engine:
        """Return an `Engine`."""
        return Engine(model, **options)

    def score(
        self, model: Model, prompts: Sequence[Ids], continuations: Sequence[Ids], **options: Unpack[ScoreOptions]
    ) -> list[TokenScores]:
        """Return the scores of `score_tokens`."""
        return score_tokens(model, prompts, continuations, **options)


@dataclasses.dataclass(frozen=True)
class BlockSampler(Sampler):
    """Denoising of one block after another, by `generate_blocks`, `stream_blocks`, `BlockEngine` and `score_blocks`.

    A model of block diffusion has no log-probabilities of tokens and no draft; calls that ask for them raise a
    `ValueError`. The options `prefill_chunk`, `stride` and `prefixes` of an engine have no effect.
    """

    reads_last_id: ClassVar[bool] = True
    mask_id: int | None = None
    """The id of a masked token, with which the model was trained. `eqformer.load` and the scripts take the id that the
    model's files name; without an id, calls raise a `ValueError`."""
    steps: int | None = None
    """Maximum number of passes that fill a block; None: the number of its tokens. With fewer passes, a pass fills
    several tokens."""
    order: BlockOrder = "confidence"
    """`confidence` fills the tokens of the highest probability first, `random` tokens in random order."""
    threshold: float = 1.0
    """The probability above which a sampled token is filled at once; with 1, `steps` alone determines how many tokens a
    pass fills."""
    score_samples: int = 32
    """Maximum number of choices of masked tokens that are read for each block of a text to score."""

    def generate(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        **options: Unpack[BatchOptions],
    ) -> Generation:
        """Continue each prompt; raise a `ValueError` for log-probabilities and a draft."""
        if options.get("log_probabilities"):
            raise ValueError(
                "generate(log_probs=True): a model of block diffusion gives texts no log-probabilities, because it "
                "does not fill the tokens of a block from left to right; leave log_probs out."
            )
        return generate_blocks(model, prompts, **self._settings("generate", options))

    def stream(self, model: Model, prompt: Sequence[int], **options: Unpack[SamplerOptions]) -> IdStream:
        """Yield the ids of one text, as soon as their block is finished; raise a `ValueError` for a draft."""
        return stream_blocks(model, prompt, **self._settings("stream", options))

    def engine(self, model: Model, **options: Unpack[EngineOptions]) -> BlockEngine:
        """Return a `BlockEngine`; raise a `ValueError` for a draft."""
        return BlockEngine(model, **self._settings("engine", options))

    def score(
        self, model: Model, prompts: Sequence[Ids], continuations: Sequence[Ids], **options: Unpack[ScoreOptions]
    ) -> list[TokenScores]:
        """Return the scores of `score_blocks`, whose sum is the evidence lower bound on the log-probability."""
        settings = self._settings("score", options)
        del settings["order"]
        return score_blocks(model, prompts, continuations, samples=self.score_samples, **settings)

    def _settings(self, call: str, options: Any) -> dict[str, Any]:
        """Return the keyword arguments of a function of block diffusion; errors begin with the name of the `call`."""
        if options.get("draft") is not None:
            raise ValueError(
                f"{call}(draft=...): a draft proposes one token after another, but a model of block diffusion "
                "does not fill the tokens of a block from left to right; leave draft out."
            )
        if self.mask_id is None:
            raise ValueError(
                f"{call}: the model's files name no mask token; state its id, by --blocks.mask-id or as in "
                "dataclasses.replace(llm, sampler=generation.BlockSampler(mask_id=5))."
            )
        rule = {name: getattr(self, name) for name in ("mask_id", "steps", "order", "threshold")}
        return rule | {name: value for name, value in options.items() if name not in _UNSUPPORTED_OPTIONS}


_UNSUPPORTED_OPTIONS = ("log_probabilities", "draft", "draft_tokens", "prefill_chunk", "stride", "prefixes")
"""Options that the functions of block diffusion do not have."""


def sampler_of(model: Model, mask_id: int | None = None) -> Sampler:
    """Return a `BlockSampler` with the mask id for a model whose masks have blocks, and else a `NextTokenSampler`."""
    return NextTokenSampler() if block_of(model) is None else BlockSampler(mask_id)
