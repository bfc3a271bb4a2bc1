"""Request bodies of the OpenAI protocol: checks of untrusted JSON, and the requests that it describes."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

from .._annotation_checks import fits
from .._files import few_names, JsonObject, JsonValue, parse_json
from ..generation import MAX_ALTERNATIVES
from ..text import TextRequest


Number: TypeAlias = float | int
MAX_STOPS = 16
"""Maximum number of strings that may end one text."""
MAX_BIASES = 1024
"""Maximum number of ids with a bias of their logits."""
_TEMPLATE_ARGUMENTS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_MAX_SEED = 2**63 - 1
_MAX_NUMBER = 1e9  # the largest number in a field; NaN fails the comparison with it, too


class RequestError(Exception):
    """An error of a request, with the HTTP status, the parameter and the code of the response."""

    def __init__(self, status: int, message: str, *, parameter: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.parameter, self.code = status, message, parameter, code

    @property
    def body(self) -> JsonObject:
        """The JSON of the response."""
        kind = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Options that completions and chats share."""

    settings: TextRequest
    """The settings of each text, without its prompt; the seed is random if the request has none."""
    count: int
    """Number of texts for each prompt (`n`)."""
    alternatives: int | None
    """Number of likely tokens to report beside each token; None: no log-probabilities are reported."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the counts of prompt tokens and new tokens."""
    experts: bool
    """Whether a stream ends with the experts that read each new token."""


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """The body of a request to `/v1/completions`."""

    model: str
    prompts: list[str] | list[list[int]]
    echo: bool
    """Whether each text begins with its prompt."""
    best_of: int
    """Number of texts that are generated for each prompt; the likeliest `options.count` texts are returned."""
    options: TextOptions


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """The body of a request to `/v1/chat/completions`."""

    model: str
    messages: list[JsonObject]
    tools: list[JsonObject]
    forced_tools: list[JsonObject]
    """The answer must call one of these tools (`tool_choice`). Empty: the model decides whether it calls a tool."""
    schema: JsonObject | None
    """The JSON schema of the answer; None: any text."""
    template_options: JsonObject
    """Further variables of the chat template."""
    options: TextOptions

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools that the answer may call."""
        tools: list[Any] = self.tools
        return [tool["function"]["name"] for tool in tools]


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """The body of a request to `/v1/embeddings`."""

    model: str
    texts: list[str]
    dimensions: int | None
    """The number of leading channels to keep; shortened vectors are scaled to length 1. None: whole vectors."""
    as_base64: bool
    """Whether vectors are written as the base64 of little-endian float32 numbers, instead of lists of numbers."""
    prompt_name: str | None
    """The name of the encoder's prompt that is put before each text; None: the default prompt."""


class Fields:
    """Fields of a JSON object. Each field is checked when it is taken, and can be taken once."""

    def __init__(self, values: JsonValue, where: str = "the body"):
        if not isinstance(values, dict):
            parameter = None if where == "the body" else where
            raise RequestError(400, f"{where} must be a JSON object, but is {_kind(values)}.", parameter=parameter)
        self._values, self._where = dict(values), where

    def error(self, name: str, rule: str, value: JsonValue) -> RequestError:
        """Return the error of a field that breaks a rule."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
        return RequestError(400, f"{self._where}: {name} must be {rule}, but is {shown}.", parameter=name)

    def take(self, name: str, default: JsonValue = None) -> JsonValue:
        """Return a field of any kind, or the default if it is absent or null."""
        value = self._values.pop(name, None)
        return default if value is None else value

    def require(self, name: str) -> JsonValue:
        """Return a field of any kind, which must be present."""
        if self._values.get(name) is None:
            raise RequestError(400, f"{self._where}: {name} is missing.", parameter=name)
        return self._values.pop(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text that can be written in UTF-8."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str) or not _is_unicode(value):
            raise self.error(name, "a text without lone surrogates", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise self.error(name, "true or false", value)
        return default if value is None else value

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        """Return an integer in bounds; None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if not fits(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"an integer from {minimum:,} to {maximum:,}", value)
        return value

    def number(self, name: str, minimum: Number, maximum: Number) -> Number | None:
        """Return a finite number in bounds; None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if not _is_number(value) or not minimum <= value <= maximum:
            raise self.error(name, f"a number from {minimum:g} to {maximum:g}", value)
        return value

    def ignore(self, *names: str) -> None:
        """Drop fields that have no effect on the text."""
        for name in names:
            self._values.pop(name, None)

    def refuse(self, name: str, neutral: Sequence[JsonValue], reason: str) -> None:
        """Raise an error for a field that is not supported, unless it has a value that changes nothing."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise RequestError(400, f"{self._where}: {name} is not supported: {reason}.", parameter=name)

    def finish(self) -> None:
        """Raise an error if any field has not been taken."""
        if self._values:
            names = few_names({name[:40] for name in self._values})
            message = f"{self._where}: unknown fields {names}; leave them out."
            raise RequestError(400, message, parameter=min(self._values)[:40])


