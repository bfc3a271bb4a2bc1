"""Weight rules: a family's table from published arrays to a model's leaves and back.

A `Rule` is a line of the table. A `ResolvedRule` is that line for one model: it names the leaves by their paths in the
model, as `nn.path_name` writes them, so that a flat `{path: leaf}` is all that loading and saving need. A
`PredictorTable` has the rules of a predictor, the module for multi-token prediction.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree, Shaped

from .._shapes import as_tuple
from ..nn import has_shape, Layer, LayerStack, Linear, path_name, Predictor, Transformer


Stacked = Transformer | Predictor
"""A module that has stacks of layers, and arrays beside them."""
Tree = TypeVar("Tree", bound=PyTree)
Shape = tuple[int, ...]
StoredShapes = Mapping[str, Shape]
"""The shape of each array of a folder, by the array's name."""
NOTHING_STORED: StoredShapes = MappingProxyType({})
_DIMS = re.compile(r"\(([^)]*)\)|(\S+)")  # the dims of an einops pattern: names in brackets, or one name


def split_dims(dims: str) -> list[list[str]]:
    """Return the names of each dim on one side of an einops pattern; a dim in brackets has several."""
    return [(merged or alone).split() for merged, alone in _DIMS.findall(dims)]


def flatten_model(model: PyTree) -> dict[str, Any]:
    """Return every array of a model by its path; for a model of shapes, return every shape."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model) if has_shape(leaf)}


def unflatten_model(model: Tree, leaves: Mapping[str, object]) -> Tree:
    """Return the model with its arrays replaced by these leaves; raises a `KeyError` for an array without a leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves[path_name(path)] if has_shape(leaf) else leaf, model
    )


