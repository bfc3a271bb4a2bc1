"""Adapter of an `LLM` to lm-evaluation-harness.

This file imports `lm_eval`, which is optional, so other files import this one inside functions.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from ..generation import Request
from ..text import LLM


_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_IGNORED = {"do_sample", "until", "max_gen_toks"}
_PREFILL_CHUNK = 192
ScoredPair = tuple[tuple[str, str] | None, list[int], list[int]]
Progress = Callable[[str, int, int], object]


class HarnessModel(TemplateLM):
    """An `LLM` as a model of lm-evaluation-harness; `lm_eval.simple_evaluate(model=...)` takes it."""

    def __init__(self, llm: LLM, *, batch_size: int, max_length: int, progress: Progress):
        super().__init__()
        self.llm, self.batch_size, self.max_length, self.progress = llm, batch_size, max_length, progress
        self.backend = "causal" if llm.model.start is None else "seq2seq"
        # A row to score may have one more id if the model does not read the last id of the row.
        self.max_scored_row = max_length + (not llm.sampler.reads_last_id)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.llm.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The id that stands for an empty context."""
        return self.eot_token_id if self.llm.begin_id is None else self.llm.begin_id

    @property
    def tokenizer_name(self) -> str:
        """A name by which the harness tells cached requests apart."""
        template = self.llm.chat_template
        return f"{self.llm.tokenizer.fingerprint} {'' if template is None else template.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; by default with special tokens, unless the text already starts with `begin_id`."""
        encode = self.llm.tokenizer.encode_prompt
        if not self.llm.special_tokens:
            return self.llm.tokenizer.encode(string).tolist()
        if add_special_tokens is not None:
            return encode(string, add_special_tokens=add_special_tokens).tolist()
        bare = encode(string, add_special_tokens=False).tolist()
        return bare if bare[:1] == [self.llm.begin_id] else encode(string).tolist()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation by the model's template; without the generation prompt, its last message stays open."""
        template = self.llm.chat_template
        if template is None:
            raise ValueError("evaluate_tasks(apply_chat_template=True): the model has no chat template; leave it out.")
        return template.render(chat_history, continue_final_message=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return a name of the template for the harness' records."""
        template = self.llm.chat_template
        return template.fingerprint if chat_template and template is not None else ""

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoredPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would write the continuation.

        A model of block diffusion gives the lower bound of `generation.score_blocks`.
        """
        prompts, continuations = [], []
        for texts, context, continuation in requests:
            if len(continuation) >= self.max_scored_row:
                answer = "" if texts is None else f" {texts[1]!r:.80}"
                raise ValueError(
                    f"a task asks for the probability of an answer{answer} of {len(continuation)} tokens, but the "
                    f"model has {self.max_scored_row - 1} tokens for an answer; give a larger max_length, or leave the "
                    "task out."
                )
            ids = (context + continuation)[-self.max_scored_row :]
            start = max(1, len(ids) - len(continuation))
            prompts.append(ids[:start])
            continuations.append(ids[start:])
        scores = self.llm.sampler.score(
            self.llm.model,
            prompts,
            continuations,
            batch_size=self.batch_size,
            progress=lambda done, total: self.progress("scoring", done, total),
        )
        return [(float(score.log_probabilities.sum(dtype="f8")), bool(score.is_greedy.all())) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length that overlap by one token."""
        owners, windows = [], []  # `owners` has the number of the request that each window belongs to.
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_scored_row - 1,
                context_len=1,
            ):
                owners.append(number)
                windows.append((None, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for number, (log_probability, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += log_probability
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings or an end id."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for numbers in groups.values():
            contexts = [requests[number].args[0] for number in numbers]
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], 256)
            texts |= dict(zip(numbers, self._continue(contexts, dict(options), len(texts), len(requests)), strict=True))
        return [texts[number] for number in range(len(requests))]

    def _continue(self, contexts: list[str], options: dict[str, Any], done: int, total: int) -> list[str]:
        """Continue contexts with the same options, the longest first.

        A text that has ended makes room for the next one, and a beginning that contexts share, such as examples of the
        task, is read once.
        """
        max_new_tokens = options["max_gen_toks"]
        if unknown := {*options} - _SAMPLING - _IGNORED:
            raise ValueError(
                f"a task has the generation options {sorted(unknown)}, which are not known; use {sorted(_SAMPLING)}."
            )
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"a task asks for {max_new_tokens} new tokens, but the model has {self.max_length} tokens in all; give "
                "a larger max_length, or lower max_gen_toks of the task."
            )
        # A task that names neither a temperature nor do_sample is greedy.
        greedy: dict[str, Any] = {} if options["do_sample"] else {"temperature": 0.0}
        settings = {name: value for name, value in options.items() if name in _SAMPLING} | greedy
        rows = [self.tok_encode(context)[-room:] for context in contexts]
        named_stops = [stop for stop in options["until"] if self._names_special_token(stop)]
        stops = [stop for stop in options["until"] if stop and stop not in named_stops]
        find_stop = lambda ids: self._text_before_stop(ids, stops, named_stops)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        requests = [
            Request(
                rows[row],
                max_new_tokens,
                end_of_text=self.llm.end_ids,
                ends=lambda ids: find_stop(ids)[1],
                example=row,
                **settings,
            )
            for row in order
        ]
        capacity, slots = max(map(len, rows)) + max_new_tokens, min(self.batch_size, len(rows))
        engine = self.llm.sampler.engine(self.llm.model, slots=slots, capacity=capacity, prefill_chunk=_PREFILL_CHUNK)
        texts = [""] * len(rows)
        for count, result in enumerate(engine.run(requests), 1):
            if result.finish == "error":
                raise ValueError(f"generate_until: a text cannot be written: {result.error}")
            ids = result.ids[:-1] if result.ids[-1] in self.llm.end_ids else result.ids
            texts[order[result.number]], _ = find_stop(ids)
            self.progress("generating", done + count, total)
        return texts

    def _text_before_stop(self, ids: list[int], stops: Sequence[str], named_stops: Sequence[str]) -> tuple[str, bool]:
        """Return the text before the first stop string, without special tokens, and whether there is a stop string.

        `named_stops` contain names of special tokens, and the other `stops` are plain text.
        """
        tokenizer = self.llm.tokenizer
        text = tokenizer.decode(ids)
        named_text = tokenizer.decode_prompt(ids) if named_stops else ""
        starts = [named_text.index(stop) for stop in named_stops if stop in named_text]
        if starts:
            # Count the ids that lie wholly before the first of these stop strings. The text with names of special
            # tokens grows with each id, so a binary search finds the number.
            start, counts = min(starts), range(1, len(ids) + 1)
            count_before = bisect_right(counts, start, key=lambda count: len(tokenizer.decode_prompt(ids[:count])))
            text = tokenizer.decode(ids[:count_before])
            # The next id may contain the end of the text and the beginning of the stop string.
            next_text = tokenizer.decode(ids[: count_before + 1])[len(text) :]
            text += next_text[: start - len(tokenizer.decode_prompt(ids[:count_before]))]
        return postprocess_generated_text(text, [*stops], None), bool(starts) or any(stop in text for stop in stops)

    def _names_special_token(self, text: str) -> bool:
        ids = self.llm.tokenizer.encode_prompt(text, add_special_tokens=False)
        return self.llm.tokenizer.decode(ids) != self.llm.tokenizer.decode_prompt(ids)
