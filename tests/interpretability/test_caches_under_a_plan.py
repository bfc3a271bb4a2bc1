"""Captured values of prefill and decode under a plan equal one device's, and equal a pass without caches."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside_cases import KEY, make_block
from test_under_a_plan import (
    compare,
    DENSE,
    EXPERTS,
    IDS,
    make_model,
    make_patches,
    make_plan,
    PATHS,
    ROUTED,
    STREAM,
    WEIGHTS,
)

from eqformer import kernels, nn
from eqformer.interpretability import capture, patch
from eqformer.parallel import _context_attention, _global_values


PREFILL_AND_STEPS = (0, 5), (5, 6), (6, 8)
"""For each call, its first token and the token after its last: a prefill, a decode step, and a step of two tokens."""
CORE = "stacks[0].blocks.sublayers[0].layer.core"
SLOTS = {f"{CORE}.{name}" for name in ("weights", "key", "value")}
"""Paths of captured values that have a dim with one entry for each slot of the cache, where a slot holds one key."""


def run_calls(model, paths, plan=None, calls=PREFILL_AND_STEPS, ids=IDS, dtype=None):
    """Return the captured values of each call; all calls share one cache."""
    captured = capture(model, paths, plan=plan)
    run = eqx.filter_jit(lambda captured, *inputs: captured(*inputs))
    positions = nn.positions_like(ids.shape).positions
    cache, results = captured.init_cache(ids.shape[0], ids.shape[1], dtype), []
    for first, last in calls:
        results.append(run(captured, ids[:, first:last], nn.Tokens(positions[:, first:last]), cache))
        cache = results[-1].output[1]
    return results


def check_calls(sizes, options, paths, model, patched=lambda model: model, dtype=None):
    plan = make_plan(sizes, options)
    values = run_calls(patched(plan.shard(model)), paths, plan, dtype=dtype)
    expected = run_calls(patched(model), paths, dtype=dtype)
    for number, (actual, wanted) in enumerate(zip(values, expected, strict=True)):
        assert compare(actual, wanted, paths) == set(), number
    assert compare(values[1], expected[0], paths) != set()
    return expected


def check_without_cache(results, whole, paths, calls=PREFILL_AND_STEPS):
    """Compare the values of the calls with the values of one pass over all tokens; empty slots have no weight."""
    for (first, last), captured in zip(calls, results, strict=True):
        pairs = [(captured.output[0], whole.output[0][:, first:last])]
        for path in {*paths} - SLOTS:
            index = (Ellipsis, slice(first, last)) + (slice(None),) * (1 if path == STREAM else 2)
            pairs.append((captured[path], whole[path][index]))
        if WEIGHTS in paths:
            assert not np.any(captured[WEIGHTS][..., last:])
            pairs.append((captured[WEIGHTS], whole[WEIGHTS][..., first:last, :]))
        for actual, wanted in pairs:
            np.testing.assert_allclose(actual, wanted, atol=1e-5)


@pytest.mark.grid
def test_cached_values_under_a_plan_are_those_of_a_pass_without_a_cache():
    plan, model, paths = make_plan({"context": 2}, {}), make_model(layers=2), [STREAM, WEIGHTS]
    calls = (0, 4), (4, 8)  # of one shape, so that they share a program
    results = run_calls(plan.shard(model), paths, plan, calls)
    uncached = eqx.filter_jit(lambda captured: captured(IDS))(capture(model, paths))
    check_without_cache(results, uncached, paths, calls)
    with pytest.raises(AssertionError):
        check_without_cache(results, uncached, paths, ((0, 4), (3, 7)))  # the values of other tokens differ


@pytest.mark.grid
@pytest.mark.parametrize("name", DENSE)
def test_cached_values_under_each_plan_are_those_of_one_device(name):
    expected = check_calls(*DENSE[name], PATHS, make_model())
    uncached = eqx.filter_jit(lambda captured: captured(IDS))(capture(make_model(), PATHS))
    check_without_cache(expected, uncached, [STREAM, WEIGHTS, f"{CORE}.query"])


@pytest.mark.grid
@pytest.mark.parametrize("name", EXPERTS)
def test_cached_routed_values_are_those_of_one_device(name):
    check_calls(*EXPERTS[name], ROUTED, make_model(is_routed=True))


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2}])
def test_values_of_8_bit_caches_are_those_of_one_device(sizes):
    check_calls(sizes, {}, [STREAM, WEIGHTS, f"{CORE}.value"], make_model(), dtype="int8")


@functools.cache
def make_sinks_model(window):
    def make(key):
        block = make_block(key)
        rotary, scores = nn.Rotary(2, 100.0), nn.Scores(sinks=jax.random.normal(key, (4,)), softcap=2.0)
        mask = kernels.causal() if window is None else kernels.sliding_window(window)
        cells = {"embed": 4, "heads": 4, "kv_heads": 2, "head_dim": 2, "rotary": rotary, "scores": scores}
        return eqx.tree_at(lambda b: b.sublayers[0].layer, block, nn.Attention(**cells, mask=mask, key=key))

    stacks = (nn.Stack(make, 2, key=KEY),)
    return nn.Transformer(nn.Embedding(vocab=7, embed=4, key=KEY), stacks, nn.RMSNorm("embed", embed=4))


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2}])
def test_weights_beside_sinks_are_those_of_one_device(sizes):
    check_calls(sizes, {}, [STREAM, *SLOTS], make_sinks_model(None))


@pytest.mark.grid
def test_values_of_a_rolling_cache_are_those_of_one_device():
    ids, calls = jnp.tile(IDS, (1, 40)), ((0, 200), (200, 300), (300, 301))
    model, plan = make_sinks_model(20), make_plan({"context": 2, "tensor": 2}, {})
    expected = run_calls(model, [STREAM, WEIGHTS], None, calls, ids)
    assert expected[2][WEIGHTS].shape[-1] < 300
    values = run_calls(plan.shard(model), [STREAM], plan, calls, ids)
    assert [compare(*pair, [STREAM]) for pair in zip(values, expected)] == [set()] * 3
    cache, tokens = values[1].output[1], nn.Tokens(jnp.full((8, 1), 300, jnp.int32))
    step = capture(plan.shard(model), [WEIGHTS], plan=plan)(ids[:, 300:301], tokens, cache)
    assert compare(step, expected[2], [WEIGHTS]) == set()
    with pytest.raises(ValueError, match="no split of 'kv_seq' over context gives these sizes"):
        run_calls(plan.shard(model), [WEIGHTS], plan, calls[:1], ids)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["zero 3", "sequence, ring", "pipe", "shared key heads", "gather"])
def test_edits_with_caches_under_a_plan_are_those_of_one_device(name):
    model, change = make_model(), jax.random.normal(KEY, (4, 4))
    patches = make_patches(change) | {STREAM: jax.tree_util.Partial(lambda c, x, layer: x + c[layer], change)}
    patched = check_calls(*DENSE[name], [STREAM, WEIGHTS], model, lambda model: patch(model, patches))
    plain = run_calls(model, [STREAM, WEIGHTS])
    assert all(compare(*pair, [STREAM, WEIGHTS]) == {STREAM, WEIGHTS, "logits"} for pair in zip(patched, plain))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["zero 3", "tensor", "ring"])
def test_gradients_through_cached_calls_are_those_of_one_device(name):
    plan, model = make_plan(*DENSE[name]), make_model()

    def loss(model, plan):
        results = run_calls(model, [STREAM], plan, ((0, 5), (5, 7)))
        return jnp.mean(results[1].output[0] ** 2) + jnp.mean(results[0][STREAM][1] ** 2)

    gradients = eqx.filter_jit(eqx.filter_grad(loss))(plan.shard(model), plan)
    expected = eqx.filter_jit(eqx.filter_grad(loss))(model, None)
    for actual, wanted in zip(jax.tree.leaves(plan.unshard(gradients)), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(actual - wanted)) <= 1e-5 * max(1.0, np.max(np.abs(wanted)))


def zigzag_slots(monkeypatch):
    reorder = _global_values._reorder
    as_tokens = lambda plan, x, dim, dims, *args, **kwargs: reorder(plan, x, dim, "seq " * x.ndim, *args, **kwargs)
    monkeypatch.setattr(_global_values, "_reorder", as_tokens)


def local_softmax(monkeypatch):
    weights = lambda self, call: kernels.attention_probabilities(call)
    monkeypatch.setattr(_context_attention.SplitCacheAttention, "weights", weights)


@pytest.mark.grid
@pytest.mark.parametrize("change", [zigzag_slots, local_softmax])
def test_weights_need_the_order_of_slots_and_the_sums_of_all_devices(change, monkeypatch):
    plan, model = make_plan({"context": 4}, {}), make_model()
    expected = run_calls(model, [STREAM, WEIGHTS])
    change(monkeypatch)
    values = run_calls(plan.shard(model), [STREAM, WEIGHTS], plan)
    assert [compare(*pair, [STREAM, WEIGHTS]) for pair in zip(values, expected)] == [{WEIGHTS}] * 3


@pytest.mark.grid
def test_caches_that_a_plan_does_not_take_are_refused():
    plan, model = make_plan({"fsdp": 2, "context": 2}, {}), make_model()
    captured = capture(plan.shard(model), [STREAM], plan=plan)
    tokens = nn.positions_like(IDS.shape)
    with pytest.raises(ValueError, match=r"make it by init_cache\(batch, capacity\) of the object"):
        captured(IDS, tokens, model.init_cache(8, 8))
    with pytest.raises(ValueError, match="3 rows do not fall into"):
        captured.init_cache(3, 8)
    with pytest.raises(ValueError, match="reach position 7, but kv_seq of the cache is 4"):
        captured(IDS, tokens, captured.init_cache(8, 4))
    with pytest.raises(ValueError, match="with a cache, only the caller knows"):
        captured(IDS, None, captured.init_cache(8, 8))
    with pytest.raises(ValueError, match="the model is a Block, and only a language model"):
        capture(model.stacks[0][0], ["sublayers[0]"]).init_cache(8, 8)
