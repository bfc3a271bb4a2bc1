"""Tables of attributes: each entry reads and writes some of a config's fields in a published configuration."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

from ._config import PublishedConfig, REQUIRED


class Entry(abc.ABC):
    """A line of a family's table of attributes."""

    @abc.abstractmethod
    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """What the configuration says, under our names; raises a `ValueError` for what the family has not."""

    @abc.abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """The same the other way: attributes of a configuration."""


@dataclasses.dataclass(frozen=True)
class Attribute(Entry):
    """One number, `name` with us; missing or null, it is the `default`, and without one must be there.

    Of several `published` names the first that is there is read. The first is written, or those that are `written`.
    """

    name: str
    published: str | tuple[str, ...]
    default: Any = REQUIRED
    convert: Callable[[Any], Any] | None = None
    written: tuple[str, ...] = ()

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The number's value."""
        value = self.default
        for name in reversed(self._published):
            value = published.take(name, value)
        return {self.name: value if self.convert is None else self.convert(value)}

    def write(self, config: Any) -> dict[str, Any]:
        """Its attribute."""
        return dict.fromkeys(self.written or self._published[:1], getattr(config, self.name))

    @property
    def _published(self) -> tuple[str, ...]:
        return (self.published,) if isinstance(self.published, str) else self.published


class Count(Attribute):
    """One number by which something is counted or divided: a whole number of at least 1."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The number's value."""
        value = self.default
        for name in reversed(self._published):
            value = published.count(name, value)
        return {self.name: value}


class Nullable(Attribute):
    """One number that may be null, which says that there is no such thing, and not the `default`."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The number's value, or None."""
        (name,) = self._published
        return {self.name: published.nullable(name, self.default)}


class Expect(Entry):
    """An attribute that has one of these values, of which the first is the default, or another model is meant."""

    def __init__(self, published: str, *allowed: Any, written: bool = True):
        self.published, self.allowed, self.written = published, allowed, written

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Nothing; refuse any other value."""
        published.expect(self.published, *self.allowed)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """The first of the values, where it is `written` and not left to be the default."""
        return {self.published: self.allowed[0]} if self.written else {}


class Ignore(Entry):
    """Attributes that change nothing of this family, whatever they are; those with values are written with them."""

    def __init__(self, *published: str, **written: Any):
        self.published, self.written = (*published, *written), written

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Nothing."""
        for name in self.published:
            published.take(name, None)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """What readers elsewhere ask for."""
        return self.written


@dataclasses.dataclass(frozen=True)
class Switched(Entry):
    """A number that another attribute switches on and off; off it is 0."""

    number: Attribute
    switch: str

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The number's value, or 0."""
        found = self.number.read(published)
        return found if published.take(self.switch, True) else {self.number.name: 0.0}

    def write(self, config: Any) -> dict[str, Any]:
        """Both attributes."""
        return self.number.write(config) | {self.switch: getattr(config, self.number.name) != 0}


@dataclasses.dataclass(frozen=True)
class Unpublished(Entry):
    """A number that no configuration says: what is published has this value."""

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
