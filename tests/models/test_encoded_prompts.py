"""Text of models whose encoder reads the prompt, against what transformers' models write."""

from typing import Any

import jax
import pytest
from family_weights import ids_of, source_of
from test_published import RECORDED, write

from eqformer import generation, models


CHOICE = generation.sampling(temperature=0, repetition_penalty=3.0)
GREEDY: Any = {"max_new_tokens": 12, "transforms": CHOICE, "key": jax.random.key(0)}


def prompts_of() -> list[list[int]]:
    source, is_there = source_of(ids_of(61))
    return [row[: count.sum()].tolist() for row, count in zip(source, is_there)]


@pytest.mark.parametrize("name", ["t5 gated", pytest.param("t5 a head of its own", marks=pytest.mark.grid)])
def test_the_likeliest_text_is_that_of_transformers(name, tmp_path):
    write(tmp_path, name)
    model, prompts, want = models.load(tmp_path), prompts_of(), RECORDED[name]["written"]
    found: Any = generation.generate(model, prompts, log_probabilities=True, **GREEDY)
    assert found.ids.tolist() == want and found.new_ids() == [row[1:] for row in want]
    assert found.prompt_lengths.tolist() == [1, 1] and not found.log_probabilities[:, 0].any()
    assert want[0] != want[1] and found.ids[0, 0] == models.read_config(tmp_path).start  # type: ignore[attr-defined]
    assert generation.generate(model, [prompts[1], prompts[0][:-1]], **GREEDY).ids[0].tolist() == want[1]
    assert generation.generate(model, [prompts[1][:-1]], **GREEDY).ids[0].tolist() != want[1]
    assert list(generation.stream(model, prompts[1], **GREEDY)) == want[1][1:]
    with pytest.raises(ValueError, match="the model has an encoder, and no draft is made for one; leave the draft out"):
        generation.generate(model, prompts, draft=model, **GREEDY)
