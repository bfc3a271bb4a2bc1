"""The registry of families: build a model by its family's config or by the name of a preset."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType

import equinox as eqx
import jax
from jaxtyping import Array, Key

from ..nn import Transformer
from ._family import check_config, Family, ModelConfig
from ._weight_rules import PredictorTable
from .families._bamba import BAMBA
from .families._cohere import COHERE
from .families._deepseek_v2 import DEEPSEEK_V2
from .families._deepseek_v3 import DEEPSEEK_V3
from .families._deepseek_v32 import DEEPSEEK_V32
from .families._ernie45 import ERNIE45, ERNIE45_MOE
from .families._exaone4 import EXAONE4
from .families._falcon_h1 import FALCON_H1
from .families._gemma import GEMMA
from .families._gemma2 import GEMMA2
from .families._gemma3 import GEMMA3
from .families._gemma4 import GEMMA4
from .families._glm4 import GLM4
from .families._glm4_moe import GLM4_MOE
from .families._glm_moe_dsa import GLM_MOE_DSA
from .families._gpt2 import GPT2
from .families._gpt_oss import GPT_OSS
from .families._granite import GRANITE
from .families._granite_hybrid import GRANITE_HYBRID
from .families._hunyuan import HUNYUAN, HUNYUAN_MOE
from .families._jaxformer import JAXFORMER
from .families._kimi_linear import KIMI_LINEAR
from .families._lfm2 import LFM2, LFM2_MOE
from .families._llama import LLAMA
from .families._llama4 import LLAMA4
from .families._mamba2 import MAMBA2
from .families._minimax_m2 import MINIMAX_M2
from .families._ministral3 import MINISTRAL3
from .families._mistral import MISTRAL
from .families._mistral4 import MISTRAL4
from .families._mixtral import MIXTRAL
from .families._modernbert import MODERNBERT
from .families._muse_glimmer import MUSE_GLIMMER
from .families._nemotron_h import NEMOTRON_H
from .families._olmo2 import OLMO2, OLMO3
from .families._olmoe import OLMOE
from .families._phi3 import PHI3
from .families._qwen2 import QWEN2
from .families._qwen2_moe import QWEN2_MOE
from .families._qwen3 import QWEN3
from .families._qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .families._qwen3_moe import QWEN3_MOE
from .families._qwen3_next import QWEN3_NEXT
from .families._seed_oss import SEED_OSS
from .families._smollm3 import SMOLLM3
from .families._switch import GSHARD, SWITCH
from .families._t5 import T5
from .families._t5gemma import T5GEMMA
from .families._t5gemma2 import T5GEMMA2


_LISTED = (
    *(BAMBA, COHERE, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, ERNIE45, ERNIE45_MOE, EXAONE4, FALCON_H1, GEMMA, GEMMA2),
    *(GEMMA3, GEMMA4, GLM4, GLM4_MOE, GLM_MOE_DSA, GPT2, GPT_OSS, GRANITE, GRANITE_HYBRID, GSHARD, HUNYUAN),
    *(HUNYUAN_MOE, JAXFORMER, KIMI_LINEAR, LFM2, LFM2_MOE, LLAMA, LLAMA4, MAMBA2, MINIMAX_M2, MINISTRAL3, MISTRAL),
    *(MISTRAL4, MIXTRAL, MODERNBERT, MUSE_GLIMMER, NEMOTRON_H, OLMO2, OLMO3, OLMOE, PHI3, QWEN2, QWEN2_MOE, QWEN3),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, SEED_OSS, SMOLLM3, SWITCH, T5, T5GEMMA, T5GEMMA2),
)
_REGISTERED: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_REGISTERED)


def register(family: Family) -> None:
    """Make a family known to `build`, `load`, `save` and `presets` in this process.

    Raises a `ValueError` if another family has the same name, `model_type`, architecture, class of configs or a preset
    of the same name.
    """
    identity = _identity(family)
    for registered in FAMILIES.values():
        for key, names in _identity(registered).items():
            if taken := identity[key] & names:
                raise ValueError(
                    f"register({family.name!r}): the family {registered.name!r} has the same {key}, "
                    f"{', '.join(sorted(map(str, taken)))}; give this one another."
                )
    _REGISTERED[family.name] = family


def _identity(family: Family) -> dict[str, set]:
    """Return the names that no two families may share, by their kind."""
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


for _family in _LISTED:
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


def build(model: str | ModelConfig, *, predictor: bool = False, key: Key[Array, ""]) -> Transformer:
    """Build a model with random weights, from the name of a preset or from a family's config.

    `shapes` returns only its shapes, and `nn.with_execution` sets how it runs. With `predictor`, the model has the
    module that predicts one token further; raises a `ValueError` if its family does not publish such a module.
    """
    config = preset(model) if isinstance(model, str) else model
    family = family_of(call := f"build({model!r})", config)
    check_config(call, config)
    transformer = family.build(config, key=key)
    if not predictor:
        return transformer
    table = predictor_of(f"{call[:-1]}, predictor=True)", family)
    module = table.build(family.build, config, key=jax.random.fold_in(key, 1))
    return dataclasses.replace(transformer, predictor=module)


def shapes(model: str | ModelConfig, *, predictor: bool = False) -> Transformer:
    """Return the model that `build` returns, with `ShapeDtypeStruct`s instead of arrays, for a model of any size."""
    return eqx.filter_eval_shape(build, model, predictor=predictor, key=jax.random.key(0))


def predictor_of(call: str, family: Family) -> PredictorTable:
    """Return how a family publishes its predictor; raises a `ValueError` if the family has none."""
    if family.predictor is None:
        known = ", ".join(known.name for known in FAMILIES.values() if known.predictor is not None)
        raise ValueError(f"{call}: the family {family.name} has no predictor of a further token; {known} have one.")
    return family.predictor


def family_of(call: str, config: ModelConfig) -> Family:
    """Return the family of a config; raises a `ValueError` for an object that is not the config of a family."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise ValueError(f"{call}: no family has a config of type {type(config).__name__}.")
