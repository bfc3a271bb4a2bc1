"""`with_execution` changes how a model runs, but not its arrays and results, softcaps included."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from nn_reference import close, random_module, replaced

from eqformer import kernels, models, nn


KEY = jax.random.key(0)
CORE, OTHER = kernels.BlockwiseAttention(block=4), kernels.ReferenceAttention()
PRESETS = ["llama-byte-1m", "gemma2-byte-500k", "qwen3-next-byte-500k", "deepseek-v3-byte-500k"]


class Around(eqx.Module):
    """Somebody's own module, with a stack whose blocks hold a stack."""

    parts: dict[str, nn.Stack]


def block(key):
    return nn.SuperBlock((nn.Stack(attending, 2, key=key),))


def attending(key):
    return nn.Block(
        nn.Residual(nn.Attention(embed=8, heads=2, head_dim=4, key=key)), nn.Residual(nn.MLP(embed=8, mlp=8, key=key))
    )


def cores(model):
    return [mixer.core for mixer in nn.modules(model, (nn.Attention, nn.LatentAttention))]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_part_of_every_model_is_set_and_no_array_is_touched(preset):
    shapes = eqx.filter_eval_shape(lambda: models.build(preset, key=KEY))
    changed = nn.with_execution(shapes, core=CORE, remat="full", unroll=2)
    assert all(one is other for one, other in zip(jax.tree.leaves(shapes), jax.tree.leaves(changed), strict=True))
    assert {(stack.remat, stack.unroll) for stack in changed.stacks} == {("full", 2)}
    assert cores(changed) and all(core == kernels.BlockwiseAttention(block=4) for core in cores(changed))
    assert eqx.tree_equal(nn.with_execution(shapes), shapes)
    assert eqx.tree_equal(nn.with_execution(changed, core=kernels.ATTENTION, remat="none", unroll=1), shapes)


def test_what_is_not_named_stays():
    shapes = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=KEY))
    changed = nn.with_execution(nn.with_execution(nn.with_execution(shapes, remat="dots"), unroll=2), core=OTHER)
    assert (changed.stacks[0].remat, changed.stacks[0].unroll, cores(changed)) == ("dots", 2, [OTHER])


def test_stacks_in_stacks_and_in_modules_of_ones_own():
    around = Around({"one": random_module(nn.Stack, block, 3, key=KEY)})
    changed = nn.with_execution(around, core=OTHER, remat="full", unroll=2)
    outer = changed.parts["one"]
    (inner,) = nn.modules(outer.blocks, nn.Stack)
    assert (outer.remat, outer.unroll, inner.remat, inner.unroll) == ("full", 2, "full", 2)
    assert cores(changed) == [OTHER]
    assert around.parts["one"].remat == "none" and cores(around) != [OTHER]
    assert all(one is other for one, other in zip(jax.tree.leaves(around), jax.tree.leaves(changed), strict=True))
    x = jax.random.normal(KEY, (2, 5, 8))
    run = eqx.filter_jit(lambda stack, x: stack(x)[0])
    assert close(run(outer, x), run(around.parts["one"], x), 1e-6)


@pytest.mark.grid
def test_the_softcap_of_a_family_outlives_an_exchange():
    """Against the model with its own core; the control leaves the softcap out, with scores that it bounds."""
    model = models.build("gemma2-byte-500k", key=KEY)
    attention = nn.modules(model, nn.Attention)[0]
    attention = jax.tree.map(lambda leaf: leaf[0], attention)
    attention = eqx.tree_at(lambda m: m.query.weight, attention, 100 * attention.query.weight)
    x = jax.random.normal(KEY, (1, 6, model.embedding.weight.shape[1]))
    run = eqx.filter_jit(lambda module: module(x)[0])
    own = run(attention)
    assert close(run(nn.with_execution(attention, core=OTHER)), own, 1e-5)
    assert not close(run(replaced(attention, scores=nn.Scores(attention.scores.scale))), own, 1e-2)


def test_refusals():
    shapes = eqx.filter_eval_shape(lambda: models.build("gemma2-byte-500k", key=KEY))
    with pytest.raises(
        ValueError, match=r"with_execution\(remat='some'\): the policies are none, full, dots, dots_no_batch"
    ):
        nn.with_execution(shapes, remat="some")
    with pytest.raises(ValueError, match=r"with_execution\(unroll=0\): an iteration of the scan runs at least one"):
        nn.with_execution(shapes, unroll=0)
    with pytest.raises(ValueError, match=r"has softcap, which this core does not compute; pass kernels\.ATTENTION"):
        nn.with_execution(shapes, core=kernels.DotProductAttention())


def test_the_program_changes():
    """So that the other tests compare unlike things."""
    stack, x = random_module(nn.Stack, attending, 4, key=KEY), jnp.ones((1, 4, 8))
    program = lambda stack: str(jax.make_jaxpr(lambda x: stack(x)[0])(x))
    assert program(nn.with_execution(stack, remat="full")).count("remat") > program(stack).count("remat")
    assert "unroll=2" in program(nn.with_execution(stack, unroll=2)) and "unroll=1" in program(stack)


def test_an_execution_applies_with_execution():
    shapes = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=KEY))
    words: dict[Any, kernels.Operation] = {
        "auto": kernels.ATTENTION,
        "xla": kernels.DotProductAttention(),
        "reference": kernels.ReferenceAttention(),
        "blockwise": kernels.BlockwiseAttention(),
        "cudnn": kernels.RequiredKernel("cuda", kernels.CudnnAttention()),
        "splash": kernels.RequiredKernel("tpu", kernels.SplashAttention()),
    }
    for core, operation in words.items():
        changed = nn.Execution(core, "full", 2).apply(shapes)
        assert eqx.tree_equal(changed, nn.with_execution(shapes, core=operation, remat="full", unroll=2))
    assert not eqx.tree_equal(nn.Execution("xla", "full", 2).apply(shapes), nn.Execution("xla", "full").apply(shapes))
    for name, value in (("core", "flash"), ("remat", "all"), ("unroll", 0)):
        wrong = nn.Execution()
        object.__setattr__(wrong, name, value)  # the types of a call are checked here, and not where users call it
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            wrong.apply(shapes)
