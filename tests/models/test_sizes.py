"""Sizes far beyond a folder's arrays are refused before a model of such sizes is traced."""

import json
import time
import tracemalloc

import pytest
from test_published import RECORDED, write

from eqformer import models
from eqformer.models import _load


CASES = ("llama biased", "deepseek_v3 kimi k2", "nemotron_h dense", "t5gemma alike, untied")


def folder_with(folder, name, **changes):
    """Write a case's folder, with other values in its configuration, or in that of its decoder."""
    write(folder, name)
    config = RECORDED[name]["config"]
    own = config | {"decoder": config["decoder"] | changes} if "decoder" in config else config | changes
    (folder / "config.json").write_text(json.dumps(own))
    return folder


@pytest.mark.parametrize(
    "name", [next(case for case in RECORDED if case.startswith(name.split()[0])) for name in CASES]
)
def test_absurd_sizes_are_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.setattr(_load, "model_shapes", None)  # so that tracing a model is an error of another type
    sizes = {"hidden_size": (10**12, 2**30), "num_hidden_layers": (10**9, 4000), "vocab_size": (10**12, 2**30)}
    for attribute, values in sizes.items():
        for value in values:
            folder = folder_with(tmp_path, name, **{attribute: value})
            before = time.process_time()
            tracemalloc.start()
            with pytest.raises(ValueError, match=rf"{attribute}=|layers={value}|layer_types="):
                models.load(folder)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert time.process_time() - before < 2 and peak < 2**26


def test_a_size_is_compared_with_the_folders_arrays(tmp_path):
    folder = folder_with(tmp_path, "llama plain", intermediate_size=2**30)
    with pytest.raises(ValueError, match=r"^load\(.*: the configuration has intermediate_size=1073741824, but "):
        models.load(folder)
    with pytest.raises(ValueError, match=r"intermediate_size=1073741824, but the folder does not hold such a"):
        models.load_shapes(folder)
    # The negative control: a length is no size of an array, and a plausible size is left to the arrays' own check.
    assert models.load_shapes(folder_with(tmp_path, "llama plain", max_position_embeddings=2**31 - 1)).head is not None
    with pytest.raises(ValueError, match=r"shape"):
        models.load(folder_with(tmp_path, "llama plain", intermediate_size=2**20))
