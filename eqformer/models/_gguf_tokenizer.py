"""Tokenizers of GGUF files, as the `tokenizer.json` and the settings that folders have."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ._config import PublishedConfig
from ._gguf import GGUF


_UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # types of tokens; 1 is an ordinary one
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*")
_ends = lambda digits, signs: rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}{_SPACES}"
_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+" + _ends(r"\p{N}{1,3}", r"[\r\n]*")
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+" + _ends(r"\p{N}", r"[\r\n]*")
_TEKKEN = "|".join(_CASES) + _ends(r"\p{N}", r"[\r\n/]*")
_GPT4O = "|".join(f"{its}{_SUFFIXES}?" for its in _CASES) + _ends(r"\p{N}{1,3}", r"[\r\n/]*")
# By `tokenizer.ggml.pre`, how a text is split before bytes are merged; None: as GPT-2's is.
_SPLITS: Mapping[str, str | None] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "default"), None),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA3),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
        **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
        "tekken": _TEKKEN,
    }
)
# Of which a word may be a token that no merges make, and a text begins with a token where nothing else is said.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def companions(path: str | Path) -> dict[str, str]:
    """The files that a folder has beside a model's weights, by name, of one file of GGUF.

    They are `tokenizer.json`, `tokenizer_config.json` with the chat template, and `generation_config.json` with the ids
    that end a text: for `save(..., files=)`, or to be written anywhere. Raises a `ValueError` for a tokenizer of a kind
    that is not known, or that is not what it says.
    """
    file = GGUF(Path(path))
    given = PublishedConfig(file.values, str(path), "a tokenizer")
    take = lambda name, default=None: given.take(f"tokenizer.ggml.{name}", default)
    if (model := given.text("tokenizer.ggml.model")) not in (kinds := {"gpt2": _of_bytes, "llama": _of_pieces}):
        given.refuse(f"tokenizer.ggml.model={model!r} is not known; there are {', '.join(kinds)}.")
    tokens, types = (file.listed(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if model == "llama":  # of which Gemma's have spaces as they are
        tokens = ["▁" * len(its) if its and not its.strip(" ") else its for its in tokens]
    if not tokens or len(types) not in (0, len(tokens)) or len(set(tokens)) < len(tokens):
        given.refuse(
            f"it has {len(tokens)} tokens, {len(set(tokens))} of which differ, and {len(types)} types of them."
        )
    types = types or [1] * len(tokens)
    ids = {name: take(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    if wrong := {name: its for name, its in ids.items() if its is not None and not 0 <= its < len(tokens)}:
        given.refuse(f"there are {len(tokens)} tokens, and of special tokens these ids: {wrong}.")
    named = {name: tokens[its] for name, its in ids.items() if its is not None}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(tokens, types)}
    whole |= kinds[model](file, given, tokens, types)
    if "unknown" in named:
        whole["model"] |= {"unk_token": named["unknown"]}
    begins, ends = take("add_bos_token", model == "llama" or take("pre") in _WHOLE_WORDS), take("add_eos_token", False)
    sides = [name for name, is_added in (("bos", begins), ("eos", ends)) if is_added and name in named]
    whole["post_processor"] = _around(sides, named, ids)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {own: named[name] for name, own in _SPECIAL.items() if name in named}
    if (template := given.take("tokenizer.chat_template", None)) is not None:
        settings["chat_template"] = template
    stops = list(dict.fromkeys(its for name in ("eos", "eot", "eom") if (its := ids[name]) is not None))
    files = {"tokenizer.json": whole, "tokenizer_config.json": settings}
    files["generation_config.json"] = {"eos_token_id": stops} if stops else {}
    return {name: json.dumps(its, ensure_ascii=False, indent=1) + "\n" for name, its in files.items()}


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that stand in a text as they are; special are those that are left out of what is read."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": token, "special": kind != _OWN, **flags}
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind in (_UNKNOWN, _CONTROL, _OWN)
    ]


def _of_bytes(file: GGUF, given: PublishedConfig, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Merges of bytes (GPT-2), in words that a regular expression finds."""
    if (kind := given.text("tokenizer.ggml.pre", "default")) not in _SPLITS:
        given.refuse(f"tokenizer.ggml.pre={kind!r} is not known; there are {', '.join(_SPLITS)}.")
    merges = [merge.split(" ") for merge in file.listed("tokenizer.ggml.merges")]
    if wrong := next((its for its in merges if len(its) != 2), None):
        given.refuse(f"tokenizer.ggml.merges: {' '.join(wrong)!r} is no pair.")
    octets = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = _SPLITS[kind]
    words: dict[str, Any] = octets | {"use_regex": True}
    if split is not None:
        parts = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        words = {"type": "Sequence", "pretokenizers": [parts, octets | {"use_regex": False}]}
    return {
        "normalizer": {"type": "NFC"} if split is _QWEN2 else None,
        "pre_tokenizer": words,
        "decoder": octets | {"use_regex": True},
        "model": _model(tokens, merges, ignore_merges=kind in _WHOLE_WORDS),
    }


def _of_pieces(file: GGUF, given: PublishedConfig, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Merges of characters (SentencePiece), which are found again from the order of what they make."""
    number_of, scores = {its: number for number, its in enumerate(tokens)}, file.listed("tokenizer.ggml.scores")
    if given.text("general.architecture", "").startswith("gemma") or len(scores) != len(tokens):
        scores = [0] * len(tokens)  # Gemma's are in another order than its merges
    merges = [
        (-scores[number], number, -cut, token[:cut], token[cut:])
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
        for cut in range(1, len(token))
        if token[:cut] in number_of and token[cut:] in number_of
    ]
    prefix = given.take("tokenizer.ggml.add_space_prefix", True)
    spaces: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] * prefix
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    spaces = [*spaces, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    pairs = [[left, right] for *_, left, right in sorted(merges)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _model(tokens, pairs, fuse_unk=True, byte_fallback=True),
    }


def _model(tokens: Sequence[str], merges: list[Any], **options: bool) -> dict[str, Any]:
    vocab = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges} | options


def _around(sides: Sequence[str], named: Mapping[str, str], ids: Mapping[str, int | None]) -> dict[str, Any] | None:
    """What adds tokens before a text (`bos`) and behind it (`eos`)."""
    if not sides:
        return None
    part = lambda kind, name, place: {kind: {"id": name, "type_id": place}}
    token = lambda side, place: [part("SpecialToken", named[side], place)] if side in sides else []
    around = lambda text, place: [*token("bos", place), part("Sequence", text, place), *token("eos", place)]
    both = {"single": around("A", 0), "pair": around("A", 0) + around("B", 1)}
    special = {named[side]: {"id": named[side], "ids": [ids[side]], "tokens": [named[side]]} for side in sides}
    return {"type": "TemplateProcessing", **both, "special_tokens": special}
