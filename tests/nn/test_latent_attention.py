"""Latent attention against the paper's equations in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from nn_reference import attend, close, linear, normal, random_module, randomised, replaced, rms, rotate, sigmoid, wide

from eqformer import kernels, nn


KEY = jax.random.key(0)
PLACES = np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])


def make(q_latent=None, **options):
    options = {
        "rotary": nn.Rotary(2, 100.0, interleaved=True),
        "latent_norm": nn.RMSNorm("latent", latent=3),
        **options,
    }
    if q_latent is not None:
        options["query_latent_norm"] = nn.RMSNorm("q_latent", q_latent=q_latent)
    sizes = dict(embed=6, heads=2, head_dim=4, latent=3, q_latent=q_latent, v_dim=5)
    return random_module(nn.LatentAttention, **{**sizes, **options}, key=KEY)


KINDS = {
    "plain queries": make,
    "latent queries": lambda: make(q_latent=5),
    "biases": lambda: make(q_latent=5, bias=True),
    "no rotary": lambda: make(rotary=None),
    "no norm": lambda: make(latent_norm=None),
    "v_dim as head_dim": lambda: make(v_dim=None),
    "window": lambda: make(mask=nn.sliding_window(2)),
    "gate of heads": lambda: randomised(make().with_gate(by_heads=True, key=KEY)),
    "scale": lambda: make(scores=nn.Scores(1.1)),
    "sinks and gate": lambda: randomised(make(q_latent=5, scores=nn.Scores(sinks=jnp.zeros(2))).with_gate(key=KEY)),
    "temperature": lambda: make(scores=nn.Scores(temperature=nn.LogTemperature(3, 0.7, offset=0))),
}


def literal(module, x, places):
    """Equations 9 to 19 and 37 to 47 of DeepSeek-V2 (2024)."""
    c_q = x if module.query_down is None else linear(x, module.query_down)
    c_q = c_q if module.query_latent_norm is None else rms(c_q, module.query_latent_norm)
    c_kv = linear(x, module.latent_down)
    c_kv = c_kv if module.latent_norm is None else rms(c_kv, module.latent_norm)
    query, key, value = linear(c_q, module.query), linear(c_kv, module.key_up), linear(c_kv, module.value_up)
    if module.rotary is not None:
        turns = np.array([module.rotary.theta**0.0])
        q_r = rotate(linear(c_q, module.query_rope), places, turns, module.rotary.interleaved)
        k_r = rotate(linear(x, module.key_rope)[:, :, None], places, turns, module.rotary.interleaved)
        query = np.concatenate([query, q_r], axis=-1)
        key = np.concatenate([key, np.repeat(k_r, key.shape[2], axis=2)], axis=-1)
    if module.scores.temperature is not None:
        query *= 1 + 0.7 * np.log(1 + places // 3)[..., None, None]
    tokens = nn.Tokens(jnp.asarray(places))
    visible = np.asarray(module.mask(tokens, tokens))
    sinks = None if module.scores.sinks is None else wide(module.scores.sinks)
    attended = attend(query, key, value, visible, module.scores.scale_of(query.shape[-1]), sinks)
    if module.gate is not None:
        factors = sigmoid(linear(x, module.gate))
        attended = attended * (factors if factors.ndim == 4 else factors[..., None])
    return linear(attended, module.output)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_papers(kind):
    module, x = KINDS[kind](), normal(1, 2, 5, 6)
    y, cache = eqx.filter_jit(module)(x, nn.Tokens(jnp.asarray(PLACES)))
    assert cache is None and close(y, literal(module, wide(x), PLACES))
    scale = module.scores.scale_of(4 if module.rotary is None else 6)
    changed = replaced(module, scores=replaced(module.scores, scale=scale * 1.5))
    assert not close(y, literal(changed, wide(x), PLACES), 1e-3)
    assert module.gate is None or not close(y, literal(replaced(module, gate=None), wide(x), PLACES), 1e-3)


def test_default_scale_counts_the_rotated_channels():

    def scale_in(module):
        calls = []
        core = lambda call: calls.append(call) or kernels.ReferenceAttention()(call)
        eqx.filter_eval_shape(replaced(module, core=core), normal(1, 2, 3, 6))
        return calls[0].scale

    assert scale_in(make()) == pytest.approx((4 + 2) ** -0.5)
    assert scale_in(make(rotary=None)) == pytest.approx(4**-0.5)


@pytest.mark.by_default("latent queries")
@pytest.mark.parametrize("kind", ["latent queries", "no rotary", "biases", "sinks and gate", "gate of heads"])
def test_absorbed_decoding_equals_the_expanded_form(kind):
    """The same last token: decoded from the cache, and as one of two, which does not absorb."""
    module, x = KINDS[kind](), np.asarray(normal(1, 2, 5, 6))
    places = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    step = eqx.filter_jit(lambda x, at, cache: module(x, nn.Tokens(at), cache))
    _, cache = step(x[:, :3], places[:, :3], module.init_cache((2,), 8))
    expanded, _ = step(x[:, 3:], places[:, 3:], cache)
    _, cache = step(x[:, 3:4], places[:, 3:4], cache)
    absorbed, _ = step(x[:, 4:], places[:, 4:], cache)
    assert close(absorbed, expanded[:, 1:])
    _, empty = step(x[:, 3:4], places[:, 3:4], module.init_cache((2,), 8))
    assert not close(step(x[:, 4:], places[:, 4:], empty)[0], expanded[:, 1:], 1e-3)


def test_absorbed_decoding_never_rebuilds_keys_or_values():
    module = make(q_latent=5)

    def shapes(seq):
        cache = module.init_cache((3,), 11)
        jaxpr = jax.make_jaxpr(lambda x: module(x, nn.Tokens(jnp.zeros((3, seq), jnp.int32)), cache)[0])(
            jnp.zeros((3, seq, 6))
        )
        return str(jaxpr)

    for channels in (4, 5):  # of a rebuilt key, of a rebuilt value: batch, slots, heads, channels
        assert f"f32[3,11,2,{channels}]" in shapes(2)
        assert f"f32[3,11,2,{channels}]" not in shapes(1)


def test_a_token_is_remembered_as_its_latent_and_one_rotated_key():
    cache = make().init_cache((2,), 7, "bfloat16")
    shapes = {field: getattr(cache, field).shape for field in ("latents", "rotary_keys", "positions")}
    assert shapes == {"latents": (2, 7, 3), "rotary_keys": (2, 7, 2), "positions": (2, 7)}
    assert cache.latents.dtype == jnp.bfloat16
    assert make(rotary=None).init_cache((2,), 7).rotary_keys.shape == (2, 7, 0)


@pytest.mark.parametrize("kind", ["no rotary", pytest.param("plain queries", marks=pytest.mark.grid)])
def test_a_cache_of_8_bits_decodes_like_whole_rows(kind):
    """Without rotary positions too, where the rotary keys have no channels."""
    module, x = KINDS[kind](), normal(1, 2, 5, 6)
    step = eqx.filter_jit(lambda x, at, cache: module(x, nn.Tokens(at), cache))
    positions = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    _, cache = step(x[:, :4], positions[:, :4], module.init_cache((2,), 8).with_scales("int8"))
    y, without_prompt = (
        step(x[:, 4:], positions[:, 4:], read_cache)[0] for read_cache in (cache, module.init_cache((2,), 8))
    )
    expected = eqx.filter_jit(module)(x)[0][:, 4:]
    assert close(y, expected, 0.05) and not close(without_prompt, expected, 0.05)


def test_heads_can_be_sliced():
    module, x = make(q_latent=5), normal(1, 2, 5, 6)
    run, parts = eqx.filter_jit(lambda module, x: module(x)[0]), []
    where = lambda m: (m.query.weight, m.query_rope.weight, m.key_up.weight, m.value_up.weight, m.output.weight)
    *first, output = map(np.asarray, where(module))
    for head in (slice(0, 1), slice(1, 2)):
        own = [put(weight[head]) for weight in first]
        parts.append(run(eqx.tree_at(where, module, (*own, put(output[:, head]))), x))
    whole = run(module, x)
    assert close(parts[0] + parts[1], whole, 1e-6) and not close(parts[0], whole, 1e-3)
