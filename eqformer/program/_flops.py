"""What a compiled program executes, from its text: operations of its products, and cycles by a TPU's compiler."""

import itertools
import math
import re
from collections.abc import Callable

import numpy as np

from ._hlo import called, Instruction, parse, trips_of


def executed(text: str) -> tuple[float, int]:
    """Operations of all products of matrices, and the cycles that the compiler estimates (0 where it says none).

    Loops are multiplied out, of a conditional the branch with the most is counted, and a multiplication and an addition
    are two operations. Kernels (Mosaic, Triton) and calls of libraries other than cuBLAS (cuDNN) are not seen.
    """
    program, entry = parse(text)
    return _summed(program, entry, _operations, {}), round(_summed(program, entry, lambda line, _: _cycles(line), {}))


Of = Callable[[Instruction, dict[str, Instruction]], float]


def _summed(program: dict[str, list[Instruction]], name: str, of: Of, known: dict[str, float]) -> float:
    if name not in known:
        lines = program.get(name, [])
        beside = {line.name: line for line in lines}
        total = 0.0
        for line in lines:
            own = of(line, beside)
            parts = [_summed(program, each, of, known) for each in called(line)]
            inner = max(parts, default=0.0) if line.operation == "conditional" else sum(parts)
            times = trips_of(line, program, beside) if line.operation == "while" else 1
            # A fusion that says its own cycles says those of all that it holds.
            total += own + (1 if times is None else times) * inner * (line.operation != "fusion" or not own)
        known[name] = total
    return known[name]


def _cycles(line: Instruction) -> float:
    found = re.search(r'"estimated_cycles":"(\d+)"', line.attributes)
    cycles = float(found.group(1)) if found else 0.0
    return cycles if cycles < _UNKNOWN else 0.0


def _operations(line: Instruction, beside: dict[str, Instruction]) -> float:
    if line.operation == "dot":
        return _of_dot(line, _dims(beside[line.operands[0]].result), line.attributes)
    if line.operation == "custom-call" and "__cublas$" in line.attributes and line.operands[0] in beside:
        return _of_dot(line, _dims(beside[line.operands[0]].result), line.attributes)
    if line.operation == "convolution":
        return _of_convolution(line, *(_dims(beside[name].result) for name in line.operands[:2]))
    return 0.0


def _of_dot(line: Instruction, left: list[int], attributes: str) -> float:
    found = re.search(r'lhs_contracting_dims"?[=:][\[{]([^\]}]*)', attributes)
    inner = math.prod(left[int(dim)] for dim in re.findall(r"\d+", found.group(1))) if found else 1
    return 2.0 * math.prod(_dims(line.result)) * inner


def _of_convolution(line: Instruction, left: list[int], right: list[int]) -> float:
    """TPUs have no other product: dims of a batch of matrices are those of a picture, most of whose taps are empty."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    assert labels is not None
    of_left, of_right, of_result = labels.groups()
    sizes, window = _dims(line.result), _window(line.attributes)
    total = 2.0 * sizes[of_result.index("b")] * sizes[of_result.index("f")] * right[of_right.index("i")]
    for number in itertools.takewhile(lambda n: str(n) in of_result, itertools.count()):
        label = str(number)
        given, taps, made = left[of_left.index(label)], right[of_right.index(label)], sizes[of_result.index(label)]
        low = int(window.get("pad", [])[number].partition("_")[0]) if "pad" in window else 0
        stride, spread, apart = (int(window[key][number]) if key in window else 1 for key in _STEPS)
        place = np.arange(made)[:, None] * stride - low + np.arange(taps) * apart
        total *= int(((place >= 0) & (place <= (given - 1) * spread) & (place % spread == 0)).sum())
    return total


_STEPS = ("stride", "lhs_dilate", "rhs_dilate")


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in found.group(1).split()) if found else {}
    return {name: value.split("x") for name, value in parts.items()}


def _dims(result: str) -> list[int]:
    """The sizes of the first array in a type."""
    found = re.search(r"\[([\d,]*)\]", result)
    return [int(size) for size in found.group(1).split(",") if size] if found else []


_UNKNOWN = 2.0**50  # what a TPU's compiler says of kernels that it cannot estimate is beyond
