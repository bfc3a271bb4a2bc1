"""Experts: feed-forward layers of one kind as a vmapped ensemble, which run on slots or on rows sorted by expert."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._linear import LinearMap, map_linears
from .._module import ensemble, map_modules, Module, path_name, take_members
from ._grouped import run_grouped


class Experts(Module):
    """`experts` feed-forward layers, each array with an `experts` dim in front.

    `mlps` may be any module that maps the last dim of an array; `sorted_rows` needs experts whose parameters all
    belong to linear maps. Indexing returns an expert: `experts[2]` is a layer.
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

    def __getitem__(self, index: int) -> Callable[[Array], Array]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"experts[{index}]: there are {len(self)} experts.")
        return take_members(self.mlps, index)

    def slots(self, x: Float[Array, "experts slots embed"]) -> Float[Array, "experts slots embed"]:
        """Run each expert on its slots; all experts have equally many."""
        return eqx.filter_vmap(lambda mlp, x: mlp(x))(self.mlps, x)

    def sorted_rows(
        self,
        x: Float[Array, "rows embed"],
        sizes: Int[Array, "experts"],
        *,
        even: int | None = None,
        most: int | None = None,
    ) -> Float[Array, "rows embed"]:
        """Run expert 0 on the first `sizes[0]` rows, expert 1 on the next `sizes[1]`, and so on.

        Rows after those of the last expert give zeros. `even` is the number of rows of an expert with an even load, by
        default an equal share of all rows. `most` is a bound on the rows of an expert, if one is known. Raises a
        `ValueError` if a parameter of an expert does not belong to a linear map from one dim to one dim.
        """
        if parameters := self._parameters_outside_maps():
            raise ValueError(
                f"Experts.sorted_rows: an expert's parameters {', '.join(parameters)} are not those of a linear map of "
                "one dim to one dim, and rows sorted by expert can run only such maps; dispatch by Capacity, which "
                "runs any module."
            )
        return run_grouped(self.mlps, x, sizes, even=even, most=most)

    def only_call_maps(self) -> bool:
        """Return whether experts use parameters only by calling linear maps, so that `sorted_rows` can run them."""
        if self._parameters_outside_maps():
            return False
        # The maps are replaced by functions without a weight. They keep the shape of their input, because the slices of
        # one device need not fit together.
        without_weights = map_modules(lambda _: _CallOnly(), self.mlps, LinearMap)
        try:
            jax.eval_shape(without_weights, jax.ShapeDtypeStruct((1, 2), jnp.float32))
        except (AttributeError, TypeError):  # The expert reads a map's weight.
            return False
        return True

    def _parameters_outside_maps(self) -> list[str]:
        """Return the paths of parameters that belong to no linear map from one dim to one dim; most experts have
        none."""
        is_matrix = lambda linear: len(linear.inputs) == len(linear.outputs) == 1
        without_maps = map_linears(lambda linear: None if is_matrix(linear) else linear, self.mlps)
        leaves = jax.tree_util.tree_leaves_with_path(without_maps)
        return [path_name(path) for path, leaf in leaves if eqx.is_array(leaf)]


class _CallOnly(eqx.Module):
    """A replacement for a linear map in a trace, which can be called but has no weight to read."""

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows inputs"]:
        return x
