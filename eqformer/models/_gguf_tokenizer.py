"""Tokenizers of GGUF files, translated to the `tokenizer.json` and settings of published folders.

The names of pre-tokenizers, and the order of their patterns, are llama.cpp's. If llama.cpp rewrites a published regular
expression for its own engine, the published expression is used here.
"""

import atexit
import dataclasses
import functools
import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

from .._annotation_checks import fits
from .._files import JsonObject
from ._config_types import PublishedConfig
from ._folder import CONFIG
from ._gguf_file import GGUF
from ._hub import COMPANION_FILES, ENCODER_FILES, local_path


GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer, which splits a text into words before bytes are merged; `tokenizer.ggml.pre` names it."""

    patterns: tuple[str, ...] = (GPT2_PATTERN,)
    """Regular expressions; each splits the pieces that the previous one left, at both ends of every match."""
    composed: bool = False
    """Whether a text is first normalized to NFC, as the published tokenizer does; llama.cpp never normalizes."""
    whole_words: bool = False
    """Whether a word that is a token is used as it is, even if no merges produce it."""
    adds_bos: bool = False
    """Whether a text begins with the BOS token, if the file does not state it."""
    raw: bool = False
    """Whether characters are merged instead of bytes. A space is then `▁`, and a character that is no token is split
    into bytes."""


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(
    letters: str, digits: str, marks: str, spaces: str = _SPACES, contractions: str = f"{_CONTRACTIONS}|"
) -> str:
    """Return a pattern of the form that most tokenizers since GPT-4 have, with these alternatives."""
    return rf"{contractions}{letters}|{digits}| ?{marks}|{spaces}"


def _cased_words(suffix: str, but: str = "") -> str:
    """Return a pattern of words that begin anew where a lower-case letter meets an upper-case one."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


