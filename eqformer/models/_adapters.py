"""Adapters in the files of peft: read into a model's `LoRA`s, and written from them."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._read import read_json
from ..nn import add_lora, DenseMap, float_dtype, LinearMap, LoRA, lossless_dtype, path_name, Transformer
from ._adapter_config import AdapterConfig, read_adapter_config, write_adapter_config
from ._family import Family, ModelConfig
from ._folder import ADAPTER, ADAPTER_CONFIG as CONFIG, Folder, new_folder, write_arrays, write_json
from ._published_model import check_shapes, format_of
from ._quantized_weights import plain_shapes
from ._weight_rules import Weight


Settings = tuple[int, float]  # a module's rank and scale


@dataclasses.dataclass(frozen=True)
class Site:
    """The Linears whose weights are published as one array, and how that array's factors are published."""

    rule: Weight  # of the weights
    down: Weight  # of each Linear's A
    up: Weight  # of all their B
    linears: tuple[DenseMap | LoRA, ...]

    @property
    def short(self) -> str:
        """The module's name within its layer and expert."""
        return self.rule.name.removesuffix(".weight").rsplit("}.", 1)[-1]

    @property
    def loras(self) -> list[LoRA]:
        """Those of the Linears that have factors."""
        return [linear for linear in self.linears if isinstance(linear, LoRA)]

    def without(self, prefix: str) -> "Site":
        """The same, of names without a prefix."""
        return dataclasses.replace(self, rule=dataclasses.replace(self.rule, name=self.rule.name.removeprefix(prefix)))

    def modules(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The places of layers and experts, and the name of each one's module."""
        for place, name in self.rule.places(self.linears[0].weight):
            yield place, name.removesuffix(".weight")

    def read(
        self,
        pair: Callable[[str], tuple[np.ndarray, np.ndarray] | None],
        settings: Callable[[str], Settings],
        dtype: str | None = None,
    ) -> list:
        """The `LoRA`s of these Linears, with what `pair` gives for each module, A and B, or None for none.

        All layers have the widest rank, where zeros fill the others up, and the widest dtype of each factor, or
        `dtype`. `settings` gives a module's rank and scale.
        """
        given = [(place, module, found) for place, module in self.modules() if (found := pair(module)) is not None]
        if not given:
            return []
        rank, scale = max(settings(module)[0] for _, module, _ in given), settings(given[0][1])[1]
        dtypes = [
            np.dtype(dtype or lossless_dtype(*(x.dtype for x in its))) for its in zip(*(found for _, _, found in given))
        ]
        downs, ups = zip(*(_empty(linear, self.rule.outer, rank, *dtypes) for linear in self.linears))
        for place, module, (a, b) in given:
            own, its = settings(module)
            if a.shape[0] != own or b.shape[-1] != own:
                raise ValueError(f"{module}: A has shape {a.shape} and B {b.shape}; the configured rank is {own}")
            a, b = np.pad(a, ((0, rank - own), (0, 0))), np.pad(b, ((0, 0), (0, rank - own)))
            b = b if its == scale else b.astype(lossless_dtype(b.dtype, np.float32)) * (its / scale)
            for number, (down, up) in enumerate(zip(downs, ups)):
                try:
                    down[place] = self.down.to_own(a, (down,), 0)
                    up[place] = self.up.to_own(b, ups, number)
                except ValueError as error:
                    raise ValueError(f"{module}: a factor does not fit: {error}") from None
        return [_beside(*each, scale) for each in zip(self.linears, downs, ups)]

    def written(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, Settings]]:
        """Each module's name, its A and B, and its rank and scale.

        Linears with one A share it; those with several get a block each of a wider pair, of the ranks' sum.
        """
        loras, scale = self.loras, self.loras[0].scale
        downs = _alike([np.asarray(lora.down.matrix()) for lora in loras])
        ups = _alike([_scaled(np.asarray(lora.up.matrix()), lora.scale, scale) for lora in loras])
        shared = len(loras) == len(self.linears) and all(np.array_equal(downs[0], down) for down in downs)
        ranks = [down.shape[self.rule.outer] for down in downs]
        total, starts = (ranks[0], [0] * len(ranks)) if shared else (sum(ranks), np.cumsum([0, *ranks]).tolist())
        for place, module in self.modules():
            blocks = {id(lora): (start, up[place]) for lora, start, up in zip(loras, starts, ups)}
            parts = []
            for linear in self.linears:
                outputs = linear.output_shape
                parts.append(np.zeros((*outputs, total), ups[0].dtype))
                if id(linear) in blocks:
                    start, up = blocks[id(linear)]
                    parts[-1][..., start : start + up.shape[-1]] = up
            a = [self.down.to_published([down[place]]) for down in (downs[:1] if shared else downs)]
            yield module, np.concatenate(a), self.up.to_published(parts), (total, scale)


