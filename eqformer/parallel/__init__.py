"""Mesh axes, layouts and transforms: one model over any number of devices."""

from ._collective_matmul import (
    all_gather_matmul as all_gather_matmul,
    matmul_reduce_scatter as matmul_reduce_scatter,
    OVERLAPS as OVERLAPS,
)
