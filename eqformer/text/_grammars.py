"""Grammars that a text must follow: a JSON schema, a regular expression or a context-free grammar."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from .. import data
from .._annotation_checks import name_class
from .._failures import foreign_call, load_extra


_NO_FORCING = '%llguidance {"no_forcing": true}'
_ESCAPE_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)
"""A backslash with the character after it, or a character that ends a pattern of Lark: a slash or a line break."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar that a generated text must follow, which the package `llguidance` (the extra `grammar`) reads.

    If `max_new_tokens` cuts off a text, it is the beginning of a text that follows the grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    """The language in which the grammar is written."""
    source: str | Mapping[str, Any]
    """A JSON schema as a dict or as its text, a regular expression, or a grammar of the parser Lark. The schema `{}`
    allows any JSON."""


class GrammarCompiler:
    """Compiler of grammars into masks of the tokens that may come next."""

    def __init__(self, tokenizer: data.PromptTokenizer, vocab: int, end_ids: tuple[int, ...]):
        """Prepare the tokenizer's vocabulary, for a model of `vocab` ids.

        Raises an `ImportError` if `llguidance` is not installed, and a `ValueError` if no id ends a text.
        """
        call = "Grammar(...)"
        self._package = load_extra("llguidance", extra="grammar", call=call)
        self._vocab = vocab
        if not end_ids:
            raise ValueError(
                f"{call}: no id ends the model's texts, so no text could end where its grammar does; set end_ids."
            )
        if not isinstance(tokenizer, data.ByteTokenizer | data.FileTokenizer):
            raise ValueError(
                f"{call}: llguidance reads the vocabulary of a tokenizer.json, which {name_class(tokenizer)} does "
                "not have; pass a function of your own as `allowed`."
            )
        with foreign_call(lambda reason: f"{call}: llguidance cannot read the model's tokenizer ({reason})."):
            self._tokenizer = self._package.LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(end_ids))

    def compile(self, grammar: Grammar) -> Callable[[list[int]], Bool[np.ndarray, "vocab"]]:
        """Return a function for the `allowed` of one request, which maps the new ids so far to the ids that may follow.

        The function has state, so it serves a single text. Raises a `ValueError` for a grammar that cannot be read.
        """
        source = grammar.source if isinstance(grammar.source, str) else json.dumps(grammar.source, ensure_ascii=False)
        call = f"Grammar({grammar.kind!r}, {source!r:.60})"
        matchers = self._package.LLMatcher
        readers = {
            "json_schema": matchers.grammar_from_json_schema,
            "regex": matchers.grammar_from_regex,
            "lark": matchers.grammar_from_lark,
        }
        if grammar.kind not in readers:
            raise ValueError(f"{call}: a grammar's kind is one of {', '.join(readers)}; correct it.")
        with foreign_call(lambda reason: f"{call}: the grammar cannot be read ({reason}); correct it."):
            matcher = matchers(self._tokenizer, readers[grammar.kind](source), log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("<state>")[0].split())
            raise ValueError(f"{call}: the grammar cannot be read ({reason}); correct it.")
        make_unforced = lambda: matchers(self._tokenizer, _write_unforced(grammar.kind, source), log_level=0)
        return _GrammarMask(matcher, make_unforced, self._vocab)


def _write_unforced(kind: str, source: str) -> str:
    """Return the grammar in the language of Lark, with the option that turns off forcing (see `_GrammarMask`)."""
    if kind == "lark":
        return f"{_NO_FORCING}\n{source}"
    if kind == "regex":
        # Lark writes a pattern between two slashes in one line, so slashes and line breaks are escaped.
        escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        pattern = _ESCAPE_OR_SPECIAL.sub(lambda match: escapes.get(match[0], match[0]), source)
        return f"{_NO_FORCING}\nstart: /{pattern}/"
    return f"{_NO_FORCING}\nstart: %json {source}"


class _GrammarMask:
    """The tokens that a grammar allows after the ids of one text.

    Forcing: where the grammar leaves only one possible text, llguidance tokenizes this text and allows its next token
    only. If the forced text contains the name of a special token, llguidance allows the special token, although its own
    parser refuses it. In that case, a matcher without forcing reads the text from its beginning and takes over.
    """

    def __init__(self, matcher: Any, make_unforced: Callable[[], Any], vocab: int):
        self._matcher, self._make_unforced, self._vocab = matcher, make_unforced, vocab
        self._count = 0
        """Ids that the matcher has read."""

    def __call__(self, ids: list[int]) -> Bool[np.ndarray, "vocab"]:
        """Return which ids may follow `ids`; raise a `RuntimeError` if the matcher reaches one of its limits."""
        self._read(ids)
        allowed = self._compute_allowed()
        (tokens,) = np.nonzero(allowed)
        if len(tokens) == 1 and not self._accepts(tokens.tolist()):
            self._matcher, self._count = self._make_unforced(), 0
            self._read(ids)
            allowed = self._compute_allowed()
        return allowed

    def _read(self, ids: list[int]) -> None:
        new, self._count = ids[self._count :], len(ids)
        if not self._matcher.consume_tokens(new):
            raise RuntimeError(self._matcher.get_error())

    def _compute_allowed(self) -> Bool[np.ndarray, "vocab"]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab, bitorder="little").astype(bool)

    def _accepts(self, tokens: list[int]) -> bool:
        """Return whether the parser reads these tokens next, or may end the text with them."""
        # `validate_tokens` refuses every special token, even an allowed one, so a copy of the matcher reads the tokens.
        matcher = self._matcher
        return bool(
            matcher.validate_tokens(tokens) or matcher.is_accepting() or matcher.deep_copy().consume_tokens(tokens)
        )
