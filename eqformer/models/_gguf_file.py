"""GGUF files, llama.cpp's format of a model in one file: the header's values, and the arrays, memory-mapped."""

import dataclasses
import math
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from .._files import JsonObject, map_bytes
from .formats import BLOCKS, Blocks, COLUMNS, ORDER, Parts, ROWS


# The `struct` format of each type of number, by the type's code in files; below, the codes of a text and of a list.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _TEXT, _LIST = 6, 8, 9
# The beginning of the names of lists that hold a parameter of each layer (Apertus' activation).
_LAYER_LISTS = "xielu."
# Arrays with divisors of rotary frequencies, which are not weights: for all rows, for long rows, for short rows.
DIVISORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The dtype that every array is decoded to. A file mixes quantized blocks with F16 and BF16, and llama.cpp and
# transformers compute with all of them in float32.
DTYPE = "float32"
# The fewest bytes that the header can use for a value (an empty name, a type, a byte), a text, and an array's entry.
_VALUE_BYTES, _TEXT_BYTES, _ENTRY_BYTES = 13, 8, 32
# Each array takes about 1.5 kB of memory beside its numbers; the largest published models have 70,000 of them.
_MAX_ARRAYS = 1 << 17


Order = tuple[Int[np.ndarray, "rows"] | None, Int[np.ndarray, "columns"] | None]
"""The indices of an array's rows and columns in the order of published folders; None if the order is the same."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array of a GGUF file: its type, its shape with rows first, and its bytes row by row."""

    form: Blocks
    shape: tuple[int, ...]
    rows: UInt8[np.ndarray, "rows octets"]

    def parts(self, order: Order = (None, None)) -> Parts:
        """Return the parts that are decoded, with rows and columns in another `order` if there is one."""
        orders = {ORDER: order[0], COLUMNS: order[1]}
        return {ROWS: self.rows} | {name: indices for name, indices in orders.items() if indices is not None}


@dataclasses.dataclass(frozen=True)
class _TensorEntry:
    """The header's entry of an array; its bytes are `start` to `stop` of the file."""

    name: str
    form: Blocks
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def experts(self) -> int:
        """The number of experts that the array holds; 0 for an array without experts."""
        return self.shape[0] if len(self.shape) == 3 and self.shape[1] != 1 else 0


