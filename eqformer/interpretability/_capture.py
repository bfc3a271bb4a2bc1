"""`capture`: a model that returns named values of its pass beside its output."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .. import nn
from ._observer import insert_wrappers, Observer, Patch
from ._patch import PatchedModel
from ._points import parse_path, Point


class Captured(eqx.Module):
    """The output of a model's call, and values of the pass by their paths: `captured["stacks[0].blocks"]`."""

    output: PyTree
    """The model's output: of a language model, a pair of its logits and its cache."""
    values: dict[str, PyTree]
    """The values by the paths that were asked for."""

    def __getitem__(self, path: str) -> PyTree:
        """Return the value of a path."""
        return self.values[path]


class Capture(eqx.Module):
    """A model that is called like the model itself and returns `Captured`; made by `capture`."""

    model: Callable[..., PyTree]
    points: tuple[Point, ...] = eqx.field(static=True)
    patches: tuple[Patch, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Captured:
        """Call the model; return its output and the values.

        Raises a `ValueError` for a value that the call does not compute, or computes where it cannot be brought out.
        """
        observer = Observer([point.key for point in self.points], self.patches)
        with nn.observe_calls(observer):
            output = self.model(*args, **kwargs)
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, nn.Tokens)), None)
        observer.check_applied("the model", [point for point, _ in self.patches], tokens)
        values = observer.frame.values
        if missing := [point.path for point in self.points if point.key not in values]:
            raise ValueError(
                f"capture: this call does not run {', '.join(map(repr, missing))}; leave these paths out, or name "
                "modules that the call runs."
            )
        take_layer = lambda point: lambda x: x if point.layer is None else x[point.layer]
        return Captured(output, {p.path: jax.tree.map(take_layer(p), values[p.key]) for p in self.points})


def capture(model: nn.Module, paths: Sequence[str]) -> Capture:
    """Return a function that is called like the model, and returns values of the pass beside the model's output.

    ```python
    captured = eqformer.capture(model, ["stacks[0].blocks", "stacks[0][3].sublayers[0].layer.core.weights"])(ids)
    logits, cache = captured.output
    stream = captured["stacks[0].blocks"]  # layers batch seq embed
    ```

    Values are those after the patches of a patched model. Gradients flow through them, and the call may be jitted,
    vmapped and differentiated, with a cache or without. The model is not changed. A module that runs several times in a
    call gives its last value.

    Args:
        model: A language model, one of `patch`, or a module alone, such as a block.
        paths: Paths as `value_paths(model)` lists them.

    Raises:
        ValueError: For a path that names no value, with the nearest paths; from the call, for a value that the call
            does not compute.
    """
    if isinstance(paths, str):
        raise ValueError(f"capture(model, {paths!r}): paths is a list of paths; write [{paths!r}].")
    patches: tuple[Patch, ...] = ()
    if isinstance(model, PatchedModel):
        model, patches = model.inner, model.patches
    points = tuple(parse_path(model, path, "capture(model, paths)") for path in paths)
    wrapped = insert_wrappers(model, [point.key for point in points])
    assert callable(wrapped)
    return Capture(wrapped, points, patches)
