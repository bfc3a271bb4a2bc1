"""The `adapter_config.json` of peft: which modules of a published model have factors, of what rank and scale."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any


# Options of training or running the factors, which do not change what they compute.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path fan_in_fan_out inference_mode lora_dropout megatron_core peft_version "
    "qalora_group_size revision runtime_config task_type".split()
)
# Other initialisations of A and B change the base weights, which are not in the folder.
_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


class _ByPattern:
    """Numbers by patterns for the ends of modules' names, of which the first that fits counts.

    There may be one for each of many modules, a name with its dots escaped or not. Such are looked up:
    where they have a dot that stands for any character, the module's name gets one. All others are matched.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._named: dict[int, dict[tuple[int, ...], dict[str, tuple[int, Any]]]] = {}  # by length, then by places
        self._matched: list[tuple[int, Any, re.Pattern[str]]] = []
        for number, (pattern, value) in enumerate(values.items()):
            if _NAME.fullmatch(pattern):
                parts = _CHARACTER.findall(pattern)
                any_at = tuple(place for place, part in enumerate(parts) if part == ".")
                of_places = self._named.setdefault(len(parts), {}).setdefault(any_at, {})
                of_places.setdefault(_dotted("".join(part[-1] for part in parts), any_at), (number, value))
            else:
                self._matched.append((number, value, re.compile(rf"(.*\.)?({pattern})$")))

    def of(self, module: str, default: Any) -> Any:
        """The module's number."""
        looked_up = [
            of_places.get(_dotted(end, any_at))
            for end in _ends(module)
            for any_at, of_places in self._named.get(len(end), {}).items()
        ]
        found = [its for its in looked_up if its is not None]
        found += [(number, value) for number, value, pattern in self._matched if pattern.match(module)]
        return min(found, key=lambda its: its[0])[1] if found else default


# A character by itself or escaped, or any; letters that are escaped are classes.
_CHARACTER = re.compile(r"\\[^a-zA-Z0-9]|[\w.-]")
_NAME = re.compile(rf"(?:{_CHARACTER.pattern})+")


def _dotted(name: str, places: tuple[int, ...]) -> str:
    """A name with dots at these places."""
    borders = zip((-1, *places), (*places, len(name)))
    return ".".join(name[start + 1 : stop] for start, stop in borders)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What of a peft configuration says something about a plain LoRA."""

    rank: int
    alpha: float
    rank_stabilised: bool
    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    ranks: _ByPattern
    alphas: _ByPattern
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def has(self, module: str) -> bool:
        """Whether a module, by its published name, has factors."""
        if _is_among(self.excluded, module) or not _is_among(self.targets, module):
            return False
        if isinstance(self.targets, str) or module in self.targets or not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers

    def rank_of(self, module: str) -> int:
        """The module's rank."""
        return self.ranks.of(module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the module's factors is multiplied by."""
        rank = self.rank_of(module)
        return self.alphas.of(module, self.alpha) / (rank**0.5 if self.rank_stabilised else rank)


def read_adapter_config(values: Mapping[str, Any], source: str) -> AdapterConfig:
    """The configuration; a `ValueError` for a kind of adapter, or an option, that is not known."""
    taken = set[str]()

    def take(name: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        taken.add(name)
        value = values.get(name)
        value = default if value is None else value
        if not fits(value):
            raise ValueError(f"{source}: {name}={value!r} is not supported; it must be {what}.")
        return value

    def one_of(name: str, *allowed: Any) -> None:
        take(name, allowed[0], lambda value: value in allowed, f"one of {', '.join(map(repr, allowed))}")

    def names(name: str, what: str = "a list of names, or a pattern for them") -> Any:
        found = take(name, [], _are_names, what)
        return found if isinstance(found, str) else tuple(found)

    def by_pattern(name: str, fits: Callable[[Any], bool]) -> _ByPattern:
        fit = lambda value: isinstance(value, dict) and all(map(fits, value.values()))
        numbers = take(name, {}, fit, "numbers by names of modules")
        try:
            return _ByPattern(numbers)
        except re.error as error:
            raise ValueError(f"{source}: a pattern for modules cannot be read ({name}: {error}).") from None

    one_of("peft_type", "LORA")
    one_of("bias", "none")
    one_of("init_lora_weights", *_KEEP_THE_BASE)
    layers = take("layers_to_transform", [], lambda x: _is_count(x, 0) or _are(x, _is_count, 0), "a list of numbers")
    targets, excluded, patterns = map(names, ("target_modules", "exclude_modules", "layers_pattern"))
    config = AdapterConfig(
        rank=take("r", 8, _is_count, "a positive number"),
        alpha=float(take("lora_alpha", 8, _is_number, "a number")),
        rank_stabilised=take("use_rslora", False, lambda x: isinstance(x, bool), "true or false"),
        targets=targets if isinstance(targets, str) else frozenset(targets),
        excluded=excluded if isinstance(excluded, str) else frozenset(excluded),
        ranks=by_pattern("rank_pattern", _is_count),
        alphas=by_pattern("alpha_pattern", _is_number),
        layers=tuple(layers) if isinstance(layers, list) else (layers,),
        layers_pattern=(patterns,) if isinstance(patterns, str) else patterns,
    )
    if not config.targets or config.targets == "all-linear":
        raise ValueError(f"{source}: target_modules={targets!r}; list the modules that have factors.")
    left = {name: value for name, value in sorted(values.items()) if name not in taken | _WITHOUT_EFFECT and value}
    if left:
        listed = ", ".join(f"{name}={value!r}" for name, value in left.items())
        raise ValueError(f"{source}: options that are not known here: {listed}; a plain LoRA has none of them.")
    return config


def write_adapter_config(
    settings: Mapping[str, tuple[int, float]], modules: Mapping[str, str], base: str | None
) -> dict[str, Any]:
    """The configuration of modules with the given ranks and scales; `modules` gives every module's name in its layer.

    Modules are listed by that name where all that bear it are alike, and by their full names where not.
    """
    alphas = {module: _whole(scale * rank) for module, (rank, scale) in settings.items()}
    (rank, _), *_ = Counter(rank for rank, _ in settings.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    targets, ranks, alpha_of = set[str](), dict[str, int](), dict[str, int | float]()
    borne = {
        modules[module]: set[Any]() for module in settings
    }  # by each name the settings of all modules that have it
    for other in modules:
        for name in borne.keys() & _ends(other):
            borne[name].add((settings[other][0], alphas[other]) if other in settings else None)
    for module, (its, _) in settings.items():
        name = modules[module] if len(borne[modules[module]]) == 1 else module
        targets.add(name)
        ranks |= {re.escape(name): its} if its != rank else {}
        alpha_of |= {re.escape(name): alphas[module]} if alphas[module] != alpha else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "rank_pattern": ranks,
        "alpha_pattern": alpha_of,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _ends(module: str) -> set[str]:
    """What a name ends in, with and without each of the names before it."""
    parts = module.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _is_among(names: str | Set[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return not names.isdisjoint(_ends(module))


def _whole(value: float) -> int | float:
    return round(value) if abs(value - round(value)) < 1e-9 * abs(value) else value


def _are(values: Any, fits: Callable[..., bool], *more: Any) -> bool:
    return isinstance(values, list) and all(fits(value, *more) for value in values)


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or _are(value, lambda name: isinstance(name, str))


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
