"""Embed the texts of a server's requests by one text encoder: texts that wait at the same time share a batch."""

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from ..data import EncodedText
from ..text import TextEncoder
from ._metrics import ServerMetrics
from ._protocol import EmbeddingRequest, RequestError
from ._service import Limits, Service


EMBEDDING_LIMITS = Limits(texts=2048, waiting=4096)
"""The default limits of an `EmbeddingService`."""
_BATCHES = 4  # Batches of one step. The encoder sorts the texts of a step by length, and divides them into batches.
_MAX_COMPILED = 512  # Programs for longer texts than this number of tokens are not compiled before the first request.


@dataclasses.dataclass(eq=False)
class _EmbeddingJob:
    """The texts of one request that still wait, and the vectors of its embedded texts."""

    request: EmbeddingRequest
    rows: Sequence[EncodedText]
    """The tokens of each text."""
    result: asyncio.Future[list[Float[np.ndarray, "features"]]]
    """The vectors of all texts, in their order."""

    def __post_init__(self):
        self.vectors: dict[int, Float[np.ndarray, "features"]] = {}
        # The indices of the texts, the shortest text first; texts are taken from the end of this list.
        self.waiting = sorted(range(len(self.rows)), key=lambda number: len(self.rows[number].ids))

    def add(self, number: int, vector: Float[np.ndarray, "features"]) -> None:
        """Store the vector of a text; the last vector ends the job."""
        self.vectors[number] = vector
        if len(self.vectors) == len(self.rows) and not self.result.done():
            self.result.set_result([self.vectors[index] for index in range(len(self.vectors))])

    def fail(self, error: RequestError) -> None:
        """End the job with an error."""
        if not self.result.done():
            self.result.set_exception(error)


