"""Texts of the engine under a plan over two devices equal one device's, greedy and sampled with penalties."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import plan_over
from text_cases import CONFIG, TEMPLATE, USER

from eqformer import data, models, text
from eqformer.text import TextRequest


SIZES: dict[str, Any] = dict(slots=2, capacity=64, prefill_chunk=16, stride=4)
PENALTIES: dict[str, Any] = dict(repetition_penalty=1.8, presence_penalty=1.5, frequency_penalty=1.7)
REQUESTS = [
    TextRequest("def main(", max_new_tokens=20),
    TextRequest([USER], max_new_tokens=12, **PENALTIES),
    TextRequest("import numpy as np # a longer prompt", max_new_tokens=28, temperature=0.4, seed=1, **PENALTIES),
    TextRequest("x", max_new_tokens=30, temperature=1.2, top_p=0.9, seed=2, **PENALTIES),
]
PLANS: dict[str, dict[str, Any]] = {"tensor": {}, "fsdp": {"zero": 3, "smallest": 1}, "pipe": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "tiny"
    config = dataclasses.replace(CONFIG, layers=2)
    model = models.build(config, key=jax.random.key(0))
    enlarge = lambda x: 2 * x if x.ndim > 1 else x
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64) | {"chat_template.jinja": TEMPLATE}
    models.save(jax.tree.map(enlarge, model), path, config=config, files=files)
    return path


def generate_texts(llm):
    return sorted(llm.engine(**SIZES).run(REQUESTS), key=lambda result: result.number)


@pytest.fixture(scope="module")
def alone(folder):
    return generate_texts(text.load_llm(folder))


def spoil_second_device(array):
    """The array with zeros in what the second device holds, if the devices hold unlike parts."""
    if array.sharding.is_fully_replicated:
        return array
    shards = [jnp.zeros_like(s.data, device=s.device) if s.device.id == 1 else s.data for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.mark.grid
@pytest.mark.parametrize("axis", PLANS)
def test_texts_under_a_plan_are_one_devices(folder, alone, axis):
    llm = text.load_llm(folder, plan=plan_over({axis: 2}, **PLANS[axis]))
    for result, expected in zip(generate_texts(llm), alone, strict=True):
        assert (result.error, result.text, result.ids) == ("", expected.text, expected.ids)
        np.testing.assert_allclose(result.log_probs, expected.log_probs, atol=5e-5)
    # The control: the texts depend on what the second device holds.
    model: Any = jax.tree.map(spoil_second_device, llm.model)
    spoiled = dataclasses.replace(llm, model=model)
    assert all(result.ids != expected.ids for result, expected in zip(generate_texts(spoiled), alone, strict=True))


@pytest.mark.grid
def test_the_requests_have_unlike_texts(folder, alone):
    """Greedy texts are not of one byte, and the penalties change each text."""
    assert all(len({*result.ids}) > 5 for result in alone)
    none = dict.fromkeys(PENALTIES, 0) | {"repetition_penalty": None}
    free = [dataclasses.replace(request, **none) for request in REQUESTS]
    results = sorted(text.load_llm(folder).engine(**SIZES).run(free), key=lambda result: result.number)
    assert [result.ids == other.ids for result, other in zip(results, alone)] == [True, False, False, False]
