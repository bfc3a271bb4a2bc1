"""Look inside a model: intermediate values of a pass by the paths of modules, and edits of these values."""

from ._capture import (
    Capture as Capture,
    capture as capture,
    Captured as Captured,
    patch as patch,
    PatchedModel as PatchedModel,
)
from ._points import value_paths as value_paths
from ._trace_experts import expert_layers as expert_layers, LayerExperts as LayerExperts, trace_experts as trace_experts
