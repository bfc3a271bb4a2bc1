"""Operations that run differently on different chips: their definitions, their kernels, and the choice between them."""

from ._dtypes import at_least_float32 as at_least_float32, E4M3 as E4M3, E5M2 as E5M2, round_to_fp8 as round_to_fp8
from ._explain import explain as explain, Explanation as Explanation
from ._op import (
    Choice as Choice,
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
from .attention._call import AttentionCall as AttentionCall, with_one_batch_dim as with_one_batch_dim
from .attention._cudnn import CudnnAttention as CudnnAttention
from .attention._dot_product import DotProductAttention as DotProductAttention
from .attention._flash import FlashAttention as FlashAttention
from .attention._mask import (
    causal as causal,
    ChosenKeys as ChosenKeys,
    chunked as chunked,
    full as full,
    Mask as Mask,
    OF_SOURCE as OF_SOURCE,
    sliding_window as sliding_window,
    window_both_ways as window_both_ways,
)
from .attention._positions import TokenPositions as TokenPositions
from .attention._reference import (
    attend_to_sources as attend_to_sources,
    lowest as lowest,
    ReferenceAttention as ReferenceAttention,
    RotatedChannels as RotatedChannels,
    soft_capped as soft_capped,
)
from .attention._splash import SplashAttention as SplashAttention
from .cache_write._call import CacheWriteCall as CacheWriteCall
from .cache_write._tpu import LayerFill as LayerFill, rounded_slots as rounded_slots, TileWrite as TileWrite
from .cache_write._write import CACHE_WRITE as CACHE_WRITE, ScatterWrite as ScatterWrite
from .decode_attention._call import DecodeCall as DecodeCall, StoredArrays as StoredArrays
from .decode_attention._decode import DECODE_ATTENTION as DECODE_ATTENTION
from .decode_attention._gpu import FlashDecodingGpu as FlashDecodingGpu
from .decode_attention._tpu import FlashDecodingTpu as FlashDecodingTpu
from .grouped_matmul._call import GroupedMatmul as GroupedMatmul, GroupedMatmulCall as GroupedMatmulCall
from .grouped_matmul._grouped_matmul import (
    GROUPED_MATMUL as GROUPED_MATMUL,
    XlaGroupedMatmul as XlaGroupedMatmul,
)
from .grouped_matmul._hopper import HopperGroupedMatmul as HopperGroupedMatmul
from .grouped_matmul._hopper_fp8 import (
    fp8_grouped_matmul as fp8_grouped_matmul,
    HopperFp8GroupedMatmul as HopperFp8GroupedMatmul,
)
from .grouped_matmul._tpu import TpuGroupedMatmul as TpuGroupedMatmul
from .recurrent_step._call import (
    initial_state as initial_state,
    RecurrentStepCall as RecurrentStepCall,
    StateLayout as StateLayout,
    Step as Step,
)
from .recurrent_step._step import RECURRENT_STEP as RECURRENT_STEP, ReferenceStep as ReferenceStep
from .recurrent_step._tpu import StepTpu as StepTpu


blockwise = _blockwise
flash = _flash
