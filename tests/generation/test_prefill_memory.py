"""Memory of prefill beside the model, by the compiler's count: a constant number of bytes per token."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import kernels, models, nn
from eqformer.generation._decode import prefill
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
        return prefill(
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
