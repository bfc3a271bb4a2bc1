"""GGUF: a model in one file, as llama.cpp reads it; its numbers by name, and its arrays, mapped into memory."""

import dataclasses
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Shaped

from .._read import map_bytes
from .formats import BLOCKS, Blocks, ORDER, Parts, ROWS


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# Of rotary frequencies, and no weights: of all rows, of long ones, of short ones.
DIVISORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array of the file: its type, its shape, rows first, and its bytes, row by row."""

    form: Blocks
    shape: tuple[int, ...]
    rows: Shaped[np.ndarray, "rows octets"]

    def parts(self, order: np.ndarray | None) -> Parts:
        """What is decoded, its rows in another order where that is given."""
        return {ROWS: self.rows} if order is None else {ROWS: self.rows, ORDER: order}


class GGUF:
    """A file's numbers and texts by name (lists by their lengths alone), and its arrays.

    An array of three dims, of experts, is as many of two: their names end in `.0`, `.1` and so on.

    Raises a `ValueError` for a file that is not what it says: cut short, or with arrays of a type that is not known.
    """

    def __init__(self, path: Path):
        """Read all but the arrays' numbers."""
        self.path, self.call = path, f"load({str(path)!r})"
        self._bytes = map_bytes(path)
        self._at = 0
        if bytes(self._take(4)) != b"GGUF":
            self._refuse("it does not begin with 'GGUF'")
        if (version := self._number("I")) not in (2, 3):
            self._refuse(f"its version is {version}, not 2 or 3")
        tensors, values = self._number("Q"), self._number("Q")
        self.values: dict[str, Any] = {}
        self._lists: dict[str, int] = {}  # where each begins
        for _ in range(values):
            name, kind = self._text(), self._number("I")
            if name in self.values:
                self._refuse(f"it has {name} twice")
            if kind == _LIST:
                self._lists[name] = self._at
            self.values[name] = self._value(kind)
        infos = [self._info() for _ in range(tensors)]
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            self._refuse(f"general.alignment={align!r}, which is no whole number of at least 1")
        start = -(-self._at // align) * align
        self.tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors or f"{name}.0" in self.tensors:
                self._refuse(f"it has {name} twice")
            self.tensors |= self._tensors(name, shape, kind, start + offset)

    @property
    def names(self) -> Set[str]:
        """Every array's name but that of the frequencies' divisors, which are read as numbers are."""
        return self.tensors.keys() - {*DIVISORS}

    def dtype(self, name: str) -> str:
        """The dtype that holds an array's values."""
        return self.tensors[name].form.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """An array's shape, rows first."""
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """A small array, decoded."""
        tensor = self.tensors[name]
        made = np.empty((len(tensor.rows), tensor.shape[-1]), np.float32)
        tensor.form.decode(tensor.parts(None), slice(0, None), made)
        return made.reshape(tensor.shape)

    def divisors(self, name: str) -> np.ndarray | None:
        """What each frequency is divided by, if the file says it by this name."""
        return self.read(name) if name in self.tensors else None

    def listed(self, name: str) -> list[Any]:
        """A list of numbers or texts; empty where there is none."""
        if name not in self._lists:
            return []
        self._at = self._lists[name]
        its, count = self._number("I"), self._number("Q")
        if its not in _NUMBERS:
            return [self._value(its) for _ in range(count)]
        return self._take(count * struct.calcsize(_NUMBERS[its])).view(f"<{_NUMBERS[its]}").tolist()

    def _refuse(self, text: str) -> NoReturn:
        raise ValueError(f"{self.path}: it is no GGUF file that can be read: {text}.")

    def _take(self, count: int) -> np.ndarray:
        if count > len(self._bytes) - self._at:
            self._refuse(f"it ends within its header, after {len(self._bytes)} bytes")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")).tobytes())[0]

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).tobytes().decode()
        except UnicodeDecodeError:
            self._refuse("a text of it is no UTF-8")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            found = self._number(_NUMBERS[kind])
            return float(str(np.float32(found))) if _NUMBERS[kind] == "f" else found  # 1e-5, and not what is nearest
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            self._refuse(f"a value is of type {kind}, which is not known")
        its, count = self._number("I"), self._number("Q")
        if its == _LIST:
            self._refuse("a list of lists, of which no number is known")
        if its in _NUMBERS:
            self._take(count * struct.calcsize(_NUMBERS[its]))
        else:
            for _ in range(count):
                self._value(its)
        return f"a list of {count}"

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(), self._number("I")
        if not 1 <= dims <= 4:
            self._refuse(f"{name} has {dims} dims")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensors(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> dict[str, Tensor]:
        if kind not in BLOCKS:
            known = ", ".join(form.name for form in BLOCKS.values())
            self._refuse(f"{name} is of type {kind}, which is not known; there are {known}")
        form, rows, columns = BLOCKS[kind], int(np.prod(shape[:-1], dtype=object)), shape[-1]
        if rows < 1 or columns < 1 or columns % form.numbers:
            self._refuse(f"{name} of shape {shape} has rows of no whole blocks of {form.numbers} numbers")
        width = columns // form.numbers * form.octets
        if start + rows * width > len(self._bytes):
            self._refuse(f"{name} ends at byte {start + rows * width}, and the file at {len(self._bytes)}")
        octets = self._bytes[start : start + rows * width].reshape(rows, width)
        if len(shape) != 3:
            return {name: Tensor(form, shape, octets)}
        each = octets.reshape(shape[0], -1, width)
        return {f"{name}.{number}": Tensor(form, shape[1:], its) for number, its in enumerate(each)}
