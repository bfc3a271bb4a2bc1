"""Modules equal transformers' modules with the same weights, which are mapped by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import close, golden_case, random_module, replaced

from eqformer import kernels, nn


POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8, 9]], np.int32)
EMBED, HEADS, HEAD_DIM = 16, 4, 8
KEY = jax.random.key(0)


def loaded(module, weights, mapping):
    """The module with each mapped leaf replaced; every weight of the case must be used, every shape must fit."""
    assert set(mapping) == set(weights)
    for name, where in mapping.items():
        leaf = where(module)
        value = put(weights[name].reshape(leaf.shape))
        module = eqx.tree_at(where, module, value)
    return module


def projections(bias=False):
    mapping = {
        "q_proj.weight": lambda m: m.query.weight,
        "k_proj.weight": lambda m: m.key.weight,
        "v_proj.weight": lambda m: m.value.weight,
        # stored as embed, heads x head_dim: our dims, flattened
        "o_proj.weight": lambda m: m.output.weight,
    }
    biases = {
        "q_proj.bias": lambda m: m.query.bias,
        "k_proj.bias": lambda m: m.key.bias,
        "v_proj.bias": lambda m: m.value.bias,
        "o_proj.bias": lambda m: m.output.bias,
    }
    return mapping | biases if bias else mapping


NORMS = {"q_norm.weight": lambda m: m.query_norm.weight, "k_norm.weight": lambda m: m.key_norm.weight}
SINKS = {"sinks": lambda m: m.scores.sinks}


def attention(kv_heads=2, head_dim=HEAD_DIM, **options):
    rotary = nn.Rotary(head_dim, 10000.0)
    sizes = dict(embed=EMBED, heads=HEADS, kv_heads=kv_heads, head_dim=head_dim)
    return random_module(nn.Attention, **sizes, rotary=rotary, key=KEY, **options)


def per_head():
    return nn.RMSNorm("head_dim", head_dim=HEAD_DIM, eps=1e-6)


CASES = {
    "llama_mha": lambda: (attention(kv_heads=4), projections()),
    "llama_gqa": lambda: (attention(bias=True), projections(bias=True)),
    "llama_mqa": lambda: (attention(kv_heads=1), projections()),
    "mistral_window": lambda: (attention(mask=nn.sliding_window(3)), projections()),
    "qwen3": lambda: (attention(query_norm=per_head(), key_norm=per_head()), projections() | NORMS),
    "olmo2": lambda: (
        attention(
            head_dim=4,
            query_norm=nn.RMSNorm("heads head_dim", heads=4, head_dim=4, eps=1e-5),
            key_norm=nn.RMSNorm("kv_heads head_dim", kv_heads=2, head_dim=4, eps=1e-5),
        ),
        projections() | NORMS,
    ),
    "gemma2_softcap": lambda: (attention(scores=nn.Scores(24**-0.5, softcap=1.5)), projections()),
    "gpt_oss_sinks": lambda: (
        attention(
            scores=nn.Scores(sinks=jnp.zeros(HEADS)),
            bias=True,
            mask=nn.sliding_window(4),
            core=kernels.ReferenceAttention(),
        ),
        projections(bias=True) | SINKS,
    ),
}


def run(module, x):
    return eqx.filter_jit(module)(x, nn.Tokens(jnp.asarray(POSITIONS)))[0]


@pytest.mark.by_default("llama_gqa", "mistral_window", "qwen3", "olmo2", "gemma2_softcap", "gpt_oss_sinks")
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_transformers(name):
    module, mapping = CASES[name]()
    x, y, weights = golden_case(name)
    module = loaded(module, weights, mapping)
    assert close(run(module, x), y)


def with_scores(module, **options):
    return replaced(module, scores=replaced(module.scores, **options))


BREAKS = {
    "no rotary": ("qwen3", lambda m: replaced(m, rotary=None)),
    "interleaved rotary": ("qwen3", lambda m: replaced(m, rotary=nn.Rotary(8, 10000.0, interleaved=True))),
    "no query norm": ("qwen3", lambda m: replaced(m, query_norm=None)),
    "a window of one more": ("mistral_window", lambda m: replaced(m, mask=nn.sliding_window(4))),
    "no softcap": ("gemma2_softcap", lambda m: with_scores(m, softcap=None)),
    "no sinks": ("gpt_oss_sinks", lambda m: with_scores(m, sinks=None)),
    "half the scale": ("llama_mha", lambda m: with_scores(m, scale=HEAD_DIM**-0.5 / 2)),
}


@pytest.mark.by_default("no rotary", "no query norm", "a window of one more", "no sinks")
@pytest.mark.parametrize("name", BREAKS)
def test_the_fixtures_can_tell(name):
    case, spoil = BREAKS[name]
    module, mapping = CASES[case]()
    x, y, weights = golden_case(case)
    assert not close(run(spoil(loaded(module, weights, mapping)), x), y, 1e-3)


def latent_weights(weights, q_latent):
    """DeepSeek's fused projections, split into ours."""
    split = dict(weights)
    query = split.pop("q_b_proj.weight" if q_latent else "q_proj.weight").reshape(HEADS, 6 + 4, -1)
    split["query"], split["query_rope"] = query[:, :6], query[:, 6:]
    down = split.pop("kv_a_proj_with_mqa.weight")
    split["latent_down"], split["key_rope"] = down[:8], down[8:]
    up = split.pop("kv_b_proj.weight").reshape(HEADS, 6 + 5, 8)
    split["key_up"], split["value_up"] = up[:, :6], up[:, 6:]
    return split


