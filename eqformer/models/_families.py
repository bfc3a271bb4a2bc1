"""The list of families, and models by name."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Key

from ..nn import Transformer
from ._weights import Published
from .families._cohere import build_cohere, Cohere, COHERE_PRESETS, COHERE_PUBLISHED
from .families._deepseek_v2 import build_deepseek_v2, DEEPSEEK_V2_PRESETS, DEEPSEEK_V2_PUBLISHED, DeepSeekV2
from .families._deepseek_v3 import build_deepseek_v3, DEEPSEEK_V3_PRESETS, DEEPSEEK_V3_PUBLISHED, DeepSeekV3
from .families._gemma import build_gemma, Gemma, GEMMA_PRESETS, GEMMA_PUBLISHED
from .families._gemma2 import build_gemma2, Gemma2, GEMMA2_PRESETS, GEMMA2_PUBLISHED
from .families._gemma3 import build_gemma3, Gemma3, GEMMA3_PRESETS, GEMMA3_PUBLISHED
from .families._glm4 import build_glm4, GLM4, GLM4_PRESETS, GLM4_PUBLISHED
from .families._gpt2 import build_gpt2, GPT2, GPT2_PRESETS, GPT2_PUBLISHED
from .families._gpt_oss import build_gpt_oss, GPT_OSS_PRESETS, GPT_OSS_PUBLISHED, GPTOSS
from .families._granite import build_granite, Granite, GRANITE_PRESETS, GRANITE_PUBLISHED
from .families._jaxformer import build_jaxformer, JAXformer, JAXFORMER_PRESETS
from .families._llama import build_llama, Llama, LLAMA_PRESETS, LLAMA_PUBLISHED
from .families._llama4 import build_llama4, Llama4, LLAMA4_PRESETS, LLAMA4_PUBLISHED
from .families._mistral import build_mistral, Mistral, MISTRAL_PRESETS, MISTRAL_PUBLISHED
from .families._mixtral import build_mixtral, Mixtral, MIXTRAL_PRESETS, MIXTRAL_PUBLISHED
from .families._olmo2 import build_olmo2, Olmo2, OLMO2_PRESETS, OLMO2_PUBLISHED
from .families._olmo3 import build_olmo3, Olmo3, OLMO3_PRESETS, OLMO3_PUBLISHED
from .families._olmoe import build_olmoe, OLMoE, OLMOE_PRESETS, OLMOE_PUBLISHED
from .families._phi3 import build_phi3, Phi3, PHI3_PRESETS, PHI3_PUBLISHED
from .families._qwen2 import build_qwen2, Qwen2, QWEN2_PRESETS, QWEN2_PUBLISHED
from .families._qwen2_moe import build_qwen2_moe, QWEN2_MOE_PRESETS, QWEN2_MOE_PUBLISHED, Qwen2MoE
from .families._qwen3 import build_qwen3, Qwen3, QWEN3_PRESETS, QWEN3_PUBLISHED
from .families._qwen3_moe import build_qwen3_moe, QWEN3_MOE_PRESETS, QWEN3_MOE_PUBLISHED, Qwen3MoE
from .families._qwen3_next import build_qwen3_next, QWEN3_NEXT_PRESETS, QWEN3_NEXT_PUBLISHED, Qwen3Next
from .families._smollm3 import build_smollm3, SmolLM3, SMOLLM3_PRESETS, SMOLLM3_PUBLISHED
from .families._switch import build_switch, GShard, GSHARD_PRESETS, Switch, SWITCH_PRESETS


Numbers = (
    Cohere
    | DeepSeekV2
    | DeepSeekV3
    | Gemma
    | Gemma2
    | Gemma3
    | GLM4
    | GPT2
    | GPTOSS
    | Granite
    | GShard
    | JAXformer
    | Llama
    | Llama4
    | Mistral
    | Mixtral
    | Olmo2
    | Olmo3
    | OLMoE
    | Phi3
    | Qwen2
    | Qwen2MoE
    | Qwen3
    | Qwen3MoE
    | Qwen3Next
    | SmolLM3
    | Switch
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family is: its numbers' class, the function that builds a model from them, and its presets by name."""

    numbers: type
    build: Callable[..., Transformer]
    presets: Mapping[str, Any]
    published: Published | None = None


