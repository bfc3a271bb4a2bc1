"""Memory of prefill and of samples beside the model, by the compiler's count."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import kernels, models, nn
from eqformer.generation import _decode as decoding
from eqformer.generation._generate import make_sampling_state
from eqformer.generation._prompts import pad_prompts


HEADS, SHORT, LONG = 4, 2048, 6144


def held(prompt: int, prefill_chunk: int | None = None, core=None) -> int:
    """Bytes of temporaries of a prompt's prefill in a small model, compiled from shapes alone."""
    config = models.LlamaConfig(vocab=64, embed=32, layers=2, heads=HEADS, kv_heads=2, mlp=64)
    shapes = eqx.filter_eval_shape(lambda: nn.with_execution(models.build(config, key=jax.random.key(0)), core=core))
    arrays, rest = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    given = pad_prompts(shapes, [np.zeros(prompt, int)], None, 8, prefill_chunk)
    samples = make_sampling_state(shapes, 1, (), None, None, jax.random.key(0))

    def run(arrays, ids, lengths, samples):
        model = eqx.combine(arrays, rest)
        return decoding.prefill(
            model, ids, lengths, jnp.asarray(8, jnp.int32), samples, sizes=given.sizes, log_probabilities=False
        )

    analysis = jax.jit(run).lower(arrays, given.ids, given.lengths, samples).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.by_default("as by default")
@pytest.mark.parametrize("prefill_chunk", [None, 2 * LONG], ids=["as by default", "at once"])
def test_memory_grows_with_the_prompt_and_not_with_its_square(prefill_chunk):
    short, long = held(SHORT, prefill_chunk), held(LONG, prefill_chunk)
    assert long < 1.1 * LONG / SHORT * short
    assert long < 4 * LONG**2  # one matrix of scores


@pytest.mark.quick
def test_a_core_that_holds_the_scores_is_found_out():
    """The control: all heads' scores of a prompt that is read at once."""
    at_once = held(SHORT, 2 * SHORT, core=kernels.DotProductAttention())
    assert at_once > 4 * HEADS * SHORT**2


def test_long_prompts_are_read_in_even_chunks():
    model = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=jax.random.key(0)))
    for length, width, chunk in ((3, 64, None), (1024, 1024, None), (1025, 1152, 576), (3000, 3072, 1024)):
        given = pad_prompts(model, [np.zeros(length, int)], None, 8, None)
        assert (given.ids.shape[1], given.sizes.chunk) == (width, chunk)


def test_log_probabilities_of_samples_hold_no_array_of_the_vocabulary(monkeypatch):
    """They have the bits of a whole `log_softmax`, which is the control."""
    batch, vocab, top = 4, 8_000, 5
    logits = 9 * np.random.default_rng(0).normal(size=(batch, 1, vocab)).astype(np.float32)
    new_ids, lengths = np.arange(batch, dtype=np.int32)[:, None], np.full(batch, 2, np.int32)
    alternatives = decoding.Alternatives(
        jnp.ones(batch, bool), jnp.zeros((batch, 8, top), jnp.int32), jnp.zeros((batch, 8, top), jnp.float32)
    )
    ids = jnp.zeros((batch, 8), jnp.int32)
    rows = decoding.new_rows(ids, jnp.asarray(lengths), jnp.asarray(lengths + 3), (), alternatives=alternatives)
    sampling = make_sampling_state(models.shapes("llama-byte-1m"), batch, (), None, None, jax.random.key(0))

    def append():
        run = lambda rows, new_ids, logits, counts: decoding.append_tokens(rows, new_ids, logits, counts, (), sampling)
        compiled = jax.jit(run).lower(rows, new_ids, logits, jnp.ones(batch, jnp.int32)).compile()
        result = compiled(rows, new_ids, logits, jnp.ones(batch, jnp.int32))
        analysis = compiled.memory_analysis()
        assert analysis is not None and result.alternatives is not None and result.log_probabilities is not None
        likely = result.alternatives
        return analysis.temp_size_in_bytes, (result.log_probabilities, likely.ids, likely.log_probabilities)

    temporaries, scores = append()
    whole = lambda chosen, logits: jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.argmax(logits[..., None, :] == chosen[..., None], axis=-1), axis=-1
    )
    monkeypatch.setattr(decoding, "log_probabilities_of", whole)
    temporaries_of_whole, expected = append()
    assert temporaries < logits.nbytes <= temporaries_of_whole
    assert all(np.array_equal(score, wanted) for score, wanted in zip(scores, expected, strict=True))
    wide = logits[:, 0].astype(np.float64)
    normalizers = np.log(np.exp(wide).sum(-1))
    assert np.allclose(scores[0][:, 2], wide[np.arange(batch), np.arange(batch)] - normalizers, rtol=0, atol=1e-5)
