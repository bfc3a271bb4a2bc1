"""The grouped matmul op: the kernels that there are, the preferred ones first."""

from .._op import Op
from ._call import XlaGroupedMatmul
from ._hopper import HopperGroupedMatmul
from ._hopper_fp8 import HopperFp8GroupedMatmul
from ._tpu import TpuGroupedMatmul


GROUPED_MATMUL = Op(
    XlaGroupedMatmul(),
    (("cuda", HopperFp8GroupedMatmul()), ("cuda", HopperGroupedMatmul()), ("tpu", TpuGroupedMatmul())),
)
"""Products of sorted rows with their groups' matrices."""
