"""Operations, cycles and memory traffic of a program: sums over its operations, loops multiplied out.

A conditional counts as its most expensive branch, and a loop of unknown length as one iteration.
"""

from collections.abc import Callable

from ._ir import CONDITIONALS, Operation, Program


def count_flops(program: Program) -> float:
    """Return the floating-point operations of all matrix products; a multiplication and an addition are two.

    Kernels (Mosaic, Triton) and calls of libraries other than cuBLAS (cuDNN) are not seen.
    """
    return _sum_costs(program, lambda operation: operation.flops)


def count_cycles(program: Program) -> int:
    """Return the cycles that a TPU's compiler estimates; 0 where it says none."""
    # The cycles of a fusion are those of its body, unless the compiler says none for it.
    return round(_sum_costs(program, lambda operation: operation.cycles, lambda operation: not operation.cycles))


def count_moved_bytes(program: Program) -> float:
    """Return the bytes that a compiled program reads and writes in the device's main memory.

    Each operation reads its operands once and writes its result; a fusion is one operation. Bytes in a TPU's vector
    memory do not count, nor bytes that a kernel reads twice.
    """
    return _sum_costs(program, lambda operation: operation.moved, lambda _: False)


def _sum_costs(
    program: Program, cost: Callable[[Operation], float], enters: Callable[[Operation], bool] = lambda _: True
) -> float:
    """Sum a cost over a program; `enters` says whether the body of a fusion counts."""
    total = 0.0
    for operation in program.operations:
        total += cost(operation)
        if operation.kind in _CONTROL_FLOW or enters(operation):
            costs = [_sum_costs(body, cost, enters) for body in operation.bodies]
            inner = max(costs, default=0.0) if operation.kind in CONDITIONALS else sum(costs)
            total += (1 if operation.trips is None else operation.trips) * inner
    return total


_CONTROL_FLOW = {"scan", "while", "call", "async-start", *CONDITIONALS}
