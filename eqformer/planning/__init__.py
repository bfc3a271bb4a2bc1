"""What a run will cost: parameters, operations, and the machine's measured speed."""

from ._communication import (
    bytes_sent as bytes_sent,
    communication as communication,
    communication_table as communication_table,
    Transfer as Transfer,
)
from ._costs import flops_per_token as flops_per_token, parameter_count as parameter_count, visible_keys as visible_keys
from ._peak import matmul_peak as matmul_peak
