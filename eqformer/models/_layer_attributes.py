"""Entries for attributes that differ between layers: windows, rotary positions, experts, kinds of attention."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Protocol, runtime_checkable

from ._attributes import Entry, Fields
from ._config_types import Attributes, Index, LayerCount, Length, PublishedConfig, Range
from ._rotary_scaling import FULL, SLIDING


LAYERS = "num_hidden_layers"
_ZeroOrOne = Annotated[int, Range(0, 1)]
_FLAG = bool | _ZeroOrOne
LayerChoice = Callable[[PublishedConfig, int], Iterable[int]]
"""A function from a configuration and the number of layers to the indices of some layers."""


@runtime_checkable
class WithLayers(Protocol):
    """Fields of a config with layers."""

    @property
    def layers(self) -> int: ...


@runtime_checkable
class WithWindow(Protocol):
    """Fields of a config with one window for all layers."""

    @property
    def window(self) -> int | None: ...


@runtime_checkable
class WithWindows(WithLayers, WithWindow, Protocol):
    """Fields of a config in which only some layers have the window."""

    @property
    def window_layers(self) -> tuple[int, ...]: ...


@runtime_checkable
class WithoutRotary(WithLayers, Protocol):
    """Fields of a config that has layers without rotary positions."""

    @property
    def no_rotary_layers(self) -> tuple[int, ...]: ...


def layers_of(published: PublishedConfig) -> int:
    """Return the number of layers; refuse a number so large that a list with an item per layer would fill memory."""
    return published.read(LAYERS, LayerCount)


def every(period: int, layers: int) -> tuple[int, ...]:
    """Return the indices of every `period`-th of `layers` layers."""
    return tuple(range(period - 1, layers, period))


def all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """Return the indices of all layers but every `period`-th."""
    return tuple(layer for layer in range(layers) if (layer + 1) % period)


@dataclasses.dataclass(frozen=True)
class Period:
    """A `LayerChoice` of every `period`-th layer or, with `but`, of all other layers.

    `published` names attributes that may state another period; if a configuration has several of them, the last one in
    `published` applies.
    """

    period: int
    published: tuple[str, ...] = ()
    but: bool = False

    def __call__(self, published: PublishedConfig, layers: int) -> tuple[int, ...]:
        """Return the indices of these layers; raises a `ValueError` for an attribute that is not a count."""
        period = self.period
        for name in self.published:
            period = published.count(name, period)
        return (all_but_every if self.but else every)(period, layers)


def check_layer_types(published: PublishedConfig, name: str, types: Sequence[str], known: Collection[str]) -> None:
    """Refuse the attribute `name` unless it has one of the known types for each layer."""
    layers = layers_of(published)
    if len(types) != layers or {*types} - {*known}:
        published.refuse(f"{name}={types} must have {layers} items, each one of {sorted(known)}.")


def flagged_layers(published: PublishedConfig, name: str) -> tuple[int, ...] | None:
    """Return the indices of the layers with a 1 in the attribute `name`, a flag for each layer; None without it."""
    flags = published.listed(name, _ZeroOrOne)
    return None if flags is None else indices_of_flags(published, name, flags)


def indices_of_flags(published: PublishedConfig, name: str, flags: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of layers whose flag is not 0; refuse the attribute `name` unless every layer has a flag."""
    if len(flags) != (layers := layers_of(published)):
        published.refuse(f"{name}={flags} must have a flag for each of the model's {layers} layers.")
    return tuple(layer for layer, flag in enumerate(flags) if flag)


@dataclasses.dataclass(frozen=True)
class LayerTypes(Entry):
    """`layer_types`, a list of two types: the config's field `name` has the indices of the layers of the first type.

    `default` chooses the layers of the first type if the list is missing or, with `empty`, if the list is empty.
    `published` has the two types' names in the family's published files if they differ from `types`. Both kinds of
    names can be read; the published names are written.
    """

    name: str
    types: tuple[str, str]
    default: LayerChoice
    empty: bool = False
    published: tuple[str, str] | None = None

    def read(self, published: PublishedConfig) -> Fields:
        """Return the indices of the first type's layers; refuse lists of other lengths and types."""
        layers, types = layers_of(published), published.listed("layer_types", str, empty=self.empty)
        default = {*self.default(published, layers)}
        if types is None:
            types = [self.types[0] if layer in default else self.types[1] for layer in range(layers)]
        elif self.published is not None:
            type_of = dict(zip(self.published, self.types))
            types = [type_of.get(name, name) for name in types]
        check_layer_types(published, "layer_types", types, self.types)
        return {self.name: tuple(layer for layer, name in enumerate(types) if name == self.types[0])}

    def write(self, config: WithLayers) -> Attributes:
        """Return a type for each layer."""
        chosen, (first_type, second_type) = getattr(config, self.name), self.published or self.types
        return {"layer_types": [first_type if layer in chosen else second_type for layer in range(config.layers)]}


_WINDOW = "sliding_window"


def _check_window(published: PublishedConfig, window: object) -> int | None:
    """Return a window or None; refuse a window that is not a number of tokens."""
    return None if window is None else published.checked(_WINDOW, window, Length)


def _read_nullable_window(published: PublishedConfig, missing: int | None) -> int | None:
    return _check_window(published, published.nullable(_WINDOW, missing))


def _read_switched_window(published: PublishedConfig, missing: int | None) -> int | None:
    """Return the window; None if windows are switched off, whatever `sliding_window` is."""
    is_on, window = published.flag("use_sliding_window", False), published.nullable(_WINDOW, missing)
    return _check_window(published, window) if is_on else None


