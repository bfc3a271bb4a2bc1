"""The work per array does not grow with the number of arrays; calls are counted, not timed."""

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eqformer import _files, read_json
from eqformer.models._adapter_config import read_adapter_config, write_adapter_config
from eqformer.models._folder import Folder, INDEX


class Counted(str):
    """A text that counts how often any such text is looked at."""

    looks = 0

    def __hash__(self):
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other):
        Counted.looks += 1
        return super().__eq__(other)

    def __format__(self, spec):
        Counted.looks += 1
        return super().__format__(spec)


def counted(value: Any) -> Any:
    """The same JSON with every text counted."""
    match value:
        case str():
            return Counted(value)
        case list():
            return [counted(each) for each in value]
        case dict():
            return {Counted(name): counted(each) for name, each in value.items()}
    return value


def looks(work, *arguments):
    """How often `work` looks at a text, and how many functions it calls."""
    before, calls = Counted.looks, 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        work(*arguments)
    finally:
        sys.setprofile(previous)
    return np.array([Counted.looks - before, calls])


def modules(number):
    """Names as those of experts' maps are."""
    return [f"model.layers.{n // 8}.mlp.experts.{n % 8}.up_proj" for n in range(number)]


@pytest.fixture
def reads_counted(monkeypatch):
    """JSON is read with its texts counted."""
    whole = json.loads

    def loads(text, object_pairs_hook=dict):
        return whole(
            text, object_pairs_hook=lambda pairs: object_pairs_hook([(Counted(k), counted(v)) for k, v in pairs])
        )

    monkeypatch.setattr(_files.json, "loads", loads)


def of_index(folder, number):
    """A folder of so many arrays, eight a file, is opened."""
    folder.mkdir()
    file_of = {f"{name}.weight": f"model-{n // 8}.safetensors" for n, name in enumerate(modules(number))}
    for file in set(file_of.values()):
        save_file({name: np.zeros(1, np.float32) for name, its in file_of.items() if its == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    opened = Folder(folder)
    assert opened.names == set(file_of) and all(name in opened.names for name in opened.names)


def of_repeated(folder, number):
    """An object in which every name comes twice is refused."""
    folder.mkdir()
    (folder / INDEX).write_text("{" + ", ".join(f'"{name}": 1' for name in modules(number) * 2) + "}")
    with pytest.raises(ValueError, match=rf"and {number - 5} more twice"):
        read_json(folder / INDEX)


def of_adapter(folder, number, escaped=True):
    """An adapter of as many modules, each of its own rank, is written and read."""
    names = counted(modules(number))
    settings = {name: (1 + place, 2.0) for place, name in enumerate(names)}
    written = write_adapter_config(settings, dict.fromkeys(names, Counted("up_proj")), None)
    assert len(written["target_modules"]) == number
    if not escaped:
        for patterns in ("rank_pattern", "alpha_pattern"):
            written[patterns] = {name.replace("\\", ""): value for name, value in written[patterns].items()}
            assert len(written[patterns]) == number - 1
    config = read_adapter_config(counted(written), "config.json")
    assert all(config.has(name) and config.settings_of(name) == settings[name] for name in names)


def of_peft_adapter(folder, number):
    """The same with names that are not escaped, as people write them: patterns, whose dots fit any character."""
    of_adapter(folder, number, escaped=False)


PATTERNS = [
    "up.proj",
    "q_proj|k_proj",
    r"a\.b",
    "a.b",
    "b",
    ".",
    "..b",
    r"layers\.\d+\.x",
    "layers.1.x",
    "la-b",
    r"c\-d",
]
NAMES = ["up_proj", "mlp.up.proj", "q_proj", "a.b", "z.a.b", "a_b", "b", "z.b", "axb", "layers.1.x", "layers.12.x"]
NAMES += ["layers_1.x", "m.layers.1.x", "la-b", "c-d", "e.c-d", "c", ".b", "a..b", "_a.b"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_pattern_that_fits_counts_as_in_peft(order):
    patterns = PATTERNS[::order]
    given = {"r": 99, "target_modules": NAMES, "rank_pattern": {each: n + 1 for n, each in enumerate(patterns)}}
    config = read_adapter_config(given, "config.json")
    for name in NAMES:
        first = (n + 1 for n, each in enumerate(patterns) if re.match(rf"(.*\.)?({each})$", name))  # get_pattern_key
        assert config.settings_of(name)[0] == next(first, 99), name


@pytest.mark.parametrize("work", [of_index, of_repeated, of_adapter, of_peft_adapter])
def test_the_work_for_a_name_does_not_grow_with_their_number(work, reads_counted, tmp_path):
    few, many = (looks(work, tmp_path / str(number), number) for number in (64, 512))
    assert (many > 0).all() and (many < 1.5 * 8 * few).all(), (few, many)


def test_the_count_sees_a_name_that_is_sought_in_a_list(tmp_path):
    """A negative control."""
    of_list = lambda number: looks(
        lambda: [names.count(name) for names in [counted(modules(number))] for name in names]
    )
    assert of_list(512)[0] > 1.5 * 8 * of_list(64)[0]
    of_patterns = lambda number: looks(
        lambda: [re.match(one, two) for one in modules(number) for two in modules(number)]
    )
    assert of_patterns(512)[1] > 1.5 * 8 * of_patterns(64)[1]
