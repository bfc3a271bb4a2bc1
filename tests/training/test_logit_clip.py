"""MuonClip against its formulas in float64 numpy: a step's largest logits, and the weights after the step."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import randomised
from resumed_runs import copy, run_and_restore
from same_bits import assert_same_bits

from eqformer import Batch, kernels, nn, training
from eqformer.training._logit_clip import largest_logits


EMBED, HEADS, HEAD_DIM, ROPE_DIM, VOCAB, ROWS, SEQ = 12, 4, 6, 4, 11, 4, 9


def attention(key, **options):
    return nn.Attention(embed=EMBED, heads=HEADS, kv_heads=2, head_dim=HEAD_DIM, bias=True, key=key, **options)


def latent_attention(key, **options):
    sizes = {"embed": EMBED, "heads": HEADS, "head_dim": HEAD_DIM, "latent": 8, "q_latent": 7}
    return nn.LatentAttention(rotary=nn.Rotary(ROPE_DIM, 100.0), key=key, **sizes, **options)


def model_of(make, layers=1, **options):
    """A model whose logits are of a few units."""

    def block(key):
        norm = nn.RMSNorm("embed", embed=EMBED)
        return nn.Block(nn.Residual(make(key, **options), norm))

    def build():
        keys = jax.random.split(jax.random.key(0))
        table = nn.Embedding(vocab=VOCAB, embed=EMBED, key=keys[0])
        return nn.Transformer(table, (nn.Stack(block, layers, key=keys[1]),), nn.RMSNorm("embed", embed=EMBED))

    return randomised(eqx.filter_eval_shape(build), seed=1, deviation=1.0)


def batch_of(rows=ROWS):
    ids = np.random.default_rng(2).integers(0, VOCAB, (rows, SEQ + 1)).astype(np.int32)
    weights, examples = np.ones((rows, SEQ), np.float32), np.zeros(rows, np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], weights, examples)


def after_step(model, limit, *, rate=1e-3, **options):
    optimizer = training.optimizer("sgd", model, rate=rate)
    step = training.make_step(training.next_token_loss, optimizer, clip_logits=limit, **options)
    return step(training.init_state(copy(model), optimizer), batch_of(), jax.random.key(0))


def normed_inputs(model):
    """The input of the first layer's attention, in float64."""
    (norm,) = nn.modules(model.stacks[0].blocks, nn.RMSNorm)
    x = np.asarray(model.embedding.weight, np.float64)[batch_of().ids]
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm.eps) * np.float64(norm.weight[0])


def largest_by_hand(query, key, scale):
    """The largest logit of each head: `rows seq heads channels` of queries, and of keys for each query head."""
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) * scale
    return np.where(np.tril(np.ones((SEQ, SEQ), bool)), logits, -np.inf).max((0, 2, 3))


def project(part, x):
    """The outputs of the first layer of a map, in float64."""
    y = np.einsum("hdi,bsi->bshd", np.float64(part.weight[0]), x)
    return y if part.bias is None else y + np.float64(part.bias[0])


def first_mixer(model):
    return nn.modules(model, (nn.Attention, nn.LatentAttention))[0]


def check_scaled(part, before, factors):
    """Each head of a map has this factor, in its weights and its biases."""
    for new, old in zip(jax.tree.leaves(part), jax.tree.leaves(before), strict=True):
        by = factors.reshape(-1, *(1 for _ in new.shape[2:]))
        np.testing.assert_allclose(new[0], np.float64(old[0]) * by, rtol=1e-9)


@pytest.mark.grid
def test_heads_that_share_a_key_head_are_clipped_by_their_largest_logit():
    with jax.enable_x64(True):
        model = eqx.filter_jit(nn.Precision("float64", "float64").apply)(model_of(attention))
        mixer, x = first_mixer(model), normed_inputs(model)
        query, key = project(mixer.query, x), np.repeat(project(mixer.key, x), 2, axis=2)
        largest = largest_by_hand(query, key, HEAD_DIM**-0.5)
        of_keys = largest.reshape(2, 2).max(1)
        limit = float(of_keys.mean())  # One key head is above the limit.
        factors = np.minimum(1, limit / of_keys)
        assert (factors < 1).sum() == 1
        state, metrics = after_step(model, limit)
        plain = first_mixer(after_step(model, None)[0].model)
        clipped = first_mixer(state.model)
        assert float(metrics["largest_logit"]) == pytest.approx(largest.max(), rel=1e-9)
        check_scaled(clipped.query, plain.query, np.repeat(factors, 2) ** 0.5)
        check_scaled(clipped.key, plain.key, factors**0.5)
        for name in ("value", "output"):
            assert_same_bits(getattr(clipped, name), getattr(plain, name))
        with pytest.raises(AssertionError):  # The control: each query head by its own largest logit.
            check_scaled(clipped.query, plain.query, np.minimum(1, limit / largest) ** 0.5)


@pytest.mark.grid
def test_rotary_keys_that_heads_share_stay():
    with jax.enable_x64(True):
        model = nn.Precision("float64", "float64").apply(model_of(latent_attention))
        mixer, x = first_mixer(model), normed_inputs(model)
        down = lambda part: np.einsum("li,bsi->bsl", np.float64(part.weight[0]), x)
        positions, source = jnp.arange(SEQ), down(mixer.query_down)
        rotate = lambda y: np.asarray(jax.vmap(lambda row: mixer.rotary(row, positions))(jnp.asarray(y)))
        rope = np.repeat(rotate(down(mixer.key_rope)[:, :, None]), HEADS, axis=2)
        query = np.concatenate([project(mixer.query, source), rotate(project(mixer.query_rope, source))], -1)
        key = np.concatenate([project(mixer.key_up, down(mixer.latent_down)), rope], -1)
        largest = largest_by_hand(query, key, (HEAD_DIM + ROPE_DIM) ** -0.5)
        limit = float(np.median(largest))
        factors = np.minimum(1, limit / largest)
        clipped = first_mixer(after_step(model, limit)[0].model)
        plain = first_mixer(after_step(model, None)[0].model)
        for name, power in {"query": 0.5, "key_up": 0.5, "query_rope": 1.0}.items():
            check_scaled(getattr(clipped, name), getattr(plain, name), factors**power)
        for name in ("key_rope", "latent_down", "value_up", "query_down", "output"):
            assert_same_bits(getattr(clipped, name), getattr(plain, name))


