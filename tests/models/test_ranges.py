"""Configuration values outside of their types and ranges are refused by name; there is no other error and no repair."""

import dataclasses
import functools
import json
import math
import operator
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest
from test_attributes import HARMLESS, numbers_of, PUBLISHED, SUPERSEDED, UNUSED
from test_published import RECORDED

from eqformer import models, nn
from eqformer.models import config_types
from eqformer.models._attributes import field_types


WRONG = {"text": "500", "NaN": math.nan}
UNUSUAL = {"null": None, "negative": -1, "zero": 0, "huge": 10**30}
MORE_WRONG = WRONG | {"infinite": math.inf, "too large": 1e300, "a list": [None], "true": True}
OF_NUMBERS = {"NaN", *UNUSUAL} - {"null"}
MORE_UNUSUAL = UNUSUAL | {"half": 0.5}
FIRST = {family: next(name for name in RECORDED if name.split()[0] == family) for family in PUBLISHED}
# Attributes that another attribute switches off in some configuration, so that nothing reads them there.
SWITCHED_OFF = {
    *("attn_scale", "floor_scale", "num_experts", "top_k_experts", "moe_intermediate_size", "sliding_window"),
    *("cross_attention_hidden_size", "factor", "attention_factor", "mrope_section", "vocab_size_per_layer_input"),
    "num_global_key_value_heads",
}


def paths(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every attribute, also of those within others."""
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict) and name not in ("id2label", "label2id", "per_layer_config"):
            yield from paths(value, (*above, name))


def changed(config: Mapping[str, Any], path: tuple[str, ...], *value: Any) -> dict[str, Any]:
    """Return the configuration with another value at a path, or none there."""
    name, *rest = path
    if rest:
        return {**config, name: changed(config[name], tuple(rest), *value)}
    return {key: own for key, own in config.items() if key != name} | ({name: value[0]} if value else {})


def faults_of(config: Any) -> list[str]:
    """Return the fields of a config that are not of their kinds or not finite."""
    kinds = field_types(type(config))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    faults = [name for name, value in values.items() if not config_types.fits(value, kinds[name])]
    for name, value in values.items():
        if isinstance(value, nn.RotaryScaling):
            numbers = [part for part in jax.tree.leaves(vars(value)) if not isinstance(part, bool)]
            faults += [name for number in numbers if not (math.isfinite(number) and number > 0)]
    return faults


def attempt(name: str, path: tuple[str, ...], label: str, *value: Any) -> str:
    """Return what is wrong with the answer to one changed configuration; empty if nothing is."""
    case = f"{name}: {'.'.join(path)} {label}: "
    try:
        config = numbers_of(changed(RECORDED[name]["config"], path, *value))
    except ValueError as error:
        is_named = path[-1] in str(error) or label not in MORE_WRONG or label == "true"
        return "" if is_named and str(error).startswith("config.json") else f"{case}{error}"
    except Exception as error:
        return f"{case}{error!r}"
    family = name.split()[0]
    ignored = HARMLESS | SUPERSEDED | SWITCHED_OFF | UNUSED.get(family, set())
    ignored |= OF_IMAGES if family == "t5gemma2" and len(path) > 1 else set()
    is_flag = label == "true" and (isinstance(of(RECORDED[name]["config"], path), bool | None) or path in ALSO_FLAGS)
    if label in MORE_WRONG and ignored.isdisjoint(path) and not is_flag and PASSED_OVER.isdisjoint(path):
        return f"{case}taken"
    return case + ", ".join(faults) if (faults := faults_of(config)) else ""


# Attributes that are a text in the recorded configurations and may also be true, as in Laguna's released folders.
ALSO_FLAGS = {("gating",)}
# Of images, of which the family reads nothing, and what the encoder's whole says in the place of its text.
OF_IMAGES = {"boi_token_index", "mm_tokens_per_image", "vision_config", "attn_logit_softcapping", "tie_word_embeddings"}
# Bookkeeping that transformers writes into every configuration, also into the halves of one.
PASSED_OVER = {"id2label", "label2id", "output_hidden_states", "output_attentions", "return_dict", "problem_type"}
PASSED_OVER |= {"chunk_size_feed_forward"}


def of(config: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path."""
    return functools.reduce(operator.getitem, path, config)


def faults_in(names: list[str], values: Mapping[str, Any], *, share: int = 1) -> list[str]:
    """Try every attribute of some recorded configurations with a share of the values, in turns, and without it."""
    given: list[tuple[Any, ...]] = [("left out",), *values.items()]
    tried = [
        attempt(name, path, *one)
        for number, name in enumerate(names)
        for place, path in enumerate(paths(RECORDED[name]["config"]))
        if path[-1] not in PASSED_OVER | HARMLESS
        for one in given[(number + place) % share :: share]
        if one[0] not in OF_NUMBERS or isinstance(of(RECORDED[name]["config"], path), int | float)
    ]
    assert len(tried) > 60 * len(names) // share
    return sorted({*tried} - {""})


@pytest.mark.parametrize("part", range(4))
def test_a_value_of_any_attribute_is_in_range_or_refused_by_name(part):
    """In each family an attribute gets a third of the values; the case below has all of them."""
    assert faults_in(list(FIRST.values())[part::4], WRONG | UNUSUAL, share=3) == []


@pytest.mark.grid
@pytest.mark.parametrize("part", range(8))
def test_a_value_of_any_attribute_of_all_cases_is_in_range_or_refused_by_name(part):
    assert faults_in(list(RECORDED)[part::8], MORE_WRONG | MORE_UNUSUAL) == []


def test_the_property_sees_a_value_that_is_taken():
    """The negative control: a config whose base is repaired in silence, and one that is not in range."""
    config = numbers_of(RECORDED[FIRST["llama"]]["config"])
    assert faults_of(config) == []
    assert faults_of(dataclasses.replace(config, theta=math.nan, scaling=nn.LinearScaling(0.0))) == ["theta", "scaling"]
    assert attempt(FIRST["llama"], ("rms_norm_eps",), "NaN", 1e-3).endswith("rms_norm_eps NaN: taken")


def numbers_in(kind: Any) -> Iterator[Any]:
    """Yield the kinds of numbers in an annotation, each with its range where there is one."""
    if typing.get_origin(kind) is typing.Annotated or kind in (int, float):
        yield kind
    else:
        for part in typing.get_args(kind):
            yield from numbers_in(part)


def test_every_number_of_every_config_has_a_range():
    """So that a new family cannot leave one out."""
    seen = 0
    for family in models.FAMILIES.values():
        kinds = field_types(family.config)
        for field in dataclasses.fields(family.config):
            for kind in numbers_in(kinds[field.name]):
                seen += 1
                assert kind not in (int, float), f"{family.config.__name__}.{field.name}: annotate it by a kind"
                assert isinstance(typing.get_args(kind)[1], config_types.Range)
    assert seen > 800 and [*numbers_in(tuple[int, ...] | None)] == [int]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


def test_a_number_of_rotary_positions_is_refused_by_name():
    plain = {name: its for name, its in RECORDED["llama plain"]["config"].items() if name != "rope_parameters"}
    linear = {"rope_type": "linear", "factor": 4.0}
    config = numbers_of(plain | {"rope_theta": 500, "rope_scaling": linear})
    assert config.theta == 500.0 and config.scaling == nn.LinearScaling(4.0)
    for base in (0, False, True, "500", [500], math.nan, "nan", -1.0, math.inf):
        for said in ({"rope_theta": base}, {"rope_parameters": {"rope_type": "default", "rope_theta": base}}):
            with pytest.raises(
                ValueError, match=r"^config.json: .*rope_theta=.*: it must be a (finite )?number above 0"
            ):
                numbers_of(plain | said)
    faults = [linear | {"factor": value} for value in (0, math.nan, -2.0, "2", True, [2.0])]
    faults += [YARN | {"truncate": value} for value in ("false", 0, 1.0)]
    faults += [YARN | {"original_max_position_embeddings": value} for value in ("16", True, 16.5, 0)]
    faults += [YARN | {"attention_factor": 0}, YARN | {"beta_fast": 0}, YARN | {"mscale": "1"}]
    faults += [LLAMA3 | {"low_freq_factor": 8.0}, LLAMA3 | {"low_freq_factor": 0}]
    for said in faults:
        (name,) = {*said} if said["rope_type"] == "linear" and len(said) == 1 else [*changes(said)]
        with pytest.raises(ValueError, match=rf"^config.json: .*{name}="):
            numbers_of(plain | {"rope_scaling": said})
    # Equal factors have no ramp between them, as Llama 4 Scout's.
    assert numbers_of(plain | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}).scaling is not None


