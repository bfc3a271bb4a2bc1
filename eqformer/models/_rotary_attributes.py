"""Entries for rotary positions: their base, their scaling, and the fraction of a head's channels that is rotated.

Configurations state them in one of two ways: older configurations by `rope_theta` and `rope_scaling`, newer ones by
`rope_parameters`, which may have an object for each type of layer.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from ..nn import ProportionalScaling, RotaryScaling
from . import _rotary_scaling as rotary_scaling
from ._attributes import Entry, Fields
from ._config_types import Attributes, Fraction, Positive, PublishedConfig, Size


@runtime_checkable
class WithLocalRotary(rotary_scaling.WithRotary, Protocol):
    """Fields of a config in which layers with a window have a rotary base and scaling of their own."""

    @property
    def local_theta(self) -> float: ...
    @property
    def local_scaling(self) -> RotaryScaling | None: ...


@runtime_checkable
class WithRotaryFraction(rotary_scaling.WithRotary, Protocol):
    """Fields of a config that rotates a fraction of a head's channels."""

    @property
    def rotary_fraction(self) -> float: ...


@runtime_checkable
class WithLocalRotaryFraction(WithLocalRotary, Protocol):
    """Fields of a config in which layers with and without a window rotate different fractions of a head's channels."""

    @property
    def rotary_fraction(self) -> float: ...
    @property
    def local_rotary_fraction(self) -> float: ...


@runtime_checkable
class WithTemperature(rotary_scaling.WithRotary, Protocol):
    """Fields of a config whose scaling multiplies attention scores."""

    @property
    def temperature(self) -> float: ...


