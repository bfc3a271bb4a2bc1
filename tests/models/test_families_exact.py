"""Published families in float64: logits and the gradients of one loss equal those of transformers to rounding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_weights import HASH_NUMBERS, ids_of, sketch
from test_published import FIXTURES, read_for, RECORDED, write

from eqformer import models, nn
from eqformer.models._published_model import format_of
from eqformer.models._save import published_arrays


with np.load(FIXTURES / "families64.npz") as file:
    ALL = dict(file)
NAMES = sorted({name.split("/")[0] for name in ALL})
BUFFERS = ("layer_scalar",)  # which transformers does not train
EVERY_RUN = ("gpt2 plain",)


def loss(model, ids, source):
    logits = model(ids, nn.with_source(nn.positions_like(ids.shape), source))[0]
    chances = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.mean(jnp.take_along_axis(chances, ids[:, 1:, None], axis=-1)), logits


@pytest.mark.parametrize(
    "name", [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.grid) for name in NAMES]
)
def test_logits_and_gradients_in_float64(name, tmp_path, record_property):
    expected, names = ALL[f"{name}/logits"], sorted(RECORDED[name]["shapes"])
    want = dict(zip(names, ALL[f"{name}/gradients"], strict=True))
    write(tmp_path, name)
    config = models.read_config(tmp_path)
    with jax.enable_x64(True):
        model = models.load(tmp_path, dtype="float64")
        ids = jnp.asarray(ids_of(config.vocab), jnp.int32)
        (_, logits), gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(
            model, ids, read_for(model, ids)
        )
        logits = np.asarray(logits)[..., ::8]
        rules = [rule for rule in format_of("test", None, config, model)[0].rules(config, model) if not rule.ids_below]
        found = {key: sketch(key, array) for key, array in published_arrays(rules, gradient)}
    difference = np.max(np.abs(logits - expected)) / np.std(expected)
    record_property("exact", float(difference))
    assert difference <= 1e-10 < np.max(np.abs(logits.astype(np.float32) - expected)) / np.std(expected)
    tables = {key for key in want if key.endswith(("tid2eid", *HASH_NUMBERS))}  # whole numbers have no gradient
    want = {key: one for key, one in want.items() if key not in tables}
    assert found.keys() == want.keys()
    for key in [key for key in want if key.endswith(BUFFERS)]:
        assert want.pop(key)[0] == 0 < found.pop(key)[0]
    assert wrong(found, want) == set()
    # Under another array's signs, or in float32, the same gradient is seen to differ.
    key = max(want, key=lambda key: want[key][0])
    assert wrong(found | {key: found[key][::-1]}, want) == {key}
    assert wrong({key: np.float32(one) for key, one in found.items()}, want)


def wrong(found, want):
    """Names whose gradients are not the same to rounding, which is of the largest."""
    rounding = 1e-12 * max(one[0] for one in want.values())
    return {key for key in want if not np.all(np.abs(found[key] - want[key]) <= 1e-10 * want[key][0] + rounding)}
