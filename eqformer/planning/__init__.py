"""What a run will cost: parameters, operations, and the machine's measured speed."""

from ._costs import flops_per_token as flops_per_token, parameter_count as parameter_count, visible_keys as visible_keys
from ._peak import matmul_peak as matmul_peak
