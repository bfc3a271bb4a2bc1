"""The arrays of a folder as a family knows them: those of its text model, by the names of the family's table."""

from collections import Counter
from collections.abc import Set

import numpy as np

from ._folder import Folder
from ._published import Description


HEAD = "lm_head.weight"


class Arrays:
    """The arrays of a model that is published in a folder, by the names that its family's table gives them.

    Raises a `ValueError` for a folder that has an array under two names.
    """

    def __init__(self, folder: Folder, said: Description):
        """Find what each array of the folder is."""
        self.call, self._folder = folder.call, folder
        self._stored: dict[str, str] = {}
        self._left: list[str] = []
        for name in sorted(folder.names):
            own = said.own_name(name)
            if own is None:
                self._left.append(name)
            elif (other := self._stored.setdefault(own, name)) != name:
                raise ValueError(f"{self.call}: {other} and {name} are both {own}; the folder must have one of them.")

    @property
    def names(self) -> Set[str]:
        """Every array's name in the family's table."""
        return self._stored.keys()

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
        return self._folder.dtype(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        """An array, mapped into memory."""
        return self._folder.read(self._stored[name])


def _part(name: str) -> str:
    """What part of a model an array is of: `visual`, `model.layers.61`."""
    words = name.split(".")
    if words[0] == "model" and words[1:2] == ["layers"]:
        return ".".join(words[:3])
    return ".".join(words[: 2 if words[0] == "model" else 1])
