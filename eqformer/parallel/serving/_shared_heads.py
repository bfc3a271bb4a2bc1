"""Key heads that several devices of `tensor` share, in serving: each device holds one, and the caches of some rows.

A layout cannot say that devices hold the same slice. So the key heads are repeated: as many as there are devices, each
as often as devices share it, and split like any heads. What would be cached as often is split over those devices by
rows: they exchange their queries' heads for rows before they attend, and back after.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import nn
from .._axes import PIPE, TENSOR
from .._plan import Plan
from .._wrap import replace_where
from ..layouts._layout import shardings
from ..tensor._tensor import is_split, size_of


def sharers(model: PyTree, plan: Plan) -> int:
    """How many devices of `tensor` share each key head and may split its cache by rows; 1 where none do.

    They may in attentions that are made of maps to heads, and have nothing else for each head, such as sinks; in
    pipelines rows go through in pieces, and caches are not split.
    """
    numbers = {_times(mixer, plan) for mixer in nn.modules(model, nn.Mixer)}
    if plan.size(PIPE) > 1 or len(numbers) != 1:
        return 1
    found: list[bool] = []
    jax.tree.map(lambda node, names: found.append(_is_of_maps(node, names)), model, nn.dims(model), is_leaf=_is_mixer)
    return numbers.pop() if all(found) else 1


def with_own_key_heads(model: PyTree, plan: Plan) -> PyTree:
    """The model, or its shapes, with a key head for each device of `tensor` where there are fewer."""
    if all(_times(mixer, plan) == 1 for mixer in nn.modules(model, nn.Mixer)):
        return model

    def repeated(mixer: nn.Mixer, names: PyTree) -> PyTree:
        times = _times(mixer, plan)

        def one(x: PyTree, names: str) -> PyTree:
            dims = names.split() if eqx.is_array(x) else []
            return jnp.repeat(x, times, axis=dims.index("kv_heads")) if "kv_heads" in dims else x

        return jax.tree.map(one, mixer, names) if times > 1 else mixer

    change = lambda model: replace_where(model, _is_mixer, repeated, nn.dims(model))
    arrays, rest = eqx.partition(model, eqx.is_array)
    if not jax.tree.leaves(arrays):
        return eqx.filter_eval_shape(change, model)
    changed, rest = eqx.partition(change(model), eqx.is_array)
    return eqx.combine(jax.device_put(changed, shardings(plan.parameter_specs(changed), plan.mesh)), rest)


def _times(mixer: nn.Mixer, plan: Plan) -> int:
    """How many devices share each of a mixer's key heads."""
    kv_heads, devices = size_of(mixer, "kv_heads"), plan.size(TENSOR)
    if not is_split(mixer) or kv_heads is None or kv_heads >= devices or devices % kv_heads:
        return 1
    return devices // kv_heads


def _is_mixer(node: object) -> bool:
    return isinstance(node, nn.Mixer)


def _is_of_maps(node: PyTree, names: PyTree) -> bool:
    """Whether a node is no mixer, or an attention that has nothing for each head but its maps."""
    if not _is_mixer(node):
        return True
    rest = jax.tree.map(lambda one, names: "" if nn.is_map(one) else str(names), node, names, is_leaf=nn.is_map)
    if not isinstance(node, nn.Attention) or node.score_bias:
        return False
    return not {"heads", "kv_heads"} & set(" ".join(jax.tree.leaves(rest)).split())
