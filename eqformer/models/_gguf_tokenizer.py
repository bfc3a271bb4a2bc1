"""Tokenizers of GGUF files, translated to the `tokenizer.json` and settings of published folders."""

import atexit
import base64
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from .._annotation_checks import fits
from .._files import JsonObject
from ._config_types import PublishedConfig
from ._folder import CONFIG, GENERATION_CONFIG
from ._gguf_encoders import context_length, sentence_files, states_encoder
from ._gguf_file import GGUF
from ._gguf_pre_tokenizers import GPT2_PATTERN, PRE_TOKENIZERS, PreTokenizer
from ._hub import COMPANION_FILES, ENCODER_FILES, local_path


# The types of tokens; 1 is an ordinary token.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# llama.cpp's key says "seperator".
_SPECIAL_OF_ENCODERS = {"cls": "cls_token", "seperator": "sep_token", "mask": "mask_token"}
# llama.cpp's ids of special tokens in files that do not state them.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
# A piece is cut at every character to find merges, which takes time quadratic in the length of the piece.
_LONGEST_PIECE = 512
_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")
# Keys that `PublishedConfig` need not read: keys of the model; lists, which `GGUF.listed` reads; special tokens for
# infilling, masks and separators; chat templates with other names; and a copy of `tokenizer.json`. The key
# `add_space_prefix` need not be read either: llama.cpp ignores it in files that list merges.
_UNREAD = re.compile(
    r"(?!tokenizer\.).+|tokenizer\.ggml\.(tokens|token_type|scores|merges|token_type_count|precompiled_charsmap"
    r"|\w+_token_ids?|add_space_prefix)|tokenizer\.chat_template\..+|tokenizer\.(chat_templates|huggingface\.json)"
)
# Keys that are not supported for all tokenizers. A file may still have them with these values, which have no effect.
_NEUTRAL = {"tokenizer.ggml.add_sep_token": False, "tokenizer.ggml.remove_extra_whitespaces": False}


def gguf_companion_files(path: str | Path) -> dict[str, str]:
    """Return the texts of the files that a published folder has beside a model's weights, computed from one GGUF file.

    The files, by name, are `tokenizer.json`, `tokenizer_config.json` with the chat template, and
    `generation_config.json` with the ids that end a text. A text encoder that states its pooling also has the files of
    sentence-transformers. Pass the files to `save(..., files=)`, or write them anywhere. Raises a `ValueError` for a
    tokenizer of an unknown kind, or one that contradicts itself.
    """
    file = GGUF(Path(path))
    published = PublishedConfig(file.values, str(path), "a tokenizer")
    if (model := published.text("tokenizer.ggml.model")) not in _MODELS:
        published.refuse(f"tokenizer.ggml.model={model!r} is not known; there are {', '.join(_MODELS)}.")
    tokens, types = _tokens(file, published, model)
    is_encoder = model in _DEFAULT_IDS or states_encoder(file)
    special = _SPECIAL | (_SPECIAL_OF_ENCODERS if is_encoder else {})
    ids = _read_special_ids(published, (*special, "eot", "eom"), len(tokens), _DEFAULT_IDS.get(model, {}))
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    pre_tokenizer = _pre_tokenizer(published, model)
    if model == "llama":
        parts = _piece_tokenizer(file, published, tokens, types)
    elif model == "bert":
        parts = _word_piece_tokenizer(published, tokens, types)
    elif model == "t5":
        parts = _unigram_tokenizer(file, published, tokens, types, ids["unknown"])
    else:
        parts = _merge_tokenizer(file, published, tokens, pre_tokenizer)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added_tokens(tokens, types),
    } | parts
    if "unknown" in names and model != "t5":
        tokenizer["model"] |= {"unk_token": names["unknown"]}
    template = published.read("tokenizer.chat_template", str, None)
    affixes = _read_affixes(file, published, model, pre_tokenizer, names, is_encoder)
    published.finish_strictly(lambda name, value: _UNREAD.fullmatch(name) is not None or value == _NEUTRAL.get(name))
    tokenizer["post_processor"] = _post_processor(affixes, {names[name]: ids[name] for name in names})
    settings: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {setting: names[name] for name, setting in special.items() if name in names}
    if template is not None:
        settings["chat_template"] = template
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    files: dict[str, object] = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    files[GENERATION_CONFIG] = {"eos_token_id": stops} if stops else {}
    if states_encoder(file):
        settings["model_max_length"] = context_length(file)
        files |= sentence_files(file)
    return {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()}


