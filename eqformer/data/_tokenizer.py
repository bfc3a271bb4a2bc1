"""Text to token ids and back: bytes, or a `tokenizer.json`."""

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt

from .._extra import load_extra
from .._failures import foreign_call, quiet_panics
from .._read import is_there, parse_json, read_bytes, read_utf8
from ._documents import digest


Ids = Integer[np.ndarray, "seq"] | Sequence[int]


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer; any object with these attributes and methods is one.

    `vocab` is one more than the largest id, `end_of_text` the id that is put behind every document, `fingerprint` a
    text that changes when the tokenizer does.
    """

    vocab: int
    end_of_text: int
    fingerprint: str

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]: ...

    def encode_each(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]: ...

    def decode(self, ids: Ids) -> str: ...


class TextStream:
    """Decodes ids one by one into whole characters.

    The bytes of an incomplete character are held back until the rest arrives or `finish` is called. The texts together
    are what `decode` makes of all ids but those without a token, of a vocabulary that was rounded up.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode, self._vocab = tokenizer.decode, tokenizer.vocab
        self._context: list[int] = []  # the ids last decoded: some decoders treat the first token of a text specially
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this id completes; often empty."""
        if token >= self._vocab:
            return ""
        self._pending.append(token)
        text = self._text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for incomplete characters."""
        text = self._text()
        self._context, self._pending = [], []
        return text

    def pieces(self, ids: Ids) -> list[str]:
        """The text that each of the ids completes, the last with what was held back."""
        found = [self.push(int(token)) for token in ids]
        return [*found[:-1], found[-1] + self.finish()] if found else []

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]


class ByteTokenizer:
    """The bytes of UTF-8 as 256 ids; the NUL byte, which texts do not contain, is the end of text.

    `encode` refuses a text that contains NUL: most often it is a binary file or UTF-16. `decode` leaves out the end of
    text and writes U+FFFD for bytes that are not UTF-8.
    """

    vocab = 256
    end_of_text = 0
    fingerprint = "utf-8 bytes, end of text 0"

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]:
        """The UTF-8 bytes of the text. Raises `ValueError` where it holds NUL."""
        place = text.find("\0")
        if place >= 0:
            raise ValueError(
                f"ByteTokenizer().encode(text): the text must hold no NUL, which stands for the end of text, but "
                f"character {place} is one; remove it, or convert the file if it is UTF-16 or binary."
            )
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_each(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, whole: bool = False) -> UInt[np.ndarray, "seq"]:
        """`encode`: bytes have no special tokens around a prompt."""
        return self.encode(text)

    def decode(self, ids: Ids) -> str:
        """The text of these bytes. Raises `ValueError` where an id is no byte."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() > 255):
            raise ValueError(
                f"ByteTokenizer().decode(ids): ids must be bytes, 0 to 255, but they reach from {array.min()} to "
                f"{array.max()}; use the tokenizer that the model was trained with."
            )
        return array[array != self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """The same tokenizer as a `tokenizer.json`; the end of text is called `<|endoftext|>` there."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # other bytes are written as U+0100 onwards
        moved = {byte: chr(256 + number) for number, byte in enumerate(sorted({*range(256)} - {*printable}))}
        vocab = {_END_OF_TEXT[0]: 0} | {moved.get(byte, chr(byte)): byte for byte in range(1, 256)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 0, "content": _END_OF_TEXT[0], "special": True, **flags}],
                "pre_tokenizer": bytes_of,
                "decoder": bytes_of,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            },
            ensure_ascii=False,
        )


# The names that published tokenizers use, the least ambiguous first.
_END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<|eos|>",
)


_TRIAL = "A word, 1 é.\n"


