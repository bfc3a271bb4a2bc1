"""How configurations say rotary positions: base, scaling, and which part of a head's channels they turn."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..nn import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryScaling,
    yarn_magnitude,
    YarnScaling,
)
from ._attributes import Entry
from ._config_types import Fraction, Number, Positive, Size
from ._published_config import PublishedConfig


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
_FACTOR, _ORIGINAL_LENGTH = {"factor": "factor"}, {"original_length": "original_max_position_embeddings"}
_FREQUENCIES = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}
_YARN = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "magnitude": "attention_factor", "truncate": "truncate"}
_DIVISORS = {"short_divisors": "short_factor", "long_divisors": "long_factor", "magnitude": "attention_factor"}
_SCALINGS: dict[str, tuple[type[RotaryScaling], dict[str, str]]] = {
    "linear": (LinearScaling, _FACTOR),
    "dynamic": (DynamicScaling, _FACTOR | _ORIGINAL_LENGTH),
    "llama3": (Llama3Scaling, _FACTOR | _FREQUENCIES | _ORIGINAL_LENGTH),
    "yarn": (YarnScaling, _FACTOR | _YARN | _ORIGINAL_LENGTH),
    "longrope": (LongRopeScaling, _DIVISORS | _FACTOR | _ORIGINAL_LENGTH),
}
_OPTIONAL = {"magnitude", "truncate"}
SCALINGS = {"default", "su", *_SCALINGS}
_OF_ANY = {name for _, fields in _SCALINGS.values() for name in fields.values()}
_OF_ANY |= {"mscale", "mscale_all_dim", "alpha", "finetuned"}


_ORIGINAL = "original_max_position_embeddings"
_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class RotaryPositions(Entry):
    """Base and scaling; `theta` is the base where it is missing.

    `layer_type` is for families whose `rope_parameters` may have both for each type of layer. `stated` is for families
    that transformers scales by default, so that a configuration has to say how, even if not at all. What is `beside`
    them in `rope_parameters` is read by other entries, or changes nothing.
    """

    theta: float = 10_000.0
    layer_type: str | None = None
    stated: bool = False
    beside: tuple[str, ...] = ()

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta` and `scaling`."""
        if self.stated and not either_rotary_parameters(published):
            published.take("rope_parameters")
        theta, scaling = read_rotary(published, self.theta, self.layer_type, beside=self.beside)
        return {"theta": theta, "scaling": scaling}

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes for both, which every version of transformers reads."""
        found = {"rope_theta": config.theta} | scaling_attributes(config)
        return {"rope_scaling": {"rope_type": "default"}} | found if self.stated else found


@dataclasses.dataclass(frozen=True)
class RotaryByType(Entry):
    """Base and scaling of layers without a window, and those of layers with one.

    `theta` and `local_theta` are the bases where they are missing, which older configurations say in the attributes
    `older`; their `rope_scaling`, where the family has had it, is of layers without a window.
    """

    theta: float
    local_theta: float
    older: tuple[str, str] = ("rope_theta", "rope_local_base_freq")
    scaled: bool = True

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta`, `scaling`, `local_theta` and `local_scaling`; refuse what releases of transformers read unlike."""
        self._check(published, _of_types(published))
        theta, scaling = read_rotary(
            published, self.theta, FULL, (self.older[0], "rope_scaling" if self.scaled else None)
        )
        return {"theta": theta, "scaling": scaling} | read_local(published, self.local_theta, self.older[1])

    def _check(self, published: PublishedConfig, by_type: dict[str, Any]) -> None:
        older = rotary_parameters(published, "rope_scaling") if self.scaled else {}
        if older and not by_type and "rope_type" not in older:
            published.refuse(f"rope_scaling={older}: newer transformers reads no such type here; say its rope_type.")
        said = [_of_type(by_type, kind).get("rope_theta") is not None for kind in _TYPES]
        one, name = self.older[0] == self.older[1], self.older[0]
        if one and not all(said) and (theta := published.read(name, Positive, self.theta)) != self.theta:
            published.refuse(
                f"{name}={theta}: newer transformers takes {self.theta} for layers with a window; say both in "
                "rope_parameters, by type of layer."
            )

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes and, for each type of layer, the newer, of which alone a local scaling is."""
        found = {self.older[1]: config.local_theta} | {self.older[0]: config.theta}  # which may have one name
        found |= scaling_attributes(config) if self.scaled else {}
        return found | _by_type(config, _parameters(config))


_WITH_ORIGINAL = LongRopeScaling, YarnScaling, Llama3Scaling


class LongRotaryPositions(RotaryPositions):
    """Rotary positions whose original length is said beside them (Phi-3)."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta` and `scaling`; refuse a scaling of another original length than the configuration's."""
        found = super().read(published)
        # Where it is missing, transformers takes 4096, not the longest length.
        original, scaling = published.read(_ORIGINAL, Size, 4096), found["scaling"]
        if isinstance(scaling, _WITH_ORIGINAL) and scaling.original_length != original:
            published.refuse(f"original_max_position_embeddings={original}: rope_scaling says {scaling}.")
        return found

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes, and the original length."""
        scaling = config.scaling
        said = {"original_max_position_embeddings": getattr(scaling, "original_length", None)}
        return super().write(config) | (said if isinstance(scaling, _WITH_ORIGINAL) else {})


class SharpenedRotaryPositions(RotaryPositions):
    """Rotary positions whose YaRN says too how much scores are sharpened (DeepSeek)."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta`, `scaling` and `temperature`, which is 0 without a scaling."""
        given, found = either_rotary_parameters(published), super().read(published)
        stated = given.get("mscale_all_dim")
        sharper = 0.0 if found["scaling"] is None or stated is None else stated
        return found | {"temperature": sharper}

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes, with YaRN's two of scores."""
        found, sharper = super().write(config), config.temperature
        if sharper:
            found["rope_scaling"] |= {"mscale": sharper, "mscale_all_dim": sharper}
        return found


_GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class GrowingPositions(Entry):
    """Rotary positions beside which stands how scores grow with their query's position (Ministral 3)."""

    positions: RotaryPositions = RotaryPositions(stated=True, beside=_GROWTH)

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """What the positions are, `growth`, and `growth_every`; refuse a growth after no number of positions."""
        given = either_rotary_parameters(published)
        growth, every = given.get("llama_4_scaling_beta"), given.get(_ORIGINAL)
        if growth and every is None:
            published.refuse(f"llama_4_scaling_beta={growth}: no original_max_position_embeddings says after what.")
        growth, every = 0.0 if growth is None else growth, 1 if every is None else every
        return self.positions.read(published) | {"growth": growth, "growth_every": every}

    def write(self, config: Any) -> dict[str, Any]:
        """The newer attribute; raises a `ValueError` for two lengths where it has one."""
        found = self.positions.write(config)
        said, every = dict(found.pop("rope_scaling", {})), config.growth_every
        if said.get("original_max_position_embeddings", every) != every:
            raise ValueError(
                f"save(config={type(config).__name__}(growth_every={every})): published configurations have one length "
                f"for this and {config.scaling}; give the scaling's."
            )
        said |= {"rope_theta": config.theta, "llama_4_scaling_beta": config.growth}
        return {"rope_parameters": {"rope_type": "default"} | said | {"original_max_position_embeddings": every}}


_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}


class PositionsByType(Entry):
    """Rotary positions of layers with a window and of the others, of which a part of the pairs may turn."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta`, `scaling`, `local_theta` and `local_scaling`."""
        by_type = _of_types(published)
        if by_type and (missing := [kind for kind in _TYPES if not _of_type(by_type, kind)]):
            published.refuse(f"rope_parameters say nothing of {missing[0]}; say both types of layer.")
        local = read_local(published, 10_000.0, "rope_local_base_freq")
        given = dict(_of_type(by_type, FULL) if by_type else _PROPORTIONAL)
        if given.pop("rope_type", "default") != "proportional":
            theta, scaling = read_rotary(published, 1_000_000.0, FULL)
            return {"theta": theta, "scaling": scaling} | local
        defaults = {"rope_theta": 1_000_000.0, "partial_rotary_factor": 1.0, "factor": 1.0}
        theta, part, factor = (_first(given.pop(name, None), default) for name, default in defaults.items())
        scaling = ProportionalScaling(part, factor)
        if left := unknown(given):
            published.refuse(f"rope_type='proportional' has attributes that are not known: {left}.")
        return {"theta": theta, "scaling": scaling} | local

    def write(self, config: Any) -> dict[str, Any]:
        """Both."""
        scaling, said = config.scaling, {"rope_type": "proportional", "rope_theta": config.theta}
        if isinstance(scaling, ProportionalScaling):
            said |= {"partial_rotary_factor": scaling.part, "factor": scaling.factor}
        else:
            said = _parameters(config)
        return _by_type(config, said)


@dataclasses.dataclass(frozen=True)
class RotaryFraction(Entry):
    """Which part of a head's channels is rotated; a family without this entry has whole heads."""

    default: float = 1.0
    inside: bool = False
    """Whether transformers takes its own default of what is not said beside the base."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`rotary_fraction`, said beside the base or by itself."""
        own = published.read("partial_rotary_factor", Fraction, self.default)
        return {"rotary_fraction": _first(either_rotary_parameters(published).get("partial_rotary_factor"), own)}

    def write(self, config: Any) -> dict[str, Any]:
        """Its attribute."""
        said = {"partial_rotary_factor": config.rotary_fraction}
        newer = {"rope_scaling": None, "rope_parameters": _parameters(config) | said}  # the older would come first
        return said | (newer if self.inside else {})