def sites_of(rules: Sequence[Weight], model: Transformer) -> list[Site]:
    """Every published module that is one Linear of the model, or several side by side."""
    of_weight = {id(node.weight): node for node in maps(model)}
    found = []
    for rule in rules:
        leaves = rule.leaves(model)
        linears = tuple(of_weight[id(leaf)] for leaf in leaves if id(leaf) in of_weight)
        if rule.name.endswith(".weight") and len(linears) == len(leaves):
            patterns = _patterns(rule, linears)
            if patterns is not None:
                down, up = (dataclasses.replace(rule, pattern=pattern, axis=0) for pattern in patterns)
                found.append(Site(rule, down, up, linears))
    return found


def maps(model: PyTree) -> list[DenseMap | LoRA]:
    """Every map of a model that has a weight to publish, with its factors if it has some."""
    return [node for node in jax.tree.leaves(model, is_leaf=is_published) if is_published(node)]


def is_published(node: object) -> TypeGuard[DenseMap | LoRA]:
    """Whether a node is a map that has a weight to publish, with factors or without."""
    return isinstance(node, DenseMap) or (isinstance(node, LoRA) and isinstance(node.linear, DenseMap))


def _patterns(rule: Weight, linears: Sequence[LinearMap]) -> tuple[str, tuple[str, ...]] | None:
    """A rule's pattern for A and those for B; None where what is published is no matrix of inputs and outputs."""
    found = [_patterns_of(rule, linear, number, len(linears)) for number, linear in enumerate(linears)]
    pairs = [pair for pair in found if pair is not None]
    return (pairs[0][0], tuple(up for _, up in pairs)) if len(pairs) == len(found) else None


def _patterns_of(rule: Weight, linear: LinearMap, number: int, parts: int) -> tuple[str, str] | None:
    count, pattern = len(linear.outputs), rule.pattern_of(number)
    if pattern:
        before, after = pattern.split(" -> ")
        names = after.split()
        groups = [(merged or alone).split() for merged, alone in re.findall(r"\(([^)]*)\)|(\S+)", before)]
    else:
        names = [*linear.outputs, *linear.inputs]
        groups = [[name] for name in names]
    outputs, inputs = names[:count], names[count:]
    sides = ["B" if set(group) <= set(outputs) else "A" if set(group) <= set(inputs) else "" for group in groups]
    # Parts side by side along the inputs would have a B in common, and no A.
    if sorted(sides) != ["A", "B"] or (parts > 1 and sides[rule.axis] != "B"):
        return None
    own_a, own_b = " ".join(groups[sides.index("A")]), " ".join(groups[sides.index("B")])
    return f"rank ({own_a}) -> rank {' '.join(inputs)}", f"({own_b}) rank -> {' '.join(outputs)} rank"


