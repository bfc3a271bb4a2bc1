"""What attends to all that a cache holds for the newest token of each row."""

from typing import Any

from jaxtyping import Array, Float

from .._cache import KVCache
from ..cores._cached import attend_cached
from ..cores._cached_read import Held
from ..cores._contract import Core


def reader_of(
    core: Core,
    cache: KVCache | None,
    key: Float[Array, "*batch kv_seq kv_heads head_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
) -> tuple[Any, dict[str, Any]]:
    """What computes attention, and the keys and values that it is called with.

    With a cache, of which `key` and `value` are all that it holds, one query a row is attended for. Cores leave that to
    the kernels of the platforms, which read what is stored as it is: of 8 bits scores are multiplied, not keys and
    values. A core that does not computes itself, but of 8 bits where blocks may stand in for it.
    """
    given: dict[str, Any] = {"key": key, "value": value}
    if cache is None or not (core.leaves_caches() if cache.key_scales is None else core.ring_block()):
        return core, given
    held = Held(cache.layer, cache.keys, cache.values, key_scales=cache.key_scales, value_scales=cache.value_scales)
    return attend_cached, (given if cache.key_scales is None else cache.scaled()) | {"held": held}
