"""How configurations say which layers are of which kind: windows, rotary positions, experts, attention."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from ._attributes import Entry
from ._config_types import Index, LayerCount, Length, Range
from ._published_config import PublishedConfig
from ._rotary_attributes import FULL, SLIDING


LAYERS = "num_hidden_layers"
_MAY_TURN = bool | Annotated[int, Range(0, 1)]
By = Callable[[PublishedConfig, int], Iterable[int]]  # (configuration, number of layers) -> the numbers of some of them


def layers_of(published: PublishedConfig) -> int:
    """Return the number of layers, which is checked before anything is listed for each of them."""
    return published.read(LAYERS, LayerCount)


def every(period: int, layers: int) -> tuple[int, ...]:
    """The numbers of every `period`-th of `layers` layers."""
    return tuple(range(period - 1, layers, period))


def all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """The numbers of all others."""
    return tuple(number for number in range(layers) if (number + 1) % period)


@dataclasses.dataclass(frozen=True)
class Period:
    """Every `period`-th layer or, with `but`, all others: what a configuration without a list of its layers means.

    The last attribute of `published` that is there replaces `period`.
    """

    period: int
    published: tuple[str, ...] = ()
    but: bool = False

    def __call__(self, published: PublishedConfig, layers: int) -> tuple[int, ...]:
        """The numbers of these layers; raises a `ValueError` for an attribute that is no count."""
        period = self.period
        for name in self.published:
            period = published.count(name, period)
        return (all_but_every if self.but else every)(period, layers)


@dataclasses.dataclass(frozen=True)
class LayerTypes(Entry):
    """`layer_types`: the layers of the first type are in the config's field `name`, the others are of the second type.

    `default` gives them where there is no list or, with `empty`, an empty one. `published` are other names of the two
    types, which are read too, and written.
    """

    name: str
    types: tuple[str, str]
    default: By
    empty: bool = False
    published: tuple[str, str] | None = None

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The numbers of the layers; refuse lists of other lengths and types."""
        layers, types = layers_of(published), published.listed("layer_types", str, empty=self.empty)
        own = {*self.default(published, layers)}
        if types is None:
            types = [self.types[number not in own] for number in range(layers)]
        elif self.published is not None:
            its = dict(zip(self.published, self.types))
            types = [its.get(name, name) for name in types]
        if len(types) != layers or set(types) - {*self.types}:
            known = " or ".join(map(repr, sorted(self.types)))
            published.refuse(f"layer_types={types} must name {layers} layers, each {known}.")
        return {self.name: tuple(number for number, name in enumerate(types) if name == self.types[0])}

    def write(self, config: Any) -> dict[str, Any]:
        """A type for each layer."""
        own, types = getattr(config, self.name), self.published or self.types
        return {"layer_types": [types[number not in own] for number in range(config.layers)]}


_WINDOW = "sliding_window"


def _counted(published: PublishedConfig, window: Any) -> int | None:
    """A window that there is, which counts tokens."""
    return None if window is None else published.checked(_WINDOW, window, Length)


def _nullable(published: PublishedConfig, missing: int | None) -> int | None:
    return _counted(published, published.nullable(_WINDOW, missing))


def _switched(published: PublishedConfig, missing: int | None) -> int | None:
    """None where windows are switched off, whatever is said of them."""
    is_on, window = published.flag("use_sliding_window", False), published.nullable(_WINDOW, missing)
    return _counted(published, window) if is_on else None


@dataclasses.dataclass(frozen=True)
class Windows(Entry):
    """The `window`, and `window_layers`, the layers that have it; `default`s where the attributes are missing."""

    window: int | None
    default: By

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both fields; refuse layers with a window where no window is in use."""
        return self._read(published, _counted(published, published.take(_WINDOW, self.window)))

    def write(self, config: Any) -> dict[str, Any]:
        """Both attributes."""
        return {"sliding_window": config.window} | self._types(self.default).write(config)

    def _read(self, published: PublishedConfig, window: int | None) -> dict[str, Any]:
        found = self._types(lambda *given: tuple(self.default(*given)) * (window is not None)).read(published)
        if found["window_layers"] and window is None:
            types = published.take("layer_types", None)
            published.refuse(f"layer_types={types} has sliding layers, and no window is in use.")
        return {"window": window} | found

    def _types(self, default: By) -> LayerTypes:
        return LayerTypes("window_layers", (SLIDING, FULL), default)


class NullableWindows(Windows):
    """`Windows` that a configuration may have none of, by a null."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both fields."""
        return self._read(published, _nullable(published, self.window))


