"""The `adapter_config.json` of peft: the modules of a published model that have factors, and their ranks and scales."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any, Generic, NoReturn, TypeVar

from .._annotation_checks import fits
from .._files import JsonObject
from .._shapes import as_tuple
from ._config_types import as_list, FieldType, Index, Length, Number


T = TypeVar("T")
# Options for training or running the factors. They do not change what the factors compute.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path fan_in_fan_out inference_mode lora_dropout megatron_core peft_version "
    "qalora_group_size revision runtime_config task_type".split()
)
# Other ways to initialise A and B change the base weights, which are not in the folder.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


class _ByPattern(Generic[T]):
    """A setting of modules, such as the rank, by patterns of module names; `get` returns the setting of a module.

    The first pattern that matches the end of the module's name applies.

    A configuration may have thousands of patterns, most of them plain names, in which dots may be escaped. Plain names
    are found by look-up. An unescaped dot matches any character, so before the look-up the module's name gets a dot in
    the same position. All other patterns are matched one by one.
    """

    def __init__(self, values: Mapping[str, T]):
        # By a name's length, by the positions of its unescaped dots, and by the name: the pattern's order and value.
        self._names: dict[int, dict[tuple[int, ...], dict[str, tuple[int, T]]]] = {}
        self._patterns: list[tuple[int, T, re.Pattern[str]]] = []
        for order, (pattern, value) in enumerate(values.items()):
            if _NAME.fullmatch(pattern):
                characters = _CHARACTER.findall(pattern)
                dots = tuple(position for position, character in enumerate(characters) if character == ".")
                by_name = self._names.setdefault(len(characters), {}).setdefault(dots, {})
                name = _put_dots("".join(character[-1] for character in characters), dots)
                by_name.setdefault(name, (order, value))
            else:
                self._patterns.append((order, value, re.compile(rf"(.*\.)?({pattern})$")))

    def get(self, module: str, default: T) -> T:
        """Return the value that the first matching pattern gives to the module's name, or the default."""
        looked_up = [
            by_name.get(_put_dots(suffix, dots))
            for suffix in _suffixes(module)
            for dots, by_name in self._names.get(len(suffix), {}).items()
        ]
        matches = [match for match in looked_up if match is not None]
        matches += [(order, value) for order, value, pattern in self._patterns if pattern.match(module)]
        return min(matches, key=lambda match: match[0])[1] if matches else default


# One character of a plain name, which may be escaped. Escaped letters are classes of characters, so they are excluded.
_CHARACTER = re.compile(r"\\[^a-zA-Z0-9]|[\w.-]")
_NAME = re.compile(rf"(?:{_CHARACTER.pattern})+")


def _put_dots(name: str, positions: tuple[int, ...]) -> str:
    """Return a name with dots at these positions."""
    borders = zip((-1, *positions), (*positions, len(name)))
    return ".".join(name[start + 1 : stop] for start, stop in borders)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The part of a peft configuration that describes a plain LoRA."""

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    ranks: _ByPattern[int]
    alphas: _ByPattern[float]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def has(self, module: str) -> bool:
        """Return whether a module, by its published name, has factors."""
        if _is_among(self.excluded, module) or not _is_among(self.targets, module):
            return False
        if isinstance(self.targets, str) or module in self.targets or not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        layer = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return layer is not None and int(layer[1]) in self.layers

    def settings_of(self, module: str) -> tuple[int, float]:
        """Return the module's rank, and the scale by which the product of its factors is multiplied."""
        rank = self.ranks.get(module, self.rank)
        return rank, self.alphas.get(module, self.alpha) / (rank**0.5 if self.rank_stabilized else rank)