def _read_special_ids(
    published: PublishedConfig, kinds: Sequence[str], vocab: int, defaults: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the ids of special tokens by llama.cpp's names, None for a missing one; refuse ids that no token has."""
    stated_ids = {kind: published.take(f"tokenizer.ggml.{kind}_token_id", defaults.get(kind)) for kind in kinds}
    ids = {name: token_id for name, token_id in stated_ids.items() if _is_id(token_id, vocab)}
    wrong_ids = {name: token_id for name, token_id in stated_ids.items() if name not in ids}
    if wrong_ids:
        published.refuse(f"there are {vocab} tokens, but some special tokens have ids outside of these: {wrong_ids}.")
    return ids


def companion_folder(path: str | Path) -> Path:
    """Return the folder with a published model's tokenizer, chat template and generation settings.

    This is the model's own folder. For a GGUF file, it is a temporary folder with the file's `gguf_companion_files`,
    which is removed when the process ends.
    """
    path = local_path(path)
    return _write_gguf_companions(path) if path.is_file() else path


def copy_companions(source: str | Path, target: str | Path) -> None:
    """Copy the files that a model was published with, except weights, into a new folder.

    Afterwards the folder is complete, or does not exist. `save` takes it as `like=`.
    """
    companions, target = companion_folder(source), Path(target)
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for name in (CONFIG, *COMPANION_FILES):
        if (companions / name).exists():
            shutil.copyfile(companions / name, part / name)
    for pattern in ENCODER_FILES:
        for file in companions.glob(pattern):
            copy = part / file.relative_to(companions)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    part.rename(target)


@functools.cache
def _write_gguf_companions(file: Path) -> Path:
    files, folder = gguf_companion_files(file), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def _tokens(file: GGUF, published: PublishedConfig, model: str) -> tuple[list[str], list[int]]:
    """Return the tokens and their types; refuse repeated tokens, and unequal numbers of tokens and types."""
    tokens, types = file.listed("tokenizer.ggml.tokens"), file.listed("tokenizer.ggml.token_type")
    if not fits(tokens, list[str]) or not fits(types, list[int]):
        published.refuse("tokenizer.ggml.tokens must be texts, and tokenizer.ggml.token_type whole numbers.")
    if model == "llama":  # In files of Gemma, tokens of several spaces have spaces instead of ▁.
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    if model == "bert":
        tokens = [_word_piece(token, kind) for token, kind in itertools.zip_longest(tokens, types[: len(tokens)])]
    if not tokens or len(types) not in (0, len(tokens)) or len(set(tokens)) < len(tokens):
        published.refuse(
            f"it has {len(tokens)} tokens, {len(set(tokens))} of them distinct, and {len(types)} types of tokens; each "
            "token must be distinct and have one type."
        )
    return tokens, types or [1] * len(tokens)


def _word_piece(token: str, kind: int | None) -> str:
    """Return a token of WordPiece as published: files have `▁` before a word, and no `##` before its continuations."""
    if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
        return token
    return token.removeprefix("▁") if token.startswith("▁") else f"##{token}"


def _is_id(token_id: object, vocab: int) -> TypeGuard[int | None]:
    """Return whether a special token's id is None, or an index below `vocab`."""
    return token_id is None or (type(token_id) is int and 0 <= token_id < vocab)


def _pre_tokenizer(published: PublishedConfig, model: str) -> PreTokenizer:
    """Return the pre-tokenizer that `tokenizer.ggml.pre` names; refuse an unknown name."""
    if model in ("llama", "bert", "t5"):  # llama.cpp reads no name for these models.
        published.take("tokenizer.ggml.pre", None)
        return PreTokenizer((), raw=True, adds_bos=model == "llama")
    name = published.text("tokenizer.ggml.pre", "gemma4" if model == "gemma4" else "default")
    if name not in PRE_TOKENIZERS:
        published.refuse(f"tokenizer.ggml.pre={name!r} is not known; there are {', '.join(sorted(PRE_TOKENIZERS))}.")
    return PRE_TOKENIZERS[name]


def _list_added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[JsonObject]:
    """Return the tokens that are found in a text before it is split; special tokens are left out of decoded text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": token, "special": kind != _USER_DEFINED, **flags}
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _merge_tokenizer(
    file: GGUF, published: PublishedConfig, tokens: Sequence[str], pre_tokenizer: PreTokenizer
) -> JsonObject:
    """Return the parts of a tokenizer that splits texts by regular expressions; the file lists its merges."""
    texts = file.listed("tokenizer.ggml.merges")
    merges = [str(text).split(" ") for text in texts]
    if wrong := next((text for text, merge in zip(texts, merges) if len(merge) != 2), None):
        published.refuse(f"tokenizer.ggml.merges: {wrong!r} is not a pair.")
    splits = [_split(pattern) for pattern in pre_tokenizer.patterns]
    if pre_tokenizer.raw:
        parts = _parts_with_spaces(prefix=False)
        model = _model(tokens, merges, fuse_unk=True, byte_fallback=True)
        return parts | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}, "model": model}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    # `ByteLevel` has the last pattern of most pre-tokenizers built in.
    ends_in_built_in = pre_tokenizer.patterns[-1] == GPT2_PATTERN
    words = [*(splits[:-1] if ends_in_built_in else splits), to_bytes | {"use_regex": ends_in_built_in}]
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.composed else None,
        "pre_tokenizer": words[0] if len(words) == 1 else {"type": "Sequence", "pretokenizers": words},
        "decoder": to_bytes | {"use_regex": True},
        "model": _model(tokens, merges, ignore_merges=pre_tokenizer.whole_words),
    }


def _split(pattern: str) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _piece_tokenizer(file: GGUF, published: PublishedConfig, tokens: Sequence[str], types: Sequence[int]) -> JsonObject:
    """Return the parts of a SentencePiece tokenizer, whose merges are reconstructed from the scores of pieces."""
    if (longest := max(map(len, tokens))) > _LONGEST_PIECE:
        published.refuse(f"tokenizer.ggml.tokens: a token has {longest} characters, more than {_LONGEST_PIECE}.")
    number_of = {token: number for number, token in enumerate(tokens)}
    scores = file.listed("tokenizer.ggml.scores")
    # Gemma's merges are in the order of its tokens, not of its scores.
    if published.text("general.architecture", "").startswith("gemma") or len(scores) != len(tokens):
        scores = [0] * len(tokens)
    if not fits(scores, list[float]) or any(math.isnan(score) for score in scores):
        published.refuse("tokenizer.ggml.scores must be numbers.")
    merges = [
        (-scores[number], number, -cut, token[:cut], token[cut:])
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
        for cut in range(1, len(token))
        if token[:cut] in number_of and token[cut:] in number_of
    ]
    pairs = [list(merge[-2:]) for merge in sorted(merges)]
    parts = _parts_with_spaces(published.flag("tokenizer.ggml.add_space_prefix", True))
    return parts | {"pre_tokenizer": None, "model": _model(tokens, pairs, fuse_unk=True, byte_fallback=True)}


def _parts_with_spaces(prefix: bool) -> JsonObject:
    """Return a normalizer that writes spaces as `▁`, and its decoder; with `prefix`, a `▁` is put before the text."""
    prepend: list[JsonObject] = [{"type": "Prepend", "prepend": "▁"}] * prefix
    normalizers = [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[JsonObject] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _model(tokens: Sequence[str], merges: list[list[str]], **options: bool) -> JsonObject:
    vocab = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges} | options


def _word_piece_tokenizer(published: PublishedConfig, tokens: Sequence[str], types: Sequence[int]) -> JsonObject:
    """Return the parts of BERT's tokenizer.

    If a file does not state whether texts are converted to lower case, texts are converted if no token of the
    vocabulary has an upper-case letter. (llama.cpp always converts texts, unlike the published tokenizer of a cased
    model.)
    """
    is_cased = any(token != token.lower() for token, kind in zip(tokens, types) if kind not in (_UNKNOWN, _CONTROL))
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": published.read("tokenizer.ggml.normalizer.strip_accents", bool, None),
        "lowercase": published.flag("tokenizer.ggml.normalizer.lowercase", not is_cased),
    }
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {"type": "WordPiece", "vocab": vocab, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": model,
    }


def _unigram_tokenizer(
    file: GGUF, published: PublishedConfig, tokens: Sequence[str], types: Sequence[int], unknown: int | None
) -> JsonObject:
    """Return the parts of a SentencePiece tokenizer that takes the most probable pieces.

    Args:
        file: The file, whose lists are read.
        published: The values of the header.
        tokens: The pieces.
        types: The types of the pieces.
        unknown: The id of the unknown token, which stands for characters without a piece.
    """
    scores = file.listed("tokenizer.ggml.scores")
    if not fits(scores, list[float]) or len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        published.refuse("tokenizer.ggml.scores must be a finite number for each token.")
    octets = file.listed("tokenizer.ggml.precompiled_charsmap")
    if not fits(octets, list[int]) or not all(-128 <= octet < 256 for octet in octets):
        published.refuse("tokenizer.ggml.precompiled_charsmap must be bytes.")
    rules = bytes(octet & 255 for octet in octets)
    if rules and not _is_charsmap(rules):
        published.refuse("tokenizer.ggml.precompiled_charsmap is not a table of SentencePiece's rules.")
    charsmap = base64.b64encode(rules).decode()
    normalizers: list[JsonObject] = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] * bool(charsmap)
    if published.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        for spaces, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            normalizers.append({"type": "Replace", "pattern": {"Regex": spaces}, "content": content})
    prefix = "always" if published.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prefix, "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(tokens, scores)),
            "byte_fallback": _BYTE in types,
        },
    }


def _is_charsmap(octets: bytes) -> bool:
    """Return whether bytes are SentencePiece's rules: a double-array trie, and the texts that its leaves point to.

    The package `tokenizers` follows the indices without a check, and an index that is too large ends in a Rust panic.
    """
    size = int.from_bytes(octets[:4], "little")
    texts = octets[4 + size :]
    if size % 4 or size == 0 or not texts.endswith(b"\0"):
        return False
    units = np.frombuffer(octets, "<u4", size // 4, 4).astype(np.int64)
    is_text = units >> 31 == 1
    children = np.arange(units.size) ^ ((units >> 10) << ((units & 1 << 9) >> 6))  # each node's first child
    if ((children | 255)[~is_text] >= units.size).any():
        return False
    leaves = units[children[~is_text & (units >> 8 & 1 == 1)]]
    starts = leaves & (1 << 31) - 1
    if not (leaves >> 31 == 1).all() or (starts >= len(texts)).any():
        return False
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    return not (np.frombuffer(texts, np.uint8)[starts] & 0xC0 == 0x80).any()  # no text starts inside a UTF-8 character


@dataclasses.dataclass(frozen=True)
class _Affixes:
    """The special tokens around a text, and around the texts of a pair; None: there is no such token."""

    first: str | None
    """The token before a text."""
    last: str | None
    """The token after each text."""
    between: str | None
    """The token before the second text of a pair, after the `last` token of the first."""
    second_type: int = 1
    """The token type of the second text."""


def _read_affixes(
    file: GGUF,
    published: PublishedConfig,
    model: str,
    pre_tokenizer: PreTokenizer,
    names: Mapping[str, str],
    is_encoder: bool,
) -> _Affixes:
    """Return the special tokens around texts.

    Args:
        file: The file.
        published: The values of the header.
        model: The tokenizer's kind.
        pre_tokenizer: The pre-tokenizer, which decides whether a BOS token is added if the file does not say so.
        names: The special tokens by llama.cpp's names.
        is_encoder: Whether the tokenizer is a text encoder's.
    """
    adds_bos = published.flag("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos)
    adds_eos = published.flag("tokenizer.ggml.add_eos_token", model == "t5")
    if model == "bert":  # llama.cpp adds both tokens to every text, even if the flags are false.
        published.take("tokenizer.ggml.add_sep_token", None)
        return _Affixes(names.get("bos", names["cls"]), names["seperator"], None)
    first = names.get("bos", names.get("cls")) if adds_bos else None
    last = names.get("eos") if adds_eos else None
    if not is_encoder:
        return _Affixes(first, last, first)
    # Files of ModernBERT ask for a second separator, which its publishers do not add.
    is_doubled = published.flag("tokenizer.ggml.add_sep_token", False) and file.kind != "modern-bert"
    return _Affixes(first, last, names.get("seperator", last) if is_doubled else None, 0)


def _post_processor(affixes: _Affixes, ids: Mapping[str, int | None]) -> JsonObject | None:
    """Return the part that adds special tokens to a text and to a pair of texts."""
    first, last, between = affixes.first, affixes.last, affixes.between
    if first is None and last is None:
        return None

    def parts(before: str | None, text: str, type_id: int) -> list[JsonObject]:
        before_text, after_text = (
            [{"SpecialToken": {"id": name, "type_id": type_id}}] if name else [] for name in (before, last)
        )
        return [*before_text, {"Sequence": {"id": text, "type_id": type_id}}, *after_text]

    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (first, last, between) if name}
    pair = parts(first, "A", 0) + parts(between, "B", affixes.second_type)
    return {"type": "TemplateProcessing", "single": parts(first, "A", 0), "pair": pair, "special_tokens": special}
