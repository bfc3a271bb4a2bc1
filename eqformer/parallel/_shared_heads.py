"""Key heads that several devices of `tensor` share in serving: each device holds one, and the caches of some rows.

A layout cannot say that devices hold the same slice. So the key heads are repeated: as many as there are devices, each
as often as devices share it, and split like any heads. A cache of repeated heads would repeat its entries. Instead the
devices that share a head split its cache by rows: they exchange their queries' heads for rows before they attend, and
back after.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import nn
from ._layout import shardings
from ._mesh import PIPE, TENSOR
from ._placement import Placement
from .tensor._tensor import dim_size, is_split


def count_sharers(model: PyTree, plan: Placement) -> int:
    """Return how many devices of `tensor` share each key head and may split its cache by rows; 1 where none may.

    They may in mixers that say so (`MixerFacts.attends_by_rows`) and have nothing else for each head, such as sinks; in
    pipelines rows go through in pieces, and caches are not split.
    """
    repeats = {_repeats(mixer, plan) for mixer in nn.modules(model, nn.Mixer)}
    if plan.size(PIPE) > 1 or len(repeats) != 1:
        return 1
    supported = jax.tree.map(_has_only_maps, model, nn.dims(model), is_leaf=_is_mixer)
    return repeats.pop() if jax.tree.all(supported) else 1


def repeat_key_heads(model: PyTree, plan: Placement) -> PyTree:
    """Return the model, or its shapes, with a key head for each device of `tensor` where there are fewer."""
    if all(_repeats(mixer, plan) == 1 for mixer in nn.modules(model, nn.Mixer)):
        return model

    def repeat_in_mixer(mixer: nn.Mixer, names: PyTree) -> PyTree:
        repeats = _repeats(mixer, plan)

        def repeat_in_array(x: PyTree, names: str) -> PyTree:
            dims = names.split() if eqx.is_array(x) else []
            return jnp.repeat(x, repeats, axis=dims.index("kv_heads")) if "kv_heads" in dims else x

        return jax.tree.map(repeat_in_array, mixer, names) if repeats > 1 else mixer

    def repeat(model: PyTree) -> PyTree:
        return nn.map_modules(repeat_in_mixer, model, nn.Mixer, nn.dims(model))

    if not jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        return eqx.filter_eval_shape(repeat, model)
    arrays, static = eqx.partition(repeat(model), eqx.is_array)
    return eqx.combine(jax.device_put(arrays, shardings(plan.parameter_specs(arrays), plan.mesh)), static)


def _repeats(mixer: nn.Mixer, plan: Placement) -> int:
    """Return how many devices share each of a mixer's key heads."""
    kv_heads, devices = dim_size(mixer, "kv_heads"), plan.size(TENSOR)
    if not is_split(mixer) or kv_heads is None or kv_heads >= devices or devices % kv_heads:
        return 1
    return devices // kv_heads


def _is_mixer(node: object) -> bool:
    return isinstance(node, nn.Mixer)


def _has_only_maps(node: PyTree, names: PyTree) -> bool:
    """Return whether a node is no mixer, or one that attends by rows and has nothing for each head but its maps."""
    if not _is_mixer(node):
        return True
    if not node.facts().attends_by_rows:
        return False

    def names_outside_maps(child: PyTree, names: PyTree) -> str:
        return "" if nn.is_map(child) else str(names)

    names = jax.tree.leaves(jax.tree.map(names_outside_maps, node, names, is_leaf=nn.is_map))
    return not {"heads", "kv_heads"} & set(" ".join(names).split())
