"""Feed-forward layers of one kind, held as a vmapped ensemble and run on rows that are sorted by expert."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._dims import ensemble, path_name
from .._linear import LinearMap
from .._module import Module
from ._grouped import grouped
from ._linear_replay import map_linears


class Experts(Module):
    """`experts` feed-forward layers, each array with an `experts` dim in front.

    `mlps` may be any module that maps the last dim of an array; `sorted_rows` asks that its parameters be those of
    linear maps. An expert is plain indexing: `experts[2]` is a layer.
    """

    mlps: Callable[[Array], Array] = ensemble("experts")

    def __init__(
        self, make: Callable[[Key[Array, ""]], Callable[[Array], Array]], experts: int, *, key: Key[Array, ""]
    ):
        """Build `make(key)` for `experts` keys, in one trace."""
        if experts < 1:
            raise ValueError(f"Experts(experts={experts}): a mixture has at least one expert.")
        self.mlps = eqx.filter_vmap(make)(jax.random.split(key, experts))

    def __len__(self) -> int:
        return jax.tree.leaves(eqx.filter(self.mlps, eqx.is_array))[0].shape[0]

    def __getitem__(self, place: int) -> Callable[[Array], Array]:
        if not -len(self) <= place < len(self):
            raise IndexError(f"experts[{place}]: there are {len(self)} experts.")
        arrays, rest = eqx.partition(self.mlps, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda x: x[place], arrays), rest)

    def slots(self, x: Float[Array, "experts slots embed"]) -> Float[Array, "experts slots embed"]:
        """Each expert on its own rows, of which all have equally many."""
        return eqx.filter_vmap(lambda mlp, x: mlp(x))(self.mlps, x)

    def sorted_rows(
        self,
        x: Float[Array, "rows embed"],
        sizes: Int[Array, "experts"],
        *,
        even: int | None = None,
        most: int | None = None,
    ) -> Float[Array, "rows embed"]:
        """The first `sizes[0]` rows by expert 0, the next `sizes[1]` by expert 1, and so on; zeros for rows behind.

        `even` is how many rows an expert has with an even load, by default an equal share; none has more than `most`.

        Raises a `ValueError` for parameters that are not those of linear maps of one dim to one.
        """
        if others := self._more_than_maps():
            raise ValueError(
                f"Experts.sorted_rows: of an expert's parameters, {', '.join(others)} are not those of a linear map of "
                "one dim to one, and rows sorted by expert need such; dispatch by Capacity, which runs any module."
            )
        return grouped(self.mlps, x, sizes, even=even, most=most)

    def only_call_maps(self) -> bool:
        """Whether `sorted_rows` can run these experts: they use their parameters only by calling linear maps."""
        if self._more_than_maps():
            return False
        is_any = lambda node: isinstance(node, LinearMap)
        called = jax.tree.map(lambda node: _Called() if is_any(node) else node, self.mlps, is_leaf=is_any)
        try:  # sizes do not matter, and those of one device's slices do not fit together
            jax.eval_shape(called, jax.ShapeDtypeStruct((1, 2), jnp.float32))
        except (AttributeError, TypeError):  # it reads what a map holds
            return False
        return True

    def _more_than_maps(self) -> list[str]:
        """The paths of parameters that are not those of linear maps of one dim to one; most have none."""
        is_grouped = lambda linear: len(linear.inputs) == len(linear.outputs) == 1
        rest = map_linears(lambda linear: None if is_grouped(linear) else linear, self.mlps)
        return [path_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(rest) if eqx.is_array(leaf)]


class _Called(eqx.Module):
    """Takes the place of a linear map in a trace: it can be called, and has no weight to read."""

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows inputs"]:
        return x
