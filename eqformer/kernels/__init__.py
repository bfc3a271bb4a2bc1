"""Operations that run differently on different chips: their definitions, their kernels, and the choice between them."""

from ._cache_write import (
    CACHE_WRITE as CACHE_WRITE,
    CacheWriteCall as CacheWriteCall,
    LayerFill as LayerFill,
    round_up_slots as round_up_slots,
    ScatterWrite as ScatterWrite,
    TileWrite as TileWrite,
)
from ._decode_attention import DECODE_ATTENTION as DECODE_ATTENTION
from ._decode_attention_cpu import FilledSlotsDecoding as FilledSlotsDecoding
from ._decode_attention_gpu import FlashDecodingGpu as FlashDecodingGpu
from ._decode_attention_tpu import FlashDecodingTpu as FlashDecodingTpu
from ._dtypes import at_least_float32 as at_least_float32, E4M3 as E4M3, E5M2 as E5M2, round_to_fp8 as round_to_fp8
from ._op import (
    Choice as Choice,
    explain as explain,
    Explanation as Explanation,
    Implementation as Implementation,
    Op as Op,
    Operation as Operation,
    record_choice as record_choice,
)
from ._platform import (
    capability_of as capability_of,
    compilers as compilers,
    cpu_or as cpu_or,
    gpu_capability as gpu_capability,
    traced_for as traced_for,
    varying_of as varying_of,
)
from ._recurrent_step import (
    initial_state as initial_state,
    RECURRENT_STEP as RECURRENT_STEP,
    RecurrentStepCall as RecurrentStepCall,
    ReferenceStep as ReferenceStep,
    StateLayout as StateLayout,
    Step as Step,
    StepTpu as StepTpu,
)
from .attention import _blockwise, _flash
from .attention._attention import (
    ATTENTION as ATTENTION,
    ATTENTIONS as ATTENTIONS,
    blockwise_of as blockwise_of,
    decodes_by_kernels as decodes_by_kernels,
    flash_choice as flash_choice,
    RequiredKernel as RequiredKernel,
    unsupported_options as unsupported_options,
)
from .attention._blockwise import BlockwiseAttention as BlockwiseAttention, FEW as FEW
from .attention._call import (
    AttentionCall as AttentionCall,
    causal as causal,
    ChosenKeys as ChosenKeys,
    chunked as chunked,
    DecodeCall as DecodeCall,
    full as full,
    Mask as Mask,
    OF_SOURCE as OF_SOURCE,
    sliding_window as sliding_window,
    StoredArrays as StoredArrays,
    TokenPositions as TokenPositions,
    window_both_ways as window_both_ways,
    with_one_batch_dim as with_one_batch_dim,
)
from .attention._cudnn import CudnnAttention as CudnnAttention
from .attention._flash import FlashAttention as FlashAttention
from .attention._reference import (
    apply_softcap as apply_softcap,
    attend_to_sources as attend_to_sources,
    attention_weights as attention_weights,
    DotProductAttention as DotProductAttention,
    lowest as lowest,
    ReferenceAttention as ReferenceAttention,
    RotatedChannels as RotatedChannels,
    weigh_values as weigh_values,
)
from .attention._splash import SplashAttention as SplashAttention
from .grouped_matmul._call import GroupedMatmul as GroupedMatmul, GroupedMatmulCall as GroupedMatmulCall
from .grouped_matmul._grouped_matmul import GROUPED_MATMUL as GROUPED_MATMUL, XlaGroupedMatmul as XlaGroupedMatmul
from .grouped_matmul._hopper import HopperGroupedMatmul as HopperGroupedMatmul
from .grouped_matmul._hopper_fp8 import (
    has_fp8_grouped_matmul as has_fp8_grouped_matmul,
    HopperFp8GroupedMatmul as HopperFp8GroupedMatmul,
)
from .grouped_matmul._tpu import TpuGroupedMatmul as TpuGroupedMatmul


blockwise = _blockwise
flash = _flash
