"""The parameters of rotary positions in a configuration: their types, and the scalings that they describe."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

from .. import nn
from ._config_types import Attributes, FieldType, Fraction, Number, Positive, PublishedConfig, Size


ORIGINAL = "original_max_position_embeddings"
TYPES = (FULL, SLIDING) = ("full_attention", "sliding_attention")
# The types of all attributes within `rope_parameters` and `rope_scaling`, whether or not a `rope_type` uses them.
_PARAMETER_TYPES: Mapping[str, FieldType] = {
    **dict.fromkeys(("rope_type", "type"), str),
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "alpha"), Positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Positive),
    **dict.fromkeys(("short_factor", "long_factor"), list[Positive]),
    **dict.fromkeys(("short_mscale", "long_mscale"), Positive),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), Number),
    **dict.fromkeys((ORIGINAL, "max_position_embeddings"), Size),
    **{"truncate": bool, "partial_rotary_factor": Fraction},
    **dict.fromkeys(TYPES, dict),
}

# The class of each `rope_type`, and the name of the parameter for each field of the class.
_FACTOR, _ORIGINAL_LENGTH = {"factor": "factor"}, {"original_length": ORIGINAL}
_FREQUENCIES = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}
_YARN = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "magnitude": "attention_factor", "truncate": "truncate"}
_DIVISORS = {"short_divisors": "short_factor", "long_divisors": "long_factor", "magnitude": "attention_factor"}
_SCALINGS: dict[str, tuple[type[nn.RotaryScaling], dict[str, str]]] = {
    "linear": (nn.LinearScaling, _FACTOR),
    "dynamic": (nn.DynamicScaling, _FACTOR | _ORIGINAL_LENGTH),
    "llama3": (nn.Llama3Scaling, _FACTOR | _FREQUENCIES | _ORIGINAL_LENGTH),
    "yarn": (nn.YarnScaling, _FACTOR | _YARN | _ORIGINAL_LENGTH),
    "longrope": (nn.LongRopeScaling, _DIVISORS | _FACTOR | _ORIGINAL_LENGTH),
}
_OPTIONAL_FIELDS = {"magnitude", "truncate"}
ROPE_TYPES = {"default", "su", *_SCALINGS}
_KNOWN_PARAMETERS = {name for _, fields in _SCALINGS.values() for name in fields.values()}
_KNOWN_PARAMETERS |= {"mscale", "mscale_all_dim", "alpha", "finetuned"}


@runtime_checkable
class WithRotary(Protocol):
    """Fields of a config with rotary positions."""

    @property
    def theta(self) -> float: ...
    @property
    def scaling(self) -> nn.RotaryScaling | None: ...
    @property
    def max_seq(self) -> int: ...


def rotary_parameters(published: PublishedConfig, name: str) -> Attributes:
    """Return the attribute `name`, `rope_parameters` or `rope_scaling`, with values of the right types or null.

    The attribute may have an object of values for each type of layer, which is checked too. Raises a `ValueError` that
    names a value of another type.
    """
    return _check_parameters(published.nested(name), f"{published.source}: {name}")


def _check_parameters(parameters: Attributes, source: str) -> Attributes:
    published, values = PublishedConfig(parameters, source), dict(parameters)
    for name, value in parameters.items():
        if value is not None and name in _PARAMETER_TYPES:
            values[name] = published.checked(name, value, _PARAMETER_TYPES[name])
        if isinstance(value, dict):
            values[name] = _check_parameters(value, f"{source}: {name}")
    return values


def either_rotary_parameters(published: PublishedConfig) -> Attributes:
    """Return `rope_parameters` or, if it is missing or empty, `rope_scaling`, its older name; check the types of
    both."""
    older = rotary_parameters(published, "rope_scaling")
    return rotary_parameters(published, "rope_parameters") or older


def check_scaling(config: object, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse scalings of rotary positions that do not fit the config's other numbers."""
    for theta, name in (("theta", "scaling"), ("local_theta", "local_scaling")):
        scaling = getattr(config, name, None)
        if check := _CHECKS.get(type(scaling)):
            check(scaling, config, theta, refuse)


def _check_yarn(scaling: nn.YarnScaling, config: object, theta: str, refuse: Callable[[str], NoReturn]) -> None:
    if getattr(config, theta) == 1:
        refuse("rope_theta=1 with rope_type='yarn': YaRN divides by the logarithm of rope_theta; give another base.")


def _check_llama3(scaling: nn.Llama3Scaling, config: object, theta: str, refuse: Callable[[str], NoReturn]) -> None:
    if scaling.low_frequency_factor > scaling.high_frequency_factor:
        refuse(
            f"low_freq_factor={scaling.low_frequency_factor}, high_freq_factor={scaling.high_frequency_factor}: "
            "rope_type='llama3' needs a high_freq_factor of at least low_freq_factor."
        )


