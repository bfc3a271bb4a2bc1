"""The scalings of rotary positions by their names in configurations, read and written."""

from collections.abc import Callable
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
        found[name] = tuple(map(float, value)) if isinstance(value, list) else value
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
        given["factor"] = given.get("factor") or longest / original
    if kind == "yarn":
        over, under = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if given.get("attention_factor") is None and given.get("factor") and over and under:
            given["attention_factor"] = yarn_magnitude(given["factor"], over) / yarn_magnitude(given["factor"], under)
        given |= {"beta_fast": given.get("beta_fast") or 32.0, "beta_slow": given.get("beta_slow") or 1.0}
        given.setdefault("truncate", True)


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
