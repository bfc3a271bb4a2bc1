"""A run: its recipe, its folder and its loop, from texts or chats to a folder that `eqformer.load` reads.

A recipe decides everything about a run. Recipes have names; another one is a Python function that returns a `Recipe`.
"""

from . import _report, _setup, _texts
from ._named_recipes import (
    LARGE as LARGE,
    load_user_recipe as load_user_recipe,
    RECIPES as RECIPES,
    short_name as short_name,
    source_beside as source_beside,
    trust_recipe as trust_recipe,
    user_file as user_file,
)
from ._recipe import (
    fields_of as fields_of,
    flags_of as flags_of,
    Mesh as Mesh,
    Metrics as Metrics,
    name_flags_in_errors as name_flags_in_errors,
    Recipe as Recipe,
    Spikes as Spikes,
    Text as Text,
)
from ._report import Screen as Screen
from ._run_directory import RunDirectory as RunDirectory
from ._setup import check as check
from ._trainer import Trainer as Trainer


report = _report
setup = _setup
texts = _texts
