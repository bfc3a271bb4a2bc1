"""Models of GGUF files: what llama.cpp's names of numbers and arrays are in published configurations and folders."""

import re
from typing import Any

import numpy as np

from ._config import PublishedConfig
from ._gguf import DIVISORS, GGUF
from ._gguf_architectures import Architecture, ARCHITECTURES, LAYER, MIXTRAL
from .formats import Coded


_EDGES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)(?:\.(\d+))?")  # layer, what, which part, expert
_ELSEWHERE = re.compile(r"(general|tokenizer|quantize)\.")


def names_of(file: GGUF) -> dict[str, str]:
    """What a family's table calls each array."""
    table = {**LAYER, **_architecture(file).layer}

    def own(name: str) -> str:
        found = _NAME.fullmatch(name)
        layer, what, part, expert = found.groups() if found else (None, "", "", None)
        known = (_EDGES if layer is None else table).get(what)
        if known is None or ("{}" in known) != (expert is not None):
            return name
        return f"{'' if layer is None else f'model.layers.{layer}.'}{known.format(expert)}.{part}"

    return {name: own(name) for name in file.names}


def _architecture(file: GGUF) -> Architecture:
    kind = file.values["general.architecture"]
    return MIXTRAL if kind == "llama" and f"{kind}.expert_count" in file.values else ARCHITECTURES[kind]


def order_of(file: GGUF, name: str) -> np.ndarray | None:
    """Which of an array's rows is the first in published folders, the second, and so on; None: they stand so."""
    kind = file.values["general.architecture"]
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.weight", name)
    if not _architecture(file).interleaved or found is None:
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


def plain_of(file: GGUF, name: str) -> np.ndarray:
    """A small array, as folders have it."""
    array = file.read(name)
    return array - array.dtype.type(1) if _architecture(file).raised and name.endswith("norm.weight") else array


def configuration_of(file: GGUF) -> dict[str, Any]:
    """A configuration as published; raises a `ValueError` for numbers that are not known."""
    source = str(file.path)
    given = PublishedConfig(file.values, source, "this architecture")
    if (kind := given.text("general.architecture")) not in ARCHITECTURES:
        given.refuse(f"general.architecture={kind!r} is not known; there are {', '.join(ARCHITECTURES)}.")
    if given.take("split.count", 1) not in (0, 1):
        given.refuse("it is one of several files; join them (llama-gguf-split --merge).")
    count = lambda name, *default: given.count(f"{kind}.{name}", *default)
    architecture, heads, embed = _architecture(file), count("attention.head_count"), count("embedding_length")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        given.refuse("it has no token_embd.weight, the table of embeddings.")
    said = {
        "model_type": architecture.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": embed,
        "num_hidden_layers": count("block_count"),
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "rms_norm_eps": given.take(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": given.take(f"{kind}.rope.freq_base", 10_000.0),
        "max_position_embeddings": count("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_head(given, kind, embed // heads),
        **_scaling(given, kind, file),
    }
    said |= {own: given.take(f"{kind}.{its}", None) or None for its, own in architecture.numbers.items()}
    said |= architecture.unsaid(said)
    given.expect(f"{kind}.vocab_size", table.shape[0])
    given.finish(_ELSEWHERE.match)
    return said


def _head(given: PublishedConfig, kind: str, size: int) -> dict[str, Any]:
    """Channels of a head, and the part of them that is turned; keys must be as wide as values."""
    said = [given.take(f"{kind}.attention.{name}_length", None) for name in ("key", "value")]
    if said[0] != said[1]:
        given.refuse(f"attention.key_length, value_length are {said}; keys and values must be as wide.")
    turned, whole = given.take(f"{kind}.rope.dimension_count", None), said[0] or size
    if turned in (None, whole):
        return {"head_dim": said[0] or turned}
    return {"head_dim": said[0], "partial_rotary_factor": turned / whole}


def _scaling(given: PublishedConfig, kind: str, file: GGUF) -> dict[str, Any]:
    """Of rotary positions: said by numbers or by what each frequency is divided by."""
    take = lambda name: given.take(f"{kind}.rope.scaling.{name}", None)
    named, factor, original, magnitude = map(take, ("type", "factor", "original_context_length", "attn_factor"))
    take("finetuned")
    if (divisors := file.divisors(DIVISORS[0])) is not None:
        return _llama3(given, kind, divisors)
    long, short = map(file.divisors, DIVISORS[1:])
    if long is not None and short is not None:
        found = {"rope_type": "longrope", "long_factor": _exact(long), "short_factor": _exact(short)}
        original = given.count(f"{kind}.rope.scaling.original_context_length")
        grown = given.count(f"{kind}.context_length") / original
        usual = (1 + max(np.log(grown), 0) / np.log(original)) ** 0.5
        found |= {} if magnitude is None or abs(magnitude - usual) < 1e-4 else {"attention_factor": magnitude}
        return {"rope_scaling": found, "original_max_position_embeddings": original}
    if named in (None, "none"):
        return {}
    if named not in ("linear", "yarn"):
        given.refuse(f"rope.scaling.type={named!r} is not known; there are none, linear and yarn.")
    found = {"rope_type": named, "factor": factor}
    return {"rope_scaling": found | ({} if named == "linear" else {"original_max_position_embeddings": original})}


def _exact(numbers: np.ndarray) -> list[float]:
    """1.1, and not what is nearest."""
    return [float(str(number)) for number in numbers]


def _llama3(given: PublishedConfig, kind: str, divisors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling of the published factors, whichever divides the frequencies so."""
    theta = given.take(f"{kind}.rope.freq_base", 10_000.0)
    lengths = 2 * np.pi * theta ** (np.arange(divisors.size) / divisors.size)
    for factor in (8.0, 32.0):
        part = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - part) / factor + part), divisors, rtol=1e-4):
            found: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
            found |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return {"rope_scaling": found}
    given.refuse(f"{DIVISORS[0]} are not those of Llama 3.1 to 3.3, and no others are known.")
