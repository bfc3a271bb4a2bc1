import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import generation, models, nn


@pytest.mark.grid
def test_a_model_in_16_bits_decodes_rows_side_by_side():
    """Two rows at once, of which XLA has products with float32 sums that a CPU must know how to compute."""
    config = models.LlamaConfig(vocab=48, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)
    build = lambda: nn.Precision("bfloat16", "bfloat16").apply(models.build(config, key=jax.random.key(0)))
    model = eqx.filter_jit(build)()
    prompts = np.arange(8).reshape(2, 4)
    greedy = generation.sampling(temperature=0)
    text = generation.generate(model, prompts, max_new_tokens=3, transforms=greedy, key=jax.random.key(0))
    logits = np.asarray(eqx.filter_jit(model)(jnp.asarray(text.ids[:, :-1]))[0], np.float32)[:, 3:]
    chosen = np.take_along_axis(logits, text.ids[:, 4:, None], axis=-1)[..., 0]
    assert (chosen >= logits.max(-1) - 0.05).all() and logits.std() > 0.5
