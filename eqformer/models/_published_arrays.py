"""The arrays of a folder as a family knows them: those of its text model, by the names of its table, decoded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import ml_dtypes  # noqa: F401  # lets numpy know bfloat16
import numpy as np

from ._folder import FLOATS, Folder
from ._gguf_file import GGUF
from ._gguf_models import coded_of, plain_of
from ._published_model import Description
from ._weight_rules import Stored
from .formats import Coded, Format, Grouped, Numbers


_NO_CODES = ("BOOL", "I64")  # what masks and positions are of
Run = Callable[[Callable[[Any], None], Iterable[Any]], Iterable[None]]  # as `map`, perhaps by several threads
_AT_ONCE, _ROWS = 1 << 17, 32  # numbers and rows that a thread decodes at once


class Arrays:
    """The arrays of a model that is published in a folder, by the names that its family's table gives them.

    Raises a `ValueError` for a folder that has an array under two names, and for codes and scales that do not go
    together.
    """

    def __init__(self, source: Folder | GGUF, said: Description):
        """Find what each array of the folder, or of the one file, is."""
        self.call, self._source = source.call, source
        self._stored: dict[str, str] = {}
        self._coded: dict[str, Coded] = {}
        self._left: list[str] = []
        self._is_said = said.format is not None
        for name, own in sorted(said.own_names(source.names).items()):
            if own is None:
                self._left.append(name)
            elif (other := self._stored.setdefault(own, name)) != name:
                raise ValueError(f"{self.call}: {other} and {name} are both {own}; the folder must have one of them.")
        if isinstance(source, GGUF):
            found = {own: coded_of(source, name) for own, name in self._stored.items()}
            self._coded = {own: coded for own, coded in found.items() if coded is not None}
        elif said.format is not None:
            self._find(source, said.format, said.dtype)

    @property
    def names(self) -> Set[str]:
        """Every array's name in the family's table."""
        return self._stored.keys()

    @property
    def shapes(self) -> Stored:
        """Every array's shape, by its name in the family's table."""
        return {name: self.shape(name) for name in self._stored}

    @property
    def unread(self) -> str:
        """One line on the arrays that are left unread by rule; empty where there are none."""
        if not self._left:
            return ""
        counts = Counter(_part(name) for name in self._left)
        listed = ", ".join(f"{part}. ({count})" for part, count in sorted(counts.items()))
        return f"{self.call}: arrays that are no part of the text model are left unread: {listed}."

    def stored_name(self, name: str) -> str:
        """What the folder calls an array."""
        return self._stored[name]

    def dtype(self, name: str) -> str:
        """An array's dtype as JAX calls it."""
        return self._coded[name].dtype if name in self._coded else self._source.dtype(self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """An array's shape."""
        return self._coded[name].shape if name in self._coded else self._source.shape(self._stored[name])

    def pieces(self, name: str) -> Sequence[int]:
        """The places of an array's first dim that are decoded one by one; none where it is read at once."""
        shape = self.shape(name)
        return range(shape[0]) if name in self._coded and len(shape) > 2 else ()

    def is_coded(self, name: str) -> bool:
        """Whether an array is stored in fewer bits, so that reading it takes time and memory."""
        return name in self._coded

    def read(
        self,
        name: str,
        dtype: str | None = None,
        piece: int | None = None,
        run: Run = map,
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """An array, mapped into memory where it is stored plainly, or else decoded to a `dtype`, its own by default.

        `piece` is the place of its first dim that is read alone; `run` shares the work; `into` is memory of that dtype
        for what is decoded, as much as an array of two dims has or more.
        """
        if name not in self._coded:
            stored = self._stored[name]
            return plain_of(self._source, stored) if isinstance(self._source, GGUF) else self._source.read(stored)
        if piece is None and (pieces := self.pieces(name)):
            return np.stack([self.read(name, dtype, place, run) for place in pieces])
        coded = self._coded_at(name, piece)
        rows, columns = reversed(coded.shape) if coded.form.turned else coded.shape
        into = np.empty(rows * columns, dtype or coded.dtype) if into is None else into
        made = into[: rows * columns].reshape(rows, columns)

        def decode(some: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # what is too large is infinite, as in the references
                coded.form.decode(coded.parts, some, made[some])

        step = _ROWS * max(1, _AT_ONCE // (_ROWS * columns))
        for _ in run(decode, [slice(start, min(start + step, rows)) for start in range(0, rows, step)]):
            pass
        return made.T if coded.form.turned else made

    def unexplained(self, names: Iterable[str]) -> str:
        """The first of some arrays that holds codes although the configuration says nothing of any; empty for none."""
        if isinstance(self._source, GGUF) or self._is_said:
            return ""
        dtypes = {name: self._source.dtype_in_file(self._stored[name]) for name in sorted(names)}
        found = (f"{self._stored[name]} ({its})" for name, its in dtypes.items() if its not in (*FLOATS, *_NO_CODES))
        return next(found, "")

    def form(self, name: str) -> Format | None:
        """In which format an array is stored; None: plainly."""
        return self._coded[name].form if name in self._coded else None

    def scale_dtype(self, name: str) -> str:
        """Return the dtype of the scales of an array whose format is `Grouped`; exponents are bytes."""
        coded = self._coded[name]
        assert isinstance(coded.form, Grouped)
        dtype = coded.parts[coded.form.groups.scale].dtype
        return "uint8" if dtype.itemsize == 1 else str(dtype)

    def numbers(self, name: str, piece: int | None, unit: tuple[int, int]) -> Numbers:
        """As `read`, of an array whose format is `Grouped`: its codes, and the scale of each `unit` of two dims."""
        if piece is None and (pieces := self.pieces(name)):
            codes, scales, zeros = zip(*(self.numbers(name, place, unit) for place in pieces), strict=True)
            return Numbers(np.stack(codes), np.stack(scales), None if zeros[0] is None else np.stack(zeros))
        coded = self._coded_at(name, piece)
        assert isinstance(coded.form, Grouped)
        return coded.form.numbers(coded.parts, unit)

    def _coded_at(self, name: str, piece: int | None) -> Coded:
        coded = self._coded[name]
        if piece is None:
            return coded
        parts = {end: part[piece] for end, part in coded.parts.items()}
        return Coded(coded.form, parts, coded.shape[1:], coded.dtype)

    def _find(self, folder: Folder, form: Format, dtype: str) -> None:
        """Put one name in the place of those of codes and scales."""
        dtype_of = lambda name: folder.dtype_in_file(self._stored[name])
        codes = [name for name in self._stored if name.endswith(form.codes) and name not in self._coded]
        for name in [name for name in codes if not form.dtypes or dtype_of(name) in form.dtypes]:
            stem, stored = name.removesuffix(form.codes), self._stored[name]
            if missing := [end for end in form.needs if stem + end not in self._stored]:
                raise ValueError(
                    f"{self.call}: {stored} holds codes of {form.name}, which mean nothing without {stem}{missing[0]}; "
                    "the folder must have both."
                )
            takes = [end for end in form.takes if stem + end in self._stored]
            ends = dict.fromkeys((form.codes, *form.needs, *takes))
            parts = {end: folder.stored(self._stored.pop(stem + end)) for end in ends}
            for end in form.ignored:
                self._stored.pop(stem + end, None)
            if (own := stem + form.decoded) in self._stored:
                raise ValueError(f"{self.call}: {stored} and {own} are both {own}; the folder must have one of them.")
            try:
                self._coded[own] = Coded(form, parts, form.shape(parts), dtype)
            except ValueError as error:
                raise ValueError(f"{self.call}: {stored}, in {form.name}: {error}.") from None
            self._stored[own] = stored
        if form.also is not None:
            self._find(folder, form.also, dtype)


def _part(name: str) -> str:
    """What part of a model an array is of: `visual`, `model.layers.61`, `model.encoder.vision_tower`."""
    words = name.split(".")
    if words[0] == "model" and words[1:2] in (["layers"], ["encoder"]):
        return ".".join(words[:3])
    return ".".join(words[: 2 if words[0] == "model" else 1])
