"""Tables of attributes: each entry reads and writes some of a config's fields in a published configuration."""

import abc
import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ._config_types import converted, described_kind, fits, shown
from ._published_config import PublishedConfig, REQUIRED


class Entry(abc.ABC):
    """A line of a family's table of attributes."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Values of attributes that are missing, for whatever entry reads them."""
        return {}

    @abc.abstractmethod
    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The config's fields, from the configuration; raises a `ValueError` for what the family does not support."""

    @abc.abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """The configuration's attributes, from the config."""


@functools.cache
def field_types(config: type) -> Mapping[str, Any]:
    """Return the kind with which a class of configs annotates each of its fields."""
    return MappingProxyType(typing.get_type_hints(config, include_extras=True))


def read_entries(entries: Iterable[Entry], published: PublishedConfig, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a table's entries read.

    Raises a `ValueError` that names the attribute for a value that is not of its field's kind, of `kinds`.
    """
    fields, entries = dict[str, Any](), tuple(entries)
    for entry in entries:
        published.declare(entry.defaults)
    for entry in entries:
        before = published.taken
        for name, value in entry.read(published).items():
            if not fits(value, kinds[name]):
                attribute = published.names_of(value, before) or name
                published.refuse(f"{attribute}={shown(value)}: it must be {described_kind(kinds[name], value)}.")
            fields[name] = converted(value, kinds[name])
    return fields


@dataclasses.dataclass(frozen=True)
class Attribute(Entry):
    """One field, `name` in the config; `default` where the attribute is missing or null, which else is an error.

    Of several `published` names the first that is there is read. The first is written, or those in `written`.
    """

    name: str
    """The field in the config."""
    published: str | tuple[str, ...]
    """The attribute, or several."""
    default: Any = REQUIRED
    """What the field is without one."""
    written: tuple[str, ...] = ()
    """The attributes that are written, if not the first."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The field's value."""
        value = self.default
        for name in reversed(self._published):
            value = published.take(name, value)
        return {self.name: value}

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The default of the attribute, unless there must be one or it has several names."""
        is_known = self.default is not REQUIRED and len(self._published) == 1
        return {self._published[0]: self.default} if is_known else {}

    def write(self, config: Any) -> dict[str, Any]:
        """Its attribute."""
        return dict.fromkeys(self.written or self._published[:1], getattr(config, self.name))

    @property
    def _published(self) -> tuple[str, ...]:
        return (self.published,) if isinstance(self.published, str) else self.published


@dataclasses.dataclass(frozen=True)
class Count(Attribute):
    """One field by which something is counted or divided: a whole number of at `least` so many."""

    least: int = 1
    """The least that it may be."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The field's value."""
        value = self.default
        for name in reversed(self._published):
            value = published.count(name, value, self.least)
        return {self.name: value}


class Nullable(Attribute):
    """One field whose attribute may be null, which means that there is no such thing (not the `default`)."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The field's value, or None."""
        (name,) = self._published
        return {self.name: published.nullable(name, self.default)}


class Expect(Entry):
    """An attribute that must have one of these values, since this family has no other; the first is the default."""

    def __init__(self, published: str, *allowed: Any, written: bool = True):
        self.published, self.allowed, self.written = published, allowed, written

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Nothing; refuse any other value."""
        published.expect(self.published, *self.allowed)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """The first of the values, where it is `written` and not left to be the default."""
        return {self.published: self.allowed[0]} if self.written else {}


# Transformers' names of activations, and those of `nn.ACTIVATIONS`; of names for one the first is written.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh")
_ACTIVATIONS |= {"gelu_python_tanh": "gelu_tanh", "gelu_10": "clipped_gelu", "relu2": "relu_squared"}
_ACTIVATIONS |= {"hardswish": "hard_swish", "sqrtsoftplus": "sqrt_softplus", "linear": "identity"}
_ACTIVATIONS |= {name: name for name in ("relu", "leaky_relu", "relu6", "mish", "laplace", "tanh", "sigmoid")}


def names_of(activation: str) -> list[str]:
    """Transformers' names of one of `nn.ACTIVATIONS`."""
    return [name for name, its in _ACTIVATIONS.items() if its == activation]


@dataclasses.dataclass(frozen=True)
class Activation(Entry):
    """The activation of a feed-forward layer's features, or of its gate; `default` where nothing is said."""

    default: str = "silu"
    published: str = "hidden_act"
    name: str = "activation"

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The name in `nn.ACTIVATIONS`; refuse others than are known."""
        published.expect(self.published, self.default, *(name for name in _ACTIVATIONS if name != self.default))
        return {self.name: _ACTIVATIONS[published.take(self.published, self.default)]}

    def write(self, config: Any) -> dict[str, Any]:
        """One of transformers' names; raises a `ValueError` for what has none."""
        value = getattr(config, self.name)
        for name in (self.default, *_ACTIVATIONS):
            if _ACTIVATIONS[name] == value:
                return {self.published: name}
        raise ValueError(
            f"save(config={type(config).__name__}({self.name}={value!r})): no published configuration says it; "
            f"leave it at {_ACTIVATIONS[self.default]!r}."
        )


class Ignore(Entry):
    """Attributes that change nothing in this family, whatever their values; those given with a value are written."""

    def __init__(self, *published: str, **written: Any):
        self.published, self.written = (*published, *written), written

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Nothing."""
        for name in self.published:
            published.take(name, None)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """The attributes that other readers require."""
        return self.written


@dataclasses.dataclass(frozen=True)
class Switched(Entry):
    """A field that another attribute switches on and off; off it is 0."""

    number: Attribute
    switch: str

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The field's value, or 0."""
        found = self.number.read(published)
        return found if published.flag(self.switch, True) else {self.number.name: 0.0}

    def write(self, config: Any) -> dict[str, Any]:
        """Both attributes."""
        return self.number.write(config) | {self.switch: getattr(config, self.number.name) != 0}


@dataclasses.dataclass(frozen=True)
class Unpublished(Entry):
    """A field that no configuration has: in published models it has this value."""

    name: str
    value: Any
    why: str

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The one value."""
        return {self.name: self.value}

    def write(self, config: Any) -> dict[str, Any]:
        """Nothing; raises a `ValueError` for another value."""
        if (value := getattr(config, self.name)) != self.value:
            raise ValueError(
                f"save(config={type(config).__name__}({self.name}={value})): no published configuration says it, and "
                f"{self.why}; say that this is meant by {self.name}={self.value}."
            )
        return {}