def changes(said: dict[str, Any]) -> set[str]:
    """Return the names in which a scaling differs from its right form."""
    right = {"linear": {"rope_type": "linear", "factor": 4.0}, "yarn": YARN, "llama3": LLAMA3}[said["rope_type"]]
    return {name for name, value in said.items() if name not in right or right[name] is not value}


def test_divisors_are_counted_when_a_configuration_is_read():
    config = RECORDED["phi3 short"]["config"]
    said = config["rope_parameters"]
    numbers_of(config)
    for name in ("short_factor", "long_factor"):
        with pytest.raises(ValueError, match=rf"^config.json: {name} has 2 numbers for 3 pairs of channels; give one"):
            numbers_of(config | {"rope_parameters": said | {name: said[name][:2]}})
        with pytest.raises(ValueError, match=rf"^config.json: .*{name}=.*: it must be a list, each item a number abo"):
            numbers_of(config | {"rope_parameters": said | {name: [0.0, *said[name][1:]]}})


def test_build_refuses_a_field_out_of_range():
    config = models.preset("llama-byte-1m")
    for name, value in (("embed", 10**12), ("layers", 10**9), ("eps", math.nan), ("theta", 0.0)):
        with pytest.raises(ValueError, match=rf"^build\(.*: {name}={value}: it must be a "):
            models.shapes(dataclasses.replace(config, **{name: value}))
    with pytest.raises(ValueError, match=r"encoder: layers=0: it must be a whole number of at least 1"):
        encoder = dataclasses.replace(models.preset("gemma2-byte-500k"), **{"layers": 0})
        models.shapes(dataclasses.replace(models.preset("t5gemma-byte-700k"), **{"encoder": encoder}))


def test_ranges():
    assert all(config_types.fits(value, config_types.Size) for value in (1, 2**31 - 1)) and not any(
        config_types.fits(value, config_types.Size) for value in (0, 2**31, True)
    )
    assert all(config_types.fits(value, config_types.Number) for value in (-1, 0.5, 3e38))
    assert not any(
        config_types.fits(value, config_types.Number) for value in (math.nan, math.inf, 1e39, 10**400, "1", False)
    )
    assert (
        config_types.fits(1e-40, config_types.Positive)
        and not config_types.fits(0, config_types.Positive)
        and config_types.fits(1, config_types.Fraction)
        and not config_types.fits(0.0, config_types.Fraction)
    )


def test_ids_that_end_a_text_are_ids(tmp_path):
    for ids in ([None], "2", [2.0], True, -1, {"id": 2}):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(ValueError, match=r"config.json: eos_token_id=.*: it must be an id, or a list of ids"):
            models.read_eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert models.read_eos_token_ids(tmp_path) == [2, 3]
