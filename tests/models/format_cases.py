"""Arrays in quantized formats: random codes and scales of each format, and their values by a plain formula.

Each function `(rng, rows, columns)` returns the stored arrays, by the suffixes of their names, and the decoded values
in float64. The function's docstring describes the layout of the format.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


Stored = dict[str, np.ndarray]
BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Case(NamedTuple):
    """A format: its `quantization_config`, and a function that makes stored arrays and their values in float64."""

    said: dict[str, Any]
    make: Callable[..., tuple[Stored, np.ndarray]]
    codes: str
    """The end of the name of the array of codes."""
    scales: str
    """The end of the name of the array of scales."""


def each(rows: int, columns: int, value: Callable[[int, int], float]) -> np.ndarray:
    """Return the float64 array whose elements are `value(row, column)`."""
    return np.array([[value(row, column) for column in range(columns)] for row in range(rows)], np.float64)


def nibble(word: np.integer, place: int) -> int:
    """Return the number that bits `4 place` to `4 place + 3` of a word hold."""
    return int(word) >> 4 * place & 15


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random words of 32 bits."""
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return random positive scales."""
    return np.asarray(0.01 + rng.random(shape)).astype(dtype)


def eight(rng: np.random.Generator, rows: int, columns: int, dtype: Any = F8) -> np.ndarray:
    """Return random codes of eight bits; none of them is NaN."""
    found = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    return np.where(found & 127 == 127, 3, found).astype(np.uint8).view(dtype)


def blocks(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """One scale for each block of 16 rows and 24 columns; blocks at the edges may be smaller."""
    codes, its = eight(rng, rows, columns), scales(rng, -(-rows // 16), -(-columns // 24), dtype=BF16)
    value = lambda row, column: float(codes[row, column]) * float(its[row // 16, column // 24])
    return {".weight": codes, ".weight_scale_inv": its}, each(rows, columns, value)


def expert_blocks(rng: np.random.Generator, experts: int, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """The layout of `blocks` for each expert; the experts' arrays are stacked."""
    made = [blocks(rng, rows, columns) for _ in range(experts)]
    codes, its = (np.stack([stored[end] for stored, _ in made]) for end in (".weight", ".weight_scale_inv"))
    return {"": codes, "_scale_inv": its}, np.stack([values for _, values in made])


