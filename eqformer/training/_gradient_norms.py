"""The norm of the gradient of each module."""

import jax
from jaxtyping import Array, Float, PyTree

from .. import nn
from ._optimizer import global_norm


def module_gradient_norms(gradients: PyTree) -> dict[str, Float[Array, ""]]:
    """The norm of each module's gradient, over all its layers, by the module's path.

    Those are the residual sublayers, such as `stacks[0].blocks.mixer` with its norms, and what stands beside them:
    `embedding`, `norm`, `head`. The squares add up to that of the whole gradient. Under a plan arrays are global, so
    that each number counts once, wherever it lies.
    """
    sublayers = [path for path, _ in nn.named_modules(gradients, nn.Residual)]
    parts: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = nn.path_name(path)
        within = (sublayer for sublayer in sublayers if name.startswith(f"{sublayer}."))
        parts.setdefault(next(within, nn.path_name(path[: 2 if _is_numbered(path) else 1])), []).append(leaf)
    return {name: global_norm(leaves) for name, leaves in parts.items()}


def _is_numbered(path: tuple) -> bool:
    """Whether a path begins with an element of a tuple that is a field: `stacks[0]`."""
    return len(path) > 1 and isinstance(path[1], jax.tree_util.SequenceKey)
