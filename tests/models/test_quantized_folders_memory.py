"""Bytes of gpt-oss 20B as published: real shapes, from a folder whose weight file is sparse."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from eqformer import models, nn, planning
from eqformer.models._folder import Folder
from eqformer.models._published_arrays import find_quantized_maps, PublishedArrays, with_quantized_maps
from eqformer.models._published_model import describe_model


LAYERS, EMBED, VOCAB, EXPERTS, HEADS, KV_HEADS, HEAD = 24, 2880, 201_088, 32, 64, 8, 64
SAID: dict[str, Any] = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "torch_dtype": "bfloat16"}
SAID |= {"vocab_size": VOCAB, "hidden_size": EMBED, "intermediate_size": EMBED, "num_hidden_layers": LAYERS}
SAID |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_local_experts": EXPERTS}
SAID |= {"num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False, "attention_bias": True}
SAID |= {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "rms_norm_eps": 1e-5}
SAID |= {"rope_theta": 150_000, "max_position_embeddings": 131_072, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9}
SAID |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}}
SAID["rope_scaling"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
SAID |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def published() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each array, as the published files have them."""
    found: dict[str, tuple[int, ...]] = {f"model.{name}.weight": (EMBED,) for name in ("norm",)}
    found |= {name: (VOCAB, EMBED) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    octets: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        found |= {f"{own}{name}_layernorm.weight": (EMBED,) for name in ("input", "post_attention")}
        for name, out in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            found |= {f"{own}self_attn.{name}_proj.weight": (out, EMBED), f"{own}self_attn.{name}_proj.bias": (out,)}
        found |= {f"{own}self_attn.o_proj.weight": (EMBED, HEADS * HEAD), f"{own}self_attn.o_proj.bias": (EMBED,)}
        found |= {f"{own}self_attn.sinks": (HEADS,), f"{own}mlp.router.weight": (EXPERTS, EMBED)}
        found |= {f"{own}mlp.router.bias": (EXPERTS,)}
        for name, out in (("gate_up", 2 * EMBED), ("down", EMBED)):
            stem = f"{own}mlp.experts.{name}_proj"
            found[f"{stem}_bias"] = (EXPERTS, out)
            octets |= {f"{stem}_blocks": (EXPERTS, out, EMBED // 32, 16), f"{stem}_scales": (EXPERTS, out, EMBED // 32)}
    return {name: ("BF16", shape) for name, shape in found.items()} | {n: ("U8", shape) for n, shape in octets.items()}


def write(folder: Path) -> int:
    """A folder of these arrays, which takes no room on a disk, and the bytes of its arrays."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in published().items():
        start, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(SAID))
    return end


def nbytes(model: Any) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(eqx.filter(model, nn.has_shape)))


def test_gpt_oss_20b_fits_in_16_gb_as_it_is_published(tmp_path):
    """Quantized, its arrays take the bytes of the file, 13.8 GB; decoded three times as many."""
    size, published = write(tmp_path), describe_model(tmp_path)
    assert published.config == models.preset("gpt-oss-20b")
    arrays = PublishedArrays(Folder(tmp_path), published)
    shapes = eqx.filter_eval_shape(lambda: models.build(published.config, key=jax.random.key(0)))
    quantized = with_quantized_maps(
        shapes,
        find_quantized_maps(
            arrays, published.family.rules(published.config, shapes, arrays.shapes, published.multimodal), shapes
        ),
    )
    narrow = lambda model: eqx.filter_eval_shape(nn.Precision("bfloat16", "bfloat16").apply, model)
    quantized_bytes, decoded_bytes = nbytes(narrow(quantized)), nbytes(narrow(shapes))
    numbers = sum(nbytes(stack.numbers) for stack in nn.modules(shapes, nn.Stack))
    assert quantized_bytes == size + numbers and 13.7e9 < quantized_bytes < 13.8e9
    assert decoded_bytes == 2 * planning.parameter_count(shapes) + numbers and decoded_bytes > 41e9
