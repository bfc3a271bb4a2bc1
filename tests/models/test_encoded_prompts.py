"""Text of encoder-decoder models, whose encoder reads the prompt, equals the text of transformers' models."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from family_weights import ids_of, source_of
from haste import same_trees
from safetensors.numpy import load_file, save_file
from test_published import RECORDED, write

from eqformer import generation, models


CHOICE = generation.sampling(temperature=0, repetition_penalty=3.0)
GREEDY: Any = {"max_new_tokens": 12, "transforms": CHOICE, "key": jax.random.key(0)}


def prompts_of() -> list[list[int]]:
    source, is_there = source_of(ids_of(61))
    return [row[: count.sum()].tolist() for row, count in zip(source, is_there)]


NAMES = ("t5 gated", "t5 a head of its own", "t5gemma unlike halves", "t5gemma alike, untied")
NAMES += ("t5gemma2 even window", "t5gemma2 odd window")


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_text_is_that_of_transformers(name, tmp_path):
    write(tmp_path, name)
    model, prompts, want = models.load(tmp_path), prompts_of(), RECORDED[name]["written"]
    found: Any = generation.generate(model, prompts, log_probabilities=True, **GREEDY)
    assert found.ids.tolist() == want and found.new_ids() == [row[1:] for row in want]
    assert found.prompt_lengths.tolist() == [1, 1] and not found.log_probabilities[:, 0].any()
    assert want[0] != want[1] and found.ids[0, 0] == models.read_config(tmp_path).start  # type: ignore[attr-defined]
    # These texts are known already.
    scores = [row.log_probabilities for row in generation.score_tokens(model, prompts, found.new_ids())]
    for row, score in zip(found.log_probabilities, scores):
        np.testing.assert_allclose(score, row[1 : 1 + len(score)], rtol=1e-4, atol=1e-5)
    swapped = [row.log_probabilities for row in generation.score_tokens(model, prompts[::-1], found.new_ids())]
    assert not np.allclose(swapped[0], scores[0], rtol=1e-2)  # the control: the encoder reads other prompts
    assert generation.generate(model, [prompts[1], prompts[0][:-1]], **GREEDY).ids[0].tolist() == want[1]
    assert generation.generate(model, [prompts[1][:-1]], **GREEDY).ids[0].tolist() != want[1]
    assert list(generation.stream(model, prompts[1], **GREEDY)) == want[1][1:]
    with pytest.raises(ValueError, match="the model has an encoder, and no draft supports one; leave the draft out"):
        generation.generate(model, prompts, draft=model, **GREEDY)


def test_what_images_go_through_is_left_unread_and_told(tmp_path):
    """With the vector of the id behind an image; the encoder's arrays are read by transformers' newer names too."""
    arrays = write(tmp_path, "t5gemma2 even window")
    want, others = models.load(tmp_path), ("vision_tower.x.weight", "multi_modal_projector.y")
    newer = {name.replace("model.encoder.", "model.encoder.text_model."): array for name, array in arrays.items()}
    seen = {f"model.encoder.{name}": np.ones(2, np.float32) for name in others}
    seen |= {"model.encoder.text_model.embed_tokens.eoi_embedding": np.ones(2, np.float32)}
    save_file(newer | seen, tmp_path / "model.safetensors", metadata={"format": "pt"})
    parts = ("multi_modal_projector", "text_model", "vision_tower")
    counted = ", ".join(rf"model.encoder.{part}\. \(1\)" for part in parts)
    with pytest.warns(UserWarning, match=rf"are left unread: {counted}\.$"):
        assert same_trees(models.load(tmp_path), want)
    models.save(want, tmp_path / "back", like=tmp_path, whole=True)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == {*newer, *seen}


def test_halves_of_unlike_sizes_are_refused(tmp_path):
    write(tmp_path, "t5gemma2 even window")
    said = json.loads((tmp_path / "config.json").read_text())
    said["encoder"]["text_config"]["sliding_window"] = 7
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"the encoder has {'window': 7} and the decoder {'window': 6}; in this"):
        models.read_config(tmp_path)
    with pytest.raises(ValueError, match=r"T5Gemma2Config\(tied=False\): the embedding table is always the head"):
        dataclasses.replace(models.preset("t5gemma2-byte-900k"), tied=False)  # pyright: ignore[reportCallIssue]
