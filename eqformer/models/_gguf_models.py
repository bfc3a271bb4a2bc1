"""Models in GGUF files: their configuration, and their arrays under the names of published folders."""

import math
import re
from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from .._files import JsonObject
from ._config_types import LayerCount, PublishedConfig
from ._gguf_architectures import Architecture, LAYER
from ._gguf_encoders import classifier_attributes
from ._gguf_file import DIVISORS, DTYPE, GGUF
from ._gguf_mixtures import architecture_of, ARCHITECTURES
from .formats import Coded


_EDGES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# The stack of layers (for example `enc`), the layer, the kind, the part, and the expert.
_NAME = re.compile(r"(?:(?:(enc|dec)\.)?blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?(?:\.(\d+))?")


def table_names_of(file: GGUF) -> dict[str, str | None]:
    """Return the name in the family's table of each array; None for the arrays of predictors, which are not read."""
    architecture = architecture_of(file)
    table, layers = {**LAYER, **architecture.layer}, _layers(file, architecture)
    edges = {**_EDGES, **architecture.edges, **architecture.classifier}

    def published_name(name: str) -> str | None:
        match = _NAME.fullmatch(name)
        stack, layer, kind, part, expert = match.groups() if match else (None, None, "", None, None)
        if layer is not None and architecture.has_predictors and int(layer) >= layers:
            return None
        kind = kind if stack is None else f"{stack}.{kind}"
        names, prefix = (
            (edges, "")
            if layer is None
            else (table, f"{architecture.stacks.get(stack or '', architecture.prefix)}{layer}.")
        )
        whole_name = names.get(kind if part is None else f"{kind}.{part}")
        if whole_name is not None and expert is None:
            return f"{prefix}{whole_name}"
        module_name = names.get(kind)
        if module_name is None or part is None:
            return name
        is_per_expert = "{}" in module_name
        if is_per_expert != (expert is not None):
            return name
        return f"{prefix}{module_name.format(expert)}.{part}"

    return {name: published_name(name) for name in file.names}


def _layers(file: GGUF, architecture: Architecture) -> int:
    """Return the number of layers, without predictors (multi-token prediction)."""
    kind = file.kind
    predictors = file.values.get(f"{kind}.nextn_predict_layers", 0) if architecture.has_predictors else 0
    return file.values[f"{kind}.block_count"] - predictors


def _axis_left_out(file: GGUF, name: str) -> int | None:
    """Return the index of the dim of size 1 that the file leaves out; None if the file has all published dims."""
    match = _NAME.fullmatch(name)
    axis = architecture_of(file).left_out.get(match[3] if match else "")
    return axis if axis is not None and len(file.tensors[name].shape) == axis + 1 else None


def _is_flat(file: GGUF, name: str) -> bool:
    """Return whether an array has one dim in published folders, whatever dims it has in the file."""
    match = _NAME.fullmatch(name)
    return match is not None and match[3] in architecture_of(file).flat


def _name_in_layer(name: str) -> str:
    """Return the name of a layer's array without the layer: `ssm_a` for `blk.3.ssm_a`."""
    return name.partition(".")[2].partition(".")[2]


def shape_of(file: GGUF, name: str) -> tuple[int, ...]:
    """Return the published shape of an array that is not coded."""
    shape, axis = file.tensors[name].shape, _axis_left_out(file, name)
    if _is_flat(file, name):
        return (math.prod(shape),)
    if (dims := architecture_of(file).unit_dims.get(_name_in_layer(name))) is not None:
        sizes = [size for size in shape if size != 1]
        for dim in dims:
            sizes.insert(dim, 1)
        return tuple(sizes)
    return shape if axis is None else (*shape[:axis], 1, *shape[axis:])


def coded_of(file: GGUF, name: str) -> Coded | None:
    """Return an array of two dims as codes, which are decoded when the array is read; None for other arrays."""
    tensor = file.tensors[name]
    architecture = architecture_of(file)
    is_reshaped = (
        _axis_left_out(file, name) is not None or _is_flat(file, name) or _name_in_layer(name) in architecture.unit_dims
    )
    if len(tensor.shape) != 2 or is_reshaped:
        return None
    return Coded(tensor.form, tensor.parts(architecture.order(file, name)), tensor.shape, DTYPE)


