"""Programs read from jaxprs and HLO, and their costs: operations, memory traffic, communication, peak memory, time."""

from ._buffers import Buffer as Buffer, largest_buffers as largest_buffers
from ._costs import (
    bytes_sent as bytes_sent,
    CompiledCosts as CompiledCosts,
    count_cycles as count_cycles,
    count_flops as count_flops,
    count_moved_bytes as count_moved_bytes,
    list_transfers as list_transfers,
    read_compiled as read_compiled,
    Span as Span,
    time_account as time_account,
    Work as Work,
)
from ._first_non_finite import find_non_finite as find_non_finite, NonFiniteOrigin as NonFiniteOrigin
from ._hlo import read_hlo as read_hlo
from ._hlo_text import module_of as module_of
from ._ir import FURTHER_ROUNDS as FURTHER_ROUNDS, Operation as Operation, Program as Program, Transfer as Transfer
from ._jaxpr import inner_jaxprs as inner_jaxprs, read_jaxpr as read_jaxpr, read_traced as read_traced
from ._peak import count_host_bytes as count_host_bytes, estimate_peak as estimate_peak, PeakMemory as PeakMemory
