"""Pre-tokenizers of GGUF files: how a text is split into words before bytes are merged, by llama.cpp's names.

The names, and the order of the patterns, are llama.cpp's. If llama.cpp rewrites a published regular expression for its
own engine, the published expression is used here.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


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
            "granite-docling exaone4 roberta-bpe jina-v1-en jina-v2-code",
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
        **_assign_names(PreTokenizer((_LLAMA3,), whole_words=True), "glm5"),
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
        **_assign_names(PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
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
