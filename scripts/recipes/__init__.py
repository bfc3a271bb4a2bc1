"""Recipes: each is a function that returns a `Recipe`, which decides everything about a run.

Add yours here, by a name that no preset has: each preset is a recipe too.
"""

from collections.abc import Callable

from ._default import adamw as adamw, default as default, moe as moe
from ._large import LARGE as LARGE
from ._recipe import (
    CHANGEABLE as CHANGEABLE,
    Mesh as Mesh,
    Metrics as Metrics,
    Recipe as Recipe,
    Spikes as Spikes,
    Text as Text,
)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "default": default,
    "moe": moe,
    "adamw": adamw,
}
