"""Low-rank adaptation (LoRA): linear maps with a fixed weight and a trained low-rank change (arXiv:2106.09685)."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import einops
import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from ._dtype import at_least_float32
from ._linear import ComposedMap, dense, Linear, LinearMap
from ._module import is_trainable, map_modules, modules, named_modules, path_name


class LoRA(ComposedMap):
    """`W x + b + scale * B A x` (Hu et al. 2021): a linear map, and beside it the maps A (`down`) and B (`up`).

    It may stand wherever a `LinearMap` does, in a stack or among experts too; `with_lora` puts it there. There is no
    dropout before A, because a map gets no tokens' keys.
    """

    linear: LinearMap
    down: LinearMap
    up: LinearMap
    scale: float = eqx.field(static=True)

    @property
    def weight(self) -> Any:  # an array, or its replacement in a tree of the model's structure
        """Return the fixed weight, if the map has one; `matrix` returns the sum."""
        return self.linear.weight  # type: ignore[attr-defined]

    @property
    def base(self) -> LinearMap:
        """The map that the factors are added to."""
        return self.linear

    @property
    def bias(self) -> Any:
        """Return the map's bias, which is fixed too."""
        return self.linear.bias

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the input dims."""
        return self.linear.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the output dims."""
        return self.linear.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the fixed map."""
        return self.linear.shape

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the sum of the products of the fixed map and of the factors."""
        return self.linear.product(x, dtype) + self.scale * self.up.product(self.down.product(x), dtype)

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W + scale * B A`, added in float32 at least."""
        weight = self.linear.matrix()
        wide = at_least_float32(weight.dtype)
        outputs, inputs = " ".join(self.outputs), " ".join(self.inputs)
        pattern = f"... {outputs} rank, ... rank {inputs} -> ... {outputs} {inputs}"
        change = einops.einsum(self.up.matrix(wide), self.down.matrix(wide), pattern)
        return (weight.astype(wide) + self.scale * change).astype(weight.dtype if dtype is None else dtype)


Where = Callable[[str, LinearMap], bool] | Iterable[str | type]


def with_lora(
    model: PyTree,
    where: Where,
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilised: bool = False,
    key: Key[Array, ""],
) -> PyTree:
    """Return the model with a `LoRA` in the place of each chosen map; its outputs are unchanged, since B is zero.

    Each layer and expert has factors of its own, in float32; A is drawn with standard deviation `1 / sqrt(inputs)`.
    Raises a `ValueError` if no map, or a `LoRA`, is chosen.

    Args:
        model: A tree of modules.
        where: The chosen maps: names (`"query"`, `"sublayers[1].layer.up"`: ends of paths) and types (every map in an
            `nn.Attention`), or a function of path and `LinearMap`.
        rank: The channels between the two factors.
        alpha: The scale is `alpha / rank`; None makes it 1.
        rank_stabilised: Whether the scale is `alpha / sqrt(rank)` instead (arXiv:2312.03732).
        key: For A.
    """
    if rank < 1:
        raise ValueError(f"with_lora(rank={rank}): the rank counts, so give at least 1.")
    chosen = chosen_maps(model, where, f"with_lora(where={where!r})")
    if twice := [name for name, linear in chosen.items() if isinstance(linear, LoRA)]:
        raise ValueError(
            f"with_lora(where={where!r}): {', '.join(twice)} {'has' if len(twice) == 1 else 'have'} a LoRA already; "
            "merge_lora first, or choose others."
        )
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if rank_stabilised else rank)
    keys = dict(zip(chosen, jax.random.split(key, len(chosen))))

    def add(name: str, linear: LinearMap) -> LoRA:
        return add_lora(linear, rank, scale, key=keys[name])

    return replace_maps(model, keys, add)


def merge_lora(model: PyTree) -> PyTree:
    """Return a model of equal outputs with a map of `W + scale * B A`, added in float32 at least, for each `LoRA`.

    The map is a plain `Linear` if the fixed map has no weight to change, such as a quantized map.
    """

    def merge(lora: LoRA) -> LinearMap:
        return eqx.tree_at(lambda m: m.weight, dense(lora.linear), lora.matrix())

    return map_modules(merge, model, LoRA)


def lora_factors(model: PyTree) -> PyTree:
    """Return the factors of a model's `LoRA`s, and None for all other arrays, which stay fixed in training.

    Raises a `ValueError` for a model without any.
    """
    if not modules(model, LoRA):
        raise ValueError("lora_factors(model): the model has no LoRA; give it some by with_lora.")

    def factors(node: PyTree) -> PyTree:
        empty = jax.tree.map(lambda _: None, node)
        if not isinstance(node, LoRA):
            return empty
        down, up = eqx.filter((node.down, node.up), is_trainable)
        return LoRA(empty.linear, down, up, node.scale)

    return jax.tree.map(factors, model, is_leaf=lambda node: isinstance(node, LoRA))


def add_lora(linear: LinearMap, rank: int, scale: float, *, key: Key[Array, ""]) -> LoRA:
    """Return a map with new factors, whose leading dims are those of the ensembles that contain the map."""
    outer = linear.shape[: len(linear.shape) - len(linear.sizes)]
    into: dict[str, Any] = {name: linear.sizes[name] for name in linear.inputs}
    out: dict[str, Any] = {name: linear.sizes[name] for name in linear.outputs}
    inputs, outputs = " ".join(linear.inputs), " ".join(linear.outputs)

    def make(key: Key[Array, ""]) -> tuple[Linear, Linear]:
        down = Linear(f"{inputs} -> rank", rank=rank, key=key, **into)
        return down, Linear(f"rank -> {outputs}", rank=rank, std=0.0, key=key, **out)

    for _ in outer:
        make = eqx.filter_vmap(make)
    return LoRA(linear, *make(jax.random.split(key, outer) if outer else key), scale)


def chosen_maps(model: PyTree, where: Where, call: str) -> dict[str, LinearMap]:
    """Return the maps that `where` chooses, as in `with_lora`, by path.

    Raises a `ValueError` that begins with `call` if it chooses none.
    """
    is_chosen, maps = _choice_function(model, where, call), named_modules(model, LinearMap)
    chosen = {name: linear for name, linear in maps if is_chosen(name, linear)}
    if not chosen:
        known = ", ".join(name for name, _ in maps) or "none"
        raise ValueError(f"{call}: no linear map is chosen; the model's are {known}.")
    return chosen


def replace_maps(model: PyTree, names: Container[str], change: Callable[[str, LinearMap], PyTree]) -> PyTree:
    """Return the model with `change(name, map)` in the place of each linear map whose path is one of `names`."""

    def change_if_named(path: tuple, node: PyTree) -> PyTree:
        name = path_name(path)
        return change(name, node) if name in names else node

    return jax.tree_util.tree_map_with_path(change_if_named, model, is_leaf=lambda node: isinstance(node, LinearMap))


def _choice_function(model: PyTree, where: Where, call: str) -> Callable[[str, LinearMap], bool]:
    if isinstance(where, str | type):
        raise ValueError(f"{call}: names and types come in a list, such as [{where!r}].")
    if not isinstance(where, Iterable):
        return where
    entries = tuple(where)
    names = tuple(f".{entry}" for entry in entries if isinstance(entry, str))
    types = tuple(entry for entry in entries if isinstance(entry, type))
    owners = [name for name, _ in named_modules(model, types)]

    def is_chosen(name: str, _: LinearMap) -> bool:
        is_inside = any(name == owner or not owner or name.startswith(f"{owner}.") for owner in owners)
        return f".{name}".endswith(names) or is_inside

    return is_chosen