class _Options:
    """The options of a configuration, read one by one; null stands for the default."""

    def __init__(self, values: Mapping[str, object], source: str):
        self._values, self._source, self._taken = values, source, set[str]()

    def take(self, name: str, default: object, field_type: FieldType, rule: str) -> Any:
        """Return an option's value; raises a `ValueError` that states the `rule` for a value of another type."""
        value = self._value(name, default)
        if not fits(value, field_type):
            self._refuse(name, value, rule)
        return value

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse any value but these; the first is the default."""
        value = self._value(name, allowed[0])
        if value not in allowed:
            self._refuse(name, value, f"one of {', '.join(map(repr, allowed))}")

    def names(self, name: str) -> str | tuple[str, ...]:
        """Return an option that is a list of names, or a pattern for them."""
        value = self.take(name, [], str | list[str], "a list of names, or a pattern for them")
        return value if isinstance(value, str) else tuple(value)

    def by_pattern(self, name: str, field_type: FieldType) -> _ByPattern:
        """Return an option that is an object of numbers by patterns for modules."""
        rule = "numbers by names of modules"
        numbers = self.take(name, {}, dict, rule)
        if not fits([*numbers.values()], list[field_type]):
            self._refuse(name, numbers, rule)
        try:
            return _ByPattern(numbers)
        except re.error as error:
            raise ValueError(f"{self._source}: a pattern for modules cannot be read ({name}: {error}).") from None

    def _value(self, name: str, default: object) -> object:
        self._taken.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def _refuse(self, name: str, value: object, rule: str) -> NoReturn:
        raise ValueError(f"{self._source}: {name}={value!r} is not supported; it must be {rule}.")

    def finish(self) -> None:
        """Raise a `ValueError` that lists options that were not read and may have an effect."""
        known = self._taken | _WITHOUT_EFFECT
        unknown = {name: value for name, value in sorted(self._values.items()) if name not in known and value}
        if unknown:
            listed = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise ValueError(
                f"{self._source}: options that are not known here: {listed}; a plain LoRA has none of them."
            )


def read_adapter_config(values: Mapping[str, object], source: str) -> AdapterConfig:
    """Return the configuration; raises a `ValueError` for an unknown kind of adapter or an unknown option."""
    options = _Options(values, source)
    options.expect("peft_type", "LORA")
    options.expect("bias", "none")
    options.expect("init_lora_weights", *_INITIALISATIONS)
    layers = options.take("layers_to_transform", [], Index | list[Index], "a list of numbers")
    targets, excluded, patterns = map(options.names, ("target_modules", "exclude_modules", "layers_pattern"))
    config = AdapterConfig(
        rank=options.take("r", 8, Length, "a positive number"),
        alpha=float(options.take("lora_alpha", 8, Number, "a number")),
        rank_stabilized=options.take("use_rslora", False, bool, "true or false"),
        targets=targets if isinstance(targets, str) else frozenset(targets),
        excluded=excluded if isinstance(excluded, str) else frozenset(excluded),
        ranks=options.by_pattern("rank_pattern", Length),
        alphas=options.by_pattern("alpha_pattern", Number),
        layers=tuple(as_list(layers)),
        layers_pattern=as_tuple(patterns),
    )
    if not config.targets or config.targets == "all-linear":
        raise ValueError(f"{source}: target_modules={targets!r}; list the modules that have factors.")
    options.finish()
    return config


def write_adapter_config(
    settings: Mapping[str, tuple[int, float]], short_names: Mapping[str, str], base: str | None
) -> JsonObject:
    """Return the configuration of modules with the given ranks and scales.

    A module is listed by its short name if all modules of that name have one rank and scale, or else by its full name.

    Args:
        settings: The rank and scale of each module that has factors.
        short_names: For every module of the model, the module's name within its layer.
        base: The name of the published model.
    """
    alphas = {module: _to_whole(scale * rank) for module, (rank, scale) in settings.items()}
    (common_rank, _), *_ = Counter(rank for rank, _ in settings.values()).most_common(1)
    (common_alpha, _), *_ = Counter(alphas.values()).most_common(1)
    # The settings of all modules that a short name matches, with None for modules without factors.
    settings_of = {short_names[module]: set[tuple[int, int | float] | None]() for module in settings}
    for module in short_names:
        for name in settings_of.keys() & _suffixes(module):
            settings_of[name].add((settings[module][0], alphas[module]) if module in settings else None)
    targets, rank_pattern, alpha_pattern = set[str](), dict[str, int](), dict[str, int | float]()
    for module, (rank, _) in settings.items():
        name = short_names[module] if len(settings_of[short_names[module]]) == 1 else module
        targets.add(name)
        rank_pattern |= {re.escape(name): rank} if rank != common_rank else {}
        alpha_pattern |= {re.escape(name): alphas[module]} if alphas[module] != common_alpha else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_alpha,
        "target_modules": sorted(targets),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _suffixes(module: str) -> set[str]:
    """Return the endings of a dotted name: `a.b.c`, `b.c` and `c`."""
    words = module.split(".")
    return {".".join(words[start:]) for start in range(len(words))}


def _is_among(names: str | Set[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return not names.isdisjoint(_suffixes(module))


def _to_whole(value: float) -> int | float:
    """Return a value, rounded if it differs from a whole number by no more than an error of rounding."""
    return round(value) if abs(value - round(value)) < 1e-9 * abs(value) else value
