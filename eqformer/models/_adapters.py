"""LoRA adapters in the files of peft, which are read into a model's `LoRA`s and written from them.

The family's rule for a weight also describes how its factors are published, because A has the weight's input dims and
B its output dims. The rule orders, merges and concatenates the dims of factors like the weight's dims.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from .._files import JsonObject, read_json
from ..nn import add_lora, DenseMap, float_dtype, LinearMap, LoRA, lossless_dtype, path_name, Transformer
from ._adapter_config import AdapterConfig, read_adapter_config, write_adapter_config
from ._family import Family, ModelConfig
from ._folder import ADAPTER, ADAPTER_CONFIG as CONFIG, Folder, new_folder, write_arrays, write_json
from ._published_arrays import plain_shapes
from ._published_model import check_shapes, format_of
from ._weight_rules import ResolvedRule, split_dims


Settings = tuple[int, float]
"""The rank and the scale of a module's factors."""
Factor = Shaped[np.ndarray, "_ _"]


def load_adapter(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    config: ModelConfig | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Transformer:
    """Return the model with the `LoRA`s of a folder that peft wrote.

    Give `like`, the published folder that the model came from, or `config`, from which it was built. Each factor has
    its dtype in the file (a dtype wide enough for all layers), or `dtype`. Maps that are published as one module share
    A, and each map takes its rows of B. Layers without factors get zeros, which add nothing and learn nothing.
    `lora_dropout` is ignored. Raises a `ValueError` for options of other variants than plain LoRA, for arrays that are
    not factors of a linear map, and for modules that the configuration names but the file lacks.
    """
    folder = Folder(path, ADAPTER, "load_adapter")
    call = folder.call
    for note in folder.notes:
        warnings.warn(note, stacklevel=2)
    factor_dtype = None if dtype is None else float_dtype(dtype, f"{call}: dtype={dtype!r}")
    family, config = format_of(call, like, config, model)
    adapter = read_adapter_config(read_json(folder.path / CONFIG), str(folder.path / CONFIG))
    if _loras(published_maps(model)):
        raise ValueError(f"{call}: the model has LoRAs already; merge_lora them first.")
    plain = plain_shapes(model)
    modules = _adapted_modules(plain, family, config, call)
    prefix = family.base_prefix
    if prefix and not any(name.startswith(f"base_model.model.{prefix}") for name in folder.names):
        # The adapter is for the base model, whose names lack the prefix that the model with a head has.
        modules = [module.without_prefix(prefix) for module in modules]

    def read_factors(name: str) -> tuple[Factor, Factor] | None:
        a, b = _factor_names(name)
        return (folder.read(a), folder.read(b)) if a in folder.names else None

    try:
        _check_names(folder, adapter, modules)
        loras: dict[str, LoRA] = {}
        for module in modules:
            loras |= module.read(read_factors, adapter.settings_of, factor_dtype)
    except re.error as error:
        raise ValueError(f"{folder.path / CONFIG}: a pattern for modules cannot be read ({error}).") from None
    except ValueError as error:
        raise ValueError(f"{call}: {error}.") from None

    def adapt(path: tuple, _: object, node: object) -> object:
        lora = loras.get(path_name(path))
        return node if lora is None else eqx.tree_at(lambda m: m.linear, lora, node)

    return jax.tree_util.tree_map_with_path(adapt, plain, model, is_leaf=is_published)


def save_adapter(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    config: ModelConfig | None = None,
    base: str | None = None,
) -> None:
    """Write a model's `LoRA`s as a new folder that peft loads; the folder is written atomically.

    Give `like` or `config` as for `load_adapter`. `base` is the published model's name, by default `like`. Maps that
    are published as one module are written with one A if they share it. Otherwise the module gets one wider pair of
    factors with the maps' factors as blocks: its rank is the sum of the maps' ranks, and its product is the same.
    Raises a `ValueError` for a model without a `LoRA`, for a `LoRA` on a map that is not published as a module, and if
    the path exists.
    """
    call, target = f"save_adapter({str(path)!r})", Path(path)
    if target.exists():
        raise ValueError(f"{call}: this path exists already; give the path of a new folder.")
    family, config = format_of(call, like, config, model)
    plain = plain_shapes(model)
    modules = _adapted_modules(plain, family, config, call)
    base = str(like) if base is None and like is not None else base
    adapted = [module for module in modules if module.loras]
    written = {path for module in adapted for path in module.loras}
    maps = published_maps(plain)
    if unpublished := [path for path in _loras(maps) if path not in written]:
        raise ValueError(
            f"{call}: {', '.join(unpublished)} are not published as modules of their own; merge_lora before saving."
        )
    if not adapted:
        raise ValueError(f"{call}: the model has no LoRA; give it some by nn.with_lora.")
    arrays, settings = dict[str, np.ndarray](), dict[str, Settings]()
    for module in adapted:
        for name, a, b, module_settings in module.write():
            arrays |= dict(zip(_factor_names(name), (a, b)))
            settings[name] = module_settings
    short_names = {name: module.short_name for module in modules for _, name in module.names()}
    _write(target, arrays, write_adapter_config(settings, short_names, base))


@dataclasses.dataclass(frozen=True)
class AdaptedModule:
    """The maps whose weights are published as one module, and how the module's factors are published."""

    rule: ResolvedRule
    """The rule of the weights."""
    down: ResolvedRule
    """The rule of A, in one map at a time: `down.with_shapes` takes the shape of one A."""
    up: ResolvedRule
    """The rule of B, in all maps together, whose B are published as one array: `up.with_shapes` takes their shapes."""
    maps: Mapping[str, DenseMap | LoRA]
    """The maps by their paths in the model, in the order in which they are published."""

    @property
    def short_name(self) -> str:
        """The module's name within its layer and expert."""
        return self.rule.name.removesuffix(".weight").rsplit("}.", 1)[-1]

    @property
    def loras(self) -> dict[str, LoRA]:
        """The maps that have factors."""
        return _loras(self.maps)

    def without_prefix(self, prefix: str) -> "AdaptedModule":
        """Return the same module with names that lack a prefix."""
        return dataclasses.replace(self, rule=dataclasses.replace(self.rule, name=self.rule.name.removeprefix(prefix)))

    def names(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield each index of layers and experts, and the name of the module there."""
        for index, name in self.rule.arrays():
            yield index, name.removesuffix(".weight")

    def read(
        self,
        read_factors: Callable[[str], tuple[Factor, Factor] | None],
        settings: Callable[[str], Settings],
        dtype: str | None = None,
    ) -> dict[str, LoRA]:
        """Return the `LoRA` of each map by the map's path, or nothing if no layer has factors.

        All layers get the largest rank, padded with zeros. Each factor gets the widest dtype of its layers, or `dtype`.

        Args:
            read_factors: A function from a module's name to its A and B, or None for a module without factors.
            settings: A function from a module's name to its rank and scale.
            dtype: The dtype of all factors; None: their dtypes in the file.
        """
        read = [(index, name, read_factors(name)) for index, name in self.names()]
        factors = [(index, name, pair) for index, name, pair in read if pair is not None]
        if not factors:
            return {}
        rank, scale = max(settings(name)[0] for _, name, _ in factors), settings(factors[0][1])[1]
        down_dtype = np.dtype(dtype or lossless_dtype(*(a.dtype for _, _, (a, _) in factors)))
        up_dtype = np.dtype(dtype or lossless_dtype(*(b.dtype for _, _, (_, b) in factors)))
        linears = self.maps.values()
        downs = [np.zeros(_down_shape(linear, self.rule.outer_dims, rank), down_dtype) for linear in linears]
        ups = [np.zeros(_up_shape(linear, self.rule.outer_dims, rank), up_dtype) for linear in linears]
        up_rule = self.up.with_shapes([up.shape for up in ups])
        for index, name, (a, b) in factors:
            module_rank, module_scale = settings(name)
            if a.shape[0] != module_rank or b.shape[-1] != module_rank:
                raise ValueError(f"{name}: A has shape {a.shape} and B {b.shape}; the configured rank is {module_rank}")
            a, b = np.pad(a, ((0, rank - module_rank), (0, 0))), np.pad(b, ((0, 0), (0, rank - module_rank)))
            if module_scale != scale:
                b = b.astype(lossless_dtype(b.dtype, np.float32)) * (module_scale / scale)
            for map_index, (down, up) in enumerate(zip(downs, ups)):
                try:
                    down[index] = self.down.with_shapes([down.shape]).to_leaf(a, 0)
                    up[index] = up_rule.to_leaf(b, map_index)
                except ValueError as error:
                    raise ValueError(f"{name}: a factor does not fit: {error}") from None
        parts = zip(self.maps.items(), downs, ups, strict=True)
        return {path: _make_lora(linear, down, up, scale) for (path, linear), down, up in parts}

    def write(self) -> Iterator[tuple[str, Factor, Factor, Settings]]:
        """Yield each module's name, its A and B, and its rank and scale.

        Maps with equal A share it. Otherwise each map gets a block of a wider pair of factors, whose rank is the sum of
        the maps' ranks.
        """
        loras = list(self.loras.values())
        scale = loras[0].scale
        downs = _in_one_dtype([np.asarray(lora.down.matrix()) for lora in loras])
        ups = _in_one_dtype([_rescale(np.asarray(lora.up.matrix()), lora.scale, scale) for lora in loras])
        is_shared = len(loras) == len(self.maps) and all(np.array_equal(downs[0], down) for down in downs)
        ranks = [down.shape[self.rule.outer_dims] for down in downs]
        total, starts = (ranks[0], [0] * len(ranks)) if is_shared else (sum(ranks), np.cumsum([0, *ranks]).tolist())
        blocks = {path: (start, up) for path, start, up in zip(self.loras, starts, ups)}
        for index, name in self.names():
            wide_ups = []
            for path, linear in self.maps.items():
                wide_up = np.zeros((*linear.output_shape, total), ups[0].dtype)
                if path in blocks:
                    start, up = blocks[path]
                    wide_up[..., start : start + up.shape[-1]] = up[index]
                wide_ups.append(wide_up)
            a = [self.down.to_published([down[index]]) for down in (downs[:1] if is_shared else downs)]
            yield name, np.concatenate(a), self.up.to_published(wide_ups), (total, scale)


def find_modules(rules: Sequence[ResolvedRule], model: Transformer) -> list[AdaptedModule]:
    """Return every published module whose weight is the weight of one linear map, or the joined weights of several."""
    nodes = published_maps(model)
    map_of_weight = {
        f"{path}.weight" if node.base is node else f"{path}.linear.weight": path for path, node in nodes.items()
    }
    modules = []
    for rule in rules:
        paths = [map_of_weight[path] for path in rule.paths if path in map_of_weight]
        if not rule.name.endswith(".weight") or len(paths) < len(rule.paths):
            continue
        maps = {path: nodes[path] for path in paths}
        if patterns := _factor_patterns(rule, list(maps.values())):
            down, up = (dataclasses.replace(rule, patterns=factor_patterns, axis=0) for factor_patterns in patterns)
            modules.append(AdaptedModule(rule, down, up, maps))
    return modules


def published_maps(model: PyTree) -> dict[str, DenseMap | LoRA]:
    """Return every map of a model that has a weight to publish, with or without factors, by its path."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_published)
    return {path_name(path): node for path, node in nodes if is_published(node)}


def is_published(node: object) -> TypeGuard[DenseMap | LoRA]:
    """Return whether a node is a map that has a weight to publish, with factors or without."""
    return isinstance(node, LinearMap) and isinstance(node.base, DenseMap)


def _loras(maps: Mapping[str, DenseMap | LoRA]) -> dict[str, LoRA]:
    """Return the maps that have factors, by their paths."""
    return {path: node for path, node in maps.items() if isinstance(node, LoRA)}


def _factor_patterns(rule: ResolvedRule, linears: Sequence[LinearMap]) -> list[tuple[str, ...]]:
    """Return the pattern of A, which all maps share, and the pattern of each map's B.

    Return an empty list if the published array is not a matrix of inputs and outputs.
    """
    patterns = [_map_patterns(rule, linear, index, len(linears)) for index, linear in enumerate(linears)]
    pairs = [pair for pair in patterns if pair is not None]
    return [(pairs[0][0],), tuple(up for _, up in pairs)] if len(pairs) == len(patterns) else []


def _map_patterns(rule: ResolvedRule, linear: LinearMap, index: int, maps: int) -> tuple[str, str] | None:
    """Return the patterns of A and B of the map at `index` among the `maps` maps of a rule.

    Return None if a published dim mixes inputs and outputs, and if the maps are joined along their inputs: such maps
    would share B, which is not supported.
    """
    count, pattern = len(linear.outputs), rule.patterns[index]
    if pattern:
        published, leaf_dims = pattern.split(" -> ")
        names = leaf_dims.split()
        groups = split_dims(published)
    else:
        names = [*linear.outputs, *linear.inputs]
        groups = [[name] for name in names]
    outputs, inputs = names[:count], names[count:]
    sides = ["B" if set(group) <= set(outputs) else "A" if set(group) <= set(inputs) else "" for group in groups]
    if sorted(sides) != ["A", "B"] or (maps > 1 and sides[rule.axis] != "B"):
        return None
    published_a, published_b = " ".join(groups[sides.index("A")]), " ".join(groups[sides.index("B")])
    return f"rank ({published_a}) -> rank {' '.join(inputs)}", f"({published_b}) rank -> {' '.join(outputs)} rank"


def _down_shape(linear: LinearMap, outer_dims: int, rank: int) -> tuple[int, ...]:
    return *linear.shape[:outer_dims], rank, *linear.shape[outer_dims + len(linear.outputs) :]


def _up_shape(linear: LinearMap, outer_dims: int, rank: int) -> tuple[int, ...]:
    return *linear.shape[: outer_dims + len(linear.outputs)], rank


def _make_lora(linear: LinearMap, down: np.ndarray, up: np.ndarray, scale: float) -> LoRA:
    rank = up.shape[-1]
    shapes = eqx.filter_eval_shape(lambda: add_lora(linear, rank, scale, key=jax.random.key(0)))
    parts = linear, jnp.asarray(down), jnp.asarray(up)
    return eqx.tree_at(lambda m: (m.linear, m.down.weight, m.up.weight), shapes, parts)


def _in_one_dtype(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays in one dtype, in which no number is rounded."""
    dtype = lossless_dtype(*(array.dtype for array in arrays))
    return [array.astype(dtype, copy=False) for array in arrays]


def _rescale(up: np.ndarray, scale: float, new_scale: float) -> np.ndarray:
    """Return B for another scale, with the same product."""
    return up if scale == new_scale else (up * (scale / new_scale)).astype(up.dtype)


def _adapted_modules(model: Transformer, family: Family, config: ModelConfig, call: str) -> list[AdaptedModule]:
    """Return the model's published modules; raises a `ValueError` for a model that is not of this config."""
    plain = jax.tree.map(lambda node: node.base if is_published(node) else node, model, is_leaf=is_published)
    check_shapes(call, plain, config)
    return find_modules(family.rules(config, model), model)


def _check_names(folder: Folder, config: AdapterConfig, modules: Sequence[AdaptedModule]) -> None:
    """Raise a `ValueError` unless the folder has the factors of exactly the modules that its configuration names."""
    names = [name for module in modules for _, name in module.names() if config.has(name)]
    expected = {factor for name in names for factor in _factor_names(name)}
    missing, unexpected = expected - folder.names, folder.names - expected
    if missing or unexpected or not expected:
        parts = (
            ("in the configuration and not in the file", missing),
            ("in the file and for no linear map that the configuration names", unexpected),
        )
        faults = "; ".join(f"{fault}: {', '.join(sorted(names)[:8])} ({len(names)})" for fault, names in parts if names)
        raise ValueError(faults or "its configuration names no module of the model")


def _write(target: Path, arrays: Mapping[str, np.ndarray], config: JsonObject) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with new_folder(target) as part:
        write_arrays(part / ADAPTER, contiguous, "save_adapter(model, path, config)")
        write_json(part / CONFIG, config)


def _factor_names(module: str) -> tuple[str, str]:
    """Return the names in the file of A and B of a module."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"