def parse_body(content: bytes) -> Fields:
    """Return the fields of a request body."""
    try:
        return Fields(parse_json(content.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body must be UTF-8 ({error}).") from None
    except ValueError as error:
        raise RequestError(400, f"the body must be JSON that can be read ({error}).") from None


def parse_completion(fields: Fields, *, max_texts: int) -> CompletionRequest:
    """Return the request of a body of `/v1/completions`; raise a `RequestError` for a body that breaks a rule.

    `max_texts` is the maximum number of texts that one request may generate.
    """
    model, prompts = _model(fields), _prompts(fields)
    fields.refuse("suffix", ("",), "the models continue a text and fill no gaps")
    echo = fields.flag("echo")
    best_of = fields.integer("best_of", 1, max_texts)
    alternatives = fields.integer("logprobs", 0, MAX_ALTERNATIVES)
    max_new_tokens = fields.integer("max_tokens", 0 if echo else 1, 2**31 - 1)
    options = _options(fields, 16 if max_new_tokens is None else max_new_tokens, alternatives, max_texts)
    fields.finish()
    best_of = options.count if best_of is None else best_of
    if best_of < options.count:
        raise RequestError(
            400, f"best_of must be at least n, but best_of is {best_of} and n is {options.count}.", parameter="best_of"
        )
    if options.stream and (best_of > options.count or echo):
        name = "echo" if echo else "best_of"
        raise RequestError(400, f"{name} cannot be streamed; leave out {name} or stream.", parameter=name)
    _check_count(len(prompts) * best_of, max_texts)
    return CompletionRequest(model, prompts, echo, best_of, options)


def parse_chat(fields: Fields, *, max_texts: int) -> ChatRequest:
    """Return the request of a body of `/v1/chat/completions`; raise a `RequestError` for a body that breaks a rule.

    `max_texts` is the maximum number of texts that one request may generate.
    """
    model = _model(fields)
    messages = [_message(value, number) for number, value in enumerate(_list(fields, "messages", required=True))]
    tools, forced_tools = _tools(fields)
    schema = _schema(Fields(fields.take("response_format", {"type": "text"}), "response_format"))
    if forced_tools and schema is not None:
        reason = "tool_choice forces a tool call, but response_format asks for other JSON; leave one of the two out."
        raise RequestError(400, reason, parameter="tool_choice")
    template_options = fields.take("chat_template_kwargs", {})
    if not isinstance(template_options, dict) or _TEMPLATE_ARGUMENTS & {*template_options}:
        raise fields.error("chat_template_kwargs", "an object of further variables of the template", template_options)
    continues, adds_header = _answer_start(fields)
    if not adds_header:
        template_options = template_options | {"add_generation_prompt": False}
        if forced_tools:
            reason = "tool_choice forces an answer that begins with a call; give auto or none, or leave it out."
            raise RequestError(400, reason, parameter="tool_choice")
    has_log_probs = fields.flag("logprobs")
    alternatives = fields.integer("top_logprobs", 0, MAX_ALTERNATIVES)
    if alternatives and not has_log_probs:
        raise RequestError(400, "top_logprobs needs logprobs: true.", parameter="top_logprobs")
    max_new_tokens = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    older_max_tokens = fields.integer("max_tokens", 1, 2**31 - 1)
    max_new_tokens = older_max_tokens if max_new_tokens is None else max_new_tokens
    options = _options(fields, max_new_tokens, (alternatives or 0) if has_log_probs else None, max_texts)
    fields.ignore("parallel_tool_calls", "reasoning_effort", "verbosity")
    fields.refuse("modalities", (["text"],), "the models write text")
    fields.finish()
    _check_count(options.count, max_texts)
    settings = dataclasses.replace(options.settings, continue_final_message=continues)
    options = dataclasses.replace(options, settings=settings)
    return ChatRequest(model, messages, tools, forced_tools, schema, template_options, options)


def parse_embedding(fields: Fields, *, max_texts: int) -> EmbeddingRequest:
    """Return the request of a body of `/v1/embeddings`; raise a `RequestError` for a body that breaks a rule.

    `max_texts` is the maximum number of texts of one request.
    """
    model, texts = _model(fields), _prompts(fields, "input")
    if isinstance(texts[0], list):
        reason = "the body: input has token ids, but the encoder reads texts; send the texts themselves."
        raise RequestError(400, reason, parameter="input")
    if len(texts) > max_texts:
        message = f"input has {len(texts):,} texts, but at most {max_texts:,} are embedded for a request; send fewer."
        raise RequestError(400, message, parameter="input")
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise fields.error("encoding_format", "float or base64", encoding)
    dimensions, prompt_name = fields.integer("dimensions", 1, 2**31 - 1), fields.text("prompt_name")
    fields.ignore("user")
    fields.finish()
    return EmbeddingRequest(model, [*map(str, texts)], dimensions, encoding == "base64", prompt_name)


def _options(fields: Fields, max_new_tokens: int | None, alternatives: int | None, max_texts: int) -> TextOptions:
    """Return the options that completions and chats share."""
    stream, experts = fields.flag("stream"), fields.flag("experts")
    if experts and not stream:
        raise RequestError(400, "experts: only streams report experts; add stream: true.", parameter="experts")
    stream_options = Fields(fields.take("stream_options", {}), "stream_options")
    include_usage = stream_options.flag("include_usage")
    stream_options.ignore("include_obfuscation")
    stream_options.finish()
    fields.ignore("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    temperature = fields.number("temperature", 0, 100)
    count = fields.integer("n", 1, max_texts)
    settings = TextRequest(
        "",
        max_new_tokens=max_new_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=_above_zero(fields, "top_p", 1),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=_above_zero(fields, "repetition_penalty", 100),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0,
        stop=_stops(fields),
        seed=_seed(fields),
        logit_bias=_logit_bias(fields),
        alternatives=alternatives or 0,
    )
    return TextOptions(settings, 1 if count is None else count, alternatives, stream, include_usage, experts)


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if not model:
        raise RequestError(400, "the body: model must be the name of a model; /v1/models lists it.", parameter="model")
    return model


def _prompts(fields: Fields, name: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts of a field: texts, or lists of ids."""
    value = fields.require(name)
    prompts: Any = [value] if isinstance(value, str) else value
    if isinstance(prompts, list) and prompts:
        if all(_is_id(item) for item in prompts):
            return [prompts]
        if fits(prompts, list[str]) and all(map(_is_unicode, prompts)):
            return prompts
        if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in prompts):
            return prompts
    raise fields.error(name, "a text, a list of texts, a list of token ids, or a list of such lists", value)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop", [])
    stops = [value] if isinstance(value, str) else value
    is_list = fits(stops, list[str]) and len(stops) <= MAX_STOPS
    if not is_list or not all(stop and _is_unicode(stop) for stop in stops):
        raise fields.error("stop", f"a text, or a list of at most {MAX_STOPS} texts, none of them empty", value)
    return tuple(stops)


def _logit_bias(fields: Fields) -> dict[int, float]:
    value = fields.take("logit_bias", {})
    rule = f"an object of at most {MAX_BIASES} token ids with numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise fields.error("logit_bias", rule, value)
    is_entry = lambda name, bias: name.isascii() and name.isdigit() and len(name) < 10 and _is_number(bias)
    if not all(is_entry(name, bias) and abs(bias) <= 100 for name, bias in value.items()):
        raise fields.error("logit_bias", rule, value)
    return {int(name): float(bias) for name, bias in value.items()}


def _seed(fields: Fields) -> int:
    seed = fields.integer("seed", -_MAX_SEED - 1, _MAX_SEED)
    return secrets.randbits(31) if seed is None else seed % 2**31


def _above_zero(fields: Fields, name: str, maximum: Number) -> Number | None:
    value = fields.number(name, 0, maximum)
    if value == 0:
        raise fields.error(name, f"a number above 0, and at most {maximum:g}", value)
    return value


def _top_k(fields: Fields) -> int | None:
    """Return `top_k`; None for -1 and 0, which mean all tokens on other servers, too."""
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    return None if top_k in (-1, 0) else top_k


def _check_count(count: int, max_texts: int) -> None:
    if count > max_texts:
        message = f"the request asks for {count} texts, but at most {max_texts} are generated; ask for fewer."
        raise RequestError(400, message, parameter="n")


def _list(fields: Fields, name: str, *, required: bool = False) -> list[JsonValue]:
    value = fields.require(name) if required else fields.take(name)
    if not isinstance(value, list | None) or (required and not value):
        raise fields.error(name, "a list" + (" of at least one" if required else ""), value)
    return value or []


def _message(value: JsonValue, number: int) -> JsonObject:
    """Return a message in the form for chat templates: the content is a text, and arguments of calls are objects."""
    where = f"messages[{number}]"
    fields = Fields(value, where)
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.error("role", "system, developer, user, assistant or tool", role)
    # Most templates do not know the role `developer`, which replaces `system` in newer versions of the protocol.
    message: JsonObject = {"role": "system" if role == "developer" else role}
    content = fields.take("content")
    if isinstance(content, list) and content:
        content = "".join(_content_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    calls = _list(fields, "tool_calls")
    if not (isinstance(content, str) and _is_unicode(content)) and not (content is None and calls):
        raise fields.error("content", "a text, or a list of parts of text", content)
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    fields.ignore("refusal", "annotations", "audio", "function_call")
    fields.finish()
    return message


def _content_part(value: JsonValue, where: str) -> str:
    fields = Fields(value, where)
    if (kind := fields.text("type")) != "text":
        raise fields.error("type", "text, since the models read no images and no sound", kind)
    text = fields.text("text")
    if text is None:
        raise fields.error("text", "a text", None)
    return text


def _tool_call(value: JsonValue, where: str) -> JsonObject:
    """Return a call of a tool in a message of the assistant, with its arguments as an object."""
    fields = Fields(value, where)
    function = Fields(fields.require("function"), f"{where}.function")
    name, arguments = function.text("name"), function.take("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, unique=False)
        except ValueError as error:
            raise RequestError(400, f"{where}: arguments must be JSON ({error}).", parameter="messages") from None
    if not name or not isinstance(arguments, dict):
        raise RequestError(400, f"{where}: a call has a name, and arguments as a JSON object.", parameter="messages")
    return {"id": fields.text("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(fields: Fields) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the tools that the model may call, and the tools from which it must call one (empty: no forced call)."""
    tools: list[Any] = _list(fields, "tools")
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str() as name}} if name and _is_unicode(name):
                continue
            case _:
                rule = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise fields.error(f"tools[{number}]", rule, tool)
    match choice := fields.take("tool_choice"):
        case None | "auto":
            return tools, []
        case "none":
            return [], []
        case "required":
            forced_tools = tools
        case {"type": "function", "function": {"name": str() as name}}:
            forced_tools = [tool for tool in tools if tool["function"]["name"] == name]
        case _:
            rule = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
            raise fields.error("tool_choice", rule, choice)
    if not forced_tools:
        raise fields.error("tool_choice", "none or auto where tools has no function to call", choice)
    return tools, forced_tools


def _answer_start(fields: Fields) -> tuple[bool, bool]:
    """Return whether the answer continues the final message, and whether the prompt ends with the answer's header."""
    continues = fields.flag("continue_final_message")
    adds_header = fields.flag("add_generation_prompt", not continues)
    if continues and adds_header:
        reason = "continue_final_message continues the last message, add_generation_prompt begins another; set one."
        raise RequestError(400, reason, parameter="continue_final_message")
    return continues, adds_header


def _schema(fields: Fields) -> JsonObject | None:
    """Return the JSON schema of `response_format`; None for any text."""
    kind, schema = fields.text("type"), fields.take("json_schema")
    match kind, schema:
        case "text", _:
            return None
        case "json_object", _:
            return {"type": "object"}
        case "json_schema", {"schema": dict() as schema}:
            return schema
    raise fields.error("type", "text, json_object, or json_schema with a json_schema.schema", kind)


def _is_id(value: JsonValue) -> bool:
    return fits(value, int) and 0 <= value < 2**31


def _is_number(value: JsonValue) -> bool:
    return fits(value, float) and abs(value) <= _MAX_NUMBER


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON can express but UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: JsonValue) -> str:
    names: dict[Any, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
