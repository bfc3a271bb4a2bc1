"""A language model with its tokenizer, which continues texts, answers chats and computes probabilities of texts."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, overload, Unpack

import jax
import numpy as np

from .. import data, generation, kernels, nn, parallel
from .._prepare import last_level_cache
from .._shapes import as_tuple
from ._generate_texts import ChatOptions, Completion, generate_texts, GenerateOptions, Prompts, Settings, StreamedText
from ._text_engine import TextEngine


Texts = list[str] | tuple[str, ...]
Messages = Sequence[Mapping[str, object]]
Result = str | Completion | StreamedText | list[str] | list[Completion] | list[StreamedText]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class LLM:
    """A language model with its tokenizer, its chat template and the ids that end a text.

    `load` returns the `LLM` of a published model. `dataclasses.replace(llm, model=...)` returns an `LLM` with other
    weights.
    """

    model: generation.Model
    """The model that decodes: an `nn.Transformer` or, under a plan, the transformer's `parallel.ShardedModel`."""
    tokenizer: data.PromptTokenizer
    """The tokenizer of prompts and texts."""
    chat_template: data.ChatTemplate | None = None
    """The template of the model's chats; None for a model without chats."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a text. The first is the main id, which is appended where a text must end."""
    special_tokens: bool = True
    """Whether the tokenizer adds special tokens to prompts, such as a beginning of text, and reads the names of special
    tokens in a prompt as these tokens. False for a model that was trained on plain text."""
    max_length: int | None = None
    """Maximum number of tokens of a text for which the model was published or trained; None: unknown."""
    begin_id: int | None = None
    """The id of the beginning of text, even if prompts do not get it; None: the model's files name no such id."""
    sampler: generation.Sampler = generation.NextTokenSampler()
    """How the model writes: one token after another, or block after block (`generation.BlockSampler`)."""

    def __post_init__(self):
        if isinstance(self.chat_template, str):
            raise TypeError(
                "LLM(chat_template=...): a chat template is a data.ChatTemplate of a folder, not a text; write the "
                "text to FOLDER/chat_template.jinja and give data.ChatTemplate(FOLDER)."
            )

    @overload
    def tokens(self, text: str) -> list[int]: ...
    @overload
    def tokens(self, text: Texts) -> list[list[int]]: ...
    def tokens(self, text: str | Texts) -> list[int] | list[list[int]]:
        """Return the ids of a prompt as the model reads it, or a list of ids for each prompt of a list."""
        return self._encode(text) if isinstance(text, str) else [self._encode(prompt) for prompt in text]

    @overload
    def generate(self, prompts: str, **options: Unpack[GenerateOptions]) -> str: ...
    @overload
    def generate(self, prompts: Texts, **options: Unpack[GenerateOptions]) -> list[str]: ...
    @overload
    def generate(self, prompts: str, *, stream: Literal[True], **options: Unpack[GenerateOptions]) -> StreamedText: ...
    @overload
    def generate(self, prompts: str, *, log_probs: Literal[True], **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(
        self, prompts: Texts, *, log_probs: Literal[True], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    def generate(
        self, prompts: str | Texts, *, stream: bool = False, log_probs: bool = False, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Continue a text, or each text of a list, and return the new text only.

        All texts of a list are generated together. Raises a `ValueError` for a prompt without tokens, for ids that the
        model does not know, and for more tokens than learned positions.

        Args:
            prompts: A text, or a list of texts.
            stream: Whether to return an iterator over the pieces of the text while it is generated.
            log_probs: Whether to return the text as a `Completion`, with its ids and their log-probabilities.
            **options: The `GenerateOptions`, such as `max_new_tokens`, `stop` and `temperature`.
        """
        settings = Settings.from_options("generate", options)
        texts = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(
                f"generate(prompts): a prompt is a text, but one has the type {type(wrong[0]).__name__}; give a text "
                "or a list of texts, and messages to chat()."
            )
        rows = self.tokens(texts)
        if [] in rows:
            raise ValueError(
                f"generate(prompts): prompt {rows.index([])} is empty, and the tokenizer adds no beginning of text, so "
                "there is no token after which to continue; give at least one character."
            )
        # A model with an encoder starts a new text; other models continue the prompt's text.
        encoded = Prompts(texts, rows, rows if self.model.start is None else None)
        results = generate_texts(self, encoded, "generate", settings, stream=stream, log_probs=log_probs)
        return results[0] if isinstance(prompts, str) else results

    @overload
    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> str: ...
    @overload
    def chat(self, messages: Sequence[Messages], **options: Unpack[ChatOptions]) -> list[str]: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> StreamedText: ...
    @overload
    def chat(self, messages: Messages, *, log_probs: Literal[True], **options: Unpack[ChatOptions]) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], *, log_probs: Literal[True], **options: Unpack[ChatOptions]
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        template_options: Mapping[str, Any] = _NOTHING,
        continue_final_message: bool = False,
        stream: bool = False,
        log_probs: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Answer a conversation, or each conversation of a list, in the model's chat template.

        Raises the errors of `generate`, and a `ValueError` if there is no chat template, if the template refuses the
        messages, or if the final message cannot be continued.

        Args:
            messages: Messages such as `{"role": "user", "content": "Why is the sky blue?"}`, or a list of such lists. A
                content may be a list of parts `{"type": "text", "text": ...}`, whose texts are joined.
            template_options: Further variables of the template, such as `{"enable_thinking": False}`.
            continue_final_message: Whether to continue the final message, which is the beginning of an answer, instead
                of answering it. The result is the new text only.
            stream: Whether to return an iterator over the pieces of the answer while it is generated.
            log_probs: Whether to return the answer as a `Completion`, with its ids and their log-probabilities.
            **options: The `GenerateOptions`, such as `max_new_tokens`, `stop` and `temperature`.
        """
        settings = Settings.from_options("chat", options)
        is_single = any(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if is_single else messages
        texts = [self._render(messages, template_options, continue_final_message) for messages in conversations]
        rows = [self._encode_rendered(text) for text in texts]
        is_continued = continue_final_message and self.model.start is None
        encoded = Prompts(texts, rows, rows if is_continued else None)
        results = generate_texts(self, encoded, "chat", settings, stream=stream, log_probs=log_probs)
        return results[0] if is_single else results

    def chat_tokens(
        self,
        messages: Messages,
        template_options: Mapping[str, Any] = _NOTHING,
        *,
        continue_final_message: bool = False,
        lead: str = "",
    ) -> list[int]:
        """Return the ids of a conversation, with the header of the answer and the answer's beginning `lead`.

        With `continue_final_message`, the content of the final message takes the place of the header. Raises a
        `ValueError` if there is no chat template, if the template refuses the messages, or if the final message cannot
        be continued.
        """
        return self._encode_rendered(self._render(messages, template_options, continue_final_message) + lead)

    def engine(
        self,
        *,
        slots: int = 8,
        capacity: int = 2048,
        prefill_chunk: int = 256,
        stride: int = 8,
        prefixes: int = 4,
        cache_dtype: str | None = None,
        draft: "LLM | generation.Model | str | None" = None,
        draft_tokens: int = 4,
        throughput: bool = False,
    ) -> TextEngine:
        """Return an engine that continues many texts and chats at once, each with settings of its own.

        Requests may arrive at any time; each gets the text that `generate` or `chat` would generate for it alone. The
        engine decodes with `model`, so the engine runs under the plan that `load` was given. Raises a `ValueError` for
        numbers below 1 and for a draft that does not fit the model. With a `generation.BlockSampler`, texts grow by
        blocks; `prefill_chunk`, `stride` and `prefixes` have no effect, and a draft is an error.

        Args:
            slots: Number of texts that are generated at once.
            capacity: Maximum number of tokens of a text, prompt included.
            prefill_chunk: Number of prompt tokens that are read at once. Between two decoding steps, at most one chunk
                is read for each free slot. While other texts are being generated, reading also stops after four chunks
                that leave a prompt unfinished.
            stride: Maximum number of tokens of each text that the device generates before the host reads them. With a
                small stride, texts stream more evenly; with a large stride, all texts are faster.
            prefixes: Number of prompt prefixes whose caches are stored for later prompts with the same beginning.
            cache_dtype: Dtype of keys and values in the caches; None: the dtype in which they are computed.
            draft: A smaller model that proposes tokens; `"mtp"` is the model's own predictor.
            draft_tokens: Tokens that the draft proposes at a time.
            throughput: Whether to accept longer compilation for faster decoding, as in `load`. On a CPU, whether layers
                are then unstacked depends on the size of the engine's caches, too.
        """
        draft_llm, model = draft if isinstance(draft, LLM) else None, self.model
        if throughput and isinstance(model, nn.LanguageModel):
            model = prepare_to_decode(
                model, None, throughput=True, rows=slots, capacity=capacity, cache_dtype=cache_dtype
            )
        engine = self.sampler.engine(
            model,
            slots=slots,
            capacity=capacity,
            prefill_chunk=prefill_chunk,
            stride=stride,
            prefixes=prefixes,
            cache_dtype=cache_dtype,
            draft=draft.model if isinstance(draft, LLM) else draft,
            draft_tokens=draft_tokens,
        )
        return TextEngine(self, engine, draft_llm)

    @overload
    def log_likelihood(self, context: str, continuation: str, *, batch_size: int | None = None) -> float: ...
    @overload
    def log_likelihood(
        self, context: str | Texts, continuation: Texts, *, batch_size: int | None = None
    ) -> list[float]: ...
    def log_likelihood(
        self, context: str | Texts, continuation: str | Texts, *, batch_size: int | None = None
    ) -> float | list[float]:
        """Return the log-probability of a continuation after a context in nats; for lists, one number for each pair.

        A single context may have a list of continuations. Context and continuation are encoded as one text; a token
        with characters of both belongs to the continuation. A model with an encoder reads context and continuation as
        two texts. A model of block diffusion gives a lower bound of the log-probability, see `generation.score_blocks`.
        The model reads `batch_size` pairs of a list at a time, by default all pairs. Raises a `ValueError` if a context
        or a continuation has no token.
        """
        continuations = as_tuple(continuation)
        contexts = [context] * len(continuations) if isinstance(context, str) else list(context)
        if len(contexts) != len(continuations):
            raise ValueError(
                f"log_likelihood(context, continuation): {len(contexts)} contexts and {len(continuations)} "
                "continuations make no pairs; give as many of both, or one context for all."
            )
        pairs = [self._encode_pair(*pair) for pair in zip(contexts, continuations)]
        prompts, new = [prompt for prompt, _ in pairs], [new for _, new in pairs]
        scores = self.sampler.score(self.model, prompts, new, batch_size=batch_size)
        sums = [float(np.sum(score.log_probabilities, dtype=np.float64)) for score in scores]
        return sums[0] if isinstance(continuation, str) else sums

    def _encode(self, text: str) -> list[int]:
        encode = self.tokenizer.encode_prompt if self.special_tokens else self.tokenizer.encode
        return encode(text).tolist()

    def _encode_rendered(self, text: str) -> list[int]:
        return self.tokenizer.encode_prompt(text, add_special_tokens=False).tolist()

    def _render(self, messages: Any, template_options: Mapping[str, Any], continue_final_message: bool) -> str:
        """Return a conversation as the text that the model reads."""
        if self.chat_template is None:
            raise ValueError(
                "chat(messages): the model has no chat template that could be read; continue a text by generate()."
            )
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                "chat(messages): messages are a list of dicts, or a list of such lists; give [{'role': 'user', "
                "'content': 'a question'}]."
            )
        self.chat_template.check_roles(messages, "chat(messages)")
        messages = [_join_parts(message, number) for number, message in enumerate(messages)]
        options = {**template_options, "continue_final_message": True} if continue_final_message else template_options
        return self.chat_template.render(messages, **options)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation."""
        prompt = self._encode(context)
        if self.model.start is None:
            all_ids = self._encode(context + continuation)
            pairs = enumerate(zip(prompt, all_ids))
            num_shared = next((index for index, (alone, together) in pairs if alone != together), len(prompt))
            prompt, new = all_ids[:num_shared], all_ids[num_shared:]
        else:
            new = self.tokenizer.encode(continuation).tolist()
        for name, text, ids in (("context", context, prompt), ("continuation", continuation, new)):
            if not ids:
                raise ValueError(
                    f"log_likelihood(context, continuation): the {name} {text!r:.60} has no token of its own; give at "
                    "least one character."
                )
        return prompt, new


def _join_parts(message: Mapping[str, object], number: int) -> Mapping[str, object]:
    """Return a message whose content is a text, not a list of parts; raise a `ValueError` for a part without text."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if wrong := [part for part, text in zip(parts, texts) if not isinstance(text, str)]:
        kind = repr(wrong[0].get("type")) if isinstance(wrong[0], Mapping) else type(wrong[0]).__name__
        raise ValueError(
            f"chat(messages): message {number} has a part of the type {kind:.40}, but the models read text only; give "
            "parts {'type': 'text', 'text': 'a question'}."
        )
    return {**message, "content": "".join(map(str, texts))}


def prepare_to_decode(
    model: nn.LanguageModel,
    plan: parallel.Plan | None,
    *,
    throughput: bool = False,
    rows: int = 0,
    capacity: int = 0,
    cache_dtype: str | None = None,
) -> generation.Model:
    """Return the model in the form that decodes fastest on JAX's default devices; a plan also shards the model.

    Args:
        model: The model as it was loaded.
        plan: The mesh and its shardings; None for one device.
        throughput: Whether to accept longer compilation for faster decoding. If False, dense layers stay stacked on
            CPUs, and their programs compile several times as fast. If True, `kernels.build_native` is called for
            quantized weights, if there is a C++ compiler.
        rows: Rows that decode together, as `generation.unstack_for_platform` reads them; unused with a plan.
        capacity: Tokens of each row's cache; unused with a plan.
        cache_dtype: Storage format of the caches, such as "int8"; unused with a plan.
    """
    platform, chip = jax.default_backend(), jax.devices()[0].device_kind
    if throughput:
        build_kernels(model)
    if plan is None:
        processor_cache = last_level_cache() if throughput else None
        caches: dict[str, Any] = {"rows": rows, "capacity": capacity, "cache_dtype": cache_dtype}
        return generation.unstack_for_platform(model, platform, chip, processor_cache=processor_cache, **caches)
    if not plan.is_pipelined:
        num_shards = plan.size(parallel.TENSOR) * plan.size(parallel.FSDP)
        model = plan.shard(generation.unstack_for_platform(model, platform, chip, devices=num_shards))
    return parallel.ShardedModel(model, plan)


def build_kernels(model: generation.Model, warn: Callable[[str], object] | None = None) -> None:
    """Build the kernel for a model with quantized weights on a CPU (see `kernels.build_native`).

    If there is no compiler, or if the compiler fails, XLA computes the products, and `warn` is called with a line that
    says so. If `warn` is None, a failure is logged, and a missing compiler is not mentioned.
    """
    weights = model.model if isinstance(model, parallel.ShardedModel) else model
    if jax.default_backend() != "cpu" or not nn.quantized_formats(weights):
        return
    if warn is None:
        if kernels.find_compiler() is None:
            return
        warn = logging.getLogger("eqformer").warning
    try:
        kernels.build_native()
    except RuntimeError as error:
        warn(str(error))