@dataclasses.dataclass(frozen=True)
class ResolvedRule:
    """A rule for one model: which leaves of the model a published array fills, and how the array is rearranged.

    If `name` contains `{layer}` and `{expert}`, the first dims of the leaves are layers and experts. A leaf's entry `i`
    of the first dim is published under the layer's number `layers[i]`. A pattern is an einops pattern from the dims of
    the published array to the leaf's dims after layers and experts. Without a pattern, these dims are equal.

    Several leaves may be published as one array, concatenated along the array's dim `axis`. With several `groups`, such
    as heads, each leaf has this many groups: the array holds the first group of every leaf, then the second group of
    every leaf, and so on. If `interleaved`, each group is a single entry of the dim, so that the leaves alternate entry
    by entry. A dim of a pattern may merge the groups with another dim: `"ids (groups mlp) -> ids (mlp groups)"`.
    """

    name: str
    paths: tuple[str, ...]
    """The paths of the leaves in the model, in the order in which they are published."""
    shapes: tuple[Shape, ...]
    """The shapes of these leaves."""
    patterns: tuple[str, ...]
    """The pattern of each leaf, or an empty text."""
    layers: Sequence[int] = ()
    axis: int = 0
    interleaved: bool = False
    groups: int = 1
    sliced_dims: int = 0
    """The number of dims that `slice_rule` has removed; the rule is for one index of each removed dim."""
    variant: bool = False
    ids_below: int = 0
    """For an array of integers, a bound that all its integers are below; 0: the array holds floats."""
    padded: int = 0
    """For a rule of one leaf: the length of the published vector, which ends in zeros; 0: no zeros are added."""
    shards: int = 0
    """For a rule of one leaf: the number of arrays, one for each `{shard}` of the name, that together hold the leaf's
    rows; 0: one array holds all rows. All arrays have the same number of rows, except the last."""

    def with_shapes(self, shapes: Sequence[Shape]) -> "ResolvedRule":
        """Return the rule for leaves of these shapes."""
        return dataclasses.replace(self, shapes=tuple(shapes))

    @property
    def outer_dims(self) -> int:
        """The number of a leaf's first dims that count layers and experts."""
        return ("{layer}" in self.name) + ("{expert}" in self.name) + self.sliced_dims

    def slice_rule(self) -> "ResolvedRule | None":
        """Return the rule for one index of the published array's first dim; None if leaves have another first dim."""
        if len({*self.patterns}) > 1 or self.padded:
            return None
        published, leaf = self.patterns[0].split(" -> ") if self.patterns[0] else ("", "")
        published_first, _, published_rest = published.partition(" ")
        leaf_first, _, leaf_rest = leaf.partition(" ")
        if published_first != leaf_first or (len(self.paths) > 1 and self.axis == 0):
            return None
        pattern = f"{published_rest} -> {leaf_rest}" if self.patterns[0] else ""
        axis, patterns = max(self.axis - 1, 0), (pattern,) * len(self.paths)
        return dataclasses.replace(self, patterns=patterns, axis=axis, sliced_dims=self.sliced_dims + 1)

    def arrays(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield each index of the leaves' outer dims, and the name of its published array, or of its first shard."""
        for index in itertools.product(*map(range, self.shapes[0][: self.outer_dims])):
            layer = self.layers[index[0]] if "{layer}" in self.name else None
            yield index, self.name.format(layer=layer, expert=index[-1] if index else None, shard=0)

    def pieces(self) -> Iterator["Piece"]:
        """Yield each published array, with the part of the leaves that it holds."""
        if not self.shards:
            yield from (Piece(index, name, self, 0) for index, name in self.arrays())
            return
        shape = self.shapes[0]
        rows = shape[self.outer_dims]
        step = -(-rows // self.shards)
        for index, first_name in self.arrays():
            for number, start in enumerate(range(0, rows, step)):
                part = (*shape[: self.outer_dims], min(step, rows - start), *shape[self.outer_dims + 1 :])
                name = f"shard_{number}.".join(first_name.rsplit("shard_0.", 1))
                yield Piece(index, name, dataclasses.replace(self, shapes=(part,), shards=0), start)

    def published_names(self) -> list[str]:
        """Return the names of all arrays that the rule reads."""
        return [piece.name for piece in self.pieces()]

    def fits(self, shape: Shape) -> bool:
        """Return whether a published array of this shape fills the leaves."""
        try:
            self.check_shape(shape)
        except ValueError:
            return False
        return True

    def check_shape(self, shape: Shape) -> None:
        """Raise a `ValueError` unless a published array has the shape that the leaves have together."""
        parts = self._published_shapes()
        expected = list(parts[0])
        expected[self.axis : self.axis + 1] = [sum(part[self.axis] for part in parts)] if expected else []
        if self.padded:
            expected = [self.padded]
        if shape != tuple(expected):
            raise ValueError(f"it has shape {shape}, and the model's is {tuple(expected)}")

    def to_leaf(self, array: Shaped[np.ndarray, "..."], index: int) -> Shaped[np.ndarray, "..."]:
        """Return the part of a published array that fills the leaf at `index` of `paths`, in the leaf's layout.

        The part is not copied if that is possible. Raises a `ValueError` for a shape that does not fit.
        """
        self.check_shape(array.shape)
        if self.padded:
            length = self.shapes[index][-1]
            if np.any(array[length:]):
                raise ValueError(f"the numbers after the first {length} must be zeros, which only pad the vector")
            return array[:length]
        parts, shape, pattern = self._published_shapes(), array.shape, self.patterns[index]
        if len(parts) > 1:
            groups = self._groups(parts[0])
            start = sum(part[self.axis] for part in parts[:index]) // groups
            stop = start + parts[index][self.axis] // groups
            split = array.reshape(*shape[: self.axis], groups, -1, *shape[self.axis + 1 :])
            array = split[*(slice(None),) * (self.axis + 1), start:stop].reshape(parts[index])
        if not pattern:
            return array
        return einops.rearrange(array, pattern, **_sizes(pattern, self.shapes[index][self.outer_dims :], self.groups))

    def axis_of_last_dim(self, index: int) -> int | None:
        """Return the dim of the published array, counted from the array's end, that holds the last dim of a leaf.

        `index` is the leaf's index in `paths`. Return None if neighbors along the leaf's last dim are not neighbors in
        the published array.
        """
        if not (pattern := self.patterns[index]):
            return -1
        published, leaf = pattern.split(" -> ")
        dims = split_dims(published)
        axes = [axis for axis, names in enumerate(dims) if names[-1:] == leaf.split()[-1:]]
        return axes[0] - len(dims) if axes else None

    def to_published(self, parts: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """Return the published array of these parts: the values of each leaf at one index of its outer dims."""
        arrays = [_to_published(part, pattern, self.groups) for part, pattern in zip(parts, self.patterns, strict=True)]
        if self.ids_below:
            arrays = [array.astype(np.int64) for array in arrays]  # as torch stores whole numbers
        if len(arrays) == 1:
            return np.pad(arrays[0], (0, self.padded - len(arrays[0]))) if self.padded else arrays[0]
        groups, shape = self._groups(arrays[0].shape), arrays[0].shape
        leading, trailing = shape[: self.axis], shape[self.axis + 1 :]
        split = [array.reshape(*leading, groups, -1, *trailing) for array in arrays]
        return np.concatenate(split, axis=self.axis + 1).reshape(*leading, -1, *trailing)

    def _groups(self, published: Sequence[int]) -> int:
        return published[self.axis] if self.interleaved else self.groups

    def _published_shapes(self) -> list[Shape]:
        """Return the shape of each leaf's part of the published array."""
        leaves = zip(self.shapes, self.patterns, strict=True)
        return [_published_shape(shape[self.outer_dims :], pattern, self.groups) for shape, pattern in leaves]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A published array and the part of a rule's leaves that it holds."""

    index: tuple[int, ...]
    """The index of the leaves' outer dims."""
    name: str
    """The name of the array."""
    rule: ResolvedRule
    """The rule for this array alone."""
    first_row: int
    """The first row that the array holds, counted along the leaves' first dim after layers and experts."""

    @property
    def rows(self) -> slice:
        """The rows that the array holds, counted as `first_row` is; all rows unless the array is a shard."""
        return slice(self.first_row, self.first_row + self.rule.shapes[0][self.rule.outer_dims])


def _to_published(part: Shaped[np.ndarray, "..."], pattern: str, groups: int) -> Shaped[np.ndarray, "..."]:
    reverse = " -> ".join(reversed(pattern.split(" -> ")))
    return einops.rearrange(part, reverse, **_sizes(pattern, part.shape, groups)) if reverse else part


def _published_shape(shape: Sequence[int], pattern: str, groups: int) -> Shape:
    if not pattern:
        return tuple(shape)
    sizes = _sizes(pattern, shape, groups)
    return tuple(math.prod(sizes.get(name, 1) for name in names) for names in split_dims(pattern.split(" -> ")[0]))


def _sizes(pattern: str, shape: Sequence[int], groups: int) -> dict[str, int]:
    """Return the size of each name in a pattern, for a leaf of this shape.

    A dim of the leaf may merge a name with the `groups`.
    """
    dims = zip(split_dims(pattern.split(" -> ")[1]), shape, strict=True)
    sizes = {name: size // groups if len(names) > 1 else size for names, size in dims for name in names}
    return sizes | {"groups": groups} if "(groups " in pattern else sizes


@dataclasses.dataclass(frozen=True)
class Rule:
    """A line of a family's table of weights: a published name, and the path of its leaf in a model.

    A rule applies only to a model or a layer that has its leaves.
    """

    name: str
    """The published name; with `{layer}` it stands for the arrays of all layers."""
    path: str | tuple[str, ...]
    """The path of the leaf in the model, or in a layer if the name has `{layer}`. Several paths are leaves that are
    published as one array."""
    pattern: str | tuple[str, ...] = ""
    """The einops pattern from the published array to the leaf, or from each leaf's part of the array to the leaf."""
    axis: int = 0
    """The dim along which several leaves are concatenated."""
    interleaved: bool = False
    """Whether several leaves alternate entry by entry along `axis`."""
    groups: int | str = 1
    """The number of groups of each leaf, as in `ResolvedRule`, or the size of the pattern's dim `groups`. A text names
    the field of the config that holds the number."""
    needs: str = ""
    """The rule applies only to a model or layer that has something at this path."""
    lacks: str = ""
    """The rule applies only to a model or layer that has nothing at this path."""
    variant: bool = False
    """Whether the rule replaces the other rules for its leaves, if a folder has its arrays."""
    ids_below: str = ""
    """For an array of integers, such as a table of experts' ids: the field of the config whose value is above all
    integers. An empty text: the array holds floats."""
    padded: str = ""
    """For a vector that is published with zeros after the leaf's numbers: the field of the config whose value is the
    published length. An empty text: no zeros are published."""
    shards: str = ""
    """For a leaf whose rows are published as several arrays, one for each `shard_{shard}.` of the name: the field of
    the config whose value is the number of arrays. An empty text: one array holds the leaf."""
    part: str = ""
    """The part of the model whose layers `{layer}` counts: `"encoder"`, or empty for the model itself."""

    def leaves(self, holder: Stacked | Layer) -> tuple[Any, ...]:
        """Return the leaves of a model or a layer that the rule names; an empty tuple if the rule does not apply."""
        if (self.needs and _get(holder, self.needs) is None) or (self.lacks and _get(holder, self.lacks) is not None):
            return ()
        leaves = tuple(_get(holder, path) for path in as_tuple(self.path))
        return () if any(leaf is None for leaf in leaves) else leaves


def resolve_rules(
    table: Sequence[Rule], config: object, model: Stacked, stored: StoredShapes = NOTHING_STORED, root: str = ""
) -> list[ResolvedRule]:
    """Return the rules of a table that apply to a model: first rules outside of layers, then rules of layers.

    Args:
        table: A family's rules.
        config: The model's config.
        model: The model, or its shapes.
        stored: The shapes of a folder's arrays. A variant applies if the folder has its arrays. If several variants
            have one name, only the first whose shape fits applies.
        root: The prefix of all paths, for a model that is a part of another.
    """
    # In `named`, each leaf is replaced by its path. A rule's path may lead through properties, so look it up in `named`
    # to find the leaf's own path.
    named = jax.tree_util.tree_map_with_path(lambda path, _: root + path_name(path), model)
    shape_of = {root + path: leaf.shape for path, leaf in flatten_model(model).items()}
    rules = [_resolve(rule, config, rule.leaves(named), (), shape_of) for rule in table if _applies(rule, model, False)]
    for part, layers_in, numbers in layer_groups(model):
        for rule in table:
            if rule.part == part and _applies(rule, layers_in(model), True):
                rules.append(_resolve(rule, config, rule.leaves(layers_in(named)), numbers, shape_of))
    variants = _variants(rules, stored)
    replaced = {path for rule in variants for path in rule.paths}
    return [rule for rule in rules if rule in variants or not (rule.variant or replaced.intersection(rule.paths))]


def _variants(rules: Sequence[ResolvedRule], stored: StoredShapes) -> list[ResolvedRule]:
    """Return the variants whose arrays a folder has; if several have one name, only the first whose shape fits."""
    chosen: dict[str, ResolvedRule] = {}
    for rule in rules:
        name = next(rule.arrays())[1]
        if rule.variant and name in stored:
            first = chosen.setdefault(name, rule)
            if not first.fits(stored[name]) and rule.fits(stored[name]):
                chosen[name] = rule
    return list(chosen.values())


def _applies(rule: Rule, holder: Stacked | Layer, is_of_layers: bool) -> bool:
    return ("{layer}" in rule.name) == is_of_layers and bool(rule.leaves(holder))


def _resolve(
    rule: Rule,
    config: object,
    paths: tuple[str, ...],
    layers: Sequence[int],
    shape_of: Mapping[str, Shape],
) -> ResolvedRule:
    groups = getattr(config, rule.groups) if isinstance(rule.groups, str) else rule.groups
    return ResolvedRule(
        rule.name,
        paths,
        tuple(shape_of[path] for path in paths),
        (rule.pattern,) * len(paths) if isinstance(rule.pattern, str) else rule.pattern,
        layers,
        rule.axis,
        rule.interleaved,
        groups,
        variant=rule.variant,
        ids_below=getattr(config, rule.ids_below) if rule.ids_below else 0,
        padded=getattr(config, rule.padded) if rule.padded else 0,
        shards=getattr(config, rule.shards) if rule.shards else 0,
    )


def layer_groups(model: Stacked) -> list[tuple[str, Callable[[Stacked], Layer], range]]:
    """Return the groups of layers that are stacked in one module, in the order of the model.

    A stack has one group, or a group for each layer of its super-block. Each group is returned as the part of the model
    that the stack is in (`Rule.part`), a function from a model to the stacked layers, and the layers' numbers.
    """
    groups = []
    for part in ("", "encoder"):
        first = 0
        for stack_index, stack in enumerate(_stacks(part, model)):
            size = len(stack.blocks.members)
            end = first + size * len(stack)
            for position in range(size):
                layers_in = functools.partial(_layers_at, part, stack_index, position)
                groups.append((part, layers_in, range(first + position, end, size)))
            first = end
    return groups


def _stacks(part: str, model: Stacked) -> tuple[LayerStack, ...]:
    holder = getattr(model, part, None) if part else model
    return () if holder is None else holder.stacks


def _layers_at(part: str, stack: int, position: int, model: Stacked) -> Layer:
    return _stacks(part, model)[stack].blocks.members[position]


def _get(holder: object, path: str) -> Any:
    """Return the value at a path of attribute names, and of indices of tuples; None if there is nothing."""
    for name in path.split("."):
        if isinstance(holder, tuple) and name.isdigit():
            holder = holder[int(name)] if int(name) < len(holder) else None
        else:
            holder = getattr(holder, name, None)
    return holder


PREDICTOR = "predictor."
"""Prefix of the paths of the predictor's leaves."""
_LAYER = "model.layers.{layer}."


@dataclasses.dataclass(frozen=True)
class PredictorTable:
    """Table of the published predictors of a family's models."""

    one_layer_config: Callable[..., object]
    """A function from a model's config to the config of a one-layer model whose layer is like the predictor's."""
    prefix: str
    """Prefix of the published names of the predictor's arrays; `{depth}` stands for the number of the model's
    layers."""
    weights: tuple[Rule, ...]
    """Rules for the predictor's arrays outside of its layer, with names that lack the prefix. The arrays of the layer
    have the family's rules."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arrays of the model that are published a second time with the predictor: for each name without the prefix, the
    part of the model that has the array, `"embedding"` or `"head"`."""
    attributes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Attributes that the `config.json` of a model with a predictor has beside the family's."""

    def prefix_of(self, config: Any) -> str:
        """Return the prefix of the names of the predictor's arrays, for a model of this config."""
        return self.prefix.format(depth=config.layers)

    def build(self, make: Callable[..., Transformer], config: Any, *, key: Key[Array, ""]) -> Predictor:
        """Return a predictor with random weights; a one-layer model, built by `make`, provides its layer and norms."""
        layer_key, merge_key = jax.random.split(key)
        model, embed = make(self.one_layer_config(config), key=layer_key), config.embed
        return Predictor(
            embedding_norm=_copy_arrays(model.norm),
            hidden_norm=_copy_arrays(model.norm),
            merge=Linear("sides embed -> merged", sides=2, embed=embed, merged=embed, key=merge_key),
            stacks=model.stacks,
            norm=model.norm,
        )

    def rules(
        self,
        weights: Sequence[Rule],
        config: Any,
        predictor: Predictor,
        stored: StoredShapes = NOTHING_STORED,
    ) -> list[ResolvedRule]:
        """Return the rules for the predictor of a model of this config; `weights` are the family's rules."""
        prefix, depth = self.prefix_of(config), config.layers if "{depth}" in self.prefix else 0
        layer = _LAYER if depth else f"{prefix}layers.{{layer}}."
        table = [dataclasses.replace(rule, name=prefix + rule.name) for rule in self.weights]
        table += [
            dataclasses.replace(rule, name=rule.name.replace(_LAYER, layer))
            for rule in weights
            if "{layer}" in rule.name
        ]
        rules = resolve_rules(table, config, predictor, stored, root=PREDICTOR)
        return [dataclasses.replace(rule, layers=[number + depth for number in rule.layers]) for rule in rules]

    def copied_leaves(self, config: Any, model: Transformer) -> dict[str, str]:
        """Return, for the name of each array of `copies`, the path of the model's leaf that it repeats."""
        head = "embedding.weight" if model.head is None else "head.weight"
        path_of = {"embedding": "embedding.weight", "head": head}
        # A quantized head has no weight among the leaves, so its copy is left out and stays as it is stored.
        leaves, prefix = flatten_model(model), self.prefix_of(config)
        return {prefix + name: path_of[part] for name, part in self.copies.items() if path_of[part] in leaves}


def _copy_arrays(norm: Tree) -> Tree:
    """Return the module with copies of its arrays, so that no two norms share an array."""
    return jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, norm)


# DeepSeek-V3 publishes its predictor as one more layer of the model, with copies of the table and the head.
NUMBERED_PREDICTOR = PredictorTable(
    functools.partial(dataclasses.replace, layers=1, first_dense=0),
    "model.layers.{depth}.",
    (
        Rule("enorm.weight", "embedding_norm.weight"),
        Rule("hnorm.weight", "hidden_norm.weight"),
        Rule("eh_proj.weight", "merge.weight", "merged (sides embed) -> merged sides embed"),
        Rule("shared_head.norm.weight", "norm.weight"),
    ),
    copies={"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"},
    attributes={"num_nextn_predict_layers": 1},
)
# Qwen3-Next and 3.5 publish their predictor under the prefix `mtp.`. The predictor's layer has attention, not a delta
# net.
NAMED_PREDICTOR = PredictorTable(
    functools.partial(dataclasses.replace, layers=1, attention_layers=(0,)),
    "mtp.",
    (
        Rule("pre_fc_norm_embedding.weight", "embedding_norm.weight"),
        Rule("pre_fc_norm_hidden.weight", "hidden_norm.weight"),
        Rule("fc.weight", "merge.weight", "merged (sides embed) -> merged sides embed"),
        Rule("norm.weight", "norm.weight"),
    ),
)