def _empty(
    linear: LinearMap, outer: int, rank: int, of_down: np.dtype, of_up: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    shape, count = linear.shape, outer + len(linear.outputs)
    return np.zeros((*shape[:outer], rank, *shape[count:]), of_down), np.zeros((*shape[:count], rank), of_up)


def _beside(linear: LinearMap, down: np.ndarray, up: np.ndarray, scale: float) -> LoRA:
    rank = up.shape[-1]
    shapes = eqx.filter_eval_shape(lambda: add_lora(linear, rank, scale, key=jax.random.key(0)))
    parts = linear, jnp.asarray(down), jnp.asarray(up)
    return eqx.tree_at(lambda m: (m.linear, m.down.weight, m.up.weight), shapes, parts)


def _alike(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same in one dtype, in which none of them loses anything."""
    dtype = lossless_dtype(*(array.dtype for array in arrays))
    return [array.astype(dtype, copy=False) for array in arrays]


def _scaled(up: np.ndarray, own: float, scale: float) -> np.ndarray:
    return up if own == scale else (up * (own / scale)).astype(up.dtype)


def load_adapter(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    config: ModelConfig | None = None,
    dtype: DTypeLike | None = None,
) -> Transformer:
    """The model with the `LoRA`s of a folder that peft wrote.

    `like` is the published folder that the model came from; one that came from none has a `config`. Each factor has the
    file's dtype for it (one wide enough for all layers), or `dtype`. Maps that are published as one share A, and each
    has its rows of B. Layers without factors get zeros, which add nothing and learn nothing. `lora_dropout` is ignored.
    Raises a `ValueError` for options that are no plain LoRA's, and one that lists what is left over: arrays that are no
    factors of a Linear, modules that the configuration names and that no array fills.
    """
    folder = Folder(path, ADAPTER, "load_adapter")
    call = folder.call
    for note in folder.notes:
        warnings.warn(note, stacklevel=2)
    dtype = None if dtype is None else float_dtype(dtype, f"{call}: dtype={dtype!r}")
    family, config = format_of(call, like, config, model)
    adapter = read_adapter_config(read_json(folder.path / CONFIG), str(folder.path / CONFIG))
    if any(isinstance(node, LoRA) for node in maps(model)):
        raise ValueError(f"{call}: the model has LoRAs already; merge_lora them first.")
    plain = plain_shapes(model)
    sites = _sites(plain, family, config, call)
    prefix = family.base_prefix
    if prefix and not any(name.startswith(f"base_model.model.{prefix}") for name in folder.names):
        sites = [site.without(prefix) for site in sites]  # of a model without its head's class

    def pair(module: str) -> tuple[np.ndarray, np.ndarray] | None:
        a, b = _names(module)
        return (folder.read(a), folder.read(b)) if a in folder.names else None

    try:
        _check_names(folder, adapter, sites)
        settings = lambda module: (adapter.rank_of(module), adapter.scale_of(module))
        loras = [lora for site in sites for lora in site.read(pair, settings, dtype)]
    except re.error as error:
        raise ValueError(f"{folder.path / CONFIG}: a pattern for modules cannot be read ({error}).") from None
    except ValueError as error:
        raise ValueError(f"{call}: {error}.") from None
    found = {id(lora.weight): lora for lora in loras}

    def adapted(node: Any, own: Any) -> Any:
        lora = found.get(id(node.weight)) if is_published(node) else None
        return own if lora is None else eqx.tree_at(lambda m: m.linear, lora, own)

    return jax.tree.map(adapted, plain, model, is_leaf=is_published)


def save_adapter(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    config: ModelConfig | None = None,
    base: str | None = None,
) -> None:
    """Write a model's `LoRA`s as a folder that peft loads; it appears whole or not at all, and replaces nothing.

    `like` or `config` as for `load_adapter`; `base` is the published model's name, by default `like`. Maps that are
    published as one and have one A are written so; others as blocks of a wider pair, of the ranks' sum, which computes
    the same. Raises a `ValueError` for a model without a `LoRA`, and for one on a map that is not published as a
    module.
    """
    call, target = f"save_adapter({str(path)!r})", Path(path)
    if target.exists():
        raise ValueError(f"{call}: something is there already; give a new folder.")
    family, config = format_of(call, like, config, model)
    model = plain_shapes(model)
    sites = _sites(model, family, config, call)
    base = str(like) if base is None and like is not None else base
    adapted = [site for site in sites if site.loras]
    held = {id(lora) for site in adapted for lora in site.loras}
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_published)
    if left := [path_name(at) for at, node in nodes if isinstance(node, LoRA) and id(node) not in held]:
        raise ValueError(f"{call}: {', '.join(left)} are published as no module of their own; merge_lora before.")
    if not adapted:
        raise ValueError(f"{call}: the model has no LoRA; give it some by nn.with_lora.")
    arrays, settings = dict[str, np.ndarray](), dict[str, tuple[int, float]]()
    for site in adapted:
        for module, a, b, its in site.written():
            arrays |= dict(zip(_names(module), (a, b)))
            settings[module] = its
    modules = {module: site.short for site in sites for _, module in site.modules()}
    _write(target, arrays, write_adapter_config(settings, modules, base))


def _sites(model: Transformer, family: Family, config: ModelConfig, call: str) -> list[Site]:
    plain = jax.tree.map(lambda node: node.linear if isinstance(node, LoRA) else node, model, is_leaf=is_published)
    check_shapes(call, plain, config)
    return sites_of(family.rules(config, model), model)


def _check_names(folder: Folder, config: AdapterConfig, sites: list[Site]) -> None:
    wanted = {name for site in sites for _, m in site.modules() if config.has(m) for name in _names(m)}
    missing, spare = wanted - folder.names, folder.names - wanted
    if missing or spare or not wanted:
        parts = (("in the configuration and not in the file", missing), ("factors of no Linear that it names", spare))
        faults = "; ".join(f"{what}: {', '.join(sorted(names)[:8])} ({len(names)})" for what, names in parts if names)
        raise ValueError(faults or "its configuration names no module of the model")


def _write(target: Path, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with new_folder(target) as part:
        write_arrays(part / ADAPTER, packed, "save_adapter(model, path, config)")
        write_json(part / CONFIG, config)


def _names(module: str) -> tuple[str, str]:
    """What A and B of a module are called in the file."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"