@pytest.mark.by_default("mla_q_latent", "mla_yarn")
@pytest.mark.parametrize("name", ["mla", "mla_q_latent", "mla_yarn"])
def test_latent_attention_is_deepseeks(name):
    q_latent = None if name == "mla" else 12
    scaling, scale = None, (6 + 4) ** -0.5
    if name == "mla_yarn":
        quotient = nn.yarn_magnitude(4.0, 1.0) / nn.yarn_magnitude(4.0, 0.8)
        scaling = nn.YarnScaling(4.0, 16, magnitude=quotient)
        scale *= nn.yarn_magnitude(4.0, 0.8) ** 2
    module = random_module(
        nn.LatentAttention,
        embed=EMBED,
        heads=HEADS,
        head_dim=6,
        latent=8,
        q_latent=q_latent,
        v_dim=5,
        latent_norm=nn.RMSNorm("latent", latent=8),
        query_latent_norm=None if q_latent is None else nn.RMSNorm("q_latent", q_latent=q_latent),
        rotary=nn.Rotary(4, 10000.0, interleaved=True, scaling=scaling),
        scores=nn.Scores(scale),
        key=KEY,
    )
    mapping = {
        "query": lambda m: m.query.weight,
        "query_rope": lambda m: m.query_rope.weight,
        "latent_down": lambda m: m.latent_down.weight,
        "key_rope": lambda m: m.key_rope.weight,
        "kv_a_layernorm.weight": lambda m: m.latent_norm.weight,
        "key_up": lambda m: m.key_up.weight,
        "value_up": lambda m: m.value_up.weight,
        "o_proj.weight": lambda m: m.output.weight,
    }
    if q_latent is not None:
        mapping["q_a_proj.weight"] = lambda m: m.query_down.weight
        mapping["q_a_layernorm.weight"] = lambda m: m.query_latent_norm.weight
    x, y, weights = golden_case(name)
    module = loaded(module, latent_weights(weights, q_latent), mapping)
    assert close(run(module, x), y)
    assert not close(run(with_scores(module, scale=2 * scale), x), y, 1e-3)
    assert not close(run(replaced(module, rotary=nn.Rotary(4, 10000.0)), x), y, 1e-3)


WEIGHT, BIAS = {"weight": lambda m: m.weight}, {"bias": lambda m: m.bias}
LAYERS = {
    "llama_norm": lambda: (nn.RMSNorm("embed", embed=EMBED, eps=1e-3), WEIGHT),
    "gemma_norm": lambda: (nn.RMSNorm("embed", embed=EMBED, eps=1e-3, offset=1.0), WEIGHT),
    "cohere_norm": lambda: (nn.LayerNorm("embed", embed=EMBED, eps=1e-5, bias=False), WEIGHT),
    "layer_norm": lambda: (nn.LayerNorm("embed", embed=EMBED, eps=1e-3), WEIGHT | BIAS),
    "llama_mlp": lambda: (
        nn.GatedMLP(embed=EMBED, mlp=24, key=KEY),
        {
            "gate_proj.weight": lambda m: m.gate.weight,
            "up_proj.weight": lambda m: m.up.weight,
            "down_proj.weight": lambda m: m.down.weight,
        },
    ),
    "gpt2_mlp": lambda: (
        nn.MLP(embed=EMBED, mlp=24, bias=True, key=KEY),
        {
            "c_fc.weight": lambda m: m.up.weight,
            "c_fc.bias": lambda m: m.up.bias,
            "c_proj.weight": lambda m: m.down.weight,
            "c_proj.bias": lambda m: m.down.bias,
        },
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_transformers(name):
    module, mapping = LAYERS[name]()
    x, y, weights = golden_case(name)
    if name == "gpt2_mlp":  # Conv1D keeps its weight inputs first
        weights = {key: value.T for key, value in weights.items()}
    assert close(loaded(module, weights, mapping)(x), y)


def test_wrong_layers_are_told_apart():
    x, y, weights = golden_case("gemma_norm")
    assert not close(loaded(nn.RMSNorm("embed", embed=EMBED, eps=1e-3), weights, WEIGHT)(x), y, 1e-3)
    x, y, weights = golden_case("gpt2_mlp")
    module, mapping = LAYERS["gpt2_mlp"]()
    assert not close(loaded(module, weights, mapping)(x), y, 1e-3)  # without the transposition
