"""Text to token ids and back: bytes, or a `tokenizer.json`."""

import functools
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Integer, UInt

from .._failures import foreign_call, load_extra, quiet_panics
from .._files import is_there, parse_json, read_bytes, read_utf8
from ._documents import digest


Ids = Integer[np.ndarray, "seq"] | Sequence[int]


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer: any object with these attributes and methods.

    `vocab` is one more than the largest id, `end_of_text` is the id that follows every document, and `fingerprint` is a
    text that changes when the tokenizer changes.
    """

    vocab: int
    end_of_text: int
    fingerprint: str

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]: ...

    def decode(self, ids: Ids) -> str: ...


@runtime_checkable
class PromptTokenizer(Tokenizer, Protocol):
    """Interface of a tokenizer that also encodes prompts, in which the name of a special token becomes that token."""

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> UInt[np.ndarray, "seq"]: ...

    def decode_prompt(self, ids: Ids) -> str: ...


class TextStream:
    """Decoder of ids one by one, which returns complete characters only.

    The bytes of an incomplete character wait until the character is complete or `finish` is called. The returned texts
    together equal `decode` of all ids. If a `prompt` is given, the texts equal `decode` of prompt and ids, without the
    text of the prompt. Ids without a token, which a model with a rounded-up vocabulary can sample, have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Ids = ()):
        self._decode, self._vocab = tokenizer.decode, tokenizer.vocab
        # The ids of the prompt and, later, the ids whose text was returned last. They are decoded again in front of new
        # ids, because some decoders treat the first token of a text differently.
        self._context = [int(token) for token in prompt if token < self._vocab]
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that this id completes; it is often empty."""
        if token >= self._vocab:
            return ""
        self._pending.append(token)
        text = self._text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the text of the waiting bytes, with U+FFFD for incomplete characters."""
        text = self._text()
        self._context, self._pending = [], []
        return text

    def pieces(self, ids: Ids) -> list[str]:
        """Return the text that each id completes; the last text includes the text of `finish`."""
        texts = [self.push(int(token)) for token in ids]
        return [*texts[:-1], texts[-1] + self.finish()] if texts else []

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


