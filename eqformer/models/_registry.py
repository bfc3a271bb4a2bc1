"""The registry of families: build a model by its family's config or by the name of a preset."""

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

import equinox as eqx
import jax
from jaxtyping import Array, Key

from .._annotation_checks import checked
from ..nn import Transformer
from . import families
from ._family import check_config, Classifier, Family, ModelConfig
from ._weight_rules import PredictorTable


_REGISTERED: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_REGISTERED)


def register(family: Family) -> None:
    """Make a family known to `build`, `load`, `save` and `presets` in this process.

    Raises a `ValueError` if a registered family already has the same name, `model_type`, architecture or class of
    configs, the same pair of a multimodal model and its text model, or a preset of the same name.
    """
    identity = _identity(family)
    for registered in FAMILIES.values():
        for key, names in _identity(registered).items():
            if taken := identity[key] & names:
                raise ValueError(
                    f"register({family.name!r}): the family {registered.name!r} has the same {key}, "
                    f"{', '.join(sorted(map(str, taken)))}; give the new family another {key}."
                )
    _REGISTERED[family.name] = family


def _identity(family: Family) -> dict[str, set]:
    """Return the names that no other family may have, by the kind of name."""
    return {
        "name": {family.name},
        "model_type": {family.model_type, *family.aliases} - {None},
        "text model": {
            (multimodal.model_type, multimodal.text_type or family.model_type) for multimodal in family.multimodal
        },
        "architecture": {family.architecture} - {""},
        "class of configs": {family.config},
        "name of a preset": {*family.presets},
    }


def _package_families() -> list[Family]:
    """Return the families that the files of `families` define, in the order of the files' names."""
    named: dict[str, Family] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(families.__path__)):
        variables = vars(importlib.import_module(f"{families.__name__}.{file}"))
        # Some files import the families of other files.
        named |= {value.name: value for value in variables.values() if isinstance(value, Family)}
    return list(named.values())


for _family in _package_families():
    register(_family)


def presets() -> dict[str, ModelConfig]:
    """Return the config of every preset of every family, by name."""
    return {name: config for family in FAMILIES.values() for name, config in family.presets.items()}


def preset(name: str) -> ModelConfig:
    """Return the config of one preset; raises a `ValueError` that lists the names nearest to an unknown name."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)
        raise ValueError(f"preset({name!r}): no such preset; the nearest names are {', '.join(near)}.")
    return known[name]


@checked
def build(
    model: str | ModelConfig, *, predictor: bool = False, classifier: Classifier | None = None, key: Key[Array, ""]
) -> Transformer:
    """Build a model with random weights, from the name of a preset or from a family's config.

    `shapes` returns only the model's shapes, and `nn.with_execution` sets how the model runs. With `predictor`, the
    model also has a predictor, the module for multi-token prediction; raises a `ValueError` if its family publishes no
    predictors. With a `classifier`, the model classifies texts or tokens, and has no language-model head.
    """
    config = preset(model) if isinstance(model, str) else model
    family = family_of(call := f"build({model!r})", config)
    check_config(call, config)
    transformer = family.build(config, key=key)
    if classifier is not None:
        call = f"{call[:-1]}, predictor={predictor}, classifier={classifier})"
        if predictor:
            raise ValueError(
                f"{call}: a classifier takes the place of the head that a predictor needs; give predictor or "
                "classifier, not both."
            )
        return _add_classifier(call, transformer, config, classifier, key)
    if not predictor:
        return transformer
    table = predictor_of(f"{call[:-1]}, predictor=True)", family)
    module = table.build(family.build, config, key=jax.random.fold_in(key, 1))
    return dataclasses.replace(transformer, predictor=module)


def with_classifier(
    model: Transformer, config: ModelConfig, classifier: Classifier, *, key: Key[Array, ""]
) -> Transformer:
    """Return a model of a config with a classifier of random weights in the place of its head.

    The classifier has the same weights as in `build(config, classifier=classifier, key=key)`. Raises a `ValueError` if
    the family has no classifiers.
    """
    return _add_classifier(f"with_classifier(model, {config!r}, {classifier})", model, config, classifier, key)


def _add_classifier(
    call: str, model: Transformer, config: ModelConfig, classifier: Classifier, key: Key[Array, ""]
) -> Transformer:
    family = family_of(call, config)
    if family.classifier is None:
        raise ValueError(f"{call}: the family {family.name} has no classifiers.")
    return family.classifier.add_to(model, config, classifier, key=jax.random.fold_in(key, 2))


def shapes(model: str | ModelConfig, *, predictor: bool = False, classifier: Classifier | None = None) -> Transformer:
    """Return the model of `build` with `ShapeDtypeStruct`s instead of arrays, which take no memory at any size."""
    return eqx.filter_eval_shape(build, model, predictor=predictor, classifier=classifier, key=jax.random.key(0))


def predictor_of(call: str, family: Family) -> PredictorTable:
    """Return how a family publishes its predictor; raises a `ValueError` if the family has none."""
    if family.predictor is None:
        known = ", ".join(known.name for known in FAMILIES.values() if known.predictor is not None)
        raise ValueError(
            f"{call}: the family {family.name} has no predictor, the module for multi-token prediction; only {known} "
            "have predictors."
        )
    return family.predictor


def family_of(call: str, config: ModelConfig) -> Family:
    """Return the family of a config; raises a `ValueError` for an object that is not the config of a family."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise ValueError(f"{call}: no family has a config of type {type(config).__name__}.")
