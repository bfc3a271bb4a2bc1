"""How configurations say rotary positions: base, scaling, and which part of a head's channels they turn."""

import dataclasses
from collections.abc import Callable
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
from ._config import PublishedConfig


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
        if self.stated and not (published.nested("rope_parameters") or published.nested("rope_scaling")):
            published.take("rope_parameters")
        theta, scaling = read_rotary(published, self.theta, self.layer_type, beside=self.beside)
        return {"theta": theta, "scaling": scaling}

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes for both, which every version of transformers reads."""
        found = {"rope_theta": config.theta} | _scaling_attributes(config.scaling)
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
        """`theta`, `scaling`, `local_theta` and `local_scaling`."""
        theta, scaling = read_rotary(
            published, self.theta, FULL, (self.older[0], "rope_scaling" if self.scaled else None)
        )
        return {"theta": theta, "scaling": scaling} | read_local(published, self.local_theta, self.older[1])

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes and, for each type of layer, the newer, of which alone a local scaling is."""
        found = {self.older[1]: config.local_theta} | {self.older[0]: config.theta}  # which may have one name
        found |= _scaling_attributes(config.scaling) if self.scaled else {}
        return found | {"rope_parameters": {SLIDING: _parameters(config, *_LOCAL), FULL: _parameters(config)}}


class LongRotaryPositions(RotaryPositions):
    """Rotary positions whose original length is said beside them (Phi-3)."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta` and `scaling`; refuse a LongRoPE of another original length than the configuration's."""
        found = super().read(published)
        # Where it is missing, transformers takes 4096, not the longest length.
        original, scaling = published.take("original_max_position_embeddings", 4096), found["scaling"]
        if isinstance(scaling, LongRopeScaling) and scaling.original_length != original:
            published.refuse(f"original_max_position_embeddings={original}: rope_scaling says {scaling}.")
        return found

    def write(self, config: Any) -> dict[str, Any]:
        """The older attributes, and the original length."""
        scaling = config.scaling
        said = {"original_max_position_embeddings": getattr(scaling, "original_length", None)}
        return super().write(config) | (said if isinstance(scaling, LongRopeScaling) else {})


class SharpenedRotaryPositions(RotaryPositions):
    """Rotary positions whose YaRN says too how much scores are sharpened (DeepSeek)."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`theta`, `scaling` and `temperature`, which is 0 without a scaling."""
        given, found = published.nested("rope_parameters") or published.nested("rope_scaling"), super().read(published)
        sharper = 0.0 if found["scaling"] is None else float(given.get("mscale_all_dim") or 0.0)
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
        given = published.nested("rope_parameters") or published.nested("rope_scaling")
        growth, every = given.get("llama_4_scaling_beta") or 0.0, given.get("original_max_position_embeddings")
        if growth and not every:
            published.refuse(f"llama_4_scaling_beta={growth}: no original_max_position_embeddings says after what.")
        return self.positions.read(published) | {"growth": growth, "growth_every": every or 1}

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
        by_type = published.nested("rope_parameters")
        local = read_local(published, 10_000.0, "rope_local_base_freq")
        given = dict(by_type.get(FULL) or {} if by_type else _PROPORTIONAL)
        if given.pop("rope_type", "default") != "proportional":
            theta, scaling = read_rotary(published, 1_000_000.0, FULL)
            return {"theta": theta, "scaling": scaling} | local
        theta, part = given.pop("rope_theta", 1_000_000.0), given.pop("partial_rotary_factor", 1.0)
        scaling = ProportionalScaling(part, given.pop("factor", 1.0))
        if given:
            published.refuse(f"rope_type='proportional' has attributes that are not known: {given}.")
        return {"theta": float(theta), "scaling": scaling} | local

    def write(self, config: Any) -> dict[str, Any]:
        """Both."""
        scaling, said = config.scaling, {"rope_type": "proportional", "rope_theta": config.theta}
        if isinstance(scaling, ProportionalScaling):
            said |= {"partial_rotary_factor": scaling.part, "factor": scaling.factor}
        else:
            said = _parameters(config)
        return {"rope_parameters": {FULL: said, SLIDING: _parameters(config, *_LOCAL)}}


