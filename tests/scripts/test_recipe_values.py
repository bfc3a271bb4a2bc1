"""Every value of a recipe's fields survives saving, and impossible values are refused before anything is written."""

import contextlib
import dataclasses
import functools
import json
import math
import random
import sys
import types
import typing
from pathlib import Path
from typing import Any

import jax
import pretrain
import pytest
from script_helpers import LLAMA, TINY, write_corpus

from eqformer import dataclass_to_json, models, training
from eqformer.recipes import check, Recipe
from eqformer.recipes._named_recipes import from_json, read_recipe
from eqformer.recipes._setup import check_fields
from eqformer.training import RunFolder


WORDS = ["", "def ", "\u00e9\u4e2d\U0001f600", "a\nb\t\"'\\", "None", "nan", "\x00\x7f"]
FLOATS = [0.0, -0.0, 1.0, 1e-300, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3, 2.0**70]
INTS = [0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63)]
PATHS = [Path("."), Path("/a b/\u00e9"), Path("runs/x"), Path("/tmp/\udcff")]  # the last as a name that is not UTF-8


def value_of(kind: Any, draw, old=None) -> Any:
    """A value of a type of a recipe's field, drawn at random."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return draw.choice(typing.get_args(kind))
    if origin in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        words = [each for each in kinds if typing.get_origin(each) is typing.Literal]
        if words and any(map(dataclasses.is_dataclass, kinds)):  # a schedule by its name
            return value_of(words[0], draw)
        if any(dataclasses.is_dataclass(each) for each in kinds):
            return old if dataclasses.is_dataclass(old) or old is None else value_of(draw.choice(kinds), draw)
        return value_of(draw.choice(kinds), draw)
    if origin is tuple:
        inner, *rest = typing.get_args(kind)
        if rest == [...]:
            return tuple(value_of(inner, draw) for _ in range(draw.randrange(4)))
        return tuple(value_of(each, draw) for each in (inner, *rest))
    if dataclasses.is_dataclass(kind):
        return changed(old, draw)
    known = {int: INTS, float: FLOATS, str: WORDS, bool: [True, False], Path: PATHS, type(None): [None]}
    return draw.choice(known[kind])


_type_hints = functools.cache(typing.get_type_hints)


def changed(value, draw):
    """A dataclass with each field drawn anew, as far as it takes what is drawn."""
    hints = _type_hints(type(value))
    for field in dataclasses.fields(value):
        try:
            new = value_of(hints[field.name], draw, getattr(value, field.name))
            value = dataclasses.replace(value, **{field.name: new})
        except ValueError:
            continue  # refused where it is made: it is in no recipe
    return value


FIRST = {next(iter(family.presets)) for family in models.FAMILIES.values()}


@pytest.mark.parametrize(
    "preset",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.grid) for name in sorted(models.presets())],
)
def test_every_recipe_is_the_same_after_a_save(preset, tmp_path):
    draw, seen = random.Random(preset), set()
    for number in range(4):
        numbers = changed(models.preset(preset), draw)
        recipe = dataclasses.replace(changed(Recipe(model=models.preset(preset)), draw), model=numbers)
        RunFolder(tmp_path).write_recipe(f"\u00e9{number}", recipe)
        assert read_recipe(tmp_path / "recipe.json") == (f"\u00e9{number}", recipe)
        text = json.dumps(
            training.run_metadata(recipe=dataclass_to_json(recipe), step=1, data={}, key=_KEY), allow_nan=False
        )
        assert from_json(json.loads(text)["recipe"]) == recipe
        seen.add(repr(recipe))
    assert len(seen) == 4


_KEY = jax.random.key(0)


@pytest.mark.quick
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2**63, "a\udcff"])
def test_what_no_file_can_hold_is_refused_in_every_field(value):
    """In every field of a type that could hold it, under its flag."""
    base, found = Recipe(model=models.preset("llama-byte-1m")), 0

    def fields(part, flag):
        hints = typing.get_type_hints(type(part))
        for field in dataclasses.fields(part):
            old, name = getattr(part, field.name), f"{flag}{field.name.replace('_', '-')}"
            if dataclasses.is_dataclass(old):
                below = "" if field.name == "plan" else f"{name}."
                yield from ((n, dataclasses.replace(part, **{field.name: new})) for n, new in fields(old, below))
                continue
            kind = hints[field.name]
            kinds = {kind, *typing.get_args(kind)}
            if type(value) in kinds and Path not in kinds and typing.get_origin(kind) is not typing.Literal:
                try:
                    yield name, dataclasses.replace(part, **{field.name: value})
                except (ValueError, TypeError):
                    continue  # refused where it is made

    for name, recipe in fields(base, ""):
        with pytest.raises(ValueError, match=f"^--{name} ") as refused:
            check(recipe)
        assert str(refused.value).isprintable()
        found += 1
    assert found >= 2


UNHELD = {"9" * 30, "nan", "inf"}
NEVER = {
    "--steps": ["0", "-1", "9" * 30],
    "--seed": ["-1", "9" * 30],
    "--seq": ["0"],
    "--batch": ["0", "-4"],
    "--microbatches": ["0", "3"],
    "--chunks": ["0"],
    "--expert-factor": ["0", "nan"],
    "--log-every": ["0"],
    "--checkpoint-every": ["0"],
    "--keep": ["0"],
    "--validate-every": ["0"],
    "--validation-batches": ["0"],
    "--sample-every": ["-1"],
    "--prompt": ["\udcff"],
    "--text.validation": ["0", "1", "-0.1", "nan"],
    "--text.field": ["\udcff"],
    "--optimizer.learning-rate": ["0", "-1", "nan", "inf"],
    "--optimizer.warmup": ["-1", "6", "7"],
    "--optimizer.weight-decay": ["-1", "nan", "inf"],
    "--optimizer.clip": ["0", "-1", "nan", "inf"],
    "--optimizer.z-loss": ["-1", "inf"],
    "--optimizer.balance-rate": ["-1", "inf"],
    "--lora.rank": ["-1"],
    "--lora.alpha": ["nan", "inf"],
    "--execution.unroll": ["0"],
    "--spikes.factor": ["1", "nan"],
    "--spikes.window": ["0"],
    "--spikes.max-rollbacks": ["0"],
    "--model.rope-theta": ["nan"],
}


@pytest.mark.parametrize("held", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_every_refusal_of_a_recipe_leaves_the_folder_untouched(held, tmp_path, capsys, monkeypatch):
    """Of numbers that files hold; the same check refuses others, by the test above in every field."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = ["--run-dir", tmp_path / "run", "--data", write_corpus(tmp_path / "corpus"), *TINY, *LLAMA, "--simulate", 1]
    cases = [(flag, value) for flag, values in NEVER.items() for value in values if (value not in UNHELD) == held]
    words = [("--metrics.tensorboard",), ("--metrics.wandb", "project"), ("--lora.rank", "2", "--lora.maps", "x")]
    for more in [*cases, *(words if held else [])]:
        with pytest.raises(SystemExit) as end:
            pretrain.main([str(each) for each in [*run, *more]])
        errors = capsys.readouterr().err
        assert end.value.code == 2 and "Traceback" not in errors, more
        assert not (tmp_path / "run").exists(), (more, errors)