class EmbeddingService(Service):
    """Service that embeds the texts of many requests with one text encoder.

    One thread runs the encoder. Each step takes texts from all waiting requests in turn, so that short requests do not
    wait for long ones.
    """

    def __init__(self, encoder: TextEncoder, *, limits: Limits | None = None, batch_size: int = 32):
        """Prepare the service, and embed a short text to check that the encoder works.

        Args:
            encoder: The text encoder, as `eqformer.load` returns it.
            limits: The limits on requests; None: `EMBEDDING_LIMITS`, 2,048 texts in a request and 4,096 that wait.
            batch_size: Texts that the encoder reads together.
        """
        counters = ("prompt_tokens", "embedded_texts", "cancelled_requests", "encoder_failures")
        metrics = ServerMetrics(counters, ("step", "request"))
        super().__init__(limits or EMBEDDING_LIMITS, metrics)
        self.encoder, self.batch_size = encoder, batch_size
        self._channels = len(encoder.embed("a", batch_size=batch_size))
        self._jobs: collections.deque[_EmbeddingJob] = collections.deque()
        self._worker: asyncio.Task[None] | None = None

    @property
    def slots(self) -> int:
        """Number of texts that are embedded at once."""
        return _BATCHES * self.batch_size

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens of a text; None: texts of any length are read."""
        return self.encoder.max_length

    def compile(self, progress: Callable[[str], object] = lambda line: None) -> None:
        """Compile the programs of single texts of up to 512 tokens.

        Programs of longer texts and of several rows are compiled when they are first needed.
        """
        start = time.monotonic()
        longest = min(self.encoder.max_length or _MAX_COMPILED, _MAX_COMPILED)
        (shortest,) = (len(row.ids) for row in self.encoder.tokenize(["a"]))
        # The encoder pads texts to powers of two from 16 tokens on, and to the numbers half-way between these powers.
        width = 16
        while width <= longest:
            for tokens in (width, width * 3 // 2):
                if shortest <= tokens <= longest:
                    # In most vocabularies the word is one token.
                    self.encoder.embed(" ".join(["a"] * (tokens - shortest + 1)), batch_size=self.batch_size)
                    progress(f"compiled for texts of {tokens} tokens, {time.monotonic() - start:,.1f} s")
            width *= 2

    async def tokenize(self, request: EmbeddingRequest) -> list[EncodedText]:
        """Return the tokens of a request's texts; raise a `RequestError` if the request breaks a rule."""
        prompts = self.encoder.prompts
        if request.prompt_name is not None and request.prompt_name not in prompts:
            known = ", ".join(map(repr, prompts))
            rule = f"the model's prompts are {known}; name one" if prompts else "the model has no prompts; leave it out"
            message = f"prompt_name is {request.prompt_name[:80]!r}, but {rule}."
            raise RequestError(400, message, parameter="prompt_name")
        if request.dimensions is not None and request.dimensions > self._channels:
            message = f"dimensions is {request.dimensions:,}, but a vector has {self._channels:,}; ask for fewer."
            raise RequestError(400, message, parameter="dimensions")
        rows = await asyncio.to_thread(self.encoder.tokenize, request.texts, prompt_name=request.prompt_name)
        for number, row in enumerate(rows):
            self._check_length(number, len(row.ids))
        self.metrics.add("prompt_tokens", sum(len(row.ids) for row in rows))
        return rows

    async def embed(
        self, request: EmbeddingRequest, rows: Sequence[EncodedText]
    ) -> Float[np.ndarray, "texts features"]:
        """Return the vectors of a request's texts; if the call is cancelled, its waiting texts are dropped."""
        job = _EmbeddingJob(request, rows, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        try:
            vectors = np.stack(await job.result)
        except asyncio.CancelledError:
            self.metrics.add("cancelled_requests")
            raise
        if wrong := np.flatnonzero(~np.isfinite(vectors).all(-1)).tolist():
            raise RequestError(500, f"the vector of input[{wrong[0]}] has infinite numbers or NaN; check the weights.")
        self.metrics.add("embedded_texts", len(vectors))
        return vectors

    async def _run(self) -> None:
        """Embed the texts that wait, step by step, until none is left."""
        while batch := self._take():
            start = time.monotonic()
            try:
                vectors = await asyncio.to_thread(self._embed, batch)
            except Exception as error:
                self.metrics.add("encoder_failures")
                logging.getLogger("eqformer").exception("the encoder failed at %d texts", len(batch))
                for job, _ in batch:
                    job.fail(RequestError(500, f"the encoder failed ({type(error).__name__}); try again."))
            else:
                for (job, number), vector in zip(batch, vectors, strict=True):
                    job.add(number, vector)
            self.metrics.observe("step", time.monotonic() - start)

    def _take(self) -> list[tuple[_EmbeddingJob, int]]:
        """Take the texts of the next step from the jobs that wait, one text of each job in turn."""
        batch: list[tuple[_EmbeddingJob, int]] = []
        while self._jobs and len(batch) < self.slots:
            job = self._jobs.popleft()
            # A job has ended early if its client hung up, or if an earlier step failed.
            if not job.result.done():
                batch.append((job, job.waiting.pop()))
                if job.waiting:
                    self._jobs.append(job)
        return batch

    def _embed(self, batch: Sequence[tuple[_EmbeddingJob, int]]) -> list[Float[np.ndarray, "features"]]:
        """Return the vectors of texts; texts with the same prompt and number of channels are embedded together."""
        tokens = [job.rows[number] for job, number in batch]
        groups = collections.defaultdict[tuple[str | None, int | None], list[int]](list)
        for row, (job, _) in enumerate(batch):
            groups[job.request.prompt_name, job.request.dimensions].append(row)
        vectors: dict[int, Float[np.ndarray, "features"]] = {}
        for (prompt_name, dimensions), rows in groups.items():
            results = self.encoder.embed_tokens(
                [tokens[row] for row in rows],
                prompt_name=prompt_name,
                truncate_dim=dimensions,
                normalize=dimensions is not None,
                batch_size=self.batch_size,
            )
            vectors.update(zip(rows, results, strict=True))
        return [vectors[row] for row in range(len(batch))]

    def _check_length(self, number: int, length: int) -> None:
        """Raise a `RequestError` for a text without tokens, or with too many tokens."""
        limits = [limit for limit in (self.limits.prompt_tokens, self.capacity) if limit is not None]
        max_tokens = min(limits, default=None)
        if not length:
            message = f"input[{number}] has no token, and the tokenizer adds none; give at least a character."
            raise RequestError(400, message, parameter="input")
        if max_tokens is not None and length > max_tokens:
            message = f"input[{number}] has {length:,} tokens, but at most {max_tokens:,} are read; shorten it."
            raise RequestError(400, message, parameter="input", code="context_length_exceeded")