@dataclasses.dataclass(frozen=True)
class RotaryFraction(Entry):
    """Which part of a head's channels is rotated; a family without this entry has whole heads."""

    default: float = 1.0
    inside: bool = False
    """Whether transformers takes its own default of what is not said beside the base."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`rotary_fraction`, said beside the base or by itself."""
        given = published.nested("rope_parameters") or published.nested("rope_scaling")
        own = published.take("partial_rotary_factor", self.default)
        return {"rotary_fraction": given.get("partial_rotary_factor") or own}

    def write(self, config: Any) -> dict[str, Any]:
        """Its attribute."""
        said = {"partial_rotary_factor": config.rotary_fraction}
        newer = {"rope_scaling": None, "rope_parameters": _parameters(config) | said}  # the older would come first
        return said | (newer if self.inside else {})


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
    given = published.nested("rope_parameters")
    by_type = any(isinstance(value, dict) for value in given.values())
    if by_type and layer_type and (others := {name for name in given if name not in _TYPES}):
        published.refuse(f"rope_parameters are by type of layer, and {sorted(others)} are no types.")
    given = dict(given.get(layer_type) or {} if by_type and layer_type else given)
    theta = published.take(older[0], None)
    scaling = published.nested(older[1]) if older[1] else {}
    given = {name: value for name, value in (given or scaling).items() if name not in beside}
    if (part := given.pop("partial_rotary_factor", None)) is not None:
        published.add("partial_rotary_factor", part)
    theta = given.pop("rope_theta", None) or theta or default_theta
    kind = given.pop("rope_type", given.pop("type", "default"))
    longest = 0 if kind == "default" else published.count("max_position_embeddings")
    original = published.take("original_max_position_embeddings", None)
    original = given.pop("original_max_position_embeddings", None) or original or longest
    scaling = _scaling(published.refuse, kind, given, original, longest)
    if scaling is not None and older[1] is None and not by_type:
        published.refuse(f"rope_parameters: {layer_type} has {kind!r}, and this family no scaling.")
    return float(theta), scaling


def read_local(published: PublishedConfig, theta: float, older: str) -> dict[str, Any]:
    """`local_theta` and `local_scaling`, of layers with a window, whose base has an `older` attribute."""
    found, scaling = read_rotary(published, theta, SLIDING, (older, None))
    return {"local_theta": found, "local_scaling": scaling}


_LOCAL = ("local_theta", "local_scaling")


def _parameters(config: Any, theta: str = "theta", scaling: str = "scaling") -> dict[str, Any]:
    said = _scaling_attributes(getattr(config, scaling)).get("rope_scaling", {})
    return {"rope_type": "default"} | said | {"rope_theta": getattr(config, theta)}


def _scaling(
    refuse: Callable[[str], NoReturn], kind: str, given: dict[str, Any], original: int, longest: int
) -> RotaryScaling | None:
    if kind == "default":
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
    if given:
        refuse(f"rope_type={kind!r} has attributes that are not known: {given}.")
    return None if make is None else make(**found)


def _complete(kind: str, given: dict[str, Any], original: int, longest: int) -> None:
    """Say what is left out, or said in other words."""
    if "original_length" in _SCALINGS[kind][1]:
        given["original_max_position_embeddings"] = original
    if kind == "longrope":
        given["factor"] = given.get("factor") or longest / original
    if kind == "yarn":
        over, under = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if given.get("attention_factor") is None and given.get("factor") and over and under:
            given["attention_factor"] = yarn_magnitude(given["factor"], over) / yarn_magnitude(given["factor"], under)
        given |= {"beta_fast": given.get("beta_fast") or 32.0, "beta_slow": given.get("beta_slow") or 1.0}
        given.setdefault("truncate", True)


def _scaling_attributes(scaling: RotaryScaling | None) -> dict[str, Any]:
    """The older attribute for a scaling; none without one."""
    if scaling is None:
        return {}
    for kind, (make, fields) in _SCALINGS.items():
        if type(scaling) is make:
            said = {published: getattr(scaling, name) for name, published in fields.items()}
            said = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
            return {"rope_scaling": {"rope_type": kind} | {name: its for name, its in said.items() if its is not None}}
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
