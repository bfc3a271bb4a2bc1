"""Tokenizers of GGUF files, as the `tokenizer.json` and the settings that folders have."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._config import PublishedConfig
from ._gguf import GGUF
from ._gguf_pretokenizers import GPT2_PATTERN, PRE_TOKENIZERS, PreTokenizer


# The types of tokens; 1 is an ordinary one.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LONGEST_PIECE = 512  # each piece is cut at every place, in a time that grows with the square of its length
_MODELS = ("gpt2", "llama", "gemma4")
# Nothing reads these of a tokenizer: the rest of the file, the lists that are read apart, further special tokens (for
# infilling, masks, separators), templates by other names, another program's tokenizer, and, of merges that are listed,
# a space before the text, which llama.cpp passes over there too.
_UNREAD = re.compile(
    r"(?!tokenizer\.).+|tokenizer\.ggml\.(tokens|token_type|scores|merges|token_type_count|\w+_token_ids?"
    r"|add_space_prefix)|tokenizer\.chat_template\..+|tokenizer\.(chat_templates|huggingface\.json)"
)
# What other kinds of tokenizers have, with the value that changes nothing in those that are read.
_NEUTRAL = {"tokenizer.ggml.add_sep_token": False, "tokenizer.ggml.remove_extra_whitespaces": False}


def companions(path: str | Path) -> dict[str, str]:
    """Return the files that a folder has beside a model's weights, by name, of one GGUF file.

    They are `tokenizer.json`, `tokenizer_config.json` with the chat template, and `generation_config.json` with the ids
    that end a text: for `save(..., files=)`, or to be written anywhere. Raises a `ValueError` for a tokenizer of a kind
    that is not known, or that is not what it says.
    """
    file = GGUF(Path(path))
    published = PublishedConfig(file.values, str(path), "a tokenizer")
    take = lambda name, default=None: published.take(f"tokenizer.ggml.{name}", default)
    if (model := published.text("tokenizer.ggml.model")) not in _MODELS:
        published.refuse(f"tokenizer.ggml.model={model!r} is not known; there are {', '.join(_MODELS)}.")
    tokens, types = _tokens(file, published, model)
    ids = {name: take(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    wrong_ids = {name: token_id for name, token_id in ids.items() if not _is_id(token_id, len(tokens))}
    if wrong_ids:
        published.refuse(f"there are {len(tokens)} tokens, and of special tokens these ids: {wrong_ids}.")
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    pre_tokenizer = _pre_tokenizer(published, model)
    if model == "llama":
        parts = _piece_tokenizer(file, published, tokens, types)
    else:
        parts = _merge_tokenizer(file, published, tokens, pre_tokenizer)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(tokens, types)} | parts
    if "unknown" in names:
        tokenizer["model"] |= {"unk_token": names["unknown"]}
    template = published.read("tokenizer.chat_template", str, None)
    adds_bos = published.flag("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos)
    adds_eos = published.flag("tokenizer.ggml.add_eos_token", False)
    published.finish_strictly(lambda name, value: _UNREAD.fullmatch(name) is not None or value == _NEUTRAL.get(name))
    sides = [name for name, is_added in (("bos", adds_bos), ("eos", adds_eos)) if is_added and name in names]
    tokenizer["post_processor"] = _post_processor(sides, names, ids)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {setting: names[name] for name, setting in _SPECIAL.items() if name in names}
    if template is not None:
        settings["chat_template"] = template
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    files["generation_config.json"] = {"eos_token_id": stops} if stops else {}
    return {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()}


def _tokens(file: GGUF, published: PublishedConfig, model: str) -> tuple[list[str], list[int]]:
    """Return the tokens and their types; refuse tokens that come twice, and types that are not one for each."""
    tokens, types = file.listed("tokenizer.ggml.tokens"), file.listed("tokenizer.ggml.token_type")
    if not all(isinstance(token, str) for token in tokens) or not all(isinstance(kind, int) for kind in types):
        published.refuse("tokenizer.ggml.tokens must be texts, and tokenizer.ggml.token_type whole numbers.")
    if model == "llama":  # Gemma's runs of spaces are written as they are, and not with ▁.
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    if not tokens or len(types) not in (0, len(tokens)) or len(set(tokens)) < len(tokens):
        published.refuse(
            f"it has {len(tokens)} tokens, {len(set(tokens))} of which differ, and {len(types)} types of them."
        )
    return tokens, types or [1] * len(tokens)


def _is_id(token_id: Any, vocab: int) -> bool:
    """Return whether a special token's id is left out or is one of `vocab` tokens."""
    return token_id is None or (type(token_id) is int and 0 <= token_id < vocab)


