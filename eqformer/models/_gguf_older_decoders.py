"""Architectures of GGUF files of GPT-2 and of other decoders that have one array for queries, keys and values."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from .._files import JsonObject
from ._gguf_architectures import Architecture, LAYER_NORM
from ._gguf_file import GGUF, Order


_OLDER_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_epsilon")


def order_joined_heads(file: GGUF, name: str) -> Order:
    """Return the published order of the joined rows of queries, keys and values: key head by key head.

    The query heads of a key head are before the key head and its value head. Files have the rows of all queries first,
    then the rows of all keys, then the rows of all values.
    """
    if ".attn_qkv." not in name:
        return None, None
    heads, rows = file.values[f"{file.kind}.attention.head_count"], file.tensors[name].shape[0]
    kv_heads = file.values.get(f"{file.kind}.attention.head_count_kv", heads)
    if heads % kv_heads or rows % (heads + 2 * kv_heads):
        raise ValueError(
            f"{file.call}: {name} has {rows} rows, which must be a multiple of {heads + 2 * kv_heads} ({heads} heads "
            f"of queries, {kv_heads} of keys, {kv_heads} of values), and {kv_heads} must divide {heads}."
        )
    queries, keys, values = np.split(np.arange(rows).reshape(heads + 2 * kv_heads, -1), [heads, heads + kv_heads])
    groups = [part.reshape(kv_heads, -1) for part in (queries, keys, values)]
    return np.concatenate(groups, axis=1).reshape(-1), None


# Attributes that every configuration made of a file begins with, and that these families do not have.
_REMOVED = ("intermediate_size", "num_key_value_heads", "rope_theta", "head_dim")


def _check_key_heads(config: JsonObject, file: GGUF) -> None:
    """Raise a `ValueError` unless there are as many key heads as query heads."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads != heads:
        raise ValueError(
            f"{file.call}: {file.kind}.attention.head_count_kv={kv_heads}: it must be {heads}, the number of query "
            "heads."
        )


