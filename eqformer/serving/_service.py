"""Generate the texts of a server's requests by one engine: limits, admission, draining, replacing a failed engine."""

import abc
import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .. import data, generation, interpretability
from .._files import JsonObject
from ..text import build_kernels, Grammar, LLM, TextEngine, TextPiece
from ._metrics import ServerMetrics
from ._protocol import ChatRequest, CompletionRequest, RequestError, TextOptions
from ._tool_calls import find_call_format, find_marker_ids


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the requests and the connections of a server.

    The number in parentheses is the HTTP status of the response to a request that exceeds the limit.
    """

    prompt_tokens: int | None = None
    """Maximum number of tokens of a prompt, or of a text to embed (400).

    None: a prompt must fit into the engine's rows, and a text to embed into the encoder's `max_length`.
    """
    new_tokens: int = 1024
    """Maximum number of new tokens of a text (400), and the default number for a chat."""
    texts: int = 16
    """Maximum number of texts that one request may embed, or may generate for all of its prompts together (400)."""
    waiting: int = 64
    """Maximum number of texts that wait until others have ended (429)."""
    seconds: float | int = 300.0
    """Longest time from a request to its response (408)."""
    body_bytes: int = 1 << 22
    """Bytes of the largest body (413)."""
    body_seconds: float | int = 30.0
    """Longest time in which a body must arrive (408)."""
    idle_seconds: float | int = 15.0
    """Longest time that a connection may take to send the head of a request, before it is closed."""
    connections: int = 4096
    """Maximum number of open connections. If another one is opened, the connection that has been idle longest is
    closed."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (value < 0 or (value == 0 and field.name != "waiting")):
                least = "at least 0" if field.name == "waiting" else "above 0"
                raise ValueError(f"Limits({field.name}={value}): {field.name} must be {least}.")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of a request, as the engine takes it."""

    ids: list[int]
    """The prompt as token ids."""
    messages: Sequence[Mapping[str, object]] | None = None
    """The chat messages from which the ids were rendered; None: a plain prompt, which the text continues."""
    grammar: Grammar | None = None
    """The grammar of the text; None: any text."""
    keeps_special_tokens: bool = False
    """Whether the text keeps special tokens, with which some models mark tool calls."""

    @property
    def length(self) -> int:
        """Number of prompt tokens."""
        return len(self.ids)

    @property
    def field(self) -> str:
        """The field of the request's body that holds the prompt."""
        return "prompt" if self.messages is None else "messages"

    @property
    def grammar_field(self) -> str | None:
        """The field of the request's body that asks for the grammar; None: there is no grammar."""
        if self.grammar is None:
            return None
        return "response_format" if self.grammar.kind == "json_schema" else "tool_choice"


