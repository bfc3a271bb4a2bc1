"""Values that `capture` brings out of each family under a plan equal those of one device."""

import re

import equinox as eqx
import jax
import numpy as np
import pytest
from plan_models import batch_of
from test_family_layouts import DEEPER, model_of, RECORDED

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


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_values_under_a_plan_are_those_of_one_device(name):
    sizes = {"fsdp": 2, "tensor": 2} if heads_split_evenly(RECORDED[name]["config"]) else {"fsdp": 4}
    plan, model = Plan(make_mesh(**sizes, devices=jax.devices()[:4])), model_of(name, DEEPER.get(name, ()))
    batch, paths = batch_of(model, 4, 24), [path for path in value_paths(model) if PATHS.fullmatch(path)]
    run = eqx.filter_jit(lambda captured, batch: captured(batch.ids, batch_tokens(batch)))
    values, expected = run(capture(plan.shard(model), paths, plan=plan), batch), run(capture(model, paths), batch)
    rows = [positions for positions in (batch.positions, batch.source_positions) if positions is not None]
    is_read = {positions.shape[1]: positions >= 0 for positions in rows}  # of rows and of an encoder's texts
    assert len(paths) >= 3
    for path in paths:
        for value, other in zip(*map(jax.tree.leaves, (values[path], expected[path])), strict=True):
            bound = 1e-4 * max(1.0, float(np.max(np.abs(other))))
            difference = np.abs(np.asarray(value) - np.asarray(other))[..., is_read[other.shape[-2]], :]
            assert np.max(difference) <= bound, path
            assert np.max(np.abs(np.asarray(value)[:, ::-1] - np.asarray(other))) > bound  # the comparison can tell
