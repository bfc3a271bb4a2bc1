"""Costs of a traced or compiled program: operations, memory traffic, communication and memory."""

from ._buffers import Buffer as Buffer, largest_buffers as largest_buffers
from ._communication import (
    bytes_sent as bytes_sent,
    list_traced_transfers as list_traced_transfers,
    list_transfers as list_transfers,
    Transfer as Transfer,
)
from ._compiled import CompiledCosts as CompiledCosts, read_compiled as read_compiled
from ._flops import executed as executed
from ._hlo import FURTHER_ROUNDS as FURTHER_ROUNDS, module_of as module_of
from ._jaxpr import (
    carry_of as carry_of,
    host_bytes as host_bytes,
    Line as Line,
    Lines as Lines,
    needed as needed,
    of_platform as of_platform,
    per_device as per_device,
)
from ._time_account import Span as Span, time_account as time_account, Work as Work
from ._traffic import moved_bytes as moved_bytes