def one_scale(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """One scale for the whole array, and a scale of activations beside it, as Ministral 3 has."""
    codes, its = eight(rng, rows, columns), scales(rng, dtype=BF16)
    stored = {".weight": codes, ".weight_scale_inv": its, ".activation_scale": its}
    return stored, each(rows, columns, lambda row, column: float(codes[row, column]) * float(its))


def by_row(dtype: Any) -> Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]:
    """One scale for each row."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes, its = eight(rng, rows, columns, dtype), scales(rng, rows, 1)
        value = lambda row, column: float(codes[row, column]) * float(its[row, 0])
        return {".weight": codes, ".weight_scale": its}, each(rows, columns, value)

    return make


def packed(zeros: bool = False, order: bool = False) -> Callable[..., tuple[Stored, np.ndarray]]:
    """Codes of four bits, and a scale for each group of 16 columns.

    With `zeros` each group has a zero point (otherwise 8); with `order` an array names the group of each column.
    """

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes, its = words(rng, rows, columns // 8), scales(rng, rows, columns // 16, dtype=BF16)
        zero, place = words(rng, rows // 8, columns // 16), rng.permutation(np.arange(columns) // 16).astype(np.int32)
        stored = {".weight_packed": codes, ".weight_scale": its, ".weight_shape": np.array([rows, columns])}
        stored |= {".weight_zero_point": zero} if zeros else {}
        stored |= {".weight_g_idx": place} if order else {}

        def value(row: int, column: int) -> float:
            group = place[column] if order else column // 16
            zero_of = nibble(zero[row // 8, group], row % 8) if zeros else 8
            return (nibble(codes[row, column // 8], column % 8) - zero_of) * float(its[row, group])

        return stored, each(rows, columns, value)

    return make


def gptq(shift: int = 1, order: bool = False) -> Callable[..., tuple[Stored, np.ndarray]]:
    """Codes of four bits, a scale and a zero point for each group of 16 inputs; zero points are stored less `shift`.

    With `order` an array names the group of each input; otherwise 16 successive inputs are a group.
    """

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes, zero = words(rng, columns // 8, rows), words(rng, columns // 16, rows // 8)
        its = scales(rng, columns // 16, rows, dtype=np.float16)
        place = (np.arange(columns) // 16).astype(np.int32)
        place = rng.permutation(place) if order else place

        def value(row: int, column: int) -> float:
            group = place[column]
            zero_of = (nibble(zero[group, row // 8], row % 8) + shift) % 16
            return (nibble(codes[column // 8, row], column % 8) - zero_of) * float(its[group, row])

        stored = {".qweight": codes, ".qzeros": zero, ".scales": its, ".g_idx": place}
        return stored, each(rows, columns, value)

    return make


def awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """Codes of four bits in AWQ's order within a word, a scale and a zero point for each group of 16 inputs."""
    codes, zero = words(rng, columns, rows // 8), words(rng, columns // 16, rows // 8)
    its, place = scales(rng, columns // 16, rows, dtype=np.float16), (0, 4, 1, 5, 2, 6, 3, 7)

    def value(row: int, column: int) -> float:
        group, word = column // 16, row // 8
        code, zero_of = (nibble(its[word], place[row % 8]) for its in (codes[column], zero[group]))
        return (code - zero_of) * float(its[group, row])

    return {".qweight": codes, ".qzeros": zero, ".scales": its}, each(rows, columns, value)


def mxfp4(rng: np.random.Generator, experts: int, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """Experts' codes of four bits, and a power of two for each group of 32 inputs.

    Stored arrays have the axes expert, output, input; decoded ones have expert, input, output.
    """
    codes = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
    its = rng.integers(110, 130, (experts, rows, columns // 32)).astype(np.uint8)

    def value(expert: int, row: int, column: int) -> float:
        octet = int(codes[expert, row, column // 32, column % 32 // 2])
        code = octet >> 4 if column % 2 else octet & 15
        return (-1) ** (code >> 3) * FP4[code & 7] * 2.0 ** (int(its[expert, row, column // 32]) - 127)

    found = [
        each(columns, rows, lambda column, row, expert=expert: value(expert, row, column)) for expert in range(experts)
    ]
    return {"_blocks": codes, "_scales": its}, np.stack(found)


def nvfp4(codes: str, array_scale: str, divides: bool) -> Callable[..., tuple[Stored, np.ndarray]]:
    """Codes of four bits, a scale for each group of 16 columns, and one more scale for the whole array.

    `divides` says whether the array's scale divides the groups' scales; otherwise it multiplies them.
    """

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        packed_codes = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
        its, of_array = scales(rng, rows, columns // 16, dtype=F8), np.float32(0.01 + rng.random())

        def value(row: int, column: int) -> float:
            code = nibble(packed_codes[row, column // 2], column % 2)
            group = np.float32(its[row, column // 16])
            scale = group / of_array if divides else group * of_array
            return float((-1) ** (code >> 3) * np.float32(FP4[code & 7]) * scale)

        stored = {codes: packed_codes, ".weight_scale": its, array_scale: np.array([of_array] if divides else of_array)}
        return stored, each(rows, columns, value)

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of the library compressed-tensors."""
    its = {"actorder": None, "dynamic": False, "num_bits": 8, "observer": "minmax", "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": its, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}


FOUR: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
OF_MODELOPT: dict[str, Any] = {
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    },
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
OF_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
CASES = {
    "fp8 blocks": Case(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]},
        blocks,
        ".weight",
        ".weight_scale_inv",
    ),
    "fp8 one scale": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        one_scale,
        ".weight",
        ".weight_scale_inv",
    ),
    "fp8 by row": Case(
        compressed("float-quantized", type="float", strategy="channel"), by_row(F8), ".weight", ".weight_scale"
    ),
    "int8 by row": Case(
        compressed("int-quantized", type="int", strategy="channel"), by_row(np.int8), ".weight", ".weight_scale"
    ),
    "int4": Case(compressed("pack-quantized", **FOUR), packed(), ".weight_packed", ".weight_scale"),
    "int4 with zeros": Case(
        compressed("pack-quantized", **FOUR | {"symmetric": False}), packed(True), ".weight_packed", ".weight_scale"
    ),
    "int4 in another order": Case(
        compressed("pack-quantized", **FOUR, actorder="group"), packed(order=True), ".weight_packed", ".weight_scale"
    ),
    "nvfp4": Case(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        nvfp4(".weight_packed", ".weight_global_scale", divides=True),
        ".weight_packed",
        ".weight_scale",
    ),
    "nvfp4 of modelopt": Case(
        OF_MODELOPT, nvfp4(".weight", ".weight_scale_2", divides=False), ".weight", ".weight_scale"
    ),
    "gptq": Case(OF_GPTQ, gptq(), ".qweight", ".scales"),
    "gptq in another order": Case(OF_GPTQ | {"desc_act": True}, gptq(order=True), ".qweight", ".scales"),
    "gptq of version 2": Case(OF_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(shift=0), ".qweight", ".scales"),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        awq,
        ".qweight",
        ".scales",
    ),
}
# Formats of experts: one array holds the maps of all experts of a layer.
EXPERT_CASES = {
    "fp8 experts": CASES["fp8 blocks"]._replace(make=expert_blocks, codes="", scales="_scale_inv"),
    "mxfp4": Case({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, "_blocks", "_scales"),
}
ALL_CASES = CASES | EXPERT_CASES