@dataclasses.dataclass(frozen=True)
class Windows(Entry):
    """The entry for `window` and `window_layers`, the layers with a window."""

    window: int | None
    """The window if `sliding_window` is missing."""
    default: LayerChoice
    """The layers with a window if `layer_types` is missing."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields; refuse layers with a window if there is no window."""
        return self._read(published, _check_window(published, published.take(_WINDOW, self.window)))

    def write(self, config: WithWindows) -> Attributes:
        """Return both attributes."""
        return {"sliding_window": config.window} | self._types(self.default).write(config)

    def _read(self, published: PublishedConfig, window: int | None) -> Fields:
        fields = self._types(self.default if window is not None else self._no_layers).read(published)
        if fields["window_layers"] and window is None:
            types = published.take("layer_types", None)
            published.refuse(f"layer_types={types} has sliding layers, but no window is in use.")
        return {"window": window} | fields

    def _no_layers(self, published: PublishedConfig, layers: int) -> tuple[int, ...]:
        # Ignore the layers, but read their attributes, because unread attributes are refused as unknown.
        self.default(published, layers)
        return ()

    def _types(self, default: LayerChoice) -> LayerTypes:
        return LayerTypes("window_layers", (SLIDING, FULL), default)


class NullableWindows(Windows):
    """`Windows` in families whose `sliding_window` may be null; null means that no layer has a window."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        return self._read(published, _read_nullable_window(published, self.window))


class SwitchedWindows(Windows):
    """`Windows` that have an effect only if `use_sliding_window` is true; `window` is None if no layer has a window."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        fields = self._read(published, _read_switched_window(published, self.window))
        return fields if fields["window_layers"] else fields | {"window": None}

    def write(self, config: WithWindows) -> Attributes:
        """Return both attributes, and `use_sliding_window`."""
        return super().write(config) | {"use_sliding_window": config.window is not None}


@dataclasses.dataclass(frozen=True)
class LaterLayers:
    """A `LayerChoice` of all layers but the first `max_window_layers`; `count` is the default of this attribute."""

    count: int

    def __call__(self, published: PublishedConfig, layers: int) -> range:
        return range(published.count("max_window_layers", self.count, 0), layers)


class LateWindows(SwitchedWindows):
    """`SwitchedWindows` of all layers but the first `max_window_layers`."""

    def __init__(self, window: int, first: int):
        super().__init__(window, LaterLayers(first))

    def write(self, config: WithWindows) -> Attributes:
        """Return both attributes, `use_sliding_window`, and the first layer with a window."""
        first = min(config.window_layers, default=config.layers)
        return super().write(config) | {"max_window_layers": first}


@dataclasses.dataclass(frozen=True)
class SwitchedWindow(Entry):
    """The `window` of all layers; None unless `use_sliding_window` is true."""

    window: int

    def read(self, published: PublishedConfig) -> Fields:
        """Return `window`."""
        return {"window": _read_switched_window(published, self.window)}

    def write(self, config: WithWindow) -> Attributes:
        """Return the window, and `use_sliding_window`."""
        return {"sliding_window": config.window, "use_sliding_window": config.window is not None}


@dataclasses.dataclass(frozen=True)
class NoRotaryLayers(Entry):
    """The layers without rotary positions, from the list `no_rope_layers`.

    If the list is missing or, with `empty`, if the list is empty, every fourth layer has no rotary positions;
    `no_rope_layer_interval` may state another period.
    """

    empty: bool = False

    def read(self, published: PublishedConfig) -> Fields:
        """Return `no_rotary_layers`; refuse a list of another length."""
        return {"no_rotary_layers": self(published, layers_of(published))}

    def write(self, config: WithoutRotary) -> Attributes:
        """Return `no_rope_layers`, which in spite of its name has a 1 for each layer with rotary positions."""
        return {"no_rope_layers": [int(layer not in config.no_rotary_layers) for layer in range(config.layers)]}

    def __call__(self, published: PublishedConfig, layers: int) -> tuple[int, ...]:
        """Return the layers' indices; this is a `LayerChoice` for other entries too."""
        by_default = Period(4, ("no_rope_layer_interval",))(published, layers)
        rotated = published.listed("no_rope_layers", _FLAG, empty=self.empty)
        if rotated is None:
            return by_default
        if len(rotated) != layers:
            published.refuse(f"no_rope_layers={rotated} must have a flag for each of the model's {layers} layers.")
        return tuple(layer for layer in range(layers) if not rotated[layer])


@dataclasses.dataclass(frozen=True)
class ListedLayers(Entry):
    """A list of layers' indices; `default` chooses the layers if the attribute is missing."""

    name: str
    published: str
    default: LayerChoice

    def read(self, published: PublishedConfig) -> Fields:
        """Return the indices."""
        default, stated = self.default(published, layers_of(published)), published.listed(self.published, Index)
        return {self.name: tuple(default if stated is None else stated)}

    def write(self, config: object) -> Attributes:
        """Return the list."""
        return {self.published: list(getattr(config, self.name))}


@dataclasses.dataclass(frozen=True)
class AllLayers(Entry):
    """A list with the kind of each layer; every layer must be of the kind `kind`."""

    published: str
    kind: str

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse other kinds."""
        layers, stated = layers_of(published), published.listed(self.published)
        if stated is not None and stated != [self.kind] * layers:
            published.refuse(f"{self.published}={stated}: in this family, all {layers} layers must be {self.kind!r}.")
        return {}

    def write(self, config: object) -> Attributes:
        """Return no attribute."""
        return {}