class GGUF:
    """A GGUF file: the header's numbers and texts by name (lists only by length), and the arrays.

    A list of float32s for the layers, such as `xielu.beta`, is read as one array of one number for each layer, with the
    names `blk.0.xielu.beta`, `blk.1.xielu.beta` and so on.

    An array of experts has three dims. It is read as one array of two dims for each expert, with names that end in
    `.0`, `.1` and so on. An array of three dims whose middle dim has size 1 is a convolution's, and stays one array.

    Raises a `ValueError` for a file that is cut short, has overlapping arrays, or has an unknown type. Every count and
    size is compared with the remaining bytes before memory of that size is allocated.
    """

    def __init__(self, path: Path):
        """Read the header."""
        self.path, self.call = path, f"load({str(path)!r})"
        self._bytes = map_bytes(path)
        self._at = 0
        if self._take(4).tobytes() != b"GGUF":
            self._refuse("it does not begin with 'GGUF'")
        if (version := self._number("I")) not in (2, 3):
            self._refuse(f"its version is {version}, not 2 or 3")
        arrays, values = self._number("Q"), self._number("Q")
        self._check_count(arrays, _ENTRY_BYTES, "arrays")
        self._check_count(values, _VALUE_BYTES, "values")
        self.values: JsonObject = {}
        self._lists: dict[str, int] = {}  # the byte at which each list begins
        for _ in range(values):
            self._read_value()
        infos = [self._info() for _ in range(arrays)]
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            self._refuse(f"general.alignment={alignment!r}, which is not a whole number of at least 1")
        start = -(-self._at // alignment) * alignment
        entries = [self._entry(name, shape, kind, start + offset) for name, shape, kind, offset in infos]
        self._check_overlaps(entries)
        if (count := sum(entry.experts or 1 for entry in entries)) > _MAX_ARRAYS:
            self._refuse(f"it has {count} arrays, counted for each expert, but at most {_MAX_ARRAYS} are read")
        self.tensors: dict[str, Tensor] = {}
        for entry in entries:
            if entry.name in self.tensors or f"{entry.name}.0" in self.tensors:
                self._refuse(f"it has {entry.name} twice")
            self.tensors |= self._tensors(entry)
        for name in [name for name in self._lists if name.startswith(_LAYER_LISTS)]:
            self.tensors |= self._layer_arrays(name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about files that are not read: none, since a GGUF file holds the whole model."""
        return ()

    @property
    def kind(self) -> str:
        """The architecture, with which the names of its numbers begin."""
        return self.values["general.architecture"]

    @property
    def names(self) -> Set[str]:
        """Every array's name, except the names of divisors of rotary frequencies."""
        return self.tensors.keys() - {*DIVISORS}

    def has(self, ending: str) -> bool:
        """Return whether an array's name has this ending, for example `attn_q.bias`, in any layer."""
        return any(name.endswith(ending) for name in self.tensors)

    def dtype(self, name: str) -> str:
        """Return the dtype that an array is decoded to by default."""
        return DTYPE

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape, rows first; raises a `ValueError` if the file lacks the array."""
        if name not in self.tensors:
            raise ValueError(f"{self.call}: the array {name} is missing.")
        return self.tensors[name].shape

    def read(self, name: str) -> Shaped[np.ndarray, "*dims"]:
        """Return a decoded array; only for small arrays, because the whole array is decoded at once."""
        tensor = self.tensors[name]
        decoded = np.empty((len(tensor.rows), tensor.shape[-1]), np.float32)
        tensor.form.decode(tensor.parts(), slice(0, None), decoded)
        return decoded.reshape(tensor.shape)

    def divisors(self, name: str) -> Shaped[np.ndarray, "*dims"] | None:
        """Return the divisor of each frequency; None if the file has no array of this name."""
        return self.read(name) if name in self.tensors else None

    def listed(self, name: str) -> list[Any]:
        """Return a list of numbers or texts; an empty list if the file has no list of this name."""
        if name not in self._lists:
            return []
        self._at = self._lists[name]
        kind, count = self._number("I"), self._number("Q")
        if kind == _TEXT:
            return self._texts(count)
        return self._take(count * struct.calcsize(_NUMBERS[kind])).view(f"<{_NUMBERS[kind]}").tolist()

    def numbers_by_layer(self, name: str, layers: int, item_type: type[int] = int) -> list[int]:
        """Return a number for each layer or, with `bool`, a flag; a file states one value for all layers, or a list.

        `name` leaves out the architecture. Raises a `ValueError` for a list of another length, and for other items.
        """
        full_name = f"{self.kind}.{name}"
        stated = self.values.get(full_name)
        # For a list, `values` holds a text in its place, such as "a list of 32".
        numbers: list[Any] = self.listed(full_name) if isinstance(stated, str) else [stated] * layers
        if len(numbers) != layers or not all(type(number) is item_type and number >= 0 for number in numbers):
            items = "flags" if item_type is bool else "whole numbers of at least 0"
            raise ValueError(f"{self.call}: {full_name}={numbers}: it must have {layers} {items}.")
        return numbers

    def _refuse(self, text: str) -> NoReturn:
        raise ValueError(f"{self.path}: it cannot be read as a GGUF file: {text}.")

    def _check_count(self, count: int, least_bytes: int, things: str) -> None:
        """Refuse a count of things of at least `least_bytes` each, if fewer bytes remain in the file."""
        if count * least_bytes > len(self._bytes) - self._at:
            self._refuse(f"it ends within its header, after {len(self._bytes)} bytes: it says {count} {things}")

    def _take(self, count: int) -> UInt8[np.ndarray, "octets"]:
        if count > len(self._bytes) - self._at:
            self._refuse(f"it ends within its header, after {len(self._bytes)} bytes")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")).tobytes())[0]

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        """Read `count` texts; a tokenizer has hundreds of thousands."""
        self._check_count(count, _TEXT_BYTES, "texts")
        view, end, texts = self._bytes.data, len(self._bytes), list[str]()
        for _ in range(count):
            start = self._at + _TEXT_BYTES
            self._at = start + int.from_bytes(view[self._at : start], "little")
            if start > end or self._at > end:
                self._refuse(f"it ends within its header, after {end} bytes")
            try:
                texts.append(str(view[start : self._at], "utf-8"))
            except UnicodeDecodeError:
                self._refuse("one of its texts is not UTF-8")
        return texts

    def _read_value(self) -> None:
        """Read a name and its number or text; skip a list, which `listed` reads."""
        name, kind = self._text(), self._number("I")
        if name in self.values:
            self._refuse(f"it has {name} twice")
        if kind in _NUMBERS:
            number = self._number(_NUMBERS[kind])
            # A float32 is read as the shortest decimal that rounds to it: as 1e-5 instead of 9.99999974e-06.
            self.values[name] = float(str(np.float32(number))) if _NUMBERS[kind] == "f" else number
        elif kind == _TEXT:
            self.values[name] = self._text()
        elif kind == _LIST:
            self._lists[name] = self._at
            self.values[name] = f"a list of {self._skip_list()}"
        else:
            self._refuse(f"a value is of type {kind}, which is not known")

    def _skip_list(self) -> int:
        """Skip a list and return its length."""
        kind, count = self._number("I"), self._number("Q")
        if kind == _LIST:
            self._refuse("it has a list of lists, which is not supported")
        if kind == _TEXT:
            self._texts(count)
        elif kind in _NUMBERS:
            self._take(count * struct.calcsize(_NUMBERS[kind]))
        else:
            self._refuse(f"a value is of type {kind}, which is not known")
        return count

    def _layer_arrays(self, name: str) -> dict[str, Tensor]:
        """Return a list of float32s as one array of one number for each layer; refuse a list of other numbers."""
        self._at = self._lists[name]
        kind, count = self._number("I"), self._number("Q")
        if kind != _FLOAT32:
            self._refuse(f"{name} is not a list of float32s")
        if count > _MAX_ARRAYS:
            self._refuse(f"{name} has {count} numbers, but at most {_MAX_ARRAYS} are read")
        rows = self._take(4 * count).reshape(count, 1, 4)
        arrays = {f"blk.{layer}.{name}": Tensor(BLOCKS[0], (1,), row) for layer, row in enumerate(rows)}
        if arrays.keys() & self.tensors.keys():
            self._refuse(f"it has {name} as a list and as arrays")
        return arrays

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read an array's name, its shape, the code of its type, and its offset from the start of the arrays."""
        name, dims = self._text(), self._number("I")
        if not 1 <= dims <= 4:
            self._refuse(f"{name} has {dims} dims")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> _TensorEntry:
        """Return an array's entry; refuse a shape that does not fit its type or the file's length."""
        if kind not in BLOCKS:
            known = ", ".join(form.name for form in BLOCKS.values())
            self._refuse(f"{name} is of type {kind}, which is not known; there are {known}")
        form, rows, columns = BLOCKS[kind], math.prod(shape[:-1]), shape[-1]
        if rows < 1 or columns < 1 or columns % form.numbers:
            self._refuse(f"{name} of shape {shape} must have rows of whole blocks of {form.numbers} numbers")
        stop = start + rows * (columns // form.numbers * form.octets)
        if stop > len(self._bytes):
            self._refuse(f"{name} ends at byte {stop}, and the file at {len(self._bytes)}")
        return _TensorEntry(name, form, shape, start, stop)

    def _check_overlaps(self, entries: list[_TensorEntry]) -> None:
        """Refuse arrays that share bytes, because they could be decoded to many times the file's size."""
        ordered = sorted(entries, key=lambda entry: entry.start)
        for entry, following in zip(ordered, ordered[1:]):
            if entry.stop > following.start:
                self._refuse(
                    f"{entry.name} ends at byte {entry.stop}, and {following.name} begins at byte {following.start}"
                )

    def _tensors(self, entry: _TensorEntry) -> dict[str, Tensor]:
        """Return the array, or the array of each expert, by name."""
        width = entry.shape[-1] // entry.form.numbers * entry.form.octets
        rows = self._bytes[entry.start : entry.stop].reshape(-1, width)
        if not entry.experts:
            return {entry.name: Tensor(entry.form, entry.shape, rows)}
        experts = rows.reshape(entry.shape[0], -1, width)
        names = (f"{entry.name}.{number}" for number in range(len(experts)))
        return {name: Tensor(entry.form, entry.shape[1:], expert) for name, expert in zip(names, experts)}