def _of_types(published: PublishedConfig) -> dict[str, Any]:
    """`rope_parameters` by type of layer; refuse those for all, which transformers does not read of these families."""
    given = rotary_parameters(published, "rope_parameters")
    if given and not any(isinstance(value, dict) for value in given.values()):
        types = " and of ".join(_TYPES)
        published.refuse(f"rope_parameters={given}: this family's are by type of layer, of {types}.")
    return given


def _of_type(parameters: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return what `rope_parameters` say of a type of layer; nothing where that is no object."""
    own = parameters.get(kind)
    return own if isinstance(own, dict) else {}


def _first(*values: Any) -> Any:
    """Return the first value that is not null."""
    return next((value for value in values if value is not None), None)


def read_rotary(
    published: PublishedConfig,
    default_theta: float = 10_000.0,
    layer_type: str | None = None,
    older: tuple[str, str | None] = ("rope_theta", "rope_scaling"),
    beside: tuple[str, ...] = (),
) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of the rotary positions, of the `older` attributes or of `rope_parameters`.

    A scaling that has no older name, and is not said by type of layer, is refused.
    """
    given = rotary_parameters(published, "rope_parameters")
    typed = {name for name, value in given.items() if isinstance(value, dict)}
    if typed and layer_type and (others := typed - {*_TYPES}):
        published.refuse(f"rope_parameters are by type of layer, and {sorted(others)} are no types.")
    # Beside the types transformers leaves a scaling that it was given of none of them, and turns by the types alone.
    if typed and layer_type and (kind := given.get("rope_type", "default")) not in SCALINGS:
        published.refuse(f"rope_type={kind!r} is not known.")
    if typed and layer_type:
        # Whether YaRN's ramp is rounded it looks up there too, for all types, and never in theirs.
        rounds, given = {"truncate": _first(given.get("truncate"), True)}, dict(_of_type(given, layer_type))
        given |= rounds if given.get("rope_type") == "yarn" else {}
    given = dict(given)
    theta = published.read(older[0], Positive, None)
    scaling = rotary_parameters(published, older[1]) if older[1] else {}
    if given and scaling and _unlike(scaling, given, bool(typed)):
        published.refuse(f"{older[1]}={scaling}, and rope_parameters have {given}; give one of them.")
    given = {name: value for name, value in (given or scaling).items() if name not in beside}
    if (part := given.pop("partial_rotary_factor", None)) is not None:
        published.add("partial_rotary_factor", part)
    theta = _first(given.pop("rope_theta", None), theta, default_theta)
    kind = given.pop("rope_type", given.pop("type", None))
    longest = 0 if kind in (None, "default") else published.count("max_position_embeddings")
    beside_it, inner = published.read(_ORIGINAL, Size, None), given.pop(_ORIGINAL, None)
    # By types transformers reads theirs alone; else the other one, also where both are there.
    original = _first(inner, longest) if typed and layer_type else _first(beside_it, inner, longest)
    if kind in ("yarn", "llama3", "longrope", "su") and {_first(beside_it, original), _first(inner, original)} != {
        original
    }:
        other = _first(inner, longest)
        published.refuse(f"{_ORIGINAL}={beside_it}, and {other} beside rope_type={kind!r}; give them alike.")
    scaling = scaling_of(published.refuse, kind, given, original, longest)
    if scaling is not None and older[1] is None and not typed:
        published.refuse(f"rope_parameters: {layer_type} has {kind!r}, and this family no scaling.")
    return theta, scaling


def _unlike(older: dict[str, Any], newer: dict[str, Any], is_added: bool) -> bool:
    """Whether the older attribute, which is read in the newer's place or is added to it, says something else."""
    one, other = ({"rope_type": its.get("type")} | its | {"type": None} for its in (older, newer))
    return any(other.get(name) != its for name, its in one.items()) if is_added else one != other


def read_local(published: PublishedConfig, theta: float, older: str) -> dict[str, Any]:
    """`local_theta` and `local_scaling`, of layers with a window, whose base has an `older` attribute."""
    found, scaling = read_rotary(published, theta, SLIDING, (older, None))
    return {"local_theta": found, "local_scaling": scaling}


_LOCAL = ("local_theta", "local_scaling")


def _by_type(config: Any, full: dict[str, Any]) -> dict[str, Any]:
    """The newer attribute, with what all types have in common beside them."""
    found = {SLIDING: _parameters(config, *_LOCAL), FULL: full}
    rounds = {its.truncate for its in (config.scaling, config.local_scaling) if isinstance(its, YarnScaling)}
    if len(rounds) == 2:
        raise ValueError(
            f"save(config={type(config).__name__}(scaling={config.scaling}, local_scaling={config.local_scaling})): "
            "published configurations have one truncate for both; give both the same."
        )
    return {"rope_parameters": found if False not in rounds else found | {"truncate": False}}


def _parameters(config: Any, theta: str = "theta", scaling: str = "scaling") -> dict[str, Any]:
    said = scaling_attributes(config, scaling).get("rope_scaling", {})
    return {"rope_type": "default"} | said | {"rope_theta": getattr(config, theta)}
