"""Families: numbers, straight-line constructor calls, presets. One file a family."""

from ._adapters import load_adapter as load_adapter, save_adapter as save_adapter
from ._families import (
    build as build,
    FAMILIES as FAMILIES,
    Family as Family,
    Numbers as Numbers,
    preset as preset,
    presets as presets,
)
from ._folder import read_json as read_json
from ._load import load as load, read_numbers as read_numbers
from ._save import COMPANIONS as COMPANIONS, save as save
from .families._cohere import build_cohere as build_cohere, Cohere as Cohere
from .families._deepseek_v2 import build_deepseek_v2 as build_deepseek_v2, DeepSeekV2 as DeepSeekV2
from .families._deepseek_v3 import build_deepseek_v3 as build_deepseek_v3, DeepSeekV3 as DeepSeekV3
from .families._gemma import build_gemma as build_gemma, Gemma as Gemma
from .families._gemma2 import build_gemma2 as build_gemma2, Gemma2 as Gemma2
from .families._gemma3 import build_gemma3 as build_gemma3, Gemma3 as Gemma3
from .families._glm4 import build_glm4 as build_glm4, GLM4 as GLM4
from .families._gpt2 import build_gpt2 as build_gpt2, GPT2 as GPT2
from .families._gpt_oss import build_gpt_oss as build_gpt_oss, GPTOSS as GPTOSS
from .families._granite import build_granite as build_granite, Granite as Granite
from .families._jaxformer import build_jaxformer as build_jaxformer, JAXformer as JAXformer
from .families._llama import build_llama as build_llama, Llama as Llama
from .families._llama4 import build_llama4 as build_llama4, Llama4 as Llama4
from .families._mistral import build_mistral as build_mistral, Mistral as Mistral
from .families._mixtral import build_mixtral as build_mixtral, Mixtral as Mixtral
from .families._olmo2 import build_olmo2 as build_olmo2, Olmo2 as Olmo2
from .families._olmo3 import build_olmo3 as build_olmo3, Olmo3 as Olmo3
from .families._olmoe import build_olmoe as build_olmoe, OLMoE as OLMoE
from .families._phi3 import build_phi3 as build_phi3, Phi3 as Phi3
from .families._qwen2 import build_qwen2 as build_qwen2, Qwen2 as Qwen2
from .families._qwen2_moe import build_qwen2_moe as build_qwen2_moe, Qwen2MoE as Qwen2MoE
from .families._qwen3 import build_qwen3 as build_qwen3, Qwen3 as Qwen3
from .families._qwen3_moe import build_qwen3_moe as build_qwen3_moe, Qwen3MoE as Qwen3MoE
from .families._qwen3_next import build_qwen3_next as build_qwen3_next, Qwen3Next as Qwen3Next
from .families._smollm3 import build_smollm3 as build_smollm3, SmolLM3 as SmolLM3
from .families._switch import build_switch as build_switch, GShard as GShard, Switch as Switch
