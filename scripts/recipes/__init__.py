"""Recipes: each is a function that returns a `Recipe`, which decides everything about a run. Add yours here."""

from collections.abc import Callable

from ._default import adamw as adamw, default as default, gpt2 as gpt2, jaxformer as jaxformer, moe as moe
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
    "gpt2": gpt2,
    "jaxformer": jaxformer,
    "moe": moe,
    "adamw": adamw,
}