FAMILIES: dict[str, Family] = {
    "cohere": Family(Cohere, build_cohere, COHERE_PRESETS, COHERE_PUBLISHED),
    "deepseek_v2": Family(DeepSeekV2, build_deepseek_v2, DEEPSEEK_V2_PRESETS, DEEPSEEK_V2_PUBLISHED),
    "deepseek_v3": Family(DeepSeekV3, build_deepseek_v3, DEEPSEEK_V3_PRESETS, DEEPSEEK_V3_PUBLISHED),
    "gemma": Family(Gemma, build_gemma, GEMMA_PRESETS, GEMMA_PUBLISHED),
    "gemma2": Family(Gemma2, build_gemma2, GEMMA2_PRESETS, GEMMA2_PUBLISHED),
    "gemma3": Family(Gemma3, build_gemma3, GEMMA3_PRESETS, GEMMA3_PUBLISHED),
    "glm4": Family(GLM4, build_glm4, GLM4_PRESETS, GLM4_PUBLISHED),
    "gpt2": Family(GPT2, build_gpt2, GPT2_PRESETS, GPT2_PUBLISHED),
    "gpt_oss": Family(GPTOSS, build_gpt_oss, GPT_OSS_PRESETS, GPT_OSS_PUBLISHED),
    "granite": Family(Granite, build_granite, GRANITE_PRESETS, GRANITE_PUBLISHED),
    "gshard": Family(GShard, build_switch, GSHARD_PRESETS),
    "jaxformer": Family(JAXformer, build_jaxformer, JAXFORMER_PRESETS),
    "llama": Family(Llama, build_llama, LLAMA_PRESETS, LLAMA_PUBLISHED),
    "llama4": Family(Llama4, build_llama4, LLAMA4_PRESETS, LLAMA4_PUBLISHED),
    "mistral": Family(Mistral, build_mistral, MISTRAL_PRESETS, MISTRAL_PUBLISHED),
    "mixtral": Family(Mixtral, build_mixtral, MIXTRAL_PRESETS, MIXTRAL_PUBLISHED),
    "olmo2": Family(Olmo2, build_olmo2, OLMO2_PRESETS, OLMO2_PUBLISHED),
    "olmo3": Family(Olmo3, build_olmo3, OLMO3_PRESETS, OLMO3_PUBLISHED),
    "olmoe": Family(OLMoE, build_olmoe, OLMOE_PRESETS, OLMOE_PUBLISHED),
    "phi3": Family(Phi3, build_phi3, PHI3_PRESETS, PHI3_PUBLISHED),
    "qwen2": Family(Qwen2, build_qwen2, QWEN2_PRESETS, QWEN2_PUBLISHED),
    "qwen2_moe": Family(Qwen2MoE, build_qwen2_moe, QWEN2_MOE_PRESETS, QWEN2_MOE_PUBLISHED),
    "qwen3": Family(Qwen3, build_qwen3, QWEN3_PRESETS, QWEN3_PUBLISHED),
    "qwen3_moe": Family(Qwen3MoE, build_qwen3_moe, QWEN3_MOE_PRESETS, QWEN3_MOE_PUBLISHED),
    "qwen3_next": Family(Qwen3Next, build_qwen3_next, QWEN3_NEXT_PRESETS, QWEN3_NEXT_PUBLISHED),
    "smollm3": Family(SmolLM3, build_smollm3, SMOLLM3_PRESETS, SMOLLM3_PUBLISHED),
    "switch": Family(Switch, build_switch, SWITCH_PRESETS),
}


def presets() -> dict[str, Numbers]:
    """The numbers of every preset of every family, by name."""
    return {name: numbers for family in FAMILIES.values() for name, numbers in family.presets.items()}


def preset(name: str) -> Numbers:
    """The numbers of one preset; raises a `ValueError` that lists the names nearest to an unknown one."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)
        raise ValueError(f"preset({name!r}): no such preset; the nearest names are {', '.join(near)}.")
    return known[name]


def build(model: str | Numbers, *, key: Key[Array, ""]) -> Transformer:
    """A model with random weights, from the name of a preset or from a family's numbers.

    Build under `equinox.filter_eval_shape` to get shapes alone, of a model of any size; `nn.run_with` chooses how it
    runs.
    """
    numbers = preset(model) if isinstance(model, str) else model
    family = family_of(f"build({model!r})", numbers)
    return family.build(numbers, key=key)


def family_of(call: str, numbers: Numbers) -> Family:
    """The family whose numbers these are; raises a `ValueError` for what are none's."""
    for family in FAMILIES.values():
        if isinstance(numbers, family.numbers):
            return family
    raise ValueError(f"{call}: no family has numbers of type {type(numbers).__name__}.")
