"""What a newest token of each row reads of a cache, as the kernels of the platforms are given it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Num

from ._core import Rotated


class Read(NamedTuple):
    """What single tokens attend to: the arrays of a call of `ReferenceCore`."""

    query: Float[Array, "*batch 1 heads head_dim"]
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    value: Num[Array, "*batch kv_seq kv_heads v_dim"] | None
    """None: the keys are the values."""
    sinks: Float[Array, "heads"] | None = None
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = None
    rotated: Rotated | None = None


class Held(NamedTuple):
    """The keys and values of a call where a cache holds them, heads before slots; latents have no dim of heads."""

    layer: Int[Array, ""] | None
    """Of a stack's arrays, which have a dim of layers in front, the layer that is read."""
    key: Num[Array, "*layers_batch kv_seq head_dim"]
    value: Num[Array, "*layers_batch kv_seq v_dim"] | None = None
    """None: the keys are the values."""
    rotated: Num[Array, "*layers_batch kv_seq rope_dim"] | None = None
    """None: those of the call are held nowhere."""
    key_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """Those of the call, of heads; None: they are held nowhere, or there are none."""
    value_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None


class Rules(NamedTuple):
    """The static settings of a call."""

    scale: float
    softcap: float | None
    interpret: bool = False


def if_given(function: Callable[[Array], Any], array: Array | None) -> Any:
    """The function's result, or None for None."""
    return None if array is None else function(array)
