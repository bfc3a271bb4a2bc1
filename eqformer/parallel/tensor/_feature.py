"""Layers of the `feature` residual stream: every activation is split over features, every map ends in a reduce-scatter.

JAXformer's division: a map holds a slice of the dim that it contracts, so its products are partial sums of all outputs,
which are reduced and scattered over the outputs' first dim. Only attention's few shared keys are ever gathered.
"""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from ..layouts._layout import dim_over
from ..state._gather import gather_module
from ._collective_matmul import matmul_reduce_scatter, Overlap
from ._residual_stream import ResidualStream, SplitLayer
from ._tensor import shares_kv_heads


FEATURE_DIMS = ("embed", "heads", "kv_heads", "mlp", "latent", "q_latent")
"""The dims of activations that are split. `rope_dim` is not, since all heads read the single rotated key."""


class FeatureLinear(nn.LinearWrapper):
    """A map of which this device holds a slice of the inputs; it returns a slice of the outputs' first dim, or all.

    `split_outputs` has for each of the map's arrays the dim, counted from the end, along which the array is split by
    outputs. Such an array is gathered, since partial sums are of all outputs. It is None for other arrays, and for the
    bias, which is added to a slice of the sums.
    """

    scatters: bool = eqx.field(static=True)
    overlap: Overlap = eqx.field(static=True, default="none")
    split_outputs: tuple[int | None, ...] | None = eqx.field(static=True, default=None)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Contract the slices, add them up over the devices, and return this device's outputs."""
        linear = self.inner if self.split_outputs is None else gather_module(self.inner, self.split_outputs)
        outputs = linear.output_shape
        if not self.scatters:
            y = send.psum("whole maps of features", linear.product(x, dtype), TENSOR)
        else:
            rows = x.reshape(*x.shape[: x.ndim - len(linear.inputs)], -1)
            y = matmul_reduce_scatter(
                rows,
                linear.flat_matrix(x.dtype),
                TENSOR,
                scatter="outputs",
                overlap=self.overlap,
                products=self.products,
                name="maps of features",
            )
            y = y.reshape(*y.shape[:-1], -1, *outputs[1:])
        return checkpoint_name(y, "product")  # for remat policies that save it, so that it is not reduced again


class FeatureKeyHead(nn.LinearWrapper):
    """A map to all key heads, of which only the head that this device's query heads share is returned."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the map to one head."""
        return (1, *self.inner.shape[1:])

    @property
    def bias(self) -> None:
        """None: the inner map adds its bias."""

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return this device's head of the inner map's result for all heads."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)


def split_features(module: SplitLayer, shapes: PyTree, specs: PyTree, names: PyTree, stream: ResidualStream) -> PyTree:
    """Return a layer of which every map reduces and scatters, and every norm averages over devices.

    Key heads that the axis does not divide are summed on every device. `shapes`, `specs` and `names` are those of the
    unsplit layer's arrays.
    """

    def split_node(node: PyTree, shape: PyTree, spec: PyTree, name: PyTree) -> PyTree:
        if not nn.is_map(node):
            return stream.split_norm(node) if isinstance(node, nn.Norm) else node
        if not set(node.inputs) & set(FEATURE_DIMS):  # The inputs are replicated here, and the outputs are a slice.
            return node
        return FeatureLinear(node, _scatters(shape), stream.overlap, _split_outputs(node, spec, name))

    is_split_node = lambda node: nn.is_map(node) or isinstance(node, nn.Norm)
    module = jax.tree.map(split_node, module, shapes, specs, names, is_leaf=is_split_node)
    if not shares_kv_heads(shapes):
        return module
    is_map = lambda node: isinstance(node, nn.LinearMap)
    take_head = lambda node: FeatureKeyHead(node) if is_map(node) and node.outputs[0] == "kv_heads" else node
    return jax.tree.map(take_head, module, is_leaf=is_map)


def _scatters(linear: nn.LinearMap) -> bool:
    return linear.outputs[0] in FEATURE_DIMS and linear.output_shape[0] % jax.lax.axis_size(TENSOR) == 0


def _split_outputs(linear: nn.LinearMap, specs: PyTree, names: PyTree) -> tuple[int | None, ...] | None:
    """Return `FeatureLinear.split_outputs`: for each array but the bias its dim of outputs split by `tensor`, or None.

    Returns None for a map without such an array; a pipeline may put a wrapper with other arrays in its place.
    """

    def split_output_dim(x: Array, spec: PartitionSpec, names: str) -> int | None:
        dim, dim_names = dim_over(spec, TENSOR), names.split()
        if x is linear.bias or dim is None or dim_names[dim] not in linear.outputs:
            return None
        return dim - len(dim_names)

    columns = map(jax.tree.structure(linear).flatten_up_to, (linear, specs, names))
    dims = tuple(split_output_dim(*row) for row in zip(*columns, strict=True) if eqx.is_array(row[0]))
    return None if all(dim is None for dim in dims) else dims