def _pre_tokenizer(published: PublishedConfig, model: str) -> PreTokenizer:
    """Return what `tokenizer.ggml.pre` stands for; refuse a name that is not known."""
    if model == "llama":
        published.take("tokenizer.ggml.pre", None)
        return PreTokenizer((), raw=True, adds_bos=True)
    name = published.text("tokenizer.ggml.pre", "gemma4" if model == "gemma4" else "default")
    if name not in PRE_TOKENIZERS:
        published.refuse(f"tokenizer.ggml.pre={name!r} is not known; there are {', '.join(sorted(PRE_TOKENIZERS))}.")
    return PRE_TOKENIZERS[name]


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tokens that stand in a text as they are; special ones are left out of decoded text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": token, "special": kind != _USER_DEFINED, **flags}
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _merge_tokenizer(
    file: GGUF, published: PublishedConfig, tokens: Sequence[str], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """Return the parts of a tokenizer whose merges the file lists, in words that regular expressions find."""
    texts = file.listed("tokenizer.ggml.merges")
    merges = [merge.split(" ") if isinstance(merge, str) else [] for merge in texts]
    if wrong := next((text for text, merge in zip(texts, merges) if len(merge) != 2), None):
        published.refuse(f"tokenizer.ggml.merges: {wrong!r} is no pair.")
    splits = [_split(pattern) for pattern in pre_tokenizer.patterns]
    if pre_tokenizer.raw:
        parts = _parts_with_spaces(prefix=False)
        model = _model(tokens, merges, fuse_unk=True, byte_fallback=True)
        return parts | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}, "model": model}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    # The last of most lists is the pattern that `ByteLevel` has itself.
    has_own = pre_tokenizer.patterns[-1] == GPT2_PATTERN
    words = [*(splits[:-1] if has_own else splits), to_bytes | {"use_regex": has_own}]
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.composed else None,
        "pre_tokenizer": words[0] if len(words) == 1 else {"type": "Sequence", "pretokenizers": words},
        "decoder": to_bytes | {"use_regex": True},
        "model": _model(tokens, merges, ignore_merges=pre_tokenizer.whole_words),
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _piece_tokenizer(
    file: GGUF, published: PublishedConfig, tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer, whose merges are found again from the scores of pieces."""
    if (longest := max(map(len, tokens))) > _LONGEST_PIECE:
        published.refuse(f"tokenizer.ggml.tokens: one has {longest} characters, and a piece at most {_LONGEST_PIECE}.")
    number_of = {token: number for number, token in enumerate(tokens)}
    scores = file.listed("tokenizer.ggml.scores")
    # Gemma's scores are in another order than its merges.
    if published.text("general.architecture", "").startswith("gemma") or len(scores) != len(tokens):
        scores = [0] * len(tokens)
    if not all(isinstance(score, int | float) and score == score for score in scores):
        published.refuse("tokenizer.ggml.scores must be numbers.")
    merges = [
        (-scores[number], number, -cut, token[:cut], token[cut:])
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
        for cut in range(1, len(token))
        if token[:cut] in number_of and token[cut:] in number_of
    ]
    pairs = [[left, right] for *_, left, right in sorted(merges)]
    parts = _parts_with_spaces(published.flag("tokenizer.ggml.add_space_prefix", True))
    return parts | {"pre_tokenizer": None, "model": _model(tokens, pairs, fuse_unk=True, byte_fallback=True)}


def _parts_with_spaces(prefix: bool) -> dict[str, Any]:
    """Return the normalizer that writes spaces as `▁`, one of them before the text with a `prefix`, and its decoder."""
    before: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] * prefix
    spaces = [*before, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "decoder": {"type": "Sequence", "decoders": back},
    }


def _model(tokens: Sequence[str], merges: list[Any], **options: bool) -> dict[str, Any]:
    vocab = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges} | options


def _post_processor(
    sides: Sequence[str], names: Mapping[str, str], ids: Mapping[str, int | None]
) -> dict[str, Any] | None:
    """Return the part that adds tokens before a text (`bos`) and behind it (`eos`)."""
    if not sides:
        return None
    part = lambda kind, name, place: {kind: {"id": name, "type_id": place}}
    token = lambda side, place: [part("SpecialToken", names[side], place)] if side in sides else []
    around = lambda text, place: [*token("bos", place), part("Sequence", text, place), *token("eos", place)]
    both = {"single": around("A", 0), "pair": around("A", 0) + around("B", 1)}
    special = {names[side]: {"id": names[side], "ids": [ids[side]], "tokens": [names[side]]} for side in sides}
    return {"type": "TemplateProcessing", **both, "special_tokens": special}
