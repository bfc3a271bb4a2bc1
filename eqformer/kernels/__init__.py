"""Operations that run differently on different chips: their definitions, their kernels, and the choice between them.

The tables at the end name the implementations of attention, of grouped products and of quantized products. Code outside
of this folder imports an op from here, and never the file of a kernel.
"""

import types

from .._mask import (
    causal as causal,
    ChosenKeys as ChosenKeys,
    chunked as chunked,
    full as full,
    Mask as Mask,
    OF_SOURCE as OF_SOURCE,
    sliding_window as sliding_window,
    window_both_ways as window_both_ways,
)
from ._cache_write import (
    CACHE_WRITE as CACHE_WRITE,
    CacheWriteCall as CacheWriteCall,
    LayerFill as LayerFill,
    round_up_slots as round_up_slots,
    ScatterWrite as ScatterWrite,
    TileWrite as TileWrite,
)
from ._decode_attention import DECODE_ATTENTION as DECODE_ATTENTION, FilledSlotsDecoding as FilledSlotsDecoding
from ._decode_attention_gpu import FlashDecodingGpu as FlashDecodingGpu
from ._decode_attention_tpu import FlashDecodingTpu as FlashDecodingTpu
from ._native import (
    build_native as build_native,
    find_compiler as find_compiler,
    NativeQuantizedMatmul as NativeQuantizedMatmul,
)
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
    at_least_float32 as at_least_float32,
    capability_of as capability_of,
    compilers as compilers,
    cpu_or as cpu_or,
    E4M3 as E4M3,
    E5M2 as E5M2,
    gpu_capability as gpu_capability,
    round_to_fp8 as round_to_fp8,
    traced_for as traced_for,
    varying_of as varying_of,
    varying_zero as varying_zero,
)
from ._quantized_matmul import (
    BITS as BITS,
    BlockwiseMatmul as BlockwiseMatmul,
    codes_in_a_byte as codes_in_a_byte,
    decode_matrix as decode_matrix,
    DecodedMatmul as DecodedMatmul,
    QuantizedMatmulCall as QuantizedMatmulCall,
    QuantizedMatmulGpu as QuantizedMatmulGpu,
    repeat_groups as repeat_groups,
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
    blockwise_of as blockwise_of,
    DotProductAttention as DotProductAttention,
    flash_choice as flash_choice,
    PiecewiseAttention as PiecewiseAttention,
    ReferenceAttention as ReferenceAttention,
    RequiredKernel as RequiredKernel,
    run_attention as run_attention,
    unsupported_options as unsupported_options,
)
from .attention._blockwise import (
    BlockwiseAttention as BlockwiseAttention,
    FEW as FEW,
    join_blocks as join_blocks,
    split_blocks as split_blocks,
)
from .attention._call import (
    apply_softcap as apply_softcap,
    AttentionCall as AttentionCall,
    DecodeCall as DecodeCall,
    lowest as lowest,
    StoredArrays as StoredArrays,
    TokenPositions as TokenPositions,
    with_one_batch_dim as with_one_batch_dim,
)
from .attention._cudnn import CudnnAttention as CudnnAttention
from .attention._flash import FlashAttention as FlashAttention
from .attention._reference import (
    attend_to_sources as attend_to_sources,
    attention_probabilities as attention_probabilities,
    RotatedChannels as RotatedChannels,
    weigh_values as weigh_values,
)
from .attention._splash import SplashAttention as SplashAttention
from .grouped_matmul._call import (
    GroupedMatmul as GroupedMatmul,
    GroupedMatmulCall as GroupedMatmulCall,
    XlaGroupedMatmul as XlaGroupedMatmul,
)
from .grouped_matmul._hopper import HopperGroupedMatmul as HopperGroupedMatmul
from .grouped_matmul._hopper_fp8 import (
    has_fp8_grouped_matmul as has_fp8_grouped_matmul,
    HopperFp8GroupedMatmul as HopperFp8GroupedMatmul,
)
from .grouped_matmul._tpu import TpuGroupedMatmul as TpuGroupedMatmul


blockwise = _blockwise
flash = _flash

ATTENTION = Op(
    ReferenceAttention(),
    (("cuda", CudnnAttention()), ("tpu", SplashAttention()), ("any", BlockwiseAttention())),
    run_attention,
)
"""Attention by cuDNN on NVIDIA GPUs, by splash attention on TPUs, and by a loop over blocks on other platforms.

Calls that cuDNN or splash attention does not support are computed by the loop over blocks or, if the loop does not
support them either, by `ReferenceAttention`.
"""
ATTENTIONS = types.MappingProxyType(
    {
        "auto": ATTENTION,
        "xla": DotProductAttention(),
        "reference": ReferenceAttention(),
        "blockwise": BlockwiseAttention(),
        "cudnn": RequiredKernel("cuda", CudnnAttention()),
        "splash": RequiredKernel("tpu", SplashAttention()),
    }
)
"""The attention operations by their names in flags and recipes."""
GROUPED_MATMUL = Op(
    XlaGroupedMatmul(),
    (("cuda", HopperFp8GroupedMatmul()), ("cuda", HopperGroupedMatmul()), ("tpu", TpuGroupedMatmul())),
)
"""Products of rows, sorted by group, with the matrices of their groups."""
QUANTIZED_MATMUL = Op(
    DecodedMatmul(), (("cpu", NativeQuantizedMatmul()), ("cpu", BlockwiseMatmul()), ("cuda", QuantizedMatmulGpu()))
)
"""Products of few rows with a quantized matrix, which is decoded in blocks on CPUs and NVIDIA GPUs."""