def _check_longrope(scaling: nn.LongRopeScaling, config: object, theta: str, refuse: Callable[[str], NoReturn]) -> None:
    pairs = _rotated_channels(config, theta.removesuffix("theta")) // 2
    for attribute, divisors in (("short_factor", scaling.short_divisors), ("long_factor", scaling.long_divisors)):
        if len(divisors) != pairs:
            refuse(f"{attribute} has {len(divisors)} numbers for {pairs} pairs of channels; give one number per pair.")


_CHECKS = {nn.YarnScaling: _check_yarn, nn.Llama3Scaling: _check_llama3, nn.LongRopeScaling: _check_longrope}
"""Functions that refuse a scaling that does not fit the config's other fields, by the class of the scaling.

Their argument `theta` is the name of the config's field that holds the base.
"""


def _rotated_channels(config: Any, prefix: str) -> int:
    if (channels := getattr(config, "rope_dim", None)) is not None:
        return channels
    head_size = getattr(config, "head_size", None) or config.embed // config.heads
    return int(head_size * getattr(config, f"{prefix}rotary_fraction", 1.0))


def make_scaling(
    refuse: Callable[[str], NoReturn], rope_type: str | None, parameters: Attributes, original: int, longest: int
) -> nn.RotaryScaling | None:
    """Return the scaling of a `rope_type`, and remove its parameters from `parameters`.

    Parameters of other scalings are ignored, as in transformers. If `rope_type` is None, any parameter is refused.

    Args:
        refuse: A function that raises an error with a text.
        rope_type: The name of the scaling; None or `"default"`: no scaling.
        parameters: The scaling's parameters.
        original: The length of rows before the scaling, in tokens.
        longest: The length of the longest rows.
    """
    if rope_type is None or rope_type == "default":
        make, fields = None, {}
    elif (name := "longrope" if rope_type == "su" else rope_type) in _SCALINGS:
        make, fields = _SCALINGS[name]
        _add_implied_parameters(name, parameters, original, longest)
    else:
        refuse(f"rope_type={rope_type!r} is not known.")
    arguments: Attributes = {}
    for field, published in fields.items():
        value = parameters.pop(published, None)
        if value is None and field not in _OPTIONAL_FIELDS:
            refuse(f"rope_type={rope_type!r} needs {published!r}, which is missing.")
        arguments[field] = tuple(value) if isinstance(value, list) else value
    if unknown := parameters if rope_type is None else unknown_parameters(parameters):
        refuse(f"rope_type={rope_type!r} has attributes that are not known: {unknown}.")
    return None if make is None else make(**arguments)


def unknown_parameters(parameters: Attributes) -> Attributes:
    """Return the parameters that belong to no known scaling."""
    return {name: value for name, value in parameters.items() if name not in _KNOWN_PARAMETERS}


def _add_implied_parameters(name: str, parameters: Attributes, original: int, longest: int) -> None:
    """Add a scaling's parameters that the configuration leaves out, or that other parameters imply."""
    if "original_length" in _SCALINGS[name][1]:
        # For a `dynamic` scaling, transformers always takes the longest length as the original length.
        parameters[ORIGINAL] = longest if name == "dynamic" else original
    if name == "longrope":
        parameters["factor"] = longest / original if parameters.get("factor") is None else parameters["factor"]
    if name == "yarn":
        mscale, mscale_all_dim = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
        factor = parameters.get("factor")
        if parameters.get("attention_factor") is None and factor and mscale and mscale_all_dim:
            parameters["attention_factor"] = nn.yarn_magnitude(factor, mscale) / nn.yarn_magnitude(
                factor, mscale_all_dim
            )
        for parameter, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
            parameters[parameter] = default if parameters.get(parameter) is None else parameters[parameter]


def scaling_attributes(config: WithRotary, name: str = "scaling") -> Attributes:
    """Return the attribute `rope_scaling` for the config's field `name`, or no attribute without a scaling.

    Raises a `ValueError` for a scaling that `rope_scaling` cannot express.
    """
    scaling = getattr(config, name)
    if scaling is None:
        return {}
    for rope_type, (make, fields) in _SCALINGS.items():
        if type(scaling) is make:
            parameters = {published: getattr(scaling, field) for field, published in fields.items()}
            if rope_type == "dynamic" and parameters.pop(ORIGINAL) != config.max_seq:
                raise ValueError(
                    f"save(config={type(config).__name__}({name}={scaling}, max_seq={config.max_seq})): published "
                    "configurations have one number for max_seq and original_length; make the two equal."
                )
            parameters = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
            parameters = {key: value for key, value in parameters.items() if value is not None}
            return {"rope_scaling": {"rope_type": rope_type} | parameters}
    raise ValueError(f"{type(scaling).__name__}: published configurations have no name for this scaling.")
