"""Adapters in the files of peft: read into a model's `LoRA`s, and written from them."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.typing import DTypeLike

from .._read import read_json
from ..nn import float_dtype, LoRA, path_name, Transformer
from ._adapter_config import AdapterConfig, read_adapter_config, write_adapter_config
from ._adapter_sites import is_published, maps, Site, sites_of
from ._family import Family, ModelConfig
from ._folder import ADAPTER, ADAPTER_CONFIG as CONFIG, Folder, new_folder, write_arrays, write_json
from ._kept import plain_shapes
from ._published import check_shapes, format_of


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
