"""Models with unrolled layers give the same numbers as models with a loop over layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import make_model, quickly

from eqformer import generation, models, nn


IDS = jnp.arange(6, dtype=jnp.int32)[None]


def step(model):
    """Logits of five tokens read together and of a sixth after them."""
    positions = nn.positions_like((1, 6)).positions
    first, cache = model(IDS[:, :5], nn.Tokens(positions[:, :5]), model.init_cache(1, 8))
    second, _ = model(IDS[:, 5:], nn.Tokens(positions[:, 5:]), cache)
    return jnp.concatenate([first, second], axis=1)


@pytest.mark.grid
def test_layers_apart_give_the_logits_of_the_stack():
    model = make_model("sliding window")
    apart = generation.unstack_layers(model)
    assert [len(stack) for stack in apart.stacks] == [1, 1]
    found, wanted = quickly(step, apart), quickly(step, model)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert sum(x.size for x in jax.tree.leaves(apart)) == sum(x.size for x in jax.tree.leaves(model))
    swapped = nn.Transformer(apart.embedding, apart.stacks[::-1], apart.norm, apart.head)
    assert np.abs(np.asarray(quickly(step, swapped)) - np.asarray(wanted)).max() > 1e-2


def test_a_platform_that_copies_what_a_loop_reads_has_layers_apart():
    shape: dict[str, Any] = {"vocab": 16, "embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 16}
    dense, mixture = models.LlamaConfig(**shape), models.MixtralConfig(**shape, experts=2, top_k=1)

    def lengths(config, *where, **options):
        model = eqx.filter_eval_shape(models.build, config, key=jax.random.key(0))
        shapes = eqx.filter_eval_shape(generation.unstack_for_platform, model, *where, **options)
        return [len(stack) for stack in shapes.stacks]

    wide = models.LlamaConfig(vocab=16, embed=4096, layers=2, heads=32, kv_heads=1, mlp=2**20)

    assert [lengths(dense, platform) for platform in ("gpu", "cpu", "tpu")] == [[1, 1], [2], [2]]
    assert [lengths(dense, "tpu", chip) for chip in ("TPU7x", "tpu7x", "TPU v6 lite")] == [[1, 1], [1, 1], [2]]
    assert [lengths(mixture, platform) for platform in ("gpu", "cpu", "tpu")] == [[1, 1], [1, 1], [1, 1]]
    # Queries' maps have 64 MiB in float32; TPUs read feed-forward maps, of two dims, where they are.
    assert [lengths(wide, *where) for where in (("tpu", "TPU v5"), ("cpu",))] == [[1, 1], [2]]
    assert lengths(wide, "tpu", "TPU v5", 2) == [2]
    # A CPU's cache holds all layers' weights, or lacks a byte for it, or its size is unknown.
    stacks = eqx.filter_eval_shape(models.build, dense, key=jax.random.key(0)).stacks
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves([stack.blocks for stack in stacks]))
    found = [lengths(dense, "cpu", processor_cache=cache) for cache in (weights, weights - 1, None)]
    assert found == [[2], [1, 1], [2]]
    # The caches of two rows of 8 tokens, with keys and values of one head of 8 channels in each layer, count too.
    caches = 2 * 8 * 2 * (2 * 8 * 4 + 4)  # with the position in each slot
    for spare, expected in ((caches, [2]), (caches - 1, [1, 1])):
        assert lengths(dense, "cpu", processor_cache=weights + spare, rows=2, capacity=8) == expected


def test_kept_codes_of_small_layers_stay_stacked():
    config = models.LlamaConfig(vocab=16, embed=64, layers=12, heads=2, kv_heads=1, mlp=128)
    plain = eqx.filter_eval_shape(models.build, config, key=jax.random.key(0))
    kept = eqx.filter_eval_shape(lambda: nn.quantize(models.build(config, key=jax.random.key(0)), "int8", group=32))
    blocks = eqx.filter(kept.stacks[0].blocks, nn.has_shape)
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(blocks)) // 12

    def count_stacks(model, cache):
        shapes = eqx.filter_eval_shape(generation.unstack_for_platform, model, "cpu", processor_cache=cache)
        return len(shapes.stacks)

    # The twelve layers never fit into the cache; one layer takes an eighth of the cache, or more.
    assert count_stacks(kept, 8 * layer) == 1
    assert count_stacks(kept, 7 * layer) == count_stacks(plain, 8 * layer) == 12
