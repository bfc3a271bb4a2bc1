"""The routes of the server.

This file imports the optional package `starlette`. Other files therefore import this file only inside of functions.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]
from starlette.exceptions import HTTPException  # pyright: ignore[reportMissingImports]
from starlette.requests import ClientDisconnect, Request  # pyright: ignore[reportMissingImports]
from starlette.responses import HTMLResponse, Response, StreamingResponse  # pyright: ignore[reportMissingImports]
from starlette.routing import Route  # pyright: ignore[reportMissingImports]

from .. import data
from .._files import JsonObject, JsonValue, read_utf8
from ..text import TextPiece
from ._embeddings import EmbeddingService
from ._protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Fields,
    parse_body,
    parse_chat,
    parse_completion,
    parse_embedding,
    RequestError,
    TextOptions,
)
from ._responses import (
    chat_message,
    ChatEvents,
    CompletionEvents,
    dump,
    event,
    experts_fields,
    ResponseText,
    ResponseWriter,
    Token,
    token_texts,
    usage,
    write_embeddings,
)
from ._service import merge, Prompt, Service, TextService
from ._tool_calls import ToolCallParser


T = TypeVar("T")
ServiceT = TypeVar("ServiceT", bound=Service)
Handler = Callable[[Request], Awaitable[Response]]
PAGE = Path(__file__).parent / "_page.html"
_SEND_SECONDS = 10.0  # Time in which a client must read the last events of a stream.
_HANGUP = 499  # The status by which servers log a client that did not wait for its response.


class ServerRoutes(Generic[ServiceT]):
    """Handlers of the routes that every model has, and the checks of all requests."""

    def __init__(self, service: ServiceT, *, name: str, api_key: str | None):
        self._service, self._name, self._api_key = service, name, api_key
        self._created = int(time.time())

    def routes(self) -> list[tuple[str, Handler, str]]:
        """Return the path, the handler and the method of each route."""
        return [
            ("/v1/models", self._list_models, "GET"),
            ("/v1/models/{name:path}", self._show_model, "GET"),
            ("/health", self._show_health, "GET"),
            ("/metrics", self._show_metrics, "GET"),
        ]

    def app(self) -> Starlette:
        """Return the ASGI app."""
        routes = self.routes()
        return Starlette(
            routes=[Route(path, self._guard(path, handler), methods=[method]) for path, handler, method in routes],
            exception_handlers={HTTPException: self._refuse_route},
        )

    def _guard(self, path: str, handler: Handler) -> Handler:
        """Return a handler that checks the key, counts responses, and turns every error into a response."""

        async def guarded(request: Request) -> Response:
            start = time.monotonic()
            try:
                if path.startswith("/v1/"):
                    self._check_key(request)
                response = await handler(request)
            except RequestError as error:
                response = _error_response(error)
            except ClientDisconnect:
                response = Response(status_code=_HANGUP)
            except Exception:
                logging.getLogger("eqformer").exception("a request to %s failed", path)
                response = _error_response(RequestError(500, "the server failed at this request; see its log."))
            self._service.metrics.count_response(path, response.status_code)
            self._service.metrics.observe("request", time.monotonic() - start)
            return response

        return guarded

    def _check_key(self, request: Request) -> None:
        """Raise a `RequestError` for a request without the key."""
        if self._api_key is None:
            return
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(key.encode(), self._api_key.encode()):
            raise RequestError(401, "the request needs the header Authorization: Bearer KEY with the server's key.")

    async def _refuse_route(self, request: Request, error: Exception) -> Response:
        """Refuse a request to an unknown path, or with a method that its path does not have."""
        assert isinstance(error, HTTPException)  # The app registers this handler for no other class.
        self._service.metrics.count_response("other", error.status_code)
        message = f"{request.method} {request.url.path:.80} is not served ({error.detail})."
        response = _error_response(RequestError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    async def _list_models(self, request: Request) -> Response:
        return _json_response({"object": "list", "data": [self._model_object()]})

    async def _show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json_response(self._model_object())

    def _model_object(self) -> JsonObject:
        values = {"id": self._name, "object": "model", "created": self._created, "owned_by": "eqformer"}
        return values | {"max_model_len": self._service.capacity}

    async def _show_health(self, request: Request) -> Response:
        refusal = self._service.refusal
        values = {"status": refusal or "ok", "active": self._service.active, "waiting": self._service.waiting}
        return _json_response(values, 503 if refusal else 200)

    async def _show_metrics(self, request: Request) -> Response:
        content = self._service.metrics.render(self._service.gauges())
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _check_model(self, name: str) -> None:
        if name != self._name:
            message = f"the model {name[:80]!r} is not served here; /v1/models lists {self._name!r}."
            raise RequestError(404, message, parameter="model", code="model_not_found")

    async def _read_body(self, request: Request) -> Fields:
        """Return the fields of the body.

        Raises a `RequestError` for a body that is not declared as JSON, is too large, arrives too slowly or holds no
        JSON object.
        """
        limits = self._service.limits
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(400, "the request needs the header Content-Type: application/json.")
        too_large = RequestError(413, f"the body must have at most {limits.body_bytes:,} bytes; send less.")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limits.body_bytes:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > limits.body_bytes:
                        raise too_large
        except TimeoutError:
            raise RequestError(
                408, f"the body did not arrive within {limits.body_seconds:g} s; send it again."
            ) from None
        return parse_body(bytes(content))

    async def _until_deadline(self, request: Request, work: Awaitable[T]) -> T:
        """Return the result of `work`; cancel the work and raise an error if the client hangs up or time runs out."""
        seconds = self._service.limits.seconds
        task, hangup = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_hangup(request))
        try:
            done, _ = await asyncio.wait({task, hangup}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if hangup in done:
                raise ClientDisconnect
            raise _timeout_error(seconds)
        finally:
            for unfinished in (task, hangup):
                unfinished.cancel()
            await asyncio.gather(task, hangup, return_exceptions=True)


class TextRoutes(ServerRoutes[TextService]):
    """Handlers of the requests to a language model."""

    def __init__(self, service: TextService, *, name: str, api_key: str | None):
        super().__init__(service, name=name, api_key=api_key)
        self._token_text = token_texts(service.llm.tokenizer)

    def routes(self) -> list[tuple[str, Handler, str]]:
        """Return the path, the handler and the method of each route."""
        return [
            ("/v1/completions", self._complete, "POST"),
            ("/v1/chat/completions", self._chat, "POST"),
            ("/v1/embeddings", self._refuse_embedding, "POST"),
            ("/", self._show_page, "GET"),
            *super().routes(),
        ]

    def _model_object(self) -> JsonObject:
        layers = self._service.expert_layers
        return super()._model_object() | ({"expert_layers": layers} if layers else {})

    async def _show_page(self, request: Request) -> Response:
        return HTMLResponse(read_utf8(PAGE))

    async def _refuse_embedding(self, request: Request) -> Response:
        reason = f"{self._name} generates text and has no embeddings; serve the folder of a text encoder."
        raise RequestError(404, reason, code="model_not_found")

    async def _complete(self, request: Request) -> Response:
        """Answer a request to `/v1/completions`."""
        service = self._service
        body = parse_completion(await self._read_body(request), max_texts=service.limits.texts)
        self._check_model(body.model)
        prompts = await service.encode_completion(body)
        writer = ResponseWriter("text_completion", "cmpl", self._name, self._token_text)
        if body.options.stream:
            return await self._stream_texts(body.options, prompts, CompletionEvents(writer, body.options))
        work = self._write_completion(body, prompts, writer)
        return _json_response(await self._until_deadline(request, work))

    async def _write_completion(
        self, body: CompletionRequest, prompts: Sequence[Prompt], writer: ResponseWriter
    ) -> JsonObject:
        """Generate the texts of a completion, and return the response."""
        options = body.options
        texts = [ResponseText() for _ in range(len(prompts) * body.best_of)]
        with self._service.admit(len(texts)):
            if options.settings.max_new_tokens:
                await self._generate(prompts, options, texts)
            echoes = [await self._echo(prompt, options) if body.echo else ResponseText() for prompt in prompts]
        choices = []
        for number, echo in enumerate(echoes):
            for choice in _best(texts[number * body.best_of : (number + 1) * body.best_of], options.count):
                tokens = None if options.alternatives is None else [*echo.tokens, *choice.tokens]
                finish_reason = choice.finish_reason or "length"
                choices.append(writer.completion_choice(len(choices), echo.text + choice.text, finish_reason, tokens))
        return writer.response(choices, self._usage(prompts, texts))

    async def _echo(self, prompt: Prompt, options: TextOptions) -> ResponseText:
        """Return the text of a prompt, with the log-probabilities of its tokens if the request asks for them."""
        ids, tokenizer = prompt.ids, self._service.llm.tokenizer
        echo = ResponseText(tokenizer.decode(ids))
        if options.alternatives is None:
            return echo
        pieces = data.TextStream(tokenizer).pieces(ids)
        echo.tokens.append(Token(ids[0], pieces[0], None))
        if len(ids) > 1:
            scores = await self._service.score(ids, options.alternatives)
            likely_ids, likely_log_probs = scores.alternative_ids, scores.alternative_log_probabilities
            alternatives = [tuple(zip(*row)) for row in zip(likely_ids.tolist(), likely_log_probs.tolist())]
            echo.tokens += map(Token, ids[1:], pieces[1:], scores.log_probabilities.tolist(), alternatives)
        return echo

    async def _chat(self, request: Request) -> Response:
        """Answer a request to `/v1/chat/completions`."""
        service = self._service
        body = parse_chat(await self._read_body(request), max_texts=service.limits.texts)
        self._check_model(body.model)
        prompt = await service.encode_chat(body)
        writer = ResponseWriter("chat.completion", "chatcmpl", self._name, self._token_text)
        if body.options.stream:
            return await self._stream_texts(body.options, [prompt], ChatEvents(writer, body))
        return _json_response(await self._until_deadline(request, self._write_chat(body, prompt, writer)))

    async def _write_chat(self, body: ChatRequest, prompt: Prompt, writer: ResponseWriter) -> JsonObject:
        """Generate the answers of a chat, and return the response."""
        texts = [ResponseText() for _ in range(body.options.count)]
        with self._service.admit(len(texts)):
            await self._generate([prompt], body.options, texts)
        choices = []
        for number, choice in enumerate(texts):
            content, calls, finish_reason = ToolCallParser(body.tool_names).split(choice.text, choice.finish_reason)
            tokens = None if body.options.alternatives is None else choice.tokens
            message = chat_message(content, calls)
            choices.append(writer.chat_choice(number, message, finish_reason, tokens, delta=False))
        return writer.response(choices, self._usage([prompt], texts))

    async def _generate(self, prompts: Sequence[Prompt], options: TextOptions, texts: Sequence[ResponseText]) -> None:
        """Generate texts, the same number for each prompt."""
        async with contextlib.aclosing(merge(await self._start(prompts, options, len(texts)))) as pieces:
            async for number, piece in pieces:
                texts[number].add(piece)

    async def _start(
        self, prompts: Sequence[Prompt], options: TextOptions, count: int
    ) -> list[AsyncGenerator[TextPiece, None]]:
        """Return an iterator of pieces for each of `count` texts, with the same number of texts for each prompt."""
        numbers = range(count // len(prompts))
        return [await self._service.start(prompt, options, number) for prompt in prompts for number in numbers]

    def _usage(self, prompts: Sequence[Prompt], texts: Sequence[ResponseText]) -> JsonObject:
        tokens = sum(prompt.length for prompt in prompts)
        self._service.metrics.add("prompt_tokens", tokens)
        return usage(tokens, [choice.result for choice in texts])

    async def _stream_texts(
        self, options: TextOptions, prompts: Sequence[Prompt], events: CompletionEvents | ChatEvents
    ) -> Response:
        """Return a response that streams the texts of all prompts while they are generated."""
        service = self._service
        if options.experts:
            service.check_experts()
        texts = [ResponseText() for _ in range(len(prompts) * options.count)]
        deadline = time.monotonic() + service.limits.seconds
        # The texts stay admitted until the response has ended, which closes `admitted`.
        admitted = contextlib.ExitStack()
        admitted.enter_context(service.admit(len(texts)))
        try:
            streams = await self._start(prompts, options, len(texts))
        except BaseException:
            admitted.close()
            raise

        async def write() -> AsyncGenerator[bytes, None]:
            try:
                async with contextlib.aclosing(merge(streams)) as pieces:
                    async for number, piece in _pass_until(pieces, deadline, service.limits.seconds):
                        texts[number].add(piece)
                        for value in events.write(number, texts[number], piece):
                            yield event(value)
                counts = self._usage(prompts, texts)
                if options.include_usage:
                    yield event(events.end(counts))
                for number, choice in enumerate(texts if options.experts else ()):
                    ids = choice.result.ids if choice.result else ()
                    for chosen in await service.trace_experts(prompts[number // options.count], ids):
                        yield event(events.end() | experts_fields(number, chosen))
            except RequestError as error:
                # The HTTP status has been sent already, so the error becomes an event.
                yield event(error.body)
                return
            yield b"data: [DONE]\n\n"

        return _EventStream(write(), admitted, deadline + _SEND_SECONDS)


class EmbeddingRoutes(ServerRoutes[EmbeddingService]):
    """Handlers of the requests to a text encoder."""

    def routes(self) -> list[tuple[str, Handler, str]]:
        """Return the path, the handler and the method of each route."""
        return [
            ("/v1/embeddings", self._embed, "POST"),
            ("/v1/completions", self._refuse_text, "POST"),
            ("/v1/chat/completions", self._refuse_text, "POST"),
            *super().routes(),
        ]

    async def _embed(self, request: Request) -> Response:
        """Answer a request to `/v1/embeddings`."""
        body = parse_embedding(await self._read_body(request), max_texts=self._service.limits.texts)
        self._check_model(body.model)
        content = await self._until_deadline(request, self._write_embeddings(body))
        return Response(content, media_type="application/json")

    async def _write_embeddings(self, body: EmbeddingRequest) -> bytes:
        """Embed the texts of a request, and return the response."""
        with self._service.admit(len(body.texts)):
            rows = await self._service.tokenize(body)
            vectors = await self._service.embed(body, rows)
            tokens = sum(len(row.ids) for row in rows)
            # Writing millions of numbers takes time, so a thread does it while the event loop serves other requests.
            return await asyncio.to_thread(write_embeddings, self._name, vectors, tokens, as_base64=body.as_base64)

    async def _refuse_text(self, request: Request) -> Response:
        reason = f"{self._name} is a text encoder and generates no text; use /v1/embeddings, or serve a language model."
        raise RequestError(404, reason, code="model_not_found")


class _EventStream(StreamingResponse):
    """Response of server-sent events. When the response ends, for whatever reason, generation of its texts ends too."""

    def __init__(self, events: AsyncGenerator[bytes, None], admitted: contextlib.ExitStack, deadline: float):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events, self._admitted, self._deadline = events, admitted, deadline

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._admitted, contextlib.suppress(TimeoutError, ClientDisconnect):
            try:
                # Without a time limit, a client that does not read would keep `send` waiting.
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await super().__call__(scope, receive, send)
            finally:
                await self._events.aclose()


def _best(texts: Sequence[ResponseText], count: int) -> Sequence[ResponseText]:
    """Return the `count` texts with the highest mean log-probability; if there are only `count`, keep their order."""
    return texts if count == len(texts) else sorted(texts, key=lambda choice: -choice.mean_log_prob)[:count]


async def _pass_until(items: AsyncIterator[T], deadline: float, seconds: float | int) -> AsyncIterator[T]:
    """Pass items on until the deadline; then raise a `RequestError`."""
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                item = await anext(items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _timeout_error(seconds) from None
        yield item


async def _wait_for_hangup(request: Request) -> None:
    """Return when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _timeout_error(seconds: float | int) -> RequestError:
    return RequestError(408, f"the response took more than {seconds:g} s; ask for less, or try again later.")


def _error_response(error: RequestError) -> Response:
    response = _json_response(error.body, error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = "1"
    if error.status in (408, 413):
        # If the connection stayed open, the server would read the rest of the body as the next request.
        response.headers["connection"] = "close"
    return response


def _json_response(value: JsonValue, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")
