"""The page's regression network: every layout has the losses of gradient descent in numpy, and of the blog post."""

import numpy as np
import pytest
from page import example


regression = example("systems-regression.md")
STEPS = 20
ROW = [0.233, 0.184, 0.113, 0.099, 0.094, 0.093, 0.091, 0.089, 0.088, 0.087]  # plain JAX on one device, epochs 5 to 50


def in_numpy(steps):
    """The mean loss of the first steps in float64: forwards, backwards and descent written out."""
    mlp = regression.make_stack().blocks.layer
    ups, downs = (np.array(linear.weight, np.float64) for linear in (mlp.up, mlp.down))
    losses = []
    for x, y in zip(*(np.asarray(part, np.float64) for part in regression.make_batches(steps))):
        inputs, hidden = [x], []
        for up, down in zip(ups, downs):
            hidden.append(np.maximum(inputs[-1] @ up.T, 0))
            inputs.append(inputs[-1] + hidden[-1] @ down.T)
        losses.append(np.mean((inputs[-1] - y) ** 2))
        slope = 2 * (inputs[-1] - y) / y.size
        for layer in reversed(range(len(ups))):
            bent = (slope @ downs[layer]) * (hidden[layer] > 0)
            into = slope + bent @ ups[layer]
            downs[layer] -= regression.RATE * slope.T @ hidden[layer]
            ups[layer] -= regression.RATE * bent.T @ inputs[layer]
            slope = into
    return np.mean(losses)


@pytest.mark.grid
@pytest.mark.parametrize("layout", regression.LAYOUTS)
def test_every_layout_descends_as_numpy_does(layout):
    assert regression.train(layout, 1, STEPS) == pytest.approx([in_numpy(STEPS)], rel=1e-6)


@pytest.mark.quick
def test_control_another_rate_is_seen(monkeypatch):
    right = in_numpy(STEPS)
    monkeypatch.setattr(regression, "RATE", 1.01 * regression.RATE)
    assert abs(in_numpy(STEPS) / right - 1) > 1e-5


@pytest.mark.grid
def test_every_layout_has_the_whole_row_of_one_device():
    found = {layout: regression.train(layout, 50) for layout in regression.LAYOUTS}
    for layout, losses in found.items():
        np.testing.assert_allclose(losses[4::5], ROW, atol=1.5e-3, err_msg=layout)
        np.testing.assert_allclose(losses, found["one device"], rtol=1e-8, err_msg=layout)
