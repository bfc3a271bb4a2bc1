"""Paths of the values that a model computes, in the form of `nn.dims_table`, and errors for wrong paths."""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx

from .. import nn
from .._annotation_checks import name_class
from ..kernels import Operation


Accessor = tuple[str | int, ...]
"""Fields and indices that lead from a model to one of its modules."""

CORE_HEADS = ("query", "key", "value")
"""Inputs of an attention's `core`: heads as the softmax reads them."""
CORE_VALUES = (*CORE_HEADS, "weights")
"""Values of an attention's `core`, besides its output: the heads, and the weights of the softmax."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A value that a model computes, by the path that the user gave: a module's output, its input, or a core's value.

    `key` is the path of the value in all layers of a stack: `stacks[0].blocks.sublayers[0]` for the path
    `stacks[0][3].sublayers[0]`, whose `layer` is 3. Without a layer in the path, `layer` is None.
    `is_of_all_layers` is whether the value is inside a stack and the path names no layer. `is_of_source` is whether the
    value belongs to an encoder or to a layer that attends to its output; a later call may read it from a cache.
    """

    path: str
    key: str
    layer: int | None = None
    is_of_all_layers: bool = False
    is_of_source: bool = False

    @property
    def is_in_stack(self) -> bool:
        """Whether the value is inside a stack."""
        return self.is_of_all_layers or self.layer is not None


@dataclasses.dataclass(frozen=True)
class Node:
    """A module of a model, its path without the fields `inner` of wrappers, and the fields that lead to it."""

    path: str
    module: Any
    accessor: Accessor
    is_core: bool = False

    def value_keys(self) -> tuple[str, ...]:
        """Return the keys of the values that the module computes or reads."""
        if not self.path or not callable(self.module):
            return ()
        names = CORE_VALUES if self.is_core else ("input",)
        return (self.path, *(f"{self.path}.{name}" for name in names))

    def is_stack_of(self, key: str) -> bool:
        """Return whether the module is a stack, and the key's value is in its layers."""
        is_stack = isinstance(self.module, nn.LayerStack)
        return is_stack and f"{key}.".startswith(join_path(self.path, "blocks") + ".")


def join_path(path: str, name: str) -> str:
    """Return the path of a field of the module at a path; without a name, the path itself."""
    return f"{path}.{name}".lstrip(".") if name else path


def value_paths(model: nn.Module) -> list[str]:
    """Return the paths of all values that `capture` and `patch` know in a model.

    A path names the output of a module; followed by `.input`, it names the module's first argument. The path of an
    attention's `core`, followed by `.query`, `.key` or `.value`, names the heads that the attention reads, and followed
    by `.weights` the weights of the softmax. A path through `stacks[0].blocks` is the value in all layers of the stack,
    with a `layers` dim in front; with `stacks[0][3]` in place of `stacks[0].blocks` it is the value in layer 3.
    """
    return [key for node in find_nodes(model) for key in node.value_keys()]


def find_nodes(model: nn.Module) -> list[Node]:
    """Return the modules of a model and the cores of its attentions, each module before the modules in it."""
    return list(_walk(model, "", ()))


def _walk(node: Any, path: str, accessor: Accessor) -> Iterator[Node]:
    if isinstance(node, nn.Module):
        yield Node(path, node, accessor)
    if isinstance(node, Operation):
        if accessor[-1:] == ("core",):
            yield Node(path, node, accessor, is_core=True)
        return
    if isinstance(node, tuple | list):
        for number, element in enumerate(node):
            yield from _walk(element, f"{path}[{number}]", (*accessor, number))
    elif isinstance(node, eqx.Module):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name, None)
            # Calls of the module that a wrapper holds have the wrapper's name.
            name = path if field.name == "inner" else join_path(path, field.name)
            yield from _walk(value, name, (*accessor, field.name))


def get_at(model: Any, accessor: Accessor) -> Any:
    """Return the module to which fields and indices lead."""
    for step in accessor:
        model = getattr(model, step) if isinstance(step, str) else model[step]
    return model


def parse_path(model: nn.Module, path: str, call: str) -> Point:
    """Return the value that a path names; raise a `ValueError` that begins with `call` if there is none."""
    nodes = {node.path: node for node in find_nodes(model)}
    keys = [key for node in nodes.values() for key in node.value_keys()]
    key, stack, layer = _split_layer(path, nodes, call)
    if key not in keys:
        raise ValueError(f"{call}: {path!r} {_explain_unknown(key, nodes)}; {_list_nearest(key, keys, stack, layer)}.")
    is_of_all_layers = layer is None and any(node.is_stack_of(key) for node in nodes.values())
    return Point(path, key, layer, is_of_all_layers, any(_reads_source(node, model) for node in _holders(key, nodes)))


def is_of_predictor(model: nn.LanguageModel, point: Point) -> bool:
    """Return whether a value belongs to the model's predictor of a further token."""
    nodes = {node.path: node for node in find_nodes(model)}
    return any(node.module is model.parts.predictor for node in _holders(point.key, nodes))


def _holders(key: str, nodes: dict[str, Node]) -> list[Node]:
    """Return the modules below the model that hold the value of a key."""
    return [node for path, node in nodes.items() if path and f"{key}.".startswith((f"{path}.", f"{path}["))]


def _reads_source(node: Node, model: nn.Module) -> bool:
    """Return whether a module is the model's encoder, or a layer that attends to the output of an encoder."""
    if isinstance(node.module, nn.Mixer):
        attends = node.module.facts().attends
        return attends is not None and "source" in attends.needs
    return isinstance(model, nn.LanguageModel) and node.module is model.parts.encoder


def _split_layer(path: str, nodes: dict[str, Node], call: str) -> tuple[str, str, int | None]:
    """Return the key of a path and, if the path names a layer, the path of the layer's stack and its number there."""
    for match in re.finditer(r"\[(-?\d+)\]", path):
        stack = nodes.get(path[: match.start()])
        if stack is None or not isinstance(stack.module, nn.LayerStack):
            continue
        layer, count = int(match.group(1)), len(stack.module)
        if not -count <= layer < count:
            raise ValueError(f"{call}: {path!r} names layer {layer}, and the stack has {count} layers; count from 0.")
        return join_path(stack.path, "blocks") + path[match.end() :], stack.path, layer % count
    return path, "", None


def _explain_unknown(key: str, nodes: dict[str, Node]) -> str:
    """Return the reason why a key names no value."""
    parent, _, name = key.rpartition(".")
    holder = nodes.get(parent)
    value = None if holder is None else getattr(holder.module, name, None)
    if eqx.is_array(value):
        return f"is a parameter, and not a value that a call computes; name its module, {parent!r}"
    if value is not None:
        return f"is {name_class(value)}, whose calls are not observed; only calls of an nn.Module are observed"
    return "is no module of the model"


def _list_nearest(key: str, keys: list[str], stack: str, layer: int | None) -> str:
    """Return the paths most like `key`, as text, with the number of the layer counted from 0."""
    matches = difflib.get_close_matches(key, keys, n=4, cutoff=0.4) or keys[:4]
    with_layer = lambda match: (
        match if layer is None else match.replace(join_path(stack, "blocks"), f"{stack}[{layer}]", 1)
    )
    return f"the nearest are {', '.join(map(repr, map(with_layer, matches)))} (interpretability.value_paths lists all)"
