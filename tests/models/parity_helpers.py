"""Weights of tiny models of the library transformers, assigned by hand to the fields of eqformer's models."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqformer import models, nn


FIXTURES = Path(__file__).parent.parent / "fixtures"
SETTINGS = json.loads((FIXTURES / "models.json").read_text())
EMBED, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, MAX_LENGTH = 16, 2, 4, 2, 4, 24, 32, 64


run = eqx.filter_jit(lambda model, ids, tokens=None: model(ids, tokens)[0])


def close(actual, expected, tolerance=2e-5):
    return np.max(np.abs(np.asarray(actual) - expected)) <= tolerance * np.max(np.abs(expected))


def built(config) -> Any:
    """Return the model with NaN in every parameter: a parameter that a mapping forgets makes the logits NaN."""
    shapes = eqx.filter_eval_shape(lambda: models.build(config, key=jax.random.key(0)))

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.size, dtype=leaf.dtype)
        return jnp.full(leaf.shape, jnp.nan, leaf.dtype)

    return jax.tree.map(fill, shapes)


def loaded(model, weights, mapping):
    """Return the model with all weights put in; fail if a weight is left over.

    For each weight's name, `mapping` has a function `where(model)` that returns the weight's parameter, and a function
    that is applied to the weight first. `{}` in a name stands for the layer's number.
    """
    used = set()
    for name, (where, turn) in mapping.items():
        names = [name.format(layer) for layer in range(LAYERS)] if "{}" in name else [name]
        value = np.stack([turn(weights[n]) for n in names]) if "{}" in name else turn(weights[name])
        leaf = where(model)
        model = eqx.tree_at(where, model, jnp.asarray(value).reshape(leaf.shape))
        used.update(names)
    assert used == set(weights)
    return model


same = lambda weight: weight
block = lambda model: model.stacks[0].blocks


def llama_scaling(parameters):
    given, kind = parameters, parameters["rope_type"]
    original = given.get("original_max_position_embeddings", MAX_LENGTH)
    if kind == "default":
        return None
    if kind == "linear":
        return nn.LinearScaling(given["factor"])
    if kind == "dynamic":
        return nn.DynamicScaling(given["factor"], MAX_LENGTH)
    if kind == "llama3":
        return nn.Llama3Scaling(given["factor"], given["low_freq_factor"], given["high_freq_factor"], original)
    if kind == "longrope":
        short, long = tuple(given["short_factor"]), tuple(given["long_factor"])
        return nn.LongRopeScaling(short, long, original, given["factor"], magnitude=given.get("attention_factor"))
    assert kind == "yarn"
    magnitude = given.get("attention_factor")
    if "mscale" in given:
        over, under = (nn.yarn_magnitude(given["factor"], given[name]) for name in ("mscale", "mscale_all_dim"))
        magnitude = over / under
    beta_fast, beta_slow = given.get("beta_fast", 32.0), given.get("beta_slow", 1.0)
    truncate = given.get("truncate", True)
    return nn.YarnScaling(given["factor"], original, beta_fast, beta_slow, magnitude, truncate)


def llama(arrays, name, parameters=None):
    settings = SETTINGS[name]
    parameters = parameters or settings["rope_parameters"]
    biased, tied = settings.get("attention_bias", False), settings.get("tie_word_embeddings", False)
    config = models.LlamaConfig(
        vocab=VOCAB,
        embed=EMBED,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        mlp=MLP,
        theta=parameters["rope_theta"],
        scaling=llama_scaling(parameters),
        bias=biased,
        tied=tied,
    )
    layer = "model.layers.{}."
    mapping = {
        "model.embed_tokens.weight": (lambda m: m.embedding.weight, same),
        layer + "self_attn.q_proj.weight": (lambda m: block(m).mixer.layer.query.weight, same),
        layer + "self_attn.k_proj.weight": (lambda m: block(m).mixer.layer.key.weight, same),
        layer + "self_attn.v_proj.weight": (lambda m: block(m).mixer.layer.value.weight, same),
        layer + "self_attn.o_proj.weight": (lambda m: block(m).mixer.layer.output.weight, same),
        layer + "mlp.gate_proj.weight": (lambda m: block(m).feed_forward.layer.gate.weight, same),
        layer + "mlp.up_proj.weight": (lambda m: block(m).feed_forward.layer.up.weight, same),
        layer + "mlp.down_proj.weight": (lambda m: block(m).feed_forward.layer.down.weight, same),
        layer + "input_layernorm.weight": (lambda m: block(m).mixer.norm.weight, same),
        layer + "post_attention_layernorm.weight": (lambda m: block(m).feed_forward.norm.weight, same),
        "model.norm.weight": (lambda m: m.norm.weight, same),
        "lm_head.weight": (lambda m: m.head.weight, same),
    }
    if biased:
        mapping |= {
            layer + "self_attn.q_proj.bias": (lambda m: block(m).mixer.layer.query.bias, same),
            layer + "self_attn.k_proj.bias": (lambda m: block(m).mixer.layer.key.bias, same),
            layer + "self_attn.v_proj.bias": (lambda m: block(m).mixer.layer.value.bias, same),
            layer + "self_attn.o_proj.bias": (lambda m: block(m).mixer.layer.output.bias, same),
        }
    prefix = "biased/weights/" if biased else "llama/weights/"
    weights = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    if tied:
        del mapping["lm_head.weight"], weights["lm_head.weight"]
    return loaded(built(config), weights, mapping)


def gpt2_qkv(part):
    """Return a function that takes query (0), key (1) or value (2) from a Conv1D weight `inputs, 3 outputs`."""
    return lambda weight: np.split(weight, 3, axis=-1)[part].T


def gpt2(arrays):
    config = models.GPT2Config(vocab=VOCAB, embed=EMBED, layers=LAYERS, heads=HEADS, max_seq=16)
    prefix = "gpt2/weights/"
    weights = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    assert np.array_equal(weights.pop("lm_head.weight"), weights["transformer.wte.weight"])
    for name in [name for name in weights if ".attn.c_attn." in name]:  # one array for query, key and value
        joined = weights.pop(name)
        for part, word in enumerate(("query", "key", "value")):
            weights[name.replace("c_attn", word)] = gpt2_qkv(part)(joined)
    layer = "transformer.h.{}."
    turned = lambda weight: weight.T
    attention, feed_forward = lambda m: block(m).mixer.layer, lambda m: block(m).feed_forward.layer
    mapping = {
        "transformer.wte.weight": (lambda m: m.embedding.weight, same),
        "transformer.wpe.weight": (lambda m: m.positions.weight, same),
        layer + "ln_1.weight": (lambda m: block(m).mixer.norm.weight, same),
        layer + "ln_1.bias": (lambda m: block(m).mixer.norm.bias, same),
        layer + "attn.query.weight": (lambda m: attention(m).query.weight, same),
        layer + "attn.query.bias": (lambda m: attention(m).query.bias, same),
        layer + "attn.key.weight": (lambda m: attention(m).key.weight, same),
        layer + "attn.key.bias": (lambda m: attention(m).key.bias, same),
        layer + "attn.value.weight": (lambda m: attention(m).value.weight, same),
        layer + "attn.value.bias": (lambda m: attention(m).value.bias, same),
        layer + "attn.c_proj.weight": (lambda m: attention(m).output.weight, turned),
        layer + "attn.c_proj.bias": (lambda m: attention(m).output.bias, same),
        layer + "ln_2.weight": (lambda m: block(m).feed_forward.norm.weight, same),
        layer + "ln_2.bias": (lambda m: block(m).feed_forward.norm.bias, same),
        layer + "mlp.c_fc.weight": (lambda m: feed_forward(m).up.weight, turned),
        layer + "mlp.c_fc.bias": (lambda m: feed_forward(m).up.bias, same),
        layer + "mlp.c_proj.weight": (lambda m: feed_forward(m).down.weight, turned),
        layer + "mlp.c_proj.bias": (lambda m: feed_forward(m).down.bias, same),
        "transformer.ln_f.weight": (lambda m: m.norm.weight, same),
        "transformer.ln_f.bias": (lambda m: m.norm.bias, same),
    }
    return loaded(built(config), weights, mapping)