@runtime_checkable
class WithGrowth(rotary_scaling.WithRotary, Protocol):
    """Fields of a config whose attention scores grow with the query's position."""

    @property
    def growth(self) -> float: ...
    @property
    def growth_every(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class RotaryPositions(Entry):
    """Base and scaling of rotary positions."""

    theta: float = 10_000.0
    """The base if the attribute is missing."""
    layer_type: str | None = None
    """The type of layer whose parameters are read, in families whose `rope_parameters` may be by type of layer."""
    required: bool = False
    """Whether `rope_type` must be stated (`"default"` for no scaling), because transformers' default is a scaling."""
    skipped: tuple[str, ...] = ()
    """Names in `rope_parameters` that other entries read, or that have no effect."""
    older: str = "rope_theta"
    """The attribute of older configurations for the base."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`."""
        is_stated = not self.required or rotary_scaling.either_rotary_parameters(published)
        if not is_stated and published.take("rope_parameters") is None:
            published.refuse(
                "rope_parameters=None: transformers reads it as a scaling of this family's own; state the scaling, or "
                "rope_type='default' for no scaling."
            )
        older = (self.older, "rope_scaling")
        theta, scaling = read_rotary(published, self.theta, self.layer_type, older, self.skipped)
        return {"theta": theta, "scaling": scaling}

    def write(self, config: rotary_scaling.WithRotary) -> Attributes:
        """Return the older attributes for base and scaling, which every version of transformers reads."""
        attributes = {self.older: config.theta} | rotary_scaling.scaling_attributes(config)
        return {"rope_scaling": {"rope_type": "default"}} | attributes if self.required else attributes


@dataclasses.dataclass(frozen=True)
class RotaryByType(Entry):
    """Base and scaling of rotary positions, for layers with full attention and for layers with sliding windows."""

    theta: float
    """The base of layers without a window if the attribute is missing."""
    local_theta: float
    """The base of layers with a window if the attribute is missing."""
    older: tuple[str, str] = ("rope_theta", "rope_local_base_freq")
    """The attributes of older configurations for both bases."""
    scaled: bool = True
    """Whether older configurations may have a `rope_scaling`, which applies to layers without a window."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta`, `scaling`, `local_theta` and `local_scaling`.

        Refuse configurations that releases of transformers read differently.
        """
        self._check(published, _parameters_by_type(published))
        older_scaling = "rope_scaling" if self.scaled else None
        theta, scaling = read_rotary(published, self.theta, rotary_scaling.FULL, (self.older[0], older_scaling))
        return {"theta": theta, "scaling": scaling} | read_local_rotary(published, self.local_theta, self.older[1])

    def _check(self, published: PublishedConfig, by_type: Attributes) -> None:
        older = rotary_scaling.rotary_parameters(published, "rope_scaling") if self.scaled else {}
        if older and not by_type and "rope_type" not in older:
            published.refuse(f"rope_scaling={older}: newer transformers does not read `type` here; state rope_type.")
        has_theta = [
            _parameters_of_type(by_type, layer_type).get("rope_theta") is not None
            for layer_type in rotary_scaling.TYPES
        ]
        name, local_name = self.older
        if name != local_name or all(has_theta):
            return
        # One attribute would state both bases, but newer transformers reads it only for layers without a window.
        if (theta := published.read(name, Positive, self.theta)) != self.theta:
            published.refuse(
                f"{name}={theta}: newer transformers takes {self.theta} for layers with a window; state both bases in "
                "rope_parameters, by type of layer."
            )

    def write(self, config: WithLocalRotary) -> Attributes:
        """Return the older attributes, and `rope_parameters` by type of layer, which alone can state a local
        scaling."""
        # If both older attributes have the same name, the attribute gets the base of layers without a window.
        attributes = {self.older[1]: config.local_theta} | {self.older[0]: config.theta}
        attributes |= rotary_scaling.scaling_attributes(config) if self.scaled else {}
        return attributes | _write_by_type(config, _write_parameters(config))


@dataclasses.dataclass(frozen=True)
class RotaryWithTemperature(Entry):
    """Rotary positions with YaRN, whose `mscale_all_dim` also sets a factor of the attention scores (DeepSeek)."""

    positions: RotaryPositions = RotaryPositions()
    """The entry for base and scaling."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta`, `scaling` and `temperature`, which is `mscale_all_dim`, or 0 without a scaling."""
        parameters, fields = rotary_scaling.either_rotary_parameters(published), self.positions.read(published)
        stated = parameters.get("mscale_all_dim")
        temperature = 0.0 if fields["scaling"] is None or stated is None else stated
        return fields | {"temperature": temperature}

    def write(self, config: WithTemperature) -> Attributes:
        """Return the older attributes with the temperature; raise a `ValueError` for a temperature without a
        scaling."""
        attributes, temperature = self.positions.write(config), config.temperature
        if not temperature:
            return attributes
        if config.scaling is None:
            raise ValueError(
                f"save(config={type(config).__name__}(scaling=None, temperature={temperature})): the temperature is "
                "published within the scaling, and has no effect without one; give a scaling, or temperature=0."
            )
        # Without a stated magnitude (`attention_factor`), readers would compute the magnitude from `mscale` and
        # `mscale_all_dim`. So `mscale` is written only beside a stated magnitude.
        names = ["mscale_all_dim", *(["mscale"] if "attention_factor" in attributes["rope_scaling"] else [])]
        return attributes | {"rope_scaling": attributes["rope_scaling"] | dict.fromkeys(names, temperature)}


_PART = "partial_rotary_factor"


@dataclasses.dataclass(frozen=True)
class PartRotaryByType(Entry):
    """Base, scaling and rotated fraction of a head's channels, for layers without and with a window (Laguna).

    The attribute is `rope_parameters` by type of layer.
    """

    thetas: tuple[float, float]
    """The bases of both types of layer if the attribute is missing."""
    fractions: tuple[float, float]
    """The fractions of both types of layer if the attribute is missing."""
    fraction: float = 1.0
    """The fraction of a layer type whose parameters state neither a fraction nor a scaling. If the parameters state a
    scaling but no fraction, the fraction is 1.0."""
    older: tuple[str, str] = ("rope_theta", "rope_local_base_freq")
    """The attributes in which publishers' own programs state both bases. Without `rope_parameters`, their values must
    be `thetas`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta`, `scaling`, `rotary_fraction`, and the same fields with `local_` for layers with a window."""
        by_type, fields = _parameters_by_type(published), Fields()
        missing = [layer_type for layer_type in rotary_scaling.TYPES if not _parameters_of_type(by_type, layer_type)]
        if by_type and missing and missing[0] in (published.listed("layer_types", str) or rotary_scaling.TYPES):
            published.refuse(f"rope_parameters do not state {missing[0]}; state both types of layer.")
        for number, (layer_type, prefix) in enumerate(zip(rotary_scaling.TYPES, ("", "local_"), strict=True)):
            parameters = _parameters_of_type(by_type, layer_type)
            is_scaled = parameters.get("rope_type", "default") != "default"
            default = (1.0 if is_scaled else self.fraction) if parameters else self.fractions[number]
            older, default_theta = self.older[number], self.thetas[number]
            theta, scaling = read_rotary(published, default_theta, layer_type, (older, None), (_PART,))
            if not by_type and theta != default_theta:
                published.refuse(
                    f"{older}={theta}: transformers takes {default_theta} without rope_parameters; state the base in "
                    "rope_parameters, by type of layer."
                )
            fraction = _first(parameters.get(_PART), default)
            fields |= {f"{prefix}theta": theta, f"{prefix}scaling": scaling, f"{prefix}rotary_fraction": fraction}
        return fields

    def write(self, config: WithLocalRotaryFraction) -> Attributes:
        """Return the parameters by type of layer."""
        attributes = _write_by_type(config, _write_parameters(config))
        for layer_type, fraction in zip(rotary_scaling.TYPES, (config.rotary_fraction, config.local_rotary_fraction)):
            attributes["rope_parameters"][layer_type][_PART] = fraction
        return attributes


_GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class RotaryWithGrowth(Entry):
    """Rotary positions, and the growth of attention scores with the query's position (Ministral 3)."""

    positions: Entry = RotaryPositions(required=True, skipped=_GROWTH)
    """The entry for base and scaling."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the fields of `positions`, `growth` and `growth_every`; refuse a growth without an original length."""
        parameters = rotary_scaling.either_rotary_parameters(published)
        growth, every = parameters.get("llama_4_scaling_beta"), parameters.get(rotary_scaling.ORIGINAL)
        if growth and every is None:
            published.refuse(f"llama_4_scaling_beta={growth}: it needs original_max_position_embeddings.")
        growth, every = 0.0 if growth is None else growth, 1 if every is None else every
        return self.positions.read(published) | {"growth": growth, "growth_every": every}

    def write(self, config: WithGrowth) -> Attributes:
        """Return `rope_parameters`, which has one original length.

        Raises a `ValueError` if the growth and the scaling have different lengths.
        """
        attributes = self.positions.write(config)
        parameters, every = dict(attributes.pop("rope_scaling", {})), config.growth_every
        if parameters.get(rotary_scaling.ORIGINAL, every) != every:
            raise ValueError(
                f"save(config={type(config).__name__}(growth_every={every})): published configurations have one length "
                f"for growth_every and {config.scaling}; set growth_every to the scaling's original_length."
            )
        parameters |= {"rope_theta": config.theta, "llama_4_scaling_beta": config.growth}
        return {"rope_parameters": {"rope_type": "default"} | parameters | {rotary_scaling.ORIGINAL: every}}


@dataclasses.dataclass(frozen=True)
class ProportionalRotaryByType(Entry):
    """Rotary positions by type of layer, where layers without a window may rotate a part of the pairs (Gemma 4)."""

    part: float = 0.25
    """The part of the pairs that layers without a window rotate if the attribute is missing."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta`, `scaling`, `local_theta` and `local_scaling`."""
        by_type = _parameters_by_type(published)
        missing = [layer_type for layer_type in rotary_scaling.TYPES if not _parameters_of_type(by_type, layer_type)]
        if by_type and missing:
            published.refuse(f"rope_parameters do not state {missing[0]}; state both types of layer.")
        local = read_local_rotary(published, 10_000.0, "rope_local_base_freq")
        parameters = dict(_parameters_of_type(by_type, rotary_scaling.FULL) if by_type else self._default)
        if parameters.pop("rope_type", "default") != "proportional":
            theta, scaling = read_rotary(published, 1_000_000.0, rotary_scaling.FULL)
            return {"theta": theta, "scaling": scaling} | local
        defaults = {"rope_theta": 1_000_000.0, "partial_rotary_factor": 1.0, "factor": 1.0}
        theta, part, factor = (_first(parameters.pop(name, None), default) for name, default in defaults.items())
        scaling = ProportionalScaling(part, factor)
        if unknown := rotary_scaling.unknown_parameters(parameters):
            published.refuse(f"rope_type='proportional' has attributes that are not known: {unknown}.")
        return {"theta": theta, "scaling": scaling} | local

    def write(self, config: WithLocalRotary) -> Attributes:
        """Return the parameters by type of layer."""
        scaling = config.scaling
        if not isinstance(scaling, ProportionalScaling):
            return _write_by_type(config, _write_parameters(config))
        parameters = {"rope_type": "proportional", "rope_theta": config.theta}
        return _write_by_type(config, parameters | {"partial_rotary_factor": scaling.part, "factor": scaling.factor})

    @property
    def _default(self) -> Attributes:
        """The parameters of layers without a window in configurations without parameters."""
        return {"rope_type": "proportional", "partial_rotary_factor": self.part, "rope_theta": 1_000_000.0}


@dataclasses.dataclass(frozen=True)
class RotaryFraction(Entry):
    """The part of a head's channels that is rotated; families without this entry rotate all channels."""

    default: float = 1.0
    """The part if the attribute is missing."""
    inside: bool = False
    """Whether the part is also written into `rope_parameters`, because transformers has a default of its own there."""
    published: str = _PART
    """The attribute outside of `rope_parameters`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary_fraction`, which is an attribute of its own or within `rope_parameters`."""
        outside = published.read(self.published, Fraction, self.default)
        inside = rotary_scaling.either_rotary_parameters(published).get(_PART)
        if inside is not None:
            published.take(_PART, None)  # `read_rotary` adds it to the attributes
        return {"rotary_fraction": _first(inside, outside)}

    def write(self, config: WithRotaryFraction) -> Attributes:
        """Return the attribute."""
        attribute = {self.published: config.rotary_fraction}
        # Transformers would read an older `rope_scaling` first.
        newer = {"rope_scaling": None, "rope_parameters": _write_parameters(config) | attribute}
        return attribute | (newer if self.inside else {})


def _parameters_by_type(published: PublishedConfig) -> Attributes:
    """Return `rope_parameters` by type of layer; refuse parameters without types, which transformers does not read."""
    parameters = rotary_scaling.rotary_parameters(published, "rope_parameters")
    if parameters and not _types_in(parameters):
        types = ", ".join(rotary_scaling.TYPES)
        published.refuse(f"rope_parameters={parameters}: in this family they must be stated by type of layer: {types}.")
    return parameters


def _parameters_of_type(parameters: Attributes, layer_type: str) -> Attributes:
    """Return the parameters of a type of layer; an empty object if the type has none of its own."""
    return parameters[layer_type] if layer_type in _types_in(parameters) else {}


def _types_in(parameters: Attributes) -> set[str]:
    """Return the types of layer that have parameters of their own."""
    return {name for name, value in parameters.items() if isinstance(value, dict)}


def _first(*values: object) -> Any:
    """Return the first value that is not null."""
    return next((value for value in values if value is not None), None)


def read_rotary(
    published: PublishedConfig,
    default_theta: float = 10_000.0,
    layer_type: str | None = None,
    older: tuple[str, str | None] = ("rope_theta", "rope_scaling"),
    skipped: tuple[str, ...] = (),
) -> tuple[float, RotaryScaling | None]:
    """Return base and scaling of rotary positions.

    Args:
        published: The configuration.
        default_theta: The base if the attribute is missing.
        layer_type: The type of layer whose parameters are read, if `rope_parameters` are by type.
        older: The older attributes for base and scaling. If the second is None, a scaling is refused unless it is
            stated by type of layer.
        skipped: Names in `rope_parameters` that are ignored.
    """
    parameters = rotary_scaling.rotary_parameters(published, "rope_parameters")
    types = _types_in(parameters)
    by_type = bool(types and layer_type)
    if types and layer_type:
        parameters = _select_type(published, parameters, types, layer_type)
    theta = published.read(older[0], Positive, None)
    older_scaling = rotary_scaling.rotary_parameters(published, older[1]) if older[1] else {}
    if parameters and older_scaling and _contradicts(older_scaling, parameters, may_add=bool(types)):
        published.refuse(f"{older[1]}={older_scaling}, but rope_parameters have {parameters}; give one of them.")
    parameters = {name: value for name, value in (parameters or older_scaling).items() if name not in skipped}
    if (part := parameters.pop("partial_rotary_factor", None)) is not None:
        published.add("partial_rotary_factor", part)
    theta = _first(parameters.pop("rope_theta", None), theta, default_theta)
    rope_type = parameters.pop("rope_type", parameters.pop("type", None))
    longest = 0 if rope_type in (None, "default") else published.count("max_position_embeddings")
    # The original length may be an attribute of the configuration (outer) and of the rotary parameters (inner).
    outer, inner = published.read(rotary_scaling.ORIGINAL, Size, None), parameters.pop(rotary_scaling.ORIGINAL, None)
    # If parameters are by type of layer, transformers reads only the inner length; otherwise it prefers the outer one.
    original = _first(inner, longest) if by_type else _first(outer, inner, longest)
    has_original = rope_type in ("yarn", "llama3", "longrope", "su")
    if has_original and {_first(outer, original), _first(inner, original)} != {original}:
        published.refuse(
            f"{rotary_scaling.ORIGINAL}={outer}, but {_first(inner, longest)} with rope_type={rope_type!r}; "
            "give one value."
        )
    scaling = rotary_scaling.make_scaling(published.refuse, rope_type, parameters, original, longest)
    if scaling is not None and older[1] is None and not types:
        published.refuse(f"rope_parameters: {layer_type} has {rope_type!r}, but this family has no scaling.")
    return theta, scaling


def _select_type(published: PublishedConfig, parameters: Attributes, types: set[str], layer_type: str) -> Attributes:
    """Return the parameters of one type of layer; refuse unknown types."""
    if unknown := types - {*rotary_scaling.TYPES}:
        published.refuse(f"rope_parameters are by type of layer, but {sorted(unknown)} are not types of layer.")
    # Transformers keeps a scaling beside the types without using it, so only its name is checked here.
    if (rope_type := parameters.get("rope_type", "default")) not in rotary_scaling.ROPE_TYPES:
        published.refuse(f"rope_type={rope_type!r} is not known.")
    of_type = dict(_parameters_of_type(parameters, layer_type))
    if of_type.get("rope_type") == "yarn":
        # Transformers reads `truncate` of YaRN beside the types, never within them.
        of_type["truncate"] = _first(parameters.get("truncate"), True)
    return of_type


def _contradicts(older: Attributes, newer: Attributes, *, may_add: bool) -> bool:
    """Return whether two objects with a scaling contradict each other.

    `type`, the older name of `rope_type`, counts as `rope_type`. With `may_add`, the newer object may state more than
    the older one; otherwise both must be equal.
    """
    older, newer = ({"rope_type": x.get("type")} | dict(x) | {"type": None} for x in (older, newer))
    if may_add:
        return any(newer.get(name) != value for name, value in older.items())
    return older != newer


def read_local_rotary(published: PublishedConfig, theta: float, older: str) -> Attributes:
    """Return `local_theta` and `local_scaling` of layers with a window; `older` is the older attribute for the base."""
    local_theta, scaling = read_rotary(published, theta, rotary_scaling.SLIDING, (older, None))
    return {"local_theta": local_theta, "local_scaling": scaling}


def _write_by_type(config: WithLocalRotary, full: Attributes) -> Attributes:
    """Return `rope_parameters` by type of layer and, if it is false, `truncate` beside the types.

    `full` are the parameters of layers without a window.
    """
    by_type = {
        rotary_scaling.SLIDING: _write_parameters(config, "local_theta", "local_scaling"),
        rotary_scaling.FULL: full,
    }
    truncates = {parameters["truncate"] for parameters in by_type.values() if "truncate" in parameters}
    if len(truncates) == 2:
        raise ValueError(
            f"save(config={type(config).__name__}(scaling={config.scaling}, local_scaling={config.local_scaling})): "
            "published configurations have one `truncate` for both; give both the same."
        )
    return {"rope_parameters": by_type if False not in truncates else by_type | {"truncate": False}}


def _write_parameters(config: rotary_scaling.WithRotary, theta: str = "theta", scaling: str = "scaling") -> Attributes:
    parameters = rotary_scaling.scaling_attributes(config, scaling).get("rope_scaling", {})
    return {"rope_type": "default"} | parameters | {"rope_theta": getattr(config, theta)}