class SwitchedWindows(Windows):
    """`Windows` that `use_sliding_window` switches on; `window` is None where no layer has one."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both fields."""
        found = self._read(published, _switched(published, self.window))
        return found if found["window_layers"] else found | {"window": None}

    def write(self, config: Any) -> dict[str, Any]:
        """Both attributes, and the switch."""
        return super().write(config) | {"use_sliding_window": config.window is not None}


class LateWindows(SwitchedWindows):
    """`SwitchedWindows` that the first `max_window_layers` layers do not have."""

    def __init__(self, window: int, first: int):
        super().__init__(
            window, lambda published, layers: range(published.count("max_window_layers", first, 0), layers)
        )

    def write(self, config: Any) -> dict[str, Any]:
        """Both attributes, the switch, and the first layer with a window."""
        first = min(config.window_layers, default=config.layers)
        return super().write(config) | {"max_window_layers": first}


@dataclasses.dataclass(frozen=True)
class SwitchedWindow(Entry):
    """The `window` of all layers, which `use_sliding_window` switches on; None without."""

    window: int

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`window`."""
        return {"window": _switched(published, self.window)}

    def write(self, config: Any) -> dict[str, Any]:
        """The window, and the switch."""
        return {"sliding_window": config.window, "use_sliding_window": config.window is not None}


@dataclasses.dataclass(frozen=True)
class NoRotaryLayers(Entry):
    """The layers without rotary positions; every fourth where there is no list or, with `empty`, an empty one."""

    empty: bool = False

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`no_rotary_layers`; refuse a list of another length."""
        return {"no_rotary_layers": self(published, layers_of(published))}

    def write(self, config: Any) -> dict[str, Any]:
        """`no_rope_layers`, which in spite of its name has a 1 for each layer with rotary positions."""
        return {"no_rope_layers": [int(layer not in config.no_rotary_layers) for layer in range(config.layers)]}

    def __call__(self, published: PublishedConfig, layers: int) -> tuple[int, ...]:
        """The layers' numbers; other entries take them as their default."""
        by_default = Period(4, ("no_rope_layer_interval",))(published, layers)
        rotated = published.listed("no_rope_layers", _MAY_TURN, empty=self.empty)
        if rotated is None:
            return by_default
        if len(rotated) != layers:
            published.refuse(f"no_rope_layers={rotated} must say of {layers} layers, the model's, whether they turn.")
        return tuple(layer for layer in range(layers) if not rotated[layer])


@dataclasses.dataclass(frozen=True)
class RotaryOrNone(Entry):
    """`position_embedding_type`: whether the attention has rotary positions."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`rotary`; refuse other kinds than these."""
        published.expect("position_embedding_type", "nope", "rope")
        return {"rotary": published.text("position_embedding_type", "nope") == "rope"}

    def write(self, config: Any) -> dict[str, Any]:
        """The attribute."""
        return {"position_embedding_type": "rope" if config.rotary else "nope"}


@dataclasses.dataclass(frozen=True)
class ListedLayers(Entry):
    """A list of layers' numbers; `default` where it is missing."""

    name: str
    published: str
    default: By

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The numbers."""
        by_default, said = self.default(published, layers_of(published)), published.listed(self.published, Index)
        return {self.name: tuple(by_default if said is None else said)}

    def write(self, config: Any) -> dict[str, Any]:
        """The list."""
        return {self.published: list(getattr(config, self.name))}


@dataclasses.dataclass(frozen=True)
class AllLayers(Entry):
    """A list of layers' kinds, which are all this one."""

    published: str
    kind: str

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Nothing; refuse others."""
        layers, said = layers_of(published), published.listed(self.published)
        if said is not None and said != [self.kind] * layers:
            published.refuse(f"{self.published}={said}: this family has {layers} layers that are {self.kind!r}.")
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Nothing."""
        return {}
