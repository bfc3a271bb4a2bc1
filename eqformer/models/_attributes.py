"""Entries of a family's attribute table. An entry reads fields of a config from a `config.json`, and writes them
back."""

import abc
import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .._annotation_checks import fits
from .._shapes import as_tuple
from ._config_types import Attributes, convert, describe_type, FieldType, format_value, PublishedConfig, REQUIRED


Fields = dict[str, Any]
"""Values of a config's fields, by field."""


class Entry(abc.ABC):
    """Base class of the lines of a family's table of attributes."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """Default values of attributes; they also hold for other entries that read the same attributes."""
        return {}

    @abc.abstractmethod
    def read(self, published: PublishedConfig) -> Fields:
        """Return fields of the config; raises a `ValueError` for values that are not supported."""

    @abc.abstractmethod
    def write(self, config: Any) -> Attributes:
        """Return attributes of the configuration from the config.

        Each entry annotates `config` with the class of configs that the entry is for, or with a protocol of the fields
        that `write` reads.
        """


@functools.cache
def field_types(config: type) -> Mapping[str, FieldType]:
    """Return the type with which a class of configs annotates each of its fields."""
    return MappingProxyType(typing.get_type_hints(config, include_extras=True))


def read_entries(entries: Iterable[Entry], published: PublishedConfig, types: Mapping[str, FieldType]) -> Fields:
    """Return the fields that a table's entries read.

    `types` are the fields' types. Raises a `ValueError` that names the attribute for a value that does not fit the type
    of its field.
    """
    fields, entries = Fields(), tuple(entries)
    for entry in entries:
        published.declare(entry.defaults)
    for entry in entries:
        with published.record_names() as names_read:
            entry_fields = entry.read(published)
        for name, value in entry_fields.items():
            if not fits(value, types[name]):
                attribute = ", ".join(published.names_with_value(names_read, value)) or name
                published.refuse(f"{attribute}={format_value(value)}: it must be {describe_type(types[name], value)}.")
            fields[name] = convert(value, types[name])
    return fields


@dataclasses.dataclass(frozen=True)
class Attribute(Entry):
    """One field of the config; without a `default`, a missing or null attribute is an error.

    Several `published` names are alternatives: the first attribute that the configuration has is read.
    """

    name: str
    """The field of the config."""
    published: str | tuple[str, ...]
    """The attribute of the configuration, or several alternatives."""
    default: object = REQUIRED
    """The field's value if the attribute is missing or null."""
    written: tuple[str, ...] = ()
    """The attributes that are written; empty: the first of `published`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        value = self.default
        for name in reversed(self.published_names):
            value = published.take(name, value)
        return {self.name: value}

    @property
    def defaults(self) -> Mapping[str, object]:
        """The attribute's default; none if the attribute is required or has several names."""
        is_known = self.default is not REQUIRED and len(self.published_names) == 1
        return {self.published_names[0]: self.default} if is_known else {}

    def write(self, config: object) -> Attributes:
        """Return the attribute."""
        return dict.fromkeys(self.written or self.published_names[:1], getattr(config, self.name))

    @property
    def published_names(self) -> tuple[str, ...]:
        """The alternatives, one or more."""
        return as_tuple(self.published)


@dataclasses.dataclass(frozen=True)
class Count(Attribute):
    """One field that is a count or a divisor: a whole number of at least `minimum`."""

    minimum: int = 1
    """The smallest value."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value."""
        value = self.default
        for name in reversed(self.published_names):
            value = published.count(name, value, self.minimum)
        return {self.name: value}


class Nullable(Attribute):
    """One field whose attribute may be null; null is read as None instead of the `default`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value, or None."""
        (name,) = self.published_names
        return {self.name: published.nullable(name, self.default)}


class Expect(Entry):
    """An attribute that must have one of these values, because the family supports no other.

    The first value is the default.
    """

    def __init__(self, published: str, *allowed: object, written: bool = True):
        self.published, self.allowed, self.written = published, allowed, written

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse any value that is not allowed."""
        published.expect(self.published, *self.allowed)
        return {}

    def write(self, config: object) -> Attributes:
        """Return the attribute with the first value, unless it is not `written`."""
        return {self.published: self.allowed[0]} if self.written else {}


# Transformers' name of an activation -> its name in `nn.ACTIVATIONS`. If several names fit, the first is written.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh")
_ACTIVATIONS |= {"gelu_python_tanh": "gelu_tanh", "gelu_10": "clipped_gelu", "relu2": "relu_squared"}
_ACTIVATIONS |= {"hardswish": "hard_swish", "sqrtsoftplus": "sqrt_softplus", "linear": "identity"}
_ACTIVATIONS |= {name: name for name in ("relu", "leaky_relu", "relu6", "mish", "laplace", "tanh", "sigmoid")}


def published_activations(activation: str) -> list[str]:
    """Return transformers' names of one of `nn.ACTIVATIONS`."""
    return [published for published, name in _ACTIVATIONS.items() if name == activation]


@dataclasses.dataclass(frozen=True)
class Activation(Entry):
    """The activation of a feed-forward layer's features, or of its gate; `default` if the attribute is missing."""

    default: str = "silu"
    published: str = "hidden_act"
    name: str = "activation"

    def read(self, published: PublishedConfig) -> Fields:
        """Return the name in `nn.ACTIVATIONS`; refuse an unknown one."""
        published.expect(self.published, self.default, *(name for name in _ACTIVATIONS if name != self.default))
        return {self.name: _ACTIVATIONS[published.text(self.published, self.default)]}

    def write(self, config: object) -> Attributes:
        """Return one of transformers' names; raises a `ValueError` for an activation without one."""
        value = getattr(config, self.name)
        for name in (self.default, *_ACTIVATIONS):
            if _ACTIVATIONS[name] == value:
                return {self.published: name}
        raise ValueError(
            f"save(config={type(config).__name__}({self.name}={value!r})): published configurations cannot express it; "
            f"leave it at {_ACTIVATIONS[self.default]!r}."
        )


class Ignore(Entry):
    """Attributes whose values have no effect on models of this family.

    Attributes that are passed as keywords are also written, with the value passed.
    """

    def __init__(self, *published: str, **written: object):
        self.published, self.written = (*published, *written), written

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field."""
        for name in self.published:
            published.take(name, None)
        return {}

    def write(self, config: object) -> Attributes:
        """Return the attributes that were passed as keywords."""
        return self.written


@dataclasses.dataclass(frozen=True)
class SwitchedAttribute(Entry):
    """A field that has an attribute of its own, `number`, and a second attribute, `switch`, that turns it on and off.

    If the switch is off, the field is 0.
    """

    number: Attribute
    switch: str

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field's value, or 0."""
        fields = self.number.read(published)
        return fields if published.flag(self.switch, True) else {self.number.name: 0.0}

    def write(self, config: object) -> Attributes:
        """Return both attributes."""
        return self.number.write(config) | {self.switch: getattr(config, self.number.name) != 0}


@dataclasses.dataclass(frozen=True)
class Unpublished(Entry):
    """A field that no attribute states, because it has one `value` in all published models."""

    name: str
    """The field of the config."""
    value: object
    """The field's value in all published models."""
    why: str
    """Why no other value can be published; the error states this reason."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the value."""
        return {self.name: self.value}

    def write(self, config: object) -> Attributes:
        """Return no attribute; raises a `ValueError` for another value."""
        if (value := getattr(config, self.name)) != self.value:
            raise ValueError(
                f"save(config={type(config).__name__}({self.name}={value})): published configurations cannot express "
                f"it, and {self.why}; to publish the model in spite of this, set {self.name}={self.value}."
            )
        return {}