class Service(abc.ABC):
    """Admission of the requests to one model: limits, the number of active texts, metrics and draining."""

    def __init__(self, limits: Limits, metrics: ServerMetrics):
        self.limits, self.metrics = limits, metrics
        self.active = 0
        """Number of texts that wait or are computed."""
        self.is_draining = False
        """Whether new requests are refused, because the server ends."""
        self._failure = ""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Number of texts that are computed at once."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int | None:
        """Maximum number of tokens of a text; None: texts may have any length."""

    @abc.abstractmethod
    def compile(self, progress: Callable[[str], object] = lambda line: None) -> None:
        """Compile the programs before the first request; after each program, `progress` is called with a line."""

    def drain(self) -> None:
        """Refuse new requests from now on; admitted texts are finished. The server then ends when no text is left."""
        self.is_draining = True

    @property
    def waiting(self) -> int:
        """Number of texts that wait until others have ended."""
        return max(0, self.active - self.slots)

    @property
    def refusal(self) -> str:
        """The reason why all requests are refused; empty if requests are accepted."""
        return "the server is ending" if self.is_draining else self._failure

    def gauges(self) -> dict[str, int]:
        """Return the gauges of `/metrics` by name."""
        return {"active_texts": self.active, "waiting_texts": self.waiting, "slots": self.slots}

    @contextlib.contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count `count` texts as active in the block; raise a `RequestError` if there is no room for them."""
        if self.refusal:
            raise RequestError(503, f"{self.refusal}; try again later, or another server.", code="unavailable")
        max_texts = self.slots + self.limits.waiting
        if count > max_texts:
            raise RequestError(400, f"the request has {count} texts, but {max_texts} fit at once; ask for fewer.")
        if self.active + count > max_texts:
            message = f"{self.active} texts are being computed or wait, and the limit is {max_texts}; try again later."
            raise RequestError(429, message, code="queue_full")
        self.active += count
        try:
            yield
        finally:
            self.active -= count


class TextService(Service):
    """Service that generates the texts of many requests with one engine."""

    def __init__(self, llm: LLM, *, limits: Limits | None = None, **engine_options: Any):
        """Prepare an engine.

        Args:
            llm: The model with its tokenizer, as `eqformer.load` returns it.
            limits: The limits on requests; None: the default `Limits`.
            **engine_options: The arguments of `LLM.engine`, such as `slots` and `capacity`.
        """
        counters = ("prompt_tokens", "generated_tokens", "cancelled_requests", "engine_failures")
        super().__init__(limits or Limits(), ServerMetrics(counters, ("first_token", "between_tokens", "request")))
        self.llm = llm
        self._make_engine = functools.partial(llm.engine, **engine_options)
        self.engine = self._make_engine()
        self._scoring = asyncio.Lock()
        self.expert_layers = interpretability.expert_layers(llm.model)
        """Indices of the layers in which tokens choose experts."""

    @property
    def slots(self) -> int:
        """Number of texts that are generated at once."""
        return self.engine.engine.slots

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a text, prompt included."""
        return self.engine.engine.capacity

    def gauges(self) -> dict[str, int]:
        """Return the gauges of `/metrics` by name."""
        return super().gauges() | {"cache_bytes": self.engine.cache_bytes}

    async def encode_completion(self, request: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a completion; raise a `RequestError` for a prompt that cannot be continued."""
        if request.best_of > request.options.count:  # Log-probabilities decide which texts are best.
            self._refuse("log_probabilities", "best_of")
        with _as_bad_request("prompt"):
            rows = await asyncio.to_thread(lambda: [self._encode(prompt) for prompt in request.prompts])
        prompts = [Prompt(ids) for ids in rows]
        for prompt in prompts:
            self._check(prompt, request.options)
        return prompts

    async def encode_chat(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a chat; raise a `RequestError` for a conversation that cannot be answered."""
        options = request.template_options | ({"tools": request.tools} if request.tools else {})

        tokens = functools.partial(
            self.llm.chat_tokens,
            request.messages,
            continue_final_message=request.options.settings.continue_final_message,
        )

        def encode() -> tuple[list[int], Grammar | None]:
            ids = tokens(options)
            if request.tools and ids == tokens(request.template_options):
                reason = "tools: the model's chat template leaves out tools; send the request without tools."
                raise RequestError(400, reason, parameter="tools")
            if request.forced_tools:
                return self._force_call(request, options, ids)
            return ids, None if request.schema is None else Grammar("json_schema", request.schema)

        with _as_bad_request("messages"):
            ids, grammar = await asyncio.to_thread(encode)
        prompt = Prompt(ids, request.messages, grammar, keeps_special_tokens=bool(request.tools))
        self._check(prompt, request.options)
        return prompt

    async def start(self, prompt: Prompt, options: TextOptions, example: int) -> AsyncGenerator[TextPiece, None]:
        """Return an iterator over the pieces of a text, which is generated while the pieces are read.

        Closing the iterator ends the request. Raises a `RequestError` for settings that the engine refuses.

        Args:
            prompt: The prompt.
            options: The settings.
            example: The text's index within its request; its random samples depend on this number.
        """
        engine = self.engine
        decoder = _SpecialTokenDecoder(self.llm.tokenizer) if prompt.keeps_special_tokens else None
        # With an encoder, the prompt takes no room in the decoder's row, which begins with one start id.
        used = prompt.length if self.llm.model.start is None else 1
        max_new_tokens = options.settings.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = min(self.limits.new_tokens, engine.engine.capacity - used)
        request = dataclasses.replace(
            options.settings,
            prompt=prompt.ids if prompt.messages is None else prompt.messages,
            max_new_tokens=max_new_tokens,
            example=example,
            allowed=prompt.grammar,
        )

        def make_stream() -> AsyncGenerator[TextPiece, None]:
            return engine.stream(request, prompt_ids=prompt.ids, decoder=decoder)

        with _as_bad_request(prompt.grammar_field or "the body"):
            # Compiling a grammar takes time, so a thread does it while the event loop serves other requests.
            pieces = await asyncio.to_thread(make_stream)
        return self._observe(engine, pieces, prompt)

    async def score(self, ids: Sequence[int], alternatives: int) -> generation.TokenScores:
        """Return the scores of a text's ids after the first id, each with `alternatives` likely ids."""
        score = functools.partial(generation.score_tokens, alternatives=alternatives)
        async with self._scoring:
            scores = await asyncio.to_thread(score, self.llm.model, [ids[:1]], [ids[1:]])
        return scores[0]

    def check_experts(self) -> None:
        """Raise a `RequestError` for a model without layers in which tokens choose experts."""
        if not self.expert_layers:
            reason = "tokens choose no experts in this model's layers, or the choice cannot be read; leave experts out."
            raise RequestError(400, reason, parameter="experts")

    async def trace_experts(self, prompt: Prompt, ids: Sequence[int]) -> list[interpretability.LayerExperts]:
        """Return the experts that read each new token, by one forward pass over the prompt and the new tokens.

        Raises a `RequestError` if the pass fails.
        """
        start = self.llm.model.start
        text, source = ([*prompt.ids, *ids], None) if start is None else ([start, *ids], prompt.ids)
        first = len(text) - len(ids)
        try:
            async with self._scoring:
                layers = await asyncio.to_thread(interpretability.trace_experts, self.llm.model, text, source)
        except Exception as error:
            logging.getLogger("eqformer").exception("the experts of a text could not be read")
            raise RequestError(500, f"the experts could not be read ({type(error).__name__}).") from error
        return [chosen._replace(experts=chosen.experts[first:], weights=chosen.weights[first:]) for chosen in layers]

    def compile(self, progress: Callable[[str], object] = lambda line: None) -> None:
        """Build the kernel for quantized weights, and compile the programs of the engine by generating short texts."""
        start = time.monotonic()
        build_kernels(self.llm.model, warn=progress)
        engine = self.engine.engine
        requests = engine.warm_up_requests()
        for number, request in enumerate(requests, 1):
            for result in engine.run([request]):
                if result.error:
                    raise RuntimeError(result.error)
            progress(f"compiled for request {number} of {len(requests)}, {time.monotonic() - start:,.1f} s")

    async def _observe(
        self, engine: TextEngine, pieces: AsyncGenerator[TextPiece, None], prompt: Prompt
    ) -> AsyncGenerator[TextPiece, None]:
        """Pass pieces on, and count tokens and times; an error of the engine becomes a `RequestError`."""
        last, result = time.monotonic(), None
        is_first = True
        try:
            async for piece in pieces:
                if piece.ids:
                    now = time.monotonic()
                    seconds, last = now - last, now
                    self.metrics.add("generated_tokens", len(piece.ids))
                    self.metrics.observe("first_token" if is_first else "between_tokens", seconds)
                    is_first = False
                result = piece.result
                if result is not None and result.finish_reason == "error":
                    field = prompt.grammar_field
                    message = _without_call(result.error)
                    raise RequestError(500, f"{field}: {message}" if field else message, parameter=field)
                yield piece
        except (GeneratorExit, asyncio.CancelledError):
            if result is None:
                self.metrics.add("cancelled_requests")
            raise
        except RequestError:
            raise
        except Exception as error:
            self._replace_engine(engine, error)
            raise RequestError(500, f"the engine failed ({type(error).__name__}); try again.") from error
        finally:
            await pieces.aclose()

    def _replace_engine(self, failed: TextEngine, error: Exception) -> None:
        """Replace an engine that has failed."""
        if self.engine is not failed:
            return
        self.metrics.add("engine_failures")
        logging.getLogger("eqformer").exception("the engine failed, and another one is made", exc_info=error)
        try:
            failed.engine.delete_caches()
            self.engine = self._make_engine()
        except Exception as second:
            self._failure = f"the engine failed and could not be made again ({type(second).__name__})"

    def _force_call(self, request: ChatRequest, options: JsonObject, ids: list[int]) -> tuple[list[int], Grammar]:
        """Return the prompt of a chat whose answer must call a tool, and the grammar of the answer.

        Args:
            request: The request.
            options: The variables of the template.
            ids: The prompt of an answer that need not call a tool.
        """
        tokenizer, template = self.llm.tokenizer, self.llm.chat_template
        ends = [tokenizer.decode_prompt([number]) for number in self.llm.end_ids]
        call_format = template and find_call_format(template, request.messages, options, ends)
        if not template or call_format is None:
            reason = (
                "tool_choice: the model's chat template writes calls of tools in a format that is not known here, so "
                "no call can be forced; leave tool_choice out, or give auto or none."
            )
            raise RequestError(400, reason, parameter="tool_choice")
        if call_format.lead:
            ids = self.llm.chat_tokens(request.messages, options, lead=call_format.lead)
        with _as_bad_request("tools"):
            return ids, call_format.grammar(request.forced_tools, self._marker_ids)

    @functools.cached_property
    def _marker_ids(self) -> dict[str, int]:
        return find_marker_ids(self.llm.tokenizer)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        ids = self.llm.tokens(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            message = "a prompt is empty, and the tokenizer adds no beginning of text; give at least a character."
            raise RequestError(400, message, parameter="prompt")
        return ids

    def _check(self, prompt: Prompt, options: TextOptions) -> None:
        """Raise a `RequestError`, which names a field of the request's body, for a request that the engine would
        refuse."""
        vocab = self.llm.model.vocab
        for field, ids in ((prompt.field, prompt.ids), ("logit_bias", options.settings.logit_bias)):
            if (outside := next((number for number in ids if number >= vocab), None)) is not None:
                message = f"{field}: the token id {outside} is unknown; the model's {vocab:,} ids are 0 to {vocab - 1}."
                raise RequestError(400, message, parameter=field)
        if prompt.grammar is not None:
            self._refuse("allowed", prompt.grammar_field)
        if options.alternatives is not None:
            self._refuse("log_probabilities", "logprobs")
        self._check_length(prompt, options)

    def _refuse(self, setting: str, field: str | None) -> None:
        """Raise a `RequestError` that names a field of the body if the engine cannot honour a setting."""
        if reason := self.engine.engine.unsupported.get(setting):
            raise RequestError(400, f"{field}: {reason}; leave {field} out.", parameter=field)

    def _check_length(self, prompt: Prompt, options: TextOptions) -> None:
        """Raise a `RequestError` if a prompt and its new tokens exceed a limit."""
        limits, capacity = self.limits, self.engine.engine.capacity
        longest = capacity - 1 if limits.prompt_tokens is None else min(limits.prompt_tokens, capacity - 1)
        if prompt.length > longest:
            message = f"the prompt has {prompt.length:,} tokens, but at most {longest:,} are read; shorten it."
            raise RequestError(400, message, parameter=prompt.field, code="context_length_exceeded")
        new, max_new = options.settings.max_new_tokens or 0, limits.new_tokens
        if self.llm.model.start is not None:  # The start id takes one place of the decoder's row.
            max_new = min(max_new, capacity - 1)
        if new > max_new:
            message = f"max_tokens is {new:,}, but at most {max_new:,} are generated; ask for fewer."
            raise RequestError(400, message, parameter="max_tokens")
        if self.llm.model.start is None and prompt.length + new > capacity:
            message = (
                f"the prompt has {prompt.length:,} tokens and {new:,} are asked for, but both together must be at most "
                f"{capacity:,}; shorten the prompt, or ask for fewer."
            )
            raise RequestError(400, message, parameter="max_tokens", code="context_length_exceeded")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several iterators as they come, each with its iterator's number; then close the iterators."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def feed(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    remaining = len(tasks)
    try:
        while remaining:
            match await queue.get():
                case None:
                    remaining -= 1
                case BaseException() as error:
                    raise error
                case item:
                    yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _as_bad_request(field: str) -> Iterator[None]:
    """Turn a `ValueError` or `ImportError` of the block into a `RequestError` of status 400.

    `field` is the field of the request's body that is at fault.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        parameter = None if field == "the body" else field
        raise RequestError(400, f"{field}: {_without_call(str(error))}", parameter=parameter) from error


def _without_call(message: str) -> str:
    """Return a message of the library without its beginning, a Python call that the server's client has not made.

    Messages begin with `call(arguments): `, `call(arguments) needs` or `call: `.
    """
    return re.sub(r"^[\w.]+(\(.*?\)(: | (?=needs))|: )", "", message, count=1, flags=re.DOTALL)


class _SpecialTokenDecoder:
    """Tokenizer whose `decode` keeps special tokens in the text."""

    def __init__(self, tokenizer: data.PromptTokenizer):
        self.vocab, self.end_of_text, self.fingerprint = tokenizer.vocab, tokenizer.end_of_text, tokenizer.fingerprint
        self.encode, self.encode_batch = tokenizer.encode, tokenizer.encode_batch
        self.decode = tokenizer.decode_prompt