def test_every_preset_is_a_recipe_whose_values_are_taken_and_kept(tmp_path):
    """Bounds of Mamba-2's steps that bound nothing, too, in a file that any reader of JSON takes."""

    def no_number(word: str):
        raise AssertionError(f"{word} is no JSON")

    infinite = set()
    for name in models.presets():
        recipe = Recipe(model=models.preset(name))
        check_fields(recipe)
        RunFolder(tmp_path).write_recipe(name, recipe)
        assert read_recipe(tmp_path / "recipe.json") == (name, recipe)
        text = (tmp_path / "recipe.json").read_text()
        json.loads(text, parse_constant=no_number)
        infinite |= {name} if "Infinity" in text else set()
    assert {"mamba2-130m", "bamba-9b", "falcon-h1-0.5b"} <= infinite
    for steps, words in (((0.0, math.nan), "finite"), ((0.0, 0.1), None)):
        recipe = Recipe(model=dataclasses.replace(models.preset("mamba2-130m"), step_limits=steps))
        with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
            check_fields(recipe)
    with pytest.raises(ValueError, match="--model.theta inf: give a finite number"):
        check_fields(Recipe(model=dataclasses.replace(models.preset("llama-byte-1m"), theta=math.inf)))


WRONG = [5, "x", None, [], {}, {"kind": 3}, {"kind": []}, {"__float__": "x"}, {"kind": "Recipe"}]
FIELDS = {"batch": "x", "model": 5, "optimizer": "x", "seq": None, "steps": 1.5, "published": 5, "mesh": [1]}


def test_a_recipe_of_other_kinds_is_refused_by_name(tmp_path):
    recipe = Recipe(model=models.preset("llama-byte-1m"))
    written = dataclass_to_json(recipe)
    contents = [{"name": "a", "recipe": wrong} for wrong in WRONG] + [{"name": 5, "recipe": written}]
    contents += [{"name": "a", "recipe": written | {name: value}} for name, value in FIELDS.items()]
    path = tmp_path / "recipe.json"
    for content in contents:
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="recipe.json: "):
            read_recipe(path)
    path.write_text(json.dumps({"name": "a", "recipe": written}))  # a control
    assert read_recipe(path) == ("a", recipe)


def test_a_recipe_with_former_names_of_classes_is_read():
    """Run folders keep the names that classes had when the run began; a name that never was is unknown."""
    recipe = Recipe(model=models.preset("llama-byte-1m"))
    written = json.dumps(dataclass_to_json(recipe))
    assert from_json(json.loads(written.replace('"ParallelConfig"', '"Choices"'))) == recipe
    with pytest.raises(ValueError, match="kind 'Choicess' is unknown"):
        from_json(json.loads(written.replace('"ParallelConfig"', '"Choicess"')))


def test_a_recipe_with_former_names_of_fields_is_read():
    """DeepSeek-V4's sizes of blocks were named rates."""
    model = dataclasses.replace(models.preset("deepseek-v4-byte-500k"), sparse_block_size=8)
    recipe = Recipe(model=model)
    written = json.dumps(dataclass_to_json(recipe))
    former = written.replace('"heavy_block_size"', '"heavy_rate"').replace('"sparse_block_size"', '"sparse_rate"')
    assert former != written and from_json(json.loads(former)) == recipe == from_json(json.loads(written))
    with pytest.raises(ValueError, match=r"DeepSeekV4Config has no fields \['heavy_rates'\]"):
        from_json(json.loads(written.replace('"heavy_block_size"', '"heavy_rates"')))