def plain_of(file: GGUF, name: str) -> Shaped[np.ndarray, "*dims"]:
    """Return a small array as published folders have it."""
    architecture, array = architecture_of(file), file.read(name)
    rows, _ = architecture.order(file, name)
    array = array if rows is None else array[rows]
    try:
        return architecture.restore(name, array).reshape(shape_of(file, name))
    except ValueError as error:
        raise ValueError(f"{file.call}: {error}.") from None


def model_type_of(file: GGUF) -> str | None:
    """Return the family's `model_type` of a file; None for an unknown architecture."""
    return architecture_of(file).model_type if file.values.get("general.architecture") in ARCHITECTURES else None


def configuration_of(file: GGUF) -> JsonObject:
    """Return the configuration that a `config.json` would have; raises a `ValueError` for values that are not known."""
    published = PublishedConfig(file.values, str(file.path), "this architecture")
    if (kind := published.text("general.architecture")) not in ARCHITECTURES:
        published.refuse(f"general.architecture={kind!r} is not known; there are {', '.join(ARCHITECTURES)}.")
    if published.take("split.count", 1) not in (0, 1):
        published.refuse("it is one of several files; join them (llama-gguf-split --merge).")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        published.refuse("it has no token_embd.weight, the table of embeddings.")
    architecture, size = architecture_of(file), _SizeReader(published, file, kind)
    embed = size.read("embedding_length")
    config = {
        "model_type": architecture.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": embed,
        "num_hidden_layers": published.checked(f"{kind}.block_count", size.read("block_count"), LayerCount),
        architecture.eps[1]: published.number(f"{kind}.{architecture.eps[0]}"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_attention(published, size, file, architecture, embed),
    }
    if architecture.has_predictors:
        config["num_hidden_layers"] -= published.count(f"{kind}.nextn_predict_layers", 0, 0)
    for name, attribute in architecture.sizes.items():
        config[attribute] = size.read(name)
    for name, attribute in architecture.numbers.items():
        config[attribute] = published.take(f"{kind}.{name}", None) or None
    for name, value in architecture.expected.items():
        published.expect(f"{kind}.{name}", value)
    for name in (*architecture.unread, *architecture.lists):
        published.take(f"{kind}.{name}", None)
    for name in architecture.layer_lists:
        published.take(name, None)
    config |= architecture.implied(config, file) | classifier_attributes(file, architecture)
    published.expect(f"{kind}.vocab_size", table.shape[0])
    published.finish_strictly(lambda name, value: _is_without_effect(name.removeprefix(f"{kind}."), value))
    return config


def _attention(
    published: PublishedConfig, size: "_SizeReader", file: GGUF, architecture: Architecture, embed: int
) -> JsonObject:
    """Return the attributes for attention, rotary positions and feed-forward layers; none for a model without them."""
    kind = file.kind
    if not architecture.has_attention:
        published.take(f"{kind}.context_length", None)
        for name in ("attention.head_count", "feed_forward_length"):
            published.expect(f"{kind}.{name}", 0)
        return {}
    heads = size.read("attention.head_count")
    return {
        "intermediate_size": size.read(_width(file, kind)),
        "num_attention_heads": heads,
        "num_key_value_heads": size.read("attention.head_count_kv", heads),
        "rope_theta": published.number(f"{kind}.rope.freq_base", 10_000.0),
        "max_position_embeddings": published.count(f"{kind}.context_length", 2048),
        **({} if architecture.has_latents else _head(published, size, kind, embed // heads)),
        **_scaling(published, kind, file),
    }


def _width(file: GGUF, kind: str) -> str:
    """Return the name of the number of hidden features.

    Files of models whose layers all have experts state only the experts' number.
    """
    experts = "expert_feed_forward_length"
    has_dense = f"{kind}.feed_forward_length" in file.values or f"{kind}.{experts}" not in file.values
    return "feed_forward_length" if has_dense else experts


class _SizeReader:
    """Reader of sizes of a model; a size may not exceed the number of elements of the file's largest array."""

    def __init__(self, published: PublishedConfig, file: GGUF, kind: str):
        self._published, self._file, self._kind = published, file, kind
        self._most = max(math.prod(tensor.shape) for tensor in file.tensors.values())

    def read(self, name: str, *default: int) -> int:
        """Return a size, the largest one of a list by layers; refuse a size that no array of the file can have."""
        full_name = f"{self._kind}.{name}"
        if name in architecture_of(self._file).lists:
            self._published.take(full_name, None)
            value = max(self._file.numbers_by_layer(name, self._published.count(f"{self._kind}.block_count")))
        else:
            value = self._published.count(full_name, *default)
        if value > self._most:
            self._published.refuse(
                f"{self._kind}.{name}={value}, but the largest array of the file has {self._most} numbers."
            )
        return value


# Keys that are not read here. They state who made the file, how its arrays were rounded, its tokenizer and pooling
# (which `gguf_companion_files` reads), the labels of a classifier (which `classifier_attributes` reads), the order of
# the parts of a split file, whether a rotary scaling was trained, and the order of arrays in files of old converters.
_UNREAD = re.compile(
    r"(general|tokenizer|quantize|imatrix)\..+|split\.(no|tensors\.count)|rope\.scaling\.finetuned|tensor_data_layout"
    r"|(classifier\.)?pooling_type|classifier\.output_labels"
)
# Keys that llama.cpp reads for other architectures, and the values of each key that have no effect. Other values of
# these keys are refused.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # 1 is the softmax
    "expert_weights_norm": (True,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "attention.output_scale"), (0.0, 1.0)),
    **dict.fromkeys(("expert_weights_scale", "expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(
        (
            "activation_sparsity_scale attention.clamp_kqv attention.max_alibi_bias attention.scale "
            "attention.shared_kv_layers attention.sliding_window attention.temperature_length "
            "attention.temperature_scale attn_logit_softcapping expert_count expert_feed_forward_length "
            "expert_shared_count expert_shared_feed_forward_length expert_used_count final_logit_softcapping "
            "full_attention_interval interleave_moe_layer_step leading_dense_block_count moe_every_n_layers "
            "nextn_predict_layers rope.scaling.alpha rope.scaling.yarn_log_multiplier "
            "router_logit_softcapping swin_norm use_parallel_residual"
        ).split(),
        (0,),
    ),
}


def _is_without_effect(name: str, value: object) -> bool:
    """Return whether a key has no effect: it is not read, or its value means the same as no key."""
    return _UNREAD.fullmatch(name) is not None or value in _NEUTRAL.get(name, ())


def _head(published: PublishedConfig, size: _SizeReader, kind: str, default: int) -> JsonObject:
    """Return the attributes for a head's channels and the rotated part; refuse keys and values of different widths."""
    key, value = (size.read(f"attention.{name}_length", default) for name in ("key", "value"))
    if key != value:
        published.refuse(f"attention.key_length, value_length are [{key}, {value}]; both must be equal.")
    rotated = size.read("rope.dimension_count", key)
    if rotated > key:
        published.refuse(f"{kind}.rope.dimension_count={rotated}, but a head has only {key} channels.")
    if rotated == key:
        return {"head_dim": key}
    return {"partial_rotary_factor": rotated / key, "head_dim": None if key == default else key}


def _scaling(published: PublishedConfig, kind: str, file: GGUF) -> JsonObject:
    """Return the scaling of rotary positions, as llama.cpp reads the header and the divisors of frequencies.

    A factor without a type is a linear scaling. `attn_factor` multiplies cosines and sines, in addition to YaRN's own
    factor.
    """
    key = f"{kind}.rope.scaling."
    scaling_type = published.text(f"{key}type", "linear")
    factor = published.number(f"{key}factor", published.number(f"{kind}.rope.scale_linear", 0.0)) or 1.0
    original = published.count(f"{key}original_context_length", published.count(f"{kind}.context_length", 2048))
    magnitude = published.number(f"{key}attn_factor", 1.0)
    if not all(0 < number < math.inf for number in (factor, magnitude)):
        published.refuse(f"rope.scaling: factor={factor} and attn_factor={magnitude} must be above 0.")
    for_all, long, short = map(file.divisors, DIVISORS)
    has_divisors = for_all is not None or long is not None or short is not None
    if has_divisors and factor != 1 and scaling_type != "none":
        names = ", ".join(DIVISORS)
        published.refuse(f"{key}factor={factor} beside divisors of frequencies ({names}); only one may be stated.")
    if (long is None) != (short is None) or (for_all is not None and long is not None):
        published.refuse(f"it has some of {', '.join(DIVISORS)}; it must have only the first, or only the other two.")
    if long is not None and short is not None:
        return _longrope(published, key, long, short, original, magnitude)
    if not has_divisors and scaling_type not in ("none", "linear", "yarn"):
        published.refuse(f"rope.scaling.type={scaling_type!r} is not known; there are none, linear and yarn.")
    if scaling_type == "yarn" and factor != 1 and not has_divisors:
        scaling: JsonObject = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        scaling |= {} if magnitude == 1 else {"attention_factor": magnitude * (1 + 0.1 * math.log(factor))}
        return {"rope_scaling": scaling}
    if magnitude != 1:
        published.refuse(f"{key}attn_factor={magnitude}: without YaRN or LongRoPE it must be 1.")
    if for_all is not None:
        return _proportional(for_all) or _llama3(published, kind, for_all)
    is_linear = scaling_type == "linear" and factor != 1
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if is_linear else {}


def _longrope(
    published: PublishedConfig,
    key: str,
    long: Shaped[np.ndarray, "pairs"],
    short: Shaped[np.ndarray, "pairs"],
    original: int,
    magnitude: float,
) -> JsonObject:
    """Return LongRoPE's scaling, with `attn_factor` if it differs from the default for these lengths.

    Args:
        published: The values of the header.
        key: The prefix of the names of the scaling's values.
        long: The divisors for long rows.
        short: The divisors for short rows.
        original: The original length, in tokens.
        magnitude: The value of `attn_factor`.
    """
    published.count(f"{key}original_context_length")
    growth = published.count(f"{key.split('.')[0]}.context_length") / original
    default = (1 + max(math.log(growth), 0) / math.log(original)) ** 0.5 if original > 1 else 1.0
    factors = {"long_factor": _decimals(long), "short_factor": _decimals(short)}
    scaling: JsonObject = {"rope_type": "longrope"} | factors
    scaling |= {} if abs(magnitude - default) < 1e-4 else {"attention_factor": magnitude}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _decimals(numbers: Shaped[np.ndarray, "pairs"]) -> list[float]:
    """Return the shortest decimals that round to these float32s: 1.1 instead of 1.10000002."""
    return [float(str(number)) for number in numbers]


def _proportional(divisors: Shaped[np.ndarray, "pairs"]) -> JsonObject:
    """Return the scaling that rotates only the first pairs; the divisors of other pairs make their frequencies 0.

    Return an empty object for other divisors.
    """
    rotated = int(np.sum(divisors == 1))
    if rotated == len(divisors) or not (divisors[:rotated] == 1).all() or not (divisors[rotated:] >= _INFINITE).all():
        return {}
    return {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}}


_INFINITE = 1e30  # the divisor of the frequencies of pairs that are not rotated


def _llama3(published: PublishedConfig, kind: str, divisors: Shaped[np.ndarray, "pairs"]) -> JsonObject:
    """Return the scaling of Llama 3 or 4 that has these divisors of frequencies; refuse other divisors."""
    theta = published.number(f"{kind}.rope.freq_base", 10_000.0)
    with np.errstate(all="ignore"):  # A base that is not finite gives no such divisors, and is refused below.
        lengths = 2 * np.pi * np.float64(theta) ** (np.arange(divisors.size) / divisors.size)
        # The high factor of Llama 4 Scout is 1, so its divisors have no transition between short and long lengths.
        parts = {4.0: np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0.0, 1.0), 1.0: np.where(lengths < 8192, 1.0, 0.0)}
    for factor, high in ((8.0, 4.0), (32.0, 4.0), (16.0, 1.0)):
        if np.allclose(1 / ((1 - parts[high]) / factor + parts[high]), divisors, rtol=1e-4):
            scaling: JsonObject = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
            scaling |= {"high_freq_factor": high, "original_max_position_embeddings": 8192}
            return {"rope_scaling": scaling}
    published.refuse(
        f"{DIVISORS[0]} are not the divisors of Llama 3.1 to 3.3 or Llama 4, and no other divisors are known."
    )
