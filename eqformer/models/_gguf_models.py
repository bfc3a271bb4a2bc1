"""Models of GGUF files: what llama.cpp's names of numbers and arrays are in published configurations and folders."""

import dataclasses
import re
from typing import Any

import numpy as np

from ._config import PublishedConfig
from ._gguf import DIVISORS, GGUF
from .formats import Coded


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """A `general.architecture`: its family's `model_type`, and in which order it has the rows of queries and keys."""

    model_type: str
    interleaved: bool = False
    """Whether the channels that turn together are neighbours there."""


_ARCHITECTURES = {
    "llama": _Architecture("llama", interleaved=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
}
_EDGES = {"token_embd.": "model.embed_tokens.", "output_norm.": "model.norm.", "output.": "lm_head."}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_ELSEWHERE = re.compile(r"(general|tokenizer|quantize)\.")


def names_of(file: GGUF) -> dict[str, str]:
    """What a family's table calls each array."""
    found = {}
    for name in file.names:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        edge = next((own + name.removeprefix(its) for its, own in _EDGES.items() if name.startswith(its)), name)
        found[name] = edge
        if layer and layer[2] in _OF_LAYERS:
            found[name] = f"model.layers.{layer[1]}.{_OF_LAYERS[layer[2]]}.{layer[3]}"
    return found


def order_of(file: GGUF, name: str) -> np.ndarray | None:
    """Which of an array's rows is the first in published folders, the second, and so on; None: they stand so."""
    kind = file.values["general.architecture"]
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.weight", name)
    if not _ARCHITECTURES[kind].interleaved or found is None:
        return None
    heads = file.values[f"{kind}.attention.head_count"]
    heads = heads if found[1] == "q" else file.values.get(f"{kind}.attention.head_count_kv", heads)
    rows = file.tensors[name].shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{file.call}: {name} has {rows} rows, and {heads} heads have another number.")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def coded_of(file: GGUF, name: str) -> Coded | None:
    """An array of two dims, which is decoded as it is read; None for another."""
    tensor = file.tensors[name]
    if len(tensor.shape) != 2:
        return None
    return Coded(tensor.form, tensor.parts(order_of(file, name)), tensor.shape, tensor.form.dtype)


def configuration_of(file: GGUF) -> dict[str, Any]:
    """A configuration as published; raises a `ValueError` for numbers that are not known."""
    source = str(file.path)
    given = PublishedConfig(file.values, source, "this architecture")
    if (kind := given.text("general.architecture")) not in _ARCHITECTURES:
        given.refuse(f"general.architecture={kind!r} is not known; there are {', '.join(_ARCHITECTURES)}.")
    if given.take("split.count", 1) not in (0, 1):
        given.refuse("it is one of several files; join them (llama-gguf-split --merge).")
    count = lambda name, *default: given.count(f"{kind}.{name}", *default)
    heads = count("attention.head_count")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        given.refuse("it has no token_embd.weight, the table of embeddings.")
    said = {
        "model_type": _ARCHITECTURES[kind].model_type,
        "vocab_size": table.shape[0],
        "hidden_size": count("embedding_length"),
        "num_hidden_layers": count("block_count"),
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": _head_size(given, kind),
        "rms_norm_eps": given.take(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": given.take(f"{kind}.rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(given, kind, file),
        "max_position_embeddings": count("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    given.expect(f"{kind}.vocab_size", table.shape[0])
    given.finish(_ELSEWHERE.match)
    return said


def _head_size(given: PublishedConfig, kind: str) -> int | None:
    """Channels of a head, where they are said; all must be turned, and keys as wide as values."""
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    found = {size for name in names if (size := given.take(f"{kind}.{name}", None)) is not None}
    if len(found) > 1:
        given.refuse(f"{', '.join(names)} are {sorted(found)}; keys, values and turned channels must be as many.")
    return found.pop() if found else None


def _scaling(given: PublishedConfig, kind: str, file: GGUF) -> dict[str, Any] | None:
    """Of rotary positions: said by numbers or, that of Llama 3, by what each frequency is divided by."""
    take = lambda name: given.take(f"{kind}.rope.scaling.{name}", None)
    named, factor, original = take("type"), take("factor"), take("original_context_length")
    if DIVISORS in file.tensors:
        return _llama3(given, file)
    if named in (None, "none"):
        return None
    if named not in ("linear", "yarn"):
        given.refuse(f"rope.scaling.type={named!r} is not known; there are none, linear and yarn.")
    found = {"rope_type": named, "factor": factor}
    return found | ({} if named == "linear" else {"original_max_position_embeddings": original})


def _llama3(given: PublishedConfig, file: GGUF) -> dict[str, Any]:
    """Llama 3's scaling of the published factors, whichever divides the frequencies so."""
    kind, stored = file.values["general.architecture"], file.tensors[DIVISORS]
    divisors = stored.form.decode(stored.parts(None), slice(0, 1)).ravel()
    theta = given.take(f"{kind}.rope.freq_base", 10_000.0)
    lengths = 2 * np.pi * theta ** (np.arange(divisors.size) / divisors.size)
    for factor in (8.0, 32.0):
        part = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - part) / factor + part), divisors, rtol=1e-4):
            found: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
            return found | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    given.refuse(f"{DIVISORS} are not those of Llama 3.1 to 3.3, and no others are known.")
