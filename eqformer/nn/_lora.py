"""Low-rank adaptation (LoRA): linear maps with a fixed weight and a trained low-rank change (arXiv:2106.09685)."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import einops
import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, PyTree

from ._dtype import at_least_float32
from ._linear import ComposedMap, dense, Linear, LinearMap
from ._module import is_trainable, map_modules, modules, named_modules, path_name
from ._pooling import ClassificationHead


class LoRA(ComposedMap):
    """`W x + b + scale * B A x` (Hu et al. 2021): a fixed linear map with two trained factors, A (`down`) and B (`up`).

    `with_lora` replaces any `LinearMap` by a `LoRA`, also in a stack or among experts. There is no dropout before A,
    because a linear map does not get the random keys of tokens.
    """

    linear: LinearMap
    down: LinearMap
    up: LinearMap
    scale: float = eqx.field(static=True)

    @property
    def weight(self) -> Any:  # an array, or its replacement in a tree of the model's structure
        """The fixed weight, if the map has one; `matrix` returns the sum of the weight and the factors' product."""
        return self.linear.weight  # type: ignore[attr-defined]

    @property
    def base(self) -> LinearMap:
        """The fixed map."""
        return self.linear

    @property
    def bias(self) -> Any:
        """The map's bias, which is fixed too."""
        return self.linear.bias

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input dims."""
        return self.linear.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the output dims."""
        return self.linear.outputs

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the fixed map's matrix."""
        return self.linear.shape

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x + scale * B A x`.

        The sum is named: rematerialisation policies that keep the results of maps then keep the sum, not both products.
        """
        change = self.scale * self.up.product(self.down.product(x), dtype)
        return checkpoint_name(self.linear.product(x, dtype) + change, "product")

    def matrix(self, dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
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
    rank_stabilized: bool = False,
    key: Key[Array, ""],
) -> PyTree:
    """Return the model with a `LoRA` in the place of each chosen map; outputs are unchanged, because B is zero.

    Each layer and expert has factors of its own, in float32. A is initialized with standard deviation `1 /
    sqrt(inputs)`. The maps of a classifier are never chosen, because all of its weights are trained (`lora_factors`).
    Raises a `ValueError` if `where` chooses no map, or a map that is a `LoRA` already.

    Args:
        model: A tree of modules.
        where: The chosen maps, as a list of names and types, or as a function of a path and a `LinearMap`. A name, such
            as `"query"` or `"sublayers[1].layer.up"`, chooses all maps whose path ends in it. A type, such as
            `nn.Attention`, chooses all maps inside of its modules.
        rank: The channels between the two factors.
        alpha: The scale is `alpha / rank`; None makes it 1.
        rank_stabilized: Whether the scale is `alpha / sqrt(rank)` instead (arXiv:2312.03732).
        key: Random key for A.
    """
    if rank < 1:
        raise ValueError(f"with_lora(rank={rank}): the rank counts channels; give at least 1.")
    is_chosen = _choice_function(model, where, f"with_lora(where={where!r})")
    heads = tuple(f"{name}." for name, _ in named_modules(model, ClassificationHead))

    def is_chosen_outside_heads(name: str, linear: LinearMap) -> bool:
        return is_chosen(name, linear) and not name.startswith(heads)

    chosen = choose_maps(model, is_chosen_outside_heads, f"with_lora(where={where!r})")
    if adapted := [name for name, linear in chosen.items() if isinstance(linear, LoRA)]:
        raise ValueError(
            f"with_lora(where={where!r}): {', '.join(adapted)} {'has' if len(adapted) == 1 else 'have'} a LoRA "
            "already; merge_lora first, or choose other maps."
        )
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if rank_stabilized else rank)
    keys = dict(zip(chosen, jax.random.split(key, len(chosen))))

    def add(name: str, linear: LinearMap) -> LoRA:
        return add_lora(linear, rank, scale, key=keys[name])

    return replace_maps(model, keys, add)


def merge_lora(model: PyTree) -> PyTree:
    """Replace each `LoRA` by one linear map with the weight `W + scale * B A`, which gives the same outputs.

    The sum is computed in float32 at least. If the fixed map holds no weight, as a quantized map, the new map is a
    `Linear`.
    """

    def merge(lora: LoRA) -> LinearMap:
        return eqx.tree_at(lambda m: m.weight, dense(lora.linear), lora.matrix())

    return map_modules(merge, model, LoRA)


def without_lora(model: PyTree) -> PyTree:
    """Replace each `LoRA` by its fixed map: the model without its adapter, which shares the model's arrays."""
    return map_modules(lambda lora: lora.linear, model, LoRA)


def lora_factors(model: PyTree) -> PyTree:
    """Return a tree like the model with the factors of its `LoRA`s and its classifier, and None for all other arrays.

    The other arrays stay fixed in training. All weights of a classifier are trained, as in peft, because their initial
    values are random. Raises a `ValueError` for a model without a `LoRA`.
    """
    if not modules(model, LoRA):
        raise ValueError("lora_factors(model): the model has no LoRA; add LoRAs by with_lora.")

    def is_lora(node: PyTree) -> bool:
        return isinstance(node, LoRA | ClassificationHead)

    def factors(node: PyTree) -> PyTree:
        if isinstance(node, ClassificationHead):
            return eqx.filter(node, is_trainable)
        empty = jax.tree.map(lambda _: None, node)
        if not is_lora(node):
            return empty
        down, up = eqx.filter((node.down, node.up), is_trainable)
        return LoRA(empty.linear, down, up, node.scale)

    return jax.tree.map(factors, model, is_leaf=is_lora)


def add_lora(linear: LinearMap, rank: int, scale: float, *, key: Key[Array, ""]) -> LoRA:
    """Return a `LoRA` of the map with new factors, which have the map's ensemble dims in front."""
    ensemble_sizes = linear.shape[: len(linear.shape) - len(linear.sizes)]
    input_sizes: dict[str, Any] = {name: linear.sizes[name] for name in linear.inputs}
    output_sizes: dict[str, Any] = {name: linear.sizes[name] for name in linear.outputs}
    inputs, outputs = " ".join(linear.inputs), " ".join(linear.outputs)

    def draw_factors(key: Key[Array, ""]) -> tuple[Linear, Linear]:
        down = Linear(f"{inputs} -> rank", rank=rank, key=key, **input_sizes)
        return down, Linear(f"rank -> {outputs}", rank=rank, std=0.0, key=key, **output_sizes)

    for _ in ensemble_sizes:
        draw_factors = eqx.filter_vmap(draw_factors)
    keys = jax.random.split(key, ensemble_sizes) if ensemble_sizes else key
    return LoRA(linear, *draw_factors(keys), scale)


def choose_maps(model: PyTree, where: Where, call: str) -> dict[str, LinearMap]:
    """Return the maps that `where` chooses, as in `with_lora`, by their paths.

    Raises a `ValueError` that begins with `call` if no map is chosen.
    """
    is_chosen, maps = _choice_function(model, where, call), named_modules(model, LinearMap)
    chosen = {name: linear for name, linear in maps if is_chosen(name, linear)}
    if not chosen:
        known = ", ".join(name for name, _ in maps) or "none"
        raise ValueError(f"{call}: no linear map is chosen; the model's linear maps are {known}.")
    return chosen


def replace_maps(model: PyTree, names: Container[str], change: Callable[[str, LinearMap], PyTree]) -> PyTree:
    """Return the model with each linear map whose path is one of `names` replaced by `change(path, map)`."""

    def change_if_named(path: tuple, node: PyTree) -> PyTree:
        name = path_name(path)
        return change(name, node) if name in names else node

    return jax.tree_util.tree_map_with_path(change_if_named, model, is_leaf=lambda node: isinstance(node, LinearMap))


def _choice_function(model: PyTree, where: Where, call: str) -> Callable[[str, LinearMap], bool]:
    """Return the function of a path and a map that says whether `where` chooses the map."""
    if isinstance(where, str | type):
        raise ValueError(f"{call}: names and types come in a list, such as [{where!r}].")
    if not isinstance(where, Iterable):
        return where
    entries = tuple(where)
    names = tuple(f".{entry}" for entry in entries if isinstance(entry, str))
    types = tuple(entry for entry in entries if isinstance(entry, type))
    owners = [name for name, _ in named_modules(model, types)]  # The path of the model itself is empty.

    def is_chosen(name: str, _: LinearMap) -> bool:
        is_inside_owner = any(owner in ("", name) or name.startswith(f"{owner}.") for owner in owners)
        return is_inside_owner or f".{name}".endswith(names)

    return is_chosen
