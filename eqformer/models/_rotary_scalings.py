"""The scalings of rotary positions by their names in configurations, read and written."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..nn import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    yarn_magnitude,
    YarnScaling,
)
from ._config import PublishedConfig
from ._kinds import Fraction, Number, Positive, Size


# The kinds of all attributes within `rope_parameters` and `rope_scaling`, whether or not a `rope_type` uses them.
_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("rope_type", "type"), str),
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "alpha"), Positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Positive),
    **dict.fromkeys(("short_factor", "long_factor"), list[Positive]),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), Number),
    **dict.fromkeys(("original_max_position_embeddings", "max_position_embeddings"), Size),
    **{"truncate": bool, "partial_rotary_factor": Fraction},
    **dict.fromkeys(("full_attention", "sliding_attention"), dict),
}


def rotary_parameters(published: PublishedConfig, name: str) -> dict[str, Any]:
    """Return `rope_parameters` or `rope_scaling`, whichever `name` is, with values of the right kinds or null.

    Raises a `ValueError` that names a value of another kind, in the object itself or in that of a type of layer.
    """
    return _checked(published.nested(name), f"{published.source}: {name}")


def _checked(parameters: dict[str, Any], source: str) -> dict[str, Any]:
    published, values = PublishedConfig(parameters, source), dict(parameters)
    for key, value in parameters.items():
        if value is not None and key in _KINDS:
            values[key] = published.checked(key, value, _KINDS[key])
        if isinstance(value, dict):
            values[key] = _checked(value, f"{source}: {key}")
    return values


def either_rotary_parameters(published: PublishedConfig) -> dict[str, Any]:
    """Return `rope_parameters` or, where they say nothing, `rope_scaling`, their older name."""
    older = rotary_parameters(published, "rope_scaling")
    return rotary_parameters(published, "rope_parameters") or older


def check_scaling(config: Any, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse scalings of rotary positions that do not fit the config's other numbers."""
    for theta, name in (("theta", "scaling"), ("local_theta", "local_scaling")):
        scaling = getattr(config, name, None)
        if isinstance(scaling, YarnScaling) and getattr(config, theta) == 1:
            refuse("rope_theta=1 with rope_type='yarn': its ramp is counted by logarithms of the base; give another.")
        if isinstance(scaling, Llama3Scaling) and scaling.low_frequency_factor > scaling.high_frequency_factor:
            refuse(
                f"low_freq_factor={scaling.low_frequency_factor}, high_freq_factor={scaling.high_frequency_factor}: "
                "rope_type='llama3' needs a high_freq_factor of at least low_freq_factor."
            )
        if isinstance(scaling, LongRopeScaling):
            pairs = _rotated_channels(config) // 2
            for attribute, divisors in (
                ("short_factor", scaling.short_divisors),
                ("long_factor", scaling.long_divisors),
            ):
                if len(divisors) != pairs:
                    refuse(f"{attribute} has {len(divisors)} numbers for {pairs} pairs of channels; give one a pair.")


def _rotated_channels(config: Any) -> int:
    if (channels := getattr(config, "rope_dim", None)) is not None:
        return channels
    head_size = getattr(config, "head_size", None) or config.embed // config.heads
    return int(head_size * getattr(config, "rotary_fraction", 1.0))


def scaling_of(
    refuse: Callable[[str], NoReturn], kind: str | None, given: dict[str, Any], original: int, longest: int
) -> RotaryScaling | None:
    """The scaling of this `rope_type` that the rest says, for rows of `original` length, and of the `longest`.

    Attributes of other types beside it are passed over, as in transformers, but not where no type is said.
    """
    if kind is None or kind == "default":
        make, fields = None, {}
    elif (named := "longrope" if kind == "su" else kind) in _SCALINGS:
        make, fields = _SCALINGS[named]
        _complete(named, given, original, longest)
    else:
        refuse(f"rope_type={kind!r} is not known.")
    found: dict[str, Any] = {}
    for name, published in fields.items():
        value = given.pop(published, None)
        if value is None and name not in _OPTIONAL:
            refuse(f"rope_type={kind!r} needs {published!r}, which is not said.")
        found[name] = tuple(value) if isinstance(value, list) else value
    if left := given if kind is None else unknown(given):
        refuse(f"rope_type={kind!r} has attributes that are not known: {left}.")
    return None if make is None else make(**found)


def unknown(given: dict[str, Any]) -> dict[str, Any]:
    """What of the attributes that a scaling does not have is not those of another either."""
    return {name: value for name, value in given.items() if name not in _OF_ANY}


def _complete(kind: str, given: dict[str, Any], original: int, longest: int) -> None:
    """Say what is left out, or said in other words."""
    if "original_length" in _SCALINGS[kind][1]:
        # Of a `dynamic` one that is the longest length, whatever is said; transformers reads no other.
        given["original_max_position_embeddings"] = longest if kind == "dynamic" else original
    if kind == "longrope":
        given["factor"] = longest / original if given.get("factor") is None else given["factor"]
    if kind == "yarn":
        over, under = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if given.get("attention_factor") is None and given.get("factor") and over and under:
            given["attention_factor"] = yarn_magnitude(given["factor"], over) / yarn_magnitude(given["factor"], under)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
            given[name] = default if given.get(name) is None else given[name]


def scaling_attributes(config: Any, name: str = "scaling") -> dict[str, Any]:
    """The older attribute for a config's scaling; none without one. Raises a `ValueError` for what none says."""
    scaling = getattr(config, name)
    if scaling is None:
        return {}
    if isinstance(scaling, DynamicScaling) and scaling.original_length != config.max_seq:
        raise ValueError(
            f"save(config={type(config).__name__}({name}={scaling}, max_seq={config.max_seq})): published "
            "configurations have one length for both; give the scaling's."
        )
    for kind, (make, fields) in _SCALINGS.items():
        if type(scaling) is make:
            said = {published: getattr(scaling, its) for its, published in fields.items()}
            if kind == "dynamic":
                del said["original_max_position_embeddings"]
            said = {its: list(value) if isinstance(value, tuple) else value for its, value in said.items()}
            return {"rope_scaling": {"rope_type": kind} | {its: one for its, one in said.items() if one is not None}}
    raise ValueError(f"{type(scaling).__name__}: no configuration has a name for this scaling.")


# By `rope_type` the scaling, and what configurations call its fields.
_FACTOR, _ORIGINAL = {"factor": "factor"}, {"original_length": "original_max_position_embeddings"}
_FREQUENCIES = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}
_YARN = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "magnitude": "attention_factor", "truncate": "truncate"}
_DIVISORS = {"short_divisors": "short_factor", "long_divisors": "long_factor", "magnitude": "attention_factor"}
_SCALINGS: dict[str, tuple[type[RotaryScaling], dict[str, str]]] = {
    "linear": (LinearScaling, _FACTOR),
    "dynamic": (DynamicScaling, _FACTOR | _ORIGINAL),
    "llama3": (Llama3Scaling, _FACTOR | _FREQUENCIES | _ORIGINAL),
    "yarn": (YarnScaling, _FACTOR | _YARN | _ORIGINAL),
    "longrope": (LongRopeScaling, _DIVISORS | _FACTOR | _ORIGINAL),
}
_OPTIONAL = {"magnitude", "truncate"}
SCALINGS = {"default", "su", *_SCALINGS}
_OF_ANY = {name for _, fields in _SCALINGS.values() for name in fields.values()}
_OF_ANY |= {"mscale", "mscale_all_dim", "alpha", "finetuned"}
