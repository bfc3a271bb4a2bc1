"""Gemma 4 in sizes: those for bytes, and the published ones, as the lab's own code has them."""

from collections.abc import Mapping
from typing import Any

from .._layer_attributes import all_but_every
from ._gemma4_config import Gemma4Config


def _gemma4(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, period: int, **more: Any) -> Gemma4Config:
    given: dict[str, Any] = {"window_layers": all_but_every(period, layers), "logit_softcap": 30.0}
    return Gemma4Config(262_144, embed, layers, heads, kv_heads, mlp, **given | more)


_BYTE: dict[str, Any] = {"window": 64, "window_layers": (0, 1, 2), "head_dim": 16, "global_head_dim": 32}
_BYTE |= {"global_kv_heads": 1, "keys_as_values": True, "theta": 1e5, "max_seq": 512, "bias": True}
_TABLES: dict[str, Any] = {"reading_layers": 4, "widens_reading": True, "input_mlp": 8, "input_vocab": 256}
_TABLES |= _BYTE | {"window_layers": (0, 2, 4, 6), "keys_as_values": False}
_SMALL: dict[str, Any] = {"input_mlp": 256, "max_seq": 131_072}
_LARGE: dict[str, Any] = {"keys_as_values": True, "window": 1024}
_EXPERTS: dict[str, Any] = {"experts": 128, "top_k": 8, "expert_mlp": 704}
PRESETS: Mapping[str, Gemma4Config] = {
    "gemma4-byte-500k": Gemma4Config(256, 64, 4, 4, 2, 128, **_BYTE, experts=12, top_k=4, expert_mlp=16),
    "gemma4-e-byte-400k": Gemma4Config(256, 64, 8, 4, 1, 96, **_TABLES),
    "gemma4-e2b": _gemma4(1536, 35, 8, 1, 6144, 5, global_kv_heads=1, reading_layers=20, widens_reading=True, **_SMALL),
    "gemma4-e4b": _gemma4(2560, 42, 8, 2, 10_240, 6, global_kv_heads=2, reading_layers=18, **_SMALL),
    "gemma4-26b-a4b": _gemma4(2816, 30, 16, 8, 2112, 6, global_kv_heads=2, **_LARGE, **_EXPERTS),
    "gemma4-31b": _gemma4(5376, 60, 32, 16, 21_504, 6, global_kv_heads=4, **_LARGE),
}