_MARKS = r"[^\s\p{L}\p{N}]+"
_LLAMA3 = _words(_LETTERS, r"\p{N}{1,3}", rf"{_MARKS}[\r\n]*")
_QWEN2 = _words(_LETTERS, r"\p{N}", rf"{_MARKS}[\r\n]*")
_QWEN35 = _words(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_TEKKEN = _words(_cased_words(""), r"\p{N}", rf"{_MARKS}[\r\n/]*", contractions="")
_GPT4O = _words(_cased_words(f"{_CONTRACTIONS}?"), r"\p{N}{1,3}", rf"{_MARKS}[\r\n/]*", contractions="")
_KIMI = _cased_words(f"{_CONTRACTIONS}?", but=r"&&[^\p{Han}]")
_KIMI_K2 = r"\p{Han}+|" + _words(_KIMI, r"\p{N}{1,3}", rf"{_MARKS}[\r\n]*", contractions="")
_YOUTU = _words(_cased_words(f"{_CONTRACTIONS}?"), r"\p{N}", rf"{_MARKS}[\r\n/]*", contractions="")
_BAILING = _words(_LETTERS, r"\p{N}", rf"{_MARKS}[\r\n]*", r"\s*[\r\n]|\s+(?!\S)|\s+", "'(?i:[sdmt]|ll|ve|re)|")
_EXAONE_WORDS = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_EXAONE_MOE = _words(_EXAONE_WORDS, r"\p{N}", rf"{_MARKS}[\r\n/]?", r"\s*[\r\n]|\s+(?!\S)|\s+")
_SEED_CODER = _words(_LETTERS, r"\p{N}", r"[^\s\p{L}\p{N}\r\n]+")
_RUNS_OF_SPACES = "|".join([*(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])
_JAIS2 = _words(_LETTERS, r"\p{N}{1,3}", rf"{_MARKS}[\r\n]*", rf"\s*[\r\n]+|{_RUNS_OF_SPACES}")
_MINICPM5 = _words(_LETTERS, r"\p{N}+", rf"{_MARKS}[\r\n]*")
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|[\n]+"
_DIGIT = r"\p{N}"
# The digits of a number are grouped by three, from its end: 1 234 567.
_THREES_FROM_THE_END = (r"\p{N}+", r"(?=(\p{N}{3})+(?!\p{N}))")

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# The letters with upper and lower case, as DeepSeek lists them, without some that Unicode added later.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_WORDS_AND_SIGNS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _HAN_AND_KANA, _WORDS_AND_SIGNS)
# Scripts that have no spaces between words, and their ideographs, kana, jamo and vowel signs.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|"
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)


def _assign_names(pre_tokenizer: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), pre_tokenizer)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **_assign_names(PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
        **_assign_names(
            PreTokenizer(),
            "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert jais trillion "
            "granite-docling exaone4",
        ),
        **_assign_names(PreTokenizer(composed=True), "mpt olmo"),
        **_assign_names(
            PreTokenizer((_DIGIT, GPT2_PATTERN)),
            "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        ),
        **_assign_names(PreTokenizer((_DIGIT, GPT2_PATTERN), composed=True), "command-r"),
        **_assign_names(PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")), "falcon"),
        **_assign_names(
            PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        ),
        **_assign_names(PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
        **_assign_names(PreTokenizer((_QWEN2,), composed=True), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
        **_assign_names(PreTokenizer((_QWEN35,), composed=True), "qwen35"),
        **_assign_names(PreTokenizer((_QWEN2,)), "stablelm2 hunyuan solar-open grok-2"),
        **_assign_names(PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
        **_assign_names(PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
        **_assign_names(PreTokenizer((_GPT4O,), whole_words=True), "granite-embed-multi-97m"),
        **_assign_names(PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
        **_assign_names(PreTokenizer((_KIMI_K2,)), "kimi-k2"),
        **_assign_names(
            PreTokenizer(
                (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _CJK, r"\p{N}+"),
            ),
            "deepseek-llm",
        ),
        **_assign_names(PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)), "deepseek-coder"),
        **_assign_names(PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm"),
        **_assign_names(PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), whole_words=True), "youtu"),
        **_assign_names(PreTokenizer((*_THREES_FROM_THE_END, _AFMOE_SCRIPTS, _WORDS_AND_SIGNS)), "afmoe"),
        **_assign_names(PreTokenizer(_THREES_FROM_THE_END), "superbpe"),
        **_assign_names(PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
        **_assign_names(PreTokenizer((_SEED_CODER,)), "seed-coder"),
        **_assign_names(PreTokenizer((_EXAONE_MOE,)), "exaone-moe"),
        **_assign_names(PreTokenizer((_JAIS2,)), "jais-2"),
        **_assign_names(PreTokenizer((r"\p{N}{1,3}", _MINICPM5), whole_words=True), "minicpm5"),
        **_assign_names(PreTokenizer((_LINES, _QWEN2)), "laguna"),
        **_assign_names(PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
        **_assign_names(PreTokenizer((_BLOOM, _DIGIT)), "viking"),
        **_assign_names(
            PreTokenizer(
                (
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    r"[\t\n]|    |  ",
                    _DIGIT,
                    r"[\p{P}!-/:-@\[-`{-~]",
                    GPT2_PATTERN,
                ),
                adds_bos=True,
            ),
            "chameleon",
        ),
        **_assign_names(PreTokenizer((_LINES,), raw=True, adds_bos=True), "gemma4"),
        **_assign_names(PreTokenizer((_LINES,), raw=True), "granite-embed-multi-311m sarvam-moe"),
    }
)


# The types of tokens; 1 is an ordinary token.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LONGEST_PIECE = 512  # each piece is cut at every character, in a time that grows with the square of its length
_MODELS = ("gpt2", "llama", "gemma4")
# Keys that `PublishedConfig` does not read here: the rest of the file, the lists that `GGUF.listed` reads, further
# special tokens (for infilling, masks, separators), templates with other names, another program's tokenizer, and a
# space before the text, which llama.cpp ignores too if the file lists merges.
_UNREAD = re.compile(
    r"(?!tokenizer\.).+|tokenizer\.ggml\.(tokens|token_type|scores|merges|token_type_count|\w+_token_ids?"
    r"|add_space_prefix)|tokenizer\.chat_template\..+|tokenizer\.(chat_templates|huggingface\.json)"
)
# Keys of tokenizers that are not supported, with the value at which they change nothing.
_NEUTRAL = {"tokenizer.ggml.add_sep_token": False, "tokenizer.ggml.remove_extra_whitespaces": False}


def gguf_companion_files(path: str | Path) -> dict[str, str]:
    """Return the texts of the files that a published folder has beside a model's weights, computed from one GGUF file.

    The files, by name, are `tokenizer.json`, `tokenizer_config.json` with the chat template, and
    `generation_config.json` with the ids that end a text. Pass them to `save(..., files=)`, or write them anywhere.
    Raises a `ValueError` for a tokenizer of an unknown kind, or one that contradicts itself.
    """
    file = GGUF(Path(path))
    published = PublishedConfig(file.values, str(path), "a tokenizer")
    if (model := published.text("tokenizer.ggml.model")) not in _MODELS:
        published.refuse(f"tokenizer.ggml.model={model!r} is not known; there are {', '.join(_MODELS)}.")
    tokens, types = _tokens(file, published, model)
    kinds = ("bos", "eos", "unknown", "padding", "eot", "eom")
    stated_ids = {kind: published.take(f"tokenizer.ggml.{kind}_token_id", None) for kind in kinds}
    ids = {name: token_id for name, token_id in stated_ids.items() if _is_id(token_id, len(tokens))}
    wrong_ids = {name: token_id for name, token_id in stated_ids.items() if name not in ids}
    if wrong_ids:
        published.refuse(f"there are {len(tokens)} tokens, but special tokens have other ids: {wrong_ids}.")
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    pre_tokenizer = _pre_tokenizer(published, model)
    if model == "llama":
        parts = _piece_tokenizer(file, published, tokens, types)
    else:
        parts = _merge_tokenizer(file, published, tokens, pre_tokenizer)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added_tokens(tokens, types),
    } | parts
    if "unknown" in names:
        tokenizer["model"] |= {"unk_token": names["unknown"]}
    template = published.read("tokenizer.chat_template", str, None)
    adds_bos = published.flag("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos)
    adds_eos = published.flag("tokenizer.ggml.add_eos_token", False)
    published.finish_strictly(lambda name, value: _UNREAD.fullmatch(name) is not None or value == _NEUTRAL.get(name))
    sides = [name for name, is_added in (("bos", adds_bos), ("eos", adds_eos)) if is_added and name in names]
    tokenizer["post_processor"] = _post_processor(sides, names, ids)
    settings: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {setting: names[name] for name, setting in _SPECIAL.items() if name in names}
    if template is not None:
        settings["chat_template"] = template
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    files["generation_config.json"] = {"eos_token_id": stops} if stops else {}
    return {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()}


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
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def _tokens(file: GGUF, published: PublishedConfig, model: str) -> tuple[list[str], list[int]]:
    """Return the tokens and their types; refuse repeated tokens, and a number of types other than that of tokens."""
    tokens, types = file.listed("tokenizer.ggml.tokens"), file.listed("tokenizer.ggml.token_type")
    if not fits(tokens, list[str]) or not fits(types, list[int]):
        published.refuse("tokenizer.ggml.tokens must be texts, and tokenizer.ggml.token_type whole numbers.")
    if model == "llama":  # Files of Gemma have tokens of several spaces with spaces instead of ▁.
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    if not tokens or len(types) not in (0, len(tokens)) or len(set(tokens)) < len(tokens):
        published.refuse(
            f"it has {len(tokens)} tokens, {len(set(tokens))} of them distinct, and {len(types)} types of tokens; each "
            "token must be distinct and have one type."
        )
    return tokens, types or [1] * len(tokens)


def _is_id(token_id: object, vocab: int) -> TypeGuard[int | None]:
    """Return whether a special token's id is left out or is one of `vocab` tokens."""
    return token_id is None or (type(token_id) is int and 0 <= token_id < vocab)


def _pre_tokenizer(published: PublishedConfig, model: str) -> PreTokenizer:
    """Return the pre-tokenizer that `tokenizer.ggml.pre` names; refuse an unknown name."""
    if model == "llama":
        published.take("tokenizer.ggml.pre", None)
        return PreTokenizer((), raw=True, adds_bos=True)
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
    """Return the parts of a tokenizer whose merges the file lists, and whose words regular expressions find."""
    texts = file.listed("tokenizer.ggml.merges")
    merges = [str(text).split(" ") for text in texts]
    if wrong := next((text for text, merge in zip(texts, merges) if len(merge) != 2), None):
        published.refuse(f"tokenizer.ggml.merges: {wrong!r} is no pair.")
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
    # Gemma's scores do not have the order of its merges, but its tokens do.
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
    """Return the normalizer that writes spaces as `▁`, with `prefix` also one before the text, and its decoder."""
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


def _post_processor(sides: Sequence[str], names: Mapping[str, str], ids: Mapping[str, int | None]) -> JsonObject | None:
    """Return the part that adds the `sides`, tokens before a text (`bos`) and after it (`eos`)."""
    if not sides:
        return None

    def token(side: str, type_id: int) -> list[JsonObject]:
        return [{"SpecialToken": {"id": names[side], "type_id": type_id}}] if side in sides else []

    def template(*texts: str) -> list[JsonObject]:
        parts: list[JsonObject] = []
        for type_id, text in enumerate(texts):
            text_part = {"Sequence": {"id": text, "type_id": type_id}}
            parts += [*token("bos", type_id), text_part, *token("eos", type_id)]
        return parts

    special = {names[side]: {"id": names[side], "ids": [ids[side]], "tokens": [names[side]]} for side in sides}
    templates = {"single": template("A"), "pair": template("A", "B")}
    return {"type": "TemplateProcessing", **templates, "special_tokens": special}
