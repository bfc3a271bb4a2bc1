"""Captured values of each family under a plan equal one device's, with and without caches."""

import re

import equinox as eqx
import jax
import numpy as np
import pytest
from plan_models import batch_of
from test_family_layouts import DEEPER, model_of, RECORDED

from eqformer import nn
from eqformer.interpretability import capture, value_paths
from eqformer.parallel import make_mesh, Plan
from eqformer.training import batch_tokens


pytestmark = pytest.mark.grid
FAMILIES = list({name.split()[0]: name for name in reversed(RECORDED)}.values())
# Residual streams, each sublayer's output before and after it is added, the embedding and the last norm.
PATHS = re.compile(r"stacks\[\d+\]\.blocks(\[\d+\])?(\.sublayers\[\d+\](\.layer)?)?|norm|embedding")


def heads_split_evenly(config: dict) -> bool:
    """Return whether two devices can share a family's heads."""
    config = config | config.get("decoder", {})
    names = "num_key_value_heads", "num_attention_heads", "n_head", "n_heads", "n_groups", "num_heads"
    heads = next(config[name] for name in names if name in config)
    return heads == 1 or heads % 2 == 0


def layout_of(name: str) -> tuple[Plan, nn.Transformer]:
    """Return a plan of four devices for a family, and a small model of it."""
    sizes = {"fsdp": 2, "tensor": 2} if heads_split_evenly(RECORDED[name]["config"]) else {"fsdp": 4}
    return Plan(make_mesh(**sizes, devices=jax.devices()[:4])), model_of(name, DEEPER.get(name, ()))


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_values_under_a_plan_are_those_of_one_device(name):
    plan, model = layout_of(name)
    batch, paths = batch_of(model, 4, 24), [path for path in value_paths(model) if PATHS.fullmatch(path)]
    run = eqx.filter_jit(lambda captured, batch: captured(batch.ids, batch_tokens(batch)))
    values, expected = run(capture(plan.shard(model), paths, plan=plan), batch), run(capture(model, paths), batch)
    rows = [positions for positions in (batch.positions, batch.source_positions) if positions is not None]
    is_read = {positions.shape[1]: positions >= 0 for positions in rows}  # of rows and of an encoder's texts
    assert len(paths) >= 3
    for path in paths:
        for value, other in zip(*map(jax.tree.leaves, (values[path], expected[path])), strict=True):
            bound = 1e-4 * max(1.0, float(np.max(np.abs(other))))
            difference = np.abs(np.asarray(value) - np.asarray(other))
            if model.streams > 1 and other.shape[-3] == model.streams:
                difference = np.moveaxis(difference, -3, 0)
            assert np.max(difference[..., is_read[other.shape[-2]], :]) <= bound, path
            assert np.max(np.abs(np.asarray(value)[:, ::-1] - np.asarray(other))) > bound  # the comparison can tell


def run_calls(model, paths, calls, ids, source, plan=None):
    """Return what a prefill and decode steps with one cache capture."""
    captured = capture(model, paths, plan=plan)
    run = eqx.filter_jit(lambda captured, *inputs: captured(*inputs))
    positions = nn.positions_like(ids.shape).positions
    cache, results = captured.init_cache(ids.shape[0], ids.shape[1]), []
    for first, last in calls:
        tokens = nn.Tokens(positions[:, first:last], source=source if first == 0 else None)
        results.append(run(captured, ids[:, first:last], tokens, cache))
        cache = results[-1].output[1]
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_values_with_caches_under_a_plan_are_those_of_one_device_and_of_a_whole_pass(name):
    plan, model = layout_of(name)
    if any(not attention.mask.is_causal for attention in nn.modules(model.stacks, nn.Attention)):
        with pytest.raises(ValueError, match="keys and values change with each new token"):
            capture(plan.shard(model), [], plan=plan).init_cache(4, 24)
        return
    ids, calls = jax.random.randint(jax.random.key(0), (4, 24), 0, model.vocab), ((0, 22), (22, 23), (23, 24))
    paths = [path for path in value_paths(model) if PATHS.fullmatch(path)]
    source = None
    if model.parts.encoder is not None:
        source = nn.Source(jax.random.randint(jax.random.key(1), (4, 9), 0, model.vocab), nn.positions_like((4, 9)))
    values, expected = (
        run_calls(m, paths, calls, ids, source, p) for m, p in ((plan.shard(model), plan), (model, None))
    )
    tokens = nn.Tokens(nn.positions_like(ids.shape).positions, source=source)
    uncached = eqx.filter_jit(lambda captured: captured(ids, tokens))(capture(model, paths))
    for number, (first, last) in enumerate(calls):
        for path in paths:
            trees = jax.device_get((values[number][path], expected[number][path], uncached[path]))
            for value, other, of_row in zip(*map(jax.tree.leaves, trees), strict=True):
                bound = 1e-4 * max(1.0, float(np.max(np.abs(of_row))))
                assert np.max(np.abs(value - other)) <= bound, (path, number)
                if of_row.shape[-2] == 24:  # An embedding that an encoder shares reads its source last.
                    assert np.max(np.abs(value - of_row[..., first:last, :])) <= bound, (path, number)
                assert np.max(np.abs(value[..., ::-1, :, :] - other)) > bound  # other rows differ
