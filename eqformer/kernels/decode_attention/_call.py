"""The record of one attention of few queries to a cache, and where the cache holds its arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int, Num

from ..._array_checks import checked_fields
from ..attention._reference import RotatedChannels


class StoredArrays(NamedTuple):
    """The keys and values of a call as the cache stores them: heads before slots; latents have no dim of heads."""

    layer: Int[Array, ""] | None
    """The layer to read, if the arrays have a dim of layers in front; None: they are one layer's."""
    key: Num[Array, "*layers_batch kv_seq head_dim"]
    """The keys."""
    value: Num[Array, "*layers_batch kv_seq v_dim"] | None = None
    """None: the keys are the values."""
    rotated: Num[Array, "*layers_batch kv_seq rope_dim"] | None = None
    """The rotated channels of the keys; None: they are not stored."""
    key_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """The scales of the keys, by head; None: they are not stored, or there are none."""
    value_scales: Float[Array, "*layers_batch kv_heads kv_seq"] | None = None
    """The scales of the values, by head; None: they are not stored, or there are none."""


@checked_fields
class DecodeCall(eqx.Module):
    """The arguments of an attention of few queries to a cache; kernels take one query a row."""

    query: Float[Array, "*batch seq heads head_dim"]
    """The queries."""
    key: Num[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys; keys of 8 bits have `key_scales`."""
    value: Num[Array, "*batch kv_seq kv_heads v_dim"] | None
    """The values; None: the keys with their scales are the values, as latents are, and are read once."""
    visible: Bool[Array, "*#batch seq kv_seq"] = eqx.field(kw_only=True)
    """Whether a query sees a key."""
    scale: float = eqx.field(kw_only=True, static=True)
    """The factor of the scores."""
    softcap: float | None = eqx.field(kw_only=True, static=True, default=None)
    """The bound of the scores; None: no bound."""
    sinks: Float[Array, "heads"] | None = eqx.field(kw_only=True, default=None)
    """One score a head that joins the softmax; None: no sinks."""
    bias: Float[Array, "*#batch heads seq kv_seq"] | None = eqx.field(kw_only=True, default=None)
    """Numbers that are added to the scores; None: nothing."""
    key_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the keys; None: 1."""
    value_scales: Float[Array, "*batch kv_seq kv_heads"] | None = eqx.field(kw_only=True, default=None)
    """Factors of the values; None: 1."""
    rotated: RotatedChannels | None = eqx.field(kw_only=True, default=None)
    """Further channels of queries and keys; None: there are none."""
    stored: StoredArrays | None = eqx.field(kw_only=True, default=None)
    """The cache that stores the same keys and values. The TPU kernel reads the cache in place, because an array that is
    sliced out of a stack for a kernel would be copied. None: that kernel is not used."""

    operation = "decode attention"

    def describe(self) -> str:
        """Return shapes and dtypes for an error message."""
        return f"query {self.query.dtype}{list(self.query.shape)} and key {self.key.dtype}{list(self.key.shape)}"


class ScoreSettings(NamedTuple):
    """The static settings of a kernel."""

    scale: float
    softcap: float | None
    interpret: bool = False


def if_given(function: Callable[[Array], Any], array: Array | None) -> Any:
    """Return the function's result, or None for None."""
    return None if array is None else function(array)
