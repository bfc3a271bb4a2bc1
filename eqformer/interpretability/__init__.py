"""Look inside a model: intermediate values of a pass by the paths of modules, and edits of these values."""

from ._capture import (
    Capture as Capture,
    capture as capture,
    Captured as Captured,
    patch as patch,
    PatchedModel as PatchedModel,
)
from ._points import value_paths as value_paths
