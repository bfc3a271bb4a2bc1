"""Published families over devices: loss and gradients of each tiny configuration equal one device's, leaf by leaf."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import ids_of
from test_published import TOLD, write

from eqformer import Batch, models
from eqformer.parallel import make_mesh, Plan
from eqformer.training import next_token_loss, planned_gradients
from eqformer.training._step import accumulated_gradients


sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from plan_parity import compiled, differences, place


ROUNDING = 2e-5  # as of the logits: fourteen layers of random weights magnify it
pytestmark = pytest.mark.grid


def batch_of(vocab: int) -> Batch:
    ids = np.tile(ids_of(vocab), (2, 1)).astype(np.int32)
    places = np.broadcast_to(np.arange(ids.shape[1] - 1, dtype=np.int32), (4, ids.shape[1] - 1))
    cut = lambda x: jnp.asarray(x[:, :22])
    weights, segments = jnp.ones((4, 22), jnp.float32), jnp.zeros((4, 22), jnp.int32)
    return Batch(cut(ids[:, :-1]), cut(ids[:, 1:]), weights, cut(places), segments, jnp.arange(4, dtype=jnp.int32))


@pytest.mark.parametrize("name", TOLD)
def test_over_data_and_heads(name, tmp_path):
    write(tmp_path, name)
    model = models.load(tmp_path)
    batch = batch_of(TOLD[name]["config"]["vocab_size"])
    config = TOLD[name]["config"]
    heads = config.get("num_key_value_heads", config.get("n_head"))
    sizes = (
        {"fsdp": 2, "tensor": 2} if heads == 1 or heads % 2 == 0 else {"fsdp": 4}
    )  # three heads do not split over two
    plan = Plan(make_mesh(**sizes, devices=jax.devices()[:4]), zero=1)
    want = compiled(accumulated_gradients(next_token_loss), model, batch)
    got = compiled(planned_gradients(plan)(next_token_loss, 1), place(model, plan), batch)
    assert differences(got, want, ROUNDING) == {}
    assert differences(got._replace(total=got.total * (1 + 1e-4)), want, ROUNDING)  # the comparison can tell
