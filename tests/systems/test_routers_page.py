"""The four routers of the page learn their task and keep their experts busy."""

import jax
import numpy as np
import pytest
from page import example


routers = example("systems-routers.md")


@pytest.mark.grid
@pytest.mark.parametrize("name", ["Shazeer", "GShard", "Switch", "Mixtral"])
def test_every_router_learns_the_task_and_keeps_its_experts_busy(name):
    model, metrics = routers.train(*routers.routers(jax.random.key(0))[name])
    _, targets = routers.text()
    share = np.bincount(targets.ravel(), minlength=256) / targets.size
    guess = -np.sum(share[share > 0] * np.log(share[share > 0]))  # nats of who knows how often each byte comes
    assert metrics["loss"][0] > guess > 3 > 1.2 > metrics["loss"][-1]
    assert metrics["expert_load"][-1].min() > 0.02 and metrics["expert_load"][-1].max() < 0.4
    chosen = routers.first_experts(model)
    assert set(np.unique(chosen)) <= set(range(routers.EXPERTS)) and len(np.unique(chosen)) >= 6
