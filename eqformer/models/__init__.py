"""Families of models: configs, builders, presets, and published formats. Each family has one file."""

from .._hub import hub_name as hub_name
from . import _config_types, _layer_attributes, _rotary_attributes, _rotary_scaling
from ._adapters import load_adapter as load_adapter, save_adapter as save_adapter
from ._attributes import (
    Activation as Activation,
    Attribute as Attribute,
    Count as Count,
    Entry as Entry,
    Expect as Expect,
    Ignore as Ignore,
    Nullable as Nullable,
    SwitchedAttribute as SwitchedAttribute,
    Unpublished as Unpublished,
)
from ._config_types import PublishedConfig as PublishedConfig
from ._family import (
    Classifier as Classifier,
    ClassifierTable as ClassifierTable,
    DecoderConfig as DecoderConfig,
    Family as Family,
    ModelConfig as ModelConfig,
    MultimodalModel as MultimodalModel,
)
from ._folder import read_arrays as read_arrays, read_eos_token_ids as read_eos_token_ids
from ._gguf_tokenizer import (
    companion_folder as companion_folder,
    copy_companions as copy_companions,
    gguf_companion_files as gguf_companion_files,
)
from ._hub import COMPANION_FILES as COMPANION_FILES, local_path as local_path, ModelCard as ModelCard, push as push
from ._load import load as load, load_shapes as load_shapes, read_config as read_config
from ._published_model import (
    is_classifier as is_classifier,
    is_encoder as is_encoder,
    read_classifier as read_classifier,
    read_label_attributes as read_label_attributes,
)
from ._registry import (
    build as build,
    FAMILIES as FAMILIES,
    preset as preset,
    presets as presets,
    register as register,
    shapes as shapes,
    with_classifier as with_classifier,
)
from ._save import save as save
from ._weight_rules import Rule as Rule
from .families import _common, _decoder, _mixtures
from .families._afmoe import AFMoEConfig as AFMoEConfig
from .families._apertus import ApertusConfig as ApertusConfig
from .families._bailing_hybrid import BailingHybridConfig as BailingHybridConfig
from .families._bert import (
    BERTConfig as BERTConfig,
    DistilBERTConfig as DistilBERTConfig,
    MPNetConfig as MPNetConfig,
    RoBERTaConfig as RoBERTaConfig,
)
from .families._bloom import BloomConfig as BloomConfig, MPTConfig as MPTConfig
from .families._cohere import (
    Cohere2Config as Cohere2Config,
    Cohere2MoEConfig as Cohere2MoEConfig,
    CohereConfig as CohereConfig,
)
from .families._deepseek import DeepSeekV2Config as DeepSeekV2Config
from .families._deepseek_v3 import (
    AXK1Config as AXK1Config,
    DeepSeekV3Config as DeepSeekV3Config,
    DeepSeekV32Config as DeepSeekV32Config,
)
from .families._deepseek_v4 import DeepSeekV4Config as DeepSeekV4Config
from .families._ernie45 import Ernie45Config as Ernie45Config, Ernie45MoEConfig as Ernie45MoEConfig
from .families._exaone4 import (
    Exaone4Config as Exaone4Config,
    ExaoneConfig as ExaoneConfig,
    ExaoneMoEConfig as ExaoneMoEConfig,
)
from .families._falcon import FalconConfig as FalconConfig
from .families._falcon_h1 import FalconH1Config as FalconH1Config
from .families._gemma import (
    Gemma2Config as Gemma2Config,
    Gemma3Config as Gemma3Config,
    GemmaConfig as GemmaConfig,
    VaultGemmaConfig as VaultGemmaConfig,
)
from .families._gemma4 import Gemma4Config as Gemma4Config
from .families._glm import (
    GLM4Config as GLM4Config,
    GLM4MoEConfig as GLM4MoEConfig,
    GLM4MoELiteConfig as GLM4MoELiteConfig,
    GLMConfig as GLMConfig,
    GLMMoEDSAConfig as GLMMoEDSAConfig,
    SolarOpenConfig as SolarOpenConfig,
)
from .families._glm5_next import GLM5NextConfig as GLM5NextConfig
from .families._gpt2 import GPT2Config as GPT2Config, GPTBigCodeConfig as GPTBigCodeConfig, GPTNeoConfig as GPTNeoConfig
from .families._gpt_neox import (
    GPTNeoXConfig as GPTNeoXConfig,
    Jais2Config as Jais2Config,
    StarCoder2Config as StarCoder2Config,
)
from .families._gpt_oss import GPTOSSConfig as GPTOSSConfig
from .families._gptj import CodeGenConfig as CodeGenConfig, GPTJConfig as GPTJConfig
from .families._granite import (
    GraniteConfig as GraniteConfig,
    GraniteHybridConfig as GraniteHybridConfig,
    GraniteMoEConfig as GraniteMoEConfig,
    GraniteMoESharedConfig as GraniteMoESharedConfig,
)
from .families._granite_swa import GraniteMoESWAConfig as GraniteMoESWAConfig, GraniteSWAConfig as GraniteSWAConfig
from .families._hunyuan import (
    HunyuanConfig as HunyuanConfig,
    HunyuanMoEConfig as HunyuanMoEConfig,
    Hy3Config as Hy3Config,
)
from .families._hy4 import Hy4Config as Hy4Config
from .families._hyperclovax import HyperCLOVAXConfig as HyperCLOVAXConfig
from .families._jaxformer import JAXformerConfig as JAXformerConfig
from .families._kimi_k3 import KimiK3Config as KimiK3Config
from .families._kimi_linear import KimiLinearConfig as KimiLinearConfig
from .families._laguna import LagunaConfig as LagunaConfig
from .families._lfm2 import LFM2Config as LFM2Config, LFM2MoEConfig as LFM2MoEConfig, LFM3Config as LFM3Config
from .families._llama import (
    ArceeConfig as ArceeConfig,
    CWMConfig as CWMConfig,
    EuroBERTConfig as EuroBERTConfig,
    HeliumConfig as HeliumConfig,
    InternLM3Config as InternLM3Config,
    IQuestCoderConfig as IQuestCoderConfig,
    LlamaConfig as LlamaConfig,
    SeedOSSConfig as SeedOSSConfig,
    SmolLM3Config as SmolLM3Config,
)
from .families._llama4 import Llama4Config as Llama4Config
from .families._mamba2 import BambaConfig as BambaConfig, Mamba2Config as Mamba2Config
from .families._mellum import MellumConfig as MellumConfig
from .families._mimo_v2 import MiMoV2FlashConfig as MiMoV2FlashConfig
from .families._minicpm3 import MiniCPM3Config as MiniCPM3Config, YoutuConfig as YoutuConfig
from .families._minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
from .families._minimax_m3 import MiniMaxM3Config as MiniMaxM3Config
from .families._mistral import (
    Ministral3Config as Ministral3Config,
    MinistralConfig as MinistralConfig,
    Mistral4Config as Mistral4Config,
    MistralConfig as MistralConfig,
    MixtralConfig as MixtralConfig,
)
from .families._mistral_large4 import MistralLarge4Config as MistralLarge4Config
from .families._modernbert import ModernBERTConfig as ModernBERTConfig
from .families._muse_glimmer import MuseGlimmerConfig as MuseGlimmerConfig
from .families._nanochat import NanoChatConfig as NanoChatConfig, SpeedrunConfig as SpeedrunConfig
from .families._nemotron import NemotronConfig as NemotronConfig
from .families._nemotron_h import NemotronHConfig as NemotronHConfig
from .families._nomic_bert import GTEConfig as GTEConfig, NomicBERTConfig as NomicBERTConfig
from .families._olmo import (
    FlexOlmoConfig as FlexOlmoConfig,
    Olmo2Config as Olmo2Config,
    Olmo3Config as Olmo3Config,
    OlmoConfig as OlmoConfig,
    OLMoEConfig as OLMoEConfig,
)
from .families._olmo_hybrid import OlmoHybridConfig as OlmoHybridConfig
from .families._opt import OPTConfig as OPTConfig
from .families._phi import Phi3Config as Phi3Config, PhiMoEConfig as PhiMoEConfig
from .families._phi2 import Phi2Config as Phi2Config
from .families._qwen import (
    Dots1Config as Dots1Config,
    FlintConfig as FlintConfig,
    Qwen2Config as Qwen2Config,
    Qwen2MoEConfig as Qwen2MoEConfig,
    Qwen3Config as Qwen3Config,
    Qwen3MoEConfig as Qwen3MoEConfig,
)
from .families._qwen3_next import (
    Qwen3NextConfig as Qwen3NextConfig,
    Qwen35Config as Qwen35Config,
    Qwen35MoEConfig as Qwen35MoEConfig,
)
from .families._qwen4_exp import Qwen4ExpConfig as Qwen4ExpConfig
from .families._sarvam import SarvamMLAConfig as SarvamMLAConfig, SarvamMoEConfig as SarvamMoEConfig
from .families._sdar import SDARConfig as SDARConfig
from .families._stablelm import StableLMConfig as StableLMConfig
from .families._step3p5 import Step3p5Config as Step3p5Config
from .families._switch import GShardConfig as GShardConfig, SwitchConfig as SwitchConfig
from .families._t5 import T5Config as T5Config
from .families._t5gemma import T5Gemma2Config as T5Gemma2Config, T5GemmaConfig as T5GemmaConfig


# Modules that are public as a whole. They are assigned, because type checkers treat a module that is imported under
# another name as private.
config_types = _config_types
layer_attributes = _layer_attributes
rotary_attributes = _rotary_attributes
rotary_scaling = _rotary_scaling
tables = _common
decoders = _decoder
mixtures = _mixtures