@pytest.mark.grid
@pytest.mark.parametrize("make", [attention, latent_attention])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
def test_after_a_step_without_update_no_logit_is_above_the_limit(make, options):
    model = model_of(make)
    optimizer = training.optimizer("sgd", model, rate=1e-30)
    step = training.make_step(training.next_token_loss, optimizer, clip_logits=2.0, **options)
    state, largest = training.init_state(copy(model), optimizer), []
    for _ in range(2):
        state, metrics = step(state, batch_of(), jax.random.key(0))
        largest.append(float(metrics["largest_logit"]))
    assert largest[0] > 4 and largest[1] == pytest.approx(2.0, rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("remat", ["none", "full"])
def test_microbatches_and_rematerialisation_change_nothing(remat):
    model = nn.with_execution(model_of(attention, layers=3), remat=remat)
    want, metrics = after_step(model_of(attention, layers=3), 3.0)
    got, other = after_step(model, 3.0, microbatches=2)
    assert float(other["largest_logit"]) == pytest.approx(float(metrics["largest_logit"]), rel=1e-6)
    for x, y in zip(jax.tree.leaves(got.model), jax.tree.leaves(want.model), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mask", [kernels.causal(), kernels.Mask(window=3)], ids=str)
@pytest.mark.parametrize("chunk", [4, 100])
def test_chunks_give_the_largest_of_all_visible_logits(mask, chunk):
    draw, seq = np.random.default_rng(0), 11
    query, key = (draw.normal(size=(2, seq, heads, 3)) for heads in (4, 2))
    positions = np.stack([np.r_[0:6, 0:4, -1], np.r_[0:11]])
    segments = np.stack([np.r_[[0] * 6, [1] * 5], np.zeros(11, int)])
    seen = (positions[:, None, :] <= positions[:, :, None]) & (segments[:, None] == segments[:, :, None])
    seen &= positions[:, None, :] >= 0
    if mask.window:
        seen &= positions[:, :, None] - positions[:, None, :] < mask.window
    logits = np.einsum("bqhd,bkhd->bhqk", query, np.repeat(key, 2, axis=2)) * 0.5
    with jax.enable_x64(True):
        tokens = kernels.TokenPositions(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))
        arrays = (jnp.asarray(x) for x in (query, key, key))
        call = kernels.AttentionCall(*arrays, mask=mask, tokens=tokens, scale=0.5)
        got = np.asarray(largest_logits(call, chunk))
    np.testing.assert_allclose(got, np.where(seen[:, None], logits, 0).max((2, 3)), rtol=1e-12)
    assert np.abs(got - logits.max((2, 3))).max() > 0.1  # The control: without the mask.


def test_long_rows_need_no_square_of_logits():
    shape = jax.ShapeDtypeStruct((1, 16_384, 1, 8), jnp.float32)

    def measure(query, key):
        tokens = nn.positions_like((1, 16_384))
        return largest_logits(kernels.AttentionCall(query, key, key, mask=kernels.causal(), tokens=tokens, scale=1.0))

    memory = jax.jit(measure).lower(shape, shape).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 16_384**2 * 4 / 50


@pytest.mark.grid
def test_a_run_resumes_bit_for_bit(tmp_path):
    model, batch = model_of(attention), batch_of()
    optimizer = training.optimizer("muon", model, rate=1e-2)
    options = {"steps": 4, "saved": 2, "clip_logits": 3.0}
    step, state, again = run_and_restore(optimizer, model, batch, tmp_path, **options)
    for _ in range(2):
        again, metrics = step(again, batch, jax.random.key(0))
    assert_same_bits(again, state)
    assert metrics["largest_logit"] > 0


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: model_of(attention, key_norm=nn.RMSNorm("head_dim", head_dim=HEAD_DIM)), "norms of queries and keys"),
        (lambda: model_of(attention, scores=nn.Scores(softcap=30.0)), "a softcap already bounds its logits by 30"),
        (lambda: eqx.tree_at(lambda m: m.stacks, model_of(attention), ()), "the model has no attention"),
    ],
)
def test_models_whose_logits_cannot_be_clipped_are_refused(model, reason):
    optimization = training.Optimization(name="muon", clip_logits=100.0)
    with pytest.raises(ValueError, match=rf"clip_logits: .*{reason}"):
        optimization.optimizer(model(), optimization.phases(2))


def test_other_bad_input_is_refused():
    model = model_of(attention)
    optimizer = training.optimizer("muon", model, rate=1e-3)
    with pytest.raises(ValueError, match=r"make_step\(clip_logits=0\.0\): the limit is positive"):
        training.make_step(training.next_token_loss, optimizer, clip_logits=0.0)
    low_rank = nn.with_lora(model, ("query",), rank=2, alpha=4.0, key=jax.random.key(0))
    optimization = dataclasses.replace(training.Optimization(), clip_logits=100.0)
    with pytest.raises(ValueError, match="are not trained directly"):
        optimization.optimizer(low_rank, optimization.phases(2), trained=nn.lora_factors)
