"""Low-rank adaptation (LoRA): linear maps with a fixed weight and a trained low-rank change (arXiv:2106.09685)."""

from collections.abc import Callable, Iterable
from typing import Any

import einops
import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from ._dims import is_trainable, path_name
from ._dtype import at_least_float32
from ._linear import Linear


class LoRA(eqx.Module):
    """`W x + b + scale * B A x` (Hu et al. 2021): a `Linear`, and beside it A (`down`) and B (`up`), also `Linear`s.

    It stands wherever a `Linear` does, in a stack or among experts too; `with_lora` puts it there. There is no dropout
    before A: a map sees no token's key.
    """

    linear: Linear
    down: Linear
    up: Linear
    scale: float = eqx.field(static=True)

    @property
    def weight(self) -> Any:  # an array, or what stands for one in a tree like the model
        """The weight that stays; `weight_of` gives the sum."""
        return self.linear.weight

    @property
    def bias(self) -> Any:
        """The map's bias, which stays too."""
        return self.linear.bias

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the dims that it maps."""
        return self.linear.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the dims that it gives."""
        return self.linear.outputs

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the outputs, then the inputs."""
        return self.outputs + self.inputs

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map the trailing input dims of `x` to the output dims; leading dims stay."""
        return self.linear(x) + self.added(x)

    def added(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """What the factors add."""
        return self.scale * self.up(self.down(x))


Where = Callable[[str, Linear], bool] | Iterable[str | type]


def with_lora(
    model: PyTree,
    where: Where,
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilised: bool = False,
    key: Key[Array, ""],
) -> PyTree:
    """The model with a `LoRA` in the place of each chosen `Linear`; its outputs are unchanged, since B starts at zero.

    `where` lists names (`"query"`, `"feed_forward.layer.up"`: ends of paths) and types (every `Linear` in an
    `nn.Attention`), or is a function of path and `Linear`. The scale is `alpha / rank`, `rank_stabilised` `alpha /
    sqrt(rank)` (arXiv:2312.03732); `alpha=None` makes it 1. Each layer and expert has factors of its own, in float32;
    A is drawn with deviation `1 / sqrt(inputs)`. Raises a `ValueError` where nothing, or a `LoRA`, is chosen.
    """
    if rank < 1:
        raise ValueError(f"with_lora(rank={rank}): the rank counts, so give at least 1.")
    wanted, maps = _wanted(model, where), _maps(model)
    chosen = [name for name, linear in maps if wanted(name, linear)]
    if not chosen:
        known = ", ".join(name for name, _ in maps) or "none"
        raise ValueError(f"with_lora(where={where!r}): no Linear is chosen; the model's are {known}.")
    if twice := [name for name, linear in maps if name in set(chosen) and isinstance(linear, LoRA)]:
        raise ValueError(
            f"with_lora(where={where!r}): {', '.join(twice)} {'has' if len(twice) == 1 else 'have'} a LoRA already; "
            "merge_lora first, or choose others."
        )
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if rank_stabilised else rank)
    keys = dict(zip(chosen, jax.random.split(key, len(chosen))))

    def one(path: tuple, node: Any) -> Any:
        name = path_name(path)
        return beside(node, rank, scale, key=keys[name]) if name in keys else node

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=_is_map)


def merge_lora(model: PyTree) -> PyTree:
    """The plain model of equal outputs: `W + scale * B A` in the place of each `LoRA`, added in float32 at least."""

    def merged(node: Any) -> Any:
        return eqx.tree_at(lambda m: m.weight, node.linear, weight_of(node)) if isinstance(node, LoRA) else node

    return jax.tree.map(merged, model, is_leaf=lambda node: isinstance(node, LoRA))


def lora_factors(model: PyTree) -> PyTree:
    """The factors of a model's `LoRA`s; None stands for everything else, which training them leaves as it is.

    Raises a `ValueError` for a model without any.
    """
    is_lora = lambda node: isinstance(node, LoRA)
    if not any(map(is_lora, jax.tree.leaves(model, is_leaf=is_lora))):
        raise ValueError("lora_factors(model): the model has no LoRA; give it some by with_lora.")

    def factors(node: Any) -> Any:
        nothing = jax.tree.map(lambda _: None, node)
        if not isinstance(node, LoRA):
            return nothing
        down, up = eqx.filter((node.down, node.up), is_trainable)
        return LoRA(nothing.linear, down, up, node.scale)

    return jax.tree.map(factors, model, is_leaf=is_lora)


def weight_of(linear: Linear | LoRA) -> Float[Array, "..."]:
    """The weight of what the map computes, a `LoRA`'s change added."""
    if isinstance(linear, Linear):
        return linear.weight
    wide = at_least_float32(linear.weight.dtype)
    outputs, inputs = " ".join(linear.outputs), " ".join(linear.inputs)
    pattern = f"... {outputs} rank, ... rank {inputs} -> ... {outputs} {inputs}"
    change = einops.einsum(linear.up.weight.astype(wide), linear.down.weight.astype(wide), pattern)
    return (linear.weight.astype(wide) + linear.scale * change).astype(linear.weight.dtype)


def beside(linear: Linear, rank: int, scale: float, *, key: Key[Array, ""]) -> LoRA:
    """A `Linear` with fresh factors, which have the dims in front that its ensembles have."""
    outer = linear.weight.ndim - len(linear.weight_dims)
    sizes = dict(zip(linear.weight_dims, linear.weight.shape[outer:]))
    into: Any = {name: sizes[name] for name in linear.inputs}
    out: Any = {name: sizes[name] for name in linear.outputs}
    inputs, outputs = " ".join(linear.inputs), " ".join(linear.outputs)

    def make(key: Key[Array, ""]) -> tuple[Linear, Linear]:
        down = Linear(f"{inputs} -> rank", rank=rank, key=key, **into)
        return down, Linear(f"rank -> {outputs}", rank=rank, std=0.0, key=key, **out)

    for _ in range(outer):
        make = eqx.filter_vmap(make)
    return LoRA(linear, *make(jax.random.split(key, linear.weight.shape[:outer]) if outer else key), scale)


def _wanted(model: PyTree, where: Where) -> Callable[[str, Any], bool]:
    if isinstance(where, str | type):
        raise ValueError(f"with_lora(where={where!r}): names and types come in a list, such as [{where!r}].")
    if not isinstance(where, Iterable):
        return where
    entries = tuple(where)
    names = tuple(f".{entry}" for entry in entries if isinstance(entry, str))
    types = tuple(entry for entry in entries if isinstance(entry, type))
    is_owner = lambda node: isinstance(node, types)
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_owner)
    owners = tuple(path_name(path) for path, node in nodes if is_owner(node))
    inside = lambda name: any(name == owner or not owner or name.startswith(f"{owner}.") for owner in owners)
    return lambda name, _: f".{name}".endswith(names) or inside(name)


def _maps(model: PyTree) -> list[tuple[str, Any]]:
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_map)
    return [(path_name(path), node) for path, node in nodes if _is_map(node)]


def _is_map(node: Any) -> bool:
    return isinstance(node, Linear | LoRA)
