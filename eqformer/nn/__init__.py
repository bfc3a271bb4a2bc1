"""Components: arrays and their named dims. Nothing here knows a family, a device or a training run."""

from .._mask import (
    block_causal as block_causal,
    causal as causal,
    chunked as chunked,
    full as full,
    Mask as Mask,
    sliding_window as sliding_window,
    window_both_ways as window_both_ways,
)
from ..kernels import codes_in_a_byte as codes_in_a_byte
from ._attention_residuals import (
    AttentionResidual as AttentionResidual,
    BlockScores as BlockScores,
    ExpandBlocks as ExpandBlocks,
    MergeBlocks as MergeBlocks,
)
from ._block import (
    Block as Block,
    Dropout as Dropout,
    EmbeddingSkip as EmbeddingSkip,
    ParallelResidual as ParallelResidual,
    Residual as Residual,
    StreamScale as StreamScale,
)
from ._cache import (
    can_roll_back as can_roll_back,
    check_cached as check_cached,
    ConvCache as ConvCache,
    index_layer as index_layer,
    is_position_array as is_position_array,
    KVCache as KVCache,
    LatentCache as LatentCache,
    LayerCache as LayerCache,
    map_slot_caches as map_slot_caches,
    RecurrentCache as RecurrentCache,
    restore_states as restore_states,
    SlotCache as SlotCache,
    update_layer as update_layer,
)
from ._contracts import (
    Attends as Attends,
    Aux as Aux,
    aux_loss as aux_loss,
    aux_of as aux_of,
    ChunkedUnembedding as ChunkedUnembedding,
    ComposedMap as ComposedMap,
    ComputeDtypeMatmul as ComputeDtypeMatmul,
    DenseMap as DenseMap,
    FeedForward as FeedForward,
    Layer as Layer,
    LinearMap as LinearMap,
    MatmulPrecision as MatmulPrecision,
    Mixer as Mixer,
    MixerFacts as MixerFacts,
    Routed as Routed,
    ScoreBias as ScoreBias,
    Sublayer as Sublayer,
)
from ._dtype import (
    add_float32 as add_float32,
    at_least_float32 as at_least_float32,
    broadcast_float32 as broadcast_float32,
    float_dtype as float_dtype,
    in_float32 as in_float32,
    lookup_rows as lookup_rows,
    lossless_dtype as lossless_dtype,
    multiply_float32 as multiply_float32,
)
from ._embedding import (
    Embedding as Embedding,
    LearnedPositions as LearnedPositions,
    matrices as matrices,
    Matrix as Matrix,
    PerLayerEmbedding as PerLayerEmbedding,
    PerLayerGate as PerLayerGate,
    PerLayerInputs as PerLayerInputs,
    TokenTypes as TokenTypes,
    unembed as unembed,
)
from ._execution import Execution as Execution, with_execution as with_execution
from ._gated_streams import GatedConnection as GatedConnection, GatedMerge as GatedMerge, StreamGates as StreamGates
from ._linear import (
    dense as dense,
    is_map as is_map,
    Linear as Linear,
    linear_maps as linear_maps,
    LinearWrapper as LinearWrapper,
    map_linears as map_linears,
    PrecomputedLinear as PrecomputedLinear,
)
from ._lora import (
    add_lora as add_lora,
    LoRA as LoRA,
    lora_factors as lora_factors,
    merge_lora as merge_lora,
    with_lora as with_lora,
    without_lora as without_lora,
)
from ._mlp import (
    ACTIVATIONS as ACTIVATIONS,
    BoundedActivation as BoundedActivation,
    clipped_gelu as clipped_gelu,
    GatedMLP as GatedMLP,
    gelu as gelu,
    gelu_tanh as gelu_tanh,
    hard_swish as hard_swish,
    identity as identity,
    laplace as laplace,
    leaky_relu as leaky_relu,
    mish as mish,
    MLP as MLP,
    quick_gelu as quick_gelu,
    relu as relu,
    relu6 as relu6,
    relu_squared as relu_squared,
    ScaledActivation as ScaledActivation,
    sigmoid as sigmoid,
    silu as silu,
    SiTU as SiTU,
    sqrt_softplus as sqrt_softplus,
    tanh as tanh,
    XIELU as XIELU,
)
from ._model_contracts import (
    EmbeddingTable as EmbeddingTable,
    LanguageModel as LanguageModel,
    LayerStack as LayerStack,
    ModelParts as ModelParts,
    PositionEmbedding as PositionEmbedding,
    RandomMask as RandomMask,
    ReadsIds as ReadsIds,
    RotaryFactors as RotaryFactors,
    StreamExpansion as StreamExpansion,
    StreamMap as StreamMap,
    StreamMerge as StreamMerge,
    TokenEmbedding as TokenEmbedding,
)
from ._module import (
    call_observer as call_observer,
    CallObserver as CallObserver,
    dims as dims,
    dims_table as dims_table,
    ensemble as ensemble,
    field_dim_names as field_dim_names,
    float32_field as float32_field,
    float32_flags as float32_flags,
    format_table as format_table,
    has_shape as has_shape,
    is_trainable as is_trainable,
    map_modules as map_modules,
    Module as Module,
    modules as modules,
    named_by as named_by,
    named_modules as named_modules,
    observe_calls as observe_calls,
    path_name as path_name,
)
from ._ngram_memory import (
    NGramCache as NGramCache,
    NGramHash as NGramHash,
    NGramMemory as NGramMemory,
    NGramTable as NGramTable,
    splitmix_hash as splitmix_hash,
)
from ._norm import (
    ClippedNorm as ClippedNorm,
    IdentityNorm as IdentityNorm,
    LayerNorm as LayerNorm,
    Norm as Norm,
    RMSNorm as RMSNorm,
)
from ._pooling import (
    ClassificationHead as ClassificationHead,
    DenseLayer as DenseLayer,
    Pooling as Pooling,
    POOLINGS as POOLINGS,
    UnitLength as UnitLength,
)
from ._precision import (
    cast as cast,
    Fp8Linear as Fp8Linear,
    Fp8Matmul as Fp8Matmul,
    Precision as Precision,
    with_fp8 as with_fp8,
    without_fp8 as without_fp8,
)
from ._quantization import (
    dequantize as dequantize,
    quantize as quantize,
    quantized_formats as quantized_formats,
    QuantizedLinear as QuantizedLinear,
    with_quantized_formats as with_quantized_formats,
)
from ._stack import (
    REMAT as REMAT,
    run_layers as run_layers,
    shared_names_read as shared_names_read,
    Stack as Stack,
    SuperBlock as SuperBlock,
    with_ids as with_ids,
)
from ._streams import (
    ExpandStreams as ExpandStreams,
    HyperConnection as HyperConnection,
    MeanStreams as MeanStreams,
    MergeStreams as MergeStreams,
    Sinkhorn as Sinkhorn,
    StreamSublayer as StreamSublayer,
    StreamWeights as StreamWeights,
)
from ._tokens import (
    document_lengths as document_lengths,
    mark_whole_rows as mark_whole_rows,
    packed_in_order as packed_in_order,
    positions_like as positions_like,
    right_padded as right_padded,
    SharedKV as SharedKV,
    SharedValue as SharedValue,
    ShareRequest as ShareRequest,
    Source as Source,
    token_keys as token_keys,
    Tokens as Tokens,
    tokens_or_default as tokens_or_default,
    with_row_layout_of as with_row_layout_of,
    with_source as with_source,
)
from ._transformer import (
    Encoder as Encoder,
    MappedNorm as MappedNorm,
    PredictionHead as PredictionHead,
    Predictor as Predictor,
    Transformer as Transformer,
    without_head as without_head,
)
from .attention._attention import (
    Attention as Attention,
    ValueEmbeddedAttention as ValueEmbeddedAttention,
    ValueEmbedding as ValueEmbedding,
)
from .attention._block_indexer import BlockIndexedAttention as BlockIndexedAttention, BlockIndexer as BlockIndexer
from .attention._block_masks import (
    block_of as block_of,
    only_attends as only_attends,
    with_blocks as with_blocks,
    with_causal_masks as with_causal_masks,
)
from .attention._compressed_attention import (
    CompressedAttention as CompressedAttention,
    EntryIndexer as EntryIndexer,
    KeyCompressor as KeyCompressor,
)
from .attention._compressed_cache import VectorCache as VectorCache
from .attention._cross_attention import (
    CrossAttention as CrossAttention,
    CrossLayerAttention as CrossLayerAttention,
    MergedAttention as MergedAttention,
)
from .attention._indexed_attention import IndexedAttention as IndexedAttention, IndexedCache as IndexedCache
from .attention._indexer import (
    Indexer as Indexer,
    KeyIndexer as KeyIndexer,
    KeySelection as KeySelection,
    SelectedKeys as SelectedKeys,
)
from .attention._latent_attention import LatentAttention as LatentAttention
from .attention._learned_rotary import LearnedFrequencies as LearnedFrequencies, LearnedRotary as LearnedRotary
from .attention._pooled_indexer import (
    MeanPoolIndexer as MeanPoolIndexer,
    PooledIndexer as PooledIndexer,
    PoolSelection as PoolSelection,
)
from .attention._rotary import (
    DynamicScaling as DynamicScaling,
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    LongRopeScaling as LongRopeScaling,
    NTKScaling as NTKScaling,
    PositionEncoding as PositionEncoding,
    ProportionalScaling as ProportionalScaling,
    Rotary as Rotary,
    RotaryScaling as RotaryScaling,
    RotaryThenNorm as RotaryThenNorm,
    yarn_magnitude as yarn_magnitude,
    YarnScaling as YarnScaling,
)
from .attention._scores import (
    ALiBi as ALiBi,
    HeadLogTemperature as HeadLogTemperature,
    LogTemperature as LogTemperature,
    QueryTemperature as QueryTemperature,
    RelativeBias as RelativeBias,
    Scores as Scores,
)
from .attention._shared_keys import SharedKeys as SharedKeys, SharedLatents as SharedLatents
from .experts import _dispatch
from .experts._balance import (
    BalanceLoss as BalanceLoss,
    Importance as Importance,
    LoadBalance as LoadBalance,
    NoisyLoad as NoisyLoad,
    RouterZ as RouterZ,
    update_selection_bias as update_selection_bias,
)
from .experts._dispatch import Capacity as Capacity, Dispatch as Dispatch, Dropless as Dropless
from .experts._experts import Experts as Experts
from .experts._moe import (
    aux_of_slots as aux_of_slots,
    chooses_experts as chooses_experts,
    ExpertMixture as ExpertMixture,
    first_experts as first_experts,
    GatedShared as GatedShared,
    MoE as MoE,
    ROUTER as ROUTER,
)
from .experts._routers import (
    ExpertChoiceRouter as ExpertChoiceRouter,
    ExpertGroups as ExpertGroups,
    HashRouter as HashRouter,
    NoisyTopKRouter as NoisyTopKRouter,
    RandomSecondRouter as RandomSecondRouter,
    SparseMixerRouter as SparseMixerRouter,
    TopKRouter as TopKRouter,
)
from .experts._routing import Router as Router, RouterFacts as RouterFacts, Routing as Routing, Slots as Slots
from .recurrent._convolution import CausalConv as CausalConv, GatedShortConv as GatedShortConv
from .recurrent._delta_net import ChannelDeltaNet as ChannelDeltaNet, GatedDeltaNet as GatedDeltaNet
from .recurrent._mamba import GateNorm as GateNorm, Mamba2Mixer as Mamba2Mixer


# A file whose names are all public. It is assigned, because type checkers take an import under a new name for private.
dispatch = _dispatch