class ByteTokenizer:
    """Tokenizer of 256 ids, the bytes of UTF-8; the NUL byte, which texts do not contain, is the end of text.

    `encode` refuses a text with a NUL, which is usually a binary file or UTF-16. `decode` leaves out the end of text,
    and writes U+FFFD for bytes that are not UTF-8.
    """

    vocab = 256
    end_of_text = 0
    fingerprint = "utf-8 bytes, end of text 0"

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]:
        """Return the UTF-8 bytes of the text. Raises `ValueError` if the text contains NUL."""
        index = text.find("\0")
        if index >= 0:
            raise ValueError(
                f"ByteTokenizer().encode(text): the text must contain no NUL, which stands for the end of text, but "
                f"character {index} is NUL; remove it, or convert the file if it is UTF-16 or binary."
            )
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]:
        """Encode every text by `encode`."""
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> UInt[np.ndarray, "seq"]:
        """Encode a prompt by `encode`: bytes have no special tokens around a prompt."""
        return self.encode(text)

    def encode_with_offsets(
        self, text: str
    ) -> tuple[UInt[np.ndarray, "seq"], Int[np.ndarray, "seq"], Int[np.ndarray, "seq"]]:
        """Return the bytes of a text, and for each byte the indices of its character and of the next character."""
        characters = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text), characters, characters + 1

    special_ids: tuple[int, ...] = ()
    reads_pairs = False

    def encode_texts(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, max_length: int | None = None
    ) -> list["EncodedText"]:
        """Return the bytes of texts, cut to `max_length` bytes; pairs of texts need the tokens of a `FileTokenizer`."""
        rows = []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError("encode_texts(texts): bytes have no token between the texts of a pair; give texts.")
            all_ids, starts, stops = self.encode_with_offsets(text)
            ids = all_ids[:max_length].astype(np.uint32)
            spans = np.stack([starts[:max_length], stops[:max_length]], axis=1)
            is_cut = len(ids) < len(all_ids)
            rows.append(EncodedText(ids, np.zeros_like(ids), spans, np.zeros(len(ids), bool), is_cut))
        return rows

    def decode(self, ids: Ids) -> str:
        """Return the text of these bytes. Raises `ValueError` if an id is not a byte."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() > 255):
            raise ValueError(
                f"ByteTokenizer().decode(ids): ids must be bytes, 0 to 255, but they reach from {array.min()} to "
                f"{array.max()}; use the tokenizer that the model was trained with."
            )
        return array[array != self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decode_prompt(self, ids: Ids) -> str:
        """Return the text by `decode`: bytes have no names of special tokens."""
        return self.decode(ids)

    def to_json(self) -> str:
        """Return this tokenizer as the text of a `tokenizer.json`, in which the end of text is `<|endoftext|>`."""
        # Byte-level BPE writes all other bytes as the characters from U+0100 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        substitutes = {byte: chr(256 + number) for number, byte in enumerate(sorted({*range(256)} - {*printable}))}
        vocab = {_END_OF_TEXT_NAMES[0]: 0} | {substitutes.get(byte, chr(byte)): byte for byte in range(1, 256)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 0, "content": _END_OF_TEXT_NAMES[0], "special": True, **flags}],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            },
            ensure_ascii=False,
        )


# The names of the end of text in published tokenizers, the least ambiguous first.
_END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<|eos|>",
)


_TRIAL_TEXT = "A word, 1 é.\n"


class EncodedText(NamedTuple):
    """A text, or a pair of texts, as a text encoder reads it."""

    ids: UInt[np.ndarray, "seq"]
    """The ids, with the special tokens around each text."""
    types: UInt[np.ndarray, "seq"]
    """The token types: 0, or 1 in the second text of a pair if the tokenizer distinguishes the texts."""
    spans: Int[np.ndarray, "seq 2"]
    """The index of each token's first character in its text, and the index after its last character."""
    is_special: Bool[np.ndarray, "seq"]
    """Whether each token is a special token around the texts."""
    is_cut: bool = False
    """Whether tokens at the end of a text are left out."""


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, run by the package `tokenizers`.

    `end_of_text` is the name or the id of a token; by default it is the special token with one of the usual names, or
    the only special token. `encode` treats the whole text as plain text: names of special tokens in it are encoded as
    ordinary characters, no beginning of text is added, and the file's truncation and padding are off.

    **Raises:** `ValueError` if the file is missing or unreadable, or its end of text is unknown; `ImportError` if
    `tokenizers` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, end_of_text: str | int | None = None):
        call = f"FileTokenizer({str(path)!r}, end_of_text={end_of_text!r})"
        tokenizers = load_extra("tokenizers", extra="train", call=call)
        if not is_there(path):
            raise ValueError(f"{call}: the path must be a tokenizer.json, but there is no file {path}; correct it.")
        content = read_bytes(path)
        self._path = Path(path)
        raise_value_error = foreign_call(
            lambda reason: (
                f"{call}: the file must be a tokenizer.json as the package tokenizers writes it, but "
                f"{reason}; fetch it again."
            )
        )
        with quiet_panics(), raise_value_error:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # Some bad files make the package panic only when it encodes the first text. An ordinary error is ignored,
            # because the vocabulary may lack letters of the trial text.
            with suppress(Exception):
                self._tokenizer.encode(_TRIAL_TEXT)
            self._tokenizer.encode_special_tokens = True
        self.vocab: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_text: int = self._find_end_of_text(end_of_text, call)
        self.fingerprint = f"tokenizer.json {digest((content,))}, end of text {self.end_of_text}"

    def _find_end_of_text(self, name: str | int | None, call: str) -> int:
        """Return the id of the end of text: the named token, or else the only candidate."""
        if isinstance(name, int) and 0 <= name < self.vocab:
            return name
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in sorted(added.items()) if token.special}
        if name is None:
            usual_names = [usual for usual in _END_OF_TEXT_NAMES if usual in special]
            if usual_names or len(special) == 1:
                return special[(usual_names or list(special))[0]]
        else:
            number = self._tokenizer.token_to_id(str(name))
            if number is not None:
                return number
        raise ValueError(
            f"{call}: the end of text must be a token of the file, but "
            f"{'none has one of the usual names' if name is None else f'there is no token {name!r}'}; "
            f"pass one of the special tokens as `end_of_text`: {list(special) or 'there is none, so name any token'}."
        )

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]:
        """Return the ids of the text."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> UInt[np.ndarray, "seq"]:
        """Return the ids of a prompt; names of special tokens in the prompt become the ids of these tokens.

        With `add_special_tokens`, the special tokens that `tokenizer.json` puts around a text, such as a beginning of
        text, are added. Text that a `ChatTemplate` rendered already has these tokens. Only `tokenizer.json` decides
        which tokens are added: `add_bos_token` and `add_eos_token` of a `tokenizer_config.json` are ignored, as in
        transformers 5 for folders with a `tokenizer.json`.
        """
        return np.asarray(self._encode_names("encode_prompt(text)", text, add_special_tokens).ids, np.uint32)

    def encode_with_offsets(
        self, text: str
    ) -> tuple[UInt[np.ndarray, "seq"], Int[np.ndarray, "seq"], Int[np.ndarray, "seq"]]:
        """Return the ids of a rendered conversation, and for each token the indices of its first and next characters.

        Names of special tokens become these tokens, and no special tokens are added. If several tokens share one
        character, they have the same indices.
        """
        encoding = self._encode_names("encode_with_offsets(text)", text, False, offsets=True)
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, np.uint32), offsets[:, 0], offsets[:, 1]

    def _encode_names(self, method: str, text: str, add_special_tokens: bool, *, offsets: bool = False) -> Any:
        """Return the package's encoding of a text; the name of a special token becomes that token."""
        tokenizer = self._prompt_tokenizer
        # The package's `encode` would keep the interpreter's lock, and a long prompt would stop all server threads.
        encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        with self._describe_failure(method, "the text"):
            return encode_batch([text], add_special_tokens=add_special_tokens)[0]

    @functools.cached_property
    def _prompt_tokenizer(self) -> Any:
        """The package's tokenizer with another setting: it reads names of special tokens as these tokens.

        This is a second object, because the setting must not change while another thread encodes with the first object.
        """
        return type(self._tokenizer).from_str(self._tokenizer.to_str())

    reads_pairs = True

    def encode_texts(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], *, max_length: int | None = None
    ) -> list[EncodedText]:
        """Return the ids and token types of texts, or of pairs of texts, with the special tokens around them.

        A text of more than `max_length` tokens is cut at its end, but keeps its special tokens. In a pair, the longer
        text is cut first. Names of special tokens in a text become these tokens.
        """
        with self._describe_failure("encode_texts(texts)", "a text"):
            encodings = self._cutting_tokenizer(max_length).encode_batch(list(texts))
        return [
            EncodedText(
                np.asarray(encoding.ids, np.uint32),
                np.asarray(encoding.type_ids, np.uint32),
                np.asarray(encoding.offsets, np.int64).reshape(-1, 2),
                np.asarray(encoding.special_tokens_mask, bool),
                bool(encoding.overflowing),
            )
            for encoding in encodings
        ]

    def _cutting_tokenizer(self, max_length: int | None) -> Any:
        """Return the package's tokenizer that cuts texts to `max_length` tokens."""
        if max_length is None:
            return self._prompt_tokenizer
        if max_length not in self._cutting:
            self._cutting[max_length] = type(self._tokenizer).from_str(self._tokenizer.to_str())
            self._cutting[max_length].enable_truncation(max_length)
        return self._cutting[max_length]

    @functools.cached_property
    def _cutting(self) -> dict[int, Any]:
        """The package's tokenizers that cut texts, by the maximum number of tokens."""
        return {}

    @functools.cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return tuple(number for number, token in sorted(added.items()) if token.special)

    def encode_batch(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]:
        """Encode every text, on all cores. Raises `ValueError` for a text that the tokenizer cannot encode."""
        with self._describe_failure("encode_batch(texts)", "a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Ids) -> str:
        """Return the text of these ids without special tokens. Raises `ValueError` if an id is negative."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_prompt(self, ids: Ids) -> str:
        """Return the text of these ids with the names of special tokens, as `encode_prompt` reads them."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        array = np.asarray(ids, dtype=np.int64)
        if array.size and array.min() < 0:
            raise ValueError(
                f"FileTokenizer.decode(ids): ids must be 0 to {self.vocab - 1}, but one id is {array.min()}; "
                f"remove the padding."
            )
        with self._describe_failure("decode(ids)", "these ids"):
            return self._tokenizer.decode(array.tolist(), skip_special_tokens=skip_special_tokens)

    def tokens_by_id(self) -> dict[int, str]:
        """Return the token of each id, as the file spells it."""
        return {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def to_json(self) -> str:
        """Return the text of the file."""
        return read_utf8(self._path)

    def _describe_failure(self, method: str, subject: str) -> AbstractContextManager[None]:
        """Turn failures of the package `tokenizers` in the block into a `ValueError` that names the file."""
        return foreign_call(
            lambda reason: f"FileTokenizer({str(self._path)!r}).{method}: the tokenizer refuses {subject} ({reason})."
        )


def check_same_ids(tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Raise a `ValueError` unless each id stands for the same token in both tokenizers, as distillation needs.

    The files of two such tokenizers may differ in other settings.
    """
    if tokenizer.fingerprint == other.fingerprint:
        return
    call, advice = "check_same_ids(tokenizer, other)", "use models of one tokenizer"
    if not (isinstance(tokenizer, FileTokenizer) and isinstance(other, FileTokenizer)):
        raise ValueError(
            f"{call}: the tokenizers must have the same tokens, but they are {tokenizer.fingerprint!r} and "
            f"{other.fingerprint!r}; {advice}."
        )
    pieces, other_pieces = tokenizer.tokens_by_id(), other.tokens_by_id()
    differing = [number for number in {**pieces, **other_pieces} if pieces.get(number) != other_pieces.get(number)]
    if differing:
        first = min(differing)
        raise ValueError(
            f"{call}: each id must mean the same token, but {len(differing):,} of {len(pieces):,} ids differ, such as "
            f"{first}, which is {pieces.get(first)!r} and {other_pieces.get(first)!r}; {advice}."
        )


def tokenizer_files(tokenizer: ByteTokenizer | FileTokenizer, *, max_length: int) -> dict[str, str]:
    """Return the files from which transformers loads a tokenizer, as name -> content, for `models.save(..., files=)`.

    The files are `tokenizer.json` and `tokenizer_config.json`. `max_length` is the maximum number of tokens of a text.
    """
    tokenizer_json = tokenizer.to_json()
    added = {token["id"]: token["content"] for token in parse_json(tokenizer_json).get("added_tokens", [])}
    settings: dict[str, str | int] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    settings |= {"eos_token": added[tokenizer.end_of_text]} if tokenizer.end_of_text in added else {}
    return {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>", "<|MASK|>")
"""Names of mask tokens in published tokenizers."""
_MASK_BYTE = 1
"""The mask token of the byte tokenizer: a control character, which texts do not contain."""


def find_mask_id(tokenizer: "ByteTokenizer | FileTokenizer", token: str | None = None) -> int | None:
    """Return the id of a tokenizer's mask token, which must be a special token; None for a tokenizer without one.

    `token` is the name of the mask token; None: one of `MASK_TOKENS` or, for the byte tokenizer, the byte 1.
    """
    if token is None and isinstance(tokenizer, ByteTokenizer):
        return _MASK_BYTE
    tokens = MASK_TOKENS if token is None else (token,)
    encoded = [tokenizer.encode_prompt(name, add_special_tokens=False).tolist() for name in tokens]
    return next((row[0] for row in encoded if len(row) == 1 and row[0] in tokenizer.special_ids), None)