class FileTokenizer:
    """A `tokenizer.json`, run by the package `tokenizers`.

    `end_of_text` is the name or the id of a token; by default it is the special token with one of the usual names, or
    the only special token. `encode` treats the whole text as plain text: names of special tokens in it are encoded as
    ordinary characters, no beginning of text is added, and the file's truncation and padding are off.

    **Raises:** `ValueError` if the file is absent or unreadable or its end of text is not known; `ImportError` if
    `tokenizers` is absent.
    """

    def __init__(self, path: str | os.PathLike[str], *, end_of_text: str | int | None = None):
        call = f"FileTokenizer({str(path)!r}, end_of_text={end_of_text!r})"
        tokenizers = load_extra("tokenizers", extra="train", call=call)
        if not is_there(path):
            raise ValueError(f"{call}: the path must be a tokenizer.json, but there is no file {path}; correct it.")
        written = read_bytes(path)
        self._path = Path(path)
        refuse = foreign_call(
            lambda reason: (
                f"{call}: the file must be a tokenizer.json as the package tokenizers writes it, but "
                f"{reason}; fetch it again."
            )
        )
        with quiet_panics(), refuse:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(written)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # Some files make the package panic at the first text only. An ordinary error is no fault of the file: a
            # vocabulary may lack these letters.
            with suppress(Exception):
                self._tokenizer.encode(_TRIAL)
            self._tokenizer.encode_special_tokens = True
        self.vocab: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_text: int = self._find(end_of_text, call)
        self.fingerprint = f"tokenizer.json {digest((written,))}, end of text {self.end_of_text}"

    def _find(self, name: str | int | None, call: str) -> int:
        if isinstance(name, int) and 0 <= name < self.vocab:
            return name
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in sorted(added.items()) if token.special}
        if name is None:
            names = [usual for usual in _END_OF_TEXT if usual in special] or list(special)
            if len(special) == 1 or names != list(special):
                return special[names[0]]
        else:
            number = self._tokenizer.token_to_id(str(name))
            if number is not None:
                return number
        raise ValueError(
            f"{call}: the end of text must be a token of the file, but "
            f"{'none has one of the usual names' if name is None else f'there is no token {name!r}'}; "
            f"pass one of its special tokens as `end_of_text`: {list(special) or 'it has none, so name any token'}."
        )

    def encode(self, text: str) -> UInt[np.ndarray, "seq"]:
        """The ids of the text."""
        return self.encode_each([text])[0]

    def encode_prompt(self, text: str, *, whole: bool = False) -> UInt[np.ndarray, "seq"]:
        """The ids of a prompt: special tokens named in it become their ids, and the file's own are added around it.

        Added are, for example, a beginning of text; not to a `whole` text, which has them already, as one that a
        `ChatTemplate` rendered. `tokenizer.json` alone decides which: `add_bos_token` and `add_eos_token` of a
        `tokenizer_config.json` are ignored, as in transformers 5 where there is a `tokenizer.json`.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            with self._calls("encode_prompt(text)", "the text"):
                ids = self._tokenizer.encode(text, add_special_tokens=not whole).ids
        finally:
            self._tokenizer.encode_special_tokens = True
        return np.asarray(ids, dtype=np.uint32)

    def encode_each(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "_"]]:
        """`encode` of every text, on all cores. Raises `ValueError` where the tokenizer cannot spell one."""
        with self._calls("encode_each(texts)", "a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Ids) -> str:
        """The text of these ids, special tokens left out. Raises `ValueError` where an id is negative."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and array.min() < 0:
            raise ValueError(
                f"FileTokenizer.decode(ids): ids must be 0 to {self.vocab - 1}, but one is {array.min()}; "
                f"leave padding out."
            )
        with self._calls("decode(ids)", "these ids"):
            return self._tokenizer.decode(array.tolist(), skip_special_tokens=True)

    def to_json(self) -> str:
        """The text of the file."""
        return read_utf8(self._path)

    def _calls(self, method: str, subject: str) -> AbstractContextManager[None]:
        """Calls of the package `tokenizers`, whose failures become a `ValueError` that names the file."""
        return foreign_call(
            lambda reason: f"FileTokenizer({str(self._path)!r}).{method}: the tokenizer refuses {subject} ({reason})."
        )


def tokenizer_files(tokenizer: ByteTokenizer | FileTokenizer, *, longest: int) -> dict[str, str]:
    """The files by which transformers reads a tokenizer, by their names: `tokenizer.json` and `tokenizer_config.json`.

    `longest` is the most tokens of a text; `models.save(..., files=)` takes them.
    """
    written = tokenizer.to_json()
    added = {token["id"]: token["content"] for token in parse_json(written).get("added_tokens", [])}
    settings: dict[str, str | int] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    settings |= {"eos_token": added[tokenizer.end_of_text]} if tokenizer.end_of_text in added else {}
    return {"tokenizer.json": written, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}