def _read_gpt2(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the width of feed-forward layers under GPT-2's name; raise a `ValueError` for grouped key heads."""
    _check_key_heads(config, file)
    return _read_gpt2_width(config)


def _read_gpt2_width(config: JsonObject) -> JsonObject:
    """Return the width of feed-forward layers under GPT-2's name, null if it is four times the channels."""
    width = config["intermediate_size"]
    return dict.fromkeys(_REMOVED) | {"n_inner": None if width == 4 * config["hidden_size"] else width}


def read_starcoder(config: JsonObject, file: GGUF) -> JsonObject:
    """Return GPTBigCode's attributes of its one key head, width and activation; refuse several key heads.

    Files do not state the activation. It is the GELU by the hyperbolic tangent, as in llama.cpp.
    """
    if (kv_heads := config["num_key_value_heads"]) != 1:
        raise ValueError(
            f"{file.call}: starcoder.attention.head_count_kv={kv_heads}: it must be 1, the only number that "
            "llama.cpp's converter writes."
        )
    return _read_gpt2_width(config) | {"multi_query": True, "activation_function": "gelu_pytorch_tanh"}


def _read_alibi_decoder(config: JsonObject, file: GGUF, length_name: str) -> JsonObject:
    """Return the length of rows under the attribute `length_name`, for BLOOM and MPT.

    Raises a `ValueError` for grouped key heads, and for feed-forward layers that do not have four times as many hidden
    features as channels.
    """
    _check_key_heads(config, file)
    width, embed = config["intermediate_size"], config["hidden_size"]
    if width != 4 * embed:
        raise ValueError(
            f"{file.call}: {file.kind}.feed_forward_length={width}: it must be 4 x embedding_length={embed}."
        )
    return dict.fromkeys((*_REMOVED, "max_position_embeddings")) | {length_name: config["max_position_embeddings"]}


def read_mpt(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the length of rows and the settings of attention under the names of MPT; refuse an MPT without ALiBi."""
    max_bias = config["alibi_bias_max"]
    if not max_bias:
        raise ValueError(
            f"{file.call}: mpt.attention.max_alibi_bias is missing or 0: only models with ALiBi can be read."
        )
    attention = {"alibi": True, "alibi_bias_max": max_bias, "clip_qkv": config["clip_qkv"]}
    return _read_alibi_decoder(config, file, "max_seq_len") | {
        "attn_config": attention,
        "alibi_bias_max": None,
        "clip_qkv": None,
    }


def _read_gpt_neox(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the rotary positions and the options of a GPT-NeoX; raise a `ValueError` for grouped key heads."""
    _check_key_heads(config, file)
    return {
        **dict.fromkeys(("partial_rotary_factor", "rope_theta", "head_dim", "num_key_value_heads")),
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "rotary_emb_base": config.get("rope_theta"),
        "use_parallel_residual": file.values.get("gptneox.use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


def read_falcon(config: JsonObject, file: GGUF) -> JsonObject:
    """Return the key heads, the width and the norms of a Falcon, whose attention and feed-forward layer are parallel.

    Raises a `ValueError` for a Falcon 2 without the base of its rotary positions, which the converter leaves out.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    norms = 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1
    is_new = norms == 2 or kv_heads not in (1, heads)
    name = "falcon.rope.freq_base"
    if is_new and norms == 1 and name not in file.values:
        raise ValueError(
            f"{file.call}: {name} is missing. Layers with one norm and {kv_heads} key heads are those of Falcon 2, "
            "whose base is not the default 10000, and llama.cpp's converter leaves it out; load the published folder."
        )
    return {
        **dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim")),
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": config["intermediate_size"],
        "new_decoder_architecture": is_new,
        "multi_query": not is_new and kv_heads == 1,
        "num_ln_in_parallel_attn": norms if is_new else None,
    }


_TRANSFORMER = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"}
_DENSE_NAMES = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_BLOOM_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    **_DENSE_NAMES,
}
_GPT2_EDGES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
OLDER: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv.weight": "attn.c_attn.linear.weight",
            "attn_qkv.bias": "attn.c_attn.bias",
            "attn_output.weight": "attn.c_proj.linear.weight",
            "attn_output.bias": "attn.c_proj.bias",
            "ffn_norm": "ln_2",
            "ffn_up.weight": "mlp.c_fc.linear.weight",
            "ffn_up.bias": "mlp.c_fc.bias",
            "ffn_down.weight": "mlp.c_proj.linear.weight",
            "ffn_down.bias": "mlp.c_proj.bias",
        },
        implied=_read_gpt2,
        edges=_GPT2_EDGES,
        prefix="transformer.h.",
        eps=_OLDER_LAYER_NORM,
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        implied=read_starcoder,
        edges=_GPT2_EDGES,
        prefix="transformer.h.",
        eps=_OLDER_LAYER_NORM,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            **_DENSE_NAMES,
        },
        implied=_read_gpt_neox,
        unread=("use_parallel_residual",),
        order=order_joined_heads,
        edges={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        prefix="gpt_neox.layers.",
        eps=LAYER_NORM,
    ),
    "bloom": Architecture(
        "bloom",
        _BLOOM_NAMES,
        implied=lambda config, file: _read_alibi_decoder(config, file, "seq_length"),
        order=order_joined_heads,
        edges={**_TRANSFORMER, "token_embd_norm": "transformer.word_embeddings_layernorm"},
        prefix="transformer.h.",
        eps=_OLDER_LAYER_NORM,
    ),
    "falcon": Architecture(
        "falcon",
        _BLOOM_NAMES,
        implied=read_falcon,
        order=order_joined_heads,
        edges=_TRANSFORMER,
        prefix="transformer.h.",
        eps=_OLDER_LAYER_NORM,
    ),
    "mpt": Architecture(
        "mpt",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        numbers={"attention.max_alibi_bias": "alibi_bias_max", "attention.clamp_kqv": "clip_qkv"},
        implied=read_mpt,
        edges={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        prefix="transformer.blocks.",
        eps=_OLDER_LAYER_NORM,
    ),
}
# In files of Falcon 40B and 180B, `attn_norm` is the norm of the feed-forward layer, `attn_norm_2` that of attention.
FALCON_WITH_TWO_NORMS = dataclasses.replace(
    OLDER["falcon"], layer={**_BLOOM_NAMES, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
